"""The site map of vLLM for one checkpoint's config: its real model, with dummy weights and a few layers.

``python -m verl_rounding_align.engines.vllm.sites FOLDER`` builds the model in a process of its own. It reads
``request.json`` and writes ``graphs.json``. Nothing is left running, and Inductor's hooks are set before vLLM is imported.

compiled  vLLM compiles its model while the engine starts. The schedule of each graph is recorded. The process stops as soon
          as the last graph of the model is scheduled, before its kernels are built.
eager     ``enforce_eager=True``: there is no graph, and one prompt is run under an operator trace.
split     vLLM on CUDA splits its graph at attention, and on CPU it does not. To see the split graph on a CPU, vLLM's finished
          config is changed to its piecewise backend, with its own pass that lowers IR ops. The pass that undoes
          functionalization for CUDA's operators is left out. The model is the real one.

The trainer's graph is that of Hugging Face's own model of the same config, run eagerly under the same trace. It is made
smaller, since the operators do not depend on sizes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

from .. import process
from ..presets import Preset, resolve
from ..process import EngineFailed
from ..schedule import inductor
from ..schedule import site_map as sites
from ..schedule.eager import OperatorTrace
from ..schedule.follow import layer_of
from ..schedule.graph import Graph
from ..schedule.site_map import SiteMap
from ..spec import ModelSpec
from . import environment

MODES = ("compiled", "eager", "both")
MODULE = "verl_rounding_align.engines.vllm.sites"
LIMIT = 1800  # seconds; a few layers take under a minute


def run_sites(
    model: str,
    mode: str = "compiled",
    layers: int = 3,
    split: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> list[SiteMap]:
    """Return where vLLM stores values in a middle layer of a model, one map per mode.

    Args:
        model: checkpoint folder or hub name; only its config is read.
        mode: ``compiled``, ``eager`` or ``both``.
        layers: decoder layers to build, at least 2.
        split: split the compiled graph at attention, as vLLM does on CUDA.
        progress: called with a line of text before each step.

    Raises:
        ValueError: an unknown value, an unsupported model, an untested torch, or no vLLM; with the legal choices.
        EngineFailed: vLLM failed, or did not end in half an hour; the message names its log.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    sites.middle(layers)
    if split and mode == "eager":
        raise ValueError(f"mode={mode!r}: an eager run has no graph to split; choose from compiled, both")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm is not installed in this environment; the site map is read from its model")
    ModelSpec.from_model(model)  # its error messages
    if mode != "eager":
        inductor.check()
    maps = []
    for one in ("compiled", "eager") if mode == "both" else (mode,):
        progress(f"building vLLM's model, {layers} layers, {one}")
        maps.append(_run(model, one, layers, split and one == "compiled"))
    return maps


