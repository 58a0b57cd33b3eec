"""BeginUpdateRequest, decoded.

Invariant: a request that decodes names one transport and has what that transport needs; how the
bytes come, how they are encoded and when they reach the engine fit one another.

Of a collective group the senders have the ranks from 0 on, each sends something, and this server's
workers have the ranks after them, within the group. Rendezvous beyond loopback is allowed only
where the server itself may be reached there without TLS, since a group has none.
"""

from collections.abc import Sequence

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.address import Address
from treadle.rollout_server.engine import CollectiveGroup, TensorSpec
from treadle.rollout_server.errors import InvalidField
from treadle.rollout_server.services.codec import (
    MAX_NAME_BYTES,
    check_text,
    decode_in_flight,
    decode_lease,
    decode_tensors,
    decode_update_id,
)
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.delta import DeltaEncoding, encoded_elements
from treadle.rollout_server.updates.files import WeightFiles

_TRANSPORTS = "inline, file, shared_memory or collective"
_BACKENDS = ("gloo", "nccl")
_MAX_PATH_BYTES = 4096
"""As Linux takes a path."""


def decode_begin(
    request: pb.BeginUpdateRequest,
    *,
    max_lease_s: float,
    num_workers: int,
    loopback_only: bool,
) -> Begin:
    """Returns an update that the server can open, if its engine can.

    Args:
        num_workers: Number of the engine's workers.
        loopback_only: Whether a collective group must meet on this machine.

    Raises:
        InvalidField: A value is not accepted.
    """
    transport = request.WhichOneof("transport")
    if transport is None:
        raise InvalidField("transport", "unset", _TRANSPORTS)
    tensors = decode_tensors(request.tensors)
    in_place = None
    if request.HasField("in_place"):
        in_place = decode_in_flight(request.in_place.in_flight, field="in_place.in_flight")
    source: CollectiveGroup | WeightFiles | None = None
    if transport == "collective":
        if in_place is None:
            raise InvalidField("in_place", "unset", "set: collective transport has no other way")
        source = _decode_group(
            request.collective,
            num_tensors=len(tensors),
            num_workers=num_workers,
            loopback_only=loopback_only,
        )
    if in_place is not None and (request.HasField("delta") or request.keep_base):
        raise InvalidField("in_place", "set", "unset with delta and keep_base, which are staged")
    if transport == "file":
        # A path of millions of parts would be looked up for minutes.
        check_text("file.directory", request.file.directory, least=0, at_most=_MAX_PATH_BYTES)
        _check_length("file.crc32", len(request.file.crc32), len(tensors))
        source = WeightFiles(directory=request.file.directory, crc32=tuple(request.file.crc32))
    return Begin(
        update_id=decode_update_id(request.update_id),
        weight_version=request.weight_version,
        tensors=tensors,
        lease_s=decode_lease(request, max_s=max_lease_s),
        in_place=in_place,
        source=source,
        delta=_decode_delta(request, tensors) if request.HasField("delta") else None,
        keep_base=request.keep_base,
    )


def _decode_delta(request: pb.BeginUpdateRequest, tensors: Sequence[TensorSpec]) -> DeltaEncoding:
    if not request.delta.base_weight_version:
        raise InvalidField("delta.base_weight_version", 0, "the version that changed")
    _check_length("delta.encoded_bytes", len(request.delta.encoded_bytes), len(tensors))
    _check_length("delta.crc32", len(request.delta.crc32), len(tensors))
    encoded_bytes = tuple(request.delta.encoded_bytes)
    for index, (spec, size) in enumerate(zip(tensors, encoded_bytes, strict=True)):
        if encoded_elements(spec, size) is None:
            expected = f"0, or the bytes of a count, of positions and of elements of {spec.label}"
            raise InvalidField(f"delta.encoded_bytes[{index}]", size, expected)
    return DeltaEncoding(
        base_version=request.delta.base_weight_version,
        encoded_bytes=encoded_bytes,
        crc32=tuple(request.delta.crc32),
    )


def _decode_group(
    transport: pb.CollectiveTransport, *, num_tensors: int, num_workers: int, loopback_only: bool
) -> CollectiveGroup:
    """Returns the group that the engine's workers are to join; raises as `decode_begin`."""
    if transport.backend not in _BACKENDS:
        raise InvalidField("collective.backend", repr(transport.backend), " or ".join(_BACKENDS))
    _check_rendezvous(transport.rendezvous, loopback_only=loopback_only)
    check_text("collective.group_name", transport.group_name, least=1, at_most=MAX_NAME_BYTES)
    if not transport.bucket_bytes:
        raise InvalidField("collective.bucket_bytes", 0, "at least 1")
    _check_length("collective.senders", len(transport.senders), num_tensors)
    senders = tuple(transport.senders)
    num_senders = len(set(senders))
    if max(senders) != num_senders - 1:
        expected = f"the {num_senders} ranks from 0 on"
        raise InvalidField("collective.senders", sorted(set(senders)), expected)
    last = transport.world_size - num_workers
    if not num_senders <= transport.first_rank <= last:
        expected = (
            f"from {num_senders} to {last}: after the senders, and with room for "
            f"{num_workers} workers in a group of {transport.world_size}"
        )
        raise InvalidField("collective.first_rank", transport.first_rank, expected)
    return CollectiveGroup(
        backend=transport.backend,
        rendezvous=transport.rendezvous,
        group_name=transport.group_name,
        world_size=transport.world_size,
        first_rank=transport.first_rank,
        bucket_bytes=transport.bucket_bytes,
        senders=senders,
    )


def _check_rendezvous(text: str, *, loopback_only: bool) -> None:
    try:
        address = Address.parse(text)
    except ValueError:
        raise InvalidField("collective.rendezvous", repr(text), "host:port") from None
    if loopback_only and not address.on_loopback:
        expected = (
            "on loopback, since a group has no TLS; in a trusted network start the server with "
            "--weights.allow_plaintext_group true"
        )
        raise InvalidField("collective.rendezvous", repr(text), expected)


def _check_length(field: str, length: int, num_tensors: int) -> None:
    if length != num_tensors:
        raise InvalidField(field, f"{length} values", f"one for each of {num_tensors} tensors")
