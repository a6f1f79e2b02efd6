"""vLLM's own layers as callables, in the mode and with the dispatch that the engine itself would use.

Everything that decides how vLLM rounds comes from vLLM: ``VllmConfig`` as its platform finishes it (mode, backend,
``custom_ops``, IR op priority, Inductor options), ``RMSNorm``, ``SiluAndMul``, ``get_rope``, the fused-experts op, and
``support_torch_compile``, the decorator that compiles its models. Compiled layers run their native implementations. vLLM's
IR ops (``vllm_ir::rms_norm``, ``fused_add_rms_norm``) are lowered as vLLM lowers them: traced through where its IR is not
wrapped (CPU), and by its post-grad pass where it is (CUDA). An op that was left opaque would round.

In a model, the MLP and attention stand between the norms. Here operators take their place that compilers can neither look
into nor fuse with. Where vLLM splits its graph at attention, it splits at that stand-in.

Tested with vLLM 0.28 to 0.32 on a CPU; other releases are refused. Of what is used here, those five differ in one signature,
that of ``cpu_fused_moe`` (``_fused_moe``).

Mirrors: vLLM 0.30 ``Qwen3Attention.forward``, ``Qwen3DecoderLayer.forward``, ``Worker.__init__`` (IR priority, wrap).
"""

from __future__ import annotations

import contextlib
import json
import os
import types
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
import vllm
from packaging.specifiers import SpecifierSet
from torch import nn

from ... import releases
from ..spec import ModelSpec
from .fingerprint import of_config

# vLLM releases; recipes/engine_map ran every one of them
RELEASES, TESTED = SpecifierSet(">=0.28,<0.33"), "0.28.0 to 0.32.0"
_RELEASE = releases.base(vllm.__version__)


def check() -> None:
    """Refuse a vLLM release whose internals were not read.

    Raises:
        UntestedRelease: a ValueError that names the releases that were.
    """
    releases.check("vllm", vllm.__version__, RELEASES, "the probe", TESTED)


check()  # before names are imported that another release may lack

import vllm.ir  # noqa: E402
from vllm.compilation.decorators import support_torch_compile  # noqa: E402
from vllm.config import (  # noqa: E402
    CompilationConfig,
    CompilationMode,
    DeviceConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.activation import SiluAndMul  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

MODES = ("compiled", "eager")
_ATTENTION, _MLP = "verl_rounding_align::attention", "verl_rounding_align::mlp"


def _stand_in(name: str):
    """Return an operator that depends on ``x`` and returns a copy of ``out``, opaque to compilers."""

    def operator(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.clone()

    op = torch.library.custom_op(name, operator, mutates_args=())
    op.register_fake(lambda x, out: torch.empty_like(out))
    return op


attention, mlp = _stand_in(_ATTENTION), _stand_in(_MLP)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables, and restore the environment as it was: vLLM's platform code writes to it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def engine_config(mode: str, split: bool = False, compilation: Mapping | None = None) -> VllmConfig:
    """Return vLLM's own config for ``compiled`` (its default) or ``eager`` (what ``enforce_eager=True`` sets).

    Args:
        mode: one of ``MODES``.
        split: use vLLM's piecewise backend where vLLM compiles one whole graph by default (CPU): the graph is split at
            attention, and IR ops are lowered by vLLM's pass. Where it splits anyway (CUDA) this changes nothing.
        compilation: fields of vLLM's ``compilation_config`` that the engine will be given (``custom_ops``, ...).

    Raises:
        ValueError: unknown mode, with the legal ones.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    options = {**(compilation or {}), "cudagraph_mode": "NONE"}
    if mode == "eager":
        options["mode"] = CompilationMode.NONE
    with _environment():
        config = VllmConfig(
            compilation_config=CompilationConfig(**options),
            device_config=DeviceConfig(current_platform.device_type),
        )
    compilation = config.compilation_config
    if split and mode == "compiled" and compilation.mode != CompilationMode.VLLM_COMPILE:
        compilation.mode, compilation.ir_enable_torch_wrap = CompilationMode.VLLM_COMPILE, True
        compilation.compile_sizes, compilation.splitting_ops = [], list(CompilationConfig._attention_ops)
    if compilation.splitting_ops:  # the graph is split at attention: split at the stand-in, too
        compilation.splitting_ops.append(_ATTENTION)
    return config


class _Rope(nn.Module):
    """Q/K norm (if the family has it) and rotary embedding, composed as in vLLM's ``Qwen3Attention.forward``."""

    def __init__(self, spec):
        super().__init__()
        self.head_dim, self.sizes = spec.head_dim, [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2]
        with mock.patch.dict(_ROPE_DICT, clear=True):  # a rotary embedding keeps the dispatch it was made under
            self.rotary_emb = get_rope(
                spec.head_dim, max_position=spec.max_position, rope_parameters=json.loads(spec.rope_parameters)
            )
        if self.rotary_emb.rotary_dim != spec.head_dim:
            raise ValueError(f"rope_parameters={spec.rope_parameters}: a partial rotary embedding has no region here")
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.eps) if spec.qk_norm else None

    def forward(self, positions, qkv):
        q, k, _ = qkv.split(self.sizes, dim=-1)
        if self.q_norm is not None:
            q = self.q_norm(q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)).view(q.shape)
            k = self.k_norm(k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)).view(k.shape)
        return self.rotary_emb(positions, q, k)


