"""Make a Hugging Face model round where a plan says: claim -> check -> apply -> undo.

The only file that assigns ``.forward``. It rebinds ``forward`` on module *instances*: parameters, state_dict keys,
module names and every other model in the process stay as they are.

The second residual add of a decoder layer is read by the *next* layer. Where it is not stored, the unrounded fp32 sum
crosses the boundary viewed as complex64 (:func:`seal`): FSDP2 casts every floating input of a wrapped layer to bf16,
which would round it again without an error; a complex tensor is not cast by any wrapper, costs no copy, and says what
it is. Hidden states that a user asks for come out decoded.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from torch import nn

from .. import backend as backends
from .. import formats
from ..engines import presets
from ..plan import Plan, parse_plan
from ..regions import KINDS
from ..regions.add_rms_norm import add, add_rms_norm, rms_norm
from ..regions.rope import rope
from ..regions.swiglu import swiglu
from ..rounding import Rounding
from . import families

# What the replaced forwards rely on: every global and attribute that the Hugging Face source names, no more, no less.
# A forward that names anything else (a residual multiplier, a second norm) is another computation: refused.
_NAMES = {
    "DecoderLayer": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "RMSNorm": {"dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"},
    "MLP": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_LAYER_SIGNATURE = (
    "self",
    "hidden_states",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "position_embeddings",
    "kwargs",
)
_EXPERTS = ("grouped_mm", "batched_mm")  # implementations that always call _apply_gate
_ROTARY = "apply_rotary_pos_emb"


def seal(total: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``total`` (..., hidden_size) viewed as complex64 (..., hidden_size / 2): no wrapper casts it."""
    return torch.view_as_complex(total.unflatten(-1, (-1, 2)))


def unseal(x: torch.Tensor) -> torch.Tensor:
    """Return the fp32 tensor that :func:`seal` got; any other tensor as it is."""
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x


@dataclass(frozen=True)
class Site:
    """One place in the model that is patched.

    Args:
        fqn: fully qualified name of the module.
        region, kind: region and site kind (``regions.KINDS``).
        before, after: points stored by the unpatched trainer, and stored now.
    """

    fqn: str
    region: str
    kind: str
    before: frozenset[str]
    after: frozenset[str]


@dataclass(frozen=True)
class _Claim:
    """A callable that will be bound to ``module`` as attribute ``attr``; ``part`` names the family's class.

    ``counted``: whether the callable counts its calls.
    """

    fqn: str
    module: nn.Module
    part: str
    attr: str
    function: Callable
    site: Site | None = None
    counted: bool = True


