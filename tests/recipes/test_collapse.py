"""Contract of recipes/collapse: it runs, resumes and repeats itself; every arm is what it says (mismatch zero or not, in the
expected order); stored results have their schema and the page is what they give; outcomes are as the page defines them."""

from __future__ import annotations

import doctest
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2] / "recipes/collapse"
RESULTS = sorted((ROOT / "results").glob("*.json*"))


@pytest.fixture
def recipe(monkeypatch):
    """Import a script of the recipe by its name."""
    monkeypatch.syspath_prepend(ROOT)

    def load(name: str):
        spec = importlib.util.spec_from_file_location(f"collapse_{name}", ROOT / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def row(reward: float, step: int, k3: float = 0.1) -> dict:
    return dict(step=step, reward=reward, k1=k3, k3=k3, differ=1.0, norm=1.0)


def run_of(rewards) -> dict:
    return {"rows": [row(r, 25 * i) for i, r in enumerate(rewards, 1)]}


def test_a_grid_runs_is_resumed_and_is_the_same_every_time(recipe, tmp_path, capsys):
    grid, schemas = recipe("grid"), recipe("schemas")
    out = tmp_path / "smoke.jsonl"
    rows = grid.execute(grid.GRIDS["smoke"], out, workers=1)
    assert [r["arm"] for r in rows] == ["none", "rope", "paper", "all", "same", "tis", "bit"]
    for found in rows:
        jsonschema.validate(found, schemas.RUN)
    assert len({json.dumps(r["rows"]) for r in rows}) == len(rows)  # every arm is another run
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[1:-1]) + lines[-1][:100])  # the first is missing, the last was being written
    again = {r["arm"]: r["rows"] for r in grid.execute(grid.GRIDS["smoke"], out, workers=1)}
    assert again == {r["arm"]: r["rows"] for r in rows}
    assert "5 of 7 runs are there" in capsys.readouterr().out
    k3 = {arm: found[-1]["k3"] for arm, found in again.items()}
    assert k3["same"] == 0 < k3["all"] < k3["none"]


def command(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "grid.py"), *args], capture_output=True, text=True, timeout=600)


