"""The Ray launcher: one actor per process, which starts the process on its node and watches it.

Ray places processes and carries neither tokens nor weights. The process is the same program that
the local launcher starts, run by the *driver's* interpreter with the driver's import path. The
start fails, with both sides shown, if that interpreter is missing or sees other packages. (Ray
itself runs actors with the interpreter that its node was started with.) A process with its own
`command` needs only that program on its node.

Invariants:

1. A process lives no longer than its actor, whose pid it watches, and Ray ends the actors of a
   driver that died. A Ray that this launcher started is shut down with it.
2. A process that is started where a node was lost gets the GPUs of the node that Ray reserves in
   its place. An actor that cannot be placed is given up, so that it starts nothing later.
3. On a cluster, processes listen on their node's address, and the run's certificates reach a node
   before its first process starts. Ray's own messages are encrypted only if the cluster is set up
   so.
"""

import asyncio
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from treadle.tracing.child_process import supervised
from treadle.trainer.config.launch import RayLaunchConfig
from treadle.trainer.launch.local import KILLED_S, LocalProcess, describe_exit, read_tail
from treadle.trainer.launch.process import (
    LostProcessError,
    ProcessError,
    ProcessSpec,
    child_python_path,
)
from treadle.trainer.launch.run_tls import RunTls, run_tls, write_private

__all__ = ["RayLauncher", "RayProcess", "gpus_of_nodes"]

_PACKAGES = ("torch", "megatron-core", "transformers", "grpcio", "protobuf", "pydantic")
_OBJECT_STORE_BYTES = 128 << 20  # nothing large goes through it
_STARTED_CPUS = 1024
# How much longer than the process an actor may take to answer; one that stands still never does.
_ANSWER_S = 10.0
_CONNECT_S = 5.0
_HOLD_AGAIN_S = 1.0
_PROBE = (
    "import importlib.metadata as m, json, platform, sys;"
    "found = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()};"
    "print(json.dumps({'python': platform.python_version(),"
    " **{n: found.get(n, 'missing') for n in sys.argv[1:]}}))"
)
T = TypeVar("T")
_log = logging.getLogger(__name__)


def gpus_of_nodes(address: str) -> list[int]:
    """Returns the number of GPUs of each node of a running cluster, most first; starts nothing.

    Raises:
        ProcessError: It cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # Ray itself waits a minute for a host that is not there
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise ProcessError(f"Ray at {address}: {error}") from None
    try:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        gpus = (int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"])
        return sorted(gpus, reverse=True)
    finally:
        ray.shutdown()


class SilentActorError(ProcessError):
    """An actor stands still, or its node does."""


def _own_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


class _Keeper:
    """The actor: starts one process on this node and forwards calls to it."""

    def __init__(self, executable: str, python_path: str, versions: Mapping[str, str]) -> None:
        self._executable = executable
        self._python_path = python_path
        self._versions = dict(versions)
        self._process: LocalProcess | None = None
        self._files: Sequence[Path] = ()

    async def start(
        self, spec: ProcessSpec, directory: Path, host: str | None, files: Mapping[Path, bytes]
    ) -> str:
        """Checks the interpreter, and starts the process; returns the address of this node.

        Args:
            host: Where the process listens; None: on the address of this node.
            files: Contents of files that it needs here and nobody else may read, by path.
        """
        import ray

        if not spec.command:  # a command brings its own interpreter
            await self._check_interpreter()
        node = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        self._files = tuple(files)
        for path, content in files.items():
            await asyncio.to_thread(write_private, path, content)
        self._process = LocalProcess(
            spec, directory, executable=self._executable, python_path=self._python_path
        )
        await self._process.start(host or node)
        return node

    async def _check_interpreter(self) -> None:
        here = f"node {platform.node()}, where Ray runs {sys.executable}"
        if not os.access(self._executable, os.X_OK):
            raise ProcessError(
                f"{here}, has no {self._executable}, the driver's interpreter: install the same "
                "environment there under the same path"
            )
        probe = await asyncio.create_subprocess_exec(
            *supervised([self._executable, "-c", _PROBE, *_PACKAGES]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": self._python_path},
        )
        output, _ = await probe.communicate()
        if probe.returncode != 0:
            text = output.decode(errors="replace")
            raise ProcessError(f"{here}: {self._executable} does not run: {text}")
        found = json.loads(output)
        different = [
            f"{name} is {found[name]}, the driver has {wanted}"
            for name, wanted in self._versions.items()
            if found[name] != wanted
        ]
        if different:
            raise ProcessError(
                f"{here}: {self._executable} sees other packages than the driver's own "
                f"{self._executable}: {'; '.join(different)}"
            )

    async def examine(
        self, programs: Mapping[str, str], files: Mapping[Path, str]
    ) -> Sequence[str]:
        """Returns what is wrong with this node; starts nothing.

        Args:
            programs: Setting -> the program that its command begins with.
            files: Path -> SHA-256 that it must have, in hexadecimal digits.
        """
        here = f"node {platform.node()}"
        problems = []
        try:
            await self._check_interpreter()
        except ProcessError as error:
            problems.append(str(error))
        problems += [
            f"{here} has no {program}, with which {key} begins: install its environment there "
            "under the same path"
            for key, program in programs.items()
            if shutil.which(program) is None
        ]
        for path, wanted in files.items():
            found = await asyncio.to_thread(_sha256, path)
            if found is None:
                problems.append(
                    f"{here} cannot read {path}: put the model under the same path on every node"
                )
            elif found != wanted:
                problems.append(
                    f"{here}: {path} has sha256 {found[:12]}, the driver's has {wanted[:12]}: they "
                    "belong to different models or revisions; copy the driver's there"
                )
        return problems

    async def ready(self, deadline_s: float) -> str:
        """See `Process.ready`."""
        assert self._process is not None
        return await self._process.ready(deadline_s)

    async def wait(self) -> int:
        """See `Process.wait`."""
        assert self._process is not None
        return await self._process.wait()

    async def log_tail(self, lines: int) -> str:
        """See `Process.log_tail`."""
        assert self._process is not None
        return await self._process.log_tail(lines)

    async def stop(self, grace_s: float, last: bool) -> None:
        """See `Process.stop`. With `last`, the run ends, and its files here go."""
        if self._process is not None:
            await self._process.stop(grace_s)
        if last:
            for path in self._files:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # nothing was written, or another process still has its files
                for directory in {path.parent for path in self._files}:
                    directory.rmdir()


class _Reservation:
    """The actor that holds the GPUs of one node; the processes' own actors reserve none.

    Thus processes can share a GPU and also have several, which Ray's fractions do not allow.
    """

    def devices(self) -> tuple[str, list[str]]:
        """Returns the id of this node, and the GPUs that Ray reserved, as CUDA names them."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


