"""Draw one decoder layer, engine beside trainer, and write the page's table, both from the files in ``results/``.

``python picture.py`` writes ``decoder_layer.svg`` and the table in ``README.md``; ``--check`` only says whether they are
what the files give; ``--png PATH`` also writes a bitmap.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl_rounding_align.engines.schedule.site_map import PointRow, Row, SiteMap, from_json
from verl_rounding_align.report import rows as report

HERE = Path(__file__).parent
FILES = ("sites-smollm2.json", "sites-smollm2-split.json")
BF16, FP32, NEVER, OPEN = "stored bf16", "stored fp32", "never stored", "not visible"
# face, edge, line width, line style, hatch: told apart without colour by line, hatch and the word in the box
STYLE = {
    BF16: ("#1f4e79", "#10283f", 1.6, "-", None),
    FP32: ("#f6c667", "#8a5a00", 1.6, "-", "////"),
    NEVER: ("white", "#777777", 1.2, "--", None),
    OPEN: ("#eeeeee", "#777777", 1.2, ":", None),
}
# band -> steps: what is shown, and where it is found: (part, operators of its rows) or a rounding point (kind, point)
BANDS = (
    ("attention", (
        ("Q, K, V projection", "qkv_proj", ""),
        ("cos, sin", "attention", "cos_sin"),
        ("x·cos and rotated x·sin", "attention", "product"),
        ("rotated Q, K", "rotary_emb", ""),
        ("attention's output (inside: not visible)", "attn", ""),
        ("output projection", "o_proj", ""),
    )),
    ("add after\nattention", (
        ("sum, as the norm reads it", "attn_add", "sum"),
        ("sum, as the next add reads it (carry)", "attn_add", "carry"),
        ("normed, before the weight", "attn_add", "normed"),
        ("norm's output", "post_attention_layernorm", ""),
    )),
    ("MLP", (
        ("gate and up projection", "gate_up_proj", ""),
        ("silu(gate)", "mlp", "act"),
        ("silu(gate) · up", "act_fn", ""),
        ("down projection", "down_proj", ""),
    )),
    ("add after\nthe MLP", (
        ("sum, as the norm reads it", "mlp_add", "sum"),
        ("sum, as the next add reads it (carry)", "mlp_add", "carry"),
        ("normed, before the weight", "mlp_add", "normed"),
        ("next layer's norm output", "input_layernorm", ""),
    )),
)  # fmt: skip


def load(folder: Path) -> dict[str, SiteMap]:
    """Return the maps of one model: ``compiled``, ``eager`` and ``split``."""
    maps = [m for name in FILES for m in from_json((folder / name).read_text())]
    return {"split" if m.split else m.mode: m for m in maps}


def of_point(points: tuple[PointRow, ...], kind: str, point: str) -> str:
    """Return where a rounding point is stored, in the picture's words."""
    found = next((p for p in points if (p.kind, p.point) == (kind, point)), None)
    if found is None or found.stored is None:
        return OPEN
    return BF16 if found.stored else FP32 if found.dtype == "float32" else NEVER


def of_part(rows: tuple[Row, ...], part: str) -> str:
    """Return where a part of the layer stores its result: the last row in the model dtype that it stores."""
    stored = [r.stored for r in rows if r.part == part and r.stored and r.dtype == "bfloat16"]
    return {"bfloat16": BF16, "float32": FP32}.get(stored[-1] if stored else "", NEVER)


def states(rows: tuple[Row, ...], points: tuple[PointRow, ...]) -> list[str]:
    """Return the state of every step, in the order of ``BANDS``."""
    steps = [step for _, steps in BANDS for step in steps]
    return [of_point(points, where, point) if point else of_part(rows, where) for _, where, point in steps]


def columns(maps: dict[str, SiteMap]) -> dict[str, list[str]]:
    """Return the columns of the picture and of the table: title -> state of every step."""
    whole = maps["compiled"]
    return {
        "vLLM compiled,\none graph (CPU)": states(whole.rows, whole.points),
        "vLLM compiled,\nsplit graph (CPU)": states(maps["split"].rows, maps["split"].points),
        "vLLM eager\n(CPU)": states(maps["eager"].rows, maps["eager"].points),
        "trainer:\nHugging Face, eager": states(whole.trainer_rows, whole.trainer_points),
    }