def test_the_command_runs_a_grid_on_several_processes_and_shows_it(tmp_path):
    out = tmp_path / "smoke.jsonl"
    done = command("smoke", "--workers", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert len(out.read_text().splitlines()) == 7 and "7 runs; 0 of them repeat" in done.stdout
    assert (tmp_path / "smoke.reward.svg").read_text().startswith("<?xml")
    columns = (tmp_path / "smoke.reward_seeds.svg").read_text()
    assert all(f">{arm} (1)<" in columns for arm in ("none", "rope", "paper", "all", "same", "tis", "bit"))
    assert not (tmp_path / "smoke.widths_seeds.svg").exists()  # one width


def test_the_fast_variant_runs_and_fails_where_alignment_does_not_lower_the_mismatch(tmp_path):
    """Of 10 steps here. Then with the arms of one seed exchanged in what is kept, so that nothing is left to run."""
    out = tmp_path / "fast.jsonl"
    args = ("fast", "--steps", "10", "--workers", "2", "--out", str(out))
    done = command(*args)
    assert done.returncode == 0 and "k3 of `all` is below that of `none` in every seed" in done.stdout, done.stderr
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    for run in runs:
        if run["seed"] == 1:
            run["arm"] = {"none": "all", "all": "none"}[run["arm"]]
    out.write_text("".join(json.dumps(run) + "\n" for run in runs))
    done = command(*args)
    assert done.returncode == 1 and "seed 1: k3 of `all` is" in done.stderr


def test_what_a_run_stores_in(recipe):
    """Values in its bits, gradients in bf16 or, for 0, in its bits too; one more for the arm `bit`."""
    e = recipe("experiment")
    said = [
        str(e.Settings(arm, 3, 2e-3, 0, 1, gradients=g).format) for arm, g in (("none", 8), ("bit", 8), ("none", 0))
    ]
    assert said == ["p3 (gradients bf16)", "p4 (gradients bf16)", "p3"]


def test_a_run_that_diverges_ends_and_counts_as_collapsed(recipe, monkeypatch):
    e, outcome, real = recipe("experiment"), recipe("outcomes").outcome, []
    step = e.Pair.step

    def broken(self, loss):
        real.append(1)
        return step(self, loss * (float("nan") if len(real) == 2 * 27 else 1))  # the last optimizer step of the 27th

    rises = run_of([0.5, 0.5, *[0.9] * 6])
    assert outcome(rises | {"steps": 200})["collapse"] is None
    assert outcome(rises | {"steps": 225})["collapse"] == 200
    settings = e.Settings("none", 3, 2e-3, 0, steps=60, pretrain=2, prompts=2)
    whole = e.run(settings)
    monkeypatch.setattr(e.Pair, "step", broken)
    found = e.run(settings)
    assert [r["step"] for r in found["rows"]] == [25, 26] and found["rows"][0] == whole["rows"][0]
    assert [r["step"] for r in whole["rows"]] == [25, 50, 60]
    assert all(math.isfinite(v) for row in found["rows"] for v in row.values())
    assert outcome(found)["collapse"] == outcome(found)["fall"] == 26


def test_one_more_bit_is_the_unaligned_arm_of_one_more_bit(recipe):
    """What the page takes the arm from; at the same number of bits they differ."""
    e = recipe("experiment")
    rows = {
        (a, b): e.run(e.Settings(a, b, 2e-3, 0, steps=2, pretrain=2))["rows"]
        for a, b in (("bit", 3), ("none", 4), ("none", 3))
    }
    assert rows["bit", 3] == rows["none", 4] != rows["none", 3]


def test_the_only_floor_of_the_aligned_arm_is_kernels_and_order(recipe):
    """With the trainer's attention, decoding with a cache against whole sequences moves few tokens; the kernel moves most."""
    from verl_rounding_align import formats

    e = recipe("experiment")

    def gap(bits, kernel, seed=0):
        e.kernel = kernel
        pair = e.Pair(e.pretrained(seed, 5), e.Settings("all", bits, lr=1e-3, seed=seed, steps=0))
        ids, rollout = pair.sample(e.prompts(32, torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2))
        with torch.no_grad():
            return (e.log_probs(pair.trainer, ids) - rollout).ne(0).float().mean().item()

    stored = e.kernel
    assert gap(4, lambda f: "eager") < 0.2 < 0.5 < gap(4, stored)
    assert gap(4, lambda f: stored(formats.parse("p16"))) < gap(4, stored)


def test_loss_is_verls(recipe):
    """Oracle: verl's own function, clipped on both sides, with and without importance weights."""
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from omegaconf import OmegaConf

    e, g = recipe("experiment"), torch.Generator().manual_seed(0)
    old, new = (torch.randn(40, 5, generator=g) for _ in range(2))
    advantages = torch.randn(40, 1, generator=g).expand(40, 5)
    config = OmegaConf.create(
        dict(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0, global_batch_info={})
    )
    for weights in (None, torch.rand(40, 5, generator=g)):
        expected, _ = core.compute_policy_loss_vanilla(
            old, new, advantages, torch.ones(40, 5), "token-mean", config, weights
        )
        assert torch.allclose(e.policy_loss(new, old, advantages, weights), expected, rtol=1e-6, atol=0)


def test_outcomes_are_as_the_page_defines_them(recipe):
    outcome = recipe("outcomes").outcome
    rises = outcome(run_of([0.5, 0.5, 0.6, 0.6, 0.9, 0.9, 0.9, 0.9]))
    assert rises["collapse"] is None is rises["fall"] and rises["drop"] == 0
    falls = outcome(run_of([0.5, 0.5, 0.9, 0.9, 0.7, 0.7, 0.9, 0.9, 0.7, 0.7, 0.6, 0.6]))
    assert falls["collapse"] == 250 and falls["drop"] == pytest.approx(0.25) and falls["fall"] == 150
    back = outcome(run_of([0.9, 0.9, 0.5, 0.5, 0.85, 0.85, 0.85, 0.85]))
    assert back["collapse"] is None and back["fall"] == 100  # it came back
    just = outcome(run_of([0.75, 0.75, 0.625, 0.625, 0.625, 0.625]))
    assert just["collapse"] == 100


def test_a_picture_has_no_mean_that_lacks_a_run_which_diverged(recipe):
    pictures = recipe("pictures")
    runs = [run_of([0.5, 0.7] * 4), run_of([0.3, 0.3] * 2)]
    curves, steps, values = pictures.over_runs(runs, "reward", 50)
    assert [len(c) for c in curves] == [4, 2] and steps == [50, 100]
    assert values == [(pytest.approx(0.6), pytest.approx(0.3))] * 2
    assert pictures.small_multiples({"none": ("#000000", runs)}, "title").startswith("<?xml")


def test_falls_against_bits_are_fitted_as_poisson_events(recipe):
    """Simulated events with a known factor per bit at 3 to 6 bits: factor and the rate at 8 bits lie in their intervals in
    about 57 of 60 samples, and a factor of 1 (no dependence) in fewer than half."""
    import numpy as np

    model, g, factor = recipe("outcomes").rate_model, np.random.default_rng(0), 0.5
    hits = {"factor": 0, "rate": 0, "no factor": 0}
    for _ in range(60):
        counts = {x: (int(g.poisson(8 * factor ** (x - 3))), 1.0) for x in range(3, 7)}
        (_, low, high), rates = model(counts, at=[8])
        inside = {"factor": math.log(factor), "no factor": 0.0}
        for name, slope in inside.items():
            hits[name] += (low is None or low <= slope) and slope <= high
        _, low, high = rates[8]
        hits["rate"] += (low is None or low <= 8 * factor**5) and 8 * factor**5 <= high
    assert hits["factor"] >= 52 and hits["rate"] >= 52 and hits["no factor"] <= 30, hits


def test_what_counts_do_not_determine_is_no_number(recipe):
    table, model = recipe("table"), recipe("outcomes").rate_model
    slope, rates = model({3: (0, 1.0), 4: (0, 1.0)})
    assert slope == (None, None, None) and rates[3][:2] == (None, None) and 1 < rates[3][2] < 4
    none = [dict(arm="none", bits=3, lr=1.0, seed=0, steps=100, **run_of([0.5, 0.9, 0.9, 0.9]))]
    text = table.falls(none)  # one width, no fall
    assert "| p3 | 1 | 0 in 100 | at least 27 | ? |" in text and "factor of ? [?, ?]" in text
    falls = run_of([0.5, 0.9, 0.5, 0.5])["rows"]
    some = [{**none[0], "bits": b, "rows": falls if b == 3 else none[0]["rows"]} for b in (3, 4, 8)]
    more = [*some, {**none[0], "bits": 8, "seed": 1, "rows": falls}]  # beyond the widths that are fitted
    factor = [table.falls(runs).split("by a factor of ")[1] for runs in (some, more)]
    assert factor[0] == factor[1] and "p8 | 2 | 1 in" in table.falls(more)
    with pytest.raises(ValueError, match="^two runs of none, 3 bits, lr 1.0, seed 0 in one table$"):
        table.table(none * 2)


def test_examples_of_the_recipes_statistics(recipe):
    for name, least in (("outcomes", 8), ("table", 1), ("why_tables", 4)):
        found = doctest.testmod(recipe(name))
        assert found.failed == 0 and found.attempted >= least


def test_what_is_said_about_a_rerun(recipe, capsys):
    """Runs that repeat kept ones in every reward and norm are counted; one number off is not a repeat."""
    table = recipe("table")
    runs = [
        dict(arm=arm, bits=4, lr=2e-3, seed=0, rows=run_of([0.5, 0.5, 0.8, 0.8])["rows"]) for arm in ("none", "all")
    ]
    other = json.loads(json.dumps(runs[1:]))
    other[0]["rows"][0]["norm"] += 1e-9
    table.show(runs, runs)
    table.show(runs[1:], other)
    said = capsys.readouterr().out
    assert "2 runs; 2 of them repeat" in said and "1 runs; 0 of them repeat" in said


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_stored_results_have_their_schema_and_no_run_twice(path, recipe):
    schemas = recipe("schemas")
    if path.suffix == ".json":
        return jsonschema.validate(json.loads(path.read_text()), schemas.OF[path.name])
    names = []
    for line in path.read_text().splitlines():
        found = json.loads(line)
        jsonschema.validate(found, schemas.RUN)
        names.append(tuple(found[n] for n in recipe("experiment").Settings.__dataclass_fields__))
    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("name", ["why.json", "bits.json", "real_engine.json"])
def test_a_result_that_lacks_a_figure_has_not_its_schema(name, recipe):
    found = json.loads((ROOT / "results" / name).read_text())
    rows = found["rows"] if "rows" in found else found["arms"]["all"]
    del rows[-1]["k3"]
    with pytest.raises(jsonschema.ValidationError, match="'k3' is a required property"):
        jsonschema.validate(found, recipe("schemas").OF[name])


def test_the_page_is_what_the_results_give(recipe):
    for path, text in recipe("table").files().items():
        if path.suffix == ".svg":  # differs with the release of matplotlib that draws it
            assert path.exists() and text.startswith("<?xml")
            continue
        assert path.read_text() == text, f"{path.name}: run recipes/collapse/table.py"


# ---- what rounding does to gradients


def test_products_between_batches_are_exact_with_and_without_any_batch(recipe):
    why, g = recipe("why"), torch.Generator().manual_seed(0)
    a, b = (torch.randn(7, 5, generator=g) for _ in range(2))
    found = why.Products(a, b)
    pairs = [(a[i] @ b[j]).item() for i in range(7) for j in range(7) if i != j]
    assert found.mean == pytest.approx(sum(pairs) / 42, rel=1e-5)
    assert found.mean != pytest.approx(float((a @ b.T).mean()), rel=1e-3)  # with b = c noise would count
    for i in range(7):
        rest = [j for j in range(7) if j != i]
        assert found.without[i].item() == pytest.approx(why.Products(a[rest], b[rest]).mean, rel=1e-5)
    assert why.Products(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [3.0]])).mean == pytest.approx(
        11 / 3
    )


