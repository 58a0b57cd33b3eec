"""BeginUpdateRequest, decoded.

Invariant: what decodes names one transport, and says of it what that transport needs; how the
bytes come, how they are encoded and when they reach the engine fit one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.engine import CollectiveGroup, InFlightPolicy, TensorSpec
from treadle.rollout_server.errors import InvalidField
from treadle.rollout_server.services.codec import (
    decode_in_flight,
    decode_lease,
    decode_tensors,
    decode_update_id,
)
from treadle.rollout_server.services.collective_group import decode_group
from treadle.rollout_server.updates.delta import Delta, encoded_elements
from treadle.rollout_server.updates.files import WeightFiles

_TRANSPORTS = "inline, file, shared_memory or collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An update as its trainer announces it.

    Attributes:
        in_place: What becomes of sequences in flight; None: staged.
        source: Files, or the group of the collective transport; None: the bytes are pushed.
        delta: How the bytes are encoded; None: they are the tensors.
        keep_base: Whether the weights stay as the base of a delta.
    """

    update_id: str
    weight_version: int
    tensors: tuple[TensorSpec, ...]
    lease_s: float
    in_place: InFlightPolicy | None
    source: CollectiveGroup | WeightFiles | None
    delta: Delta | None
    keep_base: bool


def decode_begin(
    request: pb.BeginUpdateRequest,
    *,
    max_lease_s: float,
    num_workers: int,
    loopback_only: bool,
) -> Begin:
    """An update that the server can open, if its engine can.

    Args:
        request: As it came.
        max_lease_s: Longest lease.
        num_workers: Of the engine.
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
        source = decode_group(
            request.collective,
            num_tensors=len(tensors),
            num_workers=num_workers,
            loopback_only=loopback_only,
        )
    if in_place is not None and (request.HasField("delta") or request.keep_base):
        raise InvalidField("in_place", "set", "unset with delta and keep_base, which are staged")
    if transport == "file":
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


def _decode_delta(request: pb.BeginUpdateRequest, tensors: Sequence[TensorSpec]) -> Delta:
    encoded_bytes = tuple(request.delta.encoded_bytes)
    if not request.delta.base_weight_version:
        raise InvalidField("delta.base_weight_version", 0, "the version that changed")
    _check_length("delta.encoded_bytes", len(encoded_bytes), len(tensors))
    _check_length("delta.crc32", len(request.delta.crc32), len(tensors))
    for index, (spec, size) in enumerate(zip(tensors, encoded_bytes, strict=True)):
        if encoded_elements(spec, size) is None:
            expected = f"0, or the bytes of a count, of positions and of elements of {spec.label}"
            raise InvalidField(f"delta.encoded_bytes[{index}]", size, expected)
    return Delta(
        base_version=request.delta.base_weight_version,
        encoded_bytes=encoded_bytes,
        crc32=tuple(request.delta.crc32),
    )


def _check_length(field: str, length: int, num_tensors: int) -> None:
    if length != num_tensors:
        raise InvalidField(field, f"{length} values", f"one for each of {num_tensors} tensors")
