"""Contract of the half that runs inside vLLM's process: rounds of prompts in their order, each sequence with a seed of its
own, go on after an interruption as if there had been none; a prompt that does not fit is named before the engine starts;
what made the rollouts is remembered. vLLM is stood in for by an object with its interface."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny

from verl_rounding_align.engines.rollouts import Rollouts
from verl_rounding_align.engines.vllm import generate as vllm_process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3").save_pretrained(folder)
    return str(folder)


class Engine:
    """vLLM's interface, as far as ``generate`` uses it: a response is drawn from a request's seed alone."""

    def __init__(self, prefix_cache: bool = False):
        ns = SimpleNamespace
        config = ns(
            device_config=ns(device_type="cpu"),
            model_config=ns(logprobs_mode="raw_logprobs"),
            cache_config=ns(enable_prefix_caching=prefix_cache),
        )
        self.llm_engine, self.rounds = ns(vllm_config=config), 0

    def get_tokenizer(self):
        return SimpleNamespace(chat_template=None, encode=lambda prompt: [ord(c) for c in prompt])

    def generate(self, requests, sampling):
        self.rounds += 1
        results = []
        for s in sampling:
            rng = np.random.default_rng(s.seed)
            ids = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
            log_probs = [{t: SimpleNamespace(logprob=-float(rng.exponential()))} for t in ids]
            results.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=log_probs)], num_cached_tokens=0)
            )
        return results


@pytest.mark.vllm
def test_an_interrupted_generation_goes_on_after_its_last_round():
    def sample(engine, **options):
        return vllm_process.generate(engine, ["ab", "cde", "f"], 40, seed=7, **options)

    whole, kept = sample(Engine()), []

    def stop(rollouts):
        kept.append(rollouts)
        if len(kept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(Engine(), keep=stop)
    again = Engine()
    resumed = sample(again, kept=kept[-1])
    for name in ("tokens", "offsets", "prompts", "log_probs"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name)), name
    assert resumed.meta == whole.meta and len(whole) == 3 * (again.rounds + 2)
    other = vllm_process.generate(Engine(), ["ab", "cde", "f"], 40, seed=8)
    assert not torch.equal(other.log_probs[:5], whole.log_probs[:5])


@pytest.mark.vllm
def test_many_prompts_take_turns_and_a_round_is_kept_at_a_time():
    """100 prompts: rounds of 64 in the file's order, the first again after the last, also after an interruption; with 64
    or fewer a round is all of them."""
    prompts = [chr(i) * (1 + i % 3) for i in range(100, 200)]
    kept = []
    whole = vllm_process.generate(Engine(), prompts, 600, keep=kept.append)
    assert [len(r) for r in kept] == [64 * (i + 1) for i in range(len(kept))] and len(kept) >= 2
    asked = [whole.sequence(i)[: int(whole.prompts[i])].tolist() for i in range(len(whole))]
    assert asked == [[ord(c) for c in prompts[i % 100]] for i in range(len(whole))]
    assert (
        len(kept[-2].log_probs) < 600 <= len(whole.log_probs)
    )  # no more than the round that reaches what is asked for
    resumed = vllm_process.generate(Engine(), prompts, 600, kept=kept[0])
    for name in ("tokens", "offsets", "prompts", "log_probs"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name)), name
    few = []
    vllm_process.generate(Engine(), prompts[:64], 600, keep=few.append)
    assert [len(r) for r in few] == [64 * (i + 1) for i in range(len(few))]
    assert torch.equal(few[0].tokens, kept[0].tokens)
    assert not torch.equal(few[1].prompts[64:], kept[1].prompts[64:])  # the control: prompts 1 to 64 again


def test_a_prompt_that_does_not_fit_is_named_before_the_engine_starts():
    prompts = [[1] * 20, [1] * 300, [1] * 5]
    assert vllm_process.room(prompts, 256, 8192) == vllm_process.room(prompts, 256, None) == 557
    assert vllm_process.room(prompts, 256, 557) == 557 and vllm_process.room(prompts[:1], 256, 8192) == 512
    with pytest.raises(ValueError) as error:
        vllm_process.room(prompts, 256, 556)
    assert str(error.value) == (
        "prompt 2 of 3 has 300 tokens: with length=256 at most 299 fit the model's 556 positions"
    )


@pytest.mark.vllm
def test_the_child_keeps_who_made_the_rollouts_and_makes_room_for_the_longest_prompt(checkpoint, tmp_path, monkeypatch):
    """Its engine starts with room for it; one that the model cannot hold ends it before the engine starts."""
    import transformers

    started = []

    def start(model, *options):
        started.append(options)
        return Engine()

    monkeypatch.setattr(vllm_process, "start", start)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda model: Engine().get_tokenizer())
    request = dict(model=checkpoint, checkpoint="abc", prompts=["ab", "c" * 150], tokens=1, eager=True, extras={},
                   versions={"vllm": "1"})  # fmt: skip
    positions = transformers.AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    vllm_process.run(tmp_path, **request, length=100)
    meta = Rollouts.load(tmp_path).meta
    assert (meta["checkpoint"], meta["versions"]) == ("abc", {"vllm": "1"})
    assert started[0][-1] == positions == 256  # 251 are needed
    with pytest.raises(
        ValueError, match=f"prompt 2 of 2 has {positions} tokens: with length=100 at most {positions - 101}"
    ):
        vllm_process.run(tmp_path / "other", **{**request, "prompts": ["ab", "c" * positions]}, length=100)
    assert len(started) == 1