class Alignment:
    """A plan applied to a model.

    Attributes:
        plan: the Plan.
        sites: every patched Site, in module order.
        backend: ``auto``, ``compile`` or ``eager`` as asked for.
        ran: what that came to when regions ran: {"compile"}, {"eager"}, empty before the first forward.
        calls: fqn -> number of forward calls of that site so far; proof that what was patched is what runs.
        notes: what else was changed, in words (rotary frequencies restored to fp32).
    """

    def __init__(self, plan: Plan, family: families.Family, layers: int, backend: str):
        self.plan, self.family, self.layers, self.backend = plan, family, layers, backend
        self.sites: list[Site] = []
        self.patched: list[str] = []  # fqns of the sites, and of the layers that carry the residual stream between them
        self.calls: Counter[str] = Counter()
        self.notes: list[str] = []
        self.ran: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Give the model its own forwards back, exactly."""
        while self._undo:
            self._undo.pop()()
        self.sites, self.patched, self.notes = [], [], []
        self.calls.clear()
        self.ran.clear()

    def idle(self) -> list[str]:
        """Return the fqns of patched modules that no forward has reached yet."""
        return [fqn for fqn in self.patched if not self.calls[fqn]]

    def __str__(self) -> str:
        if not self.sites:
            return f"rounding_align: {self.family.model_type}, {self.layers} layers, none"
        counts = Counter(site.region for site in self.sites)
        where = ", ".join(f"{region} {n} sites" for region, n in counts.items())
        line = f"{self.family.model_type}, {self.layers} layers, {where}, {self.plan.trainer} -> {self.plan.engine}"
        return "; ".join([f"rounding_align: {line}", *self.notes])


def find_base_models(model: nn.Module) -> list[tuple[str, nn.Module, families.Family]]:
    """Return (fqn, decoder stack, family) for each supported decoder stack in ``model``, wrapped or not.

    Raises:
        ValueError: none is of a supported family; the message names the supported ones.
    """
    found = []
    for fqn, module in model.named_modules():
        for cls in type(module).__mro__:
            for family in families.FAMILIES.values():
                if cls.__module__ == family.module and cls.__name__ == f"{family.prefix}Model":
                    found.append((fqn, module, family))
    if not found:
        config = getattr(model, "config", None)
        model_type = getattr(config, "model_type", type(model).__name__)
        families.get(model_type)  # the usual case: raises, naming the supported families
        raise ValueError(
            f"model_type={model_type!r}: no {families.FAMILIES[model_type].prefix}Model inside {type(model).__name__}"
        )
    return found


def align(
    model: nn.Module,
    plan: Plan | str | list | dict | None,
    engine: str = "vllm_compiled",
    backend: str | None = None,
    key: str = "rounding_align",
    format: str | formats.Format | None = None,
) -> Alignment:
    """Make ``model`` round where ``plan`` says; nothing is changed if any check fails.

    Args:
        model: a Transformers 5 model of a supported family, bare or inside PEFT; before FSDP wrapping (parameters may
            still be fp32 or on meta: the model dtype is read when it runs).
        plan: a Plan, or a value for :func:`verl_rounding_align.parse_plan`.
        engine: preset of the inference engine, where ``plan`` is a value.
        backend: ``auto`` (compile where there is a compiler), ``compile`` or ``eager``; None takes the plan's.
        key: the config key, for messages.
        format: where ``plan`` is a value: an emulated format (``formats.CHOICES``) that an fp32 model stores everything
            in, instead of its dtype; even with plan ``none``, all sites are patched and linear layers hooked.

    Returns:
        Alignment, with ``.plan``, ``.sites``, ``.calls`` and ``.undo()``.

    Raises:
        ValueError: unknown value, unsupported family or structure, or somebody else's patch on a module concerned.
    """
    if not isinstance(plan, Plan):
        plan = parse_plan(plan, engine=engine, key=key, format=format)
    backend = backends.check(backend or plan.backend)
    check_transformers()
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or model._compiled_call_impl is not None:
        raise ValueError(
            f"{key}={str(plan)!r}: the model is compiled as a whole, which may delete interior rounding points; "
            "align first, compile afterwards"
        )
    stacks = find_base_models(model)
    family = stacks[0][2]
    alignment = Alignment(plan, family, sum(len(stack.layers) for _, stack, _ in stacks), backend)
    if not plan:
        return alignment
    claims = [claim for fqn, stack, fam in stacks for claim in _claims(fqn, stack, fam, alignment)]
    _check(claims, family, plan, key)
    if plan.format is not None:
        if backend == "compile":
            raise ValueError(f"backend='compile': format {plan.format} is emulated op by op; choose auto or eager")
        alignment.backend = "eager"
        alignment._undo.extend(handle.remove for handle in formats.store_tensors(model, plan.format))
    for claim in claims:
        setattr(claim.module, claim.attr, types.MethodType(claim.function, claim.module))
        alignment._undo.append(lambda c=claim: delattr(c.module, c.attr))
        if claim.counted:
            alignment.patched.append(claim.fqn)
        if claim.site is not None:
            alignment.sites.append(claim.site)
    if plan.rounding("attention") and plan.engine != plan.trainer:
        for _, stack, _ in stacks:
            _restore_frequencies(stack.rotary_emb, alignment)
    if plan.rounding("mlp_add"):
        for _, stack, _ in stacks:
            alignment._undo.append(stack.register_forward_hook(_decode_hidden_states).remove)
    assert alignment.sites, f"plan {plan} has no site in {type(model).__name__}"
    return alignment


def _restore_frequencies(rotary: nn.Module, alignment: Alignment) -> None:
    """Give a rotary module fp32 frequencies again if ``model.to(dtype)`` has rounded them.

    Engines keep them in fp32, and so does ``from_pretrained(dtype=...)``; verl 0.9 calls ``.to(model_dtype)`` after it,
    which rounds them where ``fsdp_config.model_dtype`` is bf16 (its default is fp32).
    In bf16 they are off by up to 2^-9, which at position 1000 turns some pairs by a radian: no rounding point, and larger
    than all of them together (mean log-prob difference of 0.09 nats on SmolLM2-135M at 512 tokens).
    """
    dtype = rotary.inv_freq.dtype
    if dtype == torch.float32:
        return
    fresh = type(rotary)(config=rotary.config)
    for name, buffer in fresh.named_buffers():
        before = getattr(rotary, name)
        setattr(rotary, name, buffer.to(before.device))
        alignment._undo.append(lambda name=name, before=before: setattr(rotary, name, before))
    alignment.notes.append(f"rotary frequencies were {str(dtype).removeprefix('torch.')}, restored to float32")


def check_transformers() -> None:
    """Raise ValueError unless the installed Transformers is a release that the patch is written for."""
    low, high = families.TRANSFORMERS
    if not Version(low) <= Version(transformers.__version__) < Version(high):
        raise ValueError(
            f"transformers {transformers.__version__} is installed; rounding_align patches releases >={low},<{high}"
        )


def _claims(prefix: str, stack: nn.Module, family: families.Family, alignment: Alignment) -> list[_Claim]:
    """Return what the alignment's plan wants to bind in one decoder stack."""
    plan, trainer = alignment.plan, presets.get(alignment.plan.trainer)
    prefix = f"{prefix}." if prefix else ""
    claims = []

    def claim(fqn, module, part, kind, build, *args, attr="forward"):
        rnd = plan.rounding(kind)
        fqn = prefix + fqn
        site = Site(fqn, KINDS[kind], kind, trainer.at(kind), rnd.points)
        function = build(rnd, _Context(alignment, fqn), *args)
        claims.append(_Claim(fqn, module, part, attr, function, site))

    last = len(stack.layers) - 1
    for i, layer in enumerate(stack.layers):
        fqn = f"layers.{i}"
        if plan.rounding("mlp_add"):
            claim(f"{fqn}.input_layernorm", layer.input_layernorm, "RMSNorm", "mlp_add", _norm_forward)
        if plan.rounding("attention"):
            attention = layer.self_attn
            rotary = None if plan.rounding("attention").stores("cos_sin") else stack.rotary_emb
            claim(f"{fqn}.self_attn", attention, "Attention", "attention", _attention_forward, family, rotary)
            for name in ("q_norm", "k_norm") if family.qk_norm else ():
                norm = getattr(attention, name)
                name = f"{prefix}{fqn}.self_attn.{name}"
                claims.append(_Claim(name, norm, "RMSNorm", "forward", _pass_through, counted=False))
        if plan.rounding("attn_add"):
            norm = layer.post_attention_layernorm
            claim(f"{fqn}.post_attention_layernorm", norm, "RMSNorm", "attn_add", _norm_forward)
            add_kind = "final" if i == last else "mlp_add"
            context = _Context(alignment, prefix + fqn)
            function = _layer_forward(plan.rounding("mlp_add"), plan.rounding(add_kind), i == 0, context)
            claims.append(_Claim(f"{prefix}{fqn}", layer, "DecoderLayer", "forward", function))
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None and plan.rounding("experts"):
            claim(f"{fqn}.mlp.experts", experts, "Experts", "experts", _apply_gate, attr="_apply_gate")
        elif experts is None and plan.rounding("mlp"):
            claim(f"{fqn}.mlp", layer.mlp, "MLP", "mlp", _mlp_forward)
    if plan.rounding("final"):
        claim("norm", stack.norm, "RMSNorm", "final", _norm_forward)
    return claims


