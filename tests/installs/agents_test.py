"""Agent frameworks of other people, installed as they come, against the endpoint.

Each solves one task with a tool call, with the framework's default settings. What the frameworks
ask for that is not enforced, and what they send that nothing reads, is in the trajectory's metrics.
"""

import asyncio
import json
from pathlib import Path

import pytest

from installs.foreign import ROOT, environment, make_venv, run
from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.proxy import AgentConstraints, CommandAgent, ProxyAgentLoop
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

LOCK = ROOT / "3rdparty" / "python" / "agents.lock.txt"
PROGRAMS = Path(__file__).with_name("agent_programs.py")
TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="agents",
    messages=(Message(role="user", content="What is 6 * 7?"),),
)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def python(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with all frameworks."""
    folder = tmp_path_factory.mktemp("agents")
    bin_folder = make_venv(folder / "venv", programs)
    run(
        [programs / "uv", "pip", "install", "-q", "--python", bin_folder / "python", "-r", LOCK],
        cwd=folder,
        env=environment(programs),
    )
    return bin_folder / "python"


@pytest.mark.parametrize(
    ("name", "last", "passed"),
    [
        ("autogen", "It is 42.", {"ignored_keys"}),
        ("langchain", "It is 42.", set()),
        ("litellm", "It is 42.", set()),
        ("anthropic", "It is 42.", {"ignored_keys"}),
        ("openai_agents", "It is 42.", {"unenforced_strict"}),
        ("openai_agents_responses", "It is 42.", {"unenforced_strict"}),
        (
            "pydantic_ai",
            call("final_result", number=42),
            {"unenforced_strict", "unenforced_tool_choice"},
        ),
        ("smolagents", call("final_answer", answer="42"), {"unenforced_tool_choice"}),
    ],
)
def test_a_framework_is_served_as_it_comes(
    python: Path, name: str, last: str, passed: set[str]
) -> None:
    said = [call("multiply", a=6, b=7), last]
    trajectory = solve(python, name, *said)
    assert (trajectory.reward, trajectory.stop) == (1.0, StopReason.FINISHED)
    trained = [
        ByteRenderer().decode([t for t, on in zip(s.ids, s.loss_mask, strict=True) if on])
        for s in trajectory.samples
    ]
    assert "".join(trained) == "".join(f"{text}<end>" for text in said)
    metrics = {metric.name: metric.value for metric in trajectory.metrics}
    let_pass = {key.removeprefix("proxy/") for key, value in metrics.items() if value}
    assert {key for key in let_pass if key.startswith(("unenforced", "ignored"))} == passed


def solve(python: Path, name: str, *replies: str) -> Trajectory:
    """Runs a framework's agent against a model that says `replies`."""
    services = Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=8000),
        sampling=SamplingParams(max_tokens=1000, temperature=1.0),
    )
    loop = ProxyAgentLoop(
        CommandAgent([str(python), str(PROGRAMS), name], inherited=["PATH", "HOME"]),
        constraints=AgentConstraints.IGNORE,
    )
    return asyncio.run(loop.run(TASK, services))
