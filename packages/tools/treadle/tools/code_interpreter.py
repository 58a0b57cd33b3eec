"""`code_interpreter(code)`: runs what the model wrote and shows it what came out.

Invariant: what the code does is told to the model: its output, its traceback, that it ran too
long. What the sandbox does wrong is a `SandboxError`, which ends the attempt (the runner tries it
again, then drops it; training goes on) and never reaches the training text. At most `num_workers`
programs of this process and `rate_limit` of this host are under way for one tool.

Who waits: a call, for its turn in the process, then in the host, then for the program. Cancelling
it ends the program and frees both within a second. The sandbox is entered by the first of the
sessions that are open at one time and left by the last.

Settings, verl's with verl's defaults, and `backend`:

    sandbox_fusion_url: http://127.0.0.1:8080/run_code    # backend sandbox_fusion only
    backend: sandbox_fusion        # or local (bubblewrap, in this process), restricted (Monty)
    num_workers: 10                # programs of this process at one time
    rate_limit: 10                 # programs of this host at one time, unless ...
    enable_global_rate_limit: true #   ... this is false
    default_timeout: 30            # seconds
    default_language: python
    memory_limit_mb: 1024
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

from treadle.agent_loop import AgentTask, SetupError, ToolFailure, ToolResult, ToolSpec
from treadle.tools.code_interpreter_settings import Backend, CodeInterpreterSettings
from treadle.tools.host_limit import HostLimit
from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    RunStatus,
    Sandbox,
    UnsupportedProgramError,
)
from treadle.tracing import Metric, Reduce

SPEC = ToolSpec(
    name="code_interpreter",
    description="A tool for executing code.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to execute."}},
        "required": ["code"],
    },
)
_ARGUMENTS = ("code", "timeout", "language")


class CodeInterpreterTool:
    """verl's `SandboxFusionTool`, with the sandbox of one's choice.

    Args:
        config: The settings above.
        spec: What the model is told, if not `SPEC`. The call takes `code`, and `timeout`
            (seconds, at most `default_timeout`) and `language` where the spec offers them.

    Raises:
        SetupError: A setting is unknown, missing or has a wrong value.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        self.spec = spec
        self._settings = CodeInterpreterSettings.from_config(config or {})
        self._shared: _Shared | None = None
        make_sandbox(self._settings)  # what is missing is said now and not at the first call

    async def open(self, task: AgentTask) -> CodeInterpreterSession:
        """Enter the sandbox, unless another session has.

        Raises:
            SetupError: The sandbox cannot isolate programs here.
        """
        shared = self._shared
        if shared is None:
            shared = self._shared = _Shared(self.spec.name, self._settings)
        shared.users += 1
        try:
            await shared.enter()
        except BaseException:
            await self.leave(shared)
            raise
        return CodeInterpreterSession(self, shared)

    async def leave(self, shared: _Shared) -> None:
        """One session fewer; the last one leaves the sandbox."""
        shared.users -= 1
        if shared.users == 0:
            if self._shared is shared:
                self._shared = None
            await shared.leave()

    async def run(self, shared: _Shared, arguments: Mapping[str, object]) -> ToolResult:
        """Run one call in the sandbox of its session.

        Raises:
            ToolFailure: The arguments are wrong.
            SandboxError: The sandbox failed.
        """
        program = self._program(arguments)
        arrived = time.monotonic()
        shared.waiting += 1
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(shared.places)
                if shared.limit is not None:
                    await stack.enter_async_context(shared.limit.slot())
                queue_s = time.monotonic() - arrived
                execution = await shared.sandbox.run(program)
        except UnsupportedProgramError as error:
            if "language" in arguments:
                raise ToolFailure(str(error)) from None
            raise
        finally:
            shared.waiting -= 1
        metrics = self._metrics(execution, queue_s + execution.queue_s, shared.waiting)
        return ToolResult(content=self.text(execution, program), metrics=metrics)

    def source(self, code: str) -> str:
        """The program in what the model gave as `code`; here, all of it."""
        return code

    def text(self, execution: Execution, program: Program) -> str:
        """What the model is shown: stdout, then stderr, as verl; and a word on a time-out."""
        output = execution.stdout + execution.stderr
        if execution.status is RunStatus.FINISHED:
            return output
        if output and not output.endswith("\n"):
            output += "\n"
        return f"{output}The code was stopped after {program.timeout_s:g} s."

    def _program(self, arguments: Mapping[str, object]) -> Program:
        settings = self._settings
        unknown = [name for name in arguments if name not in _ARGUMENTS]
        if "code" not in arguments or unknown:
            given = ", ".join(map(repr, arguments)) or "none"
            raise ToolFailure(f"{self.spec.name} takes the argument 'code'; given: {given}.")
        return Program(
            code=self.source(_text(arguments, "code")),
            timeout_s=self._timeout_s(arguments),
            language=_text({"language": settings.default_language, **arguments}, "language"),
            memory_limit_mib=settings.memory_limit_mb,
        )

    def _timeout_s(self, arguments: Mapping[str, object]) -> float:
        most = self._settings.default_timeout
        value = arguments.get("timeout", most)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
            return float(value)
        raise ToolFailure(
            "The argument 'timeout' must be a number of seconds above 0 and at most "
            f"{most:g}, not {value!r:.80}."
        )

    def _metrics(self, execution: Execution, queue_s: float, others: int) -> tuple[Metric, ...]:
        timed_out = execution.status is RunStatus.TIMED_OUT
        name = self.spec.name
        return (
            Metric(f"{name}/queue_s", queue_s, Reduce.MEAN),
            Metric(f"{name}/run_s", execution.execution_s, Reduce.MEAN),
            Metric(f"{name}/waiting_max", float(others), Reduce.MAX),
            Metric(f"{name}/timeouts", float(timed_out), Reduce.SUM),
            Metric(f"{name}/errors", float(execution.return_code not in (0, None)), Reduce.SUM),
            Metric(f"{name}/retries", float(execution.num_retries), Reduce.SUM),
            Metric(f"{name}/warm", float(execution.warm), Reduce.MEAN),
        )


