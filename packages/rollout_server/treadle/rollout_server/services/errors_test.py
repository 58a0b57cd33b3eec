import base64
import inspect

import pytest

from treadle.rollout.v1 import errors_pb2 as pb
from treadle.rollout_server import errors
from treadle.rollout_server.services.errors import ELSEWHERE, TABLE, message_of, to_status


def test_every_reason_has_an_exception_or_belongs_elsewhere() -> None:
    ours = {reason for _, reason in TABLE.values()}
    assert not ours & ELSEWHERE
    assert ours | ELSEWHERE == set(pb.ErrorReason.values()) - {pb.ERROR_REASON_UNSPECIFIED}


@pytest.mark.parametrize(
    "error",
    [
        errors.UpdateIncomplete(range(100_000, 140_000)),
        errors.TensorMismatch("n" * 99_999, "x" * 99_999, "y" * 99_999),
        errors.InvalidField("kinds", list(range(99_999)), "less"),
    ],
)
def test_no_status_outgrows_what_grpc_takes(error: errors.RolloutServerError) -> None:
    code, status = to_status(error)
    in_headers = len(base64.b64encode(status.SerializeToString())) + len(message_of(error))
    assert in_headers < 8192
    assert status.code == code.value[0]


def test_every_exception_has_a_reason() -> None:
    classes = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RolloutServerError) and kind is not errors.RolloutServerError
    }
    assert set(TABLE) == classes
