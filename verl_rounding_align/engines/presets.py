"""Engines as data: which rounding points each engine stores, from where that is known, and how it was verified.

A preset is a claim about an engine. ``evidence`` says per group what the claim rests on:

- ``bitwise``: a test in this repository compares with the engine's own code, element for element;
- ``source``: read off the engine's source, not run;
- ``unproven``: expected, not shown. ``rounding_align=all`` leaves an unproven group out; ask for it by its own name.

Adding an engine's preset is one row in ``PRESETS``. A row need not know every region: of a site kind that it does not list
it says nothing (:meth:`Preset.knows`), and a plan that asks for such a group is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from packaging.specifiers import SpecifierSet

from .. import releases
from ..regions import GROUPS, KINDS, REGIONS
from .fingerprint import CONTRADICTED, UNVERIFIED, Fingerprint, Judgement, fused, judge, other_dtype

BITWISE, SOURCE, UNPROVEN = "bitwise", "source", "unproven"
STORED, KEPT = "stored", "kept"
TRAINER = "hf_eager"  # the row that describes an unpatched trainer


@dataclass(frozen=True)
class Preset:
    """The rounding points that an engine stores.

    Args:
        name: what users write (``engine=...``) and read in logs.
        points: site kind -> points stored there; a kind that is missing is one that the row says nothing about.
        evidence: group -> ``bitwise``, ``source`` or ``unproven``; a group that is missing is unproven.
        source: what the row mirrors, with versions.
        engine, device, eager: the rollout this row is chosen for by :func:`resolve`; engine None is never chosen.
        split: whether the row holds for a graph split at attention, or for a whole one; None where it does not matter.
        versions: inclusive (lowest, highest) engine release covered; None is open.
        note: what else a reader should know.
        rest: what holds at a site kind that ``points`` does not list: ``stored`` (every point of its region), ``kept``
            (none), or None, where the row says nothing.
        verified: fingerprints of the engines that the points were compared with, bit for bit.
    """

    name: str
    points: Mapping[str, frozenset[str]]
    evidence: Mapping[str, str]
    source: str
    engine: str | None = None
    device: str | None = None
    eager: bool | None = None
    split: bool | None = None
    versions: tuple[str | None, str | None] = (None, None)
    note: str = field(default="")
    verified: tuple[Fingerprint, ...] = ()
    rest: str | None = None

    def __post_init__(self):
        for what, names, known in (("site kind", self.points, KINDS), ("group", self.evidence, GROUPS)):
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise ValueError(f"preset {self.name!r}: unknown {what} {unknown[0]!r}; choose from {', '.join(known)}")
        for kind, points in self.points.items():
            its = REGIONS[KINDS[kind]].points
            unknown = sorted(points - set(its))
            if unknown:
                raise ValueError(
                    f"preset {self.name!r}: {kind} has no point {unknown[0]!r}; choose from {', '.join(its)}"
                )

    def knows(self, kind: str) -> bool:
        """Return whether the row says what is stored at a site kind."""
        return kind in self.points or self.rest is not None

    def at(self, kind: str) -> frozenset[str]:
        """Return the points that are stored at a site kind; all of them where the row says nothing.

        >>> sorted(get("vllm_compiled").at("attention")), sorted(get("hf_eager").at("mlp"))
        (['cos_sin'], ['act'])
        """
        if kind in self.points:
            return self.points[kind]
        return frozenset() if self.rest == KEPT else frozenset(REGIONS[KINDS[kind]].points)

    def rests_on(self, group: str) -> str:
        """Return what the row's claim about a group rests on: ``bitwise``, ``source`` or ``unproven``."""
        return self.evidence.get(group, UNPROVEN)

    @property
    def probed(self) -> bool:
        """Whether this row is a probe's result, not one of this file."""
        return self.name not in PRESETS

    def covers(self, version: str) -> bool:
        """Return whether an engine release (``0.30.0``, ``0.30.0+cpu``) lies in this row's range."""
        low, high = self.versions
        ends = [f">={low}"] * (low is not None) + [f"<={high}"] * (high is not None)
        return releases.covers(SpecifierSet(",".join(ends)), version)

    def judge(self, running: Fingerprint, dtype: str | None = None, groups: Collection[str] | None = None) -> Judgement:
        """Return what this row is worth for a running engine: verified, unverified or contradicted, and why.

        Args:
            running: the engine's own fingerprint.
            dtype: what the trainer computes in, by torch's name; None if it is not known.
            groups: the groups that the plan aligns; a fusion pass that moves none of them contradicts nothing.
        """
        if self.verified:
            return judge(running, self.verified, self.name, dtype, groups)
        if self.engine is None:
            return Judgement(UNVERIFIED, f"{self.name} describes no engine")
        mode = "eager" if self.eager else "compiled"
        claimed = dict(engine=self.engine, device=self.device, mode=mode, batch_invariant=False)
        own = running.model_impl if running.model_impl == self.engine else "vllm"  # the engine's own model code
        claimed |= dict(emulate_precision_casts=False, quantization="", model_impl=own)
        claimed |= {} if self.split is None else dict(split=self.split)
        other = {name: getattr(running, name) for name, x in claimed.items() if getattr(running, name) != x}
        moved = [op for op in running.custom_ops if op.startswith("-" if self.eager else "+") or op == _OTHER[mode]]
        if moved:  # single operators that depart from the mode's default
            other["custom_ops"], claimed["custom_ops"] = running.custom_ops, ("all",) if self.eager else ("none",)
        moving = fused(running, groups=groups)
        if moving:
            other["passes"], claimed["passes"] = moving, ()
        texts = [f"the engine has {n}={x!r}, {self.name} is for {claimed[n]!r}" for n, x in other.items()]
        texts += filter(None, [other_dtype(running, dtype)])
        if texts:
            return Judgement(CONTRADICTED, "; ".join(texts))
        why = f"{self.name} was not compared with an engine ({self.source})"
        if running.tensor_parallel > 1:
            why += f"; the engine has tensor_parallel={running.tensor_parallel}"
        if not self.covers(running.version):
            why += f"; the engine is {running.version}, and the row covers {'-'.join(v or '' for v in self.versions)}"
        other_kernels = [op for op in running.ir_op_priority if not op.endswith("=native")] if not self.eager else []
        if other_kernels:
            why += f"; the engine takes {', '.join(other_kernels)}, and the row was read for native ones"
        return Judgement(UNVERIFIED, why)

    def as_dict(self) -> dict:
        """Return the fields as JSON and config files can hold them."""
        points = {kind: sorted(names) for kind, names in self.points.items()}
        verified = [{n: list(x) if isinstance(x, tuple) else x for n, x in vars(f).items()} for f in self.verified]
        return {**asdict(self), "points": points, "versions": list(self.versions), "verified": verified}

    @classmethod
    def from_dict(cls, values: Mapping, key: str = "engine") -> Preset:
        """Return the preset that :meth:`as_dict` was made of.

        Raises:
            ValueError: something is missing or unknown.

        >>> Preset.from_dict(get("vllm_cpu").as_dict()) == get("vllm_cpu")
        True
        """
        try:
            points = {kind: frozenset(names) for kind, names in values["points"].items()}
            verified = tuple(map(Fingerprint.from_dict, values["verified"]))
            return cls(**{**values, "points": points, "versions": tuple(values["versions"]), "verified": verified})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{key}: not a preset written by this package ({type(error).__name__}: {error})"
            ) from error


