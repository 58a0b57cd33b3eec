"""One trace over driver, router and rollout server, and the same tokens with and without it.

The engine is the fake one behind real gRPC. Where it must call a tool, it says what the test wrote.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import (
    AgentTask,
    Drop,
    InteractionReply,
    LoopLimits,
    Message,
    RolloutRunner,
    SamplingParams,
    Score,
    Services,
    StickySession,
    ToolFailure,
    Trajectory,
    default_loops,
)
from treadle.agent_loop.capture import CapturedSession
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.agent_loop.testing import ByteRenderer, ScriptedInteraction, ScriptedTool
from treadle.rollout_server.config.schema import ServerConfig, ServerTracingConfig
from treadle.rollout_server.engine import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    ModelInfo,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.testing import FakeClock, serve_in_process
from treadle.tracing import FinishedSpan, MemorySink, plain, use_attributes, use_sink

from .span_table import Spans, add_span, documented_spans

pytestmark = pytest.mark.asyncio

RENDERER = ByteRenderer()
END, ASSISTANT = 256, 259
MODEL = ModelInfo(
    architecture="Fake",
    vocab_size=RENDERER.vocab_size,
    context_length=4096,
    eos_token_ids=frozenset({END}),
)
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "loom"}}\n</tool_call>'


class Speaker(FakeEngine):
    """Says what is written for a turn, and samples the other turns.

    Args:
        texts: By the number of the turn, from 0.
        paused_turn: The turn within which new weights would pause it for 5 s.
    """

    def __init__(self, texts: dict[int, str], *, paused_turn: int | None = None) -> None:
        self.clock = FakeClock()
        super().__init__(model=MODEL, clock=self.clock)
        self.replica: Replica | None = None
        self._texts = texts
        self._paused_turn = paused_turn

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        turn = request.prompt.count(ASSISTANT) - 1
        if turn not in self._texts:
            async for event in super().generate(request):
                yield event
            return
        first, *rest = (*self._texts[turn].encode(), END)
        yield Started(0)
        self.clock.advance(0.5)
        yield Tokens((first,), (-0.5,), 0)
        if turn == self._paused_turn:
            assert self.replica is not None
            await self.replica.pause(InFlightPolicy.CONTINUE)
            self.clock.advance(5)
            await self.replica.resume()
        self.clock.advance(1)
        yield Tokens(tuple(rest), (-0.5,) * len(rest), 0)
        yield Finished(FinishReason.STOP)


class CapturedLoop:
    """Asks once through a captured session."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        with CapturedSession(task, services) as session:
            await session.complete(task.messages)
            return session.finish()


@dataclass(frozen=True, slots=True)
class Files:
    """Where the processes write their spans."""

    router: Path
    server: Path

    def spans(self, process: str) -> list[FinishedSpan]:
        path = self.router if process == "router" else self.server
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [FinishedSpan(**line) for line in lines]


@asynccontextmanager
async def generator(engine: Speaker, files: Files | None) -> AsyncIterator[GrpcTokenGenerator]:
    """A client of a router in front of one server, which write their spans into files."""
    config = ServerConfig(
        tracing=ServerTracingConfig(jsonl=None if files is None else files.server)
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serve_in_process(engine, config=config, clock=engine.clock)
        )
        engine.replica = server.replica
        routing = RouterConfig(
            policy=StickySession(cache_tokens=1),  # room for one session at a time
            replicas=(server.address,),
            tracing_jsonl=None if files is None else files.router,
        )
        router = await stack.enter_async_context(serve_router(routing))
        yield await stack.enter_async_context(connect(router=router))


def task(number: int, loop: str = "tool_agent", **extra_info: object) -> AgentTask:
    return AgentTask(
        task_id=f"train/{number}",
        sample_index=number,
        rollout_index=0,
        loop=loop,
        messages=(Message(role="user", content=f"question {number}"),),
        fields={"extra_info": extra_info},
        seed=number,
    )


async def trajectories(services: Services, tasks: list[AgentTask]) -> list[Trajectory]:
    """The trajectories of tasks, in their order."""
    ended: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    runner = RolloutRunner(
        default_loops().adding("captured", CapturedLoop()),
        services,
        max_in_flight=2,
        deadline_s=60,
        failure_policy=Drop(),
    )
    with use_attributes(step=1, validate=False, experiment_name="test"):
        await runner.run(tasks, keep)
    assert [trajectory.error for trajectory in ended] == [None] * len(tasks)
    return sorted(ended, key=lambda trajectory: trajectory.task.sample_index)


def services(client: GrpcTokenGenerator, tool: ScriptedTool, *, trace_text: bool) -> Services:
    return Services(
        generator=client,
        renderer=RENDERER,
        limits=LoopLimits(max_response_tokens=1024),
        sampling=SamplingParams(max_tokens=200, temperature=1.0),
        tools={"lookup": tool},
        interactions={
            "user": ScriptedInteraction(["and then?", InteractionReply(content="", stop=True)])
        },
        reward=lambda trajectory: Score(value=0.5, answer=trajectory.final_text),
        trace_text=trace_text,
    )


