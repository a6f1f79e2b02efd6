"""The reward of the quickstart's task, in the form that verl calls (`reward.custom_reward_function`)."""

RESPONSE_LENGTH = 8


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None, **kwargs) -> float:
    """Share of RESPONSE_LENGTH characters that are the digit asked for; what a shorter response lacks is wrong."""
    return solution_str.count(ground_truth) / RESPONSE_LENGTH
