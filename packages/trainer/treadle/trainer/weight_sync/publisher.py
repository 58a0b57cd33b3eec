"""The publisher: one weight version to n servers.

Invariant: no server is told to commit before every server that is still in the rotation holds
every byte, so that the servers never disagree for longer than the commits take. A server that
fails on the way, or fails its commit, is aborted and named in the report; the others go on.

Inline: Begin on all; the ranks push to all that lack bytes, while the leases are renewed; Begin
again, which is idempotent and says how far each got; until nothing lacks or the attempts are
used up; Commit on all. File: the ranks write; Begin, with the checksums, makes the servers read;
Commit on all; the files are removed.
"""

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.config.schema import FileTransportConfig, WeightSyncConfig
from treadle.trainer.policy import ElementType, TensorSpec
from treadle.trainer.policy_commands import Push, PushTarget, SendReport, Specs, WriteFiles
from treadle.trainer.policy_group import PolicyGroup
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.payload import num_bytes, tensor_spec_to_proto

__all__ = ["PublishReport", "WeightPublisher"]

_PUSH_BYTES_PER_S = 50e6
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What became of one version."""

    version: int
    num_bytes: int
    """Of one copy of the weights."""
    served: tuple[str, ...]
    """Names of the servers that sample from this version now."""
    failed: Mapping[str, str]
    """Name -> cause, of those that do not."""
    time_s: float


@dataclass(slots=True)
class _Round:
    """One version under way."""

    version: int
    live: dict[str, WeightSyncClient]
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    failed: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, error: WeightSyncError) -> None:
        if error.outcome is Outcome.STOP:
            raise error
        self.live.pop(name, None)
        self.failed[name] = str(error)
        _log.warning("version %d: %s", self.version, error)


class WeightPublisher:
    """Publishes versions, one at a time."""

    def __init__(
        self,
        policy: PolicyGroup,
        config: WeightSyncConfig,
        *,
        element_type: ElementType,
        directory: Path,
    ) -> None:
        """Args: directory: where the files of the file transport go."""
        self._policy = policy
        self._config = config
        self._element_type = element_type
        self._directory = directory
        self._specs: tuple[TensorSpec, ...] = ()

    async def publish(self, version: int, servers: Sequence[WeightSyncClient]) -> PublishReport:
        """Makes the servers sample from the policy's present weights, called `version`.

        Raises:
            WeightSyncError: no server took the version, or trainer and servers do not fit.
            PolicyError: a policy rank failed.
        """
        started = time.perf_counter()
        if not self._specs:
            self._specs = (await self._policy.call(Specs()))[0]
        round_ = _Round(version=version, live={server.name: server for server in servers})
        if isinstance(self._config.transport, FileTransportConfig):
            await self._publish_files(round_)
        else:
            await self._push_all(round_, self._config.transport.chunk_bytes)
            await self._commit(round_)
        if not round_.live:
            causes = "\n".join(round_.failed.values())
            raise WeightSyncError(
                f"no rollout server took weight version {version}:\n{causes}", Outcome.REPLACE
            )
        return PublishReport(
            version=version,
            num_bytes=self._num_bytes,
            served=tuple(round_.live),
            failed=round_.failed,
            time_s=time.perf_counter() - started,
        )

    @property
    def _num_bytes(self) -> int:
        return sum(num_bytes(spec, self._element_type) for spec in self._specs)

    # --- inline --------------------------------------------------------------------------------

    async def _push_all(self, round_: _Round, chunk_bytes: int) -> None:
        wanted = tuple(num_bytes(spec, self._element_type) for spec in self._specs)
        errors: dict[str, str] = {}
        for attempt in range(self._config.max_push_attempts + 1):
            begun = await self._begin(round_)
            lacking = {
                name: tuple(response.received_bytes)
                for name, response in begun.items()
                if tuple(response.received_bytes) != wanted
            }
            if not lacking:
                return
            if attempt == self._config.max_push_attempts:
                for name in lacking:
                    cause = errors.get(name, f"{name}: bytes are missing after every push")
                    await self._abort(round_, name)
                    round_.drop(name, WeightSyncError(cause, Outcome.REPLACE))
                return
            if errors:
                _log.warning("version %d: pushing again to %s", round_.version, ", ".join(lacking))
            smallest = min(begun[name].max_chunk_bytes or chunk_bytes for name in lacking)
            errors = await self._push(round_, lacking, min(chunk_bytes, smallest))

    async def _begin(self, round_: _Round) -> dict[str, pb.BeginUpdateResponse]:
        tensors = self._tensors()
        return await self._on_all(
            round_,
            lambda server: server.begin(
                round_.update_id, round_.version, tensors, lease_s=self._config.lease_s
            ),
        )

    async def _push(
        self, round_: _Round, lacking: Mapping[str, tuple[int, ...]], chunk_bytes: int
    ) -> dict[str, str]:
        """Target name -> why its push broke."""
        command = Push(
            update_id=round_.update_id,
            element_type=self._element_type,
            targets=tuple(
                PushTarget(name=name, address=round_.live[name].address, received_bytes=received)
                for name, received in lacking.items()
            ),
            chunk_bytes=chunk_bytes,
            deadline_s=self._config.push_deadline_s + self._num_bytes / _PUSH_BYTES_PER_S,
        )
        async with self._renewing(round_):
            reports = cast("list[SendReport]", await self._policy.call(command))
        return {name: error for report in reports for name, error in report.errors.items()}

    @contextlib.asynccontextmanager
    async def _renewing(self, round_: _Round) -> AsyncIterator[None]:
        """Keeps the leases of an update while its bytes are on the way.

        Each server has a task of its own: one that hangs must not cost the others their leases.
        """

        async def renew(server: WeightSyncClient) -> None:
            while True:
                await asyncio.sleep(self._config.lease_s / 3)
                try:
                    await server.received(round_.update_id)
                except WeightSyncError as error:  # the push, or Begin after it, will say more
                    _log.warning("lease not renewed: %s", error)

        tasks = [asyncio.create_task(renew(server)) for server in round_.live.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- file ----------------------------------------------------------------------------------

    async def _publish_files(self, round_: _Round) -> None:
        waiting = dict(round_.live)
        done: dict[str, WeightSyncClient] = {}
        for attempt in range(self._config.max_push_attempts):
            round_.update_id = uuid.uuid4().hex
            round_.live = dict(waiting)
            directory = self._directory / round_.update_id
            try:
                unreadable = await self._announce_files(
                    round_, directory, last=attempt + 1 == self._config.max_push_attempts
                )
                await self._commit(round_)
            finally:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            done |= round_.live
            waiting = unreadable
            if not waiting:
                break
        round_.live = done

    async def _announce_files(
        self, round_: _Round, directory: Path, *, last: bool
    ) -> dict[str, WeightSyncClient]:
        """Writes the files and has them read; the servers that want them written again."""
        command = WriteFiles(directory=directory, element_type=self._element_type)
        reports = cast("list[SendReport]", await self._policy.call(command))
        checksums = {name: crc for report in reports for name, crc in report.crc32.items()}
        again: dict[str, WeightSyncClient] = {}
        tensors = self._tensors()

        async def begin(server: WeightSyncClient) -> None:
            try:
                await server.begin(
                    round_.update_id,
                    round_.version,
                    tensors,
                    lease_s=self._config.lease_s,
                    directory=directory,
                    crc32=[checksums[spec.name] for spec in self._specs],
                )
            except WeightSyncError as error:
                if last or error.outcome is not Outcome.RESTART:
                    raise
                again[server.name] = server

        await self._on_all(round_, begin)
        for name in again:
            del round_.live[name]
        return again

    # --- both ----------------------------------------------------------------------------------

    def _tensors(self) -> list[pb.TensorSpec]:
        return [tensor_spec_to_proto(spec, self._element_type) for spec in self._specs]

    async def _commit(self, round_: _Round) -> None:
        async def commit(server: WeightSyncClient) -> None:
            for attempt in range(self._config.max_push_attempts):
                try:
                    await server.commit(round_.update_id)
                    return
                except WeightSyncError as error:
                    last = attempt + 1 == self._config.max_push_attempts
                    if last or error.outcome is not Outcome.RESUME:
                        raise  # only an answer that got lost is worth asking for again

        await self._on_all(round_, commit)

    async def _on_all(
        self, round_: _Round, call: Callable[[WeightSyncClient], Awaitable[T]]
    ) -> dict[str, T]:
        """Calls every live server at once; one that fails leaves the round."""
        servers = list(round_.live.values())
        results = await asyncio.gather(*(call(s) for s in servers), return_exceptions=True)
        answers: dict[str, T] = {}
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, WeightSyncError):
                await self._abort(round_, server.name)
                round_.drop(server.name, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[server.name] = result
        return answers

    async def _abort(self, round_: _Round, name: str) -> None:
        """Frees the server now rather than when its lease runs out, if it still answers."""
        with contextlib.suppress(WeightSyncError):
            await round_.live[name].abort(round_.update_id)
