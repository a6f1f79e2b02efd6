"""Contract of the documentation: its tables are what results and code give, the site builds strictly and every link in it leads
somewhere, commands parse, overrides compose with verl's config, Python runs. Nothing is fetched from another host."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import docs_tables
import pytest
import torch
from tiny import tiny, verified
from typer.main import get_command

import docs
from verl_rounding_align import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = docs.pages()
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BUILD = (sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file")  # --quiet would not count warnings


def spans(text: str) -> list[str]:
    """Return the lines of a page's code: of shell and text blocks, and inline."""
    blocks = [
        line.strip() for language, block in FENCE.findall(text) if language != "python" for line in block.splitlines()
    ]
    return blocks + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


# ---- tables


def test_tables_and_picture_are_what_results_and_code_give():
    assert docs.stale() == []


def test_a_changed_figure_would_be_noticed():
    page = "docs/pages/results.md"
    text = TEXTS[page]
    changed = re.sub(r"(\| none \| )(\d)", lambda m: m[1] + str(9 - int(m[2])), text, count=1)
    assert changed != text and docs.filled(changed, lambda name: docs.MEASURED[name]()) == text


def test_a_place_without_a_table_and_a_table_without_a_place_are_errors(monkeypatch):
    reference = docs_tables.tables()
    monkeypatch.setattr(docs_tables, "tables", lambda: {**reference, "nowhere": "x"})
    with pytest.raises(ValueError, match=r"^tables without a place in README\.md or docs/pages: nowhere$"):
        list(docs.files())
    monkeypatch.setattr(docs_tables, "tables", lambda: {k: v for k, v in reference.items() if k != "points"})
    with pytest.raises(ValueError, match=r"^docs/pages/how\.md: no table 'points'; choose from values, "):
        list(docs.files())


def test_the_picture_shows_the_figures_of_the_table():
    drawn = docs.words(docs.PICTURE.read_text())
    arms = docs.results("smollm2_gap/gap")["modes"]["compiled"]["rows"]
    for arm in ("none", "all"):
        (row,) = [row for row in arms if row["arm"] == arm]
        assert any(word.startswith(f"{1e4 * row['k3'][0]:.1f}") for word in drawn), arm


# ---- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([*BUILD, "docs/mkdocs.yml", "--site-dir", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_strictly_with_the_recipes_pages(site):
    for page in PAGES[1:]:
        assert (site / page.relative_to(docs.PAGES)).with_suffix(".html").is_file(), page
    assert (site / "recipes/landing/index.html").is_file() and (site / "recipes/collapse/reward.svg").is_file()


def test_pages_of_the_site_fetch_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=[\"']?(https?:[^\"' >]+)", page.read_text()
        )
        assert fetched == [], page


