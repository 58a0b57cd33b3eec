"""The policy rank: one process of the policy, `python -m treadle.policy.rank`.

It listens on its host, writes the address to its ready file, accepts one authenticated connection
and executes commands in order until `Stop`, the end of the connection, or a command that raises.
While it executes one, it gives the driver signs of life.
Then the cause goes to the driver and the process exits, because the other ranks may be waiting for
it inside a collective operation and only the end of the process frees them.
"""

import contextlib
import gc
import logging
import platform
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from treadle.agent_loop import SetupError
from treadle.policy.backend import (
    CheckpointError,
    CriticBackend,
    PolicyBackend,
    Rendezvous,
)
from treadle.policy.client.commands import (
    Broadcast,
    Command,
    ComputeDelta,
    Done,
    Failed,
    FineTune,
    InitModel,
    Load,
    LoadCritic,
    LogprobSums,
    MeasureReference,
    OffloadReport,
    OpenGroup,
    OpenRendezvous,
    PlainCommand,
    Push,
    PushSharedMemory,
    ReportOffload,
    ReportTime,
    Save,
    SaveAdapter,
    SaveCritic,
    SaveHf,
    Sharded,
    Specs,
    Stop,
    Update,
    UpdateCritic,
    Values,
    WriteFiles,
)
from treadle.policy.client.shards import from_frames
from treadle.policy.client.signs_of_life import SignsOfLife
from treadle.policy.rank.driver_connection import serve_driver
from treadle.policy.rank.rank_time import RANK_TIME, RankCause, spent_on

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


class PolicyRank:
    """Executes commands. Holds the policy once it is built."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._rank = 0
        self._listener: socket.socket | None = None
        self._policy: PolicyBackend | None = None
        self._critic: CriticBackend | None = None
        self._sender: SharedMemorySender | None = None
        self._collective: CollectiveSender | None = None
        self._delta: DeltaSender | None = None

    def execute(self, command: Command) -> object:
        """Returns the command's answer; the parts of `policy.offload` are off the device then."""
        if isinstance(command, Sharded):
            with spent_on("receive"):
                plain = self._received(command)
        else:
            plain = command
        with spent_on(_cause(plain)):
            answer = self._execute(plain)
        for model in self._models() if not isinstance(command, Stop) else ():
            model.release_memory()
        return answer

    def _received(self, sharded: Sharded) -> PlainCommand:
        """Returns the command with its sequences; collective over the ranks that share them."""
        assert self._policy is not None, "InitModel comes first"
        policy = self._policy
        own = sharded.frames if policy.leads else (None,) * sharded.num_frames
        shard = from_frames([policy.share(frame) for frame in own])
        return replace(sharded.command, sequences=shard.sequences())

    @property
    def leads(self) -> bool:
        """Whether the driver gives sequences to this rank, and not to a sibling."""
        return self._policy is not None and self._policy.leads

    def _models(self) -> "Iterator[PolicyBackend | CriticBackend]":
        if self._policy is not None:
            yield self._policy
        if self._critic is not None:
            yield self._critic

    def _execute(self, command: PlainCommand) -> object:
        match command:
            case OpenRendezvous():
                self._listener = socket.create_server((self._host, 0))
                return f"{self._host}:{self._listener.getsockname()[1]}"
            case ReportTime():
                return RANK_TIME.take()
            case InitModel():
                return self._build(command)
            case Stop():
                if self._collective is not None:
                    self._collective.close()
                if self._policy is not None:
                    self._policy.close()
                return None
        policy = self._policy
        assert policy is not None, "InitModel comes first"
        match command:
            case Update():
                from treadle.policy.rank.train_batch import run_update

                stats = run_update(
                    policy,
                    command.sequences,
                    command.algorithm,
                    temperature=command.temperature,
                    free_memory=command.free_memory,
                )
                return stats if self._rank == 0 else replace(stats, tokens=None)
            case MeasureReference():
                from treadle.policy.rank.train_batch import measure_reference

                measured = measure_reference(
                    policy,
                    command.sequences,
                    command.algorithm,
                    temperature=command.temperature,
                )
                return measured if self._rank == 0 else None
            case Values() | UpdateCritic() | SaveCritic() | LoadCritic():
                return self._execute_with_critic(command)
            case FineTune():
                from treadle.policy.rank.fine_tune import run_fine_tune

                return run_fine_tune(policy, command.sequences, command.aggregation)
            case LogprobSums():
                from treadle.policy.rank.fine_tune import logprob_sums

                return logprob_sums(policy, command.sequences)
            case Specs():
                return policy.weight_specs()
            case ComputeDelta():
                return self._delta_sender().compute(policy, command, rank=self._rank)
            case Push(delta=True):
                return self._delta_sender().push(policy, command, rank=self._rank)
            case Push():
                from treadle.policy.weight_sync.transports.inline import push

                return push(policy, command, rank=self._rank)
            case WriteFiles(base_version=int()):
                return self._delta_sender().write(policy, command, rank=self._rank)
            case WriteFiles():
                from treadle.policy.weight_sync.transports.file import write_files

                return write_files(policy, command, rank=self._rank)
            case PushSharedMemory():
                from treadle.policy.weight_sync.transports.shared_memory import SharedMemorySender

                self._sender = self._sender or SharedMemorySender()
                return self._sender.push(policy, command, rank=self._rank)
            case OpenGroup():
                return self._collective_sender().open_group(command)
            case Broadcast():
                return self._collective_sender().broadcast(policy, command)
            case Save():
                policy.save(command.directory)
                return None
            case SaveHf():
                policy.save_hf(command.directory)
                return None
            case SaveAdapter():
                policy.save_adapter(command.directory)
                return None
            case Load():
                policy.load(command.directory)
                return policy.step
            case ReportOffload():
                return _sum_of([model.take_offload_report() for model in self._models()])

    def _execute_with_critic(
        self, command: Values | UpdateCritic | SaveCritic | LoadCritic
    ) -> object:
        critic = self._critic
        assert critic is not None, "InitModel has built it"
        match command:
            case Values():
                values = critic.values(command.sequences)
                return tuple(values) if self._rank == 0 else None
            case UpdateCritic():
                from treadle.policy.rank.train_batch import run_critic_update

                return run_critic_update(
                    critic,
                    command.sequences,
                    command.algorithm,
                    epochs=command.epochs,
                    free_memory=command.free_memory,
                )
            case SaveCritic():
                critic.save(command.directory)
                return None
            case LoadCritic():
                critic.load(command.directory)
                return critic.step

    def _delta_sender(self) -> "DeltaSender":
        from treadle.policy.weight_sync.delta import DeltaSender

        self._delta = self._delta or DeltaSender()
        return self._delta

    def _collective_sender(self) -> "CollectiveSender":
        from treadle.policy.weight_sync.transports.collective import CollectiveSender

        if self._collective is None:
            assert self._policy is not None, "InitModel comes first"
            device = self._policy.device
            self._collective = CollectiveSender(rank=self._rank, host=self._host, device=device)
        return self._collective

    def _build(self, command: InitModel) -> int:
        from treadle.policy.backends import registry

        self._rank = command.rank
        with _uncollected():
            self._policy = registry.build(
                command.config,
                command.model_path,
                Rendezvous(
                    rank=command.rank,
                    world_size=command.world_size,
                    master_addr=command.master_addr,
                    master_port=command.master_port,
                    listener=self._listener.detach() if self._listener is not None else None,
                    local_rank=command.local_rank,
                    timeout_s=command.config.collective_timeout_s,
                ),
                keep_reference=command.with_reference,
                reference_path=command.reference_path,
            )
        if command.critic is not None:
            self._critic = self._policy.make_critic(command.critic)
        return self._policy.step


