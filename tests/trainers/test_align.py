"""Contract of the patch: with HF's own points the patched model equals the unpatched one in every bit of logits and
gradients; with another engine's points it does not; nothing else in the process changes; undo is exact; whatever cannot
be applied is an error that changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import ALL, MODEL_TYPES, both_streams, same, step, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from verl_rounding_align import align, parse_plan
from verl_rounding_align.engines.presets import PRESETS
from verl_rounding_align.families import FAMILIES
from verl_rounding_align.plan import Plan
from verl_rounding_align.regions import GROUPS, KINDS, REGIONS
from verl_rounding_align.rounding import Rounding
from verl_rounding_align.trainers import huggingface as patch
from verl_rounding_align.trainers.huggingface import seal, unseal

CHECKPOINTING = [None, False, True]  # off, non-reentrant, reentrant
# engines that store other points than HF; vLLM's CUDA kernels up to 0.19.1 stored the same ones
ENGINES = [name for name, preset in PRESETS.items() if preset.points != PRESETS["hf_eager"].points]


def hf_plan(**dropped: str) -> Plan:
    """Return the plan of hf_eager at every site, less the named points: {site kind: blank-separated points}."""
    points = {k: p - set(dropped.get(k, "").split()) for k, p in PRESETS["hf_eager"].points.items()}
    return Plan(tuple(GROUPS), "hf_eager", tuple((k, Rounding(p)) for k, p in points.items()))


def checkpointed(model, reentrant):
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("reentrant", CHECKPOINTING, ids=["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hf_eager_is_bitwise_equal_to_the_unpatched_model(model_type, reentrant):
    model, ids = checkpointed(tiny(model_type), reentrant), tokens()
    logits, gradients = step(model, ids)
    alignment = align(model, "all", engine="hf_eager", backend="eager")
    patched_logits, patched_gradients = step(model, ids)
    assert alignment.idle() == []
    assert torch.equal(patched_logits, logits)
    assert same(patched_gradients, gradients)


@pytest.mark.parametrize("reentrant", CHECKPOINTING, ids=["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@both_streams
def test_checkpointing_changes_nothing_about_an_aligned_model(model_type, reentrant, engine):
    """The sealed stream crosses checkpointed layers exactly, in the recomputation too."""
    model, ids = tiny(model_type), tokens()
    align(model, ALL, engine=engine, backend="eager")
    logits, gradients = step(model, ids)
    checkpointed_logits, checkpointed_gradients = step(checkpointed(model, reentrant), ids)
    assert torch.equal(checkpointed_logits, logits)
    assert same(checkpointed_gradients, gradients)


# cos_sin is inert while HF's rotary module itself returns the model dtype; a plan without it rebuilds both in fp32.
# qk_norm alone is inert too: bf16 weight times bf16 normed rounds once, as the products' inputs then do.
# Nothing reads the stream after the final norm.
LIVE = [
    (family.model_type, kind, point)
    for family in FAMILIES.values()
    for kind, region in KINDS.items()
    for point in REGIONS[region].points
    if point != "qk_norm"
    and (family.qk_norm or point != "qk_normed")
    and (family.experts or kind != "experts")
    and (kind, point) != ("final", "carry")
]


@pytest.mark.parametrize("model_type,kind,point", LIVE)
def test_dropping_any_one_point_changes_the_logits(model_type, kind, point):
    """Negative control of the bitwise equality."""
    model, ids = tiny(model_type), tokens(4, 40)
    logits = model(ids).logits
    align(model, hf_plan(**{kind: point}), backend="eager")
    assert not torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_another_engine_gives_other_logits_and_finite_gradients(model_type, engine):
    model, ids = tiny(model_type), tokens()
    logits, _ = step(model, ids)
    align(model, "+".join(GROUPS), engine=engine, backend="eager")
    patched, gradients = step(model, ids)
    assert not torch.equal(patched, logits)
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_in_fp32_every_engine_gives_the_same_logits_and_gradients(model_type):
    model, ids = tiny(model_type, dtype=torch.float32), tokens()
    logits, gradients = step(model, ids)
    for engine in PRESETS:
        alignment = align(model, "+".join(GROUPS), engine=engine, backend="eager")
        patched_logits, patched_gradients = step(model, ids)
        assert torch.equal(patched_logits, logits), engine
        # sums over fp32 products come in another order inside the norm's weight gradient: bound by 4 ulps of the largest
        for name, g in gradients.items():
            assert (patched_gradients[name] - g).abs().max() <= 4 * 2**-23 * g.abs().max(), (engine, name)
        alignment.undo()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@both_streams
def test_align_undo_align_is_exact(model_type, engine):
    model, ids = tiny(model_type), tokens()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    keys, pointers = list(model.state_dict()), [id(p) for p in model.parameters()]
    logits, gradients = step(model, ids)
    alignment = align(model, ALL, engine=engine, backend="eager")
    first = step(model, ids)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == pointers
    alignment.undo()
    assert alignment.sites == []
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    again = step(model, ids)
    assert torch.equal(again[0], logits) and same(again[1], gradients)
    align(model, ALL, engine=engine, backend="eager")
    second = step(model, ids)
    assert torch.equal(first[0], second[0]) and same(first[1], second[1])


@both_streams
def test_a_second_model_in_the_process_is_untouched(engine):
    model, other, ids = tiny("qwen3"), tiny("qwen3"), tokens()
    logits = other(ids).logits
    align(model, ALL, engine=engine, backend="eager")
    assert not torch.equal(model(ids).logits, logits)
    assert torch.equal(other(ids).logits, logits)


@pytest.mark.parametrize("group", GROUPS)
def test_only_the_groups_asked_for_are_patched(group):
    alignment = align(tiny("qwen3"), group, engine="fp32", backend="eager")
    region, points = GROUPS[group].region, GROUPS[group].points
    assert {site.region for site in alignment.sites} == {region}
    for site in alignment.sites:
        assert site.before - site.after == points & site.before
        assert site.after == site.before - points


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_sites_and_line_say_what_was_patched(model_type):
    alignment = align(tiny(model_type), "all", engine="vllm_compiled")
    names = [site.fqn for site in alignment.sites]
    assert len(names) == len(set(names)) == 3 + 3 + 7
    assert str(alignment) == (
        f"rounding_align: {model_type}, 3 layers, add_rms_norm 7 sites, rope 3 sites, swiglu 3 sites, "
        "hf_eager -> vllm_compiled"
    )
    rope = next(site for site in alignment.sites if site.region == "rope")
    assert rope.fqn == "model.layers.0.self_attn"
    assert (rope.before, rope.after) == (frozenset(REGIONS["rope"].points), frozenset({"cos_sin"}))


def test_none_patches_nothing():
    model, ids = tiny("qwen3"), tokens()
    logits = model(ids).logits
    alignment = align(model, "none")
    assert alignment.sites == [] and str(alignment) == "rounding_align: qwen3, 3 layers, none"
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("engine", ["fp32", "vllm_compiled_split"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_come_out_decoded(model_type, engine):
    model, ids = tiny(model_type), tokens()
    plain = model(ids, output_hidden_states=True).hidden_states
    alignment = align(model, "all", engine="hf_eager", backend="eager")
    assert all(map(torch.equal, model(ids, output_hidden_states=True).hidden_states, plain))
    alignment.undo()
    align(model, ALL, engine=engine, backend="eager")
    for return_dict in (True, False):
        out = model(ids, output_hidden_states=True, use_cache=False, return_dict=return_dict)
        states = out.hidden_states if return_dict else next(x for x in out if isinstance(x, tuple))
        assert [s.dtype for s in states] == [torch.bfloat16] * 4
        assert [tuple(s.shape) for s in states] == [(2, 19, 64)] * 4
        assert torch.equal(states[0], plain[0]) and not torch.equal(states[2], plain[2])


def test_seal_is_a_view_and_unseal_its_inverse():
    double = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unseal(seal(x) * 2), double)
    x = torch.randn(2, 3, 8)
    assert seal(x).dtype == torch.complex64 and seal(x).data_ptr() == x.data_ptr()
    assert torch.equal(unseal(seal(x)), x) and unseal(x) is x


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generation_with_a_cache_follows_the_plan(model_type):
    model, ids = tiny(model_type).eval(), tokens(2, 7)
    config = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    plain = model.generate(ids, **config)
    alignment = align(model, "all", engine="hf_eager", backend="eager")
    patched = model.generate(ids, **config)
    assert torch.equal(patched.sequences, plain.sequences)
    assert all(map(torch.equal, patched.logits, plain.logits))
    alignment.undo()
    align(model, "all", engine="vllm_compiled", backend="eager")
    assert not all(map(torch.equal, model.generate(ids, **config).logits, plain.logits))


@both_streams
def test_padding_leaves_real_tokens_alone(engine):
    model, ids = tiny("qwen3").eval(), tokens(1, 12)
    align(model, ALL, engine=engine, backend="eager")
    padded = torch.cat([torch.zeros(1, 5, dtype=ids.dtype), ids], dim=1)
    mask = (torch.arange(17) >= 5)[None]
    positions = (torch.arange(17) - 5).clamp(min=0)[None]
    alone = model(ids).logits
    # the same rows of every matmul and norm; masked terms of attention have weight exactly 0, but SDPA's masked kernel sums
    # in another order, which moves some bf16 values by a step (2^-8 relative to the largest). Four of them at the logits:
    # not a bound, but room around what was seen, 0.7 to 1.3; the control below is 52 away
    tolerance = dict(rtol=2**-6, atol=2**-6 * alone.abs().max().item())
    inside = model(padded, attention_mask=mask.long(), position_ids=positions).logits[:, 5:]
    assert torch.allclose(inside.float(), alone.float(), **tolerance)
    unmasked = model(padded).logits[:, 5:]  # the control: padding that is attended to
    assert not torch.allclose(unmasked.float(), alone.float(), **tolerance)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_every_accepted_experts_implementation_reaches_its_sites(implementation):
    model, ids = tiny("qwen3_moe", experts_implementation=implementation), tokens()
    logits, gradients = step(model, ids)
    alignment = align(model, "swiglu", engine="hf_eager", backend="eager")
    patched = step(model, ids)
    assert alignment.idle() == []
    assert torch.equal(patched[0], logits) and same(patched[1], gradients)
    alignment.undo()
    align(model, hf_plan(experts="act"), backend="eager")
    assert not torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("engine", ["fp32", "vllm_compiled_split"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_sequences_as_remove_padding_makes_them(model_type, engine):
    """One row that holds two sequences, told apart by position_ids alone: hf_eager is bitwise, and a plan that rebuilds
    cos and sin takes them from those position_ids."""
    model, ids = tiny(model_type).eval(), tokens(1, 40)
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alignment = align(model, "all", engine="hf_eager", backend="eager")
    assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, packed)
    alignment.undo()
    align(model, ALL, engine=engine, backend="eager")
    together = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(ids[:, :25]).logits, model(ids[:, 25:]).logits], dim=1)
    # the same values in each sequence, but for the attention kernel that a block mask selects: a few bf16 steps
    step_size = 2**-7 * apart.abs().max().item()
    assert (together - apart).abs().max() <= 8 * step_size
    wrong = model(ids, use_cache=False).logits  # one sequence of 40: the control
    assert (wrong - apart).abs().max() > 8 * step_size


def test_a_layer_whose_forward_was_replaced_afterwards_is_idle():
    """The norms still run, and the residual stream is rounded again: the layers' own counts tell."""
    model, ids = tiny("qwen3"), tokens()
    alignment = align(model, "carry", engine="fp32", backend="eager")
    for layer in model.model.layers:
        del layer.forward
    model(ids)
    assert alignment.idle() == [f"model.layers.{i}" for i in range(3)]


