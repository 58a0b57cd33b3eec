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
    Image,
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
@pytest.mark.parametrize("damaged", [None, "config.json"])
async def test_what_cannot_be_loaded_names_the_model(tmp_path: Path, damaged: str | None) -> None:
    """Of a device that this machine lacks, or a file of an unexpected form."""
    folder = _write_model(tmp_path / "model")
    settings = {"device": "cuda:99"} if damaged is None else {}
    if damaged is not None:
        (folder / damaged).write_text('{"model_type": "qwen2", "hidden_size": "wide"}')
    with pytest.raises(SetupError, match=r"the reward model .*/model cannot be loaded"):
        await _reward(tmp_path, **settings).__aenter__()


@pytest.mark.asyncio
async def test_callers_that_wait_fail_when_the_model_is_freed(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    reward = _reward(tmp_path, batch_size=1)
    async with reward:
        waiting = [asyncio.create_task(reward(_trajectory("yes"))) for _ in range(9)]
        await asyncio.sleep(0)
    ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert {type(each) for each in ended} == {RewardError}
    with pytest.raises(RewardError, match="scores no more: it was freed"):
        await reward(_trajectory("yes"))


@pytest.mark.asyncio
async def test_callers_fail_with_the_cause_when_the_scorer_ends(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    async with _reward(tmp_path) as reward:
        reward._score = lambda batch: []  # a number too few
        waiting = [asyncio.create_task(reward(_trajectory("yes"))) for _ in range(3)]
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        assert all("scores no more: ValueError: zip" in str(each) for each in ended)
        with pytest.raises(RewardError, match="scores no more: ValueError: zip"):
            await reward(_trajectory("yes"))


def test_a_reward_is_entered_in_one_event_loop_after_another(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    reward = _reward(tmp_path)

    async def entered() -> float:
        async with reward:
            await asyncio.sleep(0)  # the scorer waits, in its event loop
            return (await asyncio.wait_for(reward(_trajectory("yes")), 10)).value

    assert asyncio.run(entered()) == asyncio.run(entered())


@pytest.mark.asyncio
async def test_reasoning_is_scored_and_images_are_refused(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(_TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}"))
    plain = _trajectory("yes")
    asked, said = plain.messages
    image = Image(data=b"png", mime="image/png")
    seen = replace(asked, images=(image,))
    async with _reward(tmp_path) as reward:
        values = [
            (await reward(replace(plain, messages=(asked, replace(said, reasoning=text))))).value
            for text in ("long", "short")
        ]
        assert values[0] != values[1]
        with pytest.raises(RewardError, match="a user message has images"):
            await reward(replace(plain, messages=(seen, said)))


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
        ("dtype: bf16", "dtype must be one of auto, float32, bfloat16, float16, got 'bf16'"),
        ("device: gpu", "device must be cpu, cuda, cuda:N, mps or xpu, got 'gpu'"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rm.yaml"
    path.write_text(f"reward_model: ORG/NAME\n{line}\n")
    with pytest.raises(SetupError, match=message):
        resolve(str(path))
