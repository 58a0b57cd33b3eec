"""The policy rank: one process of the policy, `python -m treadle.policy.rank`.

It serves the contract to its driver (`server.py`) and executes requests in order until `Stop`, the
end of the driver, or a request that fails. Then the cause goes to the driver and the process exits,
because the other ranks may be waiting for it inside a collective operation and only the end of the
process frees them.
"""

import contextlib
import gc
import logging
import math
import platform
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from google.protobuf.message import Message

from treadle.agent_loop import SetupError
from treadle.agent_loop.rpc.driven import start_driven
from treadle.policy.backend import (
    CheckpointError,
    CriticBackend,
    Frame,
    PolicyBackend,
    Rendezvous,
)
from treadle.policy.backends import registry
from treadle.policy.client.methods import method_of, verb
from treadle.policy.client.shards import decode
from treadle.policy.client.types import LossAggregation, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.choices import BackendName, RankCause
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import AdamSettings, PolicyConfig, ProfileConfig
from treadle.policy.config.settings import from_json
from treadle.policy.rank.server import RankServer, ReceivedShard, RequestFailed
from treadle.policy.rank_time import RANK_TIME, spent_on
from treadle.policy.v1 import checkpoint_service_pb2 as checkpoint_pb
from treadle.policy.v1 import errors_pb2
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1 import weights_service_pb2 as weights_pb

if TYPE_CHECKING:
    from treadle.policy.weight_sync.delta import DeltaSender
    from treadle.policy.weight_sync.transports.collective import CollectiveSender
    from treadle.policy.weight_sync.transports.shared_memory import SharedMemorySender

__all__ = ["main"]

_COMMUNICATING = (
    "torch.distributed.",
    # They wait for operations that they left running.
    "megatron.core.distributed.",
    "megatron.core.pipeline_parallel.",
    "megatron.core.tensor_parallel.",
)
"""Modules that call operations with other ranks."""


_CAUSES: Final[Mapping[str, RankCause]] = {
    **dict.fromkeys(("Update", "UpdateCritic", "FineTune", "ForwardBackward"), "train"),
    "OptimizerStep": "optimizer",
    **dict.fromkeys(("LogProbs", "LogprobSums", "MeasureReference", "Values"), "logprobs"),
    **dict.fromkeys(("OpenRendezvous", "Initialize", "Load", "LoadCritic"), "start"),
    **dict.fromkeys(("Save", "SaveCritic", "SaveHf", "SaveAdapter"), "save"),
    **dict.fromkeys(("GetPolicyInfo", "ReportTime", "ReportOffload", "Stop"), "waiting"),
}
"""The cause of a request's time; parts may name their own cause. Other requests: weights."""