def _check(claims: list[_Claim], family: families.Family, plan: Plan, key: str) -> None:
    """Raise ValueError unless every claim meets the module that it is written for."""
    for c in claims:
        cls, module = type(c.module).__name__, c.module
        where = f"{key}={'+'.join(plan.groups)!r}: {c.fqn} ({cls})"
        if c.attr in module.__dict__:
            other = module.__dict__[c.attr]
            owner = getattr(inspect.unwrap(getattr(other, "__func__", other)), "__module__", type(other).__name__)
            if owner == __name__:
                raise ValueError(f"{where} is aligned already; call undo() on that Alignment first")
            raise ValueError(f"{where} has its {c.attr} patched by {owner}; rounding_align cannot patch it as well")
        forward = inspect.unwrap(getattr(type(module), c.attr))
        if c.part == "Experts":
            implementation = getattr(module.config, "_experts_implementation", None)
            if implementation not in _EXPERTS:
                raise ValueError(
                    f"{where}: experts_implementation={implementation!r} does not call {c.attr} in every case; "
                    f"choose {' or '.join(_EXPERTS)}"
                )
            if forward.__module__ != "transformers.integrations.moe":
                raise ValueError(f"{where} has its class's {c.attr} replaced by {forward.__module__}")
        elif forward.__module__ != family.module:
            raise ValueError(
                f"{where} has its class's forward replaced by {forward.__module__}, expected {family.module}"
            )
        elif c.part == "Attention":
            rotary = inspect.unwrap(forward.__globals__.get(_ROTARY))
            if _ROTARY not in forward.__code__.co_names or forward.__code__.co_freevars:
                raise ValueError(f"{where}: its forward does not call {_ROTARY} of {family.module}")
            if rotary.__module__ != family.module:
                raise ValueError(f"{where} has {_ROTARY} replaced by {rotary.__module__}, expected {family.module}")
        elif set(forward.__code__.co_names) != _NAMES[c.part]:
            raise ValueError(
                f"{where}: transformers {transformers.__version__} computes it differently from what rounding_align is "
                f"written for: it names {sorted(forward.__code__.co_names)}, expected {sorted(_NAMES[c.part])}"
            )
        if c.part == "DecoderLayer" and tuple(inspect.signature(forward).parameters) != _LAYER_SIGNATURE:
            raise ValueError(f"{where}: its forward's signature is {inspect.signature(forward)}")
        activation = getattr(module, "act_fn", None)
        if c.part in ("MLP", "Experts") and not isinstance(activation, nn.SiLU | type(_silu())):
            raise ValueError(f"{where}: its activation is {type(activation).__name__}, expected SiLU")


