"""Tests of the loop registry."""

import asyncio
import importlib
import logging
import sys
from pathlib import Path

import pytest

from treadle.agent_loop import (
    AgentTask,
    LoopRegistry,
    Services,
    SetupError,
    SingleTurnLoop,
    ToolAgentLoop,
    Trajectory,
    UnknownLoopError,
    default_loops,
)
from treadle.agent_loop.proxy import AgentConstraints, ProxyAgentLoop


class OpenedLoop:
    """A loop with servers of its own, of which it only keeps the log."""

    def __init__(self, name: str, log: list[str], *, breaks: str = "") -> None:
        self._name = name
        self._log = log
        self._breaks = breaks

    async def __aenter__(self) -> "OpenedLoop":
        if self._breaks == "open":
            raise ConnectionError("no server")
        self._log.append(f"open {self._name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._log.append(f"close {self._name} {kind.__name__ if kind else 'well'}")
        if self._breaks == "close":
            raise ConnectionError("it is gone")

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        raise NotImplementedError


async def _open(loops: LoopRegistry, names: list[str], log: list[str]) -> None:
    async with loops.opened(names):
        log.append("run")


def test_loops_are_opened_once_and_closed_in_reverse_order() -> None:
    log: list[str] = []
    one = OpenedLoop("one", log)
    loops = default_loops().adding("a", one).adding("b", OpenedLoop("two", log)).adding("c", one)
    asyncio.run(_open(loops.adding("d", OpenedLoop("unused", log)), [*"cbab", "tool_agent"], log))
    assert log == ["open one", "open two", "run", "close two well", "close one well"]


def test_loops_are_closed_after_an_error_and_a_cancellation() -> None:
    log: list[str] = []
    loops = LoopRegistry({"a": OpenedLoop("one", log)})

    async def fail(error: BaseException) -> None:
        async with loops.opened("a"):
            raise error

    for error in (KeyError(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            asyncio.run(fail(error))
    assert log[1::2] == ["close one KeyError", "close one CancelledError"]


def test_a_loop_that_does_not_open_is_said_and_the_others_are_closed() -> None:
    log: list[str] = []
    loops = LoopRegistry({"a": OpenedLoop("one", log), "b": OpenedLoop("two", log, breaks="open")})
    with pytest.raises(SetupError, match="agent loop 'b' does not open: ConnectionError: no serv"):
        asyncio.run(_open(loops, ["a", "b"], log))
    assert log == ["open one", "close one SetupError"]


def test_a_loop_that_does_not_close_is_logged_and_the_run_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    loops = LoopRegistry({"a": OpenedLoop("one", log), "b": OpenedLoop("two", log, breaks="close")})
    with caplog.at_level(logging.WARNING):
        asyncio.run(_open(loops, ["a", "b"], log))
    assert log[-2:] == ["close two well", "close one well"]
    assert "agent loop 'b' did not close" in caplog.text


def test_loops_are_found_by_name() -> None:
    loops = default_loops()
    assert loops.names == ("single_turn_agent", "tool_agent")
    assert isinstance(loops.resolve("tool_agent"), ToolAgentLoop)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownLoopError, match=r"'tool' is not registered.*single_turn_agent, tool_"
    ):
        default_loops().resolve("tool")


def test_a_loop_can_be_named_in_full_and_is_made_once() -> None:
    loops = LoopRegistry({})
    name = "treadle.agent_loop.loops.single_turn:SingleTurnLoop"
    assert isinstance(loops.resolve(name), SingleTurnLoop)
    assert loops.resolve(name) is loops.resolve(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "no.such.module:Loop",
            "no such module is installed; code of your own is",
        ),
        (
            "treadle.agent_loop.loops.single_turn:Nope",
            "single_turn has no 'Nope'; it has: ",
        ),
        ("treadle.agent_loop.types:Message", "cannot be made without arguments"),
        ("treadle.agent_loop.types:StopReason.X", "has no 'StopReason.X'"),
        ("treadle.agent_loop:derive_seed", "no method run"),
    ],
)
def test_what_is_wrong_with_a_full_name_is_said(name: str, problem: str) -> None:
    with pytest.raises(UnknownLoopError, match=problem):
        LoopRegistry({}).resolve(name)


