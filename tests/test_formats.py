"""Contract of the emulated formats: rounding is exact (fp64 and rational arithmetic, torch's bf16 and fp16 casts); p8 in an
fp32 model is bf16 in a bf16 model, in every bit of the logits, for every engine's points; a model of any other number of
bits differs; what cannot be emulated is an error."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import MODEL_TYPES, step, tiny, tokens
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from verl_rounding_align import align, formats, parse_plan
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.formats import parse
from verl_rounding_align.regions import KINDS
from verl_rounding_align.rounding import Rounding

BITS = range(2, 24)
DENSE = [name for name in MODEL_TYPES if name != "qwen3_moe"]
# lower halves around the ties of every width: half a step is 2^(23 - bits); with and without the bit above it, which says even or odd
LOW = sorted(
    {(low + d) & 0xFFFF for n in range(17) for low in ((1 << n) & 0xFFFF, (3 << n) & 0xFFFF) for d in (-1, 0, 1)}
)


def values(bits) -> torch.Tensor:
    """Return fp32 values with these bit patterns."""
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


EVERY = values((np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array(LOW, dtype=np.uint32)).flatten())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two fp32 tensors are equal, zeros with their signs, NaN as NaN."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


@pytest.mark.parametrize("bits", BITS)
def test_every_upper_half_of_a_pattern_rounds_as_fp64_arithmetic_says(bits):
    """Division by a power of two and rint are exact in fp64; exponents from -126 on, as fp32 and bf16 have."""
    x = EVERY.double().numpy()
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, -126)
        unit = np.ldexp(1.0, exponent - (bits - 1))
        expected = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, x), expected)
        expected = torch.from_numpy(expected.astype(np.float32))
    assert same_bits(parse(f"p{bits}").round(EVERY), expected)


@pytest.mark.parametrize("bits", BITS)
def test_every_pattern_of_one_octave_rounds_to_the_nearest_integer_ties_to_even(bits):
    """All 2^23 numbers in [1, 2), by integer arithmetic on the significand."""
    m = torch.arange(1 << 23, 1 << 24)
    unit = 1 << (24 - bits)
    low, up = m // unit, m % unit
    expected = (low + ((up > unit // 2) | ((up == unit // 2) & (low % 2 == 1)))) * unit
    assert torch.equal(parse(f"p{bits}").round(m.float() / 2**23), expected.float() / 2**23)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(BITS))
@example(0x7F7FFFFF, BITS[0])  # the largest number, which rounds to infinity; drawn too seldom
def test_any_pattern_rounds_to_the_nearest_by_rational_arithmetic(pattern, bits):
    x = struct.unpack("<f", struct.pack("<I", pattern))[0]
    got = parse(f"p{bits}").round(values([pattern])).item()
    if not math.isfinite(x):
        assert got == x or (math.isnan(got) and math.isnan(x))
        return
    exponent = -126
    while abs(Fraction(x)) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - bits + 1)
    expected = round(Fraction(x) / unit) * unit  # Python rounds halves to even
    if abs(expected) >= 2**128:
        assert got == math.copysign(math.inf, x)
    else:
        assert Fraction(got) == expected and math.copysign(1, got) == math.copysign(1, x)


@pytest.mark.parametrize("name,dtype", [("p8", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_16_bit_format_is_torchs_cast(name, dtype):
    assert same_bits(parse(name).round(EVERY), EVERY.to(dtype).float())


def test_fp16_rounds_as_fp64_arithmetic_says():
    """Every upper half of a pattern around ties: units of 2^-24 below 2^-14, infinity from half a step above 65504 on."""
    x = EVERY[EVERY.isfinite()].double().numpy()
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, -14) - 10)
    expected = np.rint(x / unit) * unit
    expected = np.where(np.abs(expected) >= 65536, np.copysign(np.inf, x), expected)
    assert same_bits(parse("fp16").round(EVERY[EVERY.isfinite()]), torch.from_numpy(expected.astype(np.float32)))
    ends = torch.tensor([65519.99, 65520.0, -65520.0, 2.0**-25, 2.0**-25 * 1.001])
    assert parse("fp16").round(ends).tolist() == [65504.0, math.inf, -math.inf, 0.0, 2.0**-24]


def test_fp32_stores_everything_and_rounding_twice_changes_nothing():
    assert same_bits(parse("fp32").round(EVERY), EVERY)
    for bits in BITS:
        once = parse(f"p{bits}").round(EVERY)
        assert same_bits(parse(f"p{bits}").round(once), once)


def test_nan_survives_among_numbers_and_infinities_of_both_signs_are_no_nan():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0626])
    for chosen in ([0, 1, 3], [2, 3], [0, 1, 2, 3]):
        expected = torch.tensor([math.inf, -math.inf, math.nan, 1.125])[chosen]
        assert same_bits(parse("p4").round(x[chosen]), expected)


def test_a_stored_value_passes_its_gradient_on_stored():
    x = torch.tensor([1.01, -3.3], requires_grad=True)
    stored = parse("p4").store(x)
    stored.backward(torch.tensor([1.01, 0.3]))
    assert torch.equal(stored, torch.tensor([1.0, -3.25])) and torch.equal(x.grad, torch.tensor([1.0, 0.3125]))


def test_gradients_may_have_a_format_of_their_own():
    """Of a stored value and of a parameter; the forward pass is the coarse format's either way."""
    chosen = replace(parse("p4"), gradients=parse("bf16"))
    x = torch.tensor([1.01, -3.3], requires_grad=True)
    stored = chosen.store(x)
    stored.backward(torch.tensor([1.01, 0.3]))
    assert torch.equal(stored, parse("p4").round(x))
    assert torch.equal(x.grad, torch.tensor([1.01, 0.3]).bfloat16().float()) and str(chosen) == "p4 (gradients bf16)"

    gradients = {}
    for name, format in (("own", parse("p4")), ("bf16", chosen), ("exact", replace(chosen, gradients=parse("fp32")))):
        model = tiny("qwen3", dtype=torch.float32)
        formats.store_parameters(model, format)
        align(model, "none", format=format)
        loss = model(tokens(), use_cache=False).logits.square().mean()
        loss.backward()
        gradients[name] = (loss.item(), {n: p.grad for n, p in model.named_parameters()})
    assert len({loss for loss, _ in gradients.values()}) == 1
    for name, format in (("own", parse("p4")), ("bf16", parse("bf16"))):
        assert all(same_bits(g, format.round(g)) for g in gradients[name][1].values())
    coarse = (g for g in gradients["bf16"][1].values())
    assert any(not same_bits(g, parse("p4").round(g)) for g in coarse)

    def error(name):  # squared, over all parameters
        exact = gradients["exact"][1]
        return sum((g - exact[n]).square().sum() for n, g in gradients[name][1].items())

    assert 0 < error("bf16") < error("own") / 30


