"""Checks of one run: its settings, what they name, its servers, its nodes and its GPUs.

Invariant: what `--dry-run` rejects is found by the same code, `preflight`; the checks here are
those that cost more than a start may, or that warn where a run may still work.
"""

import asyncio
import hashlib
import json
import netrc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from treadle.agent_loop import SetupError
from treadle.tracing.child_process import supervised
from treadle.tracing.diagnosis import Diagnosis, Level, fail, ok, warn
from treadle.trainer.checkpoint.run_directory import new_run_dir
from treadle.trainer.config.load import ConfigError, MissingSettings, load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.data import DataError
from treadle.trainer.data.files import find_files
from treadle.trainer.demo import DEMO
from treadle.trainer.doctor.environment import release
from treadle.trainer.doctor.machine import check_disk, check_open_files
from treadle.trainer.launch.environment import child_environment, foreign_environment
from treadle.trainer.launch.gpus import Gpu
from treadle.trainer.launch.process import ProcessError, child_python_path
from treadle.trainer.model_source import resolve_model, with_model
from treadle.trainer.preflight import check_run
from treadle.trainer.preflight.table import INPUT_ERRORS
from treadle.trainer.problems import SeveralProblems
from treadle.trainer.rollout.server_process import server_spec

if TYPE_CHECKING:
    from treadle.trainer.launch.ray import RayLauncher

__all__ = ["check_settings"]

_SERVER_DOCTOR_S = 600.0  # It imports the engine.
_DESCRIPTORS = 512  # Of libraries, ranks, servers and files of the run.
_PER_TRAJECTORY = 4  # Its tools' connections and pipes, and a call of a server.
_PER_PARAMETER = 16  # Bytes of a checkpoint: weights and the states of the optimizer.
_NODE_FILES: Final = ("config.json", "tokenizer.json")


def check_settings(
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    gpus: Sequence[Gpu],
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Diagnosis]:
    """Checks the run of a command line of `treadle`."""
    missing: MissingSettings | None = None
    try:
        try:
            loaded = load_config(files, overrides, default_file=DEMO)
        except MissingSettings as error:
            missing = error
            below = [f"{key}=none" for key in error.keys]
            loaded = load_config(files, overrides, default_file=DEMO, below=below)
    except ConfigError as error:
        yield from _problems(error)
        return
    config = loaded.config
    run_dir = config.run.dir or new_run_dir(config.run.name)
    try:
        check_run(config, run_dir, plan_only=True, missing=missing)
    except INPUT_ERRORS as error:
        yield from _problems(error)
    else:
        yield ok("settings", "every check of --dry-run passes")
    yield check_open_files(
        _DESCRIPTORS + _PER_TRAJECTORY * config.rollout.max_in_flight * config.rollout.num_replicas
    )
    yield from _lists(config)
    yield from _gpu_numbers(config, gpus)
    yield from _memory_pools(config, environ)
    yield from _tokens(config, environ)
    yield from _metrics_port(config)
    if missing is not None and "model.path" in missing.keys:
        return
    try:
        folder = resolve_model(config.model.path, weights=False)
    except SetupError:
        return  # preflight has said so
    yield _checkpoints(config, run_dir, folder)
    yield from _server(with_model(config, folder))
    if config.launch.kind == "ray":
        yield from _nodes(config, folder)


def _problems(error: Exception) -> Iterator[Diagnosis]:
    for each in error.errors if isinstance(error, SeveralProblems) else (error,):
        text = "\n".join((str(each), *getattr(each, "__notes__", ())))
        yield fail("settings", text, "a run stops at its start", "change what the text names")


def _lists(config: Config) -> Iterator[Diagnosis]:
    """Finds rows that an old library `datasets` cannot load, where the user's code may do so."""
    import importlib.metadata

    try:
        version = importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError:
        return
    if release(version) >= release("4.0"):
        return
    for path in _parquet_files(config):
        if _has_list_feature(path):
            yield warn(
                "datasets",
                f"{path}, and datasets {version}",
                "the file was written by datasets 4 or newer: Treadle reads it, and "
                "`load_dataset` of your own code ends with `Feature type 'List' not found`",
                'pip install "datasets>=4.0"',
            )


