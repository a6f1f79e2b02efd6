"""Contract of dumps: what is written is read back, from JSON lines and from Parquet; reading streams; a mask, a missing
log-prob and an empty response leave tokens out and nothing else; a row that cannot be read is an error that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.logprobs import pairs
from verl_rounding_align.logprobs import tally as tallies
from verl_rounding_align.logprobs.pairs import Pairs


def some(sequences=20, seed=0, **more) -> Pairs:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 30, sequences))])
    rollout = -rng.exponential(size=offsets[-1])
    trainer = rollout + 0.05 * rng.normal(size=offsets[-1])
    return Pairs.of(rollout, trainer, offsets, mask=rng.random(offsets[-1]) < 0.9, **more)


def everything() -> Pairs:
    bare = some()
    return some(
        ids=np.arange(bare.offsets[-1]),
        prompts=np.arange(20),
        advantages=np.linspace(-1, 1, bare.offsets[-1]),
        steps=np.full(20, 3),
    )


def same(a: Pairs, b: Pairs) -> bool:
    return all(
        (x is None and y is None) or np.array_equal(x, y, equal_nan=True)
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.parquet"])
@pytest.mark.parametrize("make", [some, everything])
def test_what_is_written_is_read_back(tmp_path, name, make):
    pairs.write(tmp_path / name, make())
    assert same(pairs.load(tmp_path / name), make())
    changed = make()
    changed.rollout[5] += 1e-9
    assert not same(pairs.load(tmp_path / name), changed)


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path):
    for step in (2, 10, 1):
        pairs.write(tmp_path / f"{step}.jsonl", some(3, seed=step, steps=np.full(3, step)))
    (tmp_path / "notes.txt").write_text("no dump")
    assert pairs.load(tmp_path).steps.tolist() == [1] * 3 + [2] * 3 + [10] * 3


def test_reading_streams(tmp_path):
    """Chunks hold whole sequences and no more than asked for plus one; together they are the dump."""
    whole = some(200)
    pairs.write(tmp_path / "d.jsonl", whole)
    parts = list(pairs.read(tmp_path / "d.jsonl", chunk=100))
    assert len(parts) > 20 and max(p.offsets[-1] for p in parts) < 100 + 30
    assert same(Pairs.concatenate(parts), whole)


def test_the_summary_of_chunks_is_the_summary_of_the_whole(tmp_path):
    valid = some(200).valid()
    one = tallies.Tally().add(valid.rollout - valid.trainer, valid.offsets, valid.positions)
    many = tallies.Tally()
    for at in range(0, len(valid), 7):
        part = valid.select(list(range(at, min(at + 7, len(valid)))))
        many.add(part.rollout - part.trainer, part.offsets, part.positions)
    rows = [vars(tallies.tally_row("x", "none", tally)) for tally in (one, many)]
    # sums of 2,700 of the same numbers, in another order: off by 2,700 * 2^-53 of the sum of sizes, which is 60 times k1's own
    for name, value in rows[0].items():
        assert value == (
            pytest.approx(rows[1][name], rel=1e-10, abs=0) if isinstance(value, (tuple, float)) else rows[1][name]
        )
    assert one.by_size() == many.by_size()
    assert [b["abs_mean"] for b in one.by_position()] == pytest.approx([b["abs_mean"] for b in many.by_position()])


def test_masked_and_missing_tokens_are_left_out_and_counted():
    rollout = np.array([-1.0, np.nan, -2.0, -3.0, -np.inf, -4.0])
    found = Pairs.of(rollout, rollout - 0.5, [0, 3, 5, 6], mask=[1, 1, 0, 0, 1, 1], prompts=np.array([7, 8, 9]))
    assert found.missing == 2
    valid = found.valid()
    assert valid.rollout.tolist() == [-1.0, -4.0] and valid.offsets.tolist() == [0, 1, 2]
    assert valid.prompts.tolist() == [7, 9]
    assert Pairs.of([-1.0] * 4, [-1.0] * 4, [0, 4], mask=[1, 0, 0, 1]).valid().positions.tolist() == [0, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=30))
def test_selection_takes_whole_sequences(chosen):
    whole = everything()
    picked = whole.select(chosen)
    for s, i in enumerate(chosen):
        a, b = slice(*picked.offsets[s : s + 2]), slice(*whole.offsets[i : i + 2])
        assert np.array_equal(picked.trainer[a], whole.trainer[b]) and np.array_equal(picked.ids[a], whole.ids[b])
        assert picked.prompts[s] == whole.prompts[i]
    assert picked.positions[picked.offsets[:-1]].tolist() == [0] * len(chosen)


def row(**changes):
    return {"rollout_log_probs": [-1.0, -2.0], "trainer_log_probs": [-1.0, -2.5], **changes}


NUMBERS = "a number, or null"
BAD = {  # value of the row, what is said of it
    "list": ([1, 2], "[1, 2]: expected an object with rollout_log_probs and trainer_log_probs"),
    "number": (3, "3: expected an object with rollout_log_probs and trainer_log_probs"),
    "null": (None, "null: expected an object with rollout_log_probs and trainer_log_probs"),
    "no trainer": (
        row(trainer_log_probs=None),
        "no trainer_log_probs or old_log_probs; the row has rollout_log_probs, trainer_log_probs",
    ),
    "short": (row(trainer_log_probs=[-1.0]), "rollout_log_probs has 2 entries, trainer_log_probs 1"),
    "long mask": (row(response_mask=[1, 1, 1]), "rollout_log_probs has 2 entries, response_mask 3"),
    "scalar": (row(trainer_log_probs=-1.0), f"trainer_log_probs=-1.0: expected a list, of each token {NUMBERS}"),
    "text": (row(rollout_log_probs="-1"), f'rollout_log_probs="-1": expected a list, of each token {NUMBERS}'),
    "texts": (row(rollout_log_probs=["-1", "-2"]), f'rollout_log_probs[0]="-1": expected {NUMBERS}'),
    "nested": (row(trainer_log_probs=[[-1.0], [-2.0]]), f"trainer_log_probs[0]=[-1.0]: expected {NUMBERS}"),
    "alias": (
        row(trainer_log_probs=None, old_log_probs="x"),
        f'old_log_probs="x": expected a list, of each token {NUMBERS}',
    ),
    "no mask": (row(response_mask=[1, None]), "response_mask[1]=null: expected 0 or 1"),
    "half mask": (row(response_mask=[1.0, 0.5]), "response_mask[1]=0.5: expected 0 or 1"),
    "mask of 2": (row(response_mask=[2, 1]), "response_mask[0]=2: expected 0 or 1"),
    "half id": (row(response_ids=[1.0, 2.5]), "response_ids[1]=2.5: expected a whole number"),
    "named step": (row(step="epoch_1"), 'step="epoch_1": expected a whole number'),
    "NaN step": (row(step=float("nan")), "step=NaN: expected a whole number"),
    "true step": (row(step=True), "step=true: expected a whole number"),
    "half prompt": (row(prompt_length=1.5), "prompt_length=1.5: expected a whole number, 0 or more"),
    "prompt": (row(prompt_length=-1), "prompt_length=-1: expected a whole number, 0 or more"),
    "far": (
        row(rollout_log_probs=[-1.0, -9999.0]),
        "rollout_log_probs[1]=-9999, trainer_log_probs[1]=-2.5: expected less than 300 nats between them; write null for a "
        "log-prob that is missing, 0 in response_mask for a token that does not count",
    ),
}
GOOD = {"mask": {"response_mask": [True, False]}, "step": {"step": 3.0}, "far, masked": {"response_mask": [0, 1]}}
GOOD["far, masked"]["rollout_log_probs"] = [-9999.0, -2.0]
GOOD["missing"] = {"trainer_log_probs": [None, -2.5]}


def parquet(file, *rows):
    """Write rows as they are; those of one file have fields of one type."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(list(rows)), file)


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_read_is_named(tmp_path, name):
    value, message = BAD[name]
    file = tmp_path / "d.jsonl"
    file.write_text(f"{json.dumps(row())}\n\n{json.dumps(value)}\n")
    with pytest.raises(ValueError) as error:
        pairs.load(file)
    assert str(error.value) == f"{file}, line 3: {message}"