def test_a_known_bias_is_found_and_noise_is_none(recipe):
    """An error that is a quarter of each gradient, against it; and one at right angles to all."""
    why, g = recipe("why"), torch.Generator().manual_seed(0)
    gradients = torch.cat([torch.randn(20, 30, generator=g) + 1, torch.zeros(20, 30)], 1)
    found = why.directions(-0.25 * gradients, gradients)
    assert found["cross"] / found["signal2"] == pytest.approx(-0.25) and found["projection_se"] < 1e-7
    assert found["bias2"] == pytest.approx(found["signal2"] / 16)
    away = why.directions(gradients.flip(1), gradients)
    assert away["cross"] == 0 < away["bias2"]
    noise = why.directions(torch.randn(20, 60, generator=g), gradients)
    assert noise["error2"] == pytest.approx(60, rel=0.2) and abs(noise["bias2"]) < 3 * noise["bias2_se"] < 10
    assert noise["bias2_se"] > 0 < noise["projection_se"]


def test_a_digits_departure_is_its_mean_less_that_of_all(recipe):
    why, g = recipe("why"), torch.Generator().manual_seed(0)
    digit = torch.randint(0, 10, (400, 5), generator=g)
    d = torch.randn(400, 5, generator=g) * 0.1 + 0.5 * (digit == 3)
    value, error = why.departure(d, digit == 3, 40)
    assert value == pytest.approx((d[digit == 3].mean() - d.mean()).item(), rel=2e-3) and 0.4 < value < 0.5
    assert 0.003 < error < 0.03
    value, error = why.departure(d, digit == 4, 40)
    assert value < 0 and abs(value) < 0.1
    assert why.departure(d, digit == 11, 40) is None


