"""`code_interpreter(code)`: runs a program of the model and shows the model its output.

Invariant: the model reads what its code did: the output, a traceback, or that it ran too long. A
fault of the sandbox is a `SandboxError`, which ends the attempt (the runner retries, then drops the
trajectory; training continues) and never reaches the training text. For one tool, at most
`num_workers` programs of this process and `rate_limit` programs of this host are in flight.

Who waits: a call, first for a slot of the process, then of the host, then for the program.
Cancelling the call ends the program and frees both slots within a second. The first open session
enters the sandbox, the last one leaves it.

Settings, verl's with verl's defaults, and `backend`:

    sandbox_fusion_url: http://127.0.0.1:8080/run_code    # backend sandbox_fusion only
    backend: sandbox_fusion        # or local (bubblewrap, in this process), restricted (Monty)
    num_workers: 10                # programs of this process at one time
    rate_limit: 10                 # programs of this host at one time, unless ...
    enable_global_rate_limit: true #   ... this is false
    default_timeout: 30            # seconds
    default_language: python
    memory_limit_mb: 1024

`RetoolCodeInterpreterTool` is ReTool's variant: the code may come in a fence, and the value of its
last expression is printed.
"""

from __future__ import annotations

import ast
import asyncio
import enum
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from typing import Self

from treadle.agent_loop import AgentTask, SetupError, ToolFailure, ToolResult, ToolSpec
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.host_semaphore import HostSemaphore
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
_FENCE = re.compile(r"```python(.*?)```", re.DOTALL)
_BEFORE = b"_ = "
_AFTER = b"\nif _ is not None:\n    print(_)\n"
_RULES = {
    "queue_s": Reduce.MEAN,
    "run_s": Reduce.MEAN,
    "waiting_max": Reduce.MAX,
    "timeouts": Reduce.SUM,
    "errors": Reduce.SUM,
    "retries": Reduce.SUM,
    "warm": Reduce.MEAN,
}
"""The metrics of a call, below the tool's name."""


class Backend(enum.StrEnum):
    """Where programs run."""

    SANDBOX_FUSION = "sandbox_fusion"
    """On a server with SandboxFusion's API: that, or `python -m treadle.tools.sandbox`."""
    LOCAL = "local"
    """Isolated with bubblewrap, started by this process."""
    RESTRICTED = "restricted"
    """In Monty, a restricted interpreter: small arithmetic, no libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeInterpreterSettings:
    """The settings in a catalogue's `config`; see the module. The defaults are verl's."""

    backend: Backend = Backend.SANDBOX_FUSION
    sandbox_fusion_url: str = ""
    num_workers: int = 10
    rate_limit: int = 10
    enable_global_rate_limit: bool = True
    default_timeout: float = 30.0
    default_language: str = "python"
    memory_limit_mb: int = 1024

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Checks a catalogue's `config`.

        Raises:
            SetupError: A key is unknown, or a value has the wrong type or range.
        """
        kinds = {field.name: type(getattr(cls(), field.name)) for field in fields(cls)}
        for key in config:
            if key not in kinds:
                raise SetupError(
                    f"unknown setting {key!r} of code_interpreter{did_you_mean(key, kinds)}; "
                    f"known are: {', '.join(kinds)}"
                )
        values = {key: _checked(key, value, kinds[key]) for key, value in config.items()}
        settings = cls(**values)  # type: ignore[arg-type]  # checked just now
        if settings.backend is Backend.SANDBOX_FUSION and not settings.sandbox_fusion_url:
            raise SetupError(
                "sandbox_fusion_url is not set: start a sandbox (python -m "
                "treadle.tools.sandbox) and give its address, such as "
                "http://127.0.0.1:8080/run_code; or set backend to local or restricted"
            )
        if settings.backend is not Backend.SANDBOX_FUSION and settings.sandbox_fusion_url:
            raise SetupError(
                f"sandbox_fusion_url has no meaning with the backend {settings.backend}; "
                "remove one of the two"
            )
        return settings


def _checked(key: str, value: object, kind: type) -> object:
    if kind is Backend:
        if value not in list(Backend):
            raise SetupError(f"backend is {value!r}; it must be one of {', '.join(Backend)}")
        return Backend(str(value))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise SetupError(f"{key} must be of type {kind.__name__}, got {value!r}")
    if isinstance(value, int | float) and kind is not bool and not 0 < value < float("inf"):
        raise SetupError(f"{key} is {value!r}; it must be above 0")
    return value


