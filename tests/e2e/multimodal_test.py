"""Images on their whole way: a row and a tool's answer, renderer, gRPC, torch engine, transcript.

The model is a tiny Qwen2.5-VL with random weights. It writes nonsense, so its turns end at any of
many ids and whatever it says is read as a call of the tool.
"""

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from e2e.seeing import SPECIALS, TEMPLATE
from treadle.agent_loop import (
    AgentTask,
    Drop,
    Image,
    ImageRejectedError,
    LoopLimits,
    Message,
    Origin,
    ParsedText,
    RolloutRunner,
    SamplingParams,
    Services,
    StopReason,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    default_loops,
)
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.rpc import Requirements, connect
from treadle.agent_loop.testing import ByteRenderer, ScriptedTool
from treadle.conformance.contracts.reference import VisionReference
from treadle.loop_worker.v1 import trajectory_pb2
from treadle.rollout_server.engine import ElementType, Engine, ModelInfo, PromptImage
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine
from treadle.rollout_server.engines.torch.testing.vision_model import (
    write_vision_model,
)
from treadle.rollout_server.testing.serving import serve_in_process
from treadle.trainer.config.load import load_config
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.main import main
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.workers import pool
from treadle.trainer.rollout.workers.trajectory_codec import read_trajectory


class EverythingIsACall:
    """Reads any text as a call of `zoom`."""

    stop_tokens = ()

    def parse(
        self, text: str, *, tools: Sequence[ToolSpec] = (), prompt_end: str = ""
    ) -> ParsedText:
        call = ToolCall(id="call_0", name="zoom", arguments={})
        return ParsedText(content=text, calls=(call,), call_starts=(0,))

    def render(self, content: str, calls: Sequence[ToolCall], *, reasoning: str = "") -> str:
        return content


