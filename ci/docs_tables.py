"""The documentation's reference tables, made from the package's own tables whenever they are asked for.

A row that is added to a table of the package is in :func:`tables` without an edit here, also while a program runs.
``ci/docs.py`` puts each text between its marks in README.md and in docs/pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import verl_rounding_align
from verl_rounding_align import plan
from verl_rounding_align.report.rows import markdown


def code(*names: str) -> str:
    """Return names as inline code, with commas between.

    >>> code("a", "b"), code()
    ('`a`, `b`', '')
    """
    return ", ".join(f"`{name}`" for name in names)


def text(words: str) -> str:
    """Return words of the package so that Markdown shows them as they are.

    >>> text("modeling_*.py of <name>")
    'modeling_\\\\*.py of &lt;name>'
    """
    return words.replace("*", "\\*").replace("<", "&lt;")


def values() -> str:
    """What a user may write as the key's value."""
    return markdown(
        ["value", "what is aligned"], [[code(name), text(meaning)] for name, meaning in plan.meanings().items()]
    )


def points() -> str:
    """Every rounding point, with its region and its group."""
    from verl_rounding_align.regions import GROUPS, REGIONS

    rows = []
    for region in REGIONS.values():
        for point, meaning in region.points.items():
            group = next(
                name for name, group in GROUPS.items() if region.name == group.region and point in group.points
            )
            rows.append([code(region.name), code(point), code(group), text(meaning)])
    return markdown(["region", "rounding point", "switched by", "the intermediate"], rows)


def kinds() -> str:
    """Every site kind: the places at which an engine may round differently."""
    from verl_rounding_align.regions import REGIONS

    rows = [[code(kind), code(r.name), text(place)] for r in REGIONS.values() for kind, place in r.kinds.items()]
    return markdown(["site kind", "region", "place in the model"], rows)


def _mode(preset) -> str:
    """Return the rollout that a preset is chosen for, in words."""
    if preset.engine is None:
        return "named only"
    low, high = preset.versions
    releases = low or "any release" if low == high else f"{low or 'first'} to {high or 'newest'}"
    return f"{preset.engine} {releases}, {preset.device}, {'eager' if preset.eager else 'compiled'}"


def _evidence(preset) -> str:
    """Return what a preset's claims rest on: one word, with the groups that differ."""
    from verl_rounding_align.regions import GROUPS

    found = {group: preset.rests_on(group) for group in GROUPS if _says(preset, group)}
    usual = max(set(found.values()), key=list(found.values()).count)
    other = [f"{code(group)} {kind}" for group, kind in found.items() if kind != usual]
    return ", ".join([usual, *other])


def _says(preset, group: str) -> bool:
    """Return whether a preset says something about a group."""
    from verl_rounding_align.regions import GROUPS, KINDS

    return any(preset.knows(kind) for kind, region in KINDS.items() if region == GROUPS[group].region)


def presets() -> str:
    """Every preset: the rollout that it is chosen for, and how it is known."""
    from verl_rounding_align.engines.presets import PRESETS

    rows = [
        [code(p.name), _mode(p), _evidence(p), len(p.verified) or "none", text(f"{p.source}. {p.note}".strip())]
        for p in PRESETS.values()
    ]
    columns = ["preset", "chosen for", "evidence", "fingerprints it was verified on", "what it mirrors"]
    return markdown(columns, rows)


def stored() -> str:
    """What each preset stores in the model dtype at each site kind."""
    from verl_rounding_align.engines.presets import PRESETS
    from verl_rounding_align.regions import KINDS

    def cell(preset, kind: str) -> str:
        if not preset.knows(kind):
            return "not said"
        return code(*sorted(preset.at(kind))) or "none"

    rows = [[code(p.name), *(cell(p, kind) for kind in KINDS)] for p in PRESETS.values()]
    return markdown(["preset", *(code(kind) for kind in KINDS)], rows)


def families() -> str:
    """Every model family."""
    from verl_rounding_align.families import FAMILIES

    rows = [
        [code(f.model_type), code(f"{f.prefix}ForCausalLM"), "yes" if f.qk_norm else "no", "yes" if f.experts else "no"]
        for f in FAMILIES.values()
    ]
    return markdown(["`model_type`", "model class", "norms of Q and K", "mixture of experts"], rows)


