"""Contract of the score: the position of an fp32 value between its bf16 neighbours is exact (integer arithmetic); score and
floor are as defined (hand-worked distributions, simulation); streaming changes no bit."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rounding_align.landing.score import BINS, Counts, floor, landed

INFINITY = 0x7F800000
EVEN = {2 * k for k in range(1, 9)}


def values(bits) -> torch.Tensor:
    """Return fp32 values with these bit patterns."""
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def at(positions) -> torch.Tensor:
    """Return fp32 values in [1, 1 + 2^-7) at these 65536ths."""
    return values(0x3F800000 + np.asarray(positions))


# ---- positions


def exact(bits: int) -> Fraction | None:
    """The position by rational arithmetic: bf16 has 8 significant bits and the exponents of fp32, -126 the least."""
    x = struct.unpack("<f", struct.pack("<I", bits))[0]
    if not math.isfinite(x):
        return None
    x = abs(Fraction(x))
    exponent = -126
    while x >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = x / Fraction(2) ** (exponent - 7)
    return steps - steps.numerator // steps.denominator


SPECIAL = [
    0, 1, 0xFFFF, 0x10000, 0x10001,  # zero, the least subnormal, around bf16's least subnormal
    0x7F0000, 0x7FFFFF, 0x800000, 0x800001,  # around the least normal number
    0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F808000, 0x40000000, 0x3FFFFFFF,  # around powers of two, a tie
    0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF,  # bf16's largest, above it, fp32's largest
]  # fmt: skip


@pytest.mark.parametrize("sign", [0, 1 << 31])
@pytest.mark.parametrize("bits", SPECIAL)
def test_position_of_a_special_value(bits, sign):
    assert [Fraction(n, 65536) for n in landed(values([sign | bits])).tolist()] == [exact(bits)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_position_of_any_bit_pattern(bits):
    expected = [position for b in bits if (position := exact(b)) is not None]
    assert [Fraction(n, 65536) for n in landed(values(bits)).tolist()] == expected


def test_every_power_of_two_and_every_bf16_number_lands_at_0():
    every = values(np.arange(1 << 16) << 16)
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    assert landed(every).unique().tolist() == [0]
    assert landed(powers[16:]).unique().tolist() == [0]  # from bf16's least subnormal, 2^-133
    assert landed(powers[:16]).tolist() == [1 << i for i in range(16)]  # below it, fp32's subnormals alone


def test_the_position_says_which_way_torch_rounds():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000)
    x = values(bits)
    x = x[x.isfinite()]
    u, down = landed(x), values(bits[np.isfinite(values(bits).numpy())] & 0xFFFF0000)
    rounded = x.bfloat16().float()
    assert torch.equal(rounded[u < 32768], down[u < 32768])
    away = rounded[u > 32768].abs() > x[u > 32768].abs()
    assert away.all() and len(away) > 40_000


def test_infinities_and_nan_are_left_out_and_counted():
    counts = Counts()
    counts.add(values([INFINITY, INFINITY | 1 << 31, INFINITY + 1, 0xFFFFFFFF, 0x3F800001, 0, 1 << 31]))
    assert (counts.nonfinite, counts.values) == (4, 3)
    assert counts.counts[:2].tolist() == [2, 1]


def test_another_dtype_is_refused():
    with pytest.raises(ValueError) as error:
        landed(torch.ones(2, dtype=torch.bfloat16))
    assert str(error.value) == "landed: positions are those of torch.float32 values, got torch.bfloat16"


# ---- score and floor


def score(x: torch.Tensor) -> float:
    counts = Counts()
    counts.add(x)
    return counts.score()


def test_values_that_are_rounded_already_score_1():
    assert score(torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()) == 1


def test_one_position_scores_1_wherever_it_is():
    assert score(at([12345] * 7)) == pytest.approx(1, abs=1e-12)


def test_two_positions_half_apart_have_the_even_harmonics_alone():
    assert score(at([100, 100 + 32768])) == pytest.approx(math.sqrt(len(EVEN) / 16), abs=1e-12)


@pytest.mark.parametrize(("points", "harmonics"), [(17, 0), (16, 1), (4, 4)])
def test_an_even_grid_has_the_multiples_of_its_number_alone(points, harmonics):
    """17 does not divide 65536: its points lie within half a 65536th of the grid, phases within 16 pi / 65536."""
    x = at(np.round(np.arange(points) * 65536 / points).astype(int))
    assert score(x) == pytest.approx(math.sqrt(harmonics / 16), abs=16 * math.pi / 65536)


def test_every_position_once_scores_0():
    assert score(at(np.arange(65536))) < 1e-12


def test_half_at_one_position_and_half_spread_evenly_score_one_half():
    assert score(at(np.concatenate([np.arange(65536), np.full(65536, 7)]))) == pytest.approx(0.5, abs=1e-12)


def test_score_is_the_definition():
    positions = np.random.default_rng(1).integers(0, 20000, 500)
    c = [np.exp(-2j * np.pi * k * positions / 65536).mean() for k in range(1, 17)]
    assert score(at(positions)) == pytest.approx(np.sqrt(np.mean(np.abs(c) ** 2)), rel=1e-12, abs=0)


def test_floor_is_what_independent_uniform_positions_score():
    """N |c_k|^2 has mean 1 and variance below 1, so the mean square of 400 scores of 16 harmonics has a relative standard
    deviation below 1 / sqrt(400 * 16) = 1.25 %; five of them. One score lies within 5 * 12.5 % of the floor."""
    rng, n = np.random.default_rng(2), 1000
    scores = np.array([score(at(rng.integers(0, 65536, n))) for _ in range(400)])
    assert np.mean(scores**2) == pytest.approx(floor(n) ** 2, rel=0.0625)
    assert np.abs(scores / floor(n) - 1).max() < 0.625


def test_values_that_are_not_independent_score_above_the_floor():
    """Each of 250 values four times: the floor of 250, twice that of 1000."""
    rng = np.random.default_rng(3)
    scores = [score(at(np.repeat(rng.integers(0, 65536, 250), 4))) for _ in range(400)]
    assert np.mean(np.square(scores)) == pytest.approx(4 * floor(1000) ** 2, rel=0.0625)


def test_streaming_changes_no_bit_and_takes_the_same_memory():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    whole, parts = Counts(), Counts()
    whole.add(x)
    for i in torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist():
        parts.add(x[100 * i : 100 * i + 100])
    assert np.array_equal(whole.counts, parts.counts) and whole.score() == parts.score()
    assert whole.counts.nbytes == Counts().counts.nbytes == 512 * 1024


def test_histogram_folds_all_values():
    counts = Counts()
    counts.add(at([0, 1023, 1024, 65535, 65535]))
    assert counts.histogram() == [2, 1, *[0] * 61, 2] and len(counts.histogram()) == BINS
