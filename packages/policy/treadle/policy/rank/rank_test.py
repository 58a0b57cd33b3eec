import re
import socket
from typing import Any

import pytest

from treadle.policy.rank.rank import PolicyRank, _kind, main
from treadle.policy.v1.errors_pb2 import FailureKind
from treadle.policy.v1.rank_service_pb2 import OpenRendezvousRequest
from treadle.policy.v1.weights_service_pb2 import GetWeightSpecsRequest


def test_nobody_takes_the_port_at_which_the_ranks_are_to_meet() -> None:
    rank = PolicyRank("127.0.0.1")
    host, _, port = rank.execute(OpenRendezvousRequest()).address.rpartition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))


def test_a_rank_prints_what_it_would_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(
        r"treadle-policy \S+, megatron 0\.\S+, torch 2\.\S+, Python 3\.\S+\n",
        capsys.readouterr().out,
    )


def _raised_in(module: str, error: Exception) -> Exception:
    """The error, as a function of this module raises it."""
    namespace: dict[str, Any] = {"__name__": module, "error": error}
    exec("def fail():\n    raise error", namespace)
    with pytest.raises(type(error)) as caught:
        namespace["fail"]()
    return caught.value


def _kind_of(error: Exception) -> str:
    name = FailureKind.Name(_kind(error, GetWeightSpecsRequest()))
    return name.removeprefix("FAILURE_KIND_").lower()


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("torch.distributed.distributed_c10d", "peer"),
        ("megatron.core.pipeline_parallel.p2p_communication", "peer"),
        ("megatron.core.distributed.param_and_grad_buffer", "peer"),
        ("megatron.core.tensor_parallel.layers", "peer"),
        ("torch.nn.modules.linear", "bug"),
        ("treadle.policy.backends.megatron.backend", "bug"),
    ],
)
def test_the_end_of_another_rank_is_told_by_where_it_is_noticed(module: str, kind: str) -> None:
    assert _kind_of(_raised_in(module, RuntimeError("any text"))) == kind


def test_the_end_of_another_rank_is_told_by_the_type_of_the_error() -> None:
    from torch import OutOfMemoryError
    from torch.distributed import DistBackendError, DistNetworkError

    for error in (DistBackendError("any text"), DistNetworkError("any text")):
        assert _kind_of(_raised_in("treadle.policy.rank.rank", error)) == "peer"
    ours = _raised_in("megatron.core.tensor_parallel.layers", OutOfMemoryError("gloo, nccl"))
    assert _kind_of(ours) == "bug"
    assert _kind_of(ValueError("never raised")) == "bug"
