"""The shipped checkpoint, held to what its README says of it."""

import json
import random
from collections.abc import Iterator

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from treadle.agent_loop.hf import HfRenderer
from treadle.trainer.config.policy import PolicyConfig
from treadle.trainer.demo.calculator_recipe import CALCULATOR, CATALOGUE
from treadle.trainer.demo.demonstrations import answered_with_tool
from treadle.trainer.demo.questions import TEMPLATES, Split, sample_question
from treadle.trainer.demo.warm_start import measure
from treadle.trainer.megatron.backend import MegatronPolicy

_MODEL = CATALOGUE.parent / "model"


def test_it_is_small_and_bfloat16() -> None:
    file = _MODEL / "model.safetensors"
    assert file.stat().st_size < 3_000_000
    with safe_open(file, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((_MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_its_ids_are_the_tokenizers() -> None:
    config = json.loads((_MODEL / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(_MODEL)
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert config["max_position_embeddings"] == tokenizer.model_max_length


@pytest.fixture
def policy() -> Iterator[MegatronPolicy]:
    policy = MegatronPolicy(PolicyConfig(), _MODEL)
    yield policy
    policy.close()


def test_it_copies_well_and_calls_about_half_of_the_time(policy: MegatronPolicy) -> None:
    rng = random.Random(11)
    held_out = [
        sample_question(rng, Split.VALIDATION, template=index % len(TEMPLATES))
        for index in range(96)
    ]
    demonstrations = [answered_with_tool(question, CALCULATOR.tool) for question in held_out]
    skill = measure(policy, HfRenderer.from_directory(_MODEL), demonstrations)
    assert 0.4 <= skill.call_rate <= 0.65
    assert 0.4 <= skill.greedy_accuracy <= 0.75
    assert skill.greedy_when_calling >= 0.97
    assert skill.right_when_calling >= 0.95