class PolicyRank:
    """Executes requests. Holds the policy once it is built."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._rank = 0
        self._profile = ProfileConfig()
        self._listener: socket.socket | None = None
        self._policy: PolicyBackend | None = None
        self._critic: CriticBackend | None = None
        self._sender: SharedMemorySender | None = None
        self._collective: CollectiveSender | None = None
        self._delta: DeltaSender | None = None

    def execute(self, request: Message, sequences: Sequence[TrainSequence] = ()) -> Message:
        """Returns the response; the parts of `policy.offload` are off the device then."""
        with spent_on(_CAUSES.get(verb(request), "weights")):
            response = self._execute(request, sequences)
        for model in self._models() if not isinstance(request, rank_pb.StopRequest) else ():
            model.release_memory()
        return response

    def receive(
        self, batch: int, take: Callable[[int], ReceivedShard]
    ) -> tuple[TrainSequence, ...]:
        """Returns the sequences of a batch; collective over the ranks that share them."""
        policy = self._built
        own: tuple[Frame | None, Frame | None] = None, None
        if policy.leads:
            shard, values = take(batch)
            own = shard.SerializeToString(), values
        head, memory = (policy.share(part) for part in own)
        return decode(pb.Shard.FromString(bytes(head)), memory)

    @property
    def _built(self) -> PolicyBackend:
        assert self._policy is not None, "Initialize comes first"
        return self._policy

    def _models(self) -> "Iterator[PolicyBackend | CriticBackend]":
        if self._policy is not None:
            yield self._policy
        if self._critic is not None:
            yield self._critic

    def _execute(self, request: Message, sequences: Sequence[TrainSequence]) -> Message:
        match request:
            case rank_pb.GetPolicyInfoRequest():
                return _info(request.backend)
            case rank_pb.OpenRendezvousRequest():
                self._listener = socket.create_server((self._host, 0))
                address = f"{self._host}:{self._listener.getsockname()[1]}"
                return rank_pb.OpenRendezvousResponse(address=address)
            case rank_pb.InitializeRequest():
                return self._build(request)
            case rank_pb.ReportTimeRequest():
                return rank_pb.ReportTimeResponse(seconds=RANK_TIME.take())
            case rank_pb.ReportOffloadRequest():
                return self._offload_report()
            case rank_pb.StopRequest():
                if self._collective is not None:
                    self._collective.close()
                if self._policy is not None:
                    self._policy.close()
                return rank_pb.StopResponse()
        if request.DESCRIPTOR.file is checkpoint_pb.DESCRIPTOR:
            return self._use_directory(request)
        if request.DESCRIPTOR.file is pb.DESCRIPTOR:
            return self._compute(request, sequences)
        return self._send_weights(request)

    def _use_directory(self, request: Any) -> Message:
        """Executes a request of `CheckpointService`: each has a directory, and no response."""
        directory = Path(request.directory)
        match request:
            case checkpoint_pb.SaveRequest():
                self._built.save(directory)
            case checkpoint_pb.LoadRequest():
                self._built.load(directory, weights_only=request.weights_only)
            case checkpoint_pb.SaveHfRequest():
                self._built.save_hf(directory)
            case checkpoint_pb.SaveAdapterRequest():
                self._built.save_adapter(directory)
            case checkpoint_pb.SaveCriticRequest():
                self._built_critic.save(directory)
            case checkpoint_pb.LoadCriticRequest():
                self._built_critic.load(directory)
            case _:
                raise NotImplementedError(verb(request))
        response: Message = method_of(request).response()
        return response

    @property
    def _built_critic(self) -> CriticBackend:
        assert self._critic is not None, "Initialize has built it"
        return self._critic

    def _compute(self, request: Message, sequences: Sequence[TrainSequence]) -> Message:
        """Executes a request of `TrainingService`; what is large is answered by rank 0 only."""
        from treadle.policy.rank import train_batch

        policy, answers = self._built, self._rank == 0
        match request:
            case pb.UpdateRequest():
                with self._profiled("update", policy.step):
                    response = train_batch.run_update(
                        policy,
                        sequences,
                        from_json(AlgorithmConfig, request.algorithm),
                        temperature=request.temperature,
                        free_memory=request.free_memory,
                    )
                if not answers:
                    response.ClearField("tokens")
                return response
            case pb.ForwardBackwardRequest():
                computed = train_batch.run_forward_backward(
                    policy,
                    sequences,
                    from_json(AlgorithmConfig, request.algorithm),
                    temperature=request.temperature,
                    keep_tokens=request.keep_tokens,
                )
                if not answers:
                    computed.ClearField("tokens")
                return computed
            case pb.OptimizerStepRequest():
                step = policy.optimizer_step(_adam_settings(request))
                return train_batch.stats_message(pb.OptimizerStepResponse, step)
            case pb.MeasureReferenceRequest():
                measured = train_batch.measure_reference(
                    policy,
                    sequences,
                    from_json(AlgorithmConfig, request.algorithm),
                    temperature=request.temperature,
                )
                return measured if answers else pb.MeasureReferenceResponse()
            case pb.LogProbsRequest():
                compute = policy.reference_logprobs if request.reference else policy.logprobs
                logprobs = compute(sequences, temperature=request.temperature)
                of_all = train_batch.at_loss_tokens(sequences, logprobs) if answers else b""
                return pb.LogProbsResponse(logprobs=of_all)
            case pb.LogprobSumsRequest():
                return pb.LogprobSumsResponse(sums=map(sum, policy.logprobs(sequences)))
            case pb.FineTuneRequest():
                aggregation = cast(LossAggregation, request.aggregation)
                with self._profiled("fine-tuning", policy.step):
                    return train_batch.run_fine_tune(policy, sequences, aggregation)
            case pb.ValuesRequest():
                values = self._built_critic.values(sequences)
                of_all = train_batch.at_loss_tokens(sequences, values) if answers else b""
                return pb.ValuesResponse(values=of_all)
            case pb.UpdateCriticRequest():
                with self._profiled("critic", self._built_critic.step):
                    return train_batch.run_critic_update(
                        self._built_critic,
                        sequences,
                        from_json(AlgorithmConfig, request.algorithm),
                        epochs=request.epochs,
                        free_memory=request.free_memory,
                    )
        raise NotImplementedError(verb(request))

    def _profiled(self, what: str, steps_before: int) -> contextlib.AbstractContextManager[None]:
        from treadle.policy.rank.profiler import profiled

        return profiled(self._profile, what, step=steps_before + 1, rank=self._rank)

    def _send_weights(self, request: Message) -> Message:
        """Executes a request of `WeightsService`."""
        from treadle.policy.weight_sync.payload import specs_response
        from treadle.policy.weight_sync.transports.file import write_files
        from treadle.policy.weight_sync.transports.inline import push
        from treadle.policy.weight_sync.transports.shared_memory import SharedMemorySender

        policy, rank = self._built, self._rank
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return specs_response(policy.weight_specs())
            case weights_pb.ComputeDeltaRequest():
                return self._delta_sender().compute(policy, request, rank=rank)
            case weights_pb.PushRequest(delta=True):
                return self._delta_sender().push(policy, request, rank=rank)
            case weights_pb.PushRequest():
                return push(policy, request, rank=rank)
            case weights_pb.WriteFilesRequest() if request.HasField("base_version"):
                return self._delta_sender().write(policy, request, rank=rank)
            case weights_pb.WriteFilesRequest():
                return write_files(policy, request, rank=rank)
            case weights_pb.PushSharedMemoryRequest():
                self._sender = self._sender or SharedMemorySender()
                return self._sender.push(policy, request, rank=rank)
            case weights_pb.OpenGroupRequest():
                return self._collective_sender().open_group(request)
            case weights_pb.BroadcastRequest():
                return self._collective_sender().broadcast(policy, request)
        raise NotImplementedError(verb(request))

    def _delta_sender(self) -> "DeltaSender":
        from treadle.policy.weight_sync.delta import DeltaSender

        self._delta = self._delta or DeltaSender()
        return self._delta

    def _collective_sender(self) -> "CollectiveSender":
        from treadle.policy.weight_sync.transports.collective import CollectiveSender

        if self._collective is None:
            device = self._built.device
            self._collective = CollectiveSender(rank=self._rank, host=self._host, device=device)
        return self._collective

    def _build(self, request: rank_pb.InitializeRequest) -> rank_pb.InitializeResponse:
        self._rank = request.rank
        config = from_json(PolicyConfig, request.policy)
        self._profile = config.profile
        host, _, port = request.rendezvous.rpartition(":")
        with _uncollected():
            self._policy = registry.build(
                config,
                Path(request.model_path),
                Rendezvous(
                    rank=request.rank,
                    world_size=request.world_size,
                    master_addr=host or "127.0.0.1",
                    master_port=int(port or 0),
                    listener=self._listener.detach() if self._listener is not None else None,
                    local_rank=request.local_rank,
                    timeout_s=config.collective_timeout_s,
                ),
                keep_reference=request.with_reference,
                reference_path=(
                    Path(request.reference_path) if request.HasField("reference_path") else None
                ),
            )
        if request.HasField("critic"):
            self._critic = self._policy.make_critic(from_json(CriticConfig, request.critic))
        return rank_pb.InitializeResponse()

    def _offload_report(self) -> rank_pb.ReportOffloadResponse:
        response = rank_pb.ReportOffloadResponse()
        for report in [model.take_offload_report() for model in self._models()]:
            response.release_s += report.release_s
            response.restore_s += report.restore_s
            response.freed_bytes += report.freed_bytes
            response.host_bytes += report.host_bytes
        return response


def _adam_settings(request: pb.OptimizerStepRequest) -> AdamSettings | None:
    """Returns the settings in a request, if it has some."""
    if not request.HasField("adamw"):
        return None
    given = request.adamw
    return AdamSettings(
        lr=given.lr,
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        grad_clip=given.grad_clip or math.inf,
    )


def _info(backend: str) -> rank_pb.GetPolicyInfoResponse:
    """Returns what a rank here can do.

    Raises:
        SetupError: It does not have the backend.
    """
    known = get_args(BackendName)
    if backend not in known:
        raise SetupError(
            f"this rank, of treadle-policy {_version('treadle-policy')}, has no backend "
            f"{backend!r} (policy.backend), only {', '.join(known)}: start it in an environment "
            "with a newer treadle-policy (policy.command)"
        )
    described = registry.describe(cast(BackendName, backend))
    can, library = described.capabilities, described.library
    return rank_pb.GetPolicyInfoResponse(
        treadle_version=_version("treadle-policy"),
        backend=backend,
        backend_version=_version("treadle-policy" if library is None else library.name),
        python_version=platform.python_version(),
        torch_version=_version("torch"),
        capabilities=rank_pb.Capabilities(
            reference=True,
            critic=can.critic,
            lora=can.lora,
            offload=can.offload,
            routing_replay=can.routing_replay,
            tensor_parallel="tensor" in can.parallel,
            pipeline_parallel="pipeline" in can.parallel,
            context_parallel="context" in can.parallel,
            step_settings=True,
        ),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Imports without looking for garbage again and again: 1 s less for torch and Megatron."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(server: RankServer, rank: PolicyRank) -> bool:
    """Executes requests until one is `Stop`; returns False after one that failed."""
    for asked in server:
        request = asked.request
        try:
            sequences: tuple[TrainSequence, ...] = ()
            if batch := getattr(request, "batch", 0):
                with spent_on("receive"):
                    sequences = rank.receive(batch, server.take_batch)
            response = rank.execute(request, sequences)
        except Exception as error:
            logging.getLogger(__name__).exception("%s failed", verb(request))
            failure = errors_pb2.RankFailure(
                kind=_kind(error, request),
                message=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )
            asked.answer.set_exception(RequestFailed(failure))
            return False
        asked.answer.set_result(response)
        if isinstance(request, rank_pb.StopRequest):
            return True
    return True


def _kind(error: Exception, request: Message) -> errors_pb2.FailureKind:
    if isinstance(error, CheckpointError):
        return errors_pb2.FAILURE_KIND_CHECKPOINT
    if isinstance(error, SetupError):
        return errors_pb2.FAILURE_KIND_INPUT
    if isinstance(request, rank_pb.InitializeRequest) and isinstance(
        error, ValueError | FileNotFoundError
    ):
        return errors_pb2.FAILURE_KIND_INPUT
    if isinstance(request, weights_pb.WriteFilesRequest) and isinstance(error, OSError):
        return errors_pb2.FAILURE_KIND_INPUT
    of_peer = _raised_by_communication(error)
    return errors_pb2.FAILURE_KIND_PEER if of_peer else errors_pb2.FAILURE_KIND_BUG


def _raised_by_communication(error: Exception) -> bool:
    """Returns whether an operation with other ranks raised the error, so that one is gone.

    NCCL and the stores raise a `DistError`. Gloo raises a plain `RuntimeError`, as any operation
    of torch does, so the module that called the operation decides.
    """
    from torch.distributed import DistError

    if isinstance(error, DistError):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    return type(error) is RuntimeError and module.startswith(_COMMUNICATING)


def _print_versions(backend: str) -> int:
    info = _info(backend)
    if backend == "megatron":
        from treadle.policy.backends.megatron import device

        device.install()  # raises where a rank could not start
    sys.stdout.write(
        f"treadle-policy {info.treadle_version}, {backend} {info.backend_version}, torch "
        f"{info.torch_version}, Python {info.python_version}\n"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serves one driver; returns exit status 0 if no request failed."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--version"]:
        return _print_versions(*(words[1:] or ["megatron"]))
    program = start_driven(words, module="treadle.policy.rank")
    with RankServer(program) as server:
        return 0 if serve(server, PolicyRank(program.host)) else 1
