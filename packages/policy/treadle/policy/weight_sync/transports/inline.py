"""Inline transport: the weights travel as chunks in gRPC streams, from each rank to all servers.

Data flow: the driver begins the update on all servers. Each rank exports its weights once, cuts
them once, and sends all servers the same messages, so that more servers take no more memory. The
driver begins the update again, gets how many bytes of each weight each server holds, and has the
ranks send what is missing. It commits when nothing is missing.

Who waits for whom: a rank waits for its slowest server, with a few messages queued per server. The
driver waits for all ranks. A stream that breaks is reported, the others continue.

Invariant: Begin is idempotent, so a push that broke resumes where it broke
(`PushTarget.received_bytes`), until the attempts are used up. Only servers that hold every byte
are committed.
"""

import logging
import threading
import zlib
from collections.abc import Iterator, Mapping

import grpc

from treadle.policy.config.weight_sync import InlineTransportConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError, explain
from treadle.policy.weight_sync.payload import WeightSource, own_weights, tensor_bytes
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.policy.weight_sync.transports.chunk_queue import ChunkQueue
from treadle.policy.weight_sync.update_round import UpdateRound
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

__all__ = ["publish_inline", "push", "push_all", "push_bytes"]

_MESSAGES_AHEAD = 4
_PUSH_WEIGHTS = f"/{pb.DESCRIPTOR.services_by_name['WeightSyncService'].full_name}/PushWeights"
_LENGTH_DELIMITED = 2
_CHUNK_TAG = bytes([pb.PushWeightsRequest.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_DATA_TAG = bytes([pb.WeightChunk.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_log = logging.getLogger(__name__)


# --- the driver's side ---------------------------------------------------------------------------


async def publish_inline(update_round: UpdateRound, transport: InlineTransportConfig) -> None:
    """Leaves in `update_round.live` the servers that sample from the version."""
    await push_all(update_round, transport)
    await update_round.commit()


async def push_all(update_round: UpdateRound, transport: InlineTransportConfig) -> None:
    """Leaves in `update_round.live` the servers that hold every byte."""
    chunk_bytes = transport.chunk_bytes
    attempts = update_round.config.max_push_attempts
    wanted = update_round.sizes
    request = update_round.begin_request()
    request.inline.SetInParent()
    errors: dict[str, str] = {}
    for attempt in range(attempts + 1):
        begun = await update_round.begin(request)
        incomplete = {
            name: tuple(response.received_bytes)
            for name, response in begun.items()
            if tuple(response.received_bytes) != wanted
        }
        if not incomplete:
            return
        if attempt == attempts:
            missing = "{}: bytes are missing after every push"
            causes = {name: errors.get(name, missing.format(name)) for name in incomplete}
            await update_round.remove_failed(
                {name: WeightSyncError(c, Outcome.REPLACE) for name, c in causes.items()}
            )
            return
        for cause in errors.values():
            _log.warning("version %d: pushing again: %s", update_round.version, cause)
        smallest = min(begun[name].max_chunk_bytes or chunk_bytes for name in incomplete)
        errors = await _push(update_round, incomplete, min(chunk_bytes, smallest))


async def _push(
    update_round: UpdateRound, received_bytes: Mapping[str, tuple[int, ...]], chunk_bytes: int
) -> dict[str, str]:
    """Has the ranks push what is missing; returns server name -> why its push broke."""
    request = weights_pb.PushRequest(
        update_id=update_round.update_id,
        element_type=update_round.element_type,
        targets=(
            weights_pb.PushTarget(
                name=name, address=update_round.live[name].address, received_bytes=received
            )
            for name, received in received_bytes.items()
        ),
        chunk_bytes=chunk_bytes,
        deadline_s=update_round.send_deadline_s,
        delta=update_round.delta is not None,
        security=update_round.security.message(),
    )
    async with update_round.renewing_leases():
        reports: list[weights_pb.PushResponse] = await update_round.policy.call(request)
    return {name: error for report in reports for name, error in report.errors.items()}


# --- the rank's side -----------------------------------------------------------------------------


def push(
    policy: WeightSource, request: weights_pb.PushRequest, *, rank: int
) -> weights_pb.PushResponse:
    """Sends this rank's weights to every target. Every rank must call it.

    The weights are exported even if no target needs one of this rank's, because the export is
    collective.
    """
    weights = own_weights(policy, policy.weight_specs(), rank)
    tensors = ((index, tensor_bytes(w.tensor, request.element_type)) for index, w in weights)
    return push_bytes(tensors, request)


def push_bytes(
    tensors: Iterator[tuple[int, memoryview]], request: weights_pb.PushRequest
) -> weights_pb.PushResponse:
    """Sends tensors, as (index in the announcement, bytes), to every target.

    A rank without tensors calls no server. The iterator is run to its end unless it raises.
    """
    streams: list[_Stream] = []
    try:
        for index, data in tensors:
            if not streams:
                streams = [_Stream(target, request) for target in request.targets]
            for offset in range(0, len(data), request.chunk_bytes):
                part = data[offset : offset + request.chunk_bytes]
                message = chunk_message(index, offset, part)
                for stream in streams:
                    stream.send(index, offset, part, message)
    finally:
        for stream in streams:
            stream.join()
    return weights_pb.PushResponse(
        num_bytes=sum(stream.num_bytes for stream in streams),
        errors={stream.target.name: stream.error for stream in streams if stream.error},
    )


class _Stream:
    """One PushWeights call to one server, in its own thread."""

    def __init__(self, target: weights_pb.PushTarget, request: weights_pb.PushRequest) -> None:
        self.target = target
        self.num_bytes = 0
        self.error: str | None = None
        self._deadline_s = request.deadline_s
        self._security = ServerSecurity.of(request.security)
        self._queue: ChunkQueue[bytes] = ChunkQueue(_MESSAGES_AHEAD)
        header = pb.PushWeightsRequest(header=pb.PushHeader(update_id=request.update_id))
        self._queue.put(header.SerializeToString())
        self._thread = threading.Thread(target=self._run, name=f"push-{target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            security = self._security.read()
            with security.open_blocking(self.target.address) as channel:
                # No serializer: the messages in the queue are serialized already.
                call: grpc.StreamUnaryMultiCallable[bytes, pb.PushWeightsResponse]
                call = channel.stream_unary(
                    _PUSH_WEIGHTS, response_deserializer=pb.PushWeightsResponse.FromString
                )
                call(self._queue, timeout=self._deadline_s, metadata=security.metadata)
        except grpc.RpcError as error:
            self.error = str(explain(error, server=self.target.name, call="PushWeights"))
        except OSError as error:  # the certificate or the token could not be read
            self.error = f"{self.target.name}: PushWeights: {error}"
        finally:
            self._queue.close()

    def send(self, index: int, offset: int, part: memoryview, message: bytes) -> None:
        """Sends the bytes of a chunk that the server does not hold yet."""
        held = self.target.received_bytes[index]
        if held >= offset + len(part):
            return
        if held > offset:  # an earlier push broke inside this chunk
            part = part[held - offset :]
            message = chunk_message(index, held, part)
        if self._queue.put(message):
            self.num_bytes += len(part)

    def join(self) -> None:
        """Waits until the server has answered or the stream has broken."""
        self._queue.finish()
        self._thread.join()


def chunk_message(index: int, offset: int, part: memoryview) -> bytes:
    """Returns a serialized `PushWeightsRequest` with one chunk, copying its data once.

    protobuf would copy the data into the chunk, the request and the result, which takes longer
    than sending them. Fields are written in the order of their numbers: the scalars, then the tag
    and length of `data`, then the data make up a `WeightChunk`.

    Args:
        part: Holds at least one byte.
    """
    scalars = pb.WeightChunk(tensor_index=index, offset=offset, crc32=zlib.crc32(part))
    head = scalars.SerializeToString() + _DATA_TAG + _varint(len(part))
    return b"".join((_CHUNK_TAG, _varint(len(head) + len(part)), head, part))


def _varint(value: int) -> bytes:
    """Encodes as https://protobuf.dev/programming-guides/encoding describes."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