@both_streams
def test_a_deep_copy_is_aligned_by_itself(engine):
    model, ids = tiny("qwen3"), tokens()
    align(model, ALL, engine=engine, backend="eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[1].self_attn.q_norm.weight.mul_(3)
        twin.model.layers[1].post_attention_layernorm.weight.mul_(3)
    changed = twin(ids).logits
    assert not torch.equal(changed, model(ids).logits)
    align(fresh := copy_weights(twin), ALL, engine=engine, backend="eager")
    assert torch.equal(fresh(ids).logits, changed)


def copy_weights(model):
    fresh = tiny(model.config.model_type)
    fresh.load_state_dict(model.state_dict())
    return fresh


@both_streams
def test_lora_is_aligned_inside_peft(engine):
    peft = pytest.importorskip("peft")
    ids = tokens()

    def lora():
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(tiny("qwen3"), config, autocast_adapter_dtype=False)
        return model

    model = lora()
    plain = step(model, ids)
    alignment = align(model, "all", engine="hf_eager", backend="eager")
    patched = step(model, ids)
    assert torch.equal(plain[0], patched[0]) and same(plain[1], patched[1])
    alignment.undo()
    alignment = align(model, ALL, engine=engine, backend="eager")
    assert not torch.equal(step(model, ids)[0], plain[0])
    assert len(alignment.sites) == 13 and alignment.idle() == []
    # align first, wrap afterwards: the order in which verl does it
    base = tiny("qwen3")
    align(base, ALL, engine=engine, backend="eager")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    after = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    after.load_state_dict(model.state_dict())
    assert torch.equal(after(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_rotary_frequencies_rounded_by_a_cast_of_the_model_are_restored(model_type):
    """verl 0.9 casts the whole module: ``.to(bf16)`` also rounds inv_freq, which engines keep in fp32."""
    clean, cast, ids = tiny(model_type), tiny(model_type).to(torch.bfloat16), tokens(2, 60)
    rounded = cast(ids).logits
    assert not torch.equal(rounded, clean(ids).logits)
    assert str(align(clean, "rope", backend="eager")).endswith("hf_eager -> vllm_compiled")
    alignment = align(cast, "rope", backend="eager")
    assert str(alignment).endswith("hf_eager -> vllm_compiled; rotary frequencies were bfloat16, restored to float32")
    assert torch.equal(cast(ids).logits, clean(ids).logits)
    alignment.undo()
    assert torch.equal(cast(ids).logits, rounded)
    assert align(cast, "all", engine="hf_eager", backend="eager").notes == []
    assert torch.equal(cast(ids).logits, rounded)


@both_streams
def test_autocast_over_bf16_parameters_changes_nothing(engine):
    model, ids = tiny("qwen3"), tokens()
    align(model, ALL, engine=engine, backend="eager")
    logits = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids).logits, logits)


@both_streams
def test_detect_anomaly_and_inference_mode_run(engine):
    model, ids = tiny("qwen3"), tokens()
    align(model, ALL, engine=engine, backend="eager")
    with torch.autograd.detect_anomaly(check_nan=True):
        logits, _ = step(model, ids)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, logits)


