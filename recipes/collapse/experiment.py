"""One run: a tiny Qwen3 learns to reverse digits by GRPO; sampler and trainer round in different places, or do not.

Everything that a forward pass of a 16-bit model stores is stored in a format of ``bits`` significant bits, on both sides;
the two differ in the rounding points inside the regions (by ``arm``), and, as in life, in the order of their sums and in
the attention kernel. Gradients are stored in one of ``gradients`` bits, 8 of which are BF16.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from transformers import AttentionInterface, DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from verl_rounding_align import align, formats

ENGINE = "vllm_compiled"  # the sampler's preset: of the points here it stores cos_sin alone
DIGITS, LENGTH = 10, 5
EQUALS, VOCAB = 10, 12
GROUP, MINIBATCHES = 8, 2
CLIP, DUAL_CLIP, TIS_CAP, MAX_NORM = 0.2, 3.0, 2.0, 1.0
WINDOW = 25  # steps per stored row


@dataclass(frozen=True)
class Arm:
    """Args: regions: aligned in the trainer; same: the sampler is the trainer; tis: truncated importance sampling;
    more_bits: of the format, on both sides."""

    regions: str = "none"
    same: bool = False
    tis: bool = False
    more_bits: int = 0


ARMS = {
    "none": Arm(),
    "rope": Arm("rope"),
    "paper": Arm("paper"),
    "all": Arm("all"),
    "same": Arm(same=True),
    "tis": Arm(tis=True),
    "bit": Arm(more_bits=1),
}


@dataclass(frozen=True)
class Settings:
    """One run.

    Args:
        bits: of the significand; lr: Adam's; steps: of RL; pretrain: supervised steps before it; prompts: in a batch,
            ``GROUP`` answers each; gradients: bits of gradients, 0 for ``bits``.
    """

    arm: str
    bits: int
    lr: float
    seed: int
    steps: int
    pretrain: int = 60
    prompts: int = 16
    gradients: int = 8

    @property
    def format(self) -> formats.Format:
        """What both sides store in."""
        own = formats.parse(f"p{self.bits + ARMS[self.arm].more_bits}")
        gradients = "bf16" if self.gradients == 8 else f"p{self.gradients}"  # the same; torch's cast takes less time
        return replace(own, gradients=formats.parse(gradients)) if self.gradients else own


# ---- task


def prompts(n: int, g: torch.Generator) -> torch.Tensor:
    """Return (n, LENGTH + 1) token ids: digits, then ``=``. The answer is the digits in reverse."""
    return torch.cat([torch.randint(0, DIGITS, (n, LENGTH), generator=g), torch.full((n, 1), EQUALS)], 1)


def answers(ids: torch.Tensor) -> torch.Tensor:
    """Return the right answers (n, LENGTH) to sequences that begin with a prompt."""
    return ids[:, :LENGTH].flip(1)


def rewards(ids: torch.Tensor) -> torch.Tensor:
    """Return the share of right digits (n,) of prompts with answers (n, 2 LENGTH + 1)."""
    return (ids[:, -LENGTH:] == answers(ids)).float().mean(1)


# ---- policies


def model(seed: int, attention: str, head_dim: int = 16) -> Qwen3ForCausalLM:
    """Return a tiny Qwen3, fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=32,
        initializer_range=0.125,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config).train()


def log_probs(policy, ids: torch.Tensor) -> torch.Tensor:
    """Return the trainer's log-probs (n, LENGTH) of the answers: one forward pass over whole sequences."""
    logits = policy(ids[:, :-1], use_cache=False, logits_to_keep=LENGTH).logits
    return logits.log_softmax(-1).gather(-1, ids[:, -LENGTH:, None])[..., 0]


@torch.no_grad()
def sample(sampler, ids: torch.Tensor, group: int, cached: bool, g: torch.Generator):
    """Return (sequences, the sampler's log-probs of the answers), ``group`` answers to each prompt.

    ``cached``: each prompt is read once, then the group's answers are decoded a token at a time with a cache, as an
    engine does; otherwise every token takes a forward pass over the whole sequence, as the trainer's.
    """
    found = []
    cache = DynamicCache(config=sampler.config) if cached else None
    logits = sampler(ids, past_key_values=cache, use_cache=cached, logits_to_keep=1).logits if cached else None
    ids = ids.repeat_interleave(group, 0)
    for i in range(LENGTH):
        if not cached:
            logits = sampler(ids, use_cache=False, logits_to_keep=1).logits
        elif i == 0:
            cache.batch_repeat_interleave(group)
            logits = logits.repeat_interleave(group, 0)
        else:
            logits = sampler(ids[:, -1:], past_key_values=cache, use_cache=True).logits
        log_p = logits[:, -1].log_softmax(-1)
        token = torch.multinomial(log_p.exp(), 1, generator=g)
        found.append(log_p.gather(1, token))
        ids = torch.cat([ids, token], 1)
    return ids, torch.cat(found, 1)


