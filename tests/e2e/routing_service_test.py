"""Many workers, one view: clients with a routing service over real rollout servers.

In process: replicas that come, drain, go and do not fit; a router that is away and comes back
without memory. As processes: a replica that is killed.
"""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from treadle.agent_loop import (
    Completion,
    GenerationError,
    HashedSession,
    NoReplica,
    ReplicaUnavailableError,
    RequestContext,
    SamplingParams,
    SetupError,
    StickySession,
)
from treadle.agent_loop.rpc import GrpcTokenGenerator, RetryPolicy, RpcDeadlines, connect
from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.rollout.v1 import routing_service_pb2 as pb
from treadle.rollout.v1 import routing_service_pb2_grpc as pb_grpc
from treadle.rollout_server.engine import ModelInfo
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.testing import held_address, serve_in_process

pytestmark = pytest.mark.asyncio

README = Path(__file__).parents[2] / "packages" / "agent_loop" / "README.md"
MODEL = ModelInfo(architecture="Fake", vocab_size=64, context_length=128)
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
QUICK = RetryPolicy(max_failures=2, initial_s=0.01, max_s=0.05)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a worker that ends report its sessions, however slow the machine is."""
    monkeypatch.setattr("treadle.agent_loop.rpc.router.client._CLOSE_S", 60.0)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Rollout servers in this process.

    Attributes:
        stack: Owns what is started.
        engines: By address.
    """

    stack: AsyncExitStack
    engines: dict[str, FakeEngine]

    async def start(self, model: ModelInfo = MODEL, latency: FakeLatency | None = None) -> str:
        engine = FakeEngine(model=model, clock=asyncio.get_running_loop(), latency=latency)
        server = await self.stack.enter_async_context(serve_in_process(engine))
        self.engines[server.address] = engine
        return server.address

    def calls(self, *addresses: str) -> list[int]:
        """Completions that each has started."""
        return [self.engines[address].counters.started for address in addresses]


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, {})


@asynccontextmanager
async def control(router: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(router) as channel:
        yield pb_grpc.RoutingServiceStub(channel)


async def turn(
    generator: GrpcTokenGenerator,
    session: str,
    prompt: tuple[int, ...] = (5, 9, 13),
    *,
    within_s: float = math.inf,
) -> Completion:
    deadline = asyncio.get_running_loop().time() + within_s
    request = RequestContext(request_id=session, session_id=session, deadline=deadline)
    return await generator.generate(prompt, PARAMS, request=request)


async def open_sessions(router: str) -> dict[str, int]:
    async with control(router) as stub:
        answer = await stub.ListReplicas(pb.ListReplicasRequest(), timeout=10)
    return {replica.address: replica.open_sessions for replica in answer.replicas}


async def test_workers_share_one_balance() -> None:
    """Four workers of three sessions each put six on each of two replicas."""
    async with fleet() as servers:
        addresses = [await servers.start() for _ in range(2)]
        async with serve_router(RouterConfig(replicas=tuple(addresses))) as router:
            async with AsyncExitStack() as stack:
                workers = [await stack.enter_async_context(connect(router=router)) for _ in "1234"]
                sessions = [(worker, f"{id(worker)} {n}") for worker in workers for n in range(3)]
                await asyncio.gather(*(turn(worker, name) for worker, name in sessions))
                assert await open_sessions(router) == dict.fromkeys(addresses, 6)
                assert servers.calls(*addresses) == [6, 6]
                for worker, name in sessions:
                    worker.finish_session(name)
            assert await open_sessions(router) == dict.fromkeys(addresses, 0)


async def test_replicas_come_drain_and_go_without_a_restart() -> None:
    async with (
        fleet() as servers,
        serve_router(RouterConfig(replicas=(first := await servers.start(),))) as router,
        connect(router=router) as worker,
        control(router) as stub,
    ):
        whole = await turn(worker, "s0")
        second = await servers.start()
        await stub.RegisterReplica(pb.RegisterReplicaRequest(address=second), timeout=10)
        await turn(worker, "s1")
        assert servers.calls(first, second) == [1, 1]
        assert {server.address for server in worker.servers} == {first, second}

        await stub.DrainReplica(pb.DrainReplicaRequest(address=first), timeout=10)
        await turn(worker, "s0")
        await turn(worker, "s2")
        assert servers.calls(first, second) == [2, 2]

        await stub.RemoveReplica(pb.RemoveReplicaRequest(address=first), timeout=10)
        again = await turn(worker, "s0")
        assert servers.calls(first, second) == [2, 3]
        assert again.token_ids == whole.token_ids


async def test_a_replica_that_does_not_fit_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        fleet() as servers,
        serve_router(RouterConfig(replicas=(first := await servers.start(),))) as router,
        connect(router=router, retry=QUICK) as worker,
        control(router) as stub,
    ):
        await turn(worker, "s0")
        other = await servers.start(ModelInfo(architecture="Else", vocab_size=64, context_length=9))
        await stub.RegisterReplica(pb.RegisterReplicaRequest(address=other), timeout=10)
        for number in range(1, 4):
            await turn(worker, f"s{number}")
        assert servers.calls(first, other) == [4, 0]
        assert f"replica {other} is not used" in caplog.text
        assert "architecture is 'Else'" in caplog.text


