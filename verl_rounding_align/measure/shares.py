"""Where does the time of one pass go? Self time of operators in torch's profiler, by kind, on a CPU.

What alignment can save is what eager Hugging Face spends outside matrix products and attention: this table says how much
that is. All arms are in percent of the unaligned pass, so that a column's sum is its time ratio (with the profiler on,
one median, no interval: :mod:`overhead` measures ratios).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from .overhead import Bench, aligned, build, cpu_threads, unaligned

# kind: names of operators that belong to it; the first that matches counts
KINDS = {
    "matrix products": r"aten::(mm|addmm|bmm|baddbmm)$|mkldnn_linear",
    "attention": r"scaled_dot_product",
    "compiled regions": r"## Call CompiledFxGraph",
    "calling them": r"CompiledFunction|Compiled ?Fx|TorchDynamo|AOTDispatcher|Pregraph|Torch-Compiled",
    "loss": r"log_softmax|nll_loss|cross_entropy|LogSoftmax|NllLoss",
    "other operators": r"",
}


def kind_of(operator: str) -> str:
    """Return an operator's kind.

    >>> kind_of("aten::mm"), kind_of("aten::mul")
    ('matrix products', 'other operators')
    """
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, operator))


def _pass(bench: Bench, call, i: int) -> dict[str, float]:
    """Return kind -> seconds of one profiled forward and backward pass."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        bench.run(call, "forward_backward", i)
    found = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    bench.clear()
    return found


def shares(
    model: str | None = None,
    shape: str | None = None,
    layers: int | None = None,
    plans: Sequence[str] = ("all",),
    engine: str = "vllm_compiled",
    tokens: int = 1024,
    threads: int | None = None,
    passes: int = 5,
) -> dict:
    """Return ``{model, layers, tokens, passes, shares}``; shares is arm -> kind -> percent of the unaligned pass.

    Args: see :func:`overhead.run_overhead`; ``passes`` of each arm are profiled, interleaved, and the median taken.
    """
    arms = [unaligned(), *(aligned(regions, engine, "compile") for regions in plans)]
    with cpu_threads(threads):
        label, lm = build(model, shape, None, layers, "cpu")
        bench = Bench.make(lm, "model", tokens, "cpu")
        seen: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
        for i in range(-1, passes):  # the first of each warms up
            for arm in arms:
                with arm.enter(lm, "model") as call:
                    found = _pass(bench, call, i)
                if i >= 0:
                    seen[arm.name].append(found)
    middle = {arm: {kind: median(one[kind] for one in each) for kind in KINDS} for arm, each in seen.items()}
    whole = sum(middle["none"].values())
    out = {arm: {kind: 100 * seconds / whole for kind, seconds in each.items()} for arm, each in middle.items()}
    return {"model": label, "layers": lm.config.num_hidden_layers, "tokens": tokens, "passes": passes, "shares": out}


def render(found: dict):
    """Return a rich table."""
    from .. import report

    arms = list(found["shares"])
    body = [(kind, *(f"{found['shares'][arm][kind]:.1f}" for arm in arms)) for kind in KINDS]
    body.append(("sum", *(f"{sum(found['shares'][arm].values()):.1f}" for arm in arms)))
    title = f"{found['model']}, {found['layers']} layers, {found['tokens']} tokens, forward and backward: % of the unaligned pass"
    return report.table(title, ("time in", *arms), body)
