"""The gap between trainer and engine with fixed weights: measured, attributed to groups and points, and rendered.

rollouts.py   responses from a real engine, kept in a folder
score.py      the trainer's log-probs of them, in several layouts of a batch
arms.py       which rounding points the trainer moves to the engine's
measure.py    one row per arm, and the floors
attribute.py  what closes how much of it: Shapley values
dump.py       the mismatch of log-probs that somebody else has dumped
run.py        the commands
"""
