"""Contract of dumps: what is written is read back, from JSON lines and from Parquet; reading streams; a mask, a missing
log-prob and an empty response leave tokens out and nothing else; a row that cannot be read is an error that names it."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.measure import pairs
from verl_rounding_align.measure import tally as tallies
from verl_rounding_align.measure.pairs import Pairs


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
    for name, value in rows[0].items():  # sums of the same numbers, in another order
        assert value == (
            pytest.approx(rows[1][name], rel=1e-12) if isinstance(value, (tuple, float)) else rows[1][name]
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, x]", "not JSON: Expecting value: line 1 column 5 (char 4)"),
        (
            row(trainer_log_probs=None),
            "no trainer_log_probs or old_log_probs; the row has rollout_log_probs, trainer_log_probs",
        ),
        (row(trainer_log_probs=[-1.0]), "rollout_log_probs has 2 entries, trainer_log_probs 1"),
        (row(response_mask=[1, 1, 1]), "rollout_log_probs has 2 entries, response_mask 3"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, line, message):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row()) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ValueError) as error:
        pairs.load(file)
    place = "line 2" if isinstance(line, str) else "sequence 2"
    assert str(error.value) == f"{file}, {place}: {message}"


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
    jsonschema.validate(found, json.loads((resources.files(pairs.__package__) / "score.schema.json").read_text()))
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