def test_a_loop_can_be_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my_loops.py"
    file.write_text("class Mine:\n    async def run(self, task, services): ...\n")
    loops = default_loops().adding("mine", f"{file}:Mine")
    assert type(loops.resolve("mine")).__name__ == "Mine"
    assert isinstance(loops.resolve(f"{file}:Mine"), type(loops.resolve("mine")))
    with pytest.raises(UnknownLoopError, match=r"my_loops\.py has no 'Mime'; it has: Mine"):
        loops.resolve(f"{file}:Mime")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(SetupError, match="'tool_agent' is already registered"):
        default_loops().adding("tool_agent", SingleTurnLoop())


def test_a_name_can_stand_for_a_class_that_is_made_once() -> None:
    loops = default_loops().adding("mine", "treadle.agent_loop.loops.single_turn:SingleTurnLoop")
    assert loops.names == ("mine", "single_turn_agent", "tool_agent")
    assert isinstance(loops.resolve("mine"), SingleTurnLoop)
    assert loops.resolve("mine") is loops.resolve("mine")
    with pytest.raises(SetupError, match=r"'yours' is 'yours\.Loop'; it must be \"path.py:Class\""):
        loops.adding("yours", "yours.Loop")
    broken = loops.adding("broken", "no.such.module:Loop")
    with pytest.raises(UnknownLoopError, match="no such module is installed"):
        broken.resolve("broken")


def install(site: Path, package: str, **loops: str) -> None:
    """Writes the metadata that an installed package would have."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    points = "".join(f"{name} = {value}\n" for name, value in loops.items())
    (info / "entry_points.txt").write_text(f"[treadle.agent_loops]\n{points}")


def test_whatever_a_users_module_raises_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_syntax.py").write_text("class Loop:\n  def run(self:\n")
    (tmp_path / "broken_import.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "broken_init.py").write_text(
        "class Loop:\n  def __init__(self):\n    raise KeyError('HOST')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, problem in (
        ("broken_syntax", r"from broken_syntax: SyntaxError: .*broken_syntax\.py"),
        ("broken_import", "from broken_import: RuntimeError: no licence"),
        ("broken_init", "'broken_init:Loop' cannot be made without arguments: KeyError: 'HOST'"),
    ):
        with pytest.raises(UnknownLoopError, match=problem):
            LoopRegistry({}).resolve(f"{name}:Loop")


def test_a_loop_may_stand_inside_of_a_class_and_need_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are forms that the metadata of packages allow."""
    (tmp_path / "nested_loops.py").write_text(
        "from treadle.agent_loop import SingleTurnLoop\nclass Outer:\n  Loop = SingleTurnLoop\n"
    )
    install(tmp_path, "nesting", nested="nested_loops:Outer.Loop [fast,slow]")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert isinstance(default_loops().resolve("nested"), SingleTurnLoop)


def test_installed_packages_offer_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offered_loops.py").write_text(
        "from treadle.agent_loop import SingleTurnLoop\nclass Offered(SingleTurnLoop): ...\n"
    )
    install(tmp_path, "offering", offered="offered_loops:Offered")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    loops = default_loops()
    assert "offered" in loops.names
    assert "offered_loops" not in sys.modules
    assert type(loops.resolve("offered")).__name__ == "Offered"
    install(tmp_path, "greedy", tool_agent="offered_loops:Offered")
    importlib.invalidate_caches()
    with pytest.raises(
        SetupError, match=r"greedy offers an agent loop: .*'tool_agent' is already reg"
    ):
        default_loops()


def test_a_run_needs_what_its_loops_need() -> None:
    enforcing = ProxyAgentLoop(["true"], constraints=AgentConstraints.ENFORCE)
    loops = default_loops().adding("free", ProxyAgentLoop(["true"])).adding("e", enforcing)
    assert loops.required_capabilities(["free", "tool_agent"]) == frozenset()
    assert loops.required_capabilities(["free", "e"]) == {"constrained_sampling"}