class RayProcess:
    """A process behind an actor."""

    def __init__(self, name: str, actor: Any, log: Path) -> None:
        """Starts nothing yet.

        Args:
            actor: Starts it and watches it.
        """
        self.name = name
        self._actor = actor
        self._log = log
        self.node = "that is not known yet"
        self._lost: str | None = None

    async def start(
        self, spec: ProcessSpec, directory: Path, host: str | None, files: Mapping[Path, bytes]
    ) -> None:
        """Starts it; called once."""
        self.node = await self._ask(self._actor.start.remote(spec, directory, host, files))

    async def ready(self, deadline_s: float) -> str:
        """See `Process.ready`."""
        return await self._ask(self._actor.ready.remote(deadline_s), deadline_s)

    async def wait(self) -> int:
        """See `Process.wait`; a process whose node is gone counts as ended by SIGKILL.

        While the actor does not respond, this waits: only the actor reports the process's end.
        """
        try:
            return await self._ask(self._actor.wait.remote())
        except ProcessError:
            return -signal.SIGKILL

    def describe_end(self, status: int) -> str:
        """See `Process.describe_end`."""
        if self._lost is None:
            return f"{describe_exit(status)} on node {self.node}"
        return f"is gone with its actor on node {self.node} ({self._lost})"

    async def log_tail(self, lines: int = 20) -> str:
        """See `Process.log_tail`; without its actor, what a directory shared by all nodes has."""
        try:
            return await self._ask(self._actor.log_tail.remote(lines), 0.0)
        except ProcessError as error:
            try:
                return await asyncio.to_thread(read_tail, self._log, lines)
            except OSError:
                return f"(no log: {error})"

    async def stop(self, grace_s: float = 10.0, *, last: bool = False) -> None:
        """See `Process.stop`; ends the actor too.

        Args:
            last: Whether the run ends, so that its certificates may go.
        """
        try:
            await self._ask(self._actor.stop.remote(grace_s, last), grace_s + KILLED_S)
        except SilentActorError as error:
            _log.warning("%s; Ray is told to end it", error)
        except ProcessError:
            pass  # the actor is gone, and its process with it
        self.give_up()

    def give_up(self) -> None:
        """Has Ray end the actor, whether it was placed or not, and its process with it."""
        import ray

        ray.kill(self._actor)

    async def _ask(self, answer: Awaitable[T], within_s: float | None = None) -> T:
        """Waits for an actor's answer; with `within_s`, for that time and `_ANSWER_S` longer.

        Raises:
            ProcessError: The process or its actor ended, or the actor gave no answer.
        """
        import ray

        limit_s = None if within_s is None else within_s + _ANSWER_S
        timeout = asyncio.timeout(limit_s)
        try:
            async with timeout:
                return await answer
        except TimeoutError:
            if not timeout.expired():
                raise
            raise SilentActorError(
                f"{self.name}: its Ray actor gave no answer for {limit_s:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ProcessError):
                raise type(error.cause)(str(error.cause)) from None
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
            self._lost = _reason(error)
            raise LostProcessError(
                f"{self.name}: its Ray actor on node {self.node} is gone: {self._lost}"
            ) from None


def _reason(error: Exception) -> str:
    """Returns in one line why an actor is gone, without Ray's ids."""
    import ray

    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "neither answers Ray"
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not re.match(r"[a-z_]+: ", line)]
    return re.sub(r" Node Id: \w+", "", " ".join(told)).rstrip(".")


