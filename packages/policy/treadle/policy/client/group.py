"""The policy group: the driver's end of all policy ranks.

Invariant: a request goes to every rank before any answer is awaited; requests do not overlap. The
caller waits in `call`. A rank that dies closes its connection, which ends its call at once; one
that gives no sign of life for `policy.unresponsive_s` is dead too. The group is then broken: `call`
raises `PolicyError` with the root cause (the rank whose failure is not the loss of another rank),
and the group can only be closed. Closing ends the processes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_status import rpc_status

from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc.driven import DrivenAccess
from treadle.policy.client.methods import METHODS, Method, method_of, verb
from treadle.policy.client.prefixes import mode_on
from treadle.policy.client.process import (
    RankProcess,
    RankProgram,
    StartRank,
    wait_until_ended,
    with_log,
)
from treadle.policy.client.shards import Outgoing, Shard, assign
from treadle.policy.client.signs_of_life import Silence, beat_s
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.config.settings import from_json, to_json
from treadle.policy.v1 import errors_pb2
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb

__all__ = ["PolicyError", "PolicyGroup", "send_shard"]

_log = logging.getLogger(__name__)

_GRACE_S = 5.0
_TAIL = 20
"""Lines of a rank's log in an error."""


class PolicyError(RuntimeError):
    """The policy cannot continue; the message names the rank, the cause and the log.

    Attributes:
        from_input: Whether the user's input is the cause.
        lost: Whether a rank is gone, stands still or cannot reach the others; a run that resumes
            need not meet it again.
    """

    def __init__(self, message: str, *, from_input: bool = False, lost: bool = False) -> None:
        super().__init__(message)
        self.from_input = from_input
        self.lost = lost


