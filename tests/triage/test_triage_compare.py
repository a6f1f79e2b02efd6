"""Contract of comparing both sides: digests tell weights apart by bits and by how much, RoPE is compared before it is rounded,
and what only one side has is said."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MODEL_TYPES, tiny
from triage_cases import CLEAN, case, outliers

from verl_rounding_align.engines import rope, weights
from verl_rounding_align.triage.causes import OTHER
from verl_rounding_align.triage.compare import compare_engine, compare_rope, compare_weights
from verl_rounding_align.triage.detect import triage
from verl_rounding_align.triage.facts import Facts
from verl_rounding_align.triage.rows import ROUNDING

# ---- weights


def test_equal_weights_have_equal_digests_and_one_changed_bit_shows():
    model = tiny("llama").eval()
    before = weights.digest_hf(model)
    assert weights.compare(before, weights.digest_hf(model.float())) == []  # fp32 masters of the same values
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] *= 1.02
    (changed,) = weights.compare(before, weights.digest_hf(model))
    assert changed.name == "model.layers.1.mlp.up_proj.weight" and 0 < changed.relative < 0.01


@pytest.mark.parametrize("noise", [1e-2, 1e-1])
def test_a_sketch_tells_by_how_much_weights_differ(noise):
    """The sketch's estimate of |a - b| has relative spread sqrt(1 / (2 * 64)) = 0.09; four of them."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(300, 500, generator=draw)
    b = a + noise * torch.randn(300, 500, generator=draw)
    (found,) = weights.compare({"w": weights.digest(a, torch.float32)}, {"w": weights.digest(b, torch.float32)})
    assert found.relative == pytest.approx(noise, rel=0.36)


def test_a_difference_is_a_finding_that_names_the_tensors():
    a = {"x": weights.digest(torch.ones(2)), "y": weights.digest(torch.ones(3)), "z": weights.digest(torch.ones(4))}
    b = {**a, "y": weights.digest(torch.ones(5))}
    finding = compare_weights(a, b)
    assert finding.evidence == "3 of 3 tensors compared; 1 of them differ, relative to their size y by inf"
    assert compare_weights(a, a) is None
    assert triage(case(OTHER, "noise of 0.1 of its size on every matrix").pairs, found=[finding]) == [finding]
    with pytest.raises(ValueError) as error:
        weights.compare({"x": a["x"]}, {"y": a["y"]})
    assert str(error.value) == "no tensor in common: the trainer has x, ..., the engine y, ..."


@pytest.mark.parametrize("size", [3 * 2**20 + 7])
def test_a_sketch_of_a_large_tensor_tells_the_size_of_an_offset(size):
    """Signs that began again at every 2^20 weights would add the blocks' sketches of a constant: off by sqrt(3) here. The
    estimate's relative spread is sqrt(1 / (2 * 64)) = 0.09; three of them."""
    a = torch.randn(size, generator=torch.Generator().manual_seed(0))
    (found,) = weights.compare(*({"w": weights.digest(x, torch.float32)} for x in (a, a + 0.01)))
    assert found.relative == pytest.approx(0.01, rel=0.27)


def test_weights_that_one_side_lacks_are_said_and_explain_nothing():
    a = {name: weights.digest(torch.full((2,), value)) for name, value in zip("vwxyz", range(5), strict=True)}
    some = {name: a[name] for name in "vz"}
    finding = compare_weights(a, some)
    assert (finding.cause, finding.confidence) == ("weights-not-compared", "possible")
    assert finding.evidence == (
        "2 of 5 tensors compared; only the trainer has w, x and 1 more; those are equal in every bit, the others may differ"
    )
    assert "only the engine has w, x and 1 more" in compare_weights(some, a).evidence
    assert [f.cause for f in triage(CLEAN, found=[finding])] == [ROUNDING, finding.cause]
    assert [f.cause for f in triage(outliers(), Facts(experts=64), [finding])] == ["moe-routing", finding.cause]
    changed = compare_weights(a, {**some, "z": a["y"]})
    assert changed.cause == "weights" and changed.evidence.startswith(
        "2 of 5 tensors compared; only the trainer has w, x and 1"
    )


def test_a_tied_head_is_compared_with_the_embedding():
    """Transformers names a tied head, vLLM and checkpoints do not; one that differs from the embedding is missing."""
    head, other = (weights.digest(torch.full((2,), value)) for value in (1.0, 2.0))
    engine = {weights.EMBEDDING: head, "x": other}
    assert compare_weights({**engine, weights.HEAD: head}, engine) is None
    assert compare_weights(engine, {**engine, weights.HEAD: head}) is None
    finding = compare_weights({**engine, weights.HEAD: other}, engine)
    assert finding.evidence.startswith("2 of 3 tensors compared; only the trainer has lm_head.weight; ")
    assert compare_weights({**engine, "model.rotary_emb.inv_freq": other}, engine) is None


