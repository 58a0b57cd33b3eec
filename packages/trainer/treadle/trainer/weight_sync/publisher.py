"""The publisher: one weight version to n servers.

Invariant: no server is told to commit before every server that is still in the rotation holds
every byte, so that the servers never disagree for longer than the commits take. A server that
fails on the way, or fails its commit, is aborted and named in the report; the others go on.

How the bytes travel is the transport's: `publish_inline`, `publish_delta`, `publish_file`,
`publish_shared_memory`. What they have in common, Begin, Commit and who is left, is the `Round`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treadle.trainer.config.schema import (
    CollectiveTransportConfig,
    FileTransportConfig,
    InlineTransportConfig,
    SharedMemoryTransportConfig,
    WeightSyncConfig,
)
from treadle.trainer.policy.commands import Specs
from treadle.trainer.policy.group import PolicyGroup
from treadle.trainer.policy.types import ElementType, TensorSpec
from treadle.trainer.rollout.server_security import ServerSecurity
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.publish_delta import DeltaPublisher
from treadle.trainer.weight_sync.transports.publish_collective import CollectivePublisher
from treadle.trainer.weight_sync.transports.publish_file import publish_files, send_files
from treadle.trainer.weight_sync.transports.publish_inline import publish_inline, push_all
from treadle.trainer.weight_sync.transports.publish_shared_memory import publish_shared_memory
from treadle.trainer.weight_sync.update_round import Round

__all__ = ["PublishReport", "WeightPublisher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What became of one version."""

    version: int
    num_bytes: int
    """Of one copy of the weights."""
    sent_bytes: int
    """That brought a server the version, on average: fewer than `num_bytes` where by changes."""
    served: tuple[str, ...]
    """Names of the servers that sample from this version now."""
    failed: Mapping[str, str]
    """Name -> cause, of those that do not."""
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
            policy: has the weights.
            config: how they travel.
            element_type: that the servers are sent.
            directory: where the files of the file transport go.
            security: how the ranks speak to the servers; plain where there is none.
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
        """Makes the servers sample from the policy's present weights, called `version`.

        Raises:
            WeightSyncError: no server took the version, or trainer and servers do not fit.
            PolicyError: a policy rank failed.
        """
        started = time.perf_counter()
        if not self._specs:
            self._specs = (await self._policy.call(Specs()))[0]
        round_ = Round(
            version=version,
            policy=self._policy,
            config=self._config,
            element_type=self._element_type,
            security=self._security,
            specs=self._specs,
            live={server.name: server for server in servers},
        )
        await self._send(round_)
        if not round_.live:
            causes = "\n".join(round_.failed.values())
            raise WeightSyncError(
                f"no rollout server took weight version {version}:\n{causes}", Outcome.REPLACE
            )
        return PublishReport(
            version=version,
            num_bytes=round_.num_bytes,
            sent_bytes=round_.num_bytes if round_.sent_bytes is None else round(round_.sent_bytes),
            served=tuple(round_.live),
            failed=round_.failed,
            time_s=time.perf_counter() - started,
        )

    async def _send(self, round_: Round) -> None:
        delta, directory = self._config.delta.enabled, self._directory
        match self._config.transport:
            case InlineTransportConfig() as transport if delta:
                push = partial(push_all, transport=transport)
                publish = partial(publish_inline, transport=transport)
                await self._delta.publish(round_, push, publish)
            case FileTransportConfig() if delta:
                write = partial(send_files, directory=directory)
                rewrite = partial(publish_files, directory=directory)
                await self._delta.publish(round_, write, rewrite)
            case InlineTransportConfig() as transport:
                await publish_inline(round_, transport)
            case FileTransportConfig():
                await publish_files(round_, directory)
            case SharedMemoryTransportConfig() as transport:
                await publish_shared_memory(round_, transport)
            case CollectiveTransportConfig() as transport:
                await self._collective.publish(round_, transport)