def _parquet_files(config: Config) -> Iterator[Path]:
    for path in (*config.data.train_files, *config.data.val_files):
        try:
            yield from (file for file in find_files(path) if file.suffix == ".parquet")
        except (DataError, OSError):
            continue  # preflight has said so


def _has_list_feature(path: Path) -> bool:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
    except (OSError, pyarrow.ArrowException):
        return False
    return b'"_type": "List"' in metadata.get(b"huggingface", b"")


def _gpu_numbers(config: Config, gpus: Sequence[Gpu]) -> Iterator[Diagnosis]:
    if config.launch.kind != "local":
        return
    if per_node := config.launch.gpus_per_node:
        # Each process has its own, and preflight has compared the numbers; but where there is no
        # GPU it plans for another machine.
        if not gpus:
            yield fail(
                "number of GPUs",
                f"launch.gpus_per_node={per_node}, and this machine has none",
                "a run stops at its start",
                "start the run where the GPUs are, or give the container the GPUs (docker run "
                "--gpus all); on the CPU, launch.gpus_per_node=0 policy.parallel.data=1",
            )
        return
    if not gpus:
        return
    ranks, rollout = config.policy.parallel.num_ranks, config.rollout
    each = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    serving = rollout.num_replicas * each
    needed = max(ranks, serving) if rollout.release_memory else ranks + serving
    value = f"{needed} for {ranks} policy ranks and {rollout.num_replicas} servers of {each}"
    if needed > len(gpus):
        yield warn(
            "number of GPUs",
            value,
            f"this machine has {len(gpus)}: processes share GPUs, and their memory may not suffice",
            "rollout.release_memory=true lets servers and policy take turns; or lower "
            "rollout.num_replicas or the parallel sizes",
        )
    else:
        yield ok("number of GPUs", f"{value}, of {len(gpus)}")


