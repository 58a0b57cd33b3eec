import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest

from treadle.agent_loop import (
    AgentTask,
    Drop,
    LoopLimits,
    Message,
    RolloutRunner,
    SamplingParams,
    Services,
    SetupError,
    StopReason,
    ToolFailure,
    ToolSpec,
    Trajectory,
    default_loops,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.tools import code_interpreter, load_catalogue
from treadle.tools.code_interpreter import CodeInterpreterTool, RetoolCodeInterpreterTool
from treadle.tools.sandbox import (
    Execution,
    Program,
    RunStatus,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tracing import aggregate

pytestmark = pytest.mark.asyncio

TASK = AgentTask(
    task_id="train/0",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="What is 6 * 7?"),),
)
URL = "http://127.0.0.1:1/run_code"
CONFIG: Mapping[str, object] = {"sandbox_fusion_url": URL}


class RecordingSandbox:
    """Gives what it was told to, and counts who is in it."""

    def __init__(self, *outcomes: Execution | Exception) -> None:
        self.outcomes = list(outcomes)
        self.programs: list[Program] = []
        self.entered = self.left = self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self) -> Self:
        self.entered += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.left += 1

    async def run(self, program: Program) -> Execution:
        self.programs.append(program)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            outcome = self.outcomes.pop(0) if self.outcomes else wrote("42\n")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        finally:
            self.running -= 1


def wrote(
    stdout: str, stderr: str = "", return_code: int | None = 0, **fields: object
) -> Execution:
    return Execution(
        status=RunStatus.TIMED_OUT if return_code is None else RunStatus.FINISHED,
        stdout=stdout,
        stderr=stderr,
        return_code=return_code,
        execution_s=0.5,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordingSandbox:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the host's limit is kept
    recording = RecordingSandbox()
    monkeypatch.setattr(code_interpreter, "make_sandbox", lambda settings: recording)
    return recording


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (wrote("42\n"), "42\n"),
        (wrote("1\n", "Traceback ...\n", 1), "1\nTraceback ...\n"),
        (wrote(""), ""),
        (wrote("begun", "", None), "begun\nThe code was stopped after 30 s."),
        (wrote("", "", None), "The code was stopped after 30 s."),
    ],
)
async def test_the_model_sees_stdout_and_stderr(
    sandbox: RecordingSandbox, execution: Execution, text: str
) -> None:
    sandbox.outcomes.append(execution)
    session = await CodeInterpreterTool(config=CONFIG).open(TASK)
    assert (await session.call({"code": "x"})).content == text
    await session.aclose()


async def test_the_program_is_run_with_the_settings(sandbox: RecordingSandbox) -> None:
    config = {**CONFIG, "default_timeout": 20, "memory_limit_mb": 64, "default_language": "bash"}
    session = await CodeInterpreterTool(config=config).open(TASK)
    await session.call({"code": "x"})
    await session.call({"code": "x", "timeout": 3, "language": "python"})
    await session.aclose()
    assert sandbox.programs == [
        Program(code="x", timeout_s=20, language="bash", memory_limit_mib=64),
        Program(code="x", timeout_s=3, language="python", memory_limit_mib=64),
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "takes the argument 'code'; given: none"),
        ({"cod": "x"}, "takes the argument 'code'; given: 'cod'"),
        ({"code": 3}, "'code' must be a string, not 3"),
        ({"code": "print('\ud800')"}, "'code' is not valid Unicode: .*surrogates not allowed"),
        ({"code": "", "language": 3}, "'language' must be a string"),
        ({"code": "", "timeout": 0}, "above 0 and at most 30, not 0"),
        ({"code": "", "timeout": 31}, "above 0 and at most 30, not 31"),
        ({"code": "", "timeout": "1"}, "must be a number of seconds"),
        ({"code": "", "timeout": True}, "must be a number of seconds"),
        ({"code": "", "timeout": float("nan")}, "must be a number of seconds"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(
    sandbox: RecordingSandbox, arguments: Mapping[str, object], why: str
) -> None:
    session = await CodeInterpreterTool(config=CONFIG).open(TASK)
    with pytest.raises(ToolFailure, match=why):
        await session.call(arguments)
    await session.aclose()
    assert sandbox.programs == []


async def test_a_language_that_the_model_chose_is_its_fault(sandbox: RecordingSandbox) -> None:
    sandbox.outcomes += [UnsupportedProgramError("no cpp here")] * 2
    session = await CodeInterpreterTool(config=CONFIG).open(TASK)
    with pytest.raises(ToolFailure, match="no cpp here"):
        await session.call({"code": "", "language": "cpp"})
    with pytest.raises(UnsupportedProgramError):
        await session.call({"code": ""})
    await session.aclose()


async def run_loop(tool: CodeInterpreterTool, *replies: str) -> Trajectory:
    services = Services(
        generator=ScriptedGenerator(replies),
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=4000),
        sampling=SamplingParams(max_tokens=1000),
        tools={tool.spec.name: tool},
    )
    runner = RolloutRunner(
        default_loops(), services, max_in_flight=1, deadline_s=30, failure_policy=Drop()
    )
    ended: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    await runner.run([TASK], keep)
    return ended[0]


CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "6*7"}}\n</tool_call>'


async def test_a_sandbox_that_fails_ends_the_attempt_and_not_the_run(
    sandbox: RecordingSandbox,
) -> None:
    sandbox.outcomes.append(SandboxError("the sandbox at X cannot be reached"))
    trajectory = await run_loop(CodeInterpreterTool(config=CONFIG), CALL, "unused")
    assert trajectory.stop is StopReason.ERROR
    assert isinstance(trajectory.error, SandboxError)
    assert trajectory.error.retryable
    assert all("cannot be reached" not in message.content for message in trajectory.messages)
    assert (sandbox.entered, sandbox.left) == (1, 1)


async def test_metrics_say_where_the_time_went(
    sandbox: RecordingSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_interpreter, "time", SimpleNamespace(monotonic=lambda: 0.0))
    sandbox.outcomes += [
        wrote("42\n", queue_s=2.0, num_retries=1, warm=True),
        wrote("", "", None),
        wrote("", "x", 1),
    ]
    session = await CodeInterpreterTool(config=CONFIG).open(TASK)
    results = [await session.call({"code": ""}) for _ in range(3)]
    await session.aclose()
    metrics = aggregate([result.metrics for result in results])
    assert metrics["code_interpreter/queue_s"] == pytest.approx(2 / 3)
    assert metrics["code_interpreter/run_s"] == 0.5
    assert metrics["code_interpreter/timeouts"] == 1
    assert metrics["code_interpreter/errors"] == 1
    assert metrics["code_interpreter/retries"] == 1
    assert metrics["code_interpreter/warm"] == pytest.approx(1 / 3)


async def test_the_sandbox_is_entered_by_the_first_session_and_left_by_the_last(
    sandbox: RecordingSandbox,
) -> None:
    tool = CodeInterpreterTool(config=CONFIG)
    one, two = await asyncio.gather(tool.open(TASK), tool.open(TASK))
    assert (sandbox.entered, sandbox.left) == (1, 0)
    await one.aclose()
    assert (sandbox.entered, sandbox.left) == (1, 0)
    await two.aclose()
    assert (sandbox.entered, sandbox.left) == (1, 1)
    await (await tool.open(TASK)).aclose()
    assert (sandbox.entered, sandbox.left) == (2, 2)


