"""The main job of a soak: the calculator demo, small, with two servers, and its processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from soak.proxied_server import proxy_file
from soak.reward import score

from treadle.trainer.launch.process import child_python_path

PROMPTS, SAMPLES, VALIDATION_ROWS, REPLICAS, WORKERS = 4, 4, 16, 2, 2
UNRESPONSIVE_S = 6.0


MAX_STALENESS = 1
_BESIDE_TRAINING = ("sync.in_flight=interrupt", "algorithm.correction.weights=token")
_FAKE = (
    *("policy.backend=fake", "launch.max_failures=1000"),
    f"reward.name={score.__module__}:{score.__name__}",
)
_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "sync": (),
    "overlap": _BESIDE_TRAINING,
    "stream": ("schedule.surplus=1", *_BESIDE_TRAINING),
    "async": (f"schedule.max_staleness={MAX_STALENESS}", *_BESIDE_TRAINING),
}


def settings(
    steps: int,
    schedule: str = "sync",
    *,
    workers: bool = False,
    fake: bool = False,
    vllm: Sequence[str] = (),
) -> tuple[str, ...]:
    """Returns the configuration of the run, with `WORKERS` loop workers or none.

    Servers are started behind proxies, through which the network is disturbed.

    The times are shorter than their defaults so that an hour sees many of their ends. The chunks of
    an update are small so that it takes long enough to be hit. All trajectories are logged.

    Args:
        fake: With the fake engine and policy and without proxies, so that processes start fast,
            and with a run that resumes by itself when it loses its rank.
        vllm: With `fake`: the command that starts a vLLM server, which takes the fake engine's
            place.
    """
    # The trainer passes no import path to a command.
    server = ("env", f"PYTHONPATH={child_python_path()}", sys.executable)
    proxied = f"rollout.server_command={json.dumps([*server, '-m', 'soak.proxied_server'])}"
    engine: tuple[str, ...] = ("rollout.name=fake",)
    if vllm:
        engine = ("rollout.name=vllm", f"rollout.server_command={json.dumps([*vllm])}")
    return (
        *((*engine, *_FAKE) if fake else (proxied,)),
        f"schedule.kind={schedule}",
        *_SCHEDULES[schedule],
        f"schedule.total_steps={steps}",
        "schedule.save_every=2",
        "schedule.val_every=6",
        f"data.prompts_per_step={PROMPTS}",
        f"data.max_val_rows={VALIDATION_ROWS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.num_replicas={REPLICAS}",
        "rollout.threads=1",
        "rollout.max_restarts=1000",
        f"agent.num_workers={WORKERS if workers else 0}",
        "agent.max_worker_restarts=1000",
        "agent.max_attempts=20",  # a task may lose as many workers as there are faults
        f"rollout.unresponsive_s={UNRESPONSIVE_S:g}",
        "launch.policy_threads=1",
        "sync.transport.chunk_bytes=4096",
        "sync.lease_s=10",
        f"run.trajectories_per_step={PROMPTS * SAMPLES}",
        f"run.val_trajectories={VALIDATION_ROWS}",
    )


class Trainer:
    """A driver as a user starts it.

    Args:
        run: The run directory. If it holds a run already, that run is resumed.
        output: The file to which it appends what it prints.
        arguments: Of the command line.
        environment: Variables beside those of this process.
    """

    def __init__(
        self,
        run: Path,
        output: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run = run
        self._output = output
        self._began_at = self._output.stat().st_size if self._output.exists() else 0
        with self._output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "treadle.trainer.main", f"run.dir={run}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": child_python_path(), **(environment or {})},
            )

    @property
    def output(self) -> str:
        """What it has printed since this start."""
        return self._output.read_bytes()[self._began_at :].decode(errors="replace")

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl; -1: none."""
        try:
            lines = (self.run / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (FileNotFoundError, IndexError, ValueError):
            return -1

    @property
    def has_stepped(self) -> bool:
        """Whether it has trained a step since this start."""
        return re.search(r"^step +[1-9]", self.output, re.MULTILINE) is not None

    @property
    def servers(self) -> Mapping[str, tuple[int, str]]:
        """The pid and the address of each rollout server that serves, by name."""
        return self._ready("rollout-*.ready")

    @property
    def proxies(self) -> list[int]:
        """The pids of the proxies of the rollout servers that serve, by name."""
        found = []
        for name, (pid, _) in self.servers.items():
            with contextlib.suppress(FileNotFoundError, ValueError):
                said = json.loads(proxy_file(self.run / "logs" / f"{name}.ready").read_text())
                if said["server"] == pid:  # not of an earlier server of this name
                    found.append(said["pid"])
        return found

    @property
    def workers(self) -> Mapping[str, int]:
        """The pids of the loop workers that the driver can have reached, by name."""
        return {name: pid for name, (pid, _) in self._ready("worker-*.ready").items()}

    @property
    def router(self) -> int | None:
        """The pid of the router of the loop workers, if it has started."""
        return next((pid for pid, _ in self._ready("router*.ready").values()), None)

    @property
    def rank(self) -> int | None:
        """The pid of the policy rank, if it has started."""
        return next((pid for pid, _ in self._ready("policy-0.ready").values()), None)

    def _ready(self, pattern: str) -> Mapping[str, tuple[int, str]]:
        found = {}
        for path in sorted((self.run / "logs").glob(pattern)):
            try:
                said = json.loads(path.read_text())
            except (FileNotFoundError, ValueError):  # gone, or being written
                continue
            supervisor = _parent(said["pid"])
            # Not of an earlier driver.
            if supervisor is not None and _parent(supervisor) == self.process.pid:
                found[path.stem] = said["pid"], said["address"]
        return found

    def end(self) -> None:
        """Kills it if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]
    return None if state == "Z" else int(parent)