@dataclass
class _Rank:
    """One rank.

    Attributes:
        signs: How many it has given.
        silent: Whether it was found dead for want of them.
    """

    number: int
    process: RankProcess
    channel: "grpc.aio.Channel"
    metadata: Sequence[tuple[str, str]]
    watch: Any
    sign: rank_pb.WatchResponse
    signs: int = 1
    silent: bool = False

    def __post_init__(self) -> None:
        self.following = asyncio.create_task(self._follow(), name=f"policy-{self.number} lives")

    @property
    def process_text(self) -> str:
        """Its process id and node, for a message."""
        return f"pid {self.sign.pid} on {self.sign.node}"

    async def _follow(self) -> None:
        with contextlib.suppress(grpc.RpcError):  # its call tells that it is gone
            while (sign := await self.watch.read()) is not grpc.aio.EOF:
                self.sign = sign
                self.signs += 1

    async def ask(
        self, request: Message, shard: AbstractAsyncContextManager[Shard] | None
    ) -> "_Answer":
        """Returns the answer; a shard of the batch is sent beside the request."""
        method = method_of(request)
        call = self.channel.unary_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )(request, metadata=self.metadata)
        try:
            if shard is not None:
                async with shard as encoded:
                    with contextlib.suppress(grpc.RpcError):  # the call fails too
                        await send_shard(self.channel, encoded, self.metadata)
            return cast(Message, await call)
        except grpc.aio.AioRpcError as error:
            return _failure(error, method)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the connection."""
        self.following.cancel()
        await self.channel.close()


@dataclass(frozen=True, slots=True)
class _Lost:
    """The connection to a rank ended without an answer."""


_Answer = Message | _Lost
_NO_RESPONSE = (errors_pb2.RankFailure, _Lost)


class PolicyGroup:
    """Starts the ranks, sends them requests, and ends them.

    `async with PolicyGroup(...) as policy: await policy.call(SaveRequest(directory=...))`
    """

    _PATIENCE_S: ClassVar[float] = 60.0
    """How long a call may take before a warning names the ranks that work on it; then twice as
    long, and so on."""

    def __init__(
        self,
        start_rank: StartRank,
        config: PolicyConfig,
        model_path: Path,
        *,
        with_reference: bool,
        reference_path: Path | None = None,
        own_devices: bool = False,
        start_deadline_s: float,
        critic: CriticConfig | None = None,
        tls: Path | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            model_path: Directory of the model that training starts from.
            reference_path: Directory of the reference; None: it is the model that training starts
                from.
            own_devices: Whether the process of a rank sees its own GPUs only.
            start_deadline_s: Maximum time for a rank to start, and then to be connected.
            critic: The critic on the same ranks; None: there is none.
            tls: Directory of the run's certificates; None: ranks are reached in plain text.
        """
        self._start_process = start_rank
        self._config = config
        self._model_path = model_path
        self._with_reference = with_reference
        self._reference_path = reference_path
        self._critic = critic
        self._own_devices = own_devices
        self._access = DrivenAccess(tls=tls)
        self._start_deadline_s = start_deadline_s
        self._ranks: list[_Rank] = []
        self._broken = False
        self._batches = 0

    async def __aenter__(self) -> Self:
        """Starts the ranks and loads the model into them.

        Raises:
            ProcessError: A rank did not start.
            PolicyError: The model cannot be loaded, or cannot be split as configured.
        """
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        size = self._config.parallel.num_ranks
        self._ranks = await concurrently(self._start_rank(number) for number in range(size))
        self._check(await self.call(rank_pb.GetPolicyInfoRequest(backend=self._config.backend)))
        rendezvous = ""
        if size > 1:
            asked = [rank_pb.OpenRendezvousRequest()] + [None] * (size - 1)
            rendezvous = (await self._exchange(asked))[0].address
        path = self._reference_path
        await self._exchange(
            [
                rank_pb.InitializeRequest(
                    policy=to_json(self._config.model_copy(update={"command": ()})),
                    critic=None if self._critic is None else to_json(self._critic),
                    model_path=str(self._model_path),
                    with_reference=self._with_reference,
                    reference_path=None if path is None else str(path),
                    rank=number,
                    world_size=size,
                    rendezvous=rendezvous,
                    # A process that has its own GPUs sees no others, so its GPU is the first one.
                    local_rank=0 if self._own_devices else number,
                )
                for number in range(size)
            ]
        )

    def _check(self, infos: Sequence[rank_pb.GetPolicyInfoResponse]) -> None:
        """Checks that the ranks can do what is configured.

        Raises:
            PolicyError: They cannot, or differ from each other.
        """
        config, parallel, first = self._config, self._config.parallel, infos[0]
        for number, info in enumerate(infos):
            if info != first:
                raise PolicyError(
                    f"policy rank {number} is not like rank 0, with which it would compute: "
                    f"{_one_line(info)}, not {_one_line(first)}; start all ranks in the same "
                    "environment",
                    from_input=True,
                )
        wanted = {
            "reference": (self._with_reference, "algorithm.kl_coef or algorithm.reward_kl"),
            "critic": (self._critic is not None, "a critic"),
            "lora": (config.lora.rank > 0, "policy.lora"),
            "offload": (bool(config.offload.names), "policy.offload"),
            "routing_replay": (config.moe.routing_replay, "policy.moe.routing_replay"),
            "tensor_parallel": (parallel.tensor > 1, "policy.parallel.tensor"),
            "pipeline_parallel": (parallel.pipeline > 1, "policy.parallel.pipeline"),
            "context_parallel": (parallel.context > 1, "policy.parallel.context"),
        }
        for capability, (is_wanted, setting) in wanted.items():
            if is_wanted and not getattr(first.capabilities, capability):
                raise PolicyError(
                    f"the policy's backend, {first.backend} {first.backend_version} in treadle "
                    f"{first.treadle_version}, has no {capability}, which {setting} needs: leave "
                    "the setting out, or take another backend",
                    from_input=True,
                )

    async def _start_rank(self, number: int) -> _Rank:
        access = self._access
        process = await self._start_process(
            RankProgram(
                number=number,
                command=self._config.command,
                args=access.arguments,
                env=access.environment,
            )
        )
        address = await process.ready(self._start_deadline_s)
        return await self._connect(number, process, address)

    async def _connect(self, number: int, process: RankProcess, address: str) -> _Rank:
        """Connects to a rank that has started.

        Raises:
            PolicyError: It ended meanwhile, or took no connection in time.
        """
        deadline_s, security = self._start_deadline_s, self._access.channels()
        channel = security.open(address)
        method = METHODS[rank_pb.WatchRequest]
        watch = channel.unary_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )(
            rank_pb.WatchRequest(beat_s=beat_s(self._config.unresponsive_s)),
            metadata=security.metadata,
        )
        first = asyncio.ensure_future(watch.read())
        ended = asyncio.create_task(process.wait(), name=f"end of policy-{number}")
        try:
            async with asyncio.timeout(deadline_s):  # also if the rank stands still meanwhile
                waits: set[asyncio.Future[Any]] = {first, ended}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not first.done():
                    raise await self._lost(number, process)
                sign = cast(rank_pb.WatchResponse, await first)  # a rank begins with one
            return _Rank(number, process, channel, security.metadata, watch, sign)
        except BaseException as error:
            watch.cancel()
            await channel.close()
            if not isinstance(error, grpc.aio.AioRpcError | TimeoutError):
                raise
            if isinstance(error, grpc.aio.AioRpcError) and _is_unserved(error):
                raise PolicyError(_unserved(method), from_input=True) from error
            if await wait_until_ended(process, _GRACE_S) is not None:
                raise await self._lost(number, process) from error
            told = error.details() if isinstance(error, grpc.aio.AioRpcError) else "TimeoutError"
            raise PolicyError(
                f"policy rank {number} at {address} took no connection within {deadline_s:g} s "
                f"(launch.start_deadline_s): {told}"
            ) from error
        finally:
            ended.cancel()

    async def call(self, request: Message, sequences: Sequence[TrainSequence] = ()) -> list[Any]:
        """Sends a request to all ranks and returns their responses, by rank.

        Of sequences, each data-parallel group of ranks gets its shard only, through its first rank.

        Raises:
            PolicyError: A rank failed or died.
        """
        if not sequences:
            return await self._exchange([request] * len(self._ranks))
        self._batches += 1
        numbered = type(request)(batch=self._batches)
        numbered.MergeFrom(request)
        numbers = await asyncio.to_thread(self._assign, request, sequences)
        parallel = self._config.parallel
        leaders: dict[int, int] = {}
        for rank in range(parallel.num_ranks):
            leaders.setdefault(parallel.data_rank(rank), rank)
        outgoing = Outgoing(parallel.data)
        shards = {rank: outgoing.taken(number) for number, rank in leaders.items()}
        encoding = asyncio.create_task(
            asyncio.to_thread(outgoing.encode, sequences, numbers, batch=self._batches),
            name="encode a batch",
        )
        try:
            return await self._exchange([numbered] * len(self._ranks), shards)
        finally:
            outgoing.close()
            await asyncio.wait({encoding})

    def _assign(self, request: Message, sequences: Sequence[TrainSequence]) -> list[int]:
        """Returns the shard of each sequence."""
        parallel, mini_batches = self._config.parallel, 1
        if isinstance(request, pb.UpdateRequest | pb.UpdateCriticRequest):
            mini_batches = from_json(AlgorithmConfig, request.algorithm).mini_batches
        return assign(
            sequences,
            parallel.data,
            mini_batches=mini_batches,
            share_prefixes=mode_on(self._config.share_prefixes, cpu=not self._own_devices),
        )

    async def _exchange(
        self,
        requests: Sequence[Message | None],
        shards: Mapping[int, AbstractAsyncContextManager[Shard]] | None = None,
    ) -> list[Any]:
        """Sends each rank its request (None: nothing to do) and returns the responses.

        Args:
            shards: Each rank's part of the batch, once it is encoded; by rank.
        """
        assert not self._broken, "a broken policy group can only be closed"
        loop, shards = asyncio.get_running_loop(), shards or {}
        asked = {
            asyncio.create_task(rank.ask(request, shards.get(rank.number))): (rank, request)
            for rank, request in zip(self._ranks, requests, strict=True)
            if request is not None
        }
        waits = list(asked)
        self._broken = True  # until every answer has arrived
        pending = set(waits)
        silence = Silence(self._config.unresponsive_s)
        began, patience_s = loop.time(), self._PATIENCE_S
        next_look = began + silence.look_s
        try:
            while pending:
                ended, pending = await asyncio.wait(
                    pending,
                    timeout=max(0.0, min(next_look, began + patience_s) - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if any(isinstance(task.result(), _NO_RESPONSE) for task in ended):
                    break
                if ended:
                    continue
                now = loop.time()
                late = [asked[task] for task in waits if task in pending]
                if now >= next_look:
                    next_look = now + silence.look_s
                    dead = silence.look((rank.number, rank.signs) for rank, _ in late)
                    if dead:
                        silent = [each for each in late if each[0].number in dead]
                        raise await self._dead(silent, now - began)
                if now >= began + patience_s:
                    _tell_of_wait(late, silence, patience_s)
                    patience_s *= 2
            if pending:  # the first failure may only be the loss of the rank that failed
                await asyncio.wait(pending, timeout=_GRACE_S)
            answers = [task.result() if task.done() else None for task in waits]
            if any(answer is None or isinstance(answer, _NO_RESPONSE) for answer in answers):
                raise await self._explain(answers)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._broken = False
        return answers

    async def _dead(self, ranks: Sequence[tuple[_Rank, Message]], waited_s: float) -> PolicyError:
        """Returns the error about ranks that give no sign of life."""
        limit_s = self._config.unresponsive_s
        told = [
            f"policy rank {rank.number} ({rank.process_text}) stands still: it was given "
            f"{verb(request)} {waited_s:.3g} s ago, and has given no sign of life for "
            f"{limit_s:g} s (policy.unresponsive_s); it gave the last one at {rank.sign.place}"
            for rank, request in ranks
        ]
        for rank, _ in ranks:
            rank.silent = True
        rank = ranks[0][0]
        tail = await rank.process.log_tail()
        return PolicyError(
            "\n".join(told) + f"\nThe log of rank {rank.number} ends with:\n{tail}", lost=True
        )

    async def _explain(self, answers: Sequence[_Answer | None]) -> PolicyError:
        """Returns the failure that is not the consequence of another rank's."""

        def consequence(answer: _Answer | None) -> int:
            if isinstance(answer, errors_pb2.RankFailure):
                return 2 if answer.kind == errors_pb2.FAILURE_KIND_PEER else 0
            return 1 if isinstance(answer, _Lost) else 3

        number = min(range(len(answers)), key=lambda n: consequence(answers[n]))
        answer, rank = answers[number], self._ranks[number]
        if not isinstance(answer, errors_pb2.RankFailure):
            return await self._lost(number, rank.process, f" ({rank.process_text})")
        if answer.kind in (errors_pb2.FAILURE_KIND_INPUT, errors_pb2.FAILURE_KIND_CHECKPOINT):
            message = answer.message.partition(": ")[2]
            return PolicyError(message, from_input=True)
        of_peer = answer.kind == errors_pb2.FAILURE_KIND_PEER
        limit = (
            "\n(no rank is gone; an operation with the others may take "
            f"policy.collective_timeout_s={self._config.collective_timeout_s:g})"
            if of_peer
            else ""
        )
        told = answer.traceback.rstrip()
        tail = await rank.process.log_tail(_TAIL + told.count("\n") + 1)
        log = tail.replace(told, "(this traceback)")  # the rank logs what it tells
        return PolicyError(
            f"policy rank {number} ({rank.process_text}) failed: {answer.message}{limit}\n"
            f"{told}\nIts log ends with:\n{log}",
            lost=of_peer,
        )

    async def _lost(self, number: int, process: RankProcess, place: str = "") -> PolicyError:
        """Returns how a rank ended that answers no more."""
        status = await wait_until_ended(process, _GRACE_S)
        ended = f"closed its connection{place}"
        if status is not None:
            ended = process.describe_end(status)
        text = await with_log(process, f"policy rank {number} {ended}", lines=20)
        return PolicyError(text, lost=True)

    async def __aexit__(self, *exc_info: object) -> None:
        """Lets idle ranks exit by themselves, and ends those that do not."""
        if not self._broken and self._ranks:
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._exchange([rank_pb.StopRequest()] * len(self._ranks))
            except (PolicyError, TimeoutError):
                pass  # the processes are ended below either way
        # One that stands still would not end by itself either.
        await asyncio.gather(
            *(rank.process.stop(0.0 if rank.silent else _GRACE_S) for rank in self._ranks)
        )
        for rank in self._ranks:
            await rank.close()


async def send_shard(
    channel: grpc.aio.Channel, shard: Shard, metadata: Sequence[tuple[str, str]]
) -> None:
    """Sends a shard to the rank that leads its group.

    Raises:
        RpcError: The rank did not take all of it.
    """
    method = METHODS[pb.SendBatchRequest]
    send = channel.stream_unary(
        method.path, method.request.SerializeToString, method.response.FromString
    )
    await send(shard.messages(), metadata=metadata)


def _failure(error: grpc.aio.AioRpcError, method: Method) -> errors_pb2.RankFailure | _Lost:
    """Returns why a call failed."""
    failure = errors_pb2.RankFailure()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Unpack(failure):
            return failure
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return _Lost()
    failure.kind = errors_pb2.FAILURE_KIND_BUG
    failure.message = f"{error.code().name}: {error.details()}"
    if _is_unserved(error):
        failure.kind = errors_pb2.FAILURE_KIND_INPUT
        failure.message = f"UNIMPLEMENTED: {_unserved(method)}"
    return failure


def _is_unserved(error: grpc.aio.AioRpcError) -> bool:
    return bool(error.code() is grpc.StatusCode.UNIMPLEMENTED)


def _unserved(method: Method) -> str:
    return (
        f"the policy's ranks do not serve {method.path}: they are of another release than the "
        "trainer; install its treadle-policy where policy.command starts them"
    )


def _one_line(message: Message) -> str:
    return " ".join(str(message).split())


def _tell_of_wait(late: Sequence[tuple[_Rank, Message]], silence: Silence, waited_s: float) -> None:
    """Says what the ranks do that have not answered: one that stands still, or one at work."""
    doing = []
    for rank, _ in late:
        silent_s = silence.silent_s(rank.number)
        if silent_s > max(2.0, 2 * silence.look_s):
            doing.append(
                f"rank {rank.number} ({rank.process_text}) has given no sign of life for "
                f"{silent_s:.3g} s"
            )
        else:
            doing.append(f"rank {rank.number} is at {rank.sign.place}")
    _log.warning(
        "no answer to %s for %g s: policy %s", verb(late[0][1]), waited_s, "; ".join(doing)
    )