def kernel(format: formats.Format) -> str:
    """Register the sampler's attention and return its name: as a flash kernel does it stores exp(score - max) in the
    format before the product with V, and divides by the sum afterwards. The trainer's SDPA keeps both in fp32."""
    name = f"stored_probabilities_{format.name}"

    def attention(module, q, k, v, mask, scaling, **kwargs):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) * scaling
        scores = scores if mask is None else scores + mask
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        out = format.store(e) @ v / e.sum(-1, keepdim=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    return name


class Pair:
    """A trainer with fp32 master weights and the sampler that gets a copy of what the trainer stores.

    Masters and stored weights are verl's mixed precision: fp32 parameters, of which FSDP gathers bf16.
    """

    def __init__(self, start: Qwen3ForCausalLM, settings: Settings):
        self.settings, self.format = settings, settings.format
        self.arm = arm = ARMS[settings.arm]
        self.trainer, self.weights = start, list(start.parameters())
        self.masters = [p.detach().clone() for p in self.weights]
        formats.store_parameters(start, self.format)
        self.sampler = copy.deepcopy(start).requires_grad_(False)
        if not arm.same:
            self.sampler.set_attn_implementation(kernel(self.format))
        align(self.trainer, arm.regions, engine=ENGINE, format=self.format)
        align(self.sampler, "none" if arm.same else "all", engine=ENGINE, format=self.format)
        self.optimizer = torch.optim.Adam(self.masters, lr=settings.lr)

    def sample(self, ids: torch.Tensor, g: torch.Generator):
        return sample(self.sampler, ids, GROUP, not self.arm.same, g)

    def step(self, loss: torch.Tensor) -> float:
        """Take an optimizer step on the masters and store the new weights; return the gradient's norm."""
        for p in self.weights:
            p.grad = None
        loss.backward()
        for master, p in zip(self.masters, self.weights, strict=True):
            master.grad = p.grad
        norm = torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.weights, strict=True):
                p.copy_(self.format.round(master))
        return norm.item()

    @torch.no_grad()
    def publish(self) -> None:
        """Give the sampler the trainer's weights."""
        for mine, its in zip(self.weights, self.sampler.parameters(), strict=True):
            its.copy_(mine)


# ---- training


def policy_loss(new, old, advantages, weights=None) -> torch.Tensor:
    """Return GRPO's loss, mean over tokens.

    Mirrors: verl 0.9 ``compute_policy_loss_vanilla`` (clip 0.2, dual clip 3, token-mean) without a KL term; ``weights``
    (tokens, detached) are its ``rollout_is_weights``.
    """
    ratio = (new - old).clamp(-20, 20).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    lower = torch.minimum(-advantages * DUAL_CLIP, clipped)
    loss = torch.where(advantages < 0, lower, clipped)
    return (loss if weights is None else loss * weights).mean()


def group_advantages(reward: torch.Tensor) -> torch.Tensor:
    """Return (n, 1): rewards less their group's mean, over its standard deviation (verl's ``grpo``)."""
    grouped = reward.view(-1, GROUP)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).view(-1, 1)


def pretrained(seed: int, steps: int, head_dim: int = 16) -> Qwen3ForCausalLM:
    """Return a model after ``steps`` supervised steps in fp32: the same start for every arm and format."""
    policy, g = model(seed, "sdpa", head_dim), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = prompts(64, g)
        loss = -log_probs(policy, torch.cat([ids, answers(ids)], 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def update(pair: Pair, g: torch.Generator) -> tuple:
    """Sample a batch, measure the mismatch, take the optimizer steps and publish the weights.

    Returns:
        (reward, k1, k3, differ, norm), means over the batch.
    """
    ids, rollout = pair.sample(prompts(pair.settings.prompts, g), g)
    reward = rewards(ids)
    advantages = group_advantages(reward)
    with torch.no_grad():
        old = log_probs(pair.trainer, ids)
    log_r = old - rollout
    weights = log_r.clamp(-20, 20).exp().clamp(max=TIS_CAP) if pair.arm.tis else None
    norms = []
    for batch in torch.randperm(len(ids), generator=g).chunk(MINIBATCHES):
        new = log_probs(pair.trainer, ids[batch])
        chosen = None if weights is None else weights[batch]
        norms.append(pair.step(policy_loss(new, old[batch], advantages[batch], chosen)))
    pair.publish()
    exact = log_r.double()  # expm1 and fp64: in fp32 a k3 below 1e-7 is rounding noise
    k3 = (exact.expm1() - exact).mean()
    return reward.mean(), -exact.mean(), k3, (log_r != 0).float().mean(), sum(norms) / MINIBATCHES


def run(settings: Settings, show: Callable[[str], None] = lambda text: None) -> dict:
    """Train; return the settings and, per window of ``WINDOW`` steps, means of reward and mismatch.

    ``k1``: sampler minus trainer log-prob; ``k3``: r - log r - 1 with log r = trainer - sampler; ``differ``: share of
    tokens whose two log-probs differ at all. A run with a number that is not finite ends before that step: it has diverged.
    """
    began, start = time.time(), pretrained(settings.seed, settings.pretrain)
    pair = Pair(start, settings)
    g = torch.Generator().manual_seed(1000 + settings.seed)
    rows, window = [], []
    for step in range(1, settings.steps + 1):
        measured = [float(x) for x in update(pair, g)]
        diverged = not all(map(math.isfinite, measured))
        if not diverged:
            window.append(measured)
        if window and (diverged or len(window) == WINDOW or step == settings.steps):
            names, columns = ("reward", "k1", "k3", "differ", "norm"), zip(*window, strict=True)
            means = {n: float(f"{sum(c) / len(window):.4g}") for n, c in zip(names, columns, strict=True)}
            rows.append({"step": step - diverged, **means})
            window = []
            if len(rows) % 8 == 0:
                show(f"  {settings.arm} p{settings.bits} lr {settings.lr:g} seed {settings.seed}: {rows[-1]}")
        if diverged:
            break
    return {**asdict(settings), "seconds": round(time.time() - began, 1), "rows": rows}
