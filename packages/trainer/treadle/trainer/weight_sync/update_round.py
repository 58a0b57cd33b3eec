"""The round: one weight version on its way to the servers that are still in the rotation.

Invariant: `live` are the servers that have failed at nothing in this round; a server that fails is
aborted, leaves, and its cause is in `failed`. A misfit (`Outcome.STOP`) ends the whole round, since
no server would take the version. A transport calls all live servers at once in `on_all`, and each
lease is renewed by a task of its own, so that a server that hangs costs its own deadlines only.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.config.schema import InFlight, WeightSyncConfig
from treadle.trainer.policy.group import PolicyGroup
from treadle.trainer.policy.types import ElementType, TensorSpec
from treadle.trainer.rollout.server_security import ServerSecurity
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.payload import num_bytes, tensor_spec_to_proto

__all__ = ["Changes", "Round"]

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
class Changes:
    """How a version differs from another one; in the order of the specs."""

    base_version: int
    encoded_bytes: tuple[int, ...]
    crc32: tuple[int, ...]
    """Of each whole weight."""


@dataclass(slots=True, kw_only=True)
class Round:
    """One version under way."""

    version: int
    policy: PolicyGroup
    config: WeightSyncConfig
    element_type: ElementType
    """That the servers are sent."""
    security: ServerSecurity
    specs: tuple[TensorSpec, ...]
    live: dict[str, WeightSyncClient]
    """By name."""
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    failed: dict[str, str] = field(default_factory=dict)
    """Name -> cause."""
    changes: Changes | None = None
    """That are sent instead of the weights."""
    keep_base: bool = False
    """Whether the servers keep the weights, to be sent changes of them."""
    refused: dict[str, WeightSyncClient] = field(default_factory=dict)
    """Servers that are to be sent the whole weights, under another update."""
    sent_bytes: float | None = None
    """To a server that took the version, on average; None: all of the weights."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that travel of each weight."""
        if self.changes is not None:
            return self.changes.encoded_bytes
        return tuple(num_bytes(spec, self.element_type) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Of one copy of the weights."""
        return sum(num_bytes(spec, self.element_type) for spec in self.specs)

    @property
    def send_deadline_s(self) -> float:
        """Of one attempt to send everything."""
        return self.config.push_deadline_s + self.num_bytes / _SENT_BYTES_PER_S

    def announcement(self) -> pb.BeginUpdateRequest:
        """Begin, without its transport."""
        request = pb.BeginUpdateRequest(
            update_id=self.update_id,
            weight_version=self.version,
            tensors=[tensor_spec_to_proto(spec, self.element_type) for spec in self.specs],
        )
        request.lease.FromMilliseconds(round(self.config.lease_s * 1000))
        if self.config.updates_in_place:
            request.in_place.in_flight = _IN_FLIGHT[self.config.in_flight]
        request.keep_base = self.keep_base
        if self.changes is not None:
            request.delta.base_weight_version = self.changes.base_version
            request.delta.encoded_bytes.extend(self.changes.encoded_bytes)
            request.delta.crc32.extend(self.changes.crc32)
        return request

    async def begin(
        self, request: pb.BeginUpdateRequest, *, again: Outcome | None = None
    ) -> dict[str, pb.BeginUpdateResponse]:
        """Opens the update on the live servers; `again` as in `on_all`."""
        # One may read files, or wait for its completions to end, and the others wait for it.
        async with self.renewing():
            return await self.on_all(
                lambda server: self.answer(lambda: server.begin(request)), again=again
            )

    async def commit(self) -> None:
        """Makes the live servers, which hold everything, sample from the version."""
        policy = _IN_FLIGHT[self.config.in_flight]

        await self.on_all(lambda server: self.answer(lambda: server.commit(self.update_id, policy)))

    async def answer(self, call: Callable[[], Awaitable[T]]) -> T:
        """What Begin or Commit answers; asks again for an answer that got lost, and only then."""
        for _ in range(self.config.max_push_attempts - 1):
            try:
                return await call()
            except WeightSyncError as error:
                if error.outcome is not Outcome.RESUME:
                    raise
        return await call()

    async def on_all(
        self, call: Callable[[WeightSyncClient], Awaitable[T]], *, again: Outcome | None = None
    ) -> dict[str, T]:
        """Calls every live server at once; one that fails leaves the round.

        It is `refused` if what its error asks for is to begin `again`, or without changes.
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
        asked = {again} if self.changes is None else {again, Outcome.FULL}
        refused = {name: e for name, e in errors.items() if e.outcome in asked}
        self.refused |= await self.set_aside(refused)
        for error in refused.values():
            level = logging.INFO if error.outcome is Outcome.FULL else logging.WARNING
            _log.log(level, "version %d: %s", self.version, error)
        await self.drop({name: e for name, e in errors.items() if name not in refused})
        return answers

    async def set_aside(self, names: Iterable[str]) -> dict[str, WeightSyncClient]:
        """Takes servers out, for another attempt; frees them now, not when their lease ends."""
        servers = {name: self.live.pop(name) for name in names}

        async def abort(server: WeightSyncClient) -> None:
            with contextlib.suppress(WeightSyncError):  # it may not answer any more
                await server.abort(self.update_id)

        await asyncio.gather(*map(abort, servers.values()))
        return servers

    async def drop(self, errors: Mapping[str, WeightSyncError]) -> None:
        """Lets servers leave, each for its error.

        Raises:
            WeightSyncError: trainer and servers do not fit.
        """
        await self.set_aside(errors)
        for name, error in errors.items():
            if error.outcome is Outcome.STOP:
                raise error
            self.failed[name] = str(error)
            _log.warning("version %d: %s", self.version, error)

    @contextlib.asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Keeps the leases while bytes are on the way, or another server makes these wait."""

        async def renew(server: WeightSyncClient) -> None:
            while True:
                await asyncio.sleep(self.config.lease_s / 3)
                try:
                    await server.received(self.update_id)
                except WeightSyncError as error:  # the push, or Begin after it, will say more
                    _log.warning("lease not renewed: %s", error)

        tasks = [asyncio.create_task(renew(server)) for server in self.live.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
