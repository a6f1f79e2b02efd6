"""Command line: subcommands without logic. Each prints the rows that a tool returns."""

from __future__ import annotations

import sys
from json import loads
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make the training side round where the inference engine rounds.",
)

Json = Annotated[str | None, typer.Option("--json", help="also write the rows, with versions, to this file")]
Model = Annotated[str, typer.Option(help="folder (or hub name) with the model's config.json")]


@app.callback()
def _root() -> None:
    """Make the training side round where the inference engine rounds."""


@app.command()
def presets(json: Json = None) -> None:
    """List the engines: the rounding points each one stores, the releases covered, and what that rests on."""
    from .report import catalogue
    from .report import rows as report

    found = catalogue.presets()
    report.show(found.table(), catalogue.sources().table())
    if json:
        report.write_json(json, {"presets": found.records()})


@app.command()
def plan(
    model: Model,
    regions: Annotated[
        str | None, typer.Option(help="value of the key: rope, paper, all, a+b, ...; default: the config's, or rope")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="preset or probe's JSON file; else it is found from the options below")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="probe the engine (once, then kept); regions then defaults to auto")
    ] = False,
    rollout_config: Annotated[
        Path | None,
        typer.Option(help="YAML: the framework's config, or its rollout section; instead of the next three options"),
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM release of the rollout; default: the installed one")] = None,
    device: Annotated[
        str | None, typer.Option(help="device of the rollout: cuda or cpu; default: cuda, or what --auto finds here")
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager/--compiled", help="enforce_eager=True, or the compiled graph")
    ] = False,
    framework: Annotated[str, typer.Option(help="training framework whose config it is")] = "verl",
    json: Json = None,
) -> None:
    """Print what would be patched in a model for a rollout engine; loads no weights, starts nothing."""
    from . import integrations
    from .report import catalogue
    from .report import rows as report
    from .trainers.preview import preview, request, rollout

    row = integrations.get(framework)
    asked = request(regions, engine, auto, rollout_config, row.key)
    if rollout_config:
        where = row.rollout(rollout_config, device or "cuda", probed=asked.engine is not None or asked.auto)
    else:
        where = rollout(vllm, device, eager, asked)
    alignment = preview(model, asked, where)
    found = catalogue.sites(alignment)
    report.show(found.table())
    if json:
        report.write_json(json, {"plan": str(alignment.plan), "sites": found.records()})


@app.command()
def probe(
    model: Annotated[str | None, typer.Option(help="folder or hub name with a config.json")] = None,
    family: Annotated[str | None, typer.Option(help="instead of a model: a family's default config")] = None,
    engine: Annotated[str, typer.Option(help="engine whose layers are run")] = "vllm",
    mode: Annotated[str, typer.Option(help="compiled, eager or both")] = "both",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, or auto: the checkpoint's")] = "auto",
    compilation_config: Annotated[str, typer.Option(help="JSON: what the rollout sets there, e.g. custom_ops")] = "{}",
    json: Json = None,
) -> None:
    """Run the engine's own layers on known inputs against every subset of points; exit 0 if each has one match that no preset denies."""
    from .engines import probe as found_in
    from .engines.probe.run import run_probe
    from .report import rows as report

    try:
        compilation = loads(compilation_config)
    except ValueError as error:
        raise ValueError(f"compilation-config={compilation_config!r}: not JSON: {error}") from error
    found = run_probe(model, family, engine, mode, compilation=compilation, dtype=dtype)
    report.show(found_in.render(found.rows), *(f"{m}: {f}" for m, f in found.fingerprints.items()))
    if json:
        Path(json).parent.mkdir(parents=True, exist_ok=True)
        Path(json).write_text(found.to_json(versions=report.versions()) + "\n")
    refuted = found.refuted(report.show)
    for line in refuted:
        report.show(f"preset refuted: {line}")
    raise typer.Exit(1 if refuted else found_in.exit_code(found.rows))


@app.command()
def sites(
    model: Model,
    mode: Annotated[str, typer.Option(help="compiled, eager or both")] = "compiled",
    layers: Annotated[int, typer.Option(help="decoder layers to build, with dummy weights")] = 3,
    split: Annotated[
        bool, typer.Option("--split/--whole", help="split the compiled graph at attention, as vLLM does on CUDA")
    ] = False,
    json: Json = None,
) -> None:
    """Read from vLLM's own graph where a decoder layer stores values, beside the trainer; exit 0 if carry is decided."""
    from rich.console import Console

    from .engines.schedule.site_map import exit_code, render, to_json
    from .engines.vllm.sites import contradictions, run_sites
    from .report import rows as report

    with Console(stderr=True).status("") as status:
        maps = run_sites(model, mode, layers, split, status.update)
    refuted = []
    for found in maps:
        report.show(*render(found))
        lines = [f"preset refuted: {line}" for line in contradictions(found)]
        report.show(*lines)
        refuted += lines
    if json:
        Path(json).parent.mkdir(parents=True, exist_ok=True)
        Path(json).write_text(to_json(maps, versions=report.versions()) + "\n")
    raise typer.Exit(exit_code(maps, refuted))