@pytest.mark.parametrize("field,value", [("trainer_log_probs", [-1.0, 10**400]), ("step", 10**400)])
def test_an_integer_beyond_any_float_is_named(tmp_path, field, value):
    """JSON has integers of any size, numpy has not."""
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row(**{field: value})))
    where = {"trainer_log_probs": r"trainer_log_probs\[1\]", "step": "step"}[field]
    with pytest.raises(ValueError, match=rf"line 1: {where}=10+\.\.\.: expected a (number, or null|whole number)"):
        pairs.load(file)


@pytest.mark.parametrize("name", [name for name, (value, _) in BAD.items() if isinstance(value, dict)])
def test_a_row_of_parquet_that_cannot_be_read_is_named(tmp_path, name):
    value, message = BAD[name]
    file = tmp_path / "d.parquet"
    parquet(file, value)
    with pytest.raises(ValueError) as error:
        pairs.load(file)
    assert (
        str(error.value) == f"{file}, row 1: {message.replace('=null', '=NaN')}"
    )  # Arrow has whole numbers and nulls as fp64


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("suffix", pairs.SUFFIXES)
def test_a_legal_value_is_read(tmp_path, name, suffix):
    file = tmp_path / f"d{suffix}"
    if suffix == ".parquet":
        parquet(file, row(**GOOD[name]))
    else:
        file.write_text(json.dumps(row(**GOOD[name])))
    found = pairs.load(file)
    assert found.mask.tolist() == [bool(x) for x in GOOD[name].get("response_mask", [1, 1])]
    assert found.missing == (name == "missing") and (found.steps is None) == (name != "step")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, x]", "not JSON: Expecting value: line 1 column 5 (char 4)"),
        ('{"uid": "é"}'.encode("latin-1"), "not UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 9"),
    ],
)
def test_a_line_that_is_not_json_is_named(tmp_path, content, message):
    file = tmp_path / "d.jsonl"
    file.write_bytes(json.dumps(row()).encode() + b"\n" + content)
    with pytest.raises(ValueError) as error:
        pairs.load(file)
    assert str(error.value).startswith(f"{file}, line 2: {message}")
    (tmp_path / "d.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="d.parquet, after row 0: cannot be read as Parquet"):
        pairs.load(tmp_path / "d.parquet")


def test_utf_8_is_read_whatever_the_locale_and_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_bytes(json.dumps(row(uid="é"), ensure_ascii=False).encode("utf-8-sig"))
    code = "import sys; from verl_rounding_align.logprobs import pairs; print(len(pairs.load(sys.argv[1]))); open(sys.argv[1]).read()"
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], env={**os.environ, **plain}, capture_output=True, text=True
    )
    assert done.stdout == "1\n" and "'ascii' codec can't decode" in done.stderr  # the locale's encoding could not


