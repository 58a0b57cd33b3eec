"""Tests of the reason table."""

import grpc
import grpc.aio
import pytest

from treadle.agent_loop import GenerationError, RequestRejectedError
from treadle.agent_loop.rpc.errors import RULES, Action, classify
from treadle.rollout.v1 import errors_pb2


def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")


def test_the_table_is_total_over_the_contract() -> None:
    assert set(RULES) == set(errors_pb2.ErrorReason.values())


def test_what_is_waited_for_may_be_retried_by_the_runner_too() -> None:
    for rule in RULES.values():
        assert issubclass(rule.error, GenerationError)
        if rule.action is Action.WAIT:
            assert rule.error.retryable


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_without_a_reason_is_understood(code: grpc.StatusCode) -> None:
    failure = classify("h:1", failed(code))
    assert str(failure.error) == f"h:1: {code.name}: gone"
    leaves = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    assert not leaves or failure.action is Action.LEAVE


def test_a_message_that_is_too_large_is_not_taken_for_overload() -> None:
    """gRPC reports both as RESOURCE_EXHAUSTED; only ours has a reason."""
    failure = classify("h:1", failed(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert failure.action is Action.RAISE
    assert isinstance(failure.error, RequestRejectedError)
