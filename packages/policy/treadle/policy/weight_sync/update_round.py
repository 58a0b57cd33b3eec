"""An update round: one weight version on its way to the servers in the rotation.

Invariant: `live` holds the servers that have not failed in this round. A server that fails is
aborted and removed, and its cause goes to `failed`. An incompatible server (`Outcome.FATAL`) ends
the whole round, since no server would take the version. `call_all` calls all live servers at once,
and each lease is renewed by its own task, so that a server that hangs costs only its own deadlines.

What has part in a round raises `WeightSyncError` where trainer and servers are incompatible, and
`PolicyError` where a policy rank failed.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import ElementType, TensorSpec
from treadle.policy.config.weight_sync import InFlight, WeightSyncConfig
from treadle.policy.weight_sync.client import WeightSyncClient, with_retries
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.payload import num_bytes, tensor_spec_to_proto
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

__all__ = ["Delta", "UpdateRound"]

_SENT_BYTES_PER_S = 50e6
_IN_FLIGHT: Mapping[InFlight, pb.InFlightPolicy] = MappingProxyType(
    {
        "drain": pb.IN_FLIGHT_POLICY_DRAIN,
        "interrupt": pb.IN_FLIGHT_POLICY_INTERRUPT,
        "continue": pb.IN_FLIGHT_POLICY_CONTINUE,
    }
)
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """How a version differs from an earlier one, per weight in the order of the specs.

    Attributes:
        crc32: CRC-32 of each whole weight.
    """

    base_version: int
    encoded_bytes: tuple[int, ...]
    crc32: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class UpdateRound:
    """One weight version in transit.

    Attributes:
        live: Server name -> server, of those that have not failed.
        update_id: Id of the update that the live servers have begun or will begin.
        failed: Server name -> cause, of those that have failed.
        delta: The changes that are sent; None: the weights are.
        keep_base: Whether the servers keep the weights as the base of a later delta.
        to_retry: Servers that need another update, with the whole weights.
        sent_bytes: Average bytes per server that took the version; None means all of the weights.
    """

    version: int
    policy: PolicyGroup
    config: WeightSyncConfig
    element_type: ElementType
    security: ServerSecurity
    specs: tuple[TensorSpec, ...]
    live: dict[str, WeightSyncClient]
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    failed: dict[str, str] = field(default_factory=dict)
    delta: Delta | None = None
    keep_base: bool = False
    to_retry: dict[str, WeightSyncClient] = field(default_factory=dict)
    sent_bytes: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of bytes to send per weight."""
        if self.delta is not None:
            return self.delta.encoded_bytes
        return tuple(num_bytes(spec, self.element_type) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Size of one copy of the weights."""
        return sum(num_bytes(spec, self.element_type) for spec in self.specs)

    @property
    def send_deadline_s(self) -> float:
        """Deadline of one attempt to send everything."""
        return self.config.push_deadline_s + self.num_bytes / _SENT_BYTES_PER_S

    def begin_request(self) -> pb.BeginUpdateRequest:
        """Returns the Begin request, without its transport."""
        request = pb.BeginUpdateRequest(
            update_id=self.update_id,
            weight_version=self.version,
            tensors=[tensor_spec_to_proto(spec, self.element_type) for spec in self.specs],
        )
        request.lease.FromMilliseconds(round(self.config.lease_s * 1000))
        if self.config.updates_in_place:
            request.in_place.in_flight = _IN_FLIGHT[self.config.in_flight]
        request.keep_base = self.keep_base
        if self.delta is not None:
            request.delta.base_weight_version = self.delta.base_version
            request.delta.encoded_bytes.extend(self.delta.encoded_bytes)
            request.delta.crc32.extend(self.delta.crc32)
        return request

    async def begin(
        self, request: pb.BeginUpdateRequest, *, again: Outcome | None = None
    ) -> dict[str, pb.BeginUpdateResponse]:
        """Begins the update on the live servers; `again` is as in `call_all`."""
        # A server may read files or wait for its completions before it answers. The servers that
        # have answered wait for it and would lose their leases.
        async with self.renewing_leases():
            return await self.call_all(
                lambda server: self.with_retries(lambda: server.begin(request)), again=again
            )

    async def commit(self) -> None:
        """Makes the live servers sample from the version. They must hold all of it."""
        policy = _IN_FLIGHT[self.config.in_flight]

        await self.call_all(
            lambda server: self.with_retries(lambda: server.commit(self.update_id, policy))
        )

    async def with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls Begin or Commit, and again only if the answer got lost."""
        return await with_retries(call, max_attempts=self.config.max_push_attempts)

    async def call_all(
        self, call: Callable[[WeightSyncClient], Awaitable[T]], *, again: Outcome | None = None
    ) -> dict[str, T]:
        """Calls all live servers at once and returns the answers by server name.

        A server that fails leaves the round. It goes to `to_retry` if the outcome of its error is
        `again`, or is `FULL` in answer to a delta; otherwise it goes to `failed`.

        Raises:
            WeightSyncError: Trainer and servers are incompatible.
        """
        servers = list(self.live.values())
        results = await asyncio.gather(*(call(s) for s in servers), return_exceptions=True)
        answers: dict[str, T] = {}
        errors: dict[str, WeightSyncError] = {}
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, WeightSyncError):
                errors[server.name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[server.name] = result
        retry_on = {again} if self.delta is None else {again, Outcome.FULL}
        retried = {name: e for name, e in errors.items() if e.outcome in retry_on}
        self.to_retry |= await self.take_out(retried)
        for error in retried.values():
            level = logging.INFO if error.outcome is Outcome.FULL else logging.WARNING
            _log.log(level, "version %d: %s", self.version, error)
        await self.remove_failed({name: e for name, e in errors.items() if name not in retried})
        return answers

    async def take_out(self, names: Iterable[str]) -> dict[str, WeightSyncClient]:
        """Removes servers for another attempt; frees them now rather than when their lease ends."""
        servers = {name: self.live.pop(name) for name in names}

        async def abort(server: WeightSyncClient) -> None:
            with contextlib.suppress(WeightSyncError):  # the server may be gone
                await server.abort(self.update_id)

        await asyncio.gather(*map(abort, servers.values()))
        return servers

    async def remove_failed(self, errors: Mapping[str, WeightSyncError]) -> None:
        """Removes servers, each with its error.

        Raises:
            WeightSyncError: Trainer and servers are incompatible.
        """
        await self.take_out(errors)
        for name, error in errors.items():
            if error.outcome is Outcome.FATAL:
                raise error
            self.failed[name] = str(error)
            _log.warning("version %d: %s", self.version, error)

    @contextlib.asynccontextmanager
    async def renewing_leases(self) -> AsyncIterator[None]:
        """Renews the leases of the live servers, while they receive bytes or wait for others."""

        async def renew(server: WeightSyncClient) -> None:
            while True:
                await asyncio.sleep(self.config.lease_s / 3)
                try:
                    await server.received(self.update_id)
                except WeightSyncError as error:  # the push, or the next Begin, reports more
                    _log.warning("lease not renewed: %s", error)

        tasks = [asyncio.create_task(renew(server)) for server in self.live.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