def picture(width: int, height: int, *, last: int = 0) -> Image:
    """A picture of noise whose last pixel is as told."""
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[-1, -1] = last
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return Image(data=file.getvalue(), mime="image/png")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["assistant"],
        trainers.BpeTrainer(
            vocab_size=262, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    write_vision_model(path, 0, vocab_size=len(tokenizer), placeholder_id=5)
    tokenizer.save_pretrained(path)
    return path


def copy_model(source: Path, target: Path, changes: dict[str, object]) -> None:
    """Copies a model, with changes to its image processor."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = target / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


async def attempt(
    engine: Engine, renderer: HfRenderer | ByteRenderer, answer: ToolResult, *images: Image
) -> Trajectory:
    """Runs the tool loop once over gRPC: an image in the task, then what the tool answers."""
    task = AgentTask(
        task_id="row",
        sample_index=0,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="See: ", images=images),),
    )
    needs = Requirements(capabilities=frozenset({"sampled_logprobs", "images"}))
    done: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        done.append(trajectory)

    async with (
        serve_in_process(engine) as server,
        connect([server.address], requirements=needs) as generator,
    ):
        services = Services(
            generator=generator,
            renderer=renderer,
            limits=LoopLimits(
                max_response_tokens=400, max_context_tokens=1000, max_assistant_turns=2
            ),
            sampling=SamplingParams(
                max_tokens=60,
                temperature=1.0,
                seed=7,
                # Turns of a few ids, without the placeholder: nothing else is excluded.
                stop_token_ids=tuple(i for i in range(10, 260) if i % 5 == 0),
            ),
            tools={"zoom": ScriptedTool("zoom", [answer])},
        )
        runner = RolloutRunner(
            default_loops(), services, max_in_flight=1, deadline_s=60, failure_policy=Drop()
        )
        await runner.run([task], sink)
    if done[0].error is not None:
        raise done[0].error
    return done[0]


async def attempt_with_torch(directory: Path, answer: ToolResult, *images: Image) -> Trajectory:
    source = ModelSource(
        path=directory, dtype=ElementType.FLOAT32, device="cpu", image_cache_bytes=1 << 20
    )
    engine = await TorchEngine.load(
        source, max_num_seqs=4, prefix_cache_bytes=1 << 20, num_threads=1
    )
    renderer = HfRenderer.from_directory(directory, parser=EverythingIsACall())
    return await attempt(engine, renderer, answer, *images)


@pytest.mark.asyncio
async def test_a_tool_shows_the_model_an_image(directory: Path) -> None:
    first, zoomed = picture(48, 24), picture(40, 40)
    answer = ToolResult(content="zoomed: <image>.", images=(zoomed,))
    trajectory = await attempt_with_torch(directory, answer, first)
    assert trajectory.stop is StopReason.ASSISTANT_TURNS
    tokens = trajectory.tokens
    origins = [span.origin for span in tokens.spans]
    assert origins == [Origin.PROMPT, Origin.SAMPLED, Origin.OBSERVED, Origin.SAMPLED]

    # Exact places: 8 by 8 pixels are one id.
    assert [placed.image for placed in tokens.images] == [first, zoomed]
    assert [placed.num_tokens for placed in tokens.images] == [6 * 3, 5 * 5]
    for placed, span in zip(tokens.images, (tokens.spans[0], tokens.spans[2]), strict=True):
        assert span.start < placed.start and placed.stop < span.stop
        assert tokens.ids[placed.start - 1 : placed.stop + 1] == (3, *[5] * placed.num_tokens, 4)
        assert not any(tokens.loss_mask[placed.start : placed.stop])

    # What was sampled is what transformers says of the whole conversation, images included.
    sent = [
        PromptImage(
            data=placed.image.data,
            media_type=placed.image.mime,
            start=placed.start,
            num_tokens=placed.num_tokens,
        )
        for placed in tokens.images
    ]
    reference = VisionReference(directory).logprobs(tokens.ids[:1], sent, tokens.ids[1:])
    for place, (sampled, logprob) in enumerate(zip(tokens.loss_mask, tokens.logprobs, strict=True)):
        if sampled:
            assert logprob == pytest.approx(reference[place - 1], abs=1e-4)


def test_an_evaluation_shows_the_images_of_its_rows(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "data_source": "drawn",
            "prompt": [{"role": "user", "content": "See <image>!"}],
            "reward_model": {"ground_truth": "1"},
            "images": [{"bytes": picture(*size).data, "path": None}],
        }
        for size in ((48, 24), (40, 40))
    ]
    data, out = tmp_path / "rows.parquet", tmp_path / "out"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    settings = ("reward.name=gsm8k", "rollout.prompt_length=100", "rollout.response_length=8")
    status = main(["eval", str(directory), "--data", str(data), "--out", str(out), *settings])
    assert status == 0, capsys.readouterr().err
    logged = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert [t["messages"][0]["images"] for t in logged] == [["image/png"]] * 2
    assert json.loads((out / "results.json").read_text())["scores"][-1]["failed"] == 0
    kept = {path.read_bytes() for path in (out / "trajectories" / "images").iterdir()}
    assert kept == {picture(48, 24).data, picture(40, 40).data}


@pytest.mark.asyncio
async def test_a_loop_worker_does_not_send_back_the_images_of_a_row(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = picture(480, 240)
    (tmp_path / "reward.py").write_text("def score(trajectory):\n    return 1.0\n")
    config = load_config(
        [],
        [
            f"model.path={directory}",
            f"data.train_files={tmp_path / 'rows.parquet'}",
            "agent.num_workers=1",
            "rollout.prompt_length=1000",
            "rollout.response_length=8",
            f"reward.name={tmp_path / 'reward.py'}:score",
        ],
    ).config
    tasks = [
        AgentTask(
            task_id="train/0",
            sample_index=0,
            rollout_index=index,
            loop="tool_agent",
            messages=(Message(role="user", content="See <image>!", images=(image,)),),
            seed=index,
        )
        for index in range(8)
    ]
    received: list[int] = []

    def measured(packed: trajectory_pb2.Trajectory, *args: Any) -> Trajectory:
        received.append(packed.ByteSize())
        return read_trajectory(packed, *args)

    monkeypatch.setattr(pool, "read_trajectory", measured)
    ended: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    model = ModelInfo(architecture="Fake", vocab_size=262, context_length=1024)
    engine = FakeEngine(model=model, clock=asyncio.get_running_loop())
    async with (
        serve_in_process(engine) as server,
        LocalLauncher(tmp_path / "logs") as launcher,
        pool.loop_workers(
            launcher,
            config,
            servers=[server],
            requirements=Requirements(capabilities=frozenset({"sampled_logprobs", "images"})),
            loops=frozenset({"tool_agent"}),
            images=True,
        ) as (workers, _),
    ):
        settings = RunnerSettings(sampling=SamplingParams(max_tokens=8), min_weight_version=0)
        await workers.runner(settings, max_in_flight=8).run(tasks, sink)
    assert [t.error for t in ended] == [None] * 8
    shown = [placed.image for t in ended for placed in t.tokens.images]
    shown += [each for t in ended for message in t.messages for each in message.images]
    assert len(shown) == 16
    assert all(each is image for each in shown), "the driver's own, and no copy"
    assert len(received) == 8
    num_tokens = sum(len(t.tokens.ids) for t in ended)
    assert sum(received) < 12 * num_tokens + 8 * 1500, f"an image has {len(image.data)} bytes"


@pytest.mark.asyncio
async def test_one_pixel_of_the_answer_changes_what_follows(directory: Path) -> None:
    first = picture(48, 24)
    dark, bright = [
        await attempt_with_torch(
            directory, ToolResult(content="", images=(picture(40, 40, last=last),)), first
        )
        for last in (0, 255)
    ]
    seen = dark.tokens.spans[3].start
    assert dark.tokens.ids[:seen] == bright.tokens.ids[:seen]
    assert dark.tokens.logprobs[:seen] == bright.tokens.logprobs[:seen]
    assert dark.tokens.logprobs[seen] != bright.tokens.logprobs[seen]


@pytest.mark.asyncio
async def test_the_image_is_part_of_the_conversation_with_the_fake_engine_too() -> None:
    model = ModelInfo(architecture="Fake", vocab_size=ByteRenderer.vocab_size, context_length=1024)

    async def run(last: int) -> Trajectory:
        engine = FakeEngine(model=model, clock=asyncio.get_running_loop())
        answer = ToolResult(content="", images=(picture(40, 40, last=last),))
        renderer = ByteRenderer(EverythingIsACall())
        return await attempt(engine, renderer, answer, picture(48, 24))

    dark, bright = await run(0), await run(255)
    assert [len(t.tokens.images) for t in (dark, bright)] == [2, 2]
    seen = dark.tokens.spans[3].start
    assert dark.tokens.ids[:seen] == bright.tokens.ids[:seen]
    assert dark.tokens.logprobs[seen] != bright.tokens.logprobs[seen]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"shortest_edge": 256, "longest_edge": 1024}}, r"IMAGE_PLACEHOLDERS: images\[0"),
        (None, r"IMAGE_UNREADABLE: images\[0\] cannot be read as image/png: "),
    ],
)
async def test_what_the_server_refuses_fails_the_attempt(
    directory: Path, tmp_path: Path, changes: dict[str, object] | None, message: str
) -> None:
    shown = picture(48, 24)
    if changes is None:
        shown = Image(data=shown.data[:-80], mime="image/png")  # The header is whole.
    copy_model(directory, tmp_path, changes or {})
    source = ModelSource(path=tmp_path, dtype=ElementType.FLOAT32, device="cpu")
    engine = await TorchEngine.load(source, max_num_seqs=4, prefix_cache_bytes=0, num_threads=1)
    renderer = HfRenderer.from_directory(directory, parser=EverythingIsACall())
    with pytest.raises(ImageRejectedError, match=message):
        await attempt(engine, renderer, ToolResult(content=""), shown)
