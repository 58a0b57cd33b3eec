"""The gRPC generator: one `TokenGenerator` over several replicas.

Invariants:

1. A completion is whole, or an error is raised. Its tokens, log-probabilities and versions are
   exactly those that servers sampled, also when several replicas contributed: after a failure or
   an interruption the next call's prompt is the original prompt plus the tokens that arrived.
2. Every call has a deadline, and every stream is cancelled when its reader leaves.
3. A replica that fails is not used during a growing back-off. A request that has seen
   `RetryPolicy.max_failures` failures of every replica raises an error that names them all.
4. When a replica is overloaded or paused, only the request that it refused turns away from it;
   other sessions have their prefixes cached there. The refused request uses another replica or
   waits, until its deadline.
5. The router chooses the replica, once per call. It is a policy in this process, or the routing
   service that many workers share. Replicas may be added and removed meanwhile.
6. No call is sampled from weights older than the version set by `require_weights` when the call
   begins, whatever its request allows. A replica that restarted with older weights refuses, and the
   call goes elsewhere.

A request waits for its stream, for the first back-off to end (woken by the clock), or for room
(`SessionQueue`). All requests of one event loop share the replicas; nothing here is thread-safe.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from treadle.agent_loop.clock import Clock, LoopClock
from treadle.agent_loop.errors import (
    GenerationTimeoutError,
    ReplicaUnavailableError,
    RequestRejectedError,
    SetupError,
)
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.routing.placement import HashedSession, StickySession
from treadle.agent_loop.rpc.codec import check_size, encode_request
from treadle.agent_loop.rpc.completion_stream import CompletionStream, read
from treadle.agent_loop.rpc.errors import Action, RpcFailure, classify
from treadle.agent_loop.rpc.handshake import (
    CONSTRAINED_SAMPLING,
    PROMPT_LOGPROBS,
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    Requirements,
    ServerInfo,
    check_images_taken,
)
from treadle.agent_loop.rpc.in_flight_completion import InFlightCompletion
from treadle.agent_loop.rpc.phase_spans import record_phases
from treadle.agent_loop.rpc.replica_client import ReplicaClient, RpcDeadlines
from treadle.agent_loop.rpc.replica_connections import ReplicaConnections
from treadle.agent_loop.rpc.retry import Backoff, RetryPolicy
from treadle.agent_loop.rpc.router.client import RemoteRouter
from treadle.agent_loop.rpc.router.session_queue import Placement, SessionQueue
from treadle.agent_loop.rpc.security import ChannelSecurity
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import (
    Completion,
    FinishReason,
    RoutedExperts,
    SamplingParams,
    TokenChunk,
)
from treadle.rollout.v1 import generation_service_pb2 as generation_pb2


class GrpcTokenGenerator:
    """Generates on several replicas. Made by `connect`.

    Args:
        max_resumes: Maximum number of times that one completion is resumed.
    """

    def __init__(
        self,
        replicas: ReplicaConnections,
        *,
        placement: Placement,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
        max_resumes: int,
    ) -> None:
        self._replicas = replicas
        self._placement = placement
        self._deadlines = deadlines
        self._retry = retry
        self._clock = clock
        self._max_resumes = max_resumes
        self._min_weight_version = 0

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """Each replica's answer at the handshake."""
        return self._replicas.servers

    @property
    def context_length(self) -> int:
        """Maximum number of prompt and completion tokens that every replica accepts."""
        return min(server.context_length for server in self.servers)

    def finish_session(self, session_id: str) -> None:
        """Ends the session; it no longer counts as a load of its replica."""
        self._placement.finish(session_id)

    def occupied_s(self) -> Mapping[str, float]:
        """Returns by address for how long replicas have had open sessions.

        Raises:
            SetupError: A routing service manages the replicas; `RouterAdmin` reads its times.
        """
        return self._session_queue().occupancy.seconds()

    def require_weights(self, version: int) -> None:
        """Lets every call that begins from now on be sampled from this version or a newer one."""
        self._min_weight_version = version

    async def add_replica(self, address: str) -> None:
        """Adds a replica after its handshake, or ends the draining of one. Idempotent.

        Raises:
            SetupError: The replica does not answer or is incompatible, or a routing service
                manages the replicas.
        """
        queue = self._session_queue()
        if address not in queue.router.addresses:
            await self._replicas.add_all([address])
        queue.add(address)

    def drain_replica(self, address: str) -> int:
        """Stops sending new sessions to a replica; returns the number that are open there.

        Raises:
            KeyError: There is no such replica.
            SetupError: A routing service manages the replicas.
        """
        return self._session_queue().drain(address)

    def sessions_at(self, address: str) -> int:
        """Returns the number of open sessions at a replica; 0 if there is no such replica.

        Raises:
            SetupError: A routing service manages the replicas.
        """
        router = self._session_queue().router
        return router.load(address) if address in router.addresses else 0

    async def remove_replica(self, address: str) -> None:
        """Stops using a replica; calls in flight there may end. Idempotent.

        Raises:
            SetupError: A routing service manages the replicas.
        """
        self._session_queue().remove(address)
        await self._replicas.retire(address)

    def _session_queue(self) -> SessionQueue:
        if not isinstance(self._placement, SessionQueue):
            raise SetupError(
                "the routing service manages the replicas: add, drain and remove them there"
            )
        return self._placement

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Samples one completion, on one or more replicas.

        Raises:
            GenerationError: See `treadle.agent_loop.errors`; the message names the replicas.
        """
        if images:
            check_images_taken(self.servers)
        in_flight = InFlightCompletion(
            prompt=tuple(prompt),
            params=params,
            request=request,
            images=tuple(images),
            deadline=min(request.deadline, self._clock.now() + self._deadlines.generate_s),
        )
        while True:
            replica = await self._choose(in_flight)
            outcome = await self._call(replica, in_flight)
            if isinstance(outcome, RpcFailure):
                self._note_failure(replica.backoff, in_flight, outcome)
                finish = in_flight.finish_already()
            elif outcome is None:
                replica.backoff.recover()
                in_flight.num_resumes += 1
                finish = in_flight.finish_already()
                if finish is None and in_flight.num_resumes > self._max_resumes:
                    raise ReplicaUnavailableError(
                        f"{replica.info.address}: the completion was interrupted "
                        f"{in_flight.num_resumes} times; max_resumes is {self._max_resumes}"
                    )
            else:
                replica.backoff.recover()
                finish = outcome
            if finish is not None:
                return in_flight.completion(finish)

    async def _choose(self, in_flight: InFlightCompletion) -> ReplicaClient:
        """Returns the replica for the next call, waiting until one may be used.

        Raises:
            GenerationError: Every replica failed too often, or the deadline comes first.
        """
        while True:
            now = self._clock.now()
            if now >= in_flight.deadline:
                in_flight.give_up("the deadline passed")
            spent = {a for a, n in in_flight.failures.items() if n >= self._retry.max_failures}
            backing_off = self._backing_off(in_flight, spent, now)
            try:
                address = await self._placement.open(
                    in_flight.request.session_id,
                    context_tokens=len(in_flight.prompt) + in_flight.num_tokens,
                    avoid=spent | backing_off.keys(),
                    wait_s=in_flight.deadline - now,
                )
            except TimeoutError:
                in_flight.give_up("no replica had room before the deadline")
            if address is not None:
                try:
                    return await self._replicas.reach(address)
                except ReplicaUnavailableError as away:
                    failure = RpcFailure(address=address, error=away, action=Action.LEAVE)
                    self._note_failure(self._replicas.backoffs[address], in_flight, failure)
                continue
            if not backing_off:
                in_flight.give_up("no replica is left")
            if (wake := min(backing_off.values())) >= in_flight.deadline:
                in_flight.give_up(
                    f"no replica is free before the deadline, in {in_flight.deadline - now:g} s"
                )
            await self._clock.sleep(wake - now)

    def _backing_off(
        self, in_flight: InFlightCompletion, spent: set[str], now: float
    ) -> dict[str, float]:
        """Returns the addresses that must not be used now, and when each may be used again."""
        ends = {a: b.until for a, b in self._replicas.backoffs.items() if b.until > now}
        for address, until in in_flight.waiting_until.items():
            if until > now:
                ends[address] = max(until, ends.get(address, 0.0))
        return {a: until for a, until in ends.items() if a not in spent}

    async def _call(
        self, replica: ReplicaClient, in_flight: InFlightCompletion
    ) -> FinishReason | RpcFailure | None:
        """Makes one call and keeps its tokens, however it ends.

        Returns:
            Why the completion ended, None when it was interrupted, or how the call failed.
        """
        params = in_flight.next_params()
        if params.constraint is not None:
            _check_constrains(replica.info, in_flight)
        prompt = in_flight.next_prompt()
        experts_from = in_flight.next_routed_experts_from()
        logprobs_from = in_flight.next_prompt_logprobs_from()
        if logprobs_from is not None:
            _check_reports(replica.info, PROMPT_LOGPROBS)
        if params.sampling_mask:
            _check_reports(replica.info, SAMPLING_MASK)
        oldest = max(in_flight.request.min_weight_version, self._min_weight_version)
        stream = CompletionStream(
            address=replica.info.address,
            params=params,
            vocab_size=replica.info.vocab_size,
            min_weight_version=oldest,
            num_prompt_tokens=len(prompt),
            asked_experts=None if experts_from is None else _no_rows(replica.info, experts_from),
            num_prompt_logprobs=0 if logprobs_from is None else len(prompt) - logprobs_from,
        )
        message = encode_request(
            prompt,
            params,
            in_flight.request,
            request_id=in_flight.next_request_id(),
            min_weight_version=oldest,
            images=in_flight.images,
            routed_experts_from=experts_from,
            prompt_logprobs_from=logprobs_from,
        )
        if in_flight.images:
            check_images_taken((replica.info,))  # It may have been added meanwhile.
            check_size(message, replica.info)
        timeout_s = in_flight.deadline - self._clock.now()
        try:
            async with self._replicas.calling(replica):
                call = replica.generate(message, timeout_s=timeout_s)
                await read(call, _reporting(stream, in_flight.request.on_tokens))
            finish = stream.end()
            record_phases(stream, call=in_flight.num_calls)
            return finish
        except grpc.aio.AioRpcError as failed:
            return classify(replica.info.address, failed)
        finally:
            in_flight.add(stream)

    def _note_failure(
        self, backoff: Backoff, in_flight: InFlightCompletion, failure: RpcFailure
    ) -> None:
        if failure.action is Action.RAISE:
            if isinstance(failure.error, GenerationTimeoutError):
                in_flight.give_up("the deadline passed", GenerationTimeoutError)
            raise failure.error
        in_flight.last_failures[failure.address] = failure
        now = self._clock.now()
        if failure.action is Action.LEAVE:
            in_flight.failures[failure.address] = in_flight.failures.get(failure.address, 0) + 1
            backoff.fail(now, self._retry, failure.retry_after_s)
        else:
            in_flight.num_waits += 1
            wait_s = self._retry.wait_s(in_flight.num_waits, retry_after_s=failure.retry_after_s)
            in_flight.waiting_until[failure.address] = now + wait_s


@asynccontextmanager
async def connect(
    addresses: Sequence[str] = (),
    *,
    router: str | None = None,
    requirements: Requirements | None = None,
    security: ChannelSecurity | None = None,
    deadlines: RpcDeadlines | None = None,
    retry: RetryPolicy | None = None,
    policy: StickySession | HashedSession | None = None,
    max_resumes: int = 32,
    client: str = "treadle-agent-loop",
    clock: Clock | None = None,
) -> AsyncIterator[GrpcTokenGenerator]:
    """Connects to the replicas of one model.

    Args:
        addresses: host:port of every replica; at least one, unless there is a `router`.
        router: host:port of a routing service, which lists the replicas; None means no router.
        requirements: Capabilities that the replicas must offer; None: log-probabilities only.
        security: TLS and token, for the replicas and the router; None means plain.
        policy: Spreads sessions over `addresses`, which `connect` adds to it; None means
            `StickySession()`. A routing service has its own policy.
        max_resumes: Maximum number of times that one completion is resumed after an
            interruption.
        client: "name/version", for the servers' logs.
        clock: Times the waits; None means the event loop's clock.

    Raises:
        SetupError: A replica cannot be reached or is incompatible; the message names it. At least
            one of a router's replicas must answer; the others are used when they come back.
    """
    _check_arguments(addresses, router, policy)
    security, deadlines = security or ChannelSecurity(), deadlines or RpcDeadlines()
    retry, clock = retry or RetryPolicy(), clock or LoopClock()
    replicas = ReplicaConnections(
        requirements=requirements or Requirements(),
        security=security,
        deadlines=deadlines,
        retry=retry,
        clock=clock,
        client=client,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(replicas.aclose)
        placement: Placement
        if router is None:
            await replicas.add_all(addresses)
            placement = queue = SessionQueue(policy or StickySession(), clock=clock)
            for address in addresses:
                queue.add(address)
        else:
            placement = remote = await stack.enter_async_context(
                RemoteRouter.connect(
                    router, security=security, deadlines=deadlines, retry=retry, clock=clock
                )
            )
            away = await replicas.add_reachable(await remote.replicas())
            if not replicas.servers:
                reasons = "\n  ".join(str(reason) for reason in away) or "it has none"
                raise SetupError(f"the router {router} has no replica that answers:\n  {reasons}")
        yield GrpcTokenGenerator(
            replicas,
            placement=placement,
            deadlines=deadlines,
            retry=retry,
            clock=clock,
            max_resumes=max_resumes,
        )


def _reporting(
    stream: CompletionStream, on_tokens: Callable[[TokenChunk], None] | None
) -> Callable[[generation_pb2.GenerateResponse], None]:
    """Returns what takes the messages of a stream and reports their tokens."""
    if on_tokens is None:
        return stream.accept

    def accept(event: generation_pb2.GenerateResponse) -> None:
        before = len(stream.chunks)
        stream.accept(event)
        for chunk in stream.chunks[before:]:
            on_tokens(chunk)

    return accept


def _check_constrains(server: ServerInfo, in_flight: InFlightCompletion) -> None:
    """Checks that a server may sample a constrained completion from its start.

    Raises:
        RequestRejectedError: It does not constrain the sampling.
        ReplicaUnavailableError: A part has been sampled: the constraint would begin again after it.
    """
    if CONSTRAINED_SAMPLING not in server.capabilities:
        raise RequestRejectedError(
            f"{server.address}: engine {server.engine!r} does not constrain the sampling here"
        )
    if in_flight.chunks:
        raise ReplicaUnavailableError(
            f"{server.address}: a constrained completion was interrupted after "
            f"{in_flight.num_tokens} tokens and cannot be resumed; ask for all of it again"
        )


def _check_reports(server: ServerInfo, capability: str) -> None:
    """Checks that a server has a capability that a request needs.

    Raises:
        SetupError: It does not.
    """
    if capability not in server.capabilities:
        raise SetupError(
            f"{server.address}: engine {server.engine!r} with {server.architecture} lacks the "
            f"capability {capability!r}; ask for it at connect to learn it at start"
        )


def _no_rows(server: ServerInfo, first: int) -> RoutedExperts:
    """Returns the report of a server's experts, before its first row.

    Raises:
        SetupError: The server reports none.
    """
    _check_reports(server, ROUTED_EXPERTS)
    return RoutedExperts(
        first=first,
        num_layers=server.num_moe_layers,
        top_k=server.experts_per_token,
        id_bytes=1 if server.num_experts <= 256 else 2,
        data=b"",
    )


def _check_arguments(
    addresses: Sequence[str], router: str | None, policy: StickySession | HashedSession | None
) -> None:
    if router is not None and (addresses or policy is not None):
        raise SetupError(
            f"the router {router} has the replicas and the policy: pass the router alone, or "
            "addresses and policy without a router"
        )
    if router is None and not addresses:
        raise SetupError("no rollout server is given: pass at least one host:port, or a router")
    if len(set(addresses)) < len(addresses):
        raise SetupError(f"a rollout server is given twice: {', '.join(addresses)}")
    if policy is not None and policy.addresses:
        raise SetupError(
            f"the policy already has replicas ({', '.join(policy.addresses)}): pass them as "
            "addresses instead"
        )
