"""Write the training and validation files of this recipe: `python prepare_data.py DATA_DIR`.

Training: DAPO-Math-17k, problems with one integer as the answer. Its published file repeats every problem; each is kept
once. Validation: AIME 2024, 30 problems, likewise. Both come with verl's columns and are scored by verl's own
`math_dapo` reward, which reads the last "Answer:" of a response.
"""

import sys
from pathlib import Path

from datasets import Dataset, load_dataset

TRAIN, VALIDATION = "BytedTsinghua-SIA/DAPO-Math-17k", "BytedTsinghua-SIA/AIME-2024"
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def text(row: dict) -> str:
    """Return a row's problem as the model reads it."""
    return "\n".join(message["content"] for message in row["prompt"])


def unique(rows: Dataset) -> Dataset:
    """Return the rows with each problem once, in order, with verl's columns only.

    Raises:
        ValueError: a column is missing, or a problem comes with two answers.
    """
    missing = [name for name in COLUMNS if name not in rows.column_names]
    if missing:
        raise ValueError(f"columns {missing} are missing; found {rows.column_names}")
    answers, keep = {}, []
    for i, row in enumerate(rows.select_columns(["prompt", "reward_model"])):
        problem, answer = text(row), row["reward_model"]["ground_truth"]
        if problem not in answers:
            answers[problem] = answer
            keep.append(i)
        elif answers[problem] != answer:
            raise ValueError(f"two answers, {answers[problem]!r} and {answer!r}, to: {problem}")
    return rows.select(keep).select_columns(list(COLUMNS))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in ((TRAIN, "train.parquet"), (VALIDATION, "aime2024.parquet")):
        rows = unique(load_dataset(name, split="train"))
        rows.to_parquet(str(folder / file))
        print(f"{folder / file}: {len(rows)} problems from {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