@app.command()
def overhead(
    model: Annotated[str | None, typer.Option(help="folder or hub name of a model with weights")] = None,
    shape: Annotated[str | None, typer.Option(help="random weights in these sizes, e.g. qwen3-1.7b")] = None,
    family: Annotated[str | None, typer.Option(help="with --shape: another family in those sizes")] = None,
    layers: Annotated[int | None, typer.Option(help="decoder layers; default: all")] = None,
    tokens: Annotated[int, typer.Option(help="tokens per sample, one sequence")] = 1024,
    plans: Annotated[
        str | None,
        typer.Option("--plan", help="values of the key, comma-separated; default: every group, paper, and all"),
    ] = None,
    engine: Annotated[str, typer.Option(help="preset of the engine")] = "vllm_compiled",
    backends: Annotated[
        str, typer.Option("--backend", help="compile, eager, or both comma-separated")
    ] = "compile,eager",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 measures process CPU time")] = None,
    pairs: Annotated[int, typer.Option(help="timed pairs of unaligned and aligned")] = 7,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="checkpoint decoder layers")] = False,
    json: Json = None,
) -> None:
    """Measure what alignment costs: interleaved with the unaligned model, ratios with intervals, memory kept."""
    from dataclasses import asdict

    from .overhead.render import render
    from .overhead.run import run_overhead
    from .report import rows as report

    rows = run_overhead(
        model,
        shape,
        family,
        plans.split(",") if plans else None,
        engine,
        backends.split(","),
        layers=layers,
        tokens=tokens,
        device=device,
        threads=threads,
        pairs=pairs,
        checkpointing=checkpointing,
    )
    report.show(render(rows))
    if json:
        report.write_json(json, {"rows": [asdict(row) for row in rows]})


Regions = Annotated[
    str | None,
    typer.Option(
        help="values of the key, or points, joined with +; comma-separated; 'subsets' stands for every subset of the groups, "
        "'subsets:a:b' for those of a and b; default: every group, paper, all and subsets"
    ),
]
Engine = Annotated[
    str | None, typer.Option(help="auto to probe it, a probe's JSON file, or a preset; default: the preset for it")
]
Backend = Annotated[str, typer.Option(help="how regions run: auto, compile or eager")]
Layout = Annotated[
    str, typer.Option(help="the trainer's batches: batched, single, padded, or packed (verl's use_remove_padding)")
]
Noise = Annotated[bool, typer.Option("--noise/--no-noise", help="also each side against itself")]
gap_app = typer.Typer(
    invoke_without_command=True,
    help="Measure the gap with fixed weights: vLLM generates, the trainer scores the same tokens, unaligned and aligned.",
)
app.add_typer(gap_app, name="gap")


def _arms(regions: str | None) -> list[str]:
    """Return the arms that an option names, or every one."""
    from .gap.arms import SUBSETS
    from .plan import arms

    return regions.split(",") if regions else [*arms(), SUBSETS]


@gap_app.callback()
def gap(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="folder of a Transformers checkpoint with a tokenizer")] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for rollouts, log-probs and the report; an interrupted run resumes")
    ] = None,
    regions: Regions = None,
    mode: Annotated[str, typer.Option(help="vLLM's mode: compiled, eager or both")] = "compiled",
    tokens: Annotated[int, typer.Option(help="response tokens")] = 20_000,
    length: Annotated[int, typer.Option(help="most response tokens of a sequence")] = 256,
    prompts: Annotated[Path | None, typer.Option(help="one prompt a line; default: 48 that come along")] = None,
    temperature: Annotated[
        float, typer.Option(help="sampling temperature; log-probs are of the unscaled logits")
    ] = 1.0,
    full_vocab: Annotated[int, typer.Option(help="positions with the exact KL over the whole vocabulary")] = 0,
    noise: Noise = True,
    layout: Layout = "batched",
    engine: Engine = None,
    device: Annotated[
        str | None, typer.Option(help="of both sides: cuda or cpu; default: cuda where there is one")
    ] = None,
    backend: Backend = "auto",
) -> None:
    if context.invoked_subcommand:
        return
    if model is None or out is None:
        raise ValueError("gap: --model and --out are needed; or a subcommand: score, report (see --help)")
    from .gap.run import run_gap

    run_gap(
        model,
        out,
        _arms(regions),
        mode,
        tokens,
        prompts,
        device,
        backend,
        engine,
        full_vocab,
        noise,
        temperature,
        length,
        layout,
    )


