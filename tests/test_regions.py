"""Contract of the regions: for every subset of rounding points, gradients are right (fp64 gradcheck), fp32 changes
nothing, every point is live in bf16, and the compiled region keeps the points and (rope, swiglu) every bit."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch

from verl_rounding_align import backend
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.regions import KINDS, REGIONS
from verl_rounding_align.rounding import Rounding

EPS = 1e-6


def subsets(points):
    return [frozenset(c) for c in chain.from_iterable(combinations(points, n) for n in range(len(points) + 1))]


CASES = [(name, s) for name, region in REGIONS.items() for s in subsets(region.points)]
PRESET_CASES = sorted({(KINDS[k], p) for preset in PRESETS.values() for k, p in preset.points.items()}, key=str)


def ids(value):
    return value if isinstance(value, str) else "+".join(sorted(value)) or "none"


def arguments(region: str, dtype, rows: int = 33, width: int = 24, seed: int = 0, table_dtype=None):
    """Return (rows, params, static) of a region function; the tables of rope are fp32 unless ``table_dtype`` is given."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    if region == "swiglu":
        return dict(gate=rand(rows, width, scale=2), up_=rand(rows, width)), {}, {}
    if region == "rope":
        angle = rand(rows, 1, width, dtype=torch.float64, scale=3)
        table = table_dtype or torch.promote_types(dtype, torch.float32)
        tables = dict(cos=angle.cos().to(table), sin=angle.sin().to(table))
        weights = dict(q_weight=1 + rand(width, scale=0.3), k_weight=1 + rand(width, scale=0.3))
        return dict(q=rand(rows, 4, width), k=rand(rows, 2, width), **tables), weights, dict(eps=EPS)
    return (
        dict(delta=rand(rows, width), residual=rand(rows, width, scale=3)),
        dict(weight=1 + rand(width)),
        dict(eps=EPS),
    )


def call(region: str, points, args, how: str = "eager"):
    rows, params, static = args
    out = backend.run(REGIONS[region].function, rows, Rounding(points), how, params=params, **static)
    return out if isinstance(out, tuple) else (out,)


def equal(a, b) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("region,points", CASES, ids=ids)
def test_gradient_is_right_in_fp64_for_every_subset_of_points(region, points):
    rows, params, static = arguments(region, torch.float64, rows=3, width=4)
    names, tensors = zip(*{**rows, **params}.items(), strict=True)
    wanted = [t.requires_grad_(n not in ("cos", "sin")) for n, t in zip(names, tensors, strict=True)]
    function = REGIONS[region].function
    assert torch.autograd.gradcheck(
        lambda *xs: function(**dict(zip(names, xs, strict=True)), rnd=Rounding(points), **static), wanted
    )


@pytest.mark.parametrize("points", subsets(["cos_sin", "product"]), ids=ids)
def test_gradient_of_rope_without_norm_is_right_in_fp64(points):
    rows, _, _ = arguments("rope", torch.float64, rows=3, width=4)
    q, k = rows["q"].requires_grad_(), rows["k"].requires_grad_()
    function = REGIONS["rope"].function
    assert torch.autograd.gradcheck(lambda q, k: function(q, k, rows["cos"], rows["sin"], Rounding(points)), (q, k))


@pytest.mark.parametrize("region,points", CASES, ids=ids)
def test_in_fp32_every_subset_of_points_agrees_exactly(region, points):
    args = arguments(region, torch.float32)
    assert equal(call(region, points, args), call(region, (), args))


@pytest.mark.parametrize("region,points", [c for c in CASES if c[1]], ids=ids)
def test_every_stored_point_is_live_in_bf16(region, points):
    args = arguments(region, torch.bfloat16, rows=200)
    base = call(region, points, args)
    for point in points:
        assert not equal(base, call(region, points - {point}, args)), point


@pytest.mark.parametrize("region,points", PRESET_CASES, ids=ids)
def test_compiled_region_keeps_its_points(region, points):
    """swiglu (and rope without Q/K norm, below): every bit equal to the op-by-op region. Norms: Inductor sums in another order, which moves the mean
    by at most a few fp32 ulps and so at most the elements within that distance of a bf16 rounding boundary, by one bf16
    step: with fp32 eps 2^-24, bf16 eps 2^-8 and ~8 fp32 ulps of drift, a fraction of about 8 * 2^-16 = 1.2e-4."""
    args = arguments(region, torch.bfloat16, rows=512, width=64, table_dtype=torch.bfloat16)
    for eager, fused in zip(call(region, points, args), call(region, points, args, "compile"), strict=True):
        assert eager.dtype == fused.dtype
        if region == "swiglu":
            assert torch.equal(eager, fused)
        else:
            differs = eager != fused
            assert differs.float().mean() <= 1.2e-4
            # rope sums two products that may cancel: one step of the largest product, not of the sum
            atol = 2**-8 * eager.abs().max().item() if region == "rope" else 0
            assert torch.allclose(eager.float(), fused.float(), rtol=2**-7, atol=atol)
    # the control: the bound sees any point that is lost (but cos_sin: this table is bf16 as it is)
    for point in points - {"cos_sin"}:
        lost = zip(call(region, points, args), call(region, points - {point}, args), strict=True)
        assert max((a != b).float().mean().item() for a, b in lost) > 1.2e-4, point