def _keeper(**options: Any) -> Any:
    """Places an actor that runs this interpreter with this import path."""
    import ray

    placed = ray.remote(_Keeper).options(**options)
    return placed.remote(sys.executable, child_python_path(), _own_versions())


class RayLauncher:
    """Starts processes on a Ray cluster."""

    def __init__(
        self, config: RayLaunchConfig, directory: Path, *, tls_directory: Path | None = None
    ) -> None:
        """Connects to nothing yet.

        Args:
            config: How to reach the cluster.
            directory: For the logs, on each node; made if missing.
            tls_directory: For the run's certificates, on each node; None: it has none.
        """
        self._config = config
        self._directory = directory.absolute()
        self._tls_directory = tls_directory
        self.tls: RunTls | None = None
        self._made = ExitStack()
        self._processes: list[RayProcess] = []
        # Only a Ray of this machine alone is sure to stay one.
        self._host = "127.0.0.1" if config.address is None else None
        self._group: Any = None
        self._holders: list[Any] = []  # by the number of the node
        self._renewing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Joins the cluster, or starts one on this machine; reserves the GPUs of the run.

        Raises:
            ProcessError: The cluster cannot be reached, or has not the GPUs.
        """
        await asyncio.to_thread(self._join)
        try:
            if self._tls_directory is not None:
                self.tls = self._made.enter_context(run_tls(self._tls_directory))
            if self._config.gpus_per_node:
                await self._reserve()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _reserve(self) -> None:
        """Reserves `gpus_per_node` GPUs on each of `nodes` nodes, for the time of the run."""
        import ray
        from ray.util.placement_group import placement_group

        config = self._config
        gpus = float(config.gpus_per_node)
        bundles = [{"CPU": 0.01, "GPU": gpus} for _ in range(config.nodes)]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        try:
            async with asyncio.timeout(config.start_deadline_s):
                await self._group.ready()
        except TimeoutError:
            has = [
                f"{node['Resources'].get('GPU', 0):g}"
                for node in ray.nodes()  # type: ignore[no-untyped-call]
                if node["Alive"]
            ]
            raise ProcessError(
                f"launch.nodes={config.nodes} x launch.gpus_per_node={config.gpus_per_node}: the "
                f"cluster did not give that many GPUs within {config.start_deadline_s:g} s "
                f"(launch.start_deadline_s); its nodes have {', '.join(has)}, some perhaps in use"
            ) from None
        self._holders = [self._hold(number) for number in range(config.nodes)]

    def _hold(self, number: int) -> Any:
        """Returns an actor with the GPUs of a reserved node; Ray ends one that nobody refers to."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reservation: Any = ray.remote(_Reservation)
        return reservation.options(
            num_cpus=0.01,
            num_gpus=float(self._config.gpus_per_node),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
        ).remote()

    async def _reserved(self, number: int) -> tuple[str, list[str]]:
        """Returns the id and the GPUs of a reserved node, or of the one that Ray has in its place.

        Raises:
            ProcessError: The node is gone, and there is no other one in time.
        """
        import ray

        config, told = self._config, False
        try:
            async with self._renewing, asyncio.timeout(config.start_deadline_s):
                while True:
                    try:
                        found: tuple[str, list[str]] = await self._holders[number].devices.remote()
                    except ray.exceptions.RayActorError:
                        if not told:
                            _log.warning(
                                "node %d of the run is gone; Ray looks for another", number
                            )
                            told = True
                    else:
                        return found
                    # Until Ray has noticed that the node is gone, it places this one there too.
                    await asyncio.sleep(_HOLD_AGAIN_S)
                    ray.kill(self._holders[number])
                    self._holders[number] = self._hold(number)
        except TimeoutError:
            raise ProcessError(
                f"node {number} of launch.nodes={config.nodes} is gone, and the cluster gave no "
                f"other one with launch.gpus_per_node={config.gpus_per_node} free GPUs within "
                f"{config.start_deadline_s:g} s (launch.start_deadline_s): add a node"
            ) from None

    def _join(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        own: dict[str, Any] = {}
        if self._config.address is None:  # one machine: Ray must not ration its CPUs
            own = {"num_cpus": _STARTED_CPUS, "object_store_memory": _OBJECT_STORE_BYTES}
        try:
            ray.init(
                address=self._config.address or "local",
                include_dashboard=False if own else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **own,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ProcessError(
                f"Ray at {self._config.address or 'this machine'}: {error}"
            ) from None

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends every process that still runs, and leaves the cluster."""
        import ray

        await asyncio.gather(*(process.stop(last=True) for process in self._processes))
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        await asyncio.to_thread(ray.shutdown)
        self._made.close()

    async def examine(
        self, *, programs: Mapping[str, str], files: Mapping[Path, str]
    ) -> Mapping[str, Sequence[str]]:
        """Returns what is wrong with each node for this driver's processes, by the node's address.

        Args:
            programs: Setting -> the program that its command begins with, on a node.
            files: Path -> SHA-256 that it must have on each node, in hexadecimal digits.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        found: dict[str, Sequence[str]] = {}
        for node in (each for each in nodes if each["Alive"]):
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = _keeper(num_cpus=0, scheduling_strategy=strategy)
            try:
                async with asyncio.timeout(self._config.start_deadline_s):
                    found[node["NodeManagerAddress"]] = await actor.examine.remote(
                        dict(programs), dict(files)
                    )
            except TimeoutError:
                late = (
                    f"it started no actor within {self._config.start_deadline_s:g} s: see its logs"
                )
                found[node["NodeManagerAddress"]] = [late]
            except ray.exceptions.RayActorError as error:
                found[node["NodeManagerAddress"]] = [f"its actor is gone: {error}"]
            ray.kill(actor)
        return found

    def resources(self) -> Mapping[str, float]:
        """Returns what the cluster has in all, by the names of Ray, as CPU and GPU."""
        import ray

        has: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return has

    async def start(self, spec: ProcessSpec) -> RayProcess:
        """See `Launcher.start`."""
        import ray

        spec, placed = await self._placement(spec)
        files = {} if self.tls is None else await asyncio.to_thread(self.tls.read)
        actor = _keeper(num_cpus=self._config.cpus_per_process, max_restarts=0, **placed)
        process = RayProcess(spec.name, actor, self._directory / f"{spec.name}.log")
        self._processes.append(process)
        try:
            async with asyncio.timeout(self._config.start_deadline_s):
                await process.start(spec, self._directory, self._host, files)
        except BaseException as error:
            self._processes.remove(process)
            process.give_up()
            if not isinstance(error, TimeoutError):
                raise
            has = ray.cluster_resources()  # type: ignore[no-untyped-call]
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            raise ProcessError(
                f"{spec.name} was not placed within {self._config.start_deadline_s:g} s: it needs "
                f"{self._config.cpus_per_process:g} CPUs and {spec.gpus:g} GPUs, and the cluster "
                f"has {has}, of which {free} are free"
            ) from None
        return process

    async def _placement(self, spec: ProcessSpec) -> tuple[ProcessSpec, dict[str, Any]]:
        """Returns what to run where its GPUs are named, and the options that place it there.

        Raises:
            ProcessError: Its node is gone, and there is no other one.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if spec.devices is not None:
            node, names = await self._reserved(spec.devices.node)
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in spec.devices.indices)}
            spec = replace(spec, devices=None, env={**shown, **spec.env})
            return spec, {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        placed: dict[str, Any] = {"num_gpus": spec.gpus}
        if spec.placement == "spread":
            placed["scheduling_strategy"] = "SPREAD"
        elif spec.placement == "driver":
            node = ray.get_runtime_context().get_node_id()
            placed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return spec, placed
