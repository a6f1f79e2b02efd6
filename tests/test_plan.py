"""Contract of the plan: a config value and an engine give one frozen, printable plan that moves exactly the points of the
groups asked for; every illegal value is an error with key, value and legal choices; a preset is found for the rollout
as it will run, or that is an error too."""

from __future__ import annotations

import doctest
import importlib
from itertools import chain, combinations
from pathlib import Path

import pytest

from verl_rounding_align import parse_plan
from verl_rounding_align.engines import presets as presets_module
from verl_rounding_align.engines.presets import PRESETS, UNPROVEN, resolve
from verl_rounding_align.regions import GROUPS, KINDS, REGIONS

KEY = "actor_rollout_ref.actor.rounding_align"
CHOICES = "none, rope, swiglu, add_rms_norm, carry, paper, all, auto"
GROUP_SETS = list(chain.from_iterable(combinations(GROUPS, n) for n in range(1, len(GROUPS) + 1)))


@pytest.mark.parametrize("engine", PRESETS)
@pytest.mark.parametrize("groups", GROUP_SETS, ids="+".join)
def test_a_plan_moves_the_points_of_its_groups_and_no_others(groups, engine):
    plan = parse_plan("+".join(groups), engine=engine)
    assert plan.groups == groups and plan
    for kind, region in KINDS.items():
        moved = {p for g in groups if GROUPS[g].region == region for p in GROUPS[g].points}
        rounding = plan.rounding(kind)
        if not moved:
            assert rounding is None
            continue
        for point in REGIONS[region].points:
            source = PRESETS[engine] if point in moved else PRESETS["hf_eager"]
            assert rounding.stores(point) == (point in source.points[kind]), (kind, point)


def test_groups_cover_every_point_once():
    covered = [(group.region, point) for group in GROUPS.values() for point in group.points]
    assert sorted(covered) == sorted((r.name, p) for r in REGIONS.values() for p in r.points)


@pytest.mark.parametrize("value", ["rope+swiglu", ["swiglu", "rope"], "swiglu + rope", {"regions": "rope+swiglu"}])
def test_spellings_of_one_plan(value):
    assert parse_plan(value) == parse_plan("rope+swiglu")
    assert str(parse_plan(value)) == "rope+swiglu: hf_eager -> vllm_compiled"


@pytest.mark.parametrize("value", [None, "none", ["none"], {"regions": "none"}])
def test_none_is_an_empty_plan(value):
    plan = parse_plan(value)
    assert not plan and plan.roundings == () and str(plan) == "none"


def test_paper_is_the_three_regions_of_the_paper():
    assert parse_plan("paper").groups == ("rope", "swiglu", "add_rms_norm")


@pytest.mark.parametrize("engine", PRESETS)
def test_all_leaves_out_what_is_unproven_and_its_own_name_brings_it_in(engine):
    unproven = {g for g, evidence in PRESETS[engine].evidence.items() if evidence == UNPROVEN}
    assert set(parse_plan("all", engine=engine).groups) == set(GROUPS) - unproven
    assert set(parse_plan("+".join(GROUPS), engine=engine).groups) == set(GROUPS)
    assert bool(unproven) == (engine == "vllm_compiled_split")


def test_the_backend_field_of_a_mapping_is_kept():
    assert parse_plan("rope").backend == "auto"
    assert parse_plan({"regions": "rope", "backend": "eager"}).backend == "eager"


def test_the_engine_field_of_a_mapping_wins():
    assert parse_plan({"regions": "rope", "engine": "vllm_cpu"}, engine="fp32").engine == "vllm_cpu"