async def test_one_trace_spans_driver_router_and_server_as_documented(tmp_path: Path) -> None:
    files = Files(tmp_path / "router.jsonl", tmp_path / "server.jsonl")
    engine = Speaker({0: CALL, 1: CALL, 2: "a frame", 3: "it weaves"}, paused_turn=2)
    tool = ScriptedTool(results=[ToolFailure("which loom?"), "a frame", "a frame", "a frame"])
    tasks = [task(0, interaction_kwargs={"name": "user"}), task(1, "captured")]
    with use_sink(sink := MemorySink()):
        async with generator(engine, files) as client:
            told, _ = await trajectories(services(client, tool, trace_text=False), tasks)
    assert [message.role for message in told.messages].count("tool") == 2

    spans = {"driver": sink.spans, **{name: files.spans(name) for name in ("router", "server")}}
    by_id = {span.span_id: span for each in spans.values() for span in each}
    parents = {(span.name, by_id[span.parent_id].name) for span in by_id.values() if span.parent_id}
    assert parents == {
        *((name, "trajectory") for name in ("turn", "tools", "interaction", "reward")),
        ("generate", "turn"),
        ("tool", "tools"),
        *((name, "generate") for name in ("route", "queue", "prefill", "decode", "paused")),
        ("router.open_session", "route"),
        ("route", "router.open_session"),
        ("server.generate", "generate"),
        *((name, "server.generate") for name in ("queue", "prefill", "decode", "paused")),
    }
    roots = [span for span in by_id.values() if span.parent_id is None]
    assert [root.name for root in roots] == ["trajectory", "trajectory"]
    assert {span.trace_id for span in by_id.values()} == {root.trace_id for root in roots}
    for name in ("prefill", "decode", "paused"):
        seconds = [
            sorted(span.duration_ns / 1e9 for span in each if span.name == name)
            for each in (spans["driver"], spans["server"])
        ]
        assert seconds[0] == pytest.approx(seconds[1], abs=1e-5), name

    found: Spans = {}
    for process, each in spans.items():
        for span in each:
            name = "rollout server" if process == "server" else process
            add_span(found, name, span.name, span.attributes)
    of_steps = {("driver", "update"), ("driver", "weight_sync")}  # see training_test.py
    assert found == {key: v for key, v in documented_spans().items() if key not in of_steps}
    for span in spans["driver"]:
        shared = {"step": 1, "validate": False, "experiment_name": "test", "rollout_n": 0}
        assert shared.items() <= span.attributes.items()
        assert "sample_index" in span.attributes


async def test_spans_hold_what_was_given_and_returned(tmp_path: Path) -> None:
    engine = Speaker({0: CALL, 1: "a frame"})
    tool = ScriptedTool(results=["wood and strings"])
    with use_sink(sink := MemorySink()):
        async with generator(engine, None) as client:
            (told,) = await trajectories(services(client, tool, trace_text=True), [task(7)])
    spans: list[tuple[str, Any]] = [(span.name, plain(span.attributes)) for span in sink.spans]
    content = dict(spans)
    first = next(attributes for name, attributes in spans if name == "generate")
    assert first["inputs"]["prompt_tokens"] == told.tokens.num_prompt_tokens
    assert first["inputs"]["sampling"]["temperature"] == 1.0
    assert first["output"] == {
        "tokens": len(CALL) + 1,
        "finish": "stop",
        "weight_versions": [0],
        "prompt_text": RENDERER.decode(told.tokens.ids[: told.tokens.num_prompt_tokens]),
        "response_text": f"{CALL}<end>",
    }
    assert content["tool"]["inputs"] == {"word": "loom"}
    assert content["tool"]["output"] == {
        "content": "wood and strings",
        "reward": 0.0,
        "stop": False,
    }
    assert content["reward"]["output"] == {"value": 0.5, "answer": "a frame"}
    whole = content["trajectory"]
    assert whole["inputs"] == {"messages": [{"role": "user", "content": "question 7"}]}
    assert [message["role"] for message in whole["output"]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert whole["output"]["messages"][1]["tool_calls"][0]["arguments"] == {"word": "loom"}
    assert whole["output"]["prompt_text"] + whole["output"]["response_text"] == RENDERER.decode(
        told.tokens.ids
    )


async def test_tokens_are_the_same_with_and_without_tracing(tmp_path: Path) -> None:
    async def sampled(*, traced: bool) -> list[Trajectory]:
        engine = Speaker({0: CALL})
        tool = ScriptedTool(results=["wood and strings"] * 8)
        files = Files(tmp_path / "router.jsonl", tmp_path / "server.jsonl") if traced else None
        async with generator(engine, files) as client:
            made = services(client, tool, trace_text=traced)
            return await trajectories(made, [task(number) for number in range(8)])

    without = await sampled(traced=False)
    with use_sink(sink := MemorySink()):
        traced = await sampled(traced=True)
        texts = [plain(span.attributes) for span in sink.spans if span.name == "trajectory"]
    assert [each.samples for each in traced] == [each.samples for each in without]
    assert all(each.num_sampled_tokens > len(CALL) + 1 for each in traced)
    assert len({each.tokens.ids for each in traced}) == 8
    assert len(texts) == 8