def _points(
    rope: str = "", mlp: str = "", experts: str = "", add: str = "", mlp_add: str | None = None, **kinds: str
) -> dict[str, frozenset[str]]:
    """Return a row's points from blank-separated names; ``add`` holds at all three adds unless ``mlp_add`` says else.
    Further site kinds are given by their own names.
    """
    after_mlp = add if mlp_add is None else mlp_add
    names = dict(attention=rope, mlp=mlp, experts=experts, attn_add=add, mlp_add=after_mlp, final=after_mlp) | kinds
    return {kind: frozenset(text.split()) for kind, text in names.items()}


def _evidence(every: str, **exceptions: str) -> dict[str, str]:
    """Return the same evidence for every group of this file's regions, but for the exceptions."""
    return {group: exceptions.get(group, every) for group in GROUPS}


def _cpu(mode: str) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of vLLM on CPU in its default settings that recipes/engine_map found, one per release."""
    compiled = mode == "compiled"
    return tuple(
        Fingerprint(
            engine="vllm",
            version=f"0.{minor}.0",
            device="cpu",
            mode=mode,
            backend="inductor" if compiled else "",
            custom_ops=("none" if compiled else "all",),
            arch="AVX512",
            ir_op_priority=("rms_norm=native", "fused_add_rms_norm=native"),
            torch="2.13.0",
        )
        for minor in range(28, 33)
    )


_OTHER = {"compiled": "all", "eager": "none"}  # custom_ops of the other mode
_ALL = {region.name: " ".join(region.points) for region in REGIONS.values()}
_READ = ("0.8.5", "0.33.0")  # releases of vLLM whose sources were read
_RUN = ("0.28.0", "0.32.0")  # releases whose CPU layers were run and matched at every site: recipes/engine_map


def _vllm_cuda(name: str, low: str, high: str, rope: str, normed: bool) -> Preset:
    """Return the row of vLLM's own CUDA kernels (``enforce_eager=True``) for one range of releases."""
    return Preset(
        name=name,
        points=_points(
            rope=f"cos_sin qk_norm {'qk_normed' if normed else ''} {rope}",
            mlp="act",
            experts="act",
            add=f"sum carry {'normed' if normed else ''}",
        ),
        evidence=_evidence(SOURCE),
        source=f"vLLM {low}-{high} csrc: pos_encoding, layernorm and activation kernels; read, not run on a GPU here",
        engine="vllm",
        device="cuda",
        eager=True,
        versions=(low, high),
    )


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="hf_eager",
            points=_points(rope=_ALL["rope"], mlp=_ALL["swiglu"], experts=_ALL["swiglu"], add=_ALL["add_rms_norm"]),
            evidence=_evidence(BITWISE),
            source="Transformers 5.10 modeling_*.py, eager: every operator stores in the model dtype",
            rest=STORED,
        ),
        Preset(
            name="vllm_compiled",
            points=_points(rope="cos_sin"),
            evidence=_evidence(BITWISE),
            source="torch.compile of vLLM 0.28-0.32 layers (native implementations), one graph for the whole model",
            engine="vllm",
            device="cpu",
            eager=False,
            versions=_RUN,
            verified=_cpu("compiled"),
        ),
        Preset(
            name="vllm_compiled_split",
            points=_points(rope="cos_sin", experts="act", add="", mlp_add="carry"),
            evidence=_evidence(SOURCE, carry=UNPROVEN),
            source="torch.compile of vLLM layers, graph split at attention (default on CUDA); not run on a GPU here",
            engine="vllm",
            device="cuda",
            eager=False,
            split=True,
            versions=_READ,
            note="carry: bitwise on vLLM 0.30's piecewise backend with CPU Inductor (tests/engines/test_presets_vllm.py); not on Triton",
        ),
        Preset(
            name="vllm_cpu",
            points=_points(rope="qk_normed qk_norm cos_sin", mlp="act", experts="", add="normed carry"),
            evidence=_evidence(BITWISE),
            source="vLLM 0.28-0.32 CPU, enforce_eager=True: native norm and SiLU op by op, rotary and experts kernels of csrc/cpu",
            engine="vllm",
            device="cpu",
            eager=True,
            versions=_RUN,
            verified=_cpu("eager"),
            note="experts: silu approximated in fp32 (fast_exp), within one step of the model dtype",
        ),
        _vllm_cuda("vllm_cuda", "0.24.0", "0.33.0", rope="", normed=False),
        _vllm_cuda("vllm_cuda_0_23", "0.23.0", "0.23.0", rope="", normed=True),
        _vllm_cuda("vllm_cuda_0_20", "0.20.0", "0.22.1", rope="", normed=False),
        _vllm_cuda("vllm_cuda_0_19", "0.8.5", "0.19.1", rope="product", normed=True),
        Preset(
            name="fp32",
            points=_points(),
            evidence=_evidence(BITWISE),
            source="no interior point is stored, cosines and sines included: the reference with fewest roundings",
            rest=KEPT,
        ),
    )
}