def test_a_link_to_a_heading_a_page_or_a_file_that_is_not_there_fails_the_build(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in {path.name for path in ROOT.iterdir()} - {"docs", ".git", ".venv"}:
        os.symlink(ROOT / name, tmp_path / name)
    wrong = "\n[a](results.md#no-such-heading) [b](nowhere.md) [c](../../recipes/nothing.sh)\n"
    with (tmp_path / "docs/pages/faq.md").open("a") as page:
        page.write(wrong)
    command = [*BUILD, tmp_path / "docs/mkdocs.yml", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    for target in ("no-such-heading", "nowhere.md", "recipes/nothing.sh"):
        assert target in done.stderr


def external(text: str) -> list[str]:
    """Return the addresses of other hosts that a page names, as they are written."""
    return re.findall(r"\]\((https?:[^)]*)\)", text) + re.findall(r"(?<![(\"\w])https?://\S+", FENCE.sub("", text))


def well_formed(address: str) -> bool:
    """Return whether an address is an https address of a host, with nothing of the sentence around it."""
    parts = urlsplit(address)
    return parts.scheme == "https" and "." in parts.netloc and not re.search(r"[\s,;.)\]]$|\s", address)


def test_addresses_of_other_hosts_are_well_formed():
    found = [address for text in TEXTS.values() for address in external(text)]
    assert len(found) > 15 and [address for address in found if not well_formed(address)] == []
    assert not any(map(well_formed, ("http://a.org/b", "https://a", "https://a.org/b,", "https://a.org/b c")))


# ---- what pages say


def test_scripts_and_files_named_exist():
    found = [
        path
        for text in TEXTS.values()
        for path in re.findall(r"(?:bash |python |`)((?:recipes|ci|tests|verl_rounding_align)/[\w./]+\.\w+)", text)
    ]
    assert len(found) > 30
    assert [path for path in found if not (ROOT / path).exists()] == []


def command_lines() -> list[str]:
    """Return every line of the pages' code that calls the command line."""
    return sorted({line for text in TEXTS.values() for line in spans(text) if line.startswith("verl-rounding-align ")})


def parse(line: str, monkeypatch) -> str:
    """Parse a command line as the application does, without running a command; return what it says of a mistake."""

    def silence(command):
        monkeypatch.setattr(command, "callback", None)
        for sub in getattr(command, "commands", {}).values():
            silence(sub)

    command = get_command(cli.app)
    silence(command)
    try:
        command.main(shlex.split(line, comments=True)[1:], standalone_mode=False)
    except Exception as error:
        return error.format_message()  # of a mistake in the command line; anything else has no such method
    return ""


def test_every_command_line_parses(monkeypatch):
    lines = command_lines()
    assert len(lines) > 25
    wrong = {line: said for line in lines if (said := parse(line, monkeypatch))}
    assert wrong == {}
    assert "No such option: --no-such" in parse("verl-rounding-align gap --no-such", monkeypatch)
    assert "No such command 'gaps'" in parse("verl-rounding-align gaps", monkeypatch)


OVERRIDE = re.compile(r"^\+{0,2}(?:actor_rollout_ref|algorithm|data|trainer|rounding_align)[\w.]*=.+$")
KEY = re.compile(r"^(?:actor_rollout_ref|algorithm|data|trainer)(?:\.\w+)+$")


def overrides() -> list[str]:
    """Return every Hydra override that the pages name, alone or on verl's command line."""
    found = set()
    for text in TEXTS.values():
        for line in spans(text):
            if "verl.trainer.main_ppo" in line:
                words = [word for word in shlex.split(line, comments=True) if "=" in word]
            else:
                words = [line.strip("'")]
            found |= {word for word in words if OVERRIDE.match(word) and "..." not in word}
    return sorted(found)


@pytest.fixture(scope="module")
def compose():
    """Compose verl's trainer config with overrides, as Hydra does at the start of a run."""
    from hydra import compose, initialize_config_dir

    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        yield lambda *words: compose("ppo_trainer", overrides=list(words))


@pytest.mark.verl
def test_every_override_composes_with_verls_config(compose):
    from hydra.errors import ConfigCompositionException

    found = overrides()
    assert "+trainer.rounding_align_metrics=true" in found and len(found) > 4
    for word in found:
        compose(word)
    with pytest.raises(ConfigCompositionException):
        compose("trainer.rounding_align_metrics=true")


@pytest.mark.verl
def test_every_key_named_is_verls_or_this_packages(compose):
    from omegaconf import OmegaConf

    from verl_rounding_align.integrations.verl import KEYS

    config = compose()
    missing = object()

    def known(key: str) -> bool:
        return key in KEYS or OmegaConf.select(config, key, default=missing) is not missing

    named = sorted({line for text in TEXTS.values() for line in spans(text) if KEY.match(line)})
    assert len(named) > 2 and [key for key in named if not known(key)] == []
    assert not known("trainer.rollout_dir")


def python_blocks() -> list:
    """Return the Python blocks that were written for a page; generated ones are parts of tests."""
    found = []
    for page, text in TEXTS.items():
        own = re.sub(r"<!-- (example \w+): .*?<!-- end \1 -->", "", text, flags=re.DOTALL)
        found += [pytest.param(code, id=page) for language, code in FENCE.findall(own) if language == "python"]
    return found


@pytest.mark.parametrize("code", python_blocks())
def test_python_runs(code):
    log_probs = dict(
        trainer_log_probs=-torch.ones(2, 3), rollout_log_probs=-torch.ones(2, 3), response_mask=torch.ones(2, 3)
    )
    found = {"model": tiny("qwen3"), **log_probs}
    exec(code, found)
    alignment = found["alignment"]
    assert alignment.plan.groups == ("rope",)
    alignment.undo()


def test_the_fingerprint_shown_is_a_presets():
    assert str(verified("vllm_compiled")) in " ".join(TEXTS["docs/pages/engines.md"].split())


def test_the_examples_are_functions_of_a_test():
    for name in ("region", "family", "engine", "framework"):
        page = TEXTS[f"docs/pages/adding-{name}.md"]
        assert f"def add_{name}(add) -> None:" in page and "tests/test_rooms.py" in page


# ---- names that pages give

HOMES = {
    "Alignment": "trainers.alignment",
    "Plan": "plan",
    "Preset": "engines.presets",
    "Request": "plan",
    "Rounding": "rounding",
    "Region": "regions",
    "Site": "engines.probe",
}
ROOMS = sorted(path.stem for path in (ROOT / "verl_rounding_align").iterdir() if not path.stem.startswith("_"))
NAME = re.compile(rf"^(?:{'|'.join([*ROOMS, *HOMES])})(?:\.\w+)+(?:\(.*\))?$")


def found(name: str) -> bool:
    """Return whether a dotted name of the package exists: ``plan.parse_request``, ``Plan.as_dict``."""
    first, *rest = name.partition("(")[0].split(".")
    parts = [*HOMES[first].split("."), first, *rest] if first in HOMES else [first, *rest]
    value = importlib.import_module("verl_rounding_align")
    for i, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(["verl_rounding_align", *parts[: i + 1]]))
            except ModuleNotFoundError:
                return False
        value = getattr(value, part)
    return True


def test_names_of_the_package_that_pages_give_exist():
    named = sorted({line for text in TEXTS.values() for line in spans(text) if NAME.match(line) and line[-3:] != ".py"})
    assert len(named) > 8 and [name for name in named if not found(name)] == []
    assert not found("plan.no_such") and not found("Plan.no_such") and not found("engines.nowhere.name")


def test_files_and_tables_of_the_package_that_pages_give_exist():
    package = ROOT / "verl_rounding_align"
    lines = {line for text in TEXTS.values() for line in spans(text)}
    files = {line for line in lines if re.fullmatch(r"[a-z_]+/(?:[\w/]+\.py)?", line)} - {
        "rounding_align/"
    }  # of metrics
    assert len(files) > 10
    assert [file for file in sorted(files) if not (package / file).exists() and not (ROOT / file).exists()] == []
    developers = [text for page, text in TEXTS.items() if "adding-" in page or "rooms" in page]
    constants = {line for text in developers for line in spans(text) if re.fullmatch(r"[A-Z]{5,}", line)}
    source = "\n".join(path.read_text() for path in package.rglob("*.py"))
    assert len(constants) > 5
    assert [name for name in sorted(constants) if not re.search(rf"^{name}\b", source, re.MULTILINE)] == []


# ---- figures in sentences


def test_figures_in_sentences_are_those_of_the_results():
    text = {page: " ".join(text.split()) for page, text in TEXTS.items()}
    pages = "docs/pages/results.md", "docs/pages/cost.md"

    run = docs.results("collapse/real_engine")
    half = run["steps"] / 2

    def k3(arm: str, rows) -> float:
        chosen = [row["k3"] for row in run["arms"][arm] if rows(row["step"])]
        return sum(chosen) / len(chosen)

    first = [k3(arm, lambda step: step <= 50) for arm in ("none", "all")]
    later = [k3(arm, lambda step: step > half) for arm in ("none", "all")]
    assert (
        f"in {run['steps']:,} steps of one seed. That is a null result. The default's mismatch is {first[0] / first[1]:.1f} "
        f"times that of `all` in the first 50 steps ({first[0]:.1e}, {first[1]:.1e}) and {later[0] / later[1]:.0f} times in the "
        f"second halves ({later[0]:.1e}, {later[1]:.1e})"
    ).replace("e-0", "e-") in text[pages[0]]

    shares = [docs.results(f"overhead/shares-{name}")["shares"]["none"] for name in ("smollm2-135m", "qwen3-0.6b")]
    left = sorted(share["matrix products"] + share["attention"] + share["loss"] for share in shares)
    assert f"the loss are {left[0]:.0f} to {left[1]:.0f} % of a pass" in text[pages[1]]
    every = docs.results("overhead/shares-smollm2-135m")
    assert (
        "at the speed of this machine's memory" in text[pages[1]]
        and f"take {every['floor']['all']:.1f} %" in text[pages[1]]
    )

    gap = {row["arm"]: row for row in docs.results("smollm2_gap/gap")["modes"]["compiled"]["rows"]}
    assert 0.63 < gap["all"]["k3_ratio"][0] < 0.70, "two thirds of the gap are left, say README and pages"