def _memory_pools(config: Config, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    name = next((n for n in names if "expandable_segments:True" in environ.get(n, "")), None)
    if name is not None and config.rollout.release_memory:
        yield fail(
            name,
            environ[name],
            "rollout.release_memory=true frees memory pools, and engines refuse them together with "
            "expandable segments",
            f"unset {name}",
        )


def _tokens(config: Config, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    named = {*config.run.loggers, *config.tracing.backends}
    if not named & {"wandb", "weave"} or environ.get("WANDB_MODE") in ("offline", "disabled"):
        return
    if environ.get("WANDB_API_KEY") or _in_netrc("api.wandb.ai"):
        yield ok("key of W&B", "WANDB_API_KEY or ~/.netrc has one")
        return
    yield warn(
        "key of W&B",
        "none",
        "run.loggers or tracing.backends sends to W&B, which refuses a client without a key",
        "export WANDB_API_KEY (in a container: docker run -e WANDB_API_KEY), run `wandb login`, or "
        "set WANDB_MODE=offline",
    )


def _metrics_port(config: Config) -> Iterator[Diagnosis]:
    port, host = config.run.metrics_port, config.run.metrics_host
    if port is None:
        return
    try:
        # As the server of the metrics does: a port of a run that just ended can be taken.
        with socket.create_server((host, port)):
            yield ok("run.metrics_port", f"{host}:{port} is free")
    except OSError as error:
        yield fail(
            "run.metrics_port",
            f"{host}:{port}",
            f"the trainer cannot listen there: {error.strerror or error}",
            "choose another run.metrics_port, or 0 for a free one; `ss -ltnp` shows who has it",
        )


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _checkpoints(config: Config, run_dir: Path, folder: Path) -> Diagnosis:
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # Published weights have 2 bytes per parameter; of those with 4 this expects too much.
    each = weights // 2 * _PER_PARAMETER
    return check_disk(run_dir, config.schedule.keep_checkpoints * each)


def _server(config: Config) -> Iterator[Diagnosis]:
    """Runs the doctor of the server, in the environment where a server of this run would start."""
    spec = server_spec(config, "doctor", weights_directory=None)
    command = spec.command or (sys.executable, "-P", "-m", spec.module)
    arguments = [argument.replace("{host}", "127.0.0.1") for argument in spec.args]
    if spec.command:
        environment = foreign_environment(command[0], spec.env)
    else:
        environment = child_environment(child_python_path(), spec.env)
    if spec.command and config.launch.kind == "ray":
        yield ok("server", f"{command[0]} runs on the nodes, whose doctor is not asked from here")
        return
    try:
        done = subprocess.run(
            supervised([*command, "doctor", "--json", *arguments], environment=environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SERVER_DOCTOR_S,
            env=environment,
            check=False,
        )
        found = [_read(row) for row in json.loads(done.stdout)]
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "set rollout.server_command to a program that starts a server"
        yield fail("server", str(error), f"{command[0]} does not run", fix)
        return
    except (ValueError, TypeError, KeyError):
        said = " | ".join((done.stderr or done.stdout).splitlines()[-3:])
        yield fail(
            "server",
            said or f"status {done.returncode}",
            f"`{command[0]} ... doctor` gave no findings",
            "install the release of treadle-rollout-server that belongs to this trainer there",
        )
        return
    yield from found


def _read(row: Mapping[str, str]) -> Diagnosis:
    return Diagnosis(
        check=f"server: {row['check']}",
        level=Level(row["level"]),
        value=row["value"],
        cause=row["cause"],
        fix=row["fix"],
    )


def _nodes(config: Config, folder: Path) -> Iterator[Diagnosis]:
    from treadle.trainer.launch.ray import RayLauncher

    launch = config.launch
    assert launch.kind == "ray"
    with tempfile.TemporaryDirectory() as logs:
        try:
            yield from asyncio.run(_examine(config, folder, RayLauncher(launch, Path(logs))))
        except ProcessError as error:
            yield fail("Ray", str(error), "no process can be started", "change what the text names")


async def _examine(config: Config, folder: Path, launcher: "RayLauncher") -> list[Diagnosis]:
    commands = {
        "rollout.server_command": config.rollout.server_command,
        "policy.command": config.policy.command,
    }
    files = {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for name in _NODE_FILES
        if (path := folder / name).is_file()
    }
    async with launcher:
        has = launcher.resources()
        programs = {key: command[0] for key, command in commands.items() if command}
        nodes = await launcher.examine(programs=programs, files=files)
    return [*_room(config, has), *_about(nodes)]


def _about(nodes: Mapping[str, Sequence[str]]) -> Iterator[Diagnosis]:
    for address, problems in nodes.items():
        for problem in problems:
            yield fail(
                f"node {address}",
                problem,
                "its processes would run other code than the driver",
                "give every node the driver's environment under the same path, as by one container "
                "image",
            )
        if not problems:
            yield ok(f"node {address}", "the driver's interpreter, packages, model and tokenizer")


def _room(config: Config, has: Mapping[str, float]) -> Iterator[Diagnosis]:
    """Compares what the processes reserve with what the cluster has."""
    launch, ranks, replicas = (
        config.launch,
        config.policy.parallel.num_ranks,
        config.rollout.num_replicas,
    )
    assert launch.kind == "ray"
    wanted = {
        "CPU": (ranks + replicas) * launch.cpus_per_process,
        "GPU": launch.nodes * launch.gpus_per_node
        or ranks * launch.gpus_per_policy_rank + replicas * launch.gpus_per_replica,
    }
    for what, number in wanted.items():
        value = f"{number:g} of {has.get(what, 0.0):g}"
        if number > has.get(what, 0.0):
            yield fail(
                f"{what}s of the cluster",
                value,
                f"{ranks} policy ranks and {replicas} servers reserve more than there is: their "
                "start would wait until launch.start_deadline_s",
                "add nodes, or lower launch.cpus_per_process, launch.gpus_per_node, "
                "launch.gpus_per_policy_rank or launch.gpus_per_replica",
            )
        else:
            yield ok(f"{what}s of the cluster", value)