async def test_a_sandbox_that_cannot_be_entered_is_tried_again_by_the_next(
    sandbox: RecordingSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = CodeInterpreterTool(config=CONFIG)

    async def fail(self: object) -> RecordingSandbox:
        raise SetupError("no bubblewrap")

    with monkeypatch.context() as patch:
        patch.setattr(RecordingSandbox, "__aenter__", fail)
        with pytest.raises(SetupError, match="no bubblewrap"):
            await tool.open(TASK)
    await (await tool.open(TASK)).aclose()


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"num_workers": 3, "rate_limit": 9}, 3),
        ({"num_workers": 9, "rate_limit": 2}, 2),
        ({"num_workers": 4, "rate_limit": 2, "enable_global_rate_limit": False}, 4),
    ],
)
async def test_calls_under_way_are_bounded(
    sandbox: RecordingSandbox, settings: Mapping[str, object], most: int
) -> None:
    sandbox.gate.clear()
    session = await CodeInterpreterTool(config={**CONFIG, **settings}).open(TASK)
    calls = [asyncio.create_task(session.call({"code": ""})) for _ in range(12)]
    for _ in range(12):
        await asyncio.sleep(0)
    assert sandbox.running == most
    calls[0].cancel()
    sandbox.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 11
    assert sandbox.most == most
    await session.aclose()


async def test_two_tools_with_limits_of_their_own_do_not_share_one(
    sandbox: RecordingSandbox,
) -> None:
    sandbox.gate.clear()
    config = {**CONFIG, "rate_limit": 1}
    other = ToolSpec(name="other", description="Another.")
    sessions = [
        await CodeInterpreterTool(config=config).open(TASK),
        await CodeInterpreterTool(config=config, spec=other).open(TASK),
        await CodeInterpreterTool(config={**config, "sandbox_fusion_url": URL + "2"}).open(TASK),
    ]
    calls = [asyncio.create_task(session.call({"code": ""})) for session in sessions]
    for _ in range(9):
        await asyncio.sleep(0)
    assert sandbox.running == 3
    sandbox.gate.set()
    await asyncio.gather(*calls)
    for session in sessions:
        await session.aclose()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "sandbox_fusion_url is not set: start a sandbox"),
        ({"sandbox_fusion_url": ""}, "sandbox_fusion_url is not set"),
        ({"sandbox_fusion_url": "localhost"}, "must be like http://"),
        ({"sandbox_url": URL}, r"unknown setting 'sandbox_url'.*did you mean 'sandbox_fusion_url'"),
        ({"backend": "docker"}, "backend is 'docker'; it must be one of sandbox_fusion, local"),
        ({"backend": "local", **CONFIG}, "has no meaning with the backend local"),
        ({**CONFIG, "num_workers": 0}, "num_workers is 0; it must be above 0"),
        ({**CONFIG, "num_workers": "3"}, "num_workers must be of type int, got '3'"),
        ({**CONFIG, "rate_limit": 1.5}, "rate_limit must be of type int"),
        ({**CONFIG, "default_timeout": -1}, "default_timeout is -1.0; it must be above 0"),
        ({**CONFIG, "enable_global_rate_limit": 1}, "must be of type bool, got 1"),
    ],
)
async def test_wrong_settings_are_named(config: Mapping[str, object], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        CodeInterpreterTool(config=config)


VERL = """
tools:
  - class_name: "%s"
    config:
      sandbox_fusion_url: "http://localhost:8080/run_code"
      num_workers: 128
      enable_global_rate_limit: true
      rate_limit: 128
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 1024
      type: native
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("verl.tools.sandbox_fusion_tools.SandboxFusionTool", CodeInterpreterTool),
        ("recipe.retool.retool.CustomSandboxFusionTool", RetoolCodeInterpreterTool),
    ],
)
async def test_verls_catalogues_are_read_as_they_are(
    tmp_path: Path, name: str, kind: type[CodeInterpreterTool]
) -> None:
    (tmp_path / "tools.yaml").write_text(VERL % name)
    tool = load_catalogue(tmp_path / "tools.yaml")["code_interpreter"]
    assert type(tool) is kind
    assert tool.spec == code_interpreter.SPEC


async def test_the_restricted_backend_computes() -> None:
    tool = RetoolCodeInterpreterTool(config={"backend": "restricted"})
    trajectory = await run_loop(tool, CALL, "#### 42")
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["42\n"]