@pytest.mark.parametrize(
    "value,message",
    [
        ("ropee", f"{KEY}='ropee': unknown region 'ropee'; choose from {CHOICES} (join with +)"),
        ("rope+", f"{KEY}='rope+': unknown region ''; choose from {CHOICES} (join with +)"),
        ("", f"{KEY}='': unknown region ''; choose from {CHOICES} (join with +)"),
        (["rope", "RoPE"], f"{KEY}=['rope', 'RoPE']: unknown region 'RoPE'; choose from {CHOICES} (join with +)"),
        ("none+rope", f"{KEY}='none+rope': 'none' cannot be joined with another region"),
        (True, f"{KEY}=True: expected a name, names joined with +, or a list of names from {CHOICES}"),
        ([1], f"{KEY}=[1]: expected a name, names joined with +, or a list of names from {CHOICES}"),
        (
            {"regions": "rope", "engin": "x"},
            f"{KEY}={{'regions': 'rope', 'engin': 'x'}}: unknown field 'engin'; a mapping has regions and optionally "
            "engine, backend",
        ),
        (
            {"engine": "fp32"},
            f"{KEY}={{'engine': 'fp32'}}: no field 'regions'; a mapping has regions and optionally engine, backend",
        ),
        (
            {"regions": "rope", "backend": "triton"},
            f"{KEY}.backend='triton': unknown backend 'triton'; choose from auto, compile, eager",
        ),
        (
            {"regions": "rope", "engine": "sglang"},
            f"{KEY}.regions engine='sglang': unknown engine preset 'sglang'; choose from {', '.join(PRESETS)}",
        ),
    ],
)
def test_illegal_values_are_errors(value, message):
    with pytest.raises(ValueError) as error:
        parse_plan(value, key=KEY)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "version,device,eager,name",
    [
        ("0.30.0", "cpu", False, "vllm_compiled"),
        ("0.30.0+cpu", "cpu", True, "vllm_cpu"),
        ("0.28.0", "cpu", False, "vllm_compiled"),
        ("0.32.0+cpu", "cpu", True, "vllm_cpu"),
        ("0.30.0", "cuda", False, "vllm_compiled_split"),
        ("0.33.0", "cuda", True, "vllm_cuda"),
        ("0.24.0", "cuda", True, "vllm_cuda"),
        ("0.23.0", "cuda", True, "vllm_cuda_0_23"),
        ("0.22.1", "cuda", True, "vllm_cuda_0_20"),
        ("0.20.0rc1", "cuda", True, "vllm_cuda_0_20"),
        ("0.19.1", "cuda", True, "vllm_cuda_0_19"),
        ("0.8.5.post1", "cuda", True, "vllm_cuda_0_19"),
    ],
)
def test_a_rollout_gets_its_preset(version, device, eager, name):
    assert resolve("vllm", version, device, eager).name == name


@pytest.mark.parametrize(
    "args,message",
    [
        (
            ("sglang", "0.5", "cuda", True),
            "rollout.name='sglang': no rounding preset for this rollout engine; choose from vllm",
        ),
        (
            ("vllm", "0.30.0", "npu", False),
            "rollout.name='vllm': no rounding preset for vllm (compiled) on device 'npu'",
        ),
        (
            ("vllm", "0.34.0", "cuda", True),
            "rollout.name='vllm': no rounding preset for vllm 0.34.0 (eager, cuda); releases covered: 0.24.0 to 0.33.0, "
            "0.23.0 to 0.23.0, 0.20.0 to 0.22.1, 0.8.5 to 0.19.1",
        ),
        (
            ("vllm", "0.8.4", "cpu", False),
            "rollout.name='vllm': no rounding preset for vllm 0.8.4 (compiled, cpu); releases covered: 0.28.0 to 0.32.0",
        ),
    ],
)
def test_a_rollout_without_a_preset_is_an_error(args, message):
    with pytest.raises(ValueError) as error:
        resolve(*args)
    assert str(error.value) == message


def test_every_row_names_its_source_and_no_two_rows_claim_one_rollout():
    rows = [p for p in PRESETS.values() if p.engine]
    assert all(p.source for p in PRESETS.values())
    for version in ("0.8.5", "0.15.0", "0.19.1", "0.20.0", "0.22.1", "0.23.0", "0.24.0", "0.28.0", "0.32.0", "0.33.0"):
        for device, eager in [("cuda", True), ("cuda", False), ("cpu", True), ("cpu", False)]:
            matching = [p for p in rows if (p.device, p.eager) == (device, eager) and p.covers(version)]
            assert len(matching) == (device == "cuda" or version in ("0.28.0", "0.32.0")), (version, device, eager)


PACKAGE = Path(importlib.import_module("verl_rounding_align").__file__).parent
SHOWING = [file.relative_to(PACKAGE.parent) for file in PACKAGE.rglob("*.py") if ">>>" in file.read_text()]


@pytest.mark.parametrize("file", sorted(SHOWING), ids=str)
def test_docstrings_run(file):
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed


def test_a_row_with_an_unknown_point_cannot_be_written():
    with pytest.raises(ValueError) as error:
        presets_module.Preset("x", presets_module._points(mlp="actt"), presets_module._evidence("bitwise"), "test")
    assert str(error.value) == "preset 'x': mlp has no point 'actt'; choose from act"
