"""Tools that measure. Each returns rows (dataclasses); ``report`` and ``gap_report`` render them.

    stats        intervals of ratios of sums over sequences: the one place where an interval is made
    tally        k1, k3, |d| from any number of differences; the row of a gap
    pairs        paired log-probs from anywhere: the dump's schema, reading, writing
    rollout      rollouts and what else a real engine says of them, kept in files
    score        the trainer's log-probs, by layout of the batch
    arms         which rounding points an arm moves
    gap          arms, noise floors, exact KL on one folder of rollouts
    attribute    Shapley values of an additive game
    landing      where values land between bf16 neighbours
    triage       causes that are not rounding (facts, weights, rope: what they compare)
    overhead     what alignment costs
    gap_report   sections from the JSON of all of these; pictures
    run_gap, run_triage, score_dump   the commands
    *.schema.json                     what each tool's JSON holds, by version

A new metric of pairs is a column of ``tally``; a new cause is a function and a row in ``triage.CAUSES``; a new floor is a
row in ``gap.FLOORS`` or ``gap.VARIANTS``; a new part of the report is a row in ``gap_report.PARTS``.
"""