class _SwiGLU(nn.Module):
    """The activation of the dense MLP."""

    def __init__(self, spec):
        super().__init__()
        self.act_fn = SiluAndMul()

    def forward(self, gate_up):
        return self.act_fn(gate_up)


class _Stream(nn.Module):
    """The residual stream through three successive norms, with stand-ins for attention and MLP in between.

    ``input_layernorm`` (add after the previous layer's MLP), attention, ``post_attention_layernorm`` (add after
    attention), MLP, ``norm`` (add after this layer's MLP). The stand-ins read the norm's output, as attention and MLP do,
    and return deltas that are given: every sum is known, whatever the norms return.
    """

    def __init__(self, spec):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.eps)
        self.norm = RMSNorm(spec.hidden_size, eps=spec.eps)

    def forward(self, residual, first_delta, second_delta, third_delta):
        first, residual = self.input_layernorm(first_delta, residual)
        second, residual = self.post_attention_layernorm(attention(first, second_delta), residual)
        third, _ = self.norm(mlp(second, third_delta), residual)
        return first, second, third


def _as_model(cls: type[nn.Module], *args: str) -> type[nn.Module]:
    """Return ``cls`` as vLLM prepares its models for compilation; dimension 0 of ``args`` is dynamic.

    vLLM swaps the code of the class's ``forward`` after compiling it, so every instance gets a class and code of its own.
    """
    forward = types.FunctionType(cls.forward.__code__.replace(), cls.forward.__globals__, "forward")
    own = type(cls.__name__, (cls,), {"forward": forward, "__module__": __name__})
    return support_torch_compile(dynamic_arg_dims=dict.fromkeys(args, 0))(own)