def test_compiled_backend_reaches_every_site_and_trains():
    model, ids = tiny("qwen3"), tokens()
    alignment = align(model, "all", engine="vllm_compiled", backend="compile")
    logits, gradients = step(model, ids)
    assert alignment.idle() == [] and len(alignment.sites) == 13 and alignment.ran == {"compile"}
    alignment.undo()
    alignment = align(model, {"regions": "all", "engine": "vllm_compiled", "backend": "eager"})
    eager_logits, eager_gradients = step(model, ids)
    assert alignment.ran == {"eager"}
    # no claim at model level: a norm's other reduction order spreads. Directions agree.
    for name, g in gradients.items():
        cosine = torch.nn.functional.cosine_similarity(g.float().flatten(), eager_gradients[name].float().flatten(), 0)
        assert cosine > 0.99, name
    assert torch.nn.functional.cosine_similarity(logits.float().flatten(), eager_logits.float().flatten(), 0) > 0.999


def test_an_outer_compile_does_not_delete_rounding_points():
    """Regions are opaque to a user's own torch.compile: the interior points of hf_eager stay live inside it."""
    model = tiny("llama", layers=1).eval()
    plan = parse_plan("swiglu", engine="hf_eager")
    align(model, plan, backend="eager")
    calls = torch.compile(model.model.layers[0].mlp)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    assert torch.equal(calls(x), model.model.layers[0].mlp(x))


