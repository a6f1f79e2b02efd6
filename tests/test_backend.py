"""Contract of the compiled backend: few graphs, whatever the lengths; the same model-level behaviour under checkpointing,
LoRA, autocast and inference mode; backward keeps model-dtype inputs, not fp32 copies; an outer compile cannot delete
rounding points."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys

import pytest
import torch
from tiny import ALL, both_streams, same, step, tiny, tokens
from torch._dynamo.utils import counters

from verl_rounding_align import align, backend
from verl_rounding_align.regions import REGIONS
from verl_rounding_align.rounding import Rounding

GROUPS = ("rope", "swiglu", "add_rms_norm+carry")


@pytest.fixture
def fresh():
    """No compiled graph from another test."""
    torch._dynamo.reset()
    backend.compiled.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()
    backend.compiled.cache_clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_two_hundred_shapes_need_two_graphs_per_function(fresh):
    """One with gradients, one without, per region function: rope, swiglu, add_rms_norm, and its halves add, rms_norm.
    The first layer's norm reads the embedding in bf16, the others the fp32 stream: rms_norm and add_rms_norm count twice."""
    model = tiny("qwen3", layers=2)
    align(model, "all", engine="vllm_compiled", backend="compile")
    shapes = random.Random(0)
    functions = 5 + 2
    for i in range(200):
        ids = tokens(shapes.choice([1, 1, 2, 3, 5]), shapes.randrange(2, 120), seed=i)
        if i % 2:
            with torch.no_grad():
                model(ids, use_cache=False)
        else:
            step(model, ids)
        if i == 9:
            early = graphs()
    assert graphs() == early, "graphs go on growing with new shapes"
    assert graphs() <= 2 * functions


def saved_bytes(run) -> int:
    """Return the bytes that autograd keeps for backward while ``run()`` computes, each storage once, inputs included."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    total = sum(n for n, _ in kept.values())
    assert out is not None
    return total


def test_backward_keeps_model_dtype_inputs_and_no_fp32_copies():
    """Exact counts. N tokens of width H in bf16: swiglu keeps gate and up (4NH bytes), HF keeps gate, act and up (6NH)."""
    n, h = 256, 64
    gate, up = (torch.randn(n, h, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def aligned(how):
        return lambda: backend.run(REGIONS["swiglu"].function, dict(gate=gate, up_=up), Rounding(), how)

    assert saved_bytes(aligned("compile")) == 4 * n * h
    assert saved_bytes(lambda: torch.nn.functional.silu(gate) * up) == 6 * n * h
    assert saved_bytes(aligned("eager")) > 6 * n * h  # why regions are compiled


@pytest.mark.parametrize("group", GROUPS)
def test_a_model_keeps_at_most_what_hf_keeps(group):
    """Whole model, without checkpointing: bytes kept for backward, parameters excluded by subtraction on both sides."""
    model, ids = tiny("qwen3", layers=2), tokens(2, 64)
    hf = saved_bytes(lambda: model(ids, use_cache=False).logits)
    align(model, group, engine="vllm_compiled", backend="compile")
    assert saved_bytes(lambda: model(ids, use_cache=False).logits) <= hf


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@both_streams
def test_checkpointing_recomputes_the_same_values(reentrant, engine):
    model, ids = tiny("qwen3"), tokens()
    align(model, ALL, engine=engine, backend="compile")
    logits, gradients = step(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, again_gradients = step(model, ids)
    assert torch.equal(logits, again)
    assert same(gradients, again_gradients)


@both_streams
def test_autocast_and_inference_mode_change_nothing(engine):
    model, ids = tiny("qwen3"), tokens()
    align(model, ALL, engine=engine, backend="compile")
    logits = model(ids, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids, use_cache=False).logits, logits)
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, logits)


@both_streams
def test_lora_trains_through_compiled_regions(engine):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny("qwen3"), config, autocast_adapter_dtype=False)
    alignment = align(model, ALL, engine=engine, backend="compile")
    _, gradients = step(model, tokens())
    assert alignment.idle() == [] and len(gradients) == 2 * 7 * 3
    assert all(g.isfinite().all() and g.any() for g in gradients.values())


def test_an_outer_compile_of_an_aligned_model_does_not_recompile_at_every_call(fresh):
    model = tiny("llama", layers=1).eval()
    alignment = align(model, "all", engine="vllm_compiled", backend="eager")
    outer = torch.compile(model.model.layers[0].mlp)
    x = torch.randn(20, 64, dtype=torch.bfloat16)
    outer(x)
    first = graphs()
    for _ in range(12):
        outer(x)
    assert graphs() == first
    assert alignment.calls["model.layers.0.mlp"] == 13


def test_a_whole_model_compiled_by_the_user_keeps_the_points():
    """The graph breaks around regions, so hf_eager's interior points survive an outer compile; with the regions visible
    to it (the negative control) they do not."""
    model = tiny("llama", layers=1).eval()
    align(model, "swiglu", engine="hf_eager", backend="eager")
    x = torch.randn(200, 64, dtype=torch.bfloat16)
    mlp = model.model.layers[0].mlp
    outer = torch.compile(mlp)
    assert torch.equal(outer(x), mlp(x))

    def visible(x):
        return mlp.down_proj(REGIONS["swiglu"].function(mlp.gate_proj(x), mlp.up_proj(x), Rounding({"act"})))

    assert not torch.equal(torch.compile(visible)(x), visible(x))


# ---- many workers


SWIGLU = """
import contextlib, sys, torch
from torch._inductor import compile_fx
from verl_rounding_align import backend
from verl_rounding_align.regions.swiglu import swiglu
from verl_rounding_align.rounding import Rounding

