"""Contract of the landing score: the position of an fp32 value between its bf16 neighbours is exact (integer arithmetic);
score and floor are as defined (hand-worked distributions, simulation); streaming changes no bit and keeps nothing of the
tokens; what is counted is what Transformers rounds, and the model is left as it was; the stored result of a pretrained
model meets its thresholds."""

from __future__ import annotations

import gc
import importlib
import json
import math
import struct
import sys
import weakref
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MODEL_TYPES, VOCAB, tiny, tokens
from typer.testing import CliRunner

from verl_rounding_align import align, cli
from verl_rounding_align.families import FAMILIES
from verl_rounding_align.landing import measure as module
from verl_rounding_align.landing.measure import BINS, QUANTITIES, Counts, floor, landed, landing, watch, windows

ROOT = Path(__file__).resolve().parents[2]
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
    assert score(at(positions)) == pytest.approx(np.sqrt(np.mean(np.abs(c) ** 2)), rel=1e-12)


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


# ---- what is counted


def expected_quantities(model_type: str) -> list[str]:
    family = FAMILIES[model_type]
    return [
        name
        for name in QUANTITIES
        if (family.qk_norm or not name.startswith("Q/K")) and (family.experts or name != "SiLU, experts")
    ]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_quantity_is_there_for_every_family(model_type):
    found = landing(tiny(model_type), [tokens(), tokens(1, 7)])
    assert [row.quantity for row in found.rows] == expected_quantities(model_type)
    assert found.tokens == 2 * 19 + 7
    rows = {row.quantity: row for row in found.rows}
    n = found.tokens
    assert rows["q_proj"].values == n * 64 and rows["k_proj"].values == n * 32
    assert rows["norm"].values == rows["normed"].values == 2 * n * 64
    assert rows["RoPE products"].values == 2 * n * (4 + 2) * 16 == 2 * rows["RoPE cos products"].values
    assert rows["sum after attention"].values == rows["sum after MLP"].values == rows["attention"].values == n * 64
    assert rows["SiLU"].values == n * 112
    if FAMILIES[model_type].experts:
        assert rows["SiLU, experts"].values == n * 2 * 48 and rows["SiLU, experts"].layers == (1, 2)
        assert rows["up_proj"].layers == (0,)
        assert found.absent == ("router and projections of the experts in 2 layers (grouped matmuls, not modules)",)
    else:
        assert rows["SiLU"].layers == (0, 1, 2) and found.absent == ()
    for row in found.rows:
        assert row.floor == floor(row.values) and row.nonfinite == 0
        assert len(row.scores) == len(row.layers) and sorted(row.scores)[0] <= row.score <= sorted(row.scores)[-1]
        assert len(row.histogram) == BINS and row.pictured in row.layers


def seen(model, ids):
    """Return {(quantity, layer): its fp32 values in order}, as :func:`watch` shows them in one forward pass."""
    values = defaultdict(list)
    with torch.no_grad(), watch(model, lambda q, i, x: values[q, i].append(x)):
        model(ids, use_cache=False)
    return values


class Stored:
    """Inputs and outputs of modules in one forward pass of an unpatched model, and what RoPE got and returned."""

    def __init__(self, model, ids, monkeypatch):
        self.inputs, self.outputs, self.rope = defaultdict(list), defaultdict(list), []
        source = importlib.import_module(FAMILIES[model.config.model_type].module)
        original = source.apply_rotary_pos_emb

        def rotary(q, k, cos, sin, *args, **kwargs):
            out = original(q, k, cos, sin, *args, **kwargs)
            self.rope.append(((q, k), cos.unsqueeze(1), sin.unsqueeze(1), out))
            return out

        def keep(name):
            def hook(_, args, kwargs, output):
                self.inputs[name].append(args[0] if args else kwargs.get("hidden_states"))
                self.outputs[name].append(output[0] if isinstance(output, tuple) else output)

            return hook

        handles = [m.register_forward_hook(keep(name), with_kwargs=True) for name, m in model.named_modules()]
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(source, "apply_rotary_pos_emb", rotary)
            model(ids, use_cache=False)
        for handle in handles:
            handle.remove()