def _text(arguments: Mapping[str, object], name: str) -> str:
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolFailure(f"The argument {name!r} must be a string, not {value!r:.80}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ToolFailure(f"The argument {name!r} is no valid Unicode: {error}.") from None
    return value


class CodeInterpreterSession:
    """One trajectory's use of the sandbox. Its programs share nothing with one another."""

    def __init__(self, tool: CodeInterpreterTool, shared: _Shared) -> None:
        self._tool = tool
        self._shared = shared

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Run `arguments["code"]`.

        Raises:
            ToolFailure: The arguments are wrong.
            SandboxError: The sandbox failed.
        """
        return await self._tool.run(self._shared, arguments)

    async def aclose(self) -> None:
        """Done with the sandbox."""
        await self._tool.leave(self._shared)


class _Shared:
    """What the sessions that are open at one time have in common; of one event loop."""

    def __init__(self, tool: str, settings: CodeInterpreterSettings) -> None:
        self.users = self.waiting = 0
        self.places = asyncio.Semaphore(settings.num_workers)
        self.limit: HostLimit | None = None
        if settings.enable_global_rate_limit:
            # By name and address: two tools with limits of their own do not share one.
            name = f"{tool}\n{settings.backend}\n{settings.sandbox_fusion_url}"
            self.limit = HostLimit(name, settings.rate_limit)
        self.sandbox = make_sandbox(settings)
        self._entering = asyncio.Lock()
        self._stack: AsyncExitStack | None = None

    async def enter(self) -> None:
        """Enter the sandbox; the others wait for the first and have no more to do."""
        async with self._entering:
            if self._stack is None:
                async with AsyncExitStack() as stack:
                    if self.limit is not None:
                        await stack.enter_async_context(self.limit)
                    await stack.enter_async_context(self.sandbox)
                    self._stack = stack.pop_all()

    async def leave(self) -> None:
        """Leave it, if it was entered."""
        if self._stack is not None:
            await self._stack.aclose()


def make_sandbox(settings: CodeInterpreterSettings) -> Sandbox:
    """The sandbox that settings name, not entered.

    Raises:
        SetupError: What it needs is not installed.
    """
    match settings.backend:
        case Backend.SANDBOX_FUSION:
            try:
                from treadle.tools.sandbox.fusion import FusionSandbox
            except ImportError as error:
                raise SetupError(f"the backend sandbox_fusion needs httpx: {error}") from error
            return FusionSandbox(settings.sandbox_fusion_url)
        case Backend.LOCAL:
            from treadle.tools.sandbox.bubblewrap import find_bubblewraps
            from treadle.tools.sandbox.limits import SandboxLimits
            from treadle.tools.sandbox.local import LocalSandbox

            find_bubblewraps()
            limits = SandboxLimits(
                memory_mib=settings.memory_limit_mb, timeout_s=settings.default_timeout
            )
            return LocalSandbox(limits=limits, queue=settings.num_workers)
        case Backend.RESTRICTED:
            from treadle.tools.sandbox.restricted import RestrictedSandbox

            return RestrictedSandbox(processes=settings.num_workers)