def test_log_probs_that_are_far_apart_are_said_without_warnings(tmp_path, recwarn):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row(rollout_log_probs=[-1.0, -301.5], trainer_log_probs=[-np.inf, -1.0])))
    with pytest.raises(ValueError, match="expected less than 300 nats"):
        pairs.load(file)
    file.write_text(json.dumps(row(rollout_log_probs=[-np.inf, -301.5], trainer_log_probs=[-np.inf, -2.0])))
    valid = pairs.load(file).valid()
    assert np.isfinite(tallies.Tally().add(valid.rollout - valid.trainer, valid.offsets).column("k3") ** 2).all()
    assert not recwarn.list


# ---- Parquet: how much is decoded at a time, and what


@pytest.mark.parametrize("size", [1, 100, 10_000, pairs.BATCH])
def test_the_size_of_a_batch_does_not_matter(tmp_path, monkeypatch, size):
    pairs.write(tmp_path / "d.parquet", [everything(), everything().select(range(7))])
    whole = Pairs.concatenate([everything(), everything().select(range(7))])
    monkeypatch.setattr(pairs, "BATCH", size)
    assert same(pairs.load(tmp_path / "d.parquet"), whole)
    whole.trainer[3] += 1e-9
    assert not same(pairs.load(tmp_path / "d.parquet"), whole)


