import inspect

from treadle.rollout.v1 import errors_pb2 as pb
from treadle.rollout_server import errors
from treadle.rollout_server.services.errors import ELSEWHERE, TABLE


def test_every_reason_has_an_exception_or_belongs_elsewhere() -> None:
    ours = {reason for _, reason in TABLE.values()}
    assert not ours & ELSEWHERE
    assert ours | ELSEWHERE == set(pb.ErrorReason.values()) - {pb.ERROR_REASON_UNSPECIFIED}


def test_every_exception_has_a_reason() -> None:
    classes = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RolloutServerError) and kind is not errors.RolloutServerError
    }
    assert set(TABLE) == classes
