from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from treadle.agent_loop import Finding
from treadle.trainer.report.testing import make_trajectory
from treadle.trainer.training_loop.context import Run
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError


@dataclass
class _Replicas:
    """Servers by name; the dead ones come back when they are revived."""

    names: list[str]
    dead: list[str] = field(default_factory=list)
    dying: Sequence[str] = ()

    @property
    def live(self) -> list[Any]:
        return [SimpleNamespace(name=n, client=SimpleNamespace(name=n)) for n in self.names]

    @property
    def clients(self) -> list[Any]:
        return [replica.client for replica in self.live]

    async def look(self, **options: bool) -> None:
        for name in [name for name in self.names if name in self.dying]:
            await self.drop(name, "ended")
            self.dead.append(name.removesuffix("-"))

    async def revive(self) -> list[str]:
        revived, self.dead = self.dead, []
        self.names += revived
        return revived

    async def drop(self, name: str, cause: str) -> None:
        self.names.remove(name)


@dataclass
class _Publisher:
    """Servers whose name has a minus take nothing."""

    published: list[tuple[int, list[str]]] = field(default_factory=list)
    outcome: Outcome = Outcome.REPLACE
    before: Callable[[], None] = lambda: None

    async def publish(self, version: int, servers: Sequence[Any]) -> Any:
        self.before()
        names = [server.name for server in servers]
        self.published.append((version, names))
        failed: Mapping[str, str] = {name: "refused" for name in names if "-" in name}
        if len(failed) == len(names):
            raise WeightSyncError("no server took it", self.outcome)
        return SimpleNamespace(failed=failed, num_bytes=10, sent_bytes=5)


def _run(replicas: _Replicas, publisher: _Publisher) -> Run:
    progress: Any = SimpleNamespace(note=lambda _: None, phase=_phase)
    parts: Any = dict.fromkeys(Run.__dataclass_fields__)
    parts |= {"replicas": replicas, "publisher": publisher, "progress": progress, "version": 3}
    return Run(**parts)


class _phase:
    def __init__(self, _: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exc_info: object) -> None: ...


@pytest.mark.asyncio
async def test_a_server_that_came_back_is_given_the_new_version_with_the_others() -> None:
    replicas, publisher = _Replicas(["a"], dead=["b"]), _Publisher()
    run = _run(replicas, publisher)
    assert (await run.publish(4))["sync/delta_ratio"] == 0.5
    assert publisher.published == [(4, ["a", "b"])]
    assert run.version == 4


@pytest.mark.asyncio
async def test_a_server_that_does_not_take_the_version_leaves_the_rotation() -> None:
    replicas = _Replicas(["a", "b-"])
    await _run(replicas, _Publisher()).publish(4)
    assert replicas.names == ["a"]


@pytest.mark.asyncio
async def test_a_server_that_dies_in_the_update_is_started_again_if_it_is_the_last() -> None:
    replicas, publisher = _Replicas(["a-"]), _Publisher()
    publisher.before = lambda: setattr(replicas, "dying", ["a-"])
    await _run(replicas, publisher).publish(4)
    assert publisher.published == [(4, ["a-"]), (4, ["a"])]


@pytest.mark.asyncio
async def test_servers_that_take_nothing_and_live_end_the_run() -> None:
    with pytest.raises(WeightSyncError):
        await _run(_Replicas(["a-", "b-"]), _Publisher()).publish(4)


@pytest.mark.asyncio
async def test_a_revived_server_that_takes_no_weights_ends_the_run_only_if_it_is_alone() -> None:
    replicas = _Replicas(["a", "b-"])
    await _run(replicas, _Publisher()).republish(["b-"])
    assert replicas.names == ["a"]
    with pytest.raises(WeightSyncError):
        await _run(_Replicas(["b-"]), _Publisher()).republish(["b-"])
    with pytest.raises(WeightSyncError):  # trainer and servers do not fit: nothing helps
        await _run(_Replicas(["a", "b-"]), _Publisher(outcome=Outcome.FATAL)).republish(["b-"])


def test_the_first_finding_of_each_kind_is_shown_once_in_a_run() -> None:
    notes: list[str] = []
    run = _run(_Replicas([]), _Publisher())
    run.noted = set()
    run.progress = cast(Any, SimpleNamespace(note=notes.append))
    stalled = Finding(kind="stalled", text="nothing for 120 s")
    drift = Finding(kind="drift", text="turn 1")
    for step in (1, 2):
        one = replace(make_trajectory(), findings=(stalled, stalled))
        run._note_findings(step, [one, replace(one, findings=(drift, stalled))])
    assert notes == [
        "step 1: first stalled of the run, in train/0, rollout 0: nothing for 120 s",
        "step 1: first drift of the run, in train/0, rollout 0: turn 1",
    ]
