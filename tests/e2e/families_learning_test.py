"""Whole runs of the families that people train now: a tiny random model of each.

`policy.backend` is not set: Megatron-core computes none of them.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.policy.testing.any_model import write_any
from treadle.trainer.demo import DEMO

from .families import CASES, run_case
from .testing import SMALL, Trainer

pytestmark = pytest.mark.timeout(600)

# Kimi K2 is of the architecture of DeepSeek V3.
FAMILIES = (
    *("deepseek_v3", "deepseek_v4", "gemma4_text", "glm4_moe", "gpt_oss"),
    *("minimax_m2", "nemotron_h", "qwen3_5_text", "qwen3_next"),
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_trained_is_served(
    model_type: str, train: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Three steps of GRPO with the tool loop: server and policy agree in each.

    A random model earns no reward, so that only the KL and the entropy bonus teach it something;
    a rate of 0.01 moves every weight far.
    """
    folder = tmp_path / "model"
    shutil.copytree(DEMO.parent / "model", folder)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).unlink()
    # Where DeepSeek V4 leaves positions out, the engine may choose others (docs/models.md).
    sizes = {"max_position_embeddings": 1024, "eos_token_id": 1019, "index_topk": 64}
    write_any(folder, model_type, vocab_size=1024, vocab_size_per_layer_input=1024, **sizes)
    trainer = train(
        *(f"--config={DEMO}", f"model.path={folder}", "policy.optimizer.lr=0.01"),
        *("algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.1", "rollout.response_length=24"),
        *("schedule.total_steps=3", "schedule.val_every=null", "schedule.val_before_train=false"),
        base=SMALL,
    )
    lines = trainer.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["rollout/num_failed"] == 0
        assert line["rollout/logprob_diff_max"] < 1e-4
        assert line["weights/version"] == line["step"]
    assert lines[-1]["actor/kl_loss"] > 1e-4


@pytest.mark.skipif("TREADLE_TEST_DATA" not in os.environ, reason="it names no templates")
@pytest.mark.parametrize("name", ["Kimi K2", "gpt-oss"])
def test_calls_in_the_form_of_the_family_are_read(name: str, tmp_path: Path) -> None:
    """With its own template and parser; all families: `families.py`."""
    (case,) = (case for case in CASES if case.name == name)
    outcome = run_case(case, Path(os.environ["TREADLE_TEST_DATA"]), tmp_path)
    assert outcome.agrees
    assert outcome.called > 0