def engines() -> str:
    """Every rollout engine."""
    from verl_rounding_align.engines import ENGINES
    from verl_rounding_align.engines.presets import PRESETS

    rows = []
    for engine in ENGINES.values():
        own = [p.name for p in PRESETS.values() if p.engine == engine.name]
        rows.append([code(engine.name), code(*engine.distributions), code(*own)])
    return markdown(["engine", "installed as", "presets"], rows)


def frameworks() -> str:
    """Every training framework."""
    from verl_rounding_align.integrations import FRAMEWORKS

    rows = [
        [f.name, code(f.key), code(f.releases), ", ".join(f.tested), code(f.start), text(f.ran)]
        for f in FRAMEWORKS.values()
    ]
    columns = ["framework", "key", "releases", "tested with", "what you add to the command line", "what has been run"]
    return markdown(columns, rows)


def keys() -> str:
    """Every config key of verl that this package reads."""
    from verl_rounding_align.integrations.verl import KEYS

    rows = [[code(key), text(legal), text(default), text(meaning)] for key, (legal, default, meaning) in KEYS.items()]
    return markdown(["key", "values", "default", "what it does"], rows)


def settings() -> str:
    """Everything of a vLLM rollout that is read before a run, and what is done about it."""
    from verl_rounding_align.engines.vllm.settings import BESIDE, SETTINGS

    def value(x) -> str:
        return "not set" if x is None else "empty" if x == {} else code(str(x))

    rows = [[code(n), s.done, ", ".join(map(value, s.safe)), text(s.meaning)] for n, s in SETTINGS.items()]
    rows += [[code(name), done, "", text(meaning)] for name, (done, meaning) in BESIDE.items()]
    return markdown(["setting", "what is done", "leaves rounding as it is", "why"], rows)


def metrics() -> str:
    """Every metric of a training step."""
    from verl_rounding_align.monitor import METRICS

    combined = {"mean": "averaged", "max": "the largest", "total": "added up"}
    rows = [[code(name), text(m.meaning), m.unit, m.range, combined[m.combined]] for name, m in METRICS.items()]
    columns = ["name", "what it is", "unit", "range", "over sub-steps of a step"]
    return markdown(columns, rows)


def dump() -> str:
    """Every column that a rollout dump gains."""
    from verl_rounding_align.monitor import COLUMNS

    return markdown(["column", "what it holds"], [[code(name), text(meaning)] for name, meaning in COLUMNS.items()])


def _commands(command, name: str) -> Iterator[tuple[str, object]]:
    """Yield (full name, command) of a command line, subcommands after their command."""
    for own, sub in sorted(getattr(command, "commands", {}).items()):
        yield f"{name} {own}", sub
        yield from _commands(sub, f"{name} {own}")


def commands() -> str:
    """Every subcommand of the command line with its arguments."""
    from typer.main import get_command

    from verl_rounding_align import cli

    out = []
    for name, command in _commands(get_command(cli.app), "verl-rounding-align"):
        out += [f"### {name}", text((command.help or "").strip())]
        rows = []
        for parameter in command.params:
            if parameter.name == "help" or getattr(parameter, "hidden", False):
                continue
            if parameter.param_type_name == "argument":
                names = code(parameter.name.upper())
            else:
                names = code(*parameter.opts, *parameter.secondary_opts)
            required = "required" if parameter.required else ""
            default = "" if parameter.default is None or callable(parameter.default) else str(parameter.default)
            if default in ("True", "False"):
                default = "on" if default == "True" else "off"
            rows.append(
                [names, text(getattr(parameter, "help", None) or ""), required or code(*filter(None, [default]))]
            )
        if rows:
            out.append(markdown(["argument", "what it is", "default"], rows))
    return "\n\n".join(out)


def rooms() -> str:
    """The map of the package, as its docstring has it."""
    found = verl_rounding_align.__doc__
    lines = found[found.index("    ") :].split("\n\n")[0].splitlines()
    return "\n".join(["```text", *(line.removeprefix("    ") for line in lines), "```"])


def tables() -> dict[str, str]:
    """Return name of a table -> its Markdown, as the package's tables are now."""
    return {
        "values": values(),
        "points": points(),
        "kinds": kinds(),
        "presets": presets(),
        "stored": stored(),
        "families": families(),
        "engines": engines(),
        "frameworks": frameworks(),
        "keys": keys(),
        "settings": settings(),
        "metrics": metrics(),
        "dump": dump(),
        "commands": commands(),
        "rooms": rooms(),
    }