def draw(maps: dict[str, SiteMap]):
    """Return the figure."""
    found = columns(maps)
    plt.rcParams.update({"svg.hashsalt": "decoder layer", "svg.fonttype": "none", "font.family": "DejaVu Sans"})
    plt.rcParams["hatch.linewidth"] = 0.6
    width, height, left, gap = 1.9, 0.62, 4.2, 0.28
    total = left + len(found) * (width + gap)
    steps = sum(len(s) for _, s in BANDS)
    tall = steps * 0.8 + len(BANDS) * 0.27 + 3.1
    figure, axes = plt.subplots(figsize=(total * 0.95, tall * 0.62))
    axes.set_xlim(-0.55, total + 0.1)
    axes.set_ylim(-tall + 0.9, 1.8)
    axes.axis("off")
    first = maps["compiled"]
    title = f"One decoder layer of {first.model}: what is stored where"
    axes.text(-0.5, 1.5, title, fontsize=15, weight="bold", va="center")
    axes.text(-0.5, 1.05, "from top to bottom in the order of data flow", fontsize=10.5, va="center")
    for i, name in enumerate(found):
        axes.text(
            left + i * (width + gap) + width / 2, 0.45, name, ha="center", va="center", fontsize=10.5, weight="bold"
        )
    y, n = -0.3, 0
    for b, (band, band_steps) in enumerate(BANDS):
        bottom = y - len(band_steps) * 0.8 - 0.12
        face = "#f3f6fa" if b % 2 == 0 else "#faf7f0"
        axes.add_patch(
            plt.Rectangle((-0.5, bottom), total + 0.5, y - bottom, facecolor=face, edgecolor="none", zorder=0)
        )
        axes.text(-0.2, (y + bottom) / 2, band, rotation=90, va="center", ha="center", fontsize=11, weight="bold")
        for label, _, _ in band_steps:
            y -= 0.8
            middle = y + height / 2
            axes.text(left - 0.2, middle, label, ha="right", va="center", fontsize=10.5)
            for i, column in enumerate(found.values()):
                box(axes, left + i * (width + gap), y, width, height, column[n])
            n += 1
        y = bottom - 0.15
    axes.text(-0.5, y - 0.4, "A box says how the value's reader gets it:", fontsize=10.5, va="center")
    for i, (state, text) in enumerate(
        {
            BF16: "in bf16 memory: rounded",
            FP32: "in fp32 memory: not rounded",
            NEVER: "in fp32 registers: not rounded",
            OPEN: "inside another kernel",
        }.items()
    ):
        x = 0.3 + i * 3.1
        box(axes, x, y - 1.35, width, height, state)
        axes.text(x + width / 2, y - 1.6, text, ha="center", va="center", fontsize=9.5)
    return figure


def box(axes, x: float, y: float, width: float, height: float, state: str) -> None:
    """Draw one value."""
    face, edge, line, style, hatch = STYLE[state]
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=face,
                           edgecolor=edge, linewidth=line, linestyle=style, hatch=hatch, zorder=2)  # fmt: skip
    axes.add_patch(shape)
    text = axes.text(x + width / 2, y + height / 2, state, ha="center", va="center", fontsize=10, zorder=3)
    text.set_color("white" if state == BF16 else "black")
    text.set_weight("bold" if state == BF16 else "normal")
    if state == FP32:
        text.set_bbox(dict(facecolor=face, edgecolor="none", pad=1.5))


def table(maps: dict[str, SiteMap]) -> str:
    """Return the page's table in Markdown."""
    found = columns(maps)
    head = ["", *(name.replace("\n", " ") for name in found)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    n = 0
    for band, steps in BANDS:
        for label, _, _ in steps:
            lines.append(
                "| " + " | ".join([f"{band}: {label}".replace("\n", " "), *(c[n] for c in found.values())]) + " |"
            )
            n += 1
    first = maps["compiled"]
    carry = "; ".join(
        f"{name}: " + ", ".join(f"{add} {'yes' if stored else 'no'}" for add, stored in m.carry.items())
        for name, m in maps.items()
    )
    lines += ["", f"`carry` stored: {carry}.", ""]
    lines.append(
        f"vLLM {first.version}, torch {first.torch}, {first.device}; layer {first.layer} of {first.layers} built."
    )
    return "\n".join(lines)


def page(text: str, maps: dict[str, SiteMap]) -> str:
    """Return the page with its table renewed; ValueError where it has no place for it."""
    return report.filled(text, "table", table(maps))


def labels(svg: str) -> list[str]:
    """Return the texts in a picture: what must not change between two drawings, whatever matplotlib's release."""
    return re.findall(r"<text[^>]*>([^<]+)</text>|<tspan[^>]*>([^<]+)</tspan>", svg)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the picture and the page; return 0 if all is as the files give it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if picture or page are not up to date"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of README.md and decoder_layer.svg")
    parser.add_argument("--png", type=Path, help="also write a bitmap")
    options = parser.parse_args(arguments)
    maps = load(options.results)
    figure, readme, picture = draw(maps), options.out / "README.md", options.out / "decoder_layer.svg"
    drawn = options.png or picture
    if options.png:
        figure.savefig(drawn, dpi=90, bbox_inches="tight")
    if options.check:
        from io import StringIO

        buffer = StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
        same = labels(buffer.getvalue()) == labels(picture.read_text())
        current = page(readme.read_text(), maps) == readme.read_text()
        print(f"picture {'as' if same else 'NOT as'} the results give it, page {'too' if current else 'NOT'}")
        return 0 if same and current else 1
    figure.savefig(picture, bbox_inches="tight", metadata={"Date": None})
    readme.write_text(page(readme.read_text(), maps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
