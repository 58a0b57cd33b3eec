"""A reward model: its number alone and in batches, and the checkpoints that are none."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    SetupError,
    StopReason,
    ToolCall,
    Trajectory,
)
from treadle.tools.rewards import resolve
from treadle.tools.rewards.reward_model import RewardModel

# One token per byte.
_IDS = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
_SPACE = "Ġ"
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}{% endfor %} {% endfor %}"
)


def _write_model(folder: Path, *, pad: int | None = None, head: bool = True) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(_IDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=pad,
    )
    config.num_labels = 1
    kind = Qwen2ForSequenceClassification if head else Qwen2ForCausalLM
    model = kind(config)
    model.save_pretrained(folder)
    byte_level = Tokenizer(models.BPE(vocab=_IDS, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _reward(folder: Path, **settings: object) -> RewardModel:
    lines = [f"{key}: {value}" for key, value in {"reward_model": "model", **settings}.items()]
    (folder / "rm.yaml").write_text("\n".join(lines))
    reward = resolve(str(folder / "rm.yaml"))
    assert isinstance(reward, RewardModel)
    return reward


def _trajectory(*contents: str) -> Trajectory:
    asked = (Message(role="user", content="two"),)
    task = AgentTask(
        task_id="row/0", sample_index=0, rollout_index=0, loop="tool_agent", messages=asked
    )
    calls = (ToolCall(id="c", name="add", arguments={}),)
    said = [Message(role="assistant", content=text, tool_calls=calls) for text in contents]
    return Trajectory(task=task, samples=(), messages=(*asked, *said), stop=StopReason.FINISHED)


async def _scores(reward: RewardModel, trajectories: Sequence[Trajectory]) -> list[float]:
    async with reward:
        return [s.value for s in await asyncio.gather(*map(reward, trajectories))]


@pytest.mark.asyncio
@pytest.mark.parametrize("pad", [None, _IDS[_SPACE]])
async def test_the_reward_is_the_models_number_in_batches_of_any_size(
    tmp_path: Path, pad: int | None
) -> None:
    """Conversations end with a space: where that is the pad, the head reads the token before."""
    folder = _write_model(tmp_path / "model", pad=pad)
    texts = (("yes",), ("no", "yes", "no"), ("no no no yes",), ("yes", "no"), ("no",))
    trajectories = [_trajectory(*text) for text in texts]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for text in texts:
        written = "user two " + "".join(f"assistant {each} add " for each in text)
        ids = torch.tensor([[_IDS[_SPACE if c == " " else c] for c in written]])
        with torch.inference_mode():
            expected.append(model(input_ids=ids).logits.item())
    for batch_size in (1, 3, 8):
        scores = await _scores(_reward(tmp_path, batch_size=batch_size), trajectories)
        assert scores == pytest.approx(expected, abs=1e-6)
    assert len({round(each, 4) for each in expected}) > 2


@pytest.mark.asyncio
async def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    _write_model(tmp_path / "model", head=False)
    with pytest.raises(SetupError, match=r"no trained weights score\.weight"):
        await _reward(tmp_path).__aenter__()


@pytest.mark.asyncio
async def test_a_conversation_that_cannot_be_scored_fails_alone(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    async with _reward(tmp_path, max_tokens=30) as reward:
        with pytest.raises(RewardError, match=r"44 tokens of .*, and max_tokens is 30"):
            await reward(_trajectory("yes", "no"))
        good = _trajectory("yes")
        waiting = asyncio.create_task(reward(replace(good, messages=good.messages[:1])))
        await asyncio.sleep(0)
        waiting.cancel()
        assert isinstance((await reward(good)).value, float)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batch_size: 0", "batch_size must be a positive integer, got 0"),
        ("batchsize: 2", "unknown key 'batchsize', did you mean 'batch_size'"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rm.yaml"
    path.write_text(f"reward_model: ORG/NAME\n{line}\n")
    with pytest.raises(SetupError, match=message):
        resolve(str(path))