def test_long_rows_come_in_small_batches(tmp_path, monkeypatch):
    from pyarrow import parquet as arrow

    asked, iterate = [], arrow.ParquetFile.iter_batches
    monkeypatch.setattr(
        arrow.ParquetFile, "iter_batches", lambda self, n, **more: asked.append(n) or iterate(self, n, **more)
    )
    for length in (16_384, 64):
        one = np.zeros(8 * length)
        pairs.write(tmp_path / "d.parquet", Pairs.of(one, one, np.arange(0, len(one) + 1, length)))
        assert len(pairs.load(tmp_path / "d.parquet")) == 8
    assert asked == [pairs.BATCH // (3 * 8 * length) for length in (16_384, 64)]  # log-probs of both sides, and a mask


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed", "float32", "null rows"])
def test_every_kind_of_list_is_read(tmp_path, kind):
    import pyarrow
    from pyarrow import parquet as arrow

    of = pyarrow.float32() if kind == "float32" else pyarrow.float64()
    lists = {"large_list": pyarrow.large_list(of), "fixed": pyarrow.list_(of, 2)}.get(kind, pyarrow.list_(of))
    values = [[-1.0, -2.0], [-3.0, None], [-5.0, -6.0]]
    other = [None if kind == "null rows" else v for v in values[:1]] + values[1:]
    table = {"rollout_log_probs": values, "trainer_log_probs": other, "old_log_probs": values}
    table = {name: pyarrow.array(column, lists) for name, column in table.items()}
    arrow.write_table(
        pyarrow.table({**table, "uid": ["a", "b", "c"], "other": [[{"x": 1}]] * 3}), tmp_path / "d.parquet"
    )
    found = pairs.load(tmp_path / "d.parquet")
    want = [-1.0, -2.0, -3.0, np.nan, -5.0, -6.0]
    np.testing.assert_array_equal(found.rollout, want)
    np.testing.assert_array_equal(found.trainer, want)
    assert found.offsets.tolist() == [0, 2, 4, 6]


def test_fields_that_are_not_known_are_not_decoded(tmp_path, monkeypatch):
    seen, values = [], pairs._values
    monkeypatch.setattr(pairs, "_values", lambda column: seen.append(str(column.type)) or values(column))
    parquet(tmp_path / "d.parquet", row(input="long", junk=[[1.0]], step=1, uid="a"))
    assert pairs.load(tmp_path / "d.parquet").steps.tolist() == [1]
    assert seen == ["list<element: double>", "list<element: double>", "int64"]
    parquet(tmp_path / "d.parquet", {"input": "a", "output": "b", "score": 1.0})
    with pytest.raises(
        ValueError, match="the row has input, output, score; verl's own rollout dumps hold no log-probs"
    ):
        pairs.load(tmp_path / "d.parquet")


def test_verls_names_are_read_and_a_dump_without_log_probs_says_how_to_get_them(tmp_path):
    file = tmp_path / "1.jsonl"
    verl = {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1}
    file.write_text(json.dumps(verl | {"rollout_log_probs": [-1.0], "old_log_probs": [-1.5]}) + "\n")
    assert pairs.load(file).trainer.tolist() == [-1.5]
    file.write_text(json.dumps(verl) + "\n")
    with pytest.raises(ValueError, match="verl's own rollout dumps hold no log-probs: run verl with this package"):
        pairs.load(file)


def test_no_dump_is_an_error(tmp_path):
    with pytest.raises(ValueError) as error:
        pairs.load(tmp_path)
    assert str(error.value) == f"{tmp_path}: no dump: expected a .jsonl or .parquet file, or a folder with such files"
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="not one response token in it"):
        pairs.load(tmp_path)
    with pytest.raises(ValueError, match="a dump's name ends with .jsonl or .parquet"):
        pairs.write(tmp_path / "d.csv", some())


def test_the_command_summarises_a_dump(tmp_path):
    dump = some(50)
    pairs.write(tmp_path / "d.parquet", dump)
    done = CliRunner().invoke(
        cli.app, ["gap", "score", str(tmp_path / "d.parquet"), "--json", str(tmp_path / "s.json")]
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "s.json").read_text())
    d = (dump.rollout - dump.trainer)[dump.mask]
    assert found["row"]["tokens"] == len(d) and found["masked"] == int((~dump.mask).sum()) and found["nonfinite"] == 0
    assert found["row"]["k3"][0] == pytest.approx((np.exp(-d) + d - 1).mean())
    assert found["row"]["k1"][0] == pytest.approx(d.mean())
    assert f"{len(d):,} tokens in 50 sequences" in done.output
    jsonschema.validate(
        found, json.loads((resources.files("verl_rounding_align.gap") / "score.schema.json").read_text())
    )
    CliRunner().invoke(cli.app, ["gap", "score", str(tmp_path / "d.parquet"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "report.html").read_text().count("<img ") == 2


def test_a_dump_of_masked_tokens_is_an_error_not_a_zero(tmp_path):
    whole = some(5)
    pairs.write(
        tmp_path / "d.jsonl", Pairs.of(whole.rollout, whole.trainer, whole.offsets, mask=np.zeros(len(whole.mask)))
    )
    done = CliRunner().invoke(cli.app, ["gap", "score", str(tmp_path / "d.jsonl")])
    assert str(done.exception) == (
        f"{tmp_path / 'd.jsonl'}: not one token that counts has two finite log-probs (0 have not, {len(whole.mask)} masked)"
    )
