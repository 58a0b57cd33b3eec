"""The server pool, with processes that start and die when a test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle.agent_loop import SetupError
from treadle.agent_loop.rpc import ChannelSecurity, Requirements
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.rollout.v1.server_service_pb2 import SERVER_STATE_FAILED, SERVER_STATE_SERVING
from treadle.trainer.config.load import load_config
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig
from treadle.trainer.launch.local import LocalLauncher, describe_exit
from treadle.trainer.launch.process import (
    Launcher,
    LostProcessError,
    Process,
    ProcessError,
    ProcessSpec,
)
from treadle.trainer.rollout.rotation import PooledServer, Routes
from treadle.trainer.rollout.server_pool import (
    NoServerLeftError,
    ServerPool,
    required_capabilities,
)


@dataclass
class _Process:
    name: str
    port: int
    may_serve: asyncio.Event
    fails: bool
    status: "asyncio.Future[int]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    stopped: bool = False
    node: str = "n"

    async def ready(self, deadline_s: float) -> str:
        await self.may_serve.wait()
        if self.fails:
            raise ProcessError(f"{self.name} has no engine")
        return f"127.0.0.1:{self.port}"  # where nobody answers, which is not to be dead

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    def describe_end(self, status: int) -> str:
        return describe_exit(status)

    async def log_tail(self, lines: int = 20) -> str:
        return "its last words"

    async def stop(self, grace_s: float = 10.0) -> None:
        self.stopped = True


@dataclass
class _Launcher:
    may_serve: asyncio.Event = field(default_factory=asyncio.Event)
    processes: dict[str, _Process] = field(default_factory=dict)
    fail: bool = False
    tls: None = None

    async def start(self, spec: ProcessSpec) -> _Process:
        process = _Process(spec.name, 1 + len(self.processes), self.may_serve, self.fail)
        self.processes[spec.name] = process
        return process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


@dataclass
class _Publisher:
    """Servers in `refusing` take no weights."""

    refusing: Sequence[str] = ()
    outcome: Outcome = Outcome.REPLACE
    published: list[tuple[int, list[str]]] = field(default_factory=list)
    before: Callable[[], None] = lambda: None

    async def publish(self, version: int, servers: Sequence[Any]) -> Any:
        self.before()
        names = [server.name for server in servers]
        self.published.append((version, names))
        failed: Mapping[str, str] = {name: "refused" for name in names if name in self.refusing}
        if len(failed) == len(names):
            raise WeightSyncError("no server took it", self.outcome)
        return SimpleNamespace(failed=failed)


SILENT, FAILED = "gives no answer", "its engine failed"


class _Client(WeightSyncClient):
    """Of a server that answers as a test says; at first, that it serves."""

    def __init__(self, states: list[str], name: str, address: str) -> None:
        super().__init__(name, address, control_deadline_s=1, commit_deadline_s=1)
        self._states = states
        self.versions: dict[str, int | WeightSyncError] = {}

    async def info(self) -> Any:
        state = self._states.pop(0) if self._states else None
        version = self.versions.get(self.address, 0)
        if state == SILENT:
            raise WeightSyncError(SILENT, Outcome.RESUME)
        if isinstance(version, WeightSyncError):
            raise version
        serves = SERVER_STATE_FAILED if state == FAILED else SERVER_STATE_SERVING
        return SimpleNamespace(weight_version=version, state=serves)


class _Pool(ServerPool):
    _EXIT_GRACE_S = 0.01
    _ASK_AGAIN_S = 0.001

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states: dict[str, list[str]] = {}
        self.begun = asyncio.Event()
        self.versions: dict[str, int | WeightSyncError] = {}  # of servers of someone else

    async def _start(self, name: str, after: Process | None = None) -> PooledServer:
        self.begun.set()
        return await super()._start(name, after)

    async def until_reached(self) -> None:
        """Returns when the servers that start, or are added, have answered."""
        await self.begun.wait()
        await asyncio.wait(self._starting.values())

    @property
    def _security(self) -> ChannelSecurity:
        return ChannelSecurity()

    def _open_client(self, name: str, address: str) -> WeightSyncClient:
        client = _Client(self.states.setdefault(address, []), name, address)
        client.versions = self.versions
        return client

    async def die(self, name: str, status: int = -9) -> None:
        """Ends the process of a server; nobody has noticed yet."""
        server = self._rotation[name]
        process: Any = server.process
        process.status.set_result(status)
        await server.ended

    @property
    def names(self) -> list[str]:
        return [server.name for server in self.live]


def _pool(launcher: Launcher, publisher: _Publisher | None = None, **rollout: Any) -> _Pool:
    config = Config(
        data=DataConfig(train_files=(Path("t.jsonl"),)),
        model=ModelConfig(path=Path("/m")),
        rollout=RolloutConfig.model_validate(
            {**({} if "addresses" in rollout else {"num_replicas": 2}), **rollout}
        ),
    )
    if isinstance(launcher, _Launcher):
        launcher.may_serve.set()
    publish = (publisher or _Publisher()).publish
    return _Pool(launcher, config, publish=publish, weights_directory=Path("/w"))


@pytest.mark.asyncio
async def test_the_others_go_on_while_a_server_starts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher = _Launcher()
    async with _pool(launcher) as pool:
        await pool.die("rollout-0")
        launcher.may_serve.clear()
        assert await pool.check_health()
        assert "was ended by SIGKILL" in caplog.text
        assert await pool.restart() == []
        assert pool.names == ["rollout-1"]
        launcher.may_serve.set()
        await asyncio.wait(pool._starting.values())
        assert await pool.restart() == ["rollout-0"]
        assert pool.names == ["rollout-0", "rollout-1"]
        metrics = {
            "servers/live": 2.0,
            "servers/draining": 0.0,
            "servers/lost": 1.0,
            "servers/restarted": 1.0,
        }
        assert pool.take_metrics() == metrics
        assert pool.take_metrics()["servers/lost"] == 0
    assert launcher.processes["rollout-0-restart-1"].stopped


@pytest.mark.asyncio
async def test_a_server_starts_again_though_nobody_calls_the_pool(generator: "_Generator") -> None:
    publisher, launcher = _Publisher(), _Launcher()
    async with _pool(launcher, publisher) as pool:
        await pool.connect(Requirements())
        await pool.sync_weights(1)
        pool.begun.clear()
        await pool.die("rollout-0")  # the policy trains
        assert set(pool.dead) == {"rollout-0"}
        await pool.until_reached()
        assert launcher.processes["rollout-0"].stopped  # with what it had started
        assert "rollout-0-restart-1" in launcher.processes
        # It is let in by the next call, with the weights, and the death is counted once.
        assert generator.addresses == ["127.0.0.1:1", "127.0.0.1:2"]
        assert await pool.ensure_healthy()
        assert generator.addresses == ["127.0.0.1:2", "127.0.0.1:3"]
        assert publisher.published[1:] == [(1, ["rollout-0"])]
        assert not pool.dead
        metrics = pool.take_metrics()
        assert (metrics["servers/lost"], metrics["servers/restarted"]) == (1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", ["release_memory", "drained", "no restart left"])
async def test_a_server_that_may_not_start_beside_training_does_not(
    case: str, generator: "_Generator"
) -> None:
    launcher = _Launcher()
    rollout: dict[str, Any] = {
        "release_memory": case == "release_memory",
        "max_restarts": 0 if case == "no restart left" else 1,
    }
    async with _pool(launcher, **rollout) as pool:
        await pool.connect(Requirements())
        if case == "drained":
            pool.drain("rollout-0")
        await pool.die("rollout-0")
        assert not pool._starting
        await pool.ensure_healthy()
        assert ("rollout-0-restart-1" in launcher.processes) == (case == "release_memory")


@pytest.mark.asyncio
async def test_a_server_that_ends_while_the_pool_closes_is_not_started_again() -> None:
    launcher = _Launcher()
    async with _pool(launcher) as pool:
        pool._connection.callback(launcher.processes["rollout-0"].status.set_result, -9)
    await asyncio.sleep(0)
    assert list(launcher.processes) == ["rollout-0", "rollout-1"]


@pytest.mark.asyncio
@pytest.mark.parametrize("rollout", [{"num_replicas": 1}, {"release_memory": True}])
async def test_a_run_that_cannot_go_on_waits_for_the_start(rollout: dict[str, Any]) -> None:
    async with _pool(_Launcher(), **rollout) as pool:
        before = pool.names
        await pool.die("rollout-0", status=1)
        await pool.check_health()
        assert await pool.restart() == ["rollout-0"]
        assert pool.names == before


@pytest.mark.asyncio
async def test_a_server_that_loses_its_engine_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    async with _pool(_Launcher()) as pool:
        pool.states["127.0.0.1:2"].append(FAILED)
        assert await pool.check_health()
        assert pool.names == ["rollout-0"]
    assert "rollout-1 (127.0.0.1:2) lost its engine" in caplog.text


@pytest.mark.asyncio
async def test_the_only_server_is_waited_for_when_it_stands_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _pool(_Launcher(), num_replicas=1) as pool:
        pool.states["127.0.0.1:1"] += [SILENT] * 3
        # What failed meanwhile is worth another attempt.
        assert await pool.ensure_healthy()
        assert pool.names == ["rollout-0"]
        assert not await pool.ensure_healthy()
    assert "no rollout server answers; waiting up to 60 s" in caplog.text
    assert "a rollout server answers again" in caplog.text


@pytest.mark.asyncio
async def test_a_server_that_never_answers_is_dead_and_starts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher = _Launcher()
    async with _pool(launcher, num_replicas=1, unresponsive_s=0.01) as pool:
        pool.states["127.0.0.1:1"] += [SILENT] * 1000
        assert await pool.ensure_healthy()
        assert launcher.processes["rollout-0"].stopped
        assert [server.address for server in pool.live] == ["127.0.0.1:2"]
    assert "rollout-0 (127.0.0.1:1) gave no answer for 0.01 s" in caplog.text


@pytest.mark.asyncio
async def test_nobody_is_waited_for_while_another_server_answers() -> None:
    async with _pool(_Launcher(), unresponsive_s=1000) as pool:
        pool.states["127.0.0.1:1"] += [SILENT] * 1000
        assert not await pool.ensure_healthy()
        assert pool.names == ["rollout-0", "rollout-1"]


@pytest.mark.asyncio
async def test_weights_are_published_again_to_a_server_that_was_waited_for() -> None:
    publisher = _Publisher(refusing=("rollout-0",))
    async with _pool(_Launcher(), publisher, num_replicas=1) as pool:

        def freeze() -> None:
            if len(publisher.published) == 0:
                pool.states["127.0.0.1:1"] += [SILENT] * 2
            else:
                publisher.refusing = ()

        publisher.before = freeze
        await pool.sync_weights(1)
        assert publisher.published == [(1, ["rollout-0"])] * 2


@pytest.mark.asyncio
async def test_a_server_that_does_not_start_is_tried_until_no_restart_is_left() -> None:
    launcher = _Launcher()
    async with _pool(launcher, num_replicas=1, max_restarts=2) as pool:
        launcher.fail = True
        await pool.die("rollout-0", status=1)
        await pool.check_health()
        with pytest.raises(NoServerLeftError, match=r"(?s)after 2 restarts .*has no engine"):
            await pool.restart()
        assert launcher.processes["rollout-0-restart-2"].stopped


# Serves, as far as a launcher knows.
_SERVE = """
echo '{"address": "127.0.0.1:1"}' > "$ready.partial" && mv "$ready.partial" "$ready"
exec sleep 1000
"""


def _server(first: str) -> list[str]:
    """Returns the command of a server that does something first; `$ready` is its ready file."""
    return ["sh", "-c", f"for ready; do :; done\n{first}\n{_SERVE}", "server"]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["kill -KILL $$", "exit 137"])
async def test_a_server_that_is_killed_while_it_first_starts_is_started_again(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = _server(f'case "$ready" in */rollout-1.ready) {how};; esac')
    async with (
        LocalLauncher(tmp_path) as launcher,
        _pool(launcher, server_command=command, max_restarts=1) as pool,
    ):
        assert pool.names == ["rollout-0", "rollout-1"]
        metrics = pool.take_metrics()
        assert (metrics["servers/lost"], metrics["servers/restarted"]) == (1, 1)
        # Later deaths are counted with it.
        await pool.remove("rollout-0", "it did not answer")
        assert await pool.restart() == []
    (lost,) = [text for text in caplog.messages if "SIGKILL on node" in text]
    assert lost.startswith("rollout server lost: rollout-1 ")
    assert "started again: rollout-1" in caplog.messages
    assert _logs(tmp_path) == ["rollout-0", "rollout-1", "rollout-1-restart-1"]


def _logs(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.log"))


@pytest.mark.asyncio
async def test_a_server_that_is_always_killed_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    killed = _server("kill -KILL $$")
    async with LocalLauncher(tmp_path) as launcher:
        lost = r"after 2 restarts \(rollout.max_restarts=2\), rollout-0-restart-2 was ended by SIG"
        with pytest.raises(LostProcessError, match=lost):
            await _pool(
                launcher, server_command=killed, num_replicas=1, max_restarts=2
            ).__aenter__()


@pytest.mark.asyncio
async def test_a_server_that_refuses_its_settings_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the kernel does to programs beside the test is not seen.
    monkeypatch.setattr("treadle.trainer.launch.local._VMSTAT", tmp_path / "no kernel says so")
    refuses = _server("echo no such model >&2; exit 1")
    async with LocalLauncher(tmp_path) as launcher:
        refused = "(?s)rollout-0 exited with status 1 on node .*no such model"
        with pytest.raises(ProcessError, match=refused) as error:
            await _pool(launcher, server_command=refuses, num_replicas=1).__aenter__()
    assert not isinstance(error.value, LostProcessError)
    assert _logs(tmp_path) == ["rollout-0"]


@pytest.mark.asyncio
async def test_a_start_under_way_ends_with_the_pool() -> None:
    launcher = _Launcher()
    async with _pool(launcher) as pool:
        await pool.die("rollout-0", status=1)
        launcher.may_serve.clear()
        await pool.check_health()
        assert await pool.restart() == []
        (start,) = pool._starting.values()
    assert start.cancelled()


@pytest.mark.asyncio
async def test_the_end_of_the_last_server_is_an_event() -> None:
    async with _pool(_Launcher()) as pool:
        waiting = asyncio.create_task(pool.wait_until_all_ended())
        await pool.die("rollout-0")
        assert not waiting.done()
        await pool.die("rollout-1")
        await waiting


@pytest.mark.asyncio
async def test_a_server_that_came_back_is_given_the_new_version_with_the_others() -> None:
    publisher = _Publisher()
    async with _pool(_Launcher(), publisher, release_memory=True) as pool:
        await pool.die("rollout-1")
        await pool.sync_weights(4)
        assert publisher.published == [(4, ["rollout-0", "rollout-1"])]
        assert pool.weight_version == 4


@pytest.mark.asyncio
async def test_a_server_that_does_not_take_the_version_leaves_the_rotation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _pool(_Launcher(), _Publisher(refusing=["rollout-1"])) as pool:
        await pool.sync_weights(4)
        assert pool.names == ["rollout-0"]
    assert (
        "rollout server lost: refused; its log on node n ends with:\nits last words" in caplog.text
    )


@pytest.mark.asyncio
async def test_servers_that_die_in_the_update_are_started_again_if_none_is_left() -> None:
    publisher, launcher = _Publisher(refusing=["rollout-0"]), _Launcher()
    publisher.before = lambda: launcher.processes["rollout-0"].status.set_result(-9)
    prepared: list[list[str]] = []

    async def prepare() -> None:
        prepared.append(pool.names)
        if "rollout-0-restart-1" in launcher.processes:
            publisher.refusing, publisher.before = (), lambda: None

    async with _pool(launcher, publisher, num_replicas=1) as pool:
        await pool.sync_weights(4, prepare=prepare)
        assert publisher.published == [(4, ["rollout-0"])] * 2
        assert prepared == [["rollout-0"]] * 2
        assert pool.take_metrics()["servers/restarted"] == 1


@pytest.mark.asyncio
async def test_servers_that_die_before_they_have_the_weights_are_started_again() -> None:
    publisher, launcher = _Publisher(), _Launcher()
    async with _pool(launcher, publisher, num_replicas=1) as pool:
        await pool.sync_weights(3)
        await pool.die("rollout-0")

        def die_once() -> None:
            publisher.before, publisher.refusing = take_it, ["rollout-0"]
            launcher.processes["rollout-0-restart-1"].status.set_result(-9)

        def take_it() -> None:
            publisher.refusing = ()

        publisher.before = die_once
        assert await pool.ensure_healthy()
        assert pool.names == ["rollout-0"]
        assert [*launcher.processes][1:] == ["rollout-0-restart-1", "rollout-0-restart-2"]
        assert publisher.published == [(3, ["rollout-0"])] * 3
        publisher.before, publisher.refusing = lambda: None, ["rollout-0"]
        await pool.die("rollout-0")
        with pytest.raises(WeightSyncError):  # it lives, and does not take them
            await pool.ensure_healthy()


@pytest.mark.asyncio
async def test_servers_that_take_nothing_and_live_end_the_run() -> None:
    publisher = _Publisher(refusing=["rollout-0", "rollout-1"])
    async with _pool(_Launcher(), publisher) as pool:
        with pytest.raises(WeightSyncError):
            await pool.sync_weights(4)


@pytest.mark.asyncio
async def test_a_restarted_server_that_takes_no_weights_ends_the_run_only_if_it_is_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = _Publisher()
    async with _pool(_Launcher(), publisher) as pool:
        await pool.resync(["rollout-1"])
        assert publisher.published == []  # version 0 is the model directory's
        await pool.sync_weights(3)
        publisher.refusing = ["rollout-1"]
        await pool.resync(["rollout-1"])
        assert pool.names == ["rollout-0"]
        assert publisher.published[1:] == [(3, ["rollout-1"])]
        assert "no server took it; its log on node n ends with:\nits last words" in caplog.text
        publisher.refusing = ["rollout-0"]
        with pytest.raises(WeightSyncError):
            await pool.resync(["rollout-0"])
    publisher = _Publisher()
    async with _pool(_Launcher(), publisher) as pool:
        await pool.sync_weights(3)
        publisher.refusing, publisher.outcome = ["rollout-1"], Outcome.FATAL
        with pytest.raises(WeightSyncError):  # trainer and servers do not fit: nothing helps
            await pool.resync(["rollout-1"])


@dataclass
class _Generator:
    """Notes what it may route to."""

    addresses: list[str]
    num_connected: int = 0
    before: Callable[[], None] = lambda: None
    fail: Exception | None = None
    never_answers: bool = False
    sessions: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    oldest: int = 0

    def require_weights(self, version: int) -> None:
        self.oldest = version

    async def add_replica(self, address: str) -> None:
        if address in self.addresses:
            return
        if self.never_answers:
            self.asked.set()
            await asyncio.Event().wait()
        if self.fail is not None:
            raise self.fail
        self.addresses.append(address)

    def drain_replica(self, address: str) -> int:
        if address in self.addresses:
            self.addresses.remove(address)
        return self.sessions

    def sessions_at(self, address: str) -> int:
        return self.sessions

    async def remove_replica(self, address: str) -> None:
        if address in self.addresses:
            self.addresses.remove(address)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> _Generator:
    """What `connect` gives."""
    made = _Generator([])

    @contextlib.asynccontextmanager
    async def connect(addresses: Sequence[str], **asked: object) -> AsyncIterator[_Generator]:
        if "policy" not in asked:  # only to see whether a server fits
            yield made
            return
        made.num_connected += 1
        made.before()
        if made.fail is not None:
            raise made.fail
        made.addresses += addresses
        yield made

    for module in ("server_pool", "server_starter"):
        monkeypatch.setattr(f"treadle.trainer.rollout.{module}.connect", connect)
    return made


@pytest.mark.asyncio
async def test_the_generator_is_connected_once_and_follows_the_rotation(
    generator: _Generator,
) -> None:
    publisher = _Publisher()
    async with _pool(_Launcher(), publisher, release_memory=True) as pool:
        await pool.connect(Requirements())
        await pool.sync_weights(1)
        assert generator.addresses == ["127.0.0.1:1", "127.0.0.1:2"]
        await pool.die("rollout-0")
        routed: list[list[str]] = []
        publisher.before = lambda: routed.append(list(generator.addresses))
        assert await pool.ensure_healthy()
        # Nobody routes to the restarted server before it has the present weights.
        assert routed == [["127.0.0.1:2"]]
        assert publisher.published[-1] == (1, ["rollout-0"])
        assert generator.addresses == ["127.0.0.1:2", "127.0.0.1:3"]
        assert not await pool.ensure_healthy()
        await pool.remove("rollout-1", "it did not answer")
        assert generator.addresses == ["127.0.0.1:3"]
    assert generator.num_connected == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("num_replicas", "left"), [(1, ["127.0.0.1:2"]), (2, ["127.0.0.1:2"])])
async def test_a_server_that_dies_before_the_generator_is_connected_is_replaced(
    generator: _Generator, num_replicas: int, left: Sequence[str]
) -> None:
    launcher = _Launcher()
    async with _pool(launcher, num_replicas=num_replicas) as pool:

        def die() -> None:
            if num_replicas > 1:
                launcher.may_serve.clear()
            launcher.processes["rollout-0"].status.set_result(-9)
            generator.fail = SetupError("the rollout server does not answer")
            generator.before = recover

        def recover() -> None:
            generator.fail = None

        generator.before = die
        await pool.connect(Requirements())
        assert generator.addresses == left
        assert generator.num_connected == 2
        if num_replicas > 1:
            launcher.may_serve.set()
            await pool.until_reached()
        await pool.ensure_healthy()
        assert pool.names == [f"rollout-{number}" for number in range(num_replicas)]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("release_memory", [False, True])
async def test_a_start_that_waits_for_servers_gets_those_that_replace_dead_ones(
    generator: _Generator, num_replicas: int, release_memory: bool
) -> None:
    launcher = _Launcher()
    settings: dict[str, Any] = {"num_replicas": num_replicas, "release_memory": release_memory}
    async with _pool(launcher, **settings, max_restarts=4) as pool:
        await pool.connect(Requirements())
        routes: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        pool.on_change(lambda now: routes.put_nowait(now.serving))

        async def start() -> None:
            # The second ones end too, one after the other.
            for name in (*pool.names, *pool.names):
                dead = pool._rotation[name].address
                await pool.die(name)
                while len(serving := await routes.get()) < num_replicas or dead in serving:
                    pass

        await pool.replace_while(start())
        addresses = [f"127.0.0.1:{2 * num_replicas + 1 + n}" for n in range(num_replicas)]
        assert sorted(generator.addresses) == addresses

        async def fail() -> None:
            raise ProcessError("it did not start")

        with pytest.raises(ProcessError, match="it did not start"):
            await pool.replace_while(fail())


@pytest.mark.asyncio
async def test_a_start_ends_with_the_last_server_that_may_start(generator: _Generator) -> None:
    cancelled = asyncio.Event()
    async with _pool(_Launcher(), num_replicas=1, max_restarts=0) as pool:
        await pool.connect(Requirements())

        async def start() -> None:
            await pool.die("rollout-0")
            try:
                await asyncio.Future()
            finally:
                cancelled.set()

        with pytest.raises(NoServerLeftError):
            await pool.replace_while(start())
        assert cancelled.is_set()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("times", "addresses"),
    [(3, ["127.0.0.1:1", "127.0.0.1:2"]), (1000, ["127.0.0.1:2"])],
)
async def test_a_server_that_stands_still_before_it_is_connected_is_waited_for(
    generator: _Generator, times: int, addresses: Sequence[str]
) -> None:
    launcher = _Launcher()
    async with _pool(launcher, unresponsive_s=0.05 if times > 3 else 60.0) as pool:
        pool.states["127.0.0.1:1"] += [SILENT] * times

        def stand_still() -> None:
            launcher.may_serve.clear()  # nobody is started again before the generator is connected
            generator.fail = SetupError("the rollout server refuses the handshake")
            generator.before = answer

        def answer() -> None:
            generator.fail = None

        generator.before = stand_still
        await pool.connect(Requirements())
        assert generator.addresses == addresses
        assert launcher.processes["rollout-0"].stopped == (len(addresses) == 1)


@pytest.mark.asyncio
async def test_a_server_that_lives_and_does_not_fit_is_not_connected(
    generator: _Generator,
) -> None:
    async with _pool(_Launcher()) as pool:
        generator.fail = SetupError("another tokenizer")
        with pytest.raises(SetupError, match="another tokenizer"):
            await pool.connect(Requirements())
    assert generator.num_connected == 1


@pytest.mark.asyncio
async def test_a_restarted_server_that_ends_before_its_handshake_is_restarted_again(
    generator: _Generator,
) -> None:
    launcher = _Launcher()
    async with _pool(launcher, num_replicas=1) as pool:
        await pool.connect(Requirements())
        await pool.die("rollout-0")
        generator.never_answers = True
        joining = asyncio.create_task(pool.ensure_healthy())
        await generator.asked.wait()
        launcher.processes["rollout-0-restart-1"].status.set_result(1)
        assert await joining
        assert generator.addresses == []
        generator.never_answers = False
        assert await pool.ensure_healthy()
        assert generator.addresses == ["127.0.0.1:3"]


@pytest.mark.asyncio
async def test_a_restarted_server_that_lives_and_does_not_fit_ends_the_run(
    generator: _Generator,
) -> None:
    async with _pool(_Launcher(), num_replicas=1) as pool:
        await pool.connect(Requirements())
        await pool.die("rollout-0")
        generator.fail = SetupError("another tokenizer")
        with pytest.raises(SetupError, match="another tokenizer"):
            await pool.ensure_healthy()


ELSEWHERE = "10.0.0.7:8000"


@pytest.mark.asyncio
async def test_a_server_of_someone_else_that_comes_back_gets_the_present_weights_first(
    generator: _Generator, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, launcher = _Publisher(), _Launcher()
    async with _pool(
        launcher, publisher, num_replicas=1, addresses=[ELSEWHERE], token_file="/t"
    ) as pool:
        await pool.connect(Requirements())
        await pool.sync_weights(3)
        assert publisher.published == [(3, ["attached-0", "rollout-0"])]
        pool.versions[ELSEWHERE] = 3
        (server,) = (s for s in pool.live if s.process is None)
        pool.versions[ELSEWHERE] = 0  # it was started again
        await server.ended
        assert generator.addresses == ["127.0.0.1:1"]
        assert await pool.ensure_healthy()
        assert "holds weight version 0, not 3" in caplog.text
        routed: list[list[str]] = []
        publisher.before = lambda: routed.append(list(generator.addresses))
        await asyncio.wait(pool._starting.values())
        assert await pool.ensure_healthy()
        assert publisher.published[1:] == [(3, ["attached-0"])]
        assert routed == [["127.0.0.1:1"]]
        assert generator.addresses == ["127.0.0.1:1", ELSEWHERE]
        assert generator.oldest == 3
        assert pool.take_metrics()["servers/restarted"] == 1


@pytest.mark.asyncio
async def test_a_server_of_someone_else_with_old_weights_is_seen_by_who_looks_first(
    generator: _Generator, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = _Publisher()
    async with _pool(_Launcher(), publisher, addresses=[ELSEWHERE], token_file="/t") as pool:
        pool._ASK_AGAIN_S = 3600.0  # type: ignore[misc]
        await pool.connect(Requirements())
        await pool.sync_weights(3)
        pool.versions[ELSEWHERE] = 0  # it was started again
        # It was asked a moment ago, so nobody knows; a trajectory has failed there.
        assert await pool.ensure_healthy()
        assert "holds weight version 0, not 3" in caplog.text
        assert publisher.published[1:] == [(3, ["attached-0"])]
        # Until it has them it is not taken for one that was started again once more.
        assert pool.names == ["attached-0"]


@pytest.mark.asyncio
async def test_who_waits_for_a_change_is_told_of_servers_that_end_and_that_start(
    generator: _Generator,
) -> None:
    launcher = _Launcher()
    async with _pool(launcher) as pool:
        await pool.connect(Requirements())
        waiting = asyncio.create_task(pool.wait_for_change())
        launcher.may_serve.clear()
        await pool.die("rollout-0")
        await waiting
        assert await pool.ensure_healthy()
        waiting = asyncio.create_task(pool.wait_for_change())
        adding = await pool.add(ELSEWHERE)
        await waiting
        await pool.ensure_healthy()
        assert adding.done() and pool.names == ["attached-0", "rollout-1"]
        waiting = asyncio.create_task(pool.wait_for_change())
        launcher.may_serve.set()
        await waiting
        await pool.ensure_healthy()
        assert pool.names == ["attached-0", "rollout-0", "rollout-1"]
        # The end of the last one is `wait_until_all_ended`'s.
        await pool.die("rollout-0")
        await pool.ensure_healthy()


@pytest.mark.asyncio
async def test_servers_are_added_and_drained_while_the_run_goes_on(generator: _Generator) -> None:
    publisher, launcher = _Publisher(), _Launcher()
    async with _pool(launcher, publisher, num_replicas=1) as pool:
        await pool.connect(Requirements())
        await pool.sync_weights(2)
        told: list[Routes] = []
        stop = pool.on_change(told.append)
        with pytest.raises(ProcessError, match="only server that takes new sessions"):
            pool.drain("rollout-0")
        pool.begun.clear()
        adding = await pool.add(ELSEWHERE)
        await pool.until_reached()
        assert [row.state for row in pool.rows()] == ["serving", "starting"]
        await pool.ensure_healthy()
        await adding
        assert publisher.published[1:] == [(2, ["attached-0"])]
        pool.versions[ELSEWHERE] = 2
        assert told[-1] == Routes(serving=(ELSEWHERE, "127.0.0.1:1"), weight_version=2)
        with pytest.raises(ProcessError, match="is a server of this run already"):
            await pool.add(ELSEWHERE)

        generator.sessions = 2
        assert pool.drain("127.0.0.1:1") == 2
        assert told[-1] == Routes(serving=(ELSEWHERE,), draining=("127.0.0.1:1",), weight_version=2)
        await pool.sync_weights(3)
        assert publisher.published[-1] == (3, ["attached-0", "rollout-0"])  # its sessions continue
        pool.versions[ELSEWHERE] = 3
        assert pool.take_metrics()["servers/draining"] == 1
        generator.sessions = 0
        await pool.ensure_healthy()
        assert pool.names == ["attached-0"]
        assert launcher.processes["rollout-0"].stopped
        assert told[-1] == Routes(serving=(ELSEWHERE,), weight_version=3)
        stop()
        assert not await pool.ensure_healthy()  # what was drained is not started again


@pytest.mark.asyncio
async def test_a_server_that_does_not_fit_is_refused_and_the_run_continues(
    generator: _Generator,
) -> None:
    publisher = _Publisher()
    async with _pool(_Launcher(), publisher, num_replicas=1) as pool:
        await pool.connect(Requirements())
        await pool.sync_weights(2)
        pool.versions[ELSEWHERE] = 9
        with pytest.raises(ProcessError, match=r"holds weight version 9, and this run's is 2: "):
            await pool.add(ELSEWHERE)
        pool.versions[ELSEWHERE] = WeightSyncError("wrong token", Outcome.FATAL)
        with pytest.raises(ProcessError, match=r"wrong token. Start the server with the token"):
            await pool.add(ELSEWHERE)
        pool.versions[ELSEWHERE] = 0
        publisher.refusing = ["attached-2"]
        pool.begun.clear()
        adding = await pool.add(ELSEWHERE)
        await pool.until_reached()
        await pool.ensure_healthy()
        with pytest.raises(ProcessError, match="no server took it"):
            await adding
        assert generator.addresses == ["127.0.0.1:1"]
        assert [row.name for row in pool.rows()] == ["rollout-0"]


@pytest.mark.asyncio
async def test_a_server_of_someone_else_that_never_answers_is_named() -> None:
    pool = _pool(_Launcher(), addresses=[ELSEWHERE], start_deadline_s=0.01)
    pool.versions[ELSEWHERE] = WeightSyncError("nobody there", Outcome.RESUME)
    with pytest.raises(ProcessError, match=rf"{ELSEWHERE}\) gave no answer for 0.01 s"):
        async with pool:
            pass


def test_servers_must_be_able_to_do_what_the_configuration_asks_of_them() -> None:
    paths = ["model.path=/m", "data.train_files=/t.jsonl"]
    plain = load_config([], paths).config
    assert required_capabilities(plain) == {"sampled_logprobs", "inline_transport"}
    asked = ("sync.transport=shared_memory", "sync.in_place=true", "rollout.release_memory=true")
    assert required_capabilities(load_config([], [*paths, *asked]).config) == {
        "sampled_logprobs",
        "shared_memory_transport",
        "in_place_update",
        "release_memory",
    }
    kept = load_config([], [*paths, "sync.in_flight=continue"]).config
    assert "in_flight_continue" in required_capabilities(kept)
    replayed = load_config([], [*paths, "policy.moe.routing_replay=true"]).config
    assert "routed_experts" in required_capabilities(replayed)
    for cut in ("top_p=0.9", "top_k=20", "min_p=0.05"):
        truncated = load_config([], [*paths, f"rollout.{cut}"]).config
        assert "sampling_mask" in required_capabilities(truncated)
    assert "sampling_mask" not in required_capabilities(
        load_config([], [*paths, "rollout.val.top_p=0.9"]).config
    )


class _Run(RuleBasedStateMachine):
    """Servers join, are drained, die and are started again, between the steps of a run.

    Invariant: what the generator may route to holds the present weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = contextlib.AsyncExitStack()
        self.patch = pytest.MonkeyPatch()
        self.generator = _Generator([])
        self.added = 0

        @contextlib.asynccontextmanager
        async def connect(addresses: Sequence[str], **asked: object) -> AsyncIterator[_Generator]:
            if "policy" in asked:
                self.generator.addresses += addresses
            yield self.generator

        for module in ("server_pool", "server_starter"):
            self.patch.setattr(f"treadle.trainer.rollout.{module}.connect", connect)
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self.launcher = _Launcher()
        publisher = _Publisher()
        self.pool = _pool(self.launcher, publisher, max_restarts=1000)

        async def publish(version: int, servers: Sequence[Any]) -> Any:
            # Nobody may be routed to in the midst of this that is not given weights by it.
            for server in servers:
                self.pool.versions[server.address] = version
            return SimpleNamespace(failed={})

        self.pool._publish = publish
        await self.stack.enter_async_context(self.pool)
        await self.pool.connect(Requirements())

    async def _settle(self) -> None:
        if starting := self.pool._starting.values():
            await asyncio.wait(starting)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.stack.aclose())
        self.loop.close()
        self.patch.undo()

    @rule()
    def step(self) -> None:
        self.loop.run_until_complete(self.pool.sync_weights(self.pool.weight_version + 1))

    @rule()
    def between_attempts(self) -> None:
        async def check() -> None:
            await self._settle()
            await self.pool.ensure_healthy()

        self.loop.run_until_complete(check())

    @rule()
    def add(self) -> None:
        async def add() -> None:
            self.added += 1
            serves = await self.pool.add(f"10.0.0.{self.added}:8000")
            serves.add_done_callback(lambda done: done.cancelled() or done.exception())

        self.loop.run_until_complete(add())

    @rule(data=strategies.data(), now=strategies.booleans(), sessions=strategies.integers(0, 1))
    def drain(self, data: strategies.DataObject, now: bool, sessions: int) -> None:
        self.generator.sessions = sessions
        dead = {server.name for server in self.pool.live if server.ended.done()}
        name = data.draw(strategies.sampled_from(self.pool.names))
        refused = name in dead or not set(self.pool.routes.serving) - {
            self.pool._rotation[name].address
        }

        async def drain() -> None:
            self.pool.drain(name, now=now)

        with pytest.raises(ProcessError) if refused else contextlib.nullcontext():
            self.loop.run_until_complete(drain())

    @rule(data=strategies.data())
    def end(self, data: strategies.DataObject) -> None:
        """A server ends; one of someone else comes back with the weights of the start."""
        live = [server for server in self.pool.live if not server.ended.done()]
        if not live:
            return
        server = data.draw(strategies.sampled_from(live))

        async def end() -> None:
            if server.process is not None:
                await self.pool.die(server.name)
            elif self.pool.weight_version:
                self.pool.versions[server.address] = 0
                await server.ended  # it is noticed within a second

        self.loop.run_until_complete(end())

    @invariant()
    def what_is_routed_to_has_the_present_weights(self) -> None:
        living = {s.address for s in self.pool.live if not s.ended.done()}
        for address in set(self.generator.addresses) & living:
            assert self.pool.versions.get(address, 0) == self.pool.weight_version, address
        assert set(self.pool.routes.serving) & living <= set(self.generator.addresses)


_Run.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestServersComeAndGo = _Run.TestCase