@pytest.fixture
def start(recipe):
    """A policy with its weights stored at 3 bits, and the format."""
    from verl_rounding_align import formats

    e = recipe("experiment")
    settings, policy = e.Settings("none", 3, 2e-3, 0, steps=0), e.pretrained(0, 3)
    formats.store_parameters(policy, settings.format)
    return policy, settings.format


def test_an_aligned_trainer_has_no_error_and_any_other_has(recipe, start):
    why, (policy, format) = recipe("why"), start
    sampler = why.rounded(policy, "all", format)
    batches = why.drawn(sampler, 1, 3)
    found = why.measure(policy, "all", sampler, batches, format)
    assert {found[n] for n in ("k3", "size", "mean", "bias2", "error2", "cross")} == {0} and found["signal2"] != 0
    for case, regions in why.CASES.items():
        found = why.measure(policy, regions, sampler, batches, format)
        assert found["k3"] > 0 < found["error2"], case


def test_landing_scores_count_what_a_point_stores_and_a_sum_once(recipe, start, monkeypatch):
    """Values all at one place score 1, evenly spread ones 0; a sum that is stored already does not count again."""
    from verl_rounding_align.rounding import Rounding

    why, (policy, format) = recipe("why"), start
    rnd, one = Rounding({"sum", "carry", "act", "qk_norm"}, format), torch.full((64,), 1.0 + 2**-5)
    even = (torch.arange(1 << 16, dtype=torch.int32) * 32 + 0x3F800000).view(torch.float32)

    def forward(policy, ids):
        stored = rnd("sum", even, torch.float32)
        rnd("carry", rnd("sum", stored, torch.float32), torch.float32)
        rnd("act", one, torch.float32)
        rnd("qk_norm", stored, torch.float32)  # no sum: counts, though all of it is stored already
        rnd("normed", one, torch.float32)  # not stored

    monkeypatch.setattr(why.e, "log_probs", forward)
    found = why.scores(policy, 3, None)
    assert found == {
        "add_rms_norm sum": pytest.approx(0, abs=1e-9),
        "carry carry": pytest.approx(0, abs=1e-9),
        "swiglu act": pytest.approx(1),
        "rope qk_norm": pytest.approx(1),
    }
    monkeypatch.undo()
    every = why.scores(why.rounded(policy, "none", format), 3, why.e.prompts(4, torch.Generator().manual_seed(0)))
    assert (
        len(every) == 7
        and every["carry carry"] == every["add_rms_norm sum"]
        and all(0 < x <= 1 for x in every.values())
    )


