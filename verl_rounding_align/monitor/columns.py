"""The columns that this package adds to a framework's rollout dump, one row per sequence.

`verl-rounding-align gap score` and `triage` read them. A log-prob that is not finite stays as it is, and Python's json
writes it as NaN or Infinity.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from .monitor import Missing

COLUMNS = {
    "rollout_log_probs": "log-probs that the engine returned, one per response token",
    "trainer_log_probs": "log-probs under the trainer before the update, one per response token",
    "response_mask": "1 on the tokens that the mismatch metrics count, else 0",
    "loss_mask": "1 on the tokens of the loss, after rejection, else 0",
    "response_ids": "token ids of the response",
    "prompt_length": "number of tokens of the prompt",
    "advantages": "advantages, one per response token",
}
_MASKS = ("response_mask", "loss_mask")


class DumpColumns:
    """The columns of one step's sequences, each under the sequence's own key.

    >>> columns = DumpColumns()
    >>> columns.keep_masks(["a"], [[True, True]])  # before a correction rejects tokens
    >>> columns.fill(["a"], loss_mask=[[1, 0]], rollout_log_probs=[[-1.0, -2.0]], trainer_log_probs=[[-1.0, -2.5]])
    >>> columns.join(["a"])["response_mask"], columns.join(["a"])["loss_mask"]
    ([[1, 1]], [[1, 0]])
    """

    def __init__(self):
        self._masks: dict[Hashable, list] = {}
        self._rows: dict[Hashable, dict] = {}

    def __bool__(self) -> bool:
        """Return whether there are columns to join."""
        return bool(self._rows)

    def keep_masks(self, keys: Iterable[Hashable], masks: Iterable[Sequence]) -> None:
        """Remember response masks as they are before a correction rejects tokens.

        Args:
            keys: of the sequences.
            masks: one list per sequence, one flag per response token.
        """
        self._masks |= dict(zip(keys, masks, strict=True))

    def fill(self, keys: Sequence[Hashable], *, loss_mask: Sequence[Sequence], **fields: Sequence) -> None:
        """Take the columns of a step in place of those before.

        ``response_mask`` is what :meth:`keep_masks` remembered of a sequence, else its ``loss_mask``.

        Args:
            keys: of the sequences.
            loss_mask: one list per sequence, one flag per response token.
            fields: other names of ``COLUMNS``. Each has one list per sequence with one number per response token, and
                ``prompt_length`` has one number per sequence.

        Raises:
            Missing: the fields of a sequence differ in length, or a field has not one entry per sequence.
        """
        self._rows = {}
        unknown = sorted(set(fields) - set(COLUMNS) | {"response_mask"} & set(fields))
        if unknown:
            raise TypeError(f"no column of a dump: {', '.join(unknown)}")
        fields = {**fields, "loss_mask": loss_mask}
        counts = {name: len(values) for name, values in fields.items()}
        if set(counts.values()) != {len(keys)}:
            raise Missing(f"the fields do not have one entry for each of {len(keys)} sequences: {counts}")
        fields["response_mask"] = [self._masks.get(key, own) for key, own in zip(keys, loss_mask, strict=True)]
        for name in _MASKS:
            fields[name] = [[int(flag) for flag in row] for row in fields[name]]
        rows = {}
        for i, key in enumerate(keys):
            rows[key] = {name: fields[name][i] for name in COLUMNS if name in fields}
            lengths = {name: len(values) for name, values in rows[key].items() if name != "prompt_length"}
            if len(set(lengths.values())) != 1:
                raise Missing(f"the fields of sequence {key} differ in length: {lengths}")
        self._rows = rows

    def join(self, keys: Iterable[Hashable]) -> dict[str, list]:
        """Return column -> one value per sequence, in the order of ``keys``.

        Raises:
            Missing: a key is not of the sequences that were filled in.
        """
        keys = list(keys)
        unknown = [key for key in keys if key not in self._rows]
        if unknown:
            raise Missing(f"its rows are not the batch's sequences: {unknown[0]}")
        rows = [self._rows[key] for key in keys]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def clear(self) -> None:
        """Forget columns and masks."""
        self._masks, self._rows = {}, {}