def equal_when_rounded(shown, stored) -> bool:
    return len(shown) == len(stored) and all(
        x.dtype == torch.float32 and torch.equal(x.bfloat16(), y) for x, y in zip(shown, stored, strict=True)
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_values_round_to_what_transformers_stores(model_type, seed, monkeypatch):
    model, ids = tiny(model_type, seed=seed).eval(), tokens(seed=seed)
    shown, stored = seen(model, ids), Stored(model, ids, monkeypatch)
    inputs, outputs = stored.inputs, stored.outputs
    for i, layer in enumerate(model.model.layers):
        fqn = f"model.layers.{i}"
        (q, k), cos, sin, rotated = stored.rope[i]
        norms = [outputs[f"{fqn}.{name}"][0] for name in ("input_layernorm", "post_attention_layernorm")]
        experts = hasattr(layer.mlp, "experts")
        silu = ("SiLU, experts", f"{fqn}.mlp.experts.act_fn") if experts else ("SiLU", f"{fqn}.mlp.act_fn")

        def half(x):
            return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)

        exact = {
            "sum after attention": inputs[f"{fqn}.post_attention_layernorm"],
            "sum after MLP": outputs[fqn],
            silu[0]: outputs[silu[1]],
            "norm of stored normed": norms,
            "RoPE cos products": [q * cos, k * cos],
            "RoPE sin products": [half(q) * sin, half(k) * sin],
            "RoPE products": [q * cos, half(q) * sin, k * cos, half(k) * sin],
            "RoPE sum of stored products": list(rotated),
        }
        if FAMILIES[model_type].qk_norm:
            exact["Q/K norm of stored normed"] = [outputs[f"{fqn}.self_attn.{n}_norm"][0] for n in "qk"]
        for name, tensors in exact.items():
            assert equal_when_rounded(shown[name, i], tensors), (name, i)
            assert any((x != x.bfloat16()).any() for x in shown[name, i]), (name, i)  # they were not rounded before
        # normed, and the norm of it, as float64 has them: a few fp32 roundings, 64 terms in the mean of squares
        for x, norm, normed, out in zip(
            (inputs[f"{fqn}.input_layernorm"][0], inputs[f"{fqn}.post_attention_layernorm"][0]),
            (layer.input_layernorm, layer.post_attention_layernorm),
            shown["normed", i],
            shown["norm", i],
            strict=True,
        ):
            h = x.double()
            reference = h / (h.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
            assert torch.allclose(normed.double(), reference, rtol=70 * 2**-24, atol=0)
            assert torch.allclose(out.double(), norm.weight.double() * reference, rtol=70 * 2**-24, atol=0)


def steps_apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return how many bf16 numbers apart two bf16 tensors are, element by element."""

    def ordered(t):
        bits = t.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(x) - ordered(y)).abs()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_projections_differ_from_the_stored_ones_by_the_order_of_a_sum(model_type, monkeypatch):
    """Two fp32 sums of K <= 112 terms differ by up to K 2^-24 sum|terms|, about sqrt(K) times the typical value: below
    0.02 bf16 steps (2^-8 of the value), but for outputs that nearly cancel, 50 times smaller than typical. So they round
    to the same bf16 number but where a tie is that near (4 %), and to adjacent ones but where outputs cancel (1 %)."""
    model, ids = tiny(model_type).eval(), tokens()
    shown, stored = seen(model, ids), Stored(model, ids, monkeypatch)
    for (name, i), tensors in shown.items():
        if name not in module.PROJECTIONS:
            continue
        part = "self_attn" if name[0] in "qkvo" else "mlp"
        apart = steps_apart(tensors[0].bfloat16(), stored.outputs[f"model.layers.{i}.{part}.{name}"][0])
        assert (apart == 0).float().mean() > 0.95 and (apart <= 1).float().mean() > 0.99, (name, i)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((m, {}) for m in MODEL_TYPES),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    ],
)
def test_attention_is_the_models(model_type, options, monkeypatch):
    """Transformers' kernel may round each weight to bf16 (2^-9 of it) and rounds the output (2^-9): together below 2^-8 of
    the largest |v|. Attention that also reads later tokens, or beyond the window, is off by more."""
    model, ids = tiny(model_type, **options).eval(), tokens()
    shown, stored = seen(model, ids), Stored(model, ids, monkeypatch)
    for i in range(3):
        (attention,) = shown["attention", i]
        (v,) = stored.outputs[f"model.layers.{i}.self_attn.v_proj"]
        (out,) = stored.inputs[f"model.layers.{i}.self_attn.o_proj"]
        bound = 2**-8 * v.float().abs().max()
        attention = attention.transpose(1, 2).reshape(out.shape)
        assert (attention - out.float()).abs().max() < bound
        assert (attention[:, 1:] - out[:, :-1].float()).abs().max() > 10 * bound  # another token's
    if options:
        wider = seen(tiny(model_type).eval(), ids)["attention", 0][0]
        assert not torch.equal(wider, shown["attention", 0][0])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_model_computes_the_same_and_is_left_as_it_was(model_type):
    model, ids = tiny(model_type), tokens()
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with watch(model, lambda *_: None):
            during = model(ids, use_cache=False).logits
        landing(model, [ids])
        after = model(ids, use_cache=False).logits
    assert torch.equal(before, during) and torch.equal(before, after)
    assert model.training and not hooks(model)


def hooks(model) -> list:
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_hooks_are_removed_when_a_batch_fails():
    model = tiny("qwen3")
    with pytest.raises(IndexError):
        landing(model, [tokens(), torch.tensor([[VOCAB + 1]])])
    assert not hooks(model) and model.training


def test_nothing_of_a_batch_is_kept(monkeypatch):
    alive = []
    add = Counts.add

    def spy(self, x):
        alive.append(weakref.ref(x))
        add(self, x)

    monkeypatch.setattr(Counts, "add", spy)

    def batches():
        for i in range(3):
            gc.collect()
            assert not [r for r in alive if r() is not None]
            yield tokens(seed=i)

    landing(tiny("qwen3"), batches())
    assert len(alive) > 100


def test_batches_add_up_in_every_bit():
    model, ids = tiny("llama"), [tokens(1, 11, seed=s) for s in range(3)]
    assert landing(model, ids) == landing(model, reversed(ids))


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tiny("llama", dtype=torch.float32),
            "landing: model.embed_tokens.weight is torch.float32; positions are between bf16 numbers, load the model with "
            "dtype=torch.bfloat16",
        ),
        (lambda: tiny("llama", hidden_act="gelu"), "landing: hidden_act='gelu': expected 'silu'"),
    ],
)
def test_a_model_that_has_no_such_values_is_refused(make, message):
    with pytest.raises(ValueError) as error, watch(make(), lambda *_: None):
        pass
    assert str(error.value) == message


def test_an_aligned_model_is_refused():
    model = tiny("llama")
    align(model, "swiglu")
    with pytest.raises(ValueError) as error:
        landing(model, [tokens()])
    assert str(error.value) == "landing: layers.0.mlp (LlamaMLP) has its forward patched; undo() that first"


def test_no_tokens_are_refused():
    with pytest.raises(ValueError) as error:
        landing(tiny("llama"), [])
    assert str(error.value) == "landing: no tokens to measure on"


# ---- text and command


def tokenizer(bos: bool = False):
    """A tokenizer of single characters, 0 the beginning of a sequence."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, **{chr(i): i - 31 for i in range(32, 127)}}
    found = Tokenizer(models.WordLevel({**vocab, "\n": 96}, unk_token="<s>"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    if bos:
        found.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>")


@pytest.mark.parametrize(
    ("bos", "asked", "lengths"),
    [
        (False, 12, [5, 5, 2]),
        (False, 10, [5, 5]),
        (False, 3, [3]),
        (False, 99, [5, 5, 5, 5]),
        (True, 12, [5, 5, 2]),
        (True, 99, [5, 5, 5, 5, 5]),
    ],
)
def test_windows_hold_the_text_in_order(bos, asked, lengths):
    text = "abcdefghijklmnopqrst"
    found = list(windows([text[:3], text[3:]], tokenizer(bos), asked, 5))
    assert [ids.shape for ids in found] == [(1, n) for n in lengths]
    kept = [i for ids in found for i in (ids[0, bos:] + 31).tolist()]
    assert "".join(map(chr, kept)) == text[: len(kept)]
    assert not bos or all(ids[0, 0] == 0 for ids in found)


def test_text_is_read_only_as_far_as_needed():
    def blocks():
        yield "a" * 20
        raise AssertionError("read on")

    assert sum(ids.numel() for ids in windows(blocks(), tokenizer(), 20, 8)) == 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3", layers=2).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["landing", *map(str, arguments)])


def test_the_command_measures_and_writes(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("Light is made of rays.\n" * 20)
    file = tmp_path / "l.json"
    done = run(
        "--model", checkpoint, "--text", tmp_path / "text.txt", "--tokens", 100, "--window", 40, "--json", file
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert (found["tokens"], found["window"], found["text"], found["absent"]) == (100, 40, "text.txt", [])
    assert [row["quantity"] for row in found["rows"]] == expected_quantities("qwen3")
    assert all(sum(row["histogram"]) == row["values"] for row in found["rows"])
    assert "100 tokens of text.txt in windows of 40" in " ".join(done.output.split())
    assert all(row["quantity"] in done.output for row in found["rows"])


def test_the_text_that_comes_along_suffices_for_the_default(checkpoint):
    done = run("--model", checkpoint, "--tokens", 300, "--window", 100)
    assert done.exit_code == 0, done.output
    text = (Path(module.__file__).parent / "opticks.txt").read_text()
    assert len(text.split()) > 2048  # at least a token a word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/model"], "model='/no/model': no config.json in this folder"),
        (["--text", "/no/text"], "text='/no/text': cannot be read: No such file or directory"),
        (["--text", "EMPTY"], "text='EMPTY': no text in it"),
        (["--text", "BINARY"], "text='BINARY': cannot be read: not UTF-8"),
        (["--tokens", "0"], "tokens=0: expected at least 1"),
        (["--window", "257"], "window=257: expected 2 to 256, the positions that the model has"),
    ],
)
def test_the_command_refuses(checkpoint, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text(" \n\n")
    Path("BINARY").write_bytes(b"\xff\xfe\xfa")
    done = run("--model", checkpoint, "--window", 100, *arguments)  # the last of an option counts
    assert isinstance(done.exception, ValueError) and str(done.exception) == message


def test_a_checkpoint_without_weights_is_refused(checkpoint, tmp_path):
    for file in Path(checkpoint).glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    done = run("--model", tmp_path, "--window", 100)
    assert isinstance(done.exception, ValueError)
    assert str(done.exception).startswith(f"model={str(tmp_path)!r}: cannot be loaded: ")


# ---- the stored results

RESULTS = ROOT / "recipes/landing/results"


def stored(name: str) -> dict[str, dict]:
    return {row["quantity"]: row for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]}


def test_stored_results_have_every_quantity_and_layer():
    schema = json.loads((ROOT / "verl_rounding_align/landing/landing.schema.json").read_text())
    for file in RESULTS.glob("*.json"):
        jsonschema.validate(json.loads(file.read_text()), schema)
        rows = stored(file.stem)
        assert list(rows) == expected_quantities("llama")
        for row in rows.values():
            assert row["layers"] == list(range(30)) and row["nonfinite"] == 0
            assert row["score"] == np.median(row["scores"]) and row["floor"] == floor(row["values"])
            assert sum(row["histogram"]) == row["values"]


def test_stored_results_meet_the_thresholds():
    rows = stored("landing")
    even = [*module.PROJECTIONS, "normed", "norm", "attention"]
    for name in even:
        assert rows[name]["score"] < max(3 * rows[name]["floor"], 5e-3), name
    assert rows["SiLU"]["score"] > 0.02
    for name in ("RoPE cos products", "sum after attention", "sum after MLP"):
        assert rows[name]["score"] > 0.3, name
    # the other half of the products is clustered less, and both counted together are in between
    assert 0.02 < rows["RoPE sin products"]["score"] < rows["RoPE products"]["score"] < 0.3


def test_the_recipes_tables_are_what_the_results_give(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes/landing")
    monkeypatch.delitem(sys.modules, "table", raising=False)
    filled = importlib.import_module("table").filled
    monkeypatch.delitem(sys.modules, "table")
    text = (ROOT / "recipes/landing/README.md").read_text()
    changed = text.replace("| SiLU | act | 0.03", "| SiLU | act | 0.04")
    assert changed != text and filled(changed) == filled(text) == text