@pytest.mark.parametrize("points", [frozenset(), frozenset({"cos_sin"}), frozenset({"cos_sin", "product"})], ids=ids)
def test_compiled_rope_without_norm_is_bitwise_equal_to_eager(points):
    rows, _, static = arguments("rope", torch.bfloat16, rows=512, width=64)
    assert equal(call("rope", points, (rows, {}, static)), call("rope", points, (rows, {}, static), "compile"))


@pytest.mark.parametrize(
    "region,point", [(name, p) for name, region in REGIONS.items() for p in region.points], ids=ids
)
def test_a_point_survives_compilation(region, point):
    args = arguments(region, torch.bfloat16, rows=512, width=64)
    assert not equal(call(region, {point}, args, "compile"), call(region, (), args, "compile"))


def test_without_the_flag_the_compiler_deletes_an_interior_point(monkeypatch):
    """Why ``emulate_precision_casts`` is always on: the negative control of the test above."""
    args = arguments("swiglu", torch.bfloat16, rows=512, width=64)
    with_flag = call("swiglu", {"act"}, args, "compile")
    monkeypatch.setattr(backend, "OPTIONS", {"emulate_precision_casts": False})
    backend.compiled.cache_clear()
    without_flag = call("swiglu", {"act"}, args, "compile")
    backend.compiled.cache_clear()
    assert not equal(with_flag, without_flag)
    assert equal(without_flag, call("swiglu", (), args))


def test_the_halves_of_add_rms_norm_compose_to_it():
    from verl_rounding_align.regions.add_rms_norm import add, rms_norm

    rows, params, static = arguments("add_rms_norm", torch.bfloat16, rows=64)
    for points in subsets(REGIONS["add_rms_norm"].points):
        rnd = Rounding(points)
        total = add(**rows, rnd=rnd)
        out = rms_norm(total, params["weight"], EPS, rnd, torch.bfloat16)
        assert equal((out, rnd("carry", total, torch.bfloat16)), call("add_rms_norm", points, (rows, params, static)))


def test_a_single_row_does_not_compile():
    args = arguments("swiglu", torch.bfloat16, rows=1)
    assert equal(call("swiglu", (), args, "compile"), call("swiglu", (), args, "eager"))


def test_unknown_backend_is_an_error():
    with pytest.raises(ValueError) as error:
        backend.check("fast")
    assert str(error.value) == "backend='fast': unknown backend 'fast'; choose from auto, compile, eager"


def test_compile_without_a_compiler_is_an_error_and_auto_falls_back(monkeypatch):
    monkeypatch.setattr(backend, "compiler_found", lambda device: False)
    assert backend.resolve("auto", "cpu") == "eager"
    with pytest.raises(ValueError) as error:
        backend.resolve("compile", "cpu")
    assert str(error.value) == ("backend='compile': no compiler for device 'cpu' was found; choose auto or eager")


def test_a_torch_that_deletes_points_is_noticed(monkeypatch):
    """The check that runs wherever the tests of this file have not: it passes here, and fails with the flag off."""
    assert backend.outputs_differ("cpu")
    backend.compiled.cache_clear()
    monkeypatch.setattr(backend, "OPTIONS", {"emulate_precision_casts": False})
    assert not backend.outputs_differ("cpu")
    backend.compiled.cache_clear()


def test_where_points_are_deleted_auto_falls_back_and_compile_is_an_error(monkeypatch):
    assert backend.points_survive.__wrapped__("cpu")
    monkeypatch.setattr(backend, "outputs_differ", lambda device: False)
    monkeypatch.setattr(backend.torch, "__version__", "2.11.0")
    monkeypatch.setattr(backend, "points_survive", backend.points_survive.__wrapped__)
    assert backend.resolve("auto", "cpu") == "eager"
    with pytest.raises(ValueError) as error:
        backend.resolve("compile", "cpu")
    assert str(error.value) == (
        "backend='compile': torch 2.11.0 deletes rounding points inside compiled regions on device 'cpu'; choose auto or "
        "eager"
    )


def test_a_machine_without_a_cpp_compiler_is_recognised(monkeypatch):
    assert backend.compiler_found.__wrapped__("cpu")
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    assert not backend.compiler_found.__wrapped__("cpu")
