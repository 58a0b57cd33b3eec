import gzip
import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.agent_loop import SetupError
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig, ProfileConfig
from treadle.policy.config.settings import to_json
from treadle.policy.rank.rank import PolicyRank, _kind, main
from treadle.policy.testing.tiny import sequences, write_model
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.errors_pb2 import FailureKind
from treadle.policy.v1.rank_service_pb2 import InitializeRequest, OpenRendezvousRequest
from treadle.policy.v1.weights_service_pb2 import GetWeightSpecsRequest


def test_nobody_takes_the_port_at_which_the_ranks_are_to_meet() -> None:
    rank = PolicyRank("127.0.0.1")
    response: Any = rank.execute(OpenRendezvousRequest())
    host, _, port = response.address.rpartition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))


def test_a_rank_prints_what_it_would_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(
        r"treadle-policy \S+, megatron 0\.\S+, torch 2\.\S+, Python 3\.\S+\n",
        capsys.readouterr().out,
    )
    assert main(["--version", "fake"]) == 0
    assert ", fake " in capsys.readouterr().out
    with pytest.raises(SetupError, match="has no backend 'other'"):
        main(["--version", "other"])


def test_the_updates_that_are_to_be_are_profiled(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    profile = ProfileConfig(first_step=2, num_steps=1, directory=tmp_path / "profiles")
    rank = PolicyRank("127.0.0.1")
    policy = to_json(PolicyConfig(backend="fake", profile=profile))
    rank.execute(InitializeRequest(policy=policy, model_path=str(tmp_path), rank=0, world_size=1))
    algorithm = to_json(AlgorithmConfig())
    for _ in range(3):
        rank.execute(pb.UpdateRequest(algorithm=algorithm, temperature=1.0), sequences())
    (trace,) = (tmp_path / "profiles").iterdir()
    assert trace.name == "update-step000002-rank0.json.gz"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_gradient_and_a_step_are_an_update(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    algorithm = to_json(AlgorithmConfig(loss_aggregation="token-sum"))
    batch = sequences()
    ranks = [PolicyRank("127.0.0.1") for _ in range(2)]
    policy = to_json(PolicyConfig(backend="fake", optimizer=OptimizerConfig(lr=0.01)))
    for rank in ranks:
        rank.execute(
            InitializeRequest(policy=policy, model_path=str(tmp_path), rank=0, world_size=1)
        )
    whole: Any = ranks[0].execute(pb.UpdateRequest(algorithm=algorithm, temperature=1.0), batch)
    request = pb.ForwardBackwardRequest(algorithm=algorithm, temperature=1.0, keep_tokens=True)
    parts: list[Any] = [ranks[1].execute(request, part) for part in (batch[:2], batch[2:])]
    step: Any = ranks[1].execute(pb.OptimizerStepRequest())
    assert sum(part.loss for part in parts) == pytest.approx(whole.steps[0].loss)
    assert step.grad_norm == pytest.approx(whole.steps[0].grad_norm)
    assert (step.step, step.skipped) == (1, False)
    assert b"".join(part.tokens.logprobs for part in parts) == whole.tokens.logprobs
    asked = pb.LogProbsRequest(temperature=1.0)
    answers: list[Any] = [rank.execute(asked, batch) for rank in ranks]
    first, second = (np.frombuffer(answer.logprobs, "<f4") for answer in answers)
    assert first == pytest.approx(second, abs=1e-6)


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