class VllmLayers:
    """vLLM's layers for one model, in one mode; every method takes and returns the model dtype, inputs unchanged.

    Args:
        spec: the model's sizes and constants.
        mode: ``compiled`` or ``eager``.
        seed: for the norms' weights, drawn around one (a weight of one would hide rounding points).
        config: vLLM's config, if not the default one of ``mode``.
    """

    def __init__(self, spec: ModelSpec, mode: str, seed: int = 0, config: VllmConfig | None = None):
        self.spec, self.mode, self.config = spec, mode, config or engine_config(mode)
        self.compiled = mode == "compiled"
        self.device = current_platform.device_type
        self.name = f"vllm {vllm.__version__} {self.device}"
        if self.device == "cpu" and not self.compiled and spec.head_dim % 16:
            raise ValueError(
                f"head_dim={spec.head_dim}: vLLM's rotary kernel for CPU (mode={mode!r}) reads past the end of heads "
                "that are no multiple of 16"
            )
        with self._scope(), set_current_vllm_config(self.config), torch.device(self.device), _default(spec.dtype):
            self._rope = _as_model(_Rope, "positions", "qkv")(spec=spec)
            self._swiglu = _as_model(_SwiGLU, "gate_up")(spec=spec)
            self._stream = _as_model(_Stream, "residual", "first_delta", "second_delta", "third_delta")(spec=spec)
            table = self._rope.rotary_emb._compute_cos_sin_cache().to(torch.float32)
            cache = str(self._rope.rotary_emb.cos_sin_cache.dtype).removeprefix("torch.")
        self.fingerprint = of_config(self.config, rope_cache=cache, dtype=str(spec.dtype).removeprefix("torch."))
        self._cos, self._sin = table.to(self.device).chunk(2, dim=-1)
        generator = torch.Generator().manual_seed(seed)
        for norm in [m for layer in (self._rope, self._stream) for m in layer.modules() if isinstance(m, RMSNorm)]:
            norm.weight.data.copy_(1 + 0.3 * torch.randn(norm.weight.shape, generator=generator))
        self.qk_weights = (
            (self._rope.q_norm.weight.data, self._rope.k_norm.weight.data) if spec.qk_norm else (None, None)
        )
        stream = self._stream
        self.norm_weights = tuple(
            norm.weight.data for norm in (stream.input_layernorm, stream.post_attention_layernorm, stream.norm)
        )

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        """Set what vLLM's worker sets for its process, IR op priority and wrapping, and switch gradients and graph cache off.

        vLLM's cache of compiled graphs is keyed by config and source, not by a layer's sizes: probes would share graphs.
        """
        with (
            _environment(VLLM_USE_AOT_COMPILE="0", VLLM_DISABLE_COMPILE_CACHE="1"),
            vllm.ir.enable_torch_wrap(self.config.compilation_config.ir_enable_torch_wrap),
            self.config.kernel_config.ir_op_priority.set_priority(),
            torch.no_grad(),
        ):
            yield

    def _call(self, layer: nn.Module, *args: torch.Tensor):
        """Call a layer on copies of its inputs, which vLLM's kernels write to."""
        with self._scope(), set_forward_context(None, self.config):
            return layer(*(x.clone() for x in args))

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the engine's own (cos, sin) before it stores them, (tokens, head_dim) fp32."""
        return tuple(torch.cat((half[positions],) * 2, dim=-1) for half in (self._cos, self._sin))

    def rope(self, positions: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated Q (tokens, heads, head_dim) and K from the packed projection (tokens, all heads * head_dim)."""
        return tuple(x.view(len(x), -1, self.spec.head_dim) for x in self._call(self._rope, positions, qkv))

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the activation (tokens, size) of the packed gate and up projections (tokens, 2 * size)."""
        return self._call(self._swiglu, gate_up)

    def stream(self, residual: torch.Tensor, *deltas: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of three successive norms, (tokens, hidden_size) each like the four inputs; see ``_Stream``."""
        return self._call(self._stream, residual, *deltas)

    def experts(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the activation (tokens, size) inside vLLM's fused-experts kernel for one expert.

        The expert's weights are identities, so the kernel's matrix products pass ``gate_up`` (tokens, 2 * size) and the
        activation through. ``size`` must be a multiple of 32, as the CPU kernel requires.
        """
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        options = dict(device=gate_up.device, dtype=gate_up.dtype)
        w13 = torch.eye(2 * size, **options)[None].contiguous()
        w2 = torch.eye(2 * size, size, **options)[None].contiguous()
        weights, ids = torch.ones(tokens, 1, device=gate_up.device), torch.zeros(tokens, 1, dtype=torch.int32)
        if self.device == "cpu":
            from vllm import _custom_ops as ops

            isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"  # vLLM's choice on x86
            w13, w2 = ops.cpu_prepack_moe_weight(w13, isa), ops.cpu_prepack_moe_weight(w2, isa)
            out = _fused_moe(ops, gate_up.clone(), w13, w2, None, None, weights, ids, "silu", isa)
        else:
            from vllm.model_executor.layers.fused_moe import fused_experts

            with self._scope(), set_current_vllm_config(self.config), set_forward_context(None, self.config):
                out = fused_experts(gate_up.clone(), w13, w2, weights, ids.to(gate_up.device))
        return out[:, :size]


def _fused_moe(ops, x: torch.Tensor, *args) -> torch.Tensor:
    """Return the output, like ``x``, of vLLM's fused-experts kernel for CPU."""
    if _RELEASE.release < (0, 30):  # until 0.29 it returns its output, since 0.30 it writes to its first argument
        return ops.cpu_fused_moe(x, *args)
    out = torch.empty_like(x)
    ops.cpu_fused_moe(out, x, *args)
    return out


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """vLLM builds its layers under a default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(spec: ModelSpec, mode: str, compilation: Mapping | None = None) -> VllmLayers:
    """Return vLLM's layers for one model in one mode, as a rollout with these compilation settings runs them.

    Raises:
        ValueError: a vLLM release whose internals were not read, or a model whose layers have no region here.
    """
    check()
    return VllmLayers(spec, mode, config=engine_config(mode, compilation=compilation))
