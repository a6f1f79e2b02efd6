"""Paired log-probs: the same response tokens under the rollout engine and under the trainer, from anywhere.

A *dump* is a file, or a folder of files, with one sequence per line (``.jsonl``) or per row (``.parquet``):

    rollout_log_probs  list of float  required  the engine's log-prob of each response token, natural logarithm
    trainer_log_probs  list of float  required  the trainer's, of the same tokens (verl's name, old_log_probs, is read too)
    response_mask      list of 0/1    optional  tokens that count; without it all do (verl's dump also has loss_mask, what
                                                is left after rejection sampling, which is not read)
    response_ids       list of int    optional  the response tokens
    prompt_length      int            optional  tokens before the response, left padding excluded
    advantages         list of float  optional  as verl's loss takes them
    step               int            optional  training step
    uid                str            optional  any name

Other fields are left alone. So verl's own rollout dumps (``trainer.rollout_data_dir``) are dumps too, as this package adds the
first two fields to them. JSON lines are UTF-8. A log-prob that is missing is null or NaN. The two log-probs of a token that
counts must be less than 300 nats apart, so that k3 can be summed. Reading streams: it takes a chunk of sequences at a time,
whatever the size of the dump.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = (".jsonl", ".parquet")
CHUNK = 200_000  # tokens read at a time
NAMES = {
    "rollout_log_probs": ("rollout_log_probs",),
    "trainer_log_probs": ("trainer_log_probs", "old_log_probs"),
}


class Kind(NamedTuple):
    """What the values of a field may be.

    Args:
        legal: what is legal, in words.
        types: the Python types that JSON may give.
        dtype: what the values are kept in.
        holds: fp64 array -> bool array, which values are legal.
    """

    legal: str
    types: frozenset
    dtype: type
    holds: Callable[[np.ndarray], np.ndarray]


NUMBER = Kind("a number, or null", frozenset({float, int, type(None)}), np.float64, lambda x: np.ones(x.shape, bool))
BIT = Kind("0 or 1", frozenset({float, int, bool}), np.bool_, lambda x: (x == 0) | (x == 1))
WHOLE = Kind("a whole number", frozenset({float, int}), np.int64, lambda x: (x == np.floor(x)) & (np.abs(x) < 2**53))
COUNT = Kind("a whole number, 0 or more", WHOLE.types, np.int64, lambda x: WHOLE.holds(x) & (x >= 0))

PER_TOKEN = {"response_mask": BIT, "response_ids": WHOLE, "advantages": NUMBER}
PER_ROW = {"prompt_length": COUNT, "step": WHOLE}
READ = {*(alias for aliases in NAMES.values() for alias in aliases), *PER_TOKEN, *PER_ROW}
FAR = 300  # nats; exp(300) and its square, which the intervals need, are fp64 numbers
BATCH = 2**22  # bytes of Parquet values decoded at a time, about


@dataclass(frozen=True)
class Pairs:
    """Log-probs of the response tokens of some sequences, one sequence after another.

    Args:
        rollout, trainer: (tokens,) fp64, natural logarithms.
        offsets: (sequences + 1,) int64, where each sequence starts; none is empty.
        mask: (tokens,) bool, tokens that count.
        ids: (tokens,) int64, or None.
        prompts: (sequences,) int64, prompt tokens of each, or None.
        advantages: (tokens,) fp64, or None.
        steps: (sequences,) int64, or None.
        at: (tokens,) int64, position of each token in its response, from 0; None if no token was left out (:meth:`valid`).
    """

    rollout: np.ndarray
    trainer: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray
    ids: np.ndarray | None = None
    prompts: np.ndarray | None = None
    advantages: np.ndarray | None = None
    steps: np.ndarray | None = None
    at: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, rollout, trainer, offsets, mask=None, **more) -> Pairs:
        """Return pairs from arrays of any float dtype; without a mask every token counts."""
        rollout = np.asarray(rollout, dtype=np.float64)
        mask = np.ones(len(rollout), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
        return cls(rollout, np.asarray(trainer, dtype=np.float64), np.asarray(offsets, dtype=np.int64), mask, **more)

    @property
    def missing(self) -> int:
        """Tokens that count but lack a finite log-prob on one side."""
        return int((self.mask & ~self._finite).sum())

    @property
    def _finite(self) -> np.ndarray:
        return np.isfinite(self.rollout) & np.isfinite(self.trainer)

    @property
    def positions(self) -> np.ndarray:
        """Position of each token in its response, from 0; tokens that were left out count too; (tokens,)."""
        if self.at is not None:
            return self.at
        return np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    def valid(self) -> Pairs:
        """Return the tokens that count and have two finite log-probs, without sequences that have none."""
        keep = self.mask & self._finite
        lengths = np.add.reduceat(keep, self.offsets[:-1], dtype=np.int64) if len(self) else np.zeros(0, np.int64)
        some = lengths > 0
        tokens = {n: getattr(self, n) for n in ("rollout", "trainer", "mask", "ids", "advantages")}
        rows = {n: getattr(self, n) for n in ("prompts", "steps")}
        return Pairs(
            offsets=np.concatenate([[0], np.cumsum(lengths[some])]),
            at=self.positions[keep],
            **{n: None if a is None else a[keep] for n, a in tokens.items()},
            **{n: None if a is None else a[some] for n, a in rows.items()},
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Pairs]) -> Pairs:
        """Return several as one; an optional field is kept only if all of them have it."""
        shifts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
        offsets = np.concatenate([[0], *(p.offsets[1:] + shift for p, shift in zip(parts, shifts, strict=False))])

        def join(name):
            arrays = [getattr(part, name) for part in parts]
            return None if any(a is None for a in arrays) else np.concatenate(arrays)

        first = [join("rollout"), join("trainer"), offsets.astype(np.int64), join("mask")]
        return cls(*first, *map(join, ("ids", "prompts", "advantages", "steps", "at")))

    def select(self, sequences: Sequence[int]) -> Pairs:
        """Return some sequences in the order given; a sequence may be given twice."""
        lengths = np.diff(self.offsets)[sequences]
        starts = np.repeat(self.offsets[:-1][sequences], lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = starts + np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        tokens = {n: getattr(self, n) for n in ("rollout", "trainer", "mask", "ids", "advantages", "at")}
        rows = {n: getattr(self, n) for n in ("prompts", "steps")}
        return Pairs(
            offsets=offsets,
            **{n: None if a is None else a[at] for n, a in tokens.items()},
            **{n: None if a is None else a[sequences] for n, a in rows.items()},
        )


def files(path: Path) -> list[Path]:
    """Return the dump's files, in the order of the numbers in their names.

    Raises:
        ValueError: there is none.
    """
    if path.is_dir():
        found = [file for file in path.iterdir() if file.suffix in SUFFIXES]
    else:
        found = [path] if path.suffix in SUFFIXES and path.exists() else []
    if not found:
        raise ValueError(f"{path}: no dump: expected a {' or '.join(SUFFIXES)} file, or a folder with such files")
    return sorted(found, key=lambda f: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", f.name)])


def _rows(file: Path, progress: Callable[[float], None]) -> Iterator[tuple[str, object]]:
    """Return (place, row) of one file, streamed."""
    return (_parquet_rows if file.suffix == ".parquet" else _json_rows)(file, progress)


def _json_rows(file: Path, progress: Callable[[float], None]) -> Iterator[tuple[str, object]]:
    done, size = 0, max(1, file.stat().st_size)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            done += len(line)
            progress(done / size)
            where = f"{file}, line {number}"
            try:
                text = line.decode("utf-8-sig")
                if text.strip():
                    yield where, json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8: {error}") from error
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error


def _parquet_rows(file: Path, progress: Callable[[float], None]) -> Iterator[tuple[str, dict]]:
    """Return (place, row) of one Parquet file, streamed; fields that are not read are None."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{file}: reading Parquet needs pyarrow (pip install pyarrow); or use JSON lines") from error
    number = 0
    try:
        # what has been read is not kept (pre_buffer), and a column's compressed bytes come in pieces (buffer_size)
        with parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as table:
            names = table.schema_arrow.names
            known, rows = [name for name in names if name in READ], max(1, table.metadata.num_rows)
            for batch in table.iter_batches(_batch_size(table.metadata), columns=known, use_threads=False):
                columns = [_values(column) for column in batch.columns]
                for row in zip(*columns, strict=True) if known else [()] * batch.num_rows:
                    number += 1
                    yield f"{file}, row {number}", {**dict.fromkeys(names), **dict(zip(known, row, strict=True))}
                progress(number / rows)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file}, after row {number}: cannot be read as Parquet: {error}") from error