def test_a_gradient_that_is_not_resolved_has_no_projection(recipe):
    tables = recipe("why_tables")
    row = dict(
        steps=0, region="rope", seed=7, bias2=0.25, bias2_se=0.01, cross=-0.5, signal2=1.0, signal2_se=0.2, projection_se=0.1,
        error2=1.0, gradient2=2.0, is_bias2=0.1, is_signal2=1.0, is_signal2_se=0.5,
    )  # fmt: skip
    said = tables.gradients({"rows": [row]})
    assert "| 0 | rope | +0.25 | -0.50 | -1.00 | 7: -0.50 ± 0.20 | +0.50 | +0.25 |  |" in said
    assert "| 0 | rope |  |  |  |  |  |  |  |" in tables.gradients({"rows": [{**row, "signal2_se": 0.4}]})


# ---- the arm with a real engine


def test_real_engine_has_the_same_task_and_starts_from_the_same_steps(recipe, tmp_path):
    """Prompts are the recipe's ids through the chat template, answers its, weights its pre-training's."""
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    real, e = recipe("real_engine"), recipe("experiment")
    real.PRETRAIN = 3
    real.make_assets(tmp_path, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = pandas.read_parquet(tmp_path / "train.parquet").to_dict("records")
    asked = e.prompts(4096, torch.Generator().manual_seed(1005))
    for row, ids in list(zip(rows, asked, strict=True))[:20]:
        text = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, tokenize=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist()
        truth = row["reward_model"]["ground_truth"]
        assert tokenizer.encode(truth, add_special_tokens=False) == e.answers(ids[None])[0].tolist()
        assert tokenizer.decode(e.answers(ids[None])[0]) == truth
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = e.pretrained(5, 3, head_dim=real.HEAD)
    assert torch.equal(
        e.log_probs(model, torch.cat([asked, asked[:, :5]], 1)),
        e.log_probs(expected, torch.cat([asked, asked[:, :5]], 1)),
    )


def test_real_engines_reward_is_the_recipes(recipe):
    real, e = recipe("real_engine"), recipe("experiment")
    ids = torch.tensor([[1, 2, 3, 4, 5, 10, 5, 4, 0, 2, 1], [1, 2, 3, 4, 5, 10, 5, 11, 3, 2, 0]])
    answers = ["54021", "532" + "0"]  # the second: its end token leaves no text, and what follows moves up
    assert real.compute_score("reverse", answers[0], "54321") == pytest.approx(float(e.rewards(ids)[0])) == 0.8
    assert real.compute_score("reverse", answers[1], "54321") == pytest.approx(0.2)
    assert real.compute_score("reverse", "", "54321") == 0


def test_a_real_run_is_kept_in_whole_windows(recipe):
    real = recipe("real_engine")
    rows = [{"step": s, "reward": 0.01 * s, "k1": 1.0, "k3": 2.0, "norm": 3.0} for s in range(1, 61)]
    first, second = real.averaged(rows)  # of 25 steps; ten are left over
    assert (first["step"], second["step"]) == (25, 50)
    assert (first["reward"], second["reward"]) == (pytest.approx(0.13), pytest.approx(0.38))


def test_the_stored_real_run_has_both_arms_over_the_same_steps(recipe):
    found = json.loads((ROOT / "results/real_engine.json").read_text())
    assert list(found["arms"]) == list(recipe("real_engine").ARMS) and {"verl", "vllm", "torch"} <= set(
        found["versions"]
    )
    steps = [[row["step"] for row in rows] for rows in found["arms"].values()]
    assert steps[0] == steps[1] == list(range(25, found["steps"] + 1, 25))
    for rows in found["arms"].values():
        assert all(0 <= row["reward"] <= 1 and row["k3"] >= 0 for row in rows)