def _cause(command: PlainCommand) -> RankCause:
    """Returns what the time of a command goes to, unless a part of it says otherwise."""
    match command:
        case Update() | UpdateCritic() | FineTune():
            return "train"
        case MeasureReference() | Values() | LogprobSums():
            return "logprobs"
        case OpenRendezvous() | InitModel() | Load() | LoadCritic():
            return "start"
        case Save() | SaveCritic() | SaveHf() | SaveAdapter():
            return "save"
        case ReportTime() | ReportOffload() | Stop():
            return "waiting"
        case (
            Specs()
            | ComputeDelta()
            | Push()
            | WriteFiles()
            | PushSharedMemory()
            | OpenGroup()
            | Broadcast()
        ):
            return "weights"


def _sum_of(reports: Sequence[OffloadReport]) -> OffloadReport:
    return OffloadReport(
        release_s=sum(report.release_s for report in reports),
        restore_s=sum(report.restore_s for report in reports),
        freed_bytes=sum(report.freed_bytes for report in reports),
        host_bytes=sum(report.host_bytes for report in reports),
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


def serve(connection: "Connection[Any, Any]", rank: PolicyRank, *, beat_s: float) -> bool:
    """Executes commands until told to stop; returns False after one that raised.

    Args:
        connection: To the driver, which gets a sign of life at once.
        rank: Executes the commands.
        beat_s: Time between two signs of life while a command runs.
    """
    signs = SignsOfLife(connection, beat_s=beat_s)
    for command in _commands(connection, rank):
        try:
            with signs:
                value = rank.execute(command)
        except Exception as error:
            asked = command.command if isinstance(command, Sharded) else command
            logging.getLogger(__name__).exception("%s failed", type(asked).__name__)
            connection.send(
                Failed(
                    kind=_kind(error, command),
                    message=f"{type(error).__name__}: {error}",
                    traceback=traceback.format_exc(),
                )
            )
            return False
        connection.send(Done(value=value))
        if isinstance(command, Stop):
            return True
    return True


def _commands(connection: "Connection[Any, Any]", rank: PolicyRank) -> Iterator[Command]:
    while True:
        try:
            connection.poll(None)
            with spent_on("receive"):
                command: Command = connection.recv()
                if isinstance(command, Sharded) and rank.leads:
                    frames = tuple(connection.recv_bytes() for _ in range(command.num_frames))
                    command = replace(command, frames=frames)
        except EOFError:
            return
        yield command


def _kind(error: Exception, command: Command) -> Literal["input", "checkpoint", "peer", "bug"]:
    if isinstance(error, CheckpointError):
        return "checkpoint"
    if isinstance(error, SetupError):
        return "input"
    if isinstance(command, InitModel) and isinstance(error, ValueError | FileNotFoundError):
        return "input"
    if isinstance(command, WriteFiles) and isinstance(error, OSError):
        return "input"
    return "peer" if _raised_by_communication(error) else "bug"


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


def _print_versions() -> int:
    from treadle.policy.backends.megatron import device

    device.install()  # raises where a rank could not start
    found = (f"{name} {_version(name)}" for name in ("treadle-policy", "megatron-core", "torch"))
    sys.stdout.write(f"{', '.join(found)}, Python {platform.python_version()}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serves one driver; returns exit status 0 if no command raised."""
    words = sys.argv[1:] if argv is None else argv
    if words == ["--version"]:
        return _print_versions()

    def serve_as_rank(connection: "Connection[Any, Any]", host: str, beat_s: float) -> bool:
        return serve(connection, PolicyRank(host), beat_s=beat_s)

    return serve_driver(words, module="treadle.policy.rank", serve=serve_as_rank)