# ---- errors: whole messages


def error_of(model, plan="all", **kwargs) -> str:
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(ValueError) as error:
        align(model, plan, **kwargs)
    after = {name: dict(vars(m)) for name, m in model.named_modules()}
    assert {n: v.keys() for n, v in after.items()} == {n: v.keys() for n, v in before.items()}, "changed on error"
    return str(error.value)


def test_unsupported_family_is_an_error():
    config = AutoConfig.for_model("gpt2", vocab_size=31, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    assert error_of(AutoModelForCausalLM.from_config(config)) == (
        "model_type='gpt2': unsupported model family 'gpt2'; choose from llama, mistral, qwen2, qwen3, qwen3_moe"
    )


def test_unknown_region_is_an_error():
    assert error_of(tiny("qwen3"), "ropee") == (
        "rounding_align='ropee': unknown region 'ropee'; choose from none, rope, swiglu, add_rms_norm, carry, paper, all, "
        "auto (join with +)"
    )


def test_aligning_twice_is_an_error():
    model = tiny("qwen3")
    align(model, "rope")
    assert error_of(model, "rope") == (
        "rounding_align='rope': model.layers.0.self_attn (Qwen3Attention) is aligned already; call undo() on that "
        "Alignment first"
    )


def test_somebody_elses_patch_on_the_instance_is_an_error():
    model = tiny("qwen3")
    mlp = model.model.layers[1].mlp
    mlp.forward = copy_weights.__get__(mlp)
    assert error_of(model, "swiglu") == (
        "rounding_align='swiglu': model.layers.1.mlp (Qwen3MLP) has its forward patched by test_align; rounding_align "
        "cannot patch it as well"
    )
    assert len(align(model, "rope").sites) == 3  # regions that do not touch it still align


def test_somebody_elses_patch_on_the_class_is_an_error(monkeypatch):
    monkeypatch.setattr(FAMILIES["qwen3"].cls("RMSNorm"), "forward", copy_weights)
    assert error_of(tiny("qwen3"), "add_rms_norm") == (
        "rounding_align='add_rms_norm': model.layers.0.input_layernorm (Qwen3RMSNorm) has its class's forward replaced by "
        "test_align, expected transformers.models.qwen3.modeling_qwen3"
    )


def test_a_replaced_rotary_function_is_an_error(monkeypatch):
    import transformers.models.qwen3.modeling_qwen3 as modeling

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", copy_weights)
    assert error_of(tiny("qwen3"), "rope") == (
        "rounding_align='rope': model.layers.0.self_attn (Qwen3Attention) has apply_rotary_pos_emb replaced by "
        "test_align, expected transformers.models.qwen3.modeling_qwen3"
    )


def test_eager_experts_are_an_error():
    model = tiny("qwen3_moe", experts_implementation="eager")
    assert error_of(model, "swiglu") == (
        "rounding_align='swiglu': model.layers.1.mlp.experts (Qwen3MoeExperts): experts_implementation='eager' does not "
        "call _apply_gate in every case; choose grouped_mm or batched_mm"
    )
    assert align(model, "rope").sites
    model.config._experts_implementation_internal = "sonicmoe"
    assert "experts_implementation='sonicmoe' does not call _apply_gate" in error_of(model, "swiglu")


def test_another_activation_is_an_error():
    assert error_of(tiny("llama", hidden_act="gelu"), "swiglu") == (
        "rounding_align='swiglu': model.layers.0.mlp (LlamaMLP): its activation is GELUActivation, expected SiLU"
    )


def test_a_compiled_model_is_an_error():
    assert error_of(torch.compile(tiny("qwen3")), "rope") == (
        "rounding_align='rope: hf_eager -> vllm_compiled': the model is compiled as a whole, which may delete interior "
        "rounding points; align first, compile afterwards"
    )


def test_another_transformers_release_is_an_error(monkeypatch):
    monkeypatch.setattr(patch.transformers, "__version__", "4.57.0")
    assert error_of(tiny("qwen3"), "rope") == (
        "rounding_align works with transformers >=5.5,<5.17 (tested with 5.10.4 and 5.16.1); transformers 4.57.0 is installed"
    )


def test_fp32_parameters_under_autocast_are_an_error_when_they_run():
    model = tiny("qwen3", dtype=torch.float32)
    align(model, "all", engine="vllm_compiled", backend="eager")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast over fp32 parameters"):
        model(tokens())


def test_a_wrapper_that_casts_the_unrounded_stream_is_an_error():
    model = tiny("qwen3")
    align(model, "carry", engine="fp32", backend="eager")
    model.model.layers[1].register_forward_pre_hook(lambda m, args: (unseal(args[0]).to(torch.bfloat16), *args[1:]))
    with pytest.raises(ValueError) as error:
        model(tokens())
    assert str(error.value) == (
        "rounding_align: a decoder layer got hidden states in torch.bfloat16, expected torch.complex64 (the unrounded "
        "residual sum, viewed as complex); its weights are in torch.bfloat16. Either a wrapper casts the inputs of "
        "layers, or the parameters are not in the model dtype (autocast over fp32 parameters keeps the residual stream "
        "in fp32: cast the model, or use FSDP mixed precision)"
    )