def get(name: str, key: str = "engine") -> Preset:
    """Return the preset called ``name``.

    Raises:
        ValueError: unknown name, with the legal ones.

    >>> get("vllm")
    Traceback (most recent call last):
    ...
    ValueError: engine='vllm': unknown engine preset 'vllm'; choose from hf_eager, vllm_compiled, \
vllm_compiled_split, vllm_cpu, vllm_cuda, vllm_cuda_0_23, vllm_cuda_0_20, vllm_cuda_0_19, fp32
    """
    if name not in PRESETS:
        raise ValueError(f"{key}={name!r}: unknown engine preset {name!r}; choose from {', '.join(PRESETS)}")
    return PRESETS[name]


def resolve(engine: str, version: str, device: str, eager: bool, key: str = "rollout.name") -> Preset:
    """Return the preset for a rollout engine as it will run.

    Args:
        engine: the rollout engine's name (``vllm``).
        version: its release, e.g. ``0.30.0``.
        device: device type it runs on: ``cuda`` or ``cpu``.
        eager: True for ``enforce_eager=True``, False for the compiled graph.
        key: the config key that named the engine, for the message.

    Raises:
        ValueError: no row covers it.

    >>> resolve("vllm", "0.30.0", "cpu", eager=False).name
    'vllm_compiled'
    """
    rows = [p for p in PRESETS.values() if p.engine is not None]
    known = sorted({p.engine for p in rows})
    if engine not in known:
        raise ValueError(
            f"{key}={engine!r}: no rounding preset for this rollout engine; choose from {', '.join(known)}"
        )
    rows = [p for p in rows if p.engine == engine and p.device == device and p.eager == eager]
    mode = "eager" if eager else "compiled"
    if not rows:
        raise ValueError(f"{key}={engine!r}: no rounding preset for {engine} ({mode}) on device {device!r}")
    for preset in rows:
        if preset.covers(version):
            return preset
    ranges = ", ".join(f"{p.versions[0]} to {p.versions[1]}" for p in rows)
    raise ValueError(
        f"{key}={engine!r}: no rounding preset for {engine} {version} ({mode}, {device}); releases covered: {ranges}"
    )
