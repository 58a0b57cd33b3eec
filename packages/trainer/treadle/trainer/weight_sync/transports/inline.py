"""Inline transport: weights as chunks in the gRPC stream, from one rank to all servers at once.

Each weight is gathered once and cut once; all servers are sent the same messages, so that their
number does not multiply the memory. The slowest server sets the pace: a few messages wait for
each, then the rank waits. A stream that breaks is reported and the others go on; the driver asks
the server how far it got and calls again (`PushTarget.received_bytes`).
"""

import threading
from collections.abc import Iterator, Sequence

import grpc

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.policy.commands import Push, PushTarget, SendReport
from treadle.trainer.weight_sync.errors import explain
from treadle.trainer.weight_sync.payload import WeightSource, chunk_message, slices, tensor_bytes
from treadle.trainer.weight_sync.transports.chunk_queue import Feed

__all__ = ["push", "push_bytes"]

_MESSAGES_AHEAD = 4
_PUSH_WEIGHTS = f"/{pb.DESCRIPTOR.services_by_name['WeightSyncService'].full_name}/PushWeights"


class _Stream:
    """One PushWeights call to one server, in a thread of its own."""

    def __init__(self, target: PushTarget, command: Push) -> None:
        self.target = target
        self.num_bytes = 0
        self.error: str | None = None
        self._deadline_s = command.deadline_s
        self._security = command.security
        self._feed: Feed[bytes] = Feed(_MESSAGES_AHEAD)
        header = pb.PushWeightsRequest(header=pb.PushHeader(update_id=command.update_id))
        self._feed.put(header.SerializeToString())
        self._thread = threading.Thread(target=self._run, name=f"push-{target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            security = self._security.read()
            with security.open_blocking(self.target.address) as channel:
                # Without a serializer: the feed's messages are serialized already.
                call: grpc.StreamUnaryMultiCallable[bytes, pb.PushWeightsResponse]
                call = channel.stream_unary(
                    _PUSH_WEIGHTS, response_deserializer=pb.PushWeightsResponse.FromString
                )
                call(self._feed, timeout=self._deadline_s, metadata=security.metadata)
        except grpc.RpcError as error:
            self.error = str(explain(error, server=self.target.name, call="PushWeights"))
        except OSError as error:  # the certificate or the token could not be read
            self.error = f"{self.target.name}: PushWeights: {error}"
        finally:
            self._feed.close()

    def send(self, index: int, offset: int, part: memoryview, whole: bytes) -> None:
        """Sends what the server lacks of a chunk; `whole` is the chunk as a message."""
        held = self.target.received_bytes[index]
        if held >= offset + len(part):
            return
        if held > offset:  # an earlier push broke off inside this chunk
            part = part[held - offset :]
            whole = chunk_message(index, held, part)
        if self._feed.put(whole):
            self.num_bytes += len(part)

    def join(self) -> None:
        """Waits until the server has answered, or the stream has broken."""
        self._feed.finish()
        self._thread.join()


def push(policy: WeightSource, command: Push, *, rank: int) -> SendReport:
    """Sends this rank's weights to every target; every rank must call it.

    The weights are exported even when no target lacks one of this rank's, because the export is
    collective.
    """
    return push_bytes(_weights(policy, command, rank), command)


def _weights(policy: WeightSource, command: Push, rank: int) -> Iterator[tuple[int, memoryview]]:
    """(place in the announcement, bytes) of this rank's weights."""
    specs = policy.weight_specs()
    mine = {spec.name: index for index, spec in enumerate(specs) if spec.sender == rank}
    for named in policy.export_weights():
        if (index := mine.get(named.name)) is not None:
            yield index, tensor_bytes(named.tensor, command.element_type)


def push_bytes(tensors: Iterator[tuple[int, memoryview]], command: Push) -> SendReport:
    """Sends what a rank has of each tensor, (place in the announcement, bytes), to every target.

    A rank that has nothing calls no server. All of `tensors` is read in any case.
    """
    streams: list[_Stream] = []
    try:
        for index, data in tensors:
            if not streams:
                streams = [_Stream(target, command) for target in command.targets]
            _send(streams, index, data, command)
    finally:
        for stream in streams:
            stream.join()
    return SendReport(
        num_bytes=sum(stream.num_bytes for stream in streams),
        crc32={},
        errors={stream.target.name: stream.error for stream in streams if stream.error},
    )


def _send(streams: Sequence[_Stream], index: int, data: memoryview, command: Push) -> None:
    for offset, part in slices(data, command.chunk_bytes):
        message = chunk_message(index, offset, part)
        for stream in streams:
            stream.send(index, offset, part, message)
