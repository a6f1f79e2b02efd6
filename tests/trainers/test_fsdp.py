"""Contract under sharding: on two gloo ranks, with verl's mixed precision (bf16 parameters, fp32 reduction, inputs cast),
the aligned model gives bit for bit the logits and gradients of the aligned model on one rank, with eager and with
compiled regions; an unsealed fp32 stream does not get through (it is cast by the wrapper, and that is an error)."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharding import wrap
from tiny import leave, step, tiny, tokens
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from verl_rounding_align import align
from verl_rounding_align.trainers import stream
from verl_rounding_align.trainers.stream import unseal

ENGINES = ("hf_eager", "vllm_compiled", "vllm_compiled_split")
CASES = [  # strategy, model type, backend
    ("fsdp2", "qwen3", "eager"),
    ("fsdp2", "qwen3", "compile"),
    ("fsdp2", "qwen3_moe", "eager"),
    ("fsdp1", "qwen3", "eager"),
    ("fsdp1", "qwen3_moe", "eager"),
]


def full_gradients(model, strategy: str) -> dict[str, torch.Tensor]:
    if strategy == "fsdp2":
        return {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {n.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for n, p in model.named_parameters()}


def build(model_type: str, backend: str, reentrant, engine: str, dtype):
    model = tiny(model_type)
    if dtype != torch.bfloat16:
        model = model.to(dtype)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    align(model, "rope+swiglu+add_rms_norm+carry", engine=engine, backend=backend)
    return model


def refused(got: torch.dtype) -> str:
    """Return the pattern of the whole message of a layer whose stream came in another dtype than it was sealed in."""
    said = (
        f"rounding_align: a decoder layer got hidden states in {got}, expected torch.complex64 (the unrounded residual sum, "
        "viewed as complex); its weights are in torch.bfloat16. Either a wrapper casts the inputs of layers, or the "
        "parameters are not in the model dtype (autocast over fp32 parameters keeps the residual stream in fp32: cast the "
        "model, or use FSDP mixed precision)"
    )
    return f"^{re.escape(said)}$"


def worker(rank: int, path: str, strategy: str, model_type: str, backend: str):
    """Every model here is aligned with ``backend``: compiled regions are compared with compiled ones on one rank, which run
    the same kernels on the same shapes, so that the order of Inductor's sums is no difference."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    ids = tokens()
    found = {}
    engines = ENGINES if backend == "eager" else ENGINES[1:]  # each compiles graphs of its own: half a minute for these
    for engine in engines:
        for reentrant in (None, False, True):
            logits, gradients = step(build(model_type, backend, reentrant, engine, torch.bfloat16), ids)
            sharded = build(model_type, backend, reentrant, engine, torch.float32)
            model = wrap(sharded, strategy, cast=True, orig_params=True)
            with torch.autocast("cpu", torch.bfloat16):
                model.zero_grad()
                out = model(ids, use_cache=False).logits
            out.float().logsumexp(-1).pow(2).mean().backward()
            case = (strategy, model_type, backend, engine, reentrant)
            assert torch.equal(out, logits), case
            # both ranks see the same batch: the fp32 mean over ranks of equal bf16 gradients is exact
            full = {name: g.to(torch.bfloat16) for name, g in full_gradients(model, strategy).items()}
            assert full.keys() == gradients.keys()
            for name, gradient in full.items():
                assert torch.equal(gradient, gradients[name]), (*case, name)
            if strategy == "fsdp1":  # verl's form
                model = wrap(build(model_type, backend, reentrant, engine, torch.float32), strategy)
                with torch.autocast("cpu", torch.bfloat16):
                    assert torch.equal(model(ids, use_cache=False).logits, logits), case
        found[engine] = logits, gradients
    # negative control: each engine's points give other logits, and another gradient of every norm
    for one, other in itertools.combinations(engines, 2):
        assert not torch.equal(found[one][0], found[other][0]), (one, other)
        for name, gradient in found[one][1].items():
            assert "norm" not in name or not torch.equal(gradient, found[other][1][name]), (one, other, name)
    # and the backend is the one that is asked for
    assert (counters["stats"]["unique_graphs"] > 0) == (backend == "compile")
    # negative control: an fp32 stream passed as it is gets cast by the wrapper, and that is an error
    stream.seal = lambda total: total
    model = wrap(build(model_type, backend, None, "vllm_compiled", torch.float32), strategy, cast=True)
    with pytest.raises(ValueError, match=refused(torch.bfloat16)):
        model(ids)
    if strategy == "fsdp1":  # verl leaves FSDP1's default, which does not cast: the same fp32 stream arrives, unsealed
        seen = []
        model = wrap(build(model_type, backend, None, "vllm_compiled", torch.float32), strategy, cast=False)
        model.model.layers[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
        with pytest.raises(ValueError, match=refused(torch.float32)):
            model(ids)
        assert seen == [torch.float32]
    leave()


@pytest.mark.parametrize(("strategy", "model_type", "backend"), CASES)
def test_sharded_equals_unsharded(tmp_path, strategy, model_type, backend):
    mp.spawn(worker, args=(str(tmp_path / "rendezvous"), strategy, model_type, backend), nprocs=2)


def test_unsealed_stream_would_be_rounded_silently_by_fsdp2(tmp_path):
    """The trap that sealing avoids, shown on the wrapper alone: fp32 in, bf16 inside, no error."""
    mp.spawn(trap, args=(str(tmp_path / "rendezvous"),), nprocs=1)


class Probe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.seen = x.dtype
        return unseal(x) * self.weight


def trap(rank: int, path: str):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    probe = fully_shard(Probe(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    x = torch.randn(4, 8)
    probe(x)
    assert probe.seen == torch.bfloat16
    assert torch.equal(probe(stream.seal(x)), x) and probe.seen == torch.complex64
    leave()
