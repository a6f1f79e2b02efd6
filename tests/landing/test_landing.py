"""Contract of the landing tool: what is counted is what Transformers rounds, nothing of the tokens is kept, and the model is left
as it was; the stored result of a pretrained model meets its thresholds. The score itself: ``test_landing_score.py``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import weakref
from collections import defaultdict
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from tiny import MODEL_TYPES, VOCAB, tiny, tokens
from typer.testing import CliRunner

from verl_rounding_align import align, cli
from verl_rounding_align.families import FAMILIES
from verl_rounding_align.landing import run as module
from verl_rounding_align.landing.measure import landing
from verl_rounding_align.landing.quantities import PROJECTIONS, QUANTITIES
from verl_rounding_align.landing.score import BINS, Counts, floor
from verl_rounding_align.landing.text import windows
from verl_rounding_align.landing.watch import watch

ROOT = Path(__file__).resolve().parents[2]


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
        if name not in PROJECTIONS:
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


class Stop(Exception):
    pass


def test_hooks_are_removed_when_whoever_watches_fails():
    """Inside the context, inside a hook, and while hooks are set: the last layer lacks a module that is to be hooked."""
    model = tiny("qwen3")

    def stop(*_):
        raise Stop

    with pytest.raises(Stop), watch(model, lambda *_: None):
        assert hooks(model)
        stop()
    assert not hooks(model)
    with pytest.raises(Stop), torch.no_grad(), watch(model, stop):
        model(tokens(), use_cache=False)
    assert not hooks(model)
    del model.model.layers[-1].mlp.down_proj
    with pytest.raises(AttributeError, match="down_proj"), watch(model, lambda *_: None):
        pytest.fail("the context was entered")
    assert not hooks(model)


@pytest.mark.parametrize("batches", [[], [torch.tensor([[1, 2, 3]])], [torch.tensor([[VOCAB + 1]])]])
def test_every_module_gets_its_own_mode_back(batches):
    model = tiny("llama")
    model.model.layers[1].eval()
    before = {name: m.training for name, m in model.named_modules()}
    assert set(before.values()) == {True, False}
    with contextlib.suppress(ValueError, IndexError):
        landing(model, batches)
    assert {name: m.training for name, m in model.named_modules()} == before


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
    even = [*PROJECTIONS, "normed", "norm", "attention"]
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