def test_rounding_stores_in_its_format_where_it_stores():
    x, rnd = torch.tensor([1.01]), Rounding({"sum"}, parse("p4"))
    assert rnd("sum", x, torch.float32).item() == 1.0 and rnd("carry", x, torch.float32) is x
    assert str(rnd) == "{sum} in p4"


def test_a_plan_in_a_format_covers_every_site_even_when_nothing_is_aligned():
    plan = parse_plan("none", format="p4")
    assert [kind for kind, _ in plan.roundings] == list(KINDS) and bool(plan) and str(plan) == "none in p4"
    assert all(rnd.points == PRESETS["hf_eager"].points[kind] for kind, rnd in plan.roundings)
    plan = parse_plan("rope", format="p4")
    assert plan.rounding("attention").points == {"cos_sin"} and plan.rounding("mlp").points == {"act"}
    assert not parse_plan("none") and parse_plan("rope").rounding("mlp") is None


# ---- models


def wide_attention(module, q, k, v, mask, scaling=None, **kwargs):
    """SDPA in fp32, result stored in the dtype of the inputs: what bf16 kernels do but for their interior."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q.float(), k, v, attn_mask=mask, scale=scaling, is_causal=mask is None)
    return out.to(q.dtype).transpose(1, 2).contiguous(), None


def wide_linear(module, args, out):
    bias = None if module.bias is None else module.bias.float()
    return F.linear(args[0].float(), module.weight.float(), bias).to(out.dtype)


def twins(model_type: str, wide: bool = True, format: str = "p8"):
    """Return a bf16 model and its fp32 copy; ``wide``: with matmuls in fp32 whose results are stored in bf16."""
    if wide:
        AttentionInterface.register("wide", wide_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register("wide", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    extra = dict(attention_bias=True) if model_type in ("llama", "qwen3") else {}
    real, emulated = tiny(model_type, **extra), tiny(model_type, dtype=torch.float32, **extra)
    emulated.load_state_dict({name: x.float() for name, x in real.state_dict().items()})
    formats.store_parameters(emulated, format)
    for model in (real, emulated) if wide else ():
        model.config._attn_implementation = "wide"
    for module in real.modules() if wide else ():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(wide_linear)
    return real, emulated


@pytest.mark.parametrize("model_type", DENSE)
def test_p8_is_the_unpatched_bf16_model_in_every_bit(model_type):
    """Oracle: Hugging Face's own bf16 code; only its matmuls and attention accumulate in fp32 torch operators, since the
    order of sums in bf16 CPU kernels is their own (next test)."""
    real, emulated = twins(model_type)
    align(emulated, "none", format="p8")
    logits, gradients = step(real, tokens())
    emulated_logits, emulated_gradients = step(emulated, tokens())
    assert torch.equal(emulated_logits, logits.float())
    last = len(real.model.layers) - 1
    single = ["lm_head.weight", *(f"model.layers.{last}.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))]
    for name in single:  # one reader of each stored tensor on the way back: the gradients are equal as well
        assert torch.equal(emulated_gradients[name], gradients[name].float()), name
    for name, g in gradients.items():  # several: a sum is stored once, not each term; steps of 2^-9, not aligned
        cosine = F.cosine_similarity(g.float().flatten(), emulated_gradients[name].flatten(), 0)
        assert cosine > 0.999, name


@pytest.mark.parametrize("model_type", DENSE)
def test_with_torchs_bf16_kernels_logits_differ_by_a_step_or_two(model_type):
    """Kernels of bf16 matmuls sum in blocks, and bf16 attention stores its probabilities: many logits move, by little.
    Measured: 46 % of Qwen3's logits, by at most 2^-5, one step of bf16 from 4 to 8, where the largest is 6.7."""
    real, emulated = twins(model_type, wide=False)
    align(emulated, "none", format="p8")
    with torch.no_grad():
        a, b = real(tokens()).logits.float(), emulated(tokens()).logits
    assert (a - b).abs().max() <= 3 * 2**-8 * a.abs().max()


