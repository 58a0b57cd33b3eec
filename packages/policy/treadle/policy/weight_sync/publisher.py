"""The publisher: sends one weight version to all servers.

Invariant: no server gets a commit before every server in the rotation holds every byte, so that the
servers disagree only for as long as the commits take. A server that fails on the way, or at its
commit, is aborted and named in the report; the others continue.

Each transport sends the bytes its own way (`transports/`, `delta.py`). What they share (Begin,
Commit and which servers are left) is the `UpdateRound`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import ElementType, TensorSpec
from treadle.policy.config.weight_sync import (
    CollectiveTransportConfig,
    FileTransportConfig,
    InlineTransportConfig,
    SharedMemoryTransportConfig,
    WeightSyncConfig,
)
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.delta import DeltaPublisher
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.payload import specs_of
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.policy.weight_sync.transports.collective import CollectivePublisher
from treadle.policy.weight_sync.transports.file import publish_files, send_files
from treadle.policy.weight_sync.transports.inline import publish_inline, push_all
from treadle.policy.weight_sync.transports.shared_memory import publish_shared_memory
from treadle.policy.weight_sync.update_round import UpdateRound

__all__ = ["PublishReport", "WeightPublisher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """The result of publishing one version.

    Attributes:
        num_bytes: Size of one copy of the weights.
        sent_bytes: Average bytes sent per server; fewer than `num_bytes` with deltas.
        served: Names of the servers that now sample from this version.
        failed: Server name -> cause, of the servers that do not.
    """

    version: int
    num_bytes: int
    sent_bytes: int
    served: tuple[str, ...]
    failed: Mapping[str, str]
    time_s: float


class WeightPublisher:
    """Publishes versions, one at a time."""

    def __init__(
        self,
        policy: PolicyGroup,
        config: WeightSyncConfig,
        *,
        element_type: ElementType,
        directory: Path,
        security: ServerSecurity | None = None,
    ) -> None:
        """Makes no call yet.

        Args:
            security: How the ranks speak to the servers; None means plain text.
        """
        self._policy = policy
        self._config = config
        self._element_type = element_type
        self._directory = directory
        self._security = security or ServerSecurity()
        self._specs: tuple[TensorSpec, ...] = ()
        self._collective = CollectivePublisher()
        self._delta = DeltaPublisher()

    async def publish(self, version: int, servers: Sequence[WeightSyncClient]) -> PublishReport:
        """Makes the servers sample from the policy's present weights, as `version`.

        Raises:
            WeightSyncError: No server took the version, or trainer and servers are incompatible.
            PolicyError: A policy rank failed.
        """
        started = time.perf_counter()
        if not self._specs:
            response = (await self._policy.call(weights_pb.GetWeightSpecsRequest()))[0]
            self._specs = specs_of(response)
        update_round = UpdateRound(
            version=version,
            policy=self._policy,
            config=self._config,
            element_type=self._element_type,
            security=self._security,
            specs=self._specs,
            live={server.name: server for server in servers},
        )
        await self._send(update_round)
        if not update_round.live:
            causes = "\n".join(update_round.failed.values())
            raise WeightSyncError(
                f"no rollout server took weight version {version}:\n{causes}", Outcome.REPLACE
            )
        return PublishReport(
            version=version,
            num_bytes=update_round.num_bytes,
            sent_bytes=update_round.num_bytes
            if update_round.sent_bytes is None
            else round(update_round.sent_bytes),
            served=tuple(update_round.live),
            failed=update_round.failed,
            time_s=time.perf_counter() - started,
        )

    async def _send(self, update_round: UpdateRound) -> None:
        delta, directory = self._config.delta.enabled, self._directory
        match self._config.transport:
            case InlineTransportConfig() as transport if delta:
                push = partial(push_all, transport=transport)
                publish = partial(publish_inline, transport=transport)
                await self._delta.publish(update_round, push, publish)
            case FileTransportConfig() if delta:
                write = partial(send_files, directory=directory)
                rewrite = partial(publish_files, directory=directory)
                await self._delta.publish(update_round, write, rewrite)
            case InlineTransportConfig() as transport:
                await publish_inline(update_round, transport)
            case FileTransportConfig():
                await publish_files(update_round, directory)
            case SharedMemoryTransportConfig() as transport:
                await publish_shared_memory(update_round, transport)
            case CollectiveTransportConfig() as transport:
                await self._collective.publish(update_round, transport)