def _silu() -> nn.Module:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


class _Context:
    """What a bound forward shares with its Alignment: the count of its calls, and the backend of its regions."""

    def __init__(self, alignment: Alignment, fqn: str):
        self.alignment, self.fqn = alignment, fqn

    @torch.compiler.disable
    def count(self) -> None:
        self.alignment.calls[self.fqn] += 1

    @torch.compiler.disable
    def backend(self, x: torch.Tensor) -> str:
        """Return ``compile`` or ``eager``: settled where the model runs, not where it is built."""
        backend = backends.resolve(self.alignment.backend, x.device.type)
        self.alignment.ran.add(backend)
        return backend

    def run(self, function: Callable, rows: dict[str, torch.Tensor], rnd: Rounding, **kwargs):
        """Run a region function on rows of shape (..., features)."""
        first = next(iter(rows.values()))
        backend = self.backend(first)
        if backend == "eager":
            return backends.run(function, rows, rnd, backend, **kwargs)
        rows = {name: backends.plain(x, x.shape[:-1].numel(), x.shape[-1]) for name, x in rows.items()}
        out = backends.run(function, rows, rnd, backend, **kwargs)
        shaped = tuple(x.view(*first.shape[:-1], x.shape[-1]) for x in (out if isinstance(out, tuple) else (out,)))
        return shaped if isinstance(out, tuple) else shaped[0]


def _pass_through(self, hidden_states):
    """Forward of Q/K norms whose maths runs inside the rope region."""
    return hidden_states


def _mlp_forward(rnd: Rounding, context: _Context) -> Callable:
    def forward(self, x):
        context.count()
        return self.down_proj(context.run(swiglu, {"gate": self.gate_proj(x), "up_": self.up_proj(x)}, rnd))

    return forward


def _apply_gate(rnd: Rounding, context: _Context) -> Callable:
    def apply_gate(self, gate_up_out):
        context.count()
        gate, up_ = gate_up_out.chunk(2, dim=-1)
        return context.run(swiglu, {"gate": gate, "up_": up_}, rnd)

    return apply_gate


def _attention_forward(rnd: Rounding, context: _Context, family: families.Family, rotary: nn.Module | None) -> Callable:
    source = inspect.unwrap(family.cls("Attention").forward)
    rotary_forward = None if rotary is None else rotary.forward

    def forward(self, hidden_states, position_embeddings, *args, **kwargs):
        context.count()
        if rotary_forward is not None:
            position_ids = kwargs.get("position_ids")
            if position_ids is None:
                raise ValueError("a plan that keeps cos and sin in fp32 needs position_ids in the attention's kwargs")
            position_embeddings = rotary_forward(hidden_states.new_empty(0, dtype=torch.float32), position_ids)

        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            assert unsqueeze_dim == 1, f"heads at dimension 1 expected, got unsqueeze_dim={unsqueeze_dim}"
            norms = dict(q_weight=self.q_norm.weight, k_weight=self.k_norm.weight) if family.qk_norm else {}
            eps = self.q_norm.variance_epsilon if family.qk_norm else 0.0
            return _rope(q, k, cos, sin, rnd, context.backend(q), norms, eps)

        # the same code with a private copy of its globals: no other model in the process sees the replacement
        clone = types.FunctionType(
            source.__code__, {**source.__globals__, _ROTARY: apply_rotary_pos_emb}, source.__name__, source.__defaults__
        )
        clone.__kwdefaults__ = source.__kwdefaults__
        return clone(self, hidden_states, position_embeddings, *args, **kwargs)

    return forward