def test_a_checkpoints_experts_are_stacked_as_models_hold_them(tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    assert weights.compare(weights.digest_hf(model), weights.digest_hf(tmp_path)) == []


def test_the_ranks_of_tensor_parallelism_hold_their_parts():
    model = tiny("qwen3")
    whole = model.state_dict()
    parts = [weights.digest_hf(model, shard=weights.Shard(r, 2)) for r in (0, 1)]
    name = "model.layers.0.self_attn.o_proj.weight"
    halves = whole[name].chunk(2, 1)
    assert [p[name] for p in parts] == [weights.digest(h) for h in halves]
    assert parts[0]["model.norm.weight"] == parts[1]["model.norm.weight"]


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(ValueError) as error:
        weights.digest_hf(tmp_path)
    assert str(error.value) == f"{tmp_path}: no *.safetensors in it"


# ---- RoPE


@settings(max_examples=30, deadline=None)
@given(st.floats(1e3, 1e7), st.sampled_from([16, 64, 128]))
def test_frequencies_are_read_back_from_a_table(theta, size):
    frequencies = theta ** -(np.arange(size // 2) / (size // 2))
    angles = (np.arange(4096, dtype=np.float32)[:, None] * frequencies.astype(np.float32)).astype(np.float64)
    table = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    assert rope.difference(rope.Rope(frequencies), rope.of_cache(table)) == ""
    assert rope.theta(frequencies) == pytest.approx(theta, rel=1e-6)
    assert rope.difference(rope.Rope((2 * theta) ** -(np.arange(size // 2) / (size // 2))), rope.of_cache(table)) != ""


def test_other_rope_parameters_are_a_finding():
    from transformers import AutoConfig

    def config(**parameters):
        return AutoConfig.for_model(
            "llama",
            hidden_size=64,
            num_attention_heads=4,
            head_dim=16,
            rope_parameters={"rope_type": "default", **parameters},
        )

    base = rope.of_config(config(rope_theta=1e4))
    assert compare_rope(base, rope.of_config(config(rope_theta=1e4))) is None
    finding = compare_rope(base, rope.of_config(config(rope_theta=2e4)))
    assert (finding.cause, finding.confidence) == ("rope-parameters", "certain")
    assert finding.evidence == (
        "theta is 10000 in the trainer, 20000 in the engine (largest relative deviation of a frequency 0.45)"
    )
    linear = rope.of_config(config(rope_theta=1e4, rope_type="linear", factor=2.0))
    assert compare_rope(base, linear).evidence == (
        "the engine divides every position by 2 (largest relative deviation of a frequency 0.5)"
    )
    yarn = rope.of_config(config(rope_theta=1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=512))
    assert compare_rope(base, yarn).evidence.startswith("the scaling differs, most at frequency 4: ")
    assert compare_rope(base, rope.Rope(base.frequencies, 1.1)).evidence == (
        "cos and sin are multiplied by 1 in the trainer, by 1.1 in the engine"
    )


# ---- a running engine


def asked(family, folder, **environment):
    """Return (trainer, what the worker of a real vLLM that has loaded its checkpoint answers)."""
    pytest.importorskip("vllm")
    import os
    import subprocess

    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=97, hidden_size=128, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    code = (
        "import json, sys; from vllm import LLM\n"
        "if __name__ == '__main__':\n"
        f"    engine = LLM(model={str(folder)!r}, dtype='bfloat16', enforce_eager=True, max_model_len=128, "
        "skip_tokenizer_init=True)\n"
        f"    (found,) = engine.collective_rpc('rounding_align_digest')\n"
        f"    json.dump(found, open({str(folder / 'found.json')!r}, 'w'))\n"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}, **environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "found.json").read_text())
    assert "missing" not in found, found
    return model, found


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vllms_weights_and_rope_are_the_trainers_until_one_is_changed(family, tmp_path):
    """A real vLLM, loaded from the checkpoint, asked through its workers; then a trainer with one perturbed matrix."""
    model, found = asked(family, tmp_path, VERL_PLATFORM="cpu")
    trainer, n = weights.digest_hf(model), len(found["weights"])
    assert set(trainer) - set(found["weights"]) <= {"lm_head.weight"} and n >= 3 * 9
    assert compare_engine(model, found) == []
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.mul_(1.01)
    (finding,) = compare_engine(model, found)
    assert finding.evidence.startswith(
        f"{n} of {n} tensors compared; 1 of them differ, relative to their size model.layers.2.self_attn.k_proj.weight by 0.0"
    )
    model.config.rope_parameters["rope_theta"] *= 2
    assert [f.cause for f in compare_engine(model, found)] == ["weights", "rope-parameters"]


@pytest.mark.slow
@pytest.mark.vllm
def test_linear_weights_that_vllm_on_a_cpu_has_packed_are_said_to_be_not_compared(tmp_path):
    model, found = asked("llama", tmp_path)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.mul_(1.01)  # cannot be seen
    (finding,) = compare_engine(model, found)
    assert finding.cause == "weights-not-compared"
    assert finding.evidence.startswith(
        f"{len(found['weights'])} of {len(weights.digest_hf(model))} tensors compared; only the trainer has "
    )


def test_an_engine_that_cannot_answer_is_an_error():
    with pytest.raises(ValueError) as error:
        compare_engine(tiny("llama"), {"missing": "AttributeError: no model"})
    assert str(error.value) == "the engine gave no digest: AttributeError: no model"


def test_every_family_is_digested():
    for family in MODEL_TYPES:
        model = tiny(family)
        assert len(weights.digest_hf(model)) == len(model.state_dict())