async def test_a_router_that_forgot_learns_where_the_sessions_are() -> None:
    """Down: open sessions go on, a new one waits. Back, without memory: all stay in place."""
    prompts = {f"s{n}": tuple((n + place * 7) % 64 for place in range(40)) for n in range(6)}
    async with fleet() as servers, AsyncExitStack() as stack:
        addresses = tuple([await servers.start() for _ in range(3)])

        async def turns() -> list[int]:
            """One turn of each session; how much of each prompt its replica had cached."""
            done = [await turn(worker, name, prompt) for name, prompt in prompts.items()]
            return [completion.cached_prompt_tokens for completion in done]

        address = stack.enter_context(held_address())
        async with serve_router(RouterConfig(address=address, replicas=addresses)) as router:
            worker = await stack.enter_async_context(connect(router=router, retry=QUICK))
            assert await turns() == [0] * 6
        assert await turns() == [32] * 6
        waiting = asyncio.create_task(turn(worker, "new"))

        # The replicas in another order: sessions that came as new ones would all move.
        async with serve_router(RouterConfig(address=router, replicas=addresses[::-1])):
            await waiting
            assert await turns() == [32] * 6
            assert sorted((await open_sessions(router)).values()) == [2, 2, 3]


async def test_without_a_router_a_new_session_says_so_at_its_deadline() -> None:
    async with fleet() as servers:
        address = await servers.start()
        async with AsyncExitStack() as stack:
            async with serve_router(RouterConfig(replicas=(address,))) as router:
                worker = await stack.enter_async_context(connect(router=router, retry=QUICK))
            why = f"router {router}: (UNAVAILABLE|DEADLINE_EXCEEDED)"
            with pytest.raises(ReplicaUnavailableError, match=why):
                await turn(worker, "new", within_s=0.5)


async def test_a_start_without_router_or_replica_is_an_error() -> None:
    async with serve_router(RouterConfig(replicas=("127.0.0.1:9",))) as router:
        with pytest.raises(SetupError, match=r"(?s)has no replica that answers.*127\.0\.0\.1:9"):
            async with connect(router=router):
                pass
    with pytest.raises(SetupError, match="the router does not answer"):
        async with connect(router=router, deadlines=RpcDeadlines(connect_s=0)):
            pass
    for arguments in ({"addresses": ["a:1"]}, {"policy": StickySession()}):
        with pytest.raises(SetupError, match="pass the router alone"):
            async with connect(router=router, **arguments):
                pass
    with pytest.raises(SetupError, match="the policy already has replicas"):
        async with connect(["a:1"], policy=StickySession(["a:1"])):
            pass


async def test_workers_agree_in_deterministic_mode_without_talking() -> None:
    """One asks a router, one has a policy of its own, listed in another order."""
    async with fleet() as servers:
        addresses = [await servers.start() for _ in range(3)]
        # Ports are drawn by chance, and places with them: with 12 sessions, a replica had none in
        # 2 % of the runs.
        names = [f"s{number}" for number in range(60)]
        config = RouterConfig(policy=HashedSession(), replicas=tuple(addresses))
        calls = []
        async with (
            serve_router(config) as router,
            connect(router=router) as remote,
            connect(addresses[::-1], policy=HashedSession()) as local,
        ):
            for worker in (remote, local):
                for name in names:
                    await turn(worker, name)
                calls.append(servers.calls(*addresses))
        assert calls[1] == [2 * count for count in calls[0]]
        assert all(calls[0])


class Watched(StickySession):
    """Tells when somebody was told to wait."""

    def __init__(self, *, cache_tokens: int) -> None:
        super().__init__(cache_tokens=cache_tokens)
        self.told_full = asyncio.Event()

    def pick(self, session_id: str, **options: Any) -> str | NoReplica:
        place = super().pick(session_id, **options)
        if place is NoReplica.FULL:
            self.told_full.set()
        return place


async def test_sessions_wait_at_the_router_for_room_in_the_caches() -> None:
    """Two workers; contexts of 60 tokens in a cache of 100: one after the other, none refused."""
    prompt = tuple(range(60))
    async with fleet() as servers:
        address = await servers.start()
        policy = Watched(cache_tokens=100)
        config = RouterConfig(policy=policy, replicas=(address,), hold_s=0.05)
        async with (
            serve_router(config) as router,
            connect(router=router) as one,
            connect(router=router) as two,
        ):
            await turn(one, "first", prompt)
            second = asyncio.create_task(turn(two, "second", prompt))
            await policy.told_full.wait()
            assert servers.calls(address) == [1]
            one.finish_session("first")
            await second
            assert servers.calls(address) == [2]