@pytest.mark.parametrize("engine", list(PRESETS))
@pytest.mark.parametrize("model_type", DENSE)
def test_p8_is_bf16_at_every_engines_points(model_type, engine):
    """One implementation: the same regions and plan in bf16, by casts, and in emulation."""
    real, emulated = twins(model_type)
    align(real, ["rope", "swiglu", "add_rms_norm", "carry"], engine=engine, backend="eager")
    align(emulated, ["rope", "swiglu", "add_rms_norm", "carry"], engine=engine, format="bf16")
    with torch.no_grad():
        assert torch.equal(emulated(tokens()).logits, real(tokens()).logits.float())


def test_other_bits_and_other_points_give_other_logits():
    """Negative control of the equalities above."""
    found = []
    for name, regions in [("p8", "none"), ("p7", "none"), ("p9", "none"), ("p8", "rope"), ("p8", "carry")]:
        _, emulated = twins("qwen3", format="p7")  # weights that all three formats hold
        align(emulated, regions, format=name)
        found.append(emulated(tokens()).logits)
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_every_logit_is_stored_and_undo_gives_the_fp32_model_back():
    _, emulated = twins("qwen3", wide=False, format="p4")
    ids = tokens()
    plain, gradients = step(emulated, ids)
    alignment = align(emulated, "all", format="p4")
    logits, coarse = step(emulated, ids)
    assert torch.equal(parse("p4").round(logits), logits) and not torch.equal(logits, plain)
    assert all(torch.equal(parse("p4").round(g), g) for g in coarse.values())
    alignment.undo()
    again, back = step(emulated, ids)
    assert torch.equal(again, plain) and all(torch.equal(back[n], g) for n, g in gradients.items())


# ---- errors: whole messages


@pytest.mark.parametrize(
    "model_type,dtype,kwargs,message",
    [
        (
            "qwen3",
            torch.float32,
            dict(format="p1"),
            "format='p1': unknown format 'p1'; choose from bf16, fp16, fp32, p2 to p23 (a significand of so many bits)",
        ),
        (
            "qwen3",
            torch.bfloat16,
            dict(format="p8"),
            "format='p8': model.embed_tokens.weight is torch.bfloat16; emulation needs torch.float32",
        ),
        (
            "qwen3",
            torch.float32,
            dict(format="p4"),
            "format='p4': model.embed_tokens.weight is not stored in the format; call formats.store_parameters(model, "
            "'p4') first, and after every optimizer step",
        ),
        (
            "qwen3",
            torch.float32,
            dict(format="p4", backend="compile"),
            "backend='compile': format p4 is emulated op by op; choose auto or eager",
        ),
        (
            "qwen3_moe",
            torch.float32,
            dict(format="fp32"),
            "format='fp32': model.layers.1.mlp.experts (Qwen3MoeExperts) cannot be emulated",
        ),
    ],
)
def test_what_cannot_be_emulated_is_an_error_that_changes_nothing(model_type, dtype, kwargs, message):
    model = tiny(model_type, dtype=dtype)
    with pytest.raises(ValueError) as error:
        align(model, "all", **kwargs)
    assert str(error.value) == message
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError) as error:
        parse("p4").round(torch.ones(1, dtype=torch.float64))
    assert str(error.value) == "format p4: values are kept in torch.float32, got torch.float64"