def _batch_size(metadata) -> int:
    """Return how many rows have about ``BATCH`` bytes, with 8 bytes for each value of the columns that are read."""
    most = 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(i) for i in range(group.num_columns)]
        values = sum(c.num_values for c in columns if c.path_in_schema.split(".")[0] in READ)
        most = max(most, 8 * values / max(1, group.num_rows))
    return max(1, int(BATCH / most))


def _values(column) -> list:
    """Return each row's value of an Arrow array: lists of numbers as NumPy arrays, the rest as Python has it."""
    from pyarrow import compute, types

    kind = column.type
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    of = kind.value_type if lists else None
    if not lists or not (types.is_integer(of) or types.is_floating(of) or types.is_boolean(of)):
        return column.to_pylist()
    flat, valid = column.flatten().to_numpy(zero_copy_only=False), column.is_valid().to_numpy(zero_copy_only=False)
    lengths = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    parts = np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
    return [part if there else None for part, there in zip(parts, valid, strict=True)]


def _said(value) -> str:
    """Return a value as an error shows it: as JSON, cut after 60 characters."""
    text = json.dumps(value.item() if isinstance(value, np.generic) else value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _checked(values, kind: Kind, where: str) -> np.ndarray:
    """Return the values of one field of one row; (tokens,) of the kind's dtype.

    Args:
        values: a list from JSON, or an array of numbers.
        where: file, row and field.

    Raises:
        ValueError: no list, or a value that is not of the kind.
    """
    if not isinstance(values, list | np.ndarray):
        raise ValueError(f"{where}={_said(values)}: expected a list, of each token {kind.legal}")
    if isinstance(values, np.ndarray) or set(map(type, values)) <= kind.types:
        try:
            array = np.asarray(values, dtype=np.float64)
            wrong = np.flatnonzero(~kind.holds(array))
        except OverflowError:  # JSON has integers of any size
            wrong = [i for i, value in enumerate(values) if isinstance(value, int) and abs(value) >= 2**1023]
    else:
        wrong = [i for i, value in enumerate(values) if type(value) not in kind.types]
    if len(wrong):
        raise ValueError(f"{where}[{wrong[0]}]={_said(values[wrong[0]])}: expected {kind.legal}")
    return array.astype(kind.dtype, copy=False)


def _sequence(row: object, where: str) -> dict | None:
    """Return one row's arrays; None for a response without tokens.

    Raises:
        ValueError: a required field is missing, a value is not legal, or lengths differ.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {_said(row)}: expected an object with {' and '.join(NAMES)}")
    found = {}
    for name, aliases in NAMES.items():
        alias = next((a for a in aliases if row.get(a) is not None), None)
        if alias is None:
            hint = (
                "; verl's own rollout dumps hold no log-probs: run verl with this package installed and "
                "trainer.rounding_align_metrics not false, and they do"
                if {"input", "output"} <= set(row)
                else ""
            )
            raise ValueError(f"{where}: no {' or '.join(aliases)}; the row has {', '.join(sorted(row))}{hint}")
        found[name] = _checked(row[alias], NUMBER, f"{where}: {alias}")
    length = len(found["rollout_log_probs"])
    for name, kind in PER_TOKEN.items():
        if row.get(name) is not None:
            found[name] = _checked(row[name], kind, f"{where}: {name}")
    wrong = {name: len(values) for name, values in found.items() if len(values) != length}
    if wrong:
        raise ValueError(
            f"{where}: rollout_log_probs has {length} entries, " + ", ".join(f"{k} {v}" for k, v in wrong.items())
        )
    for name, kind in PER_ROW.items():
        value = row.get(name)
        if value is not None:
            if type(value) not in kind.types or abs(value) >= 2**1023 or not kind.holds(np.float64(value)):
                raise ValueError(f"{where}: {name}={_said(value)}: expected {kind.legal}")
            found[name] = int(value)
    _near(found, where)
    return found if length else None


def _near(found: dict, where: str) -> None:
    """Raise a ValueError if the log-probs of a token that counts are so far apart that k3 cannot be summed."""
    rollout, trainer = found["rollout_log_probs"], found["trainer_log_probs"]
    with np.errstate(over="ignore", invalid="ignore"):
        far = np.isfinite(rollout) & np.isfinite(trainer) & ~(np.abs(rollout - trainer) < FAR)
    far = np.flatnonzero(far & found.get("response_mask", True))
    if len(far):
        i = far[0]
        raise ValueError(
            f"{where}: rollout_log_probs[{i}]={rollout[i]:g}, trainer_log_probs[{i}]={trainer[i]:g}: expected less than {FAR} "
            "nats between them; write null for a log-prob that is missing, 0 in response_mask for a token that does not count"
        )


def _pack(rows: list[dict]) -> Pairs:
    def join(name):
        return np.concatenate([r[name] for r in rows]) if all(name in r for r in rows) else None

    def column(name):
        return np.array([r[name] for r in rows]) if all(name in r for r in rows) else None

    lengths = [len(r["rollout_log_probs"]) for r in rows]
    masks = [
        r["response_mask"] if "response_mask" in r else np.ones(n, bool) for r, n in zip(rows, lengths, strict=True)
    ]
    return Pairs(
        join("rollout_log_probs"),
        join("trainer_log_probs"),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate(masks),
        join("response_ids"),
        column("prompt_length"),
        join("advantages"),
        column("step"),
    )


def read(
    path: str | Path, chunk: int = CHUNK, progress: Callable[[float], None] = lambda share: None
) -> Iterator[Pairs]:
    """Yield a dump's sequences, at least ``chunk`` tokens at a time; the last part may have fewer.

    Args:
        progress: called with the share of the dump that is read, 0 to 1.

    Raises:
        ValueError: no dump, or a row that is not as the module's docstring says; the message names file, row, field, the
            value and what is legal.
    """
    rows, tokens, every = [], 0, files(Path(path))
    for i, file in enumerate(every):
        part = lambda share, i=i: progress((i + share) / len(every))  # noqa: E731
        for where, row in _rows(file, part):
            if found := _sequence(row, where):
                rows.append(found)
                tokens += len(found["rollout_log_probs"])
            if tokens >= chunk:
                yield _pack(rows)
                rows, tokens = [], 0
    if rows:
        yield _pack(rows)


def load(path: str | Path) -> Pairs:
    """Return a whole dump.

    Raises:
        ValueError: see :func:`read`; or not one response token in it.
    """
    parts = list(read(path))
    if not parts:
        raise ValueError(f"{path}: not one response token in it")
    return Pairs.concatenate(parts)


def _as_rows(parts: Iterable[Pairs]) -> Iterator[dict]:
    for pairs in parts:
        for s in range(len(pairs)):
            at = slice(pairs.offsets[s], pairs.offsets[s + 1])
            row = {
                "rollout_log_probs": pairs.rollout[at].tolist(),
                "trainer_log_probs": pairs.trainer[at].tolist(),
                "response_mask": pairs.mask[at].astype(int).tolist(),
            }
            more = {"response_ids": pairs.ids, "advantages": pairs.advantages}
            row |= {name: values[at].tolist() for name, values in more.items() if values is not None}
            more = {"prompt_length": pairs.prompts, "step": pairs.steps}
            yield row | {name: int(values[s]) for name, values in more.items() if values is not None}


def write(path: str | Path, parts: Pairs | Iterable[Pairs]) -> None:
    """Write a dump, as JSON lines or Parquet by the name's ending; NaN stands for a missing log-prob.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    parts = [parts] if isinstance(parts, Pairs) else parts
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a dump's name ends with {' or '.join(SUFFIXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in _as_rows(parts))
        return
    import pyarrow
    from pyarrow import parquet

    writer = None
    try:
        for pairs in parts:
            table = pyarrow.Table.from_pylist(list(_as_rows([pairs])))
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer:
            writer.close()
