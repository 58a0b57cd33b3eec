"""Tests of a real loop worker and its router, with a server that a test scripts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import AgentTask, Message, SamplingParams, Trajectory
from treadle.agent_loop.rpc import Requirements
from treadle.agent_loop.rpc.testing import STARTED, ScriptedServer, finished, says, serving, tokens
from treadle.trainer.config.load import load_config
from treadle.trainer.data.load_data import load_renderer
from treadle.trainer.demo import DEMO
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.workers.pool import loop_workers
from treadle.trainer.rollout.workers.trajectory_codec import PackedMessages

pytestmark = pytest.mark.asyncio

_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 + 25"}}\n</tool_call>'


class Server(ScriptedServer):
    """Fits the demo's tokenizer."""

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        info = await super().GetServerInfo(request, context)
        info.model.vocab_size = 2000
        return info


async def test_a_worker_renders_parses_calls_tools_and_scores(tmp_path: Path) -> None:
    config = load_config([DEMO], ["agent.num_workers=1"]).config
    renderer = load_renderer(config)
    end = renderer.stop_token_ids[0]
    call, answer = ((*renderer.encode(text), end) for text in (_CALL, "#### 42"))
    turns = [says(STARTED, tokens(*ids), finished(len(ids))) for ids in (call, answer)]
    server = Server(*turns, *turns)
    task = AgentTask(
        task_id="train/0",
        sample_index=0,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content="What is 17 + 25?"),),
        fields={
            "data_source": "treadle/calculator",
            "reward_model": {"style": "rule", "ground_truth": "42"},
        },
        seed=7,
    )
    ended: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    async with (
        serving(server),
        LocalLauncher(tmp_path) as launcher,
        loop_workers(
            launcher,
            config,
            servers=[server],
            requirements=Requirements(),
            loops=frozenset({"tool_agent"}),
            images=False,
        ) as (workers, router),
    ):
        settings = RunnerSettings(sampling=SamplingParams(max_tokens=64), min_weight_version=1)
        runner = workers.runner(settings, max_in_flight=1)
        for wanted in (True, False):
            workers.make_text_while(partial(bool, wanted))
            await runner.run([task], sink)
        assert (await router.occupied_s())[server.address] > 0
    texts = [t.source.text() for t in ended if isinstance(t.source, PackedMessages)]
    assert [text is not None and text.response for text in texts] == [b"#### 42", False]
    trajectory, _ = ended
    assert trajectory.error is None
    assert (trajectory.task, trajectory.reward) == (task, 1.0)
    assert trajectory.exchange.tools_called == ("calculator",)
    assert trajectory.tokens.num_sampled_tokens == len(call) + len(answer)
    sources = (trajectory.source, trajectory.tokens.source)
    assert [each is not None and each.is_made for each in sources] == [False, False]
    assert [message.role for message in trajectory.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.messages[2].content == "42"
    requests = server.requests[:2]
    first, second = (list(request.prompt_token_ids) for request in requests)
    assert second[: len(first) + len(call)] == [*first, *call]
    assert list(trajectory.tokens.ids) == [*second, *answer]
    assert len({request.session_id for request in requests}) == 1
