"""verl's config on a machine with vLLM 0.30.0 and CUDA, for every test of this room."""

import copy
import functools
import json

import pytest

pytest.importorskip("verl")
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from verl_config import composed, stock

from verl_rounding_align.engines.vllm import settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a config.json, all that the driver reads of a model."""

    @functools.cache
    def make(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return str(folder)

    return make


@pytest.fixture
def config(model, monkeypatch):
    """Return a function: overrides -> verl's trainer config on a machine with vLLM 0.30.0 and CUDA."""
    monkeypatch.setattr(settings, "_vllm_version", lambda *args: "0.30.0")

    def make(*overrides, model_type="qwen3", **kwargs):
        return composed(f"actor_rollout_ref.model.path={model(model_type)}", *overrides, **kwargs)

    return make


@pytest.fixture
def updated(model, monkeypatch):
    """Return a function like `config`, which applies the overrides to verl's composed config: a second faster."""
    monkeypatch.setattr(settings, "_vllm_version", lambda *args: "0.30.0")
    parser = OverridesParser.create()

    def make(*overrides, model_type="qwen3"):
        groups = [o for o in overrides if o.startswith("model_engine=")]
        found = copy.deepcopy(stock(*groups))
        rest = [o for o in overrides if o not in groups]
        for override in parser.parse_overrides([f"actor_rollout_ref.model.path={model(model_type)}", *rest]):
            OmegaConf.update(found, override.key_or_group, override.value(), force_add=True)
        return found

    return make