def _rope(q, k, cos, sin, rnd, backend, norms, eps):
    """Return rotated q (batch, heads, tokens, head_dim) and k (batch, kv_heads, tokens, head_dim), model dtype.

    cos, sin: (batch or 1, tokens, head_dim). Heads lie inside tokens in memory, so the compiled region's rows are tokens.
    """
    batch, _, tokens, head_dim = q.shape
    if backend == "eager":
        rows = dict(q=q, k=k, cos=cos.unsqueeze(1), sin=sin.unsqueeze(1))
        return backends.run(rope, rows, rnd, backend, params=norms, eps=eps)

    def flat(x):
        return backends.plain(x.transpose(1, 2), batch * tokens, x.shape[1], head_dim)

    def table(x):
        return backends.plain(x.expand(batch, tokens, head_dim), batch * tokens, 1, head_dim)

    out = backends.run(
        rope, dict(q=flat(q), k=flat(k), cos=table(cos), sin=table(sin)), rnd, backend, params=norms, eps=eps
    )
    return tuple(x.view(batch, tokens, x.shape[1], head_dim).transpose(1, 2) for x in out)


def _norm_forward(rnd: Rounding, context: _Context) -> Callable:
    def forward(self, hidden_states, residual=None, with_carry=False):
        """Return the norm of a residual sum, or of ``hidden_states + residual``; with it the carry, if asked or added.

        Args:
            hidden_states: (..., hidden_size) model dtype, or the sealed sum (..., hidden_size / 2) complex64.
            residual: (..., hidden_size) model dtype or fp32: add it first, return (out, carry).
            with_carry: return (out, carry) of a sum that is there already.
        """
        context.count()
        dtype, weight, eps = self.weight.dtype, self.weight, self.variance_epsilon
        if residual is not None:
            return context.run(
                add_rms_norm, dict(delta=hidden_states, residual=residual), rnd, params=dict(weight=weight), eps=eps
            )
        total = unseal(hidden_states)
        out = context.run(rms_norm, dict(total=total), rnd, params=dict(weight=weight), eps=eps, dtype=dtype)
        return (out, rnd("carry", total, dtype)) if with_carry else out

    return forward


def _layer_forward(rnd_in: Rounding, rnd_out: Rounding, first: bool, context: _Context) -> Callable:
    """Return a decoder layer's forward; ``rnd_in`` governs the sum it reads, ``rnd_out`` the sum it returns.

    The forward takes hidden states (batch, tokens, hidden_size) in the model dtype, or, after the first layer and where
    ``rnd_in`` does not store them, sealed (batch, tokens, hidden_size / 2) complex64; it returns them likewise.
    """
    sealed_in = not first and not (rnd_in.stores("sum") and rnd_in.stores("carry"))

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        context.count()
        dtype = self.input_layernorm.weight.dtype
        narrow = dtype != torch.promote_types(dtype, torch.float32)
        expected = torch.complex64 if narrow and sealed_in else dtype
        if hidden_states.dtype != expected:
            raise ValueError(_dtype_message(hidden_states.dtype, expected, dtype))
        hidden_states, residual = self.input_layernorm(hidden_states, with_carry=True)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        total = context.run(add, dict(delta=hidden_states, residual=residual), rnd_out)
        return total if total.dtype == hidden_states.dtype else seal(total)

    return forward


def _dtype_message(got: torch.dtype, expected: torch.dtype, weights: torch.dtype) -> str:
    sealed = " (the unrounded residual sum, viewed as complex)" if expected.is_complex else ""
    return (
        f"rounding_align: a decoder layer got hidden states in {got}, expected {expected}{sealed}; its weights are in "
        f"{weights}. Either a wrapper casts the inputs of layers, or the parameters are not in the model dtype (autocast "
        "over fp32 parameters keeps the residual stream in fp32: cast the model, or use FSDP mixed precision)"
    )


def _decode_hidden_states(module, args, output):
    """Forward hook of the decoder stack: hidden states that were asked for leave in the model dtype, not sealed."""
    dtype = module.norm.weight.dtype

    def decode(entry):
        if isinstance(entry, tuple):
            return tuple(decode(x) for x in entry)
        return unseal(entry).to(dtype) if isinstance(entry, torch.Tensor) and entry.is_complex() else entry

    if isinstance(output, tuple):
        return decode(output)
    if output.get("hidden_states") is not None:
        output["hidden_states"] = decode(output["hidden_states"])
    return output