class CodeInterpreterTool:
    """verl's `SandboxFusionTool`, with a choice of sandboxes.

    Args:
        spec: Description for the model; None: `SPEC`. The call takes `code`, and `timeout`
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
        make_sandbox(self._settings)  # a missing library is an error now, not at the first call

    async def open(self, task: AgentTask) -> CodeInterpreterSession:
        """Enters the sandbox, unless another session has.

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
        """Ends one session; the last one leaves the sandbox."""
        shared.users -= 1
        if shared.users == 0:
            if self._shared is shared:
                self._shared = None
            await shared.leave()

    async def run(self, shared: _Shared, arguments: Mapping[str, object]) -> ToolResult:
        """Runs one call in the sandbox of its session.

        Raises:
            ToolFailure: The arguments are wrong.
            SandboxError: The sandbox failed.
        """
        program = self._program(arguments)
        arrived = time.monotonic()
        shared.waiting += 1
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(shared.slots)
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
        """Returns the program in what the model gave as `code`; here, all of it."""
        return code

    def text(self, execution: Execution, program: Program) -> str:
        """Returns what the model reads: stdout, then stderr (as verl), a note on a timeout."""
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
        values = {
            "queue_s": queue_s,
            "run_s": execution.execution_s,
            "waiting_max": float(others),
            "timeouts": float(timed_out),
            "errors": float(execution.return_code not in (0, None)),
            "retries": float(execution.num_retries),
            "warm": float(execution.warm),
        }
        named = {f"{self.spec.name}/{name}": value for name, value in values.items()}
        return tuple(Metric(name, named[name], rule) for name, rule in self.metric_rules.items())

    @property
    def metric_rules(self) -> Mapping[str, Reduce]:
        """See `treadle.agent_loop.ReportsMetrics`."""
        return {f"{self.spec.name}/{name}": rule for name, rule in _RULES.items()}


class RetoolCodeInterpreterTool(CodeInterpreterTool):
    """`CustomSandboxFusionTool` of verl's ReTool recipe.

    The program is changed in one case only: its last statement is an expression other than a call
    of `print`. Its value is then kept as `_` and printed unless it is None, as an interactive
    interpreter does; every line stays where it is, so that a traceback fits. verl's tool wraps the
    last *line* instead, which breaks on assignments, comments, indented lines and calls over
    several lines. Code that does not parse goes to the sandbox unchanged, and its interpreter
    reports the error. Nothing is evaluated here.

        x = 2          ->    x = 2
        x + 1                _ = x + 1
                             if _ is not None:
                                 print(_)
    """

    def source(self, code: str) -> str:
        """Returns the ```` ```python ```` block, or all of it, with its last expression printed."""
        return print_last_expression(first_python_block(code))


class CodeInterpreterSession:
    """One trajectory's use of the sandbox. Its programs share nothing."""

    def __init__(self, tool: CodeInterpreterTool, shared: _Shared) -> None:
        self._tool = tool
        self._shared = shared

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Runs `arguments["code"]`.

        Raises:
            ToolFailure: The arguments are wrong.
            SandboxError: The sandbox failed.
        """
        return await self._tool.run(self._shared, arguments)

    async def aclose(self) -> None:
        """Ends the use of the sandbox."""
        await self._tool.leave(self._shared)


class _Shared:
    """The state that all open sessions of one event loop share."""

    def __init__(self, tool: str, settings: CodeInterpreterSettings) -> None:
        self.users = self.waiting = 0
        self.slots = asyncio.Semaphore(settings.num_workers)
        self.limit: HostSemaphore | None = None
        if settings.enable_global_rate_limit:
            # By name and address: two tools with separate limits do not share one.
            name = f"{tool}\n{settings.backend}\n{settings.sandbox_fusion_url}"
            self.limit = HostSemaphore(name, settings.rate_limit)
        self.sandbox = make_sandbox(settings)
        self._entering = asyncio.Lock()
        self._stack: AsyncExitStack | None = None

    async def enter(self) -> None:
        """Enters the sandbox once; later callers wait for the first."""
        async with self._entering:
            if self._stack is None:
                async with AsyncExitStack() as stack:
                    if self.limit is not None:
                        await stack.enter_async_context(self.limit)
                    await stack.enter_async_context(self.sandbox)
                    self._stack = stack.pop_all()

    async def leave(self) -> None:
        """Leaves it, if it was entered."""
        if self._stack is not None:
            await self._stack.aclose()


def make_sandbox(settings: CodeInterpreterSettings) -> Sandbox:
    """Returns the sandbox that settings name, not entered.

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
            from treadle.tools.sandbox.isolation.bubblewrap import find_bubblewraps
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


def _text(arguments: Mapping[str, object], name: str) -> str:
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolFailure(f"The argument {name!r} must be a string, not {value!r:.80}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ToolFailure(f"The argument {name!r} is not valid Unicode: {error}.") from None
    return value


def first_python_block(text: str) -> str:
    """Returns the content of the first ```` ```python ```` block, stripped, else the text."""
    found = _FENCE.search(text)
    return found.group(1).strip() if found else text


def print_last_expression(code: str) -> str:
    """Returns the code, with its last statement's value printed if it is an expression.

    Code that cannot be parsed is returned as it is; nothing is raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sandbox's interpreter says them to the model
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr) or _prints(last.value):
        return code
    lines = code.encode().splitlines(keepends=True)  # columns count bytes
    line = lines[last.lineno - 1]
    lines[last.lineno - 1] = line[: last.col_offset] + _BEFORE + line[last.col_offset :]
    return (b"".join(lines) + _AFTER).decode()


def _prints(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "print"
    )
