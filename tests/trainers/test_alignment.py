"""Contract of an Alignment: as a context manager it undoes itself, also after an exception; undo removes what is its own
and nothing that somebody bound over it since."""

from __future__ import annotations

import types

import pytest
import torch
from tiny import ALL, tiny, tokens

from verl_rounding_align import align
from verl_rounding_align.engines.presets import PRESETS


def test_the_block_is_aligned_and_what_follows_is_not():
    model, ids = tiny("qwen3").eval(), tokens()
    plain = model(ids).logits
    with align(model, ALL, backend="eager") as alignment:
        inside = model(ids).logits
        assert alignment.idle() == []
    assert torch.equal(model(ids).logits, plain)
    assert not torch.equal(inside, plain), "negative control: alignment changes nothing"


def test_an_exception_in_the_block_undoes_the_alignment():
    model, ids = tiny("qwen3").eval(), tokens()
    plain = model(ids).logits
    with pytest.raises(ZeroDivisionError), align(model, ALL, backend="eager") as alignment:
        raise ZeroDivisionError
    assert torch.equal(model(ids).logits, plain) and alignment.sites == []


def test_undo_leaves_what_somebody_bound_over_it_and_says_so():
    model = tiny("qwen3").eval()
    alignment = align(model, ALL, backend="eager")
    mlp = model.model.layers[1].mlp
    theirs = types.MethodType(lambda self, x: torch.zeros_like(x), mlp)
    mlp.forward = theirs
    name = "model.layers.1.mlp.forward"
    with pytest.warns(RuntimeWarning) as warned:
        assert alignment.undo() == [name]
    assert str(warned[0].message) == (
        f"rounding_align: undo left {name} as it is: something else was bound there after the alignment"
    )
    assert mlp.forward is theirs
    assert not any("forward" in vars(module) for module in model.modules() if module is not mlp)


def test_undo_does_not_mind_what_somebody_removed():
    model = tiny("qwen3").eval()
    alignment = align(model, ALL, backend="eager")
    del model.model.layers[1].mlp.forward
    assert alignment.undo() == []


@pytest.mark.parametrize("moved", [False, True])
def test_undo_gives_rounded_frequencies_back(moved):
    model = tiny("qwen3", dtype=torch.float32).to(torch.bfloat16)  # rounds inv_freq, as verl's .to(model_dtype) does
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    alignment = align(model, "rope", backend="eager")
    assert rotary.inv_freq.dtype == torch.float32 and not torch.equal(rotary.inv_freq, before.float())
    if moved:
        rotary.inv_freq = rotary.inv_freq.clone()  # what .to(device) leaves: the same values in another tensor
    assert alignment.undo() == []
    assert rotary.inv_freq.dtype == torch.bfloat16 and torch.equal(rotary.inv_freq, before)


def test_undo_leaves_frequencies_that_somebody_has_replaced():
    model = tiny("qwen3", dtype=torch.float32).to(torch.bfloat16)
    rotary = model.model.rotary_emb
    alignment = align(model, "rope", backend="eager")
    theirs = rotary.inv_freq * 2
    rotary.inv_freq = theirs
    with pytest.warns(RuntimeWarning, match="undo left rotary_emb.inv_freq as it is"):
        assert alignment.undo() == ["rotary_emb.inv_freq"]
    assert rotary.inv_freq is theirs


def test_the_engine_has_to_be_named_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError) as error:
        align(tiny("qwen3"), "rope", backend="eager")
    assert str(error.value) == (
        "rounding_align='rope': engine=None: name the preset of the engine that generates, for example "
        f"engine='vllm_compiled_split' for compiled vLLM on CUDA; choose from {', '.join(PRESETS)}"
    )
    for named in (dict(plan="rope", engine="vllm_cuda"), dict(plan={"regions": "rope", "engine": "vllm_cuda"})):
        assert align(tiny("qwen3"), backend="eager", **named).plan.engine == "vllm_cuda"
