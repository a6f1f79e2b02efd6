"""What one GPU can settle in a few minutes, with torch, Triton and Transformers only (no vLLM there).

sites     a piece of vLLM's graph between two attentions (o_proj, add and norm, MLP, add and norm, qkv, Q/K norm, rotary
          embedding), compiled: for each of the two residual adds, is ``carry`` rounded, and is ``sum``? Answered by
          values (which candidate reproduces the compiled piece), and by Inductor's schedule after fusion.
regions   this package's compiled regions against torch.compile of the engine's formulas, and against their own eager
          backend; candidates that differ by one rounding point are the negative controls.
overhead  time and memory of decoder layers in the shapes of Qwen3-1.7B, 4B and 8B: rope, paper, all over unaligned.

Writes its JSON after every part, so that a run that is cut short keeps what it has; a part that the budget does not
reach is listed under ``skipped``. ``--device cpu --small`` runs the same code on tiny sizes: a check of the logic, not
a result.

The formulas of :class:`Engine` are vLLM 0.30's native ones, written out: ``ir/ops/layernorm.py``,
``layers/activation.py``, ``layers/rotary_embedding/common.py``; Inductor's options on CUDA: ``config/compilation.py``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package need not be installed there

from verl_rounding_align import backend as backends
from verl_rounding_align import releases
from verl_rounding_align.engines import presets
from verl_rounding_align.engines.schedule import graph, inductor
from verl_rounding_align.overhead import arms as ways
from verl_rounding_align.overhead import measure, models
from verl_rounding_align.regions.add_rms_norm import add, rms_norm
from verl_rounding_align.regions.rope import rotate
from verl_rounding_align.regions.swiglu import swiglu
from verl_rounding_align.rounding import Rounding

HOOK_TESTED = inductor.RELEASES  # torch releases whose schedule can be read
DTYPE = torch.bfloat16
SHAPES = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b")
TOKENS = (4096, 16384)
PLANS = ("rope", "paper", "all")


# ---------------------------------------------------------------------------------------------------------- the engine


class Engine:
    """vLLM 0.30's native formulas, op by op; static methods on the model dtype."""

    @staticmethod
    def options(device: str) -> dict:
        """Return the Inductor options that vLLM sets on a device."""
        on_gpu = {"combo_kernels": True, "benchmark_combo_kernel": True}
        return {"enable_auto_functionalized_v2": False, **(on_gpu if device != "cpu" else {})}

    @staticmethod
    def rms_norm(x, weight, eps):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (x.to(weight.dtype) * weight).to(dtype)

    @staticmethod
    def fused_add_rms_norm(x, residual, weight, eps):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x + residual.to(torch.float32)
        residual = x.to(dtype)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        return (x.to(weight.dtype) * weight).to(dtype), residual

    @staticmethod
    def silu_and_mul(x):
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    @staticmethod
    def rotary(x, cos, sin):
        """Rotate ``x`` (tokens, heads, head_dim) with ``cos``, ``sin`` (tokens, head_dim / 2)."""
        cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
        x1, x2 = torch.chunk(x, 2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one decoder layer, from a Transformers config of the qwen3 family."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6

    @classmethod
    def of(cls, name: str, config) -> Sizes:
        return cls(
            name,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
        )


class Inputs:
    """Random tensors of one piece: weights scaled so that activations keep unit size, norm weights away from one."""

    def __init__(self, sizes: Sizes, tokens: int, device: str, seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape, scale=1.0, at=0.0):
            return (at + scale * torch.randn(*shape, generator=generator, device=device)).to(DTYPE)

        def linear(out, in_):
            return normal(out, in_, scale=in_**-0.5)

        s, all_heads = sizes, sizes.heads + 2 * sizes.kv_heads
        self.attention, self.residual = normal(tokens, s.heads * s.head_dim), normal(tokens, s.hidden)
        self.o_proj, self.down = linear(s.hidden, s.heads * s.head_dim), linear(s.hidden, s.intermediate)
        self.gate_up, self.qkv = linear(2 * s.intermediate, s.hidden), linear(all_heads * s.head_dim, s.hidden)
        self.post_norm, self.next_norm = (normal(s.hidden, scale=0.3, at=1.0) for _ in range(2))
        self.q_norm, self.k_norm = (normal(s.head_dim, scale=0.3, at=1.0) for _ in range(2))
        positions = torch.arange(tokens, device=device, dtype=torch.float32)
        rates = 1e6 ** (-torch.arange(0, s.head_dim, 2, device=device, dtype=torch.float32) / s.head_dim)
        angles = positions[:, None] * rates
        self.cos, self.sin = angles.cos(), angles.sin()  # (tokens, head_dim / 2) fp32; the engine stores bf16


def piece(sizes: Sizes, observe: bool):
    """Return the function of one piece: tensors of :class:`Inputs` -> (q, k, v, residual), or more with ``observe``.

    With ``observe`` it also returns what its matrix products read and write at the two adds; those tensors are stored
    anyway, so that the kernels stay what they are (checked: the residual must come out bitwise the same).
    """
    s, e = sizes, Engine

    def run(attention, residual, o_proj, post_norm, gate_up, down, next_norm, qkv, q_norm, k_norm, cos, sin):
        first = F.linear(attention, o_proj)
        x1, residual = e.fused_add_rms_norm(first, residual, post_norm, s.eps)
        second = F.linear(e.silu_and_mul(F.linear(x1, gate_up)), down)
        x2, residual = e.fused_add_rms_norm(second, residual, next_norm, s.eps)
        q, k, v = F.linear(x2, qkv).split([n * s.head_dim for n in (s.heads, s.kv_heads, s.kv_heads)], dim=-1)
        q, k = (t.reshape(t.shape[0], -1, s.head_dim) for t in (q, k))
        q = e.rotary(e.rms_norm(q, q_norm, s.eps), cos, sin)
        k = e.rotary(e.rms_norm(k, k_norm, s.eps), cos, sin)
        return (q, k, v, residual, first, x1, second, x2) if observe else (q, k, v, residual)

    return run


def arguments(x: Inputs) -> list[torch.Tensor]:
    """Return the tensors of ``x`` in the order that a piece takes; the number of tokens is dynamic, as in vLLM."""
    names = "attention residual o_proj post_norm gate_up down next_norm qkv q_norm k_norm cos sin"
    out = [getattr(x, name) for name in names.split()]
    out[-2:] = [t.to(DTYPE) for t in out[-2:]]
    for i in (0, 1, -2, -1):
        torch._dynamo.mark_dynamic(out[i], 0)
    return out


def equal(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the fraction of elements that are equal; dtypes must agree, and so must shapes."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    return (a == b).double().mean().item()


# --------------------------------------------------------------------------------------------------------------- sites


Stored = graph.Stored


def schedule(function, args) -> list[Stored]:
    """Return what Inductor stores when it compiles ``function``, read from its schedule after fusion.

    Raises:
        UntestedRelease: this torch release is not in ``HOOK_TESTED``.
    """
    return list(inductor.schedule(function, args, HOOK_TESTED))


def first_sum_by_schedule(stored: list[Stored], hidden: int) -> str:
    """Return how the second add reads the first sum: ``bfloat16`` or ``float32`` memory, or ``recomputed``.

    The piece's residual output is a buffer (tokens, hidden) that no matrix product writes. If it reads only matrix
    products and the piece's own inputs, the first sum is computed again from them, in fp32.
    """
    outputs = [b for b in stored if b.output and not b.extern and b.size[-1] == str(hidden) and len(b.size) == 2]
    assert len(outputs) == 1, f"one residual output expected, found {[b.buffer for b in outputs]}"
    by_name = {b.buffer: b for b in stored}
    read = [by_name[name] for name in outputs[0].reads if name in by_name and not by_name[name].extern]
    sums = {b.dtype for b in read if b.size[-1] == str(hidden)}
    assert len(sums) <= 1, f"the residual output reads {read}"
    return sums.pop() if sums else "recomputed"


@dataclass(frozen=True)
class SiteRow:
    """How one residual add rounds one point in the compiled piece.

    Args:
        add: ``attn_add`` or ``mlp_add``.
        point: ``sum`` or ``carry``.
        stored: whether the point is rounded to bf16; None where no candidate matches (see ``fractions``).
        fractions: candidate -> fraction of elements of the compiled piece that it reproduces.
        why: what the answer rests on.
    """

    shape: str
    tokens: int
    add: str
    point: str
    stored: bool | None
    fractions: dict[str, float]
    why: str


def decide(fractions: dict[str, float], threshold: float = 1 - 1e-3) -> bool | None:
    """Return whether the point is stored: the candidate that matches at least ``threshold``, if only one does.

    Rounding a sum moves 20-50 % of the results that depend on it; the order of a norm's reduction moves 1e-5.
    """
    matching = [name for name, fraction in fractions.items() if fraction >= threshold]
    return {"stored": True, "not stored": False}[matching[0]] if len(matching) == 1 else None


def sites(sizes: Sizes, tokens: int, device: str) -> dict:
    """Return the site map of one shape: SiteRows, and the schedule where this torch release lets it be read."""
    x = Inputs(sizes, tokens, device)
    torch._dynamo.reset()
    with torch.no_grad():
        plain = torch.compile(piece(sizes, observe=False), options=Engine.options(device))(*arguments(x))
        seen = torch.compile(piece(sizes, observe=True), options=Engine.options(device))(*arguments(x))
        _, _, _, residual, first, x1, second, x2 = seen
        unchanged = torch.equal(plain[3], residual)

        def sums(stores: str):
            return Rounding({"sum"} if stores == "sum" else ())

        carried = {
            "stored": add(first, x.residual, Rounding({"sum", "carry"})),
            "not stored": add(first, x.residual, Rounding()),
        }
        carry = {name: equal(residual, add(second, total, Rounding()).to(DTYPE)) for name, total in carried.items()}

        def norm(total, weight, stores):
            return rms_norm(total, weight, sizes.eps, sums(stores), DTYPE)

        first_sum = {
            name: equal(x1, norm(carried["not stored"], x.post_norm, stores))
            for name, stores in (("stored", "sum"), ("not stored", ""))
        }
        best = max(carry, key=carry.get)
        total = add(second, carried[best], Rounding())
        second_sum = {
            name: equal(x2, norm(total, x.next_norm, stores))
            for name, stores in (("stored", "sum"), ("not stored", ""))
        }
        leaves = equal(residual, add(second, carried[best], Rounding()).to(DTYPE))
    by_values = "values of the compiled piece" if unchanged else "values; observing changed the residual"
    row = lambda *args: SiteRow(sizes.name, tokens, *args)  # noqa: E731
    rows = [
        row("attn_add", "sum", decide(first_sum), first_sum, by_values),
        row("attn_add", "carry", decide(carry), carry, by_values),
        row("mlp_add", "sum", decide(second_sum), second_sum, by_values),
        row(
            "mlp_add",
            "carry",
            True if residual.dtype == DTYPE else None,
            {"stored": leaves},
            "the piece ends here: its residual leaves it as a bf16 tensor",
        ),
    ]
    out = {"rows": [asdict(r) for r in rows], "observing_changed_nothing": unchanged}
    try:
        stored = schedule(piece(sizes, observe=False), arguments(x))
    except releases.UntestedRelease as error:
        return {**out, "schedule": f"refused: {error}"}
    reads = first_sum_by_schedule(stored, sizes.hidden)
    return {**out, "schedule": [asdict(b) for b in stored], "second_add_reads_first_sum_as": reads}


# ------------------------------------------------------------------------------------------------------------- regions


@dataclass(frozen=True)
class RegionRow:
    """One candidate set of rounding points of one region, compiled here, against the engine's compiled formula.

    Args:
        points: the candidate; ``preset`` marks the one that ``vllm_compiled`` claims.
        engine: fraction of elements equal to torch.compile of the engine's formula.
        eager: fraction equal to the same candidate op by op.
        gradients: relative error (2-norm) of the gradients of the rows against fp64, ``compile`` and ``eager``; for the
            preset and for the full set.
    """

    region: str
    shape: str
    points: tuple[str, ...]
    preset: bool
    engine: float
    eager: float
    gradients: dict[str, float] | None


@dataclass(frozen=True)
class Case:
    """A region with random inputs, and the engine's formula on the same inputs."""

    name: str
    function: Callable
    rows: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    static: dict
    formula: Callable
    inputs: tuple[torch.Tensor, ...]
    candidates: list[frozenset[str]]
    preset: frozenset[str]

    def run(self, points, how: str, dtype: torch.dtype = DTYPE, grad: bool = False):
        """Return the region's output and the rows that it read, computed in ``dtype``."""
        rows = {name: x.detach().to(torch.promote_types(x.dtype, dtype), copy=True) for name, x in self.rows.items()}
        for name, x in rows.items():
            x.requires_grad_(grad and self.rows[name].dtype == DTYPE)
        params = {name: x.to(dtype) for name, x in self.params.items()}
        static = {**self.static, **({"dtype": dtype} if "dtype" in self.static else {})}
        return backends.run(self.function, rows, Rounding(points), how, params=params, **static), rows

    def gradients(self, points, how: str, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        """Return the gradients of the rows in the model dtype as one fp64 vector."""
        out, rows = self.run(points, how, dtype, grad=True)
        cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(DTYPE)
        out.backward(cotangent.to(out.dtype))
        return torch.cat([x.grad.double().flatten() for x in rows.values() if x.requires_grad])


def _near(points: frozenset[str], every) -> list[frozenset[str]]:
    """Return the preset's set, those that differ from it by one point, and the full set."""
    return list(dict.fromkeys([points, *(points ^ {p} for p in sorted(every)), frozenset(every)]))


def _norm_of_sum(delta, residual, weight, eps, rnd):
    return rms_norm(add(delta, residual, Rounding()), weight, eps, rnd, delta.dtype)


def cases(sizes: Sizes, tokens: int, device: str) -> list[Case]:
    """Return the three regions with inputs in the sizes of one model."""
    x, eps = Inputs(sizes, tokens, device, seed=1), sizes.eps
    generator = torch.Generator(device).manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(DTYPE)

    claim = presets.get("vllm_compiled").points
    gate_up, delta = normal(tokens, 2 * sizes.intermediate), normal(tokens, sizes.hidden)
    q = normal(tokens, sizes.heads, sizes.head_dim)
    gate, up = (backends.plain(half) for half in gate_up.chunk(2, dim=-1))
    # the engine reads a table stored in bf16; the region gets fp32, so that its point cos_sin is at work
    tables = {name: torch.cat((t, t), -1).unsqueeze(1) for name, t in (("cos", x.cos), ("sin", x.sin))}
    rope_points = {"qk_normed", "qk_norm", "cos_sin", "product"}
    return [
        Case(
            "swiglu",
            swiglu,
            dict(gate=gate, up_=up),
            {},
            {},
            Engine.silu_and_mul,
            (gate_up,),
            _near(claim["mlp"], {"act"}),
            claim["mlp"],
        ),
        Case(
            "add_rms_norm",
            _norm_of_sum,
            dict(delta=delta, residual=x.residual),
            dict(weight=x.post_norm),
            dict(eps=eps),
            lambda delta, residual, weight: Engine.fused_add_rms_norm(delta, residual, weight, eps)[0],
            (delta, x.residual, x.post_norm),
            _near(claim["attn_add"], {"sum", "normed"}),
            claim["attn_add"],
        ),
        Case(
            "rope",
            rotate,
            dict(x=q, **tables),
            dict(weight=x.q_norm),
            dict(eps=eps),
            lambda q, weight, cos, sin: Engine.rotary(Engine.rms_norm(q, weight, eps), cos, sin),
            (q, x.q_norm, x.cos.to(DTYPE), x.sin.to(DTYPE)),
            _near(claim["attention"], rope_points),
            claim["attention"],
        ),
    ]


def regions(sizes: Sizes, tokens: int, device: str) -> list[RegionRow]:
    """Return a RegionRow per region and candidate."""
    rows = []
    for case in cases(sizes, tokens, device):
        with torch.no_grad():
            want = torch.compile(case.formula, options=Engine.options(device))(*case.inputs)
        full = max(case.candidates, key=len)
        for points in case.candidates:
            with torch.no_grad():
                got, eager = case.run(points, "compile")[0], case.run(points, "eager")[0]
            errors = None
            if points in (case.preset, full):
                exact = case.gradients(points, "eager", torch.float64)
                errors = {
                    how: ((case.gradients(points, how) - exact).norm() / exact.norm()).item()
                    for how in ("compile", "eager")
                }
            rows.append(
                RegionRow(
                    region=case.name,
                    shape=sizes.name,
                    points=tuple(sorted(points)),
                    preset=points == case.preset,
                    engine=equal(got, want),
                    eager=equal(got, eager),
                    gradients=errors,
                )
            )
    return rows


# ----------------------------------------------------------------------------------------------------------------- run


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def configs(small: bool, layers: int) -> dict:
    """Return name -> Transformers config with ``layers`` decoder layers; the vocabulary is cut, as no row reads it."""
    if not small:
        out = {name: models.shape_config(name, layers=layers) for name in SHAPES}
    else:
        from transformers import AutoConfig

        sizes = dict(hidden_size=64, intermediate_size=112, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        out = {"small": AutoConfig.for_model("qwen3", num_hidden_layers=layers, **sizes)}
    for config in out.values():
        config.vocab_size = 256
    return out


def check(device: str, small: bool, out: Path, budget_s: float, pairs: int, layers: int) -> dict:
    """Run every part that the budget reaches; return the payload, which was also written to ``out`` after each part."""
    start = time.monotonic()
    payload = {
        "device": measure.device_name(device),
        "small": small,
        "versions": {name: _installed(name) for name in ("torch", "triton", "transformers")},
        "python": platform.python_version(),
        "sites": {},
        "regions": [],
        "overhead": [],
        "skipped": [],
    }
    out.parent.mkdir(parents=True, exist_ok=True)

    def part(name: str, run) -> None:
        """Run one part if there is time, note an error as its result, and write what there is."""
        if time.monotonic() - start > budget_s:
            payload["skipped"].append(f"{name}: the budget of {budget_s:.0f} s was used up")
        else:
            print(f"[{time.monotonic() - start:5.0f} s] {name}", flush=True)
            try:
                run()
            except Exception as error:  # a failed part must not cost the others: the machine is lent for minutes
                payload["skipped"].append(f"{name}: {type(error).__name__}: {error}")
            torch._dynamo.reset()
            backends.compiled.cache_clear()
        payload["seconds"] = round(time.monotonic() - start)
        out.write_text(json.dumps(payload, indent=1) + "\n")

    tokens = (64,) if small else TOKENS
    every = configs(small, layers)
    shapes = {name: Sizes.of(name, config) for name, config in every.items()}

    def measure_layers(name: str, length: int) -> None:
        model = models.from_config(every[name], device)
        arms = [ways.aligned(plan, "vllm_compiled", "compile") for plan in PLANS]
        rows = measure.measure(
            model,
            name,
            arms,
            scopes=("layers",),
            phases=("forward", "forward_backward"),
            tokens=length,
            pairs=pairs,
            repeats=1 if device == "cpu" else 3,
            progress=False,
        )
        payload["overhead"] += [row.as_dict() for row in rows]

    first = next(iter(shapes))
    for name in shapes:
        part(f"sites {name}", lambda n=name: payload["sites"].update({n: sites(shapes[n], tokens[0], device)}))
    part(f"regions {first}", lambda: payload["regions"].extend(map(asdict, regions(shapes[first], tokens[0], device))))
    for length in tokens:
        for name in shapes:
            part(f"overhead {name} {length}", lambda n=name, t=length: measure_layers(n, t))
    return payload


def summary(payload: dict) -> list[str]:
    """Return the payload as lines for a terminal."""
    lines = [f"{payload['device']}, torch {payload['versions']['torch']}, triton {payload['versions']['triton']}"]
    said = {True: "rounded", False: "not rounded", None: "undecided"}
    for name, found in payload["sites"].items():
        for r in found["rows"]:
            lines.append(f"{name} {r['add']} {r['point']}: {said[r['stored']]} {r['fractions']} ({r['why']})")
        lines.append(f"{name} schedule: {found.get('second_add_reads_first_sum_as', found['schedule'])}")
    for r in payload["regions"]:
        mark = " <- preset" if r["preset"] else ""
        lines.append(
            f"{r['region']} {{{', '.join(r['points'])}}}: engine {r['engine']:.6f}, eager {r['eager']:.6f}{mark}"
        )
    for r in payload["overhead"]:
        memory = "" if r["saved_ratio"] is None else f", kept {r['saved_ratio']:.3f}x, peak {r['peak_ratio']:.3f}x"
        lines.append(f"{r['model']} {r['tokens']} {r['arm']} {r['phase']}: {r['verdict']}{memory}")
    return [*lines, *(f"skipped: {x}" for x in payload["skipped"])]


def main(argv=None) -> int:
    """Parse, run, print; exit code 1 if a part failed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: checks the logic, measures nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    parser.add_argument("--budget-s", type=float, default=400, help="start no part after this many seconds")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args(argv)
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {args.device}: torch {torch.__version__} sees no CUDA device; --device cpu --small tests the logic"
        )
    payload = check(args.device, args.small, args.out, args.budget_s, args.pairs, args.layers)
    print("\n".join(summary(payload)))
    return 1 if payload["skipped"] else 0


if __name__ == "__main__":
    sys.exit(main())
