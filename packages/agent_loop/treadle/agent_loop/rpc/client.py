"""The gRPC generator: one `TokenGenerator` over several replicas.

Invariants:

1. A completion is whole or an error is raised; its tokens, log-probabilities and versions are
   exactly those that servers sampled, also when several replicas had a part in it: after a
   failure or an interruption the next request is the prompt plus what arrived.
2. Every call has a deadline, and every stream is cancelled when its reader leaves.
3. A replica that fails rests for a growing time and no request is sent there meanwhile. A request
   that has seen `RetryPolicy.max_failures` failures of every replica raises, and names them all.
4. A replica that is overloaded or paused is left by the request that it refused, and by no other
   (their prefixes are cached there). The request goes elsewhere or waits, until the deadline.
5. Which replica a request goes to is the router's word, asked once per call: a policy in this
   process, or the routing service that many workers share. Replicas come and go meanwhile.

A request waits for its stream, for the replica that first has rested (woken by the clock), or for
a place (`router_desk`). Replicas are shared by all requests of one event loop; nothing here is
thread-safe.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from treadle.agent_loop.clock import Clock, LoopClock
from treadle.agent_loop.errors import (
    GenerationTimeoutError,
    ReplicaUnavailableError,
    SetupError,
)
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.routing.placement import HashedSession, StickySession
from treadle.agent_loop.rpc.codec import check_size, encode_request
from treadle.agent_loop.rpc.completion_stream import CompletionStream, read
from treadle.agent_loop.rpc.errors import Action, RpcFailure, classify
from treadle.agent_loop.rpc.handshake import Requirements, ServerInfo, check_images_taken
from treadle.agent_loop.rpc.in_flight_completion import Work
from treadle.agent_loop.rpc.replica import Replica, Rest, RpcDeadlines
from treadle.agent_loop.rpc.replica_set import ReplicaSet
from treadle.agent_loop.rpc.retry import RetryPolicy
from treadle.agent_loop.rpc.router.client import RemoteRouter
from treadle.agent_loop.rpc.router.session_queue import Places, RouterDesk
from treadle.agent_loop.rpc.security import ChannelSecurity
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import Completion, FinishReason, SamplingParams


class GrpcTokenGenerator:
    """Generates on several replicas. Made by `connect`.

    Args:
        replicas: The servers.
        places: Assigns sessions to their addresses.
        deadlines: Upper bounds of calls.
        retry: Waits after failures.
        clock: Time and waiting.
        max_resumes: Interruptions of one completion that are resumed.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        *,
        places: Places,
        deadlines: RpcDeadlines,
        retry: RetryPolicy,
        clock: Clock,
        max_resumes: int,
    ) -> None:
        self._replicas = replicas
        self._places = places
        self._deadlines = deadlines
        self._retry = retry
        self._clock = clock
        self._max_resumes = max_resumes

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """What each replica said at the handshake."""
        return self._replicas.servers

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion that fit every replica."""
        return min(server.context_length for server in self.servers)

    def finish_session(self, session_id: str) -> None:
        """Frees the session's place in the balance."""
        self._places.finish(session_id)

    async def add_replica(self, address: str) -> None:
        """Adds a server, after its handshake, or brings a draining one back. Idempotent.

        Raises:
            SetupError: It does not answer, does not fit, or the routing service decides.
        """
        desk = self._desk()
        if address not in desk.router.addresses:
            await self._replicas.add_all([address])
        desk.add(address)

    def drain_replica(self, address: str) -> int:
        """Sends no new session there; returns how many are open.

        Raises:
            KeyError: There is no such replica.
            SetupError: The routing service decides.
        """
        return self._desk().drain(address)

    async def remove_replica(self, address: str) -> None:
        """Sends nothing there any more; what runs there may end. Idempotent.

        Raises:
            SetupError: The routing service decides.
        """
        self._desk().remove(address)
        await self._replicas.retire(address)

    def _desk(self) -> RouterDesk:
        if not isinstance(self._places, RouterDesk):
            raise SetupError(
                "the replicas are the routing service's: add, drain and remove them there"
            )
        return self._places

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Samples one completion, on as many replicas as it takes.

        Raises:
            GenerationError: See `treadle.agent_loop.errors`; the text names the replicas.
        """
        if images:
            check_images_taken(self.servers)
        work = Work(
            prompt=tuple(prompt),
            params=params,
            request=request,
            images=tuple(images),
            deadline=min(request.deadline, self._clock.now() + self._deadlines.generate_s),
        )
        while True:
            replica = await self._choose(work)
            outcome = await self._ask(replica, work)
            if isinstance(outcome, RpcFailure):
                self._note_failure(replica.rest, work, outcome)
                finish = work.finish_already()
            elif outcome is None:
                replica.rest.recover()
                work.num_resumes += 1
                finish = work.finish_already()
                if finish is None and work.num_resumes > self._max_resumes:
                    raise ReplicaUnavailableError(
                        f"{replica.info.address}: the completion was interrupted "
                        f"{work.num_resumes} times; max_resumes is {self._max_resumes}"
                    )
            else:
                replica.rest.recover()
                finish = outcome
            if finish is not None:
                return work.completion(finish)

    async def _choose(self, work: Work) -> Replica:
        """Returns the replica for the next call, waiting until one has rested.

        Raises:
            GenerationError: Every replica failed too often, or the deadline is too near.
        """
        while True:
            now = self._clock.now()
            if now >= work.deadline:
                work.give_up("the deadline passed")
            spent = {a for a, n in work.failures.items() if n >= self._retry.max_failures}
            resting = self._resting(work, spent, now)
            try:
                address = await self._places.open(
                    work.request.session_id,
                    context_tokens=len(work.prompt) + len(work.token_ids),
                    avoid=spent | resting.keys(),
                    wait_s=work.deadline - now,
                )
            except TimeoutError:
                work.give_up("no replica had room before the deadline")
            if address is not None:
                try:
                    return await self._replicas.reach(address)
                except ReplicaUnavailableError as away:
                    failure = RpcFailure(address=address, error=away, action=Action.LEAVE)
                    self._note_failure(self._replicas.rests[address], work, failure)
                continue
            if not resting:
                work.give_up("no replica is left")
            if (wake := min(resting.values())) >= work.deadline:
                work.give_up(
                    f"no replica is free before the deadline, in {work.deadline - now:g} s"
                )
            await self._clock.sleep(wake - now)

    def _resting(self, work: Work, spent: set[str], now: float) -> dict[str, float]:
        """When each address that is left alone now may be used again."""
        rests = {address: rest.until for address, rest in self._replicas.rests.items()}
        for address, until in work.waiting_until.items():
            rests[address] = max(until, rests.get(address, 0.0))
        return {a: until for a, until in rests.items() if until > now and a not in spent}

    async def _ask(self, replica: Replica, work: Work) -> FinishReason | RpcFailure | None:
        """Makes one call; its tokens are added to the work, however it ends.

        Returns:
            Why the completion ended, None when it was interrupted, or how the call failed.
        """
        params = work.next_params()
        stream = CompletionStream(
            address=replica.info.address,
            params=params,
            vocab_size=replica.info.vocab_size,
            min_weight_version=work.request.min_weight_version,
        )
        message = encode_request(
            work.next_prompt(),
            params,
            work.request,
            request_id=work.next_request_id(),
            images=work.images,
        )
        if work.images:
            check_images_taken((replica.info,))  # It may have come after the work began.
            check_size(message, replica.info)
        timeout_s = work.deadline - self._clock.now()
        try:
            async with self._replicas.calling(replica):
                await read(replica.generate(message, timeout_s=timeout_s), stream.accept)
            return stream.end()
        except grpc.aio.AioRpcError as failed:
            return classify(replica.info.address, failed)
        finally:
            work.add(stream)

    def _note_failure(self, rest: Rest, work: Work, failure: RpcFailure) -> None:
        if failure.action is Action.RAISE:
            if isinstance(failure.error, GenerationTimeoutError):
                work.give_up("the deadline passed", GenerationTimeoutError)
            raise failure.error
        work.last_failures[failure.address] = failure
        now = self._clock.now()
        if failure.action is Action.LEAVE:
            work.failures[failure.address] = work.failures.get(failure.address, 0) + 1
            rest.fail(now, self._retry, failure.retry_after_s)
        else:
            work.num_waits += 1
            wait_s = self._retry.wait_s(work.num_waits, retry_after_s=failure.retry_after_s)
            work.waiting_until[failure.address] = now + wait_s


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
    """Opens channels to the replicas of one model and shakes hands with each.

    Args:
        addresses: host:port of every replica; at least one, unless there is a `router`.
        router: host:port of a routing service, which knows the replicas; None: none.
        requirements: What they must offer; None: log-probabilities only.
        security: TLS and token, for the replicas and the router; None: plain.
        deadlines: Upper bounds of calls.
        retry: Waits after failures.
        policy: How sessions are spread over `addresses`, without replicas of its own; None:
            `StickySession()`. The routing service has its own.
        max_resumes: Interruptions of one completion that are resumed before it fails.
        client: "name/version", for the servers' logs.
        clock: Times the waits; None: the event loop's.

    Raises:
        SetupError: A server cannot be reached or does not fit; the text names it. Of a router's
            replicas one must answer; those that are away are used when they come back.
    """
    _check_arguments(addresses, router, policy)
    security, deadlines = security or ChannelSecurity(), deadlines or RpcDeadlines()
    retry, clock = retry or RetryPolicy(), clock or LoopClock()
    replicas = ReplicaSet(
        requirements=requirements or Requirements(),
        security=security,
        deadlines=deadlines,
        retry=retry,
        clock=clock,
        client=client,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(replicas.aclose)
        places: Places
        if router is None:
            await replicas.add_all(addresses)
            places = RouterDesk(policy or StickySession(), clock=clock)
            for address in addresses:
                places.add(address)
        else:
            places = remote = await stack.enter_async_context(
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
            places=places,
            deadlines=deadlines,
            retry=retry,
            clock=clock,
            max_resumes=max_resumes,
        )


def _check_arguments(
    addresses: Sequence[str], router: str | None, policy: StickySession | HashedSession | None
) -> None:
    if router is not None and (addresses or policy is not None):
        raise SetupError(
            f"the router {router} knows the replicas and has the policy: pass it alone, or "
            "addresses and policy without a router"
        )
    if router is None and not addresses:
        raise SetupError("no rollout server is given: pass at least one host:port, or a router")
    if len(set(addresses)) < len(addresses):
        raise SetupError(f"a rollout server is given twice: {', '.join(addresses)}")
    if policy is not None and policy.addresses:
        raise SetupError(
            f"the policy has replicas of its own ({', '.join(policy.addresses)}): connect adds them"
        )