compile_ = compile_fx.fx_codegen_and_compile

def compile_when_told(*args, **kwargs):
    print("compiles", flush=True)
    sys.stdin.readline()
    return compile_(*args, **kwargs)

compile_fx.fx_codegen_and_compile = compile_when_told
if {lock} is False:
    backend.first_in_line = lambda key: contextlib.nullcontext()
rows = {{name: torch.ones(5, 8, dtype=torch.bfloat16) for name in ("gate", "up_")}}
print("ready", flush=True)
sys.stdin.readline()
backend.run(swiglu, rows, Rounding(), "compile")
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.fixture
def workers(tmp_path):
    """Start two processes that are ready to compile one region with an empty cache; what they wait for is a line."""
    started = []

    def start(lock: bool) -> list[subprocess.Popen]:
        command = [sys.executable, "-c", SWIGLU.format(lock=lock)]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        for _ in range(2):
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            started.append(subprocess.Popen(command, env=env, **pipes))
        assert [w.stdout.readline() for w in started] == ["ready\n"] * 2
        return started

    yield start
    for worker in started:
        worker.kill()
        worker.communicate()


def test_a_worker_that_meets_a_graph_which_another_compiles_finds_it_on_disk(workers):
    first, second = workers(lock=True)
    first.stdin.write("go\n")
    assert first.stdout.readline() == "compiles\n"
    second.stdin.write("go\n")  # it now waits for the first one, which is told to go on only after this
    assert first.communicate("go\n")[0] == "1\n"
    assert second.communicate()[0] == "0\n"


def test_without_the_line_each_worker_compiles_for_itself(workers):
    """The control: both have missed the cache before either may go on."""
    both = workers(lock=False)
    for worker in both:
        worker.stdin.write("go\n")
    assert [w.stdout.readline() for w in both] == ["compiles\n"] * 2
    assert [w.communicate("go\n")[0] for w in both] == ["1\n"] * 2


def test_a_worker_that_dies_keeps_nobody_waiting(monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "cache_dir", lambda: str(tmp_path))
    code = "import os; from verl_rounding_align import backend\nwith backend.first_in_line('k'): os._exit(3)"
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 3
    with backend.first_in_line("k"):
        (file,) = (tmp_path / "verl-rounding-align").iterdir()
        assert file.read_text() == ""  # the dead one did not say that it is compiled
        with file.open("a+") as other, pytest.raises(BlockingIOError):  # and this process is the first in line now
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert file.read_text() == "1"
    with backend.first_in_line("k"), file.open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # compiled: nobody is held up


def test_without_a_cache_nobody_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "cache_dir", lambda: str(tmp_path))
    with torch._inductor.config.patch(force_disable_caches=True), backend.first_in_line("k"):
        assert list(tmp_path.iterdir()) == []