async def test_the_section_of_the_readme_runs() -> None:
    section = README.read_text().split("## Many workers, one view")[1].split("\n## ")[0]
    (command,) = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"--\w+", section)) <= set(re.findall(r"--\w+", router_help()))
    assert command.startswith("python -m treadle.agent_loop.rpc.router ")
    namespace: dict[str, Any] = {"math": math}
    exec(compile(code, str(README), "exec"), namespace)
    async with fleet() as servers:
        address = await servers.start()
        async with serve_router(RouterConfig(replicas=(address,))) as router:
            assert len(await namespace["work"](router, "s0")) <= 12
            assert await open_sessions(router) == {address: 0}


def router_help() -> str:
    command = (sys.executable, "-m", "treadle.agent_loop.rpc.router", "--help")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_in_one_process_replicas_come_drain_and_go_too() -> None:
    async with fleet() as servers:
        first, second = await servers.start(), await servers.start()
        async with connect([first], deadlines=RpcDeadlines(connect_s=0.2)) as worker:
            await turn(worker, "s0")
            await worker.add_replica(second)
            await worker.add_replica(second)
            await turn(worker, "s1")
            assert worker.drain_replica(first) == 1
            await turn(worker, "s2")
            assert servers.calls(first, second) == [1, 2]
            await worker.remove_replica(first)
            await worker.remove_replica(first)
            await turn(worker, "s0")
            assert servers.calls(first, second) == [1, 3]
            assert [server.address for server in worker.servers] == [second]
            with pytest.raises(SetupError, match="does not answer"):
                await worker.add_replica("127.0.0.1:9")


@asynccontextmanager
async def process(module: str, ready: Path, *arguments: str) -> AsyncIterator[tuple[str, int]]:
    """A server in a process of its own: its address and its process id."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--ready_file", str(ready), *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    try:
        while b"ready:" not in (line := await child.stderr.readline()):
            assert line, f"{module} ended"
        yield line.split()[-1].decode(), child.pid
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_a_router_and_a_replica_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    """Processes all. Every completion is the one that an undisturbed server gives."""
    router_module, server_module = "treadle.agent_loop.rpc.router", "treadle.rollout_server"
    slow = ("--fake.decode_s_per_token", "0.02")
    state = ("--state_file", str(tmp_path / "state.json"))
    async with (
        process(server_module, tmp_path / "survivor.json", *slow) as (survivor, _),
        process(server_module, tmp_path / "doomed.json", *slow) as (doomed, doomed_pid),
        AsyncExitStack() as stack,
    ):
        address = stack.enter_context(held_address())
        at = (*state, "--address", address)
        async with process(router_module, tmp_path / "router.json", *at, "--replica", survivor) as (
            router,
            _,
        ):
            async with control(router) as stub:
                await stub.RegisterReplica(pb.RegisterReplicaRequest(address=doomed), timeout=10)
            workers = [
                await stack.enter_async_context(connect(router=router, retry=QUICK)) for _ in "12"
            ]
            sessions = [(worker, f"{id(worker)} {n}") for worker in workers for n in range(4)]
            first = await asyncio.gather(*(turn(worker, name) for worker, name in sessions))
            (wanted,) = {completion.token_ids for completion in first}
            assert await open_sessions(router) == {survivor: 4, doomed: 4}

        # Killed. It is started again at its address while its workers go on without it.
        under_way = [asyncio.create_task(turn(worker, name)) for worker, name in sessions]
        async with process(router_module, tmp_path / "again.json", *at) as (again, _):
            assert again == router == address
            assert {c.token_ids for c in await asyncio.gather(*under_way)} == {wanted}

            under_way = [asyncio.create_task(turn(worker, name)) for worker, name in sessions]
            os.kill(doomed_pid, signal.SIGKILL)
            assert {c.token_ids for c in await asyncio.gather(*under_way)} == {wanted}
            await asyncio.gather(*(turn(worker, name) for worker, name in sessions))
            assert (await open_sessions(router))[survivor] == 8


async def test_a_router_that_stands_still_holds_up_new_sessions_only(tmp_path: Path) -> None:
    deadlines = RpcDeadlines(open_session_s=0.3)
    async with fleet() as servers:
        replica = await servers.start()
        async with (
            process(
                "treadle.agent_loop.rpc.router",
                tmp_path / "router.json",
                *("--replica", replica, "--valid_for_s", "0"),  # the router is asked every time
            ) as (router, pid),
            connect(router=router, retry=QUICK, deadlines=deadlines) as worker,
        ):
            wanted = await turn(worker, "open")
            os.kill(pid, signal.SIGSTOP)
            try:
                assert (await turn(worker, "open")).token_ids == wanted.token_ids
                with pytest.raises(GenerationError, match=f"router {router}"):
                    await turn(worker, "new", within_s=2.0)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert (await turn(worker, "new")).token_ids == wanted.token_ids
