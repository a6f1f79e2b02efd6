"""recipes/grpo_math: every overlay composes with the installed verl, and its data has verl's columns.

Contract: an overlay sets no key that verl does not have, passes verl's and this package's checks in every arm, and the
arms differ in the key only. Nothing here runs on a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_rounding_align.integrations.verl import driver
from verl_rounding_align.integrations.verl.config import plans, take

pytestmark = pytest.mark.verl
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_math"
OVERLAYS = {
    "deepseek_r1_distill_qwen_1_5b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2"),
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", "qwen3"),
    "qwen3_4b_base": ("Qwen/Qwen3-4B-Base", "qwen3"),
    "qwen3_8b_base": ("Qwen/Qwen3-8B-Base", "qwen3"),
}
ARMS = {"none": "none", "rope": "rope", "all": "rope+swiglu+add_rms_norm"}
OWN = {"trainer.rounding_align_metrics"}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.delenv("MODEL_PATH", raising=False)
    monkeypatch.setattr("verl_rounding_align.engines.vllm.settings._vllm_version", lambda *args: "0.30.0")


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{RECIPE}/conf]", *overrides])


def unknown(config, stock, prefix=""):
    """Return the keys of ``config`` that ``stock`` does not have; below an empty mapping of verl's all keys are free."""
    found = set()
    for name, value in config.items():
        if name not in stock:
            found.add(prefix + name)
        elif isinstance(value, dict) and stock[name]:
            found |= unknown(value, stock[name], f"{prefix}{name}.")
    return found


def plain(config):
    return OmegaConf.to_container(config, resolve=False)


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_sets_no_unknown_key(name):
    stock = plain(composed())
    assert unknown(plain(composed(f"+grpo_math={name}")), stock) == OWN
    control = plain(composed(f"+grpo_math={name}", "+actor_rollout_ref.actor.clip_ration=0.2"))
    assert unknown(control, stock) == OWN | {"actor_rollout_ref.actor.clip_ration"}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_arm_passes_the_drivers_checks(name, arm, monkeypatch):
    from verl.utils.config import validate_config

    path, model_type = OVERLAYS[name]
    monkeypatch.setattr(driver, "_checkpoint", {path: {"model_type": model_type}}.get)
    config = composed(f"+grpo_math={name}", f"+rounding_align={arm}")
    assert config.actor_rollout_ref.model.path == path
    validate_config(config, use_reference_policy=False, use_critic=False)
    found = plans(config.actor_rollout_ref)
    assert {role: str(plan) for role, plan in found.items()} == (
        {} if arm == "none" else {"actor": f"{ARMS[arm]}: hf_eager -> vllm_compiled_split"}
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_clipped_grpo_on_eight_gpus_without_correction(name):
    config = composed(f"+grpo_math={name}")
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_rs, correction.bypass_mode) == (None, None, False)
    assert config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.actor.clip_ratio == 0.2
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 8)
    assert config.actor_rollout_ref.rollout.calculate_log_probs and config.trainer.use_v1
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest


@pytest.mark.parametrize("name", OVERLAYS)
def test_arms_differ_in_the_key_only(name):
    arms = [composed(f"+grpo_math={name}", f"+rounding_align={arm}") for arm in ARMS]
    assert len({str(plain(arm)) for arm in arms}) == len(ARMS)
    for arm in arms:
        take(arm.actor_rollout_ref)
    assert [plain(arm) for arm in arms] == [plain(composed(f"+grpo_math={name}"))] * len(ARMS)


def shell(script, *words, **env):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **env}
    return subprocess.run(["bash", RECIPE / script, *words], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_run_script_hands_its_overlay_arm_and_words_to_verl(tmp_path):
    run = shell("qwen3_1_7b.sh", "trainer.total_training_steps=7", "--cfg", "job", ARM="rope", DATA_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    config = OmegaConf.create(run.stdout[run.stdout.index("model_engine:") :])
    expected = composed("+grpo_math=qwen3_1_7b", "+rounding_align=rope", "trainer.total_training_steps=7")
    assert config.trainer.experiment_name == "qwen3_1_7b-rope"
    expected.trainer.experiment_name = config.trainer.experiment_name
    assert plain(config) == plain(expected)


def test_every_overlay_has_its_run_script():
    assert {path.stem for path in RECIPE.glob("*.sh")} == {"run", *OVERLAYS}
    assert {path.stem for path in (RECIPE / "conf" / "grpo_math").iterdir()} == {"base", *OVERLAYS}
    for name in OVERLAYS:
        assert (RECIPE / f"{name}.sh").read_text().splitlines()[-1].endswith(f'/run.sh" {name} "$@"')


@pytest.mark.parametrize("arm", ["", "ropee"])
def test_an_unknown_arm_is_refused(arm):
    run = shell("qwen3_1_7b.sh", ARM=arm)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"ARM='{arm}': choose from none, rope, all\n")


# -------------------------------------------------------------------------------------------------------------- data


@pytest.fixture
def prepare_data(monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.syspath_prepend(str(RECIPE))
    import prepare_data

    return prepare_data


def problem(number, answer="4", **extra):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"problem {number}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(number)},
        **extra,
    }


def test_every_problem_is_written_once_with_verls_columns(prepare_data, tmp_path, monkeypatch, capsys):
    import pandas
    from datasets import Dataset

    rows = Dataset.from_list([problem(n, solution="dropped") for n in (1, 2, 1, 3, 2)])
    monkeypatch.setattr(prepare_data, "load_dataset", lambda name, split: rows)
    prepare_data.main(tmp_path)
    for file in ("train.parquet", "aime2024.parquet"):
        frame = pandas.read_parquet(tmp_path / file)
        assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert [prompt[0]["content"] for prompt in frame["prompt"]] == ["problem 1", "problem 2", "problem 3"]
    assert "train.parquet: 3 problems from BytedTsinghua-SIA/DAPO-Math-17k" in capsys.readouterr().out


def test_verls_reward_reads_the_answers(prepare_data):
    from verl.utils.reward_score import default_compute_score

    row = problem(1)
    for response, score in (("2 + 2.\nAnswer: 4", 1.0), ("2 + 2.\nAnswer: 5", -1.0)):
        found = default_compute_score(row["data_source"], response, row["reward_model"]["ground_truth"])
        assert found["score"] == score


def test_a_problem_with_two_answers_is_refused(prepare_data):
    from datasets import Dataset

    with pytest.raises(ValueError) as error:
        prepare_data.unique(Dataset.from_list([problem(1), problem(1, "5")]))
    assert str(error.value) == "two answers, '4' and '5', to: problem 1"


def test_a_file_without_verls_columns_is_refused(prepare_data):
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": json.dumps("1 + 1"), "solution": "2"}])
    with pytest.raises(ValueError) as error:
        prepare_data.unique(rows)
    assert str(error.value) == (
        "columns ['data_source', 'ability', 'reward_model', 'extra_info'] are missing; found ['prompt', 'solution']"
    )
