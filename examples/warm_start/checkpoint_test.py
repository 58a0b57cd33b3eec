"""The shipped checkpoints, held to what their READMEs say of them."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from calculator.demonstrations import answered_with_tool
from calculator.questions import TEMPLATES, Split, sample_question
from calculator.recipe import CALCULATOR
from math_expression.recipe import MATH_EXPRESSION
from treadle.agent_loop.hf import HfRenderer
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.config.policy import PolicyConfig
from treadle.trainer import demo
from warm_start.train import RECIPES, measure

_DEMOS = Path(demo.__file__).parent
_CALCULATOR = _DEMOS / "calculator" / "model"
_MATH_EXPRESSION = _DEMOS / "math_expression" / "model"


@pytest.fixture(params=RECIPES)
def model(request: pytest.FixtureRequest) -> Path:
    return _DEMOS / str(request.param) / "model"


def test_it_is_small_and_bfloat16(model: Path) -> None:
    file = model / "model.safetensors"
    assert file.stat().st_size < 3_000_000
    with safe_open(file, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_its_ids_are_the_tokenizers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert config["max_position_embeddings"] == tokenizer.model_max_length


@pytest.fixture
def load() -> Iterator[Callable[[Path], MegatronPolicy]]:
    loaded: list[MegatronPolicy] = []

    def load(model: Path) -> MegatronPolicy:
        loaded.append(MegatronPolicy(PolicyConfig(), model))
        return loaded[-1]

    yield load
    for policy in loaded:
        policy.close()


def test_the_calculators_copies_well_and_calls_about_half_of_the_time(
    load: Callable[[Path], MegatronPolicy],
) -> None:
    rng = random.Random(11)
    held_out = [
        sample_question(rng, Split.VALIDATION, template=index % len(TEMPLATES))
        for index in range(96)
    ]
    demonstrations = [answered_with_tool(question, CALCULATOR.tool) for question in held_out]
    skill = measure(load(_CALCULATOR), HfRenderer.from_directory(_CALCULATOR), demonstrations)
    assert 0.4 <= skill.call_rate <= 0.65
    assert 0.4 <= skill.greedy_accuracy <= 0.75
    assert skill.greedy_when_calling >= 0.97
    assert skill.right_when_calling >= 0.95


def test_the_math_expressions_computes_well_and_stops_early(
    load: Callable[[Path], MegatronPolicy],
) -> None:
    rng = random.Random(11)
    demonstrations = [MATH_EXPRESSION.held_out(rng, MATH_EXPRESSION.tool) for _ in range(96)]
    renderer = HfRenderer.from_directory(_MATH_EXPRESSION)
    skill = measure(load(_MATH_EXPRESSION), renderer, demonstrations)
    assert 0.4 <= skill.call_rate <= 0.6
    assert 0.8 <= skill.greedy_accuracy <= 0.95
    assert skill.greedy_when_calling >= 0.88
    assert skill.right_when_calling >= 0.82