def _run(model: str, mode: str, layers: int, split: bool) -> SiteMap:
    folder = Path(tempfile.mkdtemp(prefix="rounding-sites-"))
    request = dict(model=model, mode=mode, layers=layers, split=split)
    (folder / "request.json").write_text(json.dumps(request))
    variables = {**environment(), "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    status = process.run(MODULE, [str(folder)], log=folder / "sites.log", limit=LIMIT, environment=variables)
    if not (folder / "graphs.json").exists():
        raise EngineFailed.of(status, folder / "sites.log")
    found = json.loads((folder / "graphs.json").read_text())
    shutil.rmtree(folder)
    graphs, trainer = ([Graph.from_dict(g) for g in found.pop(key)] for key in ("graphs", "trainer"))
    trainer = [sites.as_engine(g, layers) for g in trainer]
    layered = [g for g in graphs if any(layer_of(v.module)[0] is not None for v in g.values)]
    if split and len(layered) < 2:
        raise EngineFailed(f"split: vLLM {found['version']} compiled one graph; its config was not taken as piecewise")
    split = mode == "compiled" and len(layered) > 1  # on CUDA it splits by itself
    name = Path(model).name or model  # a file that travels should not hold this machine's paths
    found["notes"] = tuple(found["notes"])
    out = sites.site_map(graphs, trainer, layers, engine="vllm", mode=mode, split=split, model=name, **found)
    try:
        preset = preset_of(out)
    except ValueError as error:
        return replace(out, notes=(*out.notes, str(error)))
    return replace(out, notes=(*out.notes, f"compared with preset {preset.name}"))


def preset_of(found: SiteMap) -> Preset:
    """Return the preset that claims what a map shows: the split one for a split graph, whatever its device.

    Raises:
        ValueError: no preset covers what ran.
    """
    device = "cuda" if found.split else found.device
    return resolve(found.engine, found.version, device, found.mode == "eager", key="engine")


def contradictions(found: SiteMap) -> list[str]:
    """Return one line for each point of a map that contradicts its preset; none where no preset covers what ran."""
    try:
        return sites.refute(found, preset_of(found))
    except ValueError:
        return []


# ---- in the process of its own


def few_layers(model: str, layers: int) -> dict:
    """Return a checkpoint's config with that many layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(Path(model).expanduser())).to_dict()
    config["num_hidden_layers"] = layers
    for key in ("layer_types", "mlp_only_layers"):
        if isinstance(config.get(key), list):
            kinds = config[key] + config[key][-1:] * (layers - len(config[key]))  # a model with fewer layers gets more
            config[key] = kinds[:layers] if key == "layer_types" else [n for n in config[key] if n < layers]
    if "max_window_layers" in config:
        config["max_window_layers"] = min(config["max_window_layers"] or layers, layers)
    config.pop("quantization_config", None)
    return config


def trainer_graph(config: dict) -> Graph:
    """Return the operators of Hugging Face's model, run eagerly in bf16 with small sizes and SDPA."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    small.update(vocab_size=97, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if "num_experts" in config:
        small.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    config = AutoConfig.for_model(**{**config, **small})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad(), OperatorTrace(model, "transformers/") as trace:
        model(torch.arange(5)[None] + 1, use_cache=False)
    return trace.graph


@contextlib.contextmanager
def _split() -> Iterator[None]:
    """Make vLLM use its piecewise backend, split at attention, on a platform where it compiles one graph."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    create = EngineArgs.create_engine_config

    def changed(self, *args, **kwargs):
        config = create(self, *args, **kwargs)
        compilation = config.compilation_config
        if compilation.mode != CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.ir_enable_torch_wrap = CompilationMode.VLLM_COMPILE, True
            compilation.compile_sizes, compilation.splitting_ops = [], list(CompilationConfig._attention_ops)
        return config

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(EngineArgs, "create_engine_config", changed))
        if current_platform.is_cpu():
            # it compares every operator that writes in place with CUDA's, which a CPU build has not; Inductor does its
            # work for all others anyway
            stack.enter_context(mock.patch.object(FixFunctionalizationPass, "__call__", lambda self, graph: None))
        yield


def build(folder: Path, model: str, mode: str, layers: int, split: bool) -> dict:
    """Build the model in this process, and return its graphs, the trainer's, and what they were made with."""
    config = few_layers(model, layers)
    (folder / "config.json").write_text(json.dumps(config))

    def last(graph: Graph) -> bool:
        return any(layer_of(v.module) == (None, "norm") for v in graph.values)

    graphs: list[Graph] = []
    with contextlib.ExitStack() as stack:
        if mode == "compiled":
            graphs = stack.enter_context(inductor.record(stop=last))
        import torch
        import vllm
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
        from vllm.platforms import current_platform

        kept, load = [], BaseModelLoader.load_model

        def keep(self, *args, **kwargs):
            kept.append(load(self, *args, **kwargs))
            return kept[-1]

        stack.enter_context(mock.patch.object(BaseModelLoader, "load_model", keep))
        if split:
            stack.enter_context(_split())
        options = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False)
        try:
            engine = vllm.LLM(
                model=str(folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                enforce_eager=mode == "eager",
                **options,
            )
        except Exception as error:  # Inductor wraps what its passes raise
            if not (mode == "compiled" and inductor.stopped(error)):
                raise
        with torch.no_grad(), OperatorTrace(kept[0], "vllm/") as trace:
            if mode == "eager":
                sampling = vllm.SamplingParams(max_tokens=1, detokenize=False)
                engine.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
            else:  # the engine's logits never are in a compiled graph
                size = config["hidden_size"]
                kept[0].compute_logits(torch.zeros(2, size, dtype=torch.bfloat16, device=current_platform.device_type))
    notes = ["inside matrix products, attention and other kernels that are not Inductor's nothing is visible"]
    if split and current_platform.device_type == "cpu":
        notes.append(
            "split on CPU: vLLM's config was changed to its piecewise backend, without the pass that needs CUDA's "
            "operators; kernels are CPU Inductor's, not Triton's"
        )
    if mode == "eager":
        notes.append("eager: every operator stores its result; custom operators show only what they write")
    return dict(
        graphs=[asdict(g) for g in (*graphs, trace.graph)],
        trainer=[asdict(trainer_graph(config))],
        version=vllm.__version__,
        device=current_platform.device_type,
        torch=torch.__version__,
        notes=tuple(notes),
    )


def main(folder: Path) -> None:
    """Write ``graphs.json`` for ``request.json``, then leave without the interpreter's teardown of a half-built engine."""
    found = build(folder, **json.loads((folder / "request.json").read_text()))
    (folder / "graphs.json.part").write_text(json.dumps(found))
    (folder / "graphs.json.part").replace(folder / "graphs.json")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
