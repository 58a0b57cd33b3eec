"""CollectiveTransport, decoded.

Invariant: of a group that decodes, the senders have the ranks from 0 on, each sends something, and
this server's workers have theirs after them, within the group. What lies beyond loopback is
allowed only where the server itself may be reached there without TLS, since a group has none.
"""

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.address import Address
from treadle.rollout_server.engine import CollectiveGroup
from treadle.rollout_server.errors import InvalidField

_BACKENDS = ("gloo", "nccl")


def decode_group(
    transport: pb.CollectiveTransport, *, num_tensors: int, num_workers: int, loopback_only: bool
) -> CollectiveGroup:
    """The group that the engine's workers are to join.

    Args:
        transport: As it came.
        num_tensors: Announced with it.
        num_workers: Of the engine.
        loopback_only: Whether it must meet on this machine.

    Raises:
        InvalidField: A value is not accepted.
    """
    if transport.backend not in _BACKENDS:
        raise InvalidField("collective.backend", repr(transport.backend), " or ".join(_BACKENDS))
    _check_rendezvous(transport.rendezvous, loopback_only=loopback_only)
    if not transport.group_name:
        raise InvalidField("collective.group_name", "empty", "a name that no other group has")
    if not transport.bucket_bytes:
        raise InvalidField("collective.bucket_bytes", 0, "at least 1")
    senders = tuple(transport.senders)
    if len(senders) != num_tensors:
        expected = f"one for each of {num_tensors} tensors"
        raise InvalidField("collective.senders", f"{len(senders)} values", expected)
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
            "--insecure_allow_plaintext_beyond_loopback true"
        )
        raise InvalidField("collective.rendezvous", repr(text), expected)
