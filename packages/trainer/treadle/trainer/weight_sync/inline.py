"""Inline transport: weights as chunks in the gRPC stream, from one rank to all servers at once.

Each weight is gathered once and cut once; all servers are sent the same messages, so that their
number does not multiply the memory. The slowest server sets the pace: a few messages wait for
each, then the rank waits. A stream that breaks is reported and the others go on; the driver asks
the server how far it got and calls again (`PushTarget.received_bytes`).
"""

import threading
from collections.abc import Sequence

import grpc

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.policy_commands import Push, PushTarget, SendReport
from treadle.trainer.weight_sync.errors import explain
from treadle.trainer.weight_sync.feed import Feed
from treadle.trainer.weight_sync.payload import WeightSource, chunk_message, slices, tensor_bytes

__all__ = ["CHANNEL_OPTIONS", "push"]

CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
_MESSAGES_AHEAD = 4
_PUSH_WEIGHTS = f"/{pb.DESCRIPTOR.services_by_name['WeightSyncService'].full_name}/PushWeights"


class _Stream:
    """One PushWeights call to one server, in a thread of its own."""

    def __init__(self, target: PushTarget, command: Push) -> None:
        self.target = target
        self.num_bytes = 0
        self.error: str | None = None
        self._deadline_s = command.deadline_s
        self._feed: Feed[bytes] = Feed(_MESSAGES_AHEAD)
        header = pb.PushWeightsRequest(header=pb.PushHeader(update_id=command.update_id))
        self._feed.put(header.SerializeToString())
        self._thread = threading.Thread(target=self._run, name=f"push-{target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with grpc.insecure_channel(self.target.address, options=CHANNEL_OPTIONS) as channel:
                # Without a serializer: the feed's messages are serialized already.
                call: grpc.StreamUnaryMultiCallable[bytes, pb.PushWeightsResponse]
                call = channel.stream_unary(
                    _PUSH_WEIGHTS, response_deserializer=pb.PushWeightsResponse.FromString
                )
                call(self._feed, timeout=self._deadline_s)
        except grpc.RpcError as error:
            self.error = str(explain(error, server=self.target.name, call="PushWeights"))
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
    specs = policy.weight_specs()
    place = {spec.name: index for index, spec in enumerate(specs)}
    mine = {index for index, spec in enumerate(specs) if spec.sender == rank}
    streams = [_Stream(target, command) for target in command.targets] if mine else []
    try:
        for named in policy.export_weights():
            index = place[named.name]
            if index in mine:
                _send(streams, index, tensor_bytes(named.tensor, command.element_type), command)
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