@gap_app.command()
def score(
    source: Annotated[
        Path, typer.Argument(help="folder that `gap` made, or a dump: .jsonl, .parquet, a folder of them")
    ],
    model: Annotated[str | None, typer.Option(help="the checkpoint, if it is no longer where it was")] = None,
    regions: Annotated[str | None, typer.Option(help="as for gap")] = None,
    engine: Annotated[str | None, typer.Option(help="preset, or a probe's JSON file; default: gap's")] = None,
    noise: Noise = True,
    layout: Layout = "batched",
    backend: Backend = "auto",
    out: Annotated[Path | None, typer.Option(help="of a dump: folder for score.json and the report's pages")] = None,
    json: Json = None,
) -> None:
    """Without an engine: score the rollouts that `gap` has kept, or summarise log-probs that somebody else has dumped."""
    if any((source / mode / "rollouts.safetensors").exists() for mode in ("compiled", "eager")):
        from .gap.run import rescore

        if out or json:
            raise ValueError(f"{source} is a folder of `gap`: its report is written there; leave out --out and --json")
        rescore(source, model, _arms(regions), backend, engine, noise, layout)
    else:
        from .gap.dump import score_dump

        if model or regions or engine or layout != "batched":
            raise ValueError(
                f"{source} is no folder of `gap`: a dump is summarised, not scored; leave out the trainer's options"
            )
        score_dump(source, out, Path(json) if json else None)


@gap_app.command("report")
def gap_report(folder: Annotated[Path, typer.Argument(help="folder that `gap` made")]) -> None:
    """Render everything in the folder (gap, attribution, landing, triage) as report.md and report.html."""
    from .report import pages as gap_report
    from .report import rows as report

    report.show(*(section.table() for section in gap_report.sections(folder)))
    report.show(*(f"wrote {path}" for path in gap_report.write(folder)))


@app.command()
def attribute(
    out: Annotated[Path, typer.Argument(help="folder of `gap --regions subsets`")],
    players: Annotated[str | None, typer.Option(help="groups or points, comma-separated; default: the groups")] = None,
    json: Json = None,
) -> None:
    """Say what closes how much of the gap: Shapley values with intervals, shares, pairwise interactions."""
    from .gap.run import run_attribute

    run_attribute(out, players.split(",") if players else None, Path(json) if json else None)


@app.command()
def landing(
    model: Annotated[str, typer.Option(help="folder of a Transformers checkpoint with a tokenizer")],
    text: Annotated[
        Path | None, typer.Option(help="text file (UTF-8); default: pages of Newton's Opticks that come along")
    ] = None,
    tokens: Annotated[int, typer.Option(help="tokens to read, or fewer if the text has fewer")] = 2048,
    window: Annotated[int, typer.Option(help="tokens per forward pass; RoPE's angles grow with it")] = 512,
    json: Json = None,
) -> None:
    """Measure where values land between adjacent bf16 numbers, per quantity: clustered ones round with a bias."""
    from .landing.run import run_landing

    run_landing(model, text, tokens, window, json)


@app.command()
def triage(
    dump: Annotated[
        Path | None,
        typer.Argument(help="paired log-probs: .jsonl, .parquet, a folder of them, or one mode's folder of `gap`"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML: verl's config, as the run had it")] = None,
    model: Annotated[str | None, typer.Option(help="folder of the checkpoint that the engine loads")] = None,
    trainer_model: Annotated[
        str | None,
        typer.Option(help="folder of the trainer's checkpoint; weights and RoPE are compared with --model's"),
    ] = None,
    json: Json = None,
) -> None:
    """Name causes of a mismatch that are not rounding, from log-probs and settings; exit 0 if it is rounding-sized, else 1; notes (sampled-elsewhere, weights-not-compared) do not count."""
    from .triage.rows import exit_code
    from .triage.run import run_triage

    raise typer.Exit(exit_code(run_triage(dump, config, model, trainer_model, json)))


def main() -> None:
    """Run the command line.

    A value that is not legal, a file that cannot be read or written, and an engine that failed are one sentence on standard
    error, without a traceback, and exit code 2.
    """
    from .engines.process import EngineFailed

    try:
        app()
        return
    except (ValueError, EngineFailed) as error:
        said = str(error)
    except OSError as error:  # Transformers' has no file's name, and goes on in a second paragraph
        named = error.filename is not None and error.strerror
        said = f"{error.filename}: {error.strerror}" if named else str(error).partition("\n")[0]
    print(f"error: {said}", file=sys.stderr)
    sys.exit(2)
