"""Runs the main job under faults for some minutes, and checks that nothing comes of them.

`./pants run tests/soak:main -- --minutes 60`. An undisturbed run is made first. Then the same run
is made again and again, with a schedule that the seed chooses and in half of the rounds with loop
workers, while its servers, its policy rank, its driver, its workers and their router are killed and
stopped, the connections of its servers are cut, delayed and frozen, and its disk is full, slow or
stands still, at moments that the seed chooses, also inside updates and
checkpoints, and while bad requests are sent to its servers, to a proxy endpoint and to a sandbox
server. A driver that ended is started again with the same command, as a user would.

Each run with `schedule.kind=sync` must learn the same as the undisturbed one, bit for bit; in every
run each task ends once, with tokens of the right version; memory and descriptors stay flat; nothing
is left behind. The exit status is 1 if anything of this did not hold, or if it took longer than
`--at-most` minutes. Who waits sees how far a run is, every half minute. `--seed S --first-round N`
makes a round again. The directory that is named first keeps the log (`soak.jsonl`) and the runs
that went wrong.

`--kills N` is a campaign of kills alone, with the fake engine and policy, so that processes start
fast: rounds follow until N processes were killed. With `--vllm
/opt/vllm/bin/treadle-rollout-server`, servers have vLLM from that environment.

The disk is a separate file system (`disk.py`). Where none may be mounted, its faults are left out
and the log says so.

What another program leaves in /dev/shm meanwhile is reported too: on a machine that is shared, use
`unshare --mount` and an own /dev/shm.
"""

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from statistics import fmean

from soak.bad_requests import BadRequests, Target, check_good_requests
from soak.checks import (
    FilesLeft,
    ProcessTable,
    check_groups,
    check_metrics,
    check_status,
    check_trajectories,
    check_verified,
)
from soak.disk import Disk, mounted_disk
from soak.faults import (
    DISK_KINDS,
    KILLS,
    KINDS,
    WORKER_KINDS,
    Drawn,
    Fault,
    MomentWatch,
    Stopped,
    draw_rounds,
    partial_files,
)
from soak.log import Log
from soak.services import Service, services
from soak.trainer import MAX_STALENESS, PROMPTS, SAMPLES, Trainer, settings

_STALL_S = 400.0
_ORPHANS_S = 120.0
_MAX_STALENESS = {"overlap": 1, "async": MAX_STALENESS}
"""Of stream, a group that is carried over may become as old as it likes."""
_UNDISTURBED = Drawn(schedule="sync", workers=False, faults=())
_WATCH_S, _POLL_S, _SAMPLE_S, _SAY_S = 0.004, 0.05, 1.0, 30.0


class Round:
    """One run to its last step, however often its driver must be started again.

    Args:
        run: The run directory.
        output: The file that gets what the driver prints; not on the disk that gets full.
        arguments: Of the driver's command line.
        drawn: Its schedule and its faults.
        step_s: How long a step takes, about.
        end: When it must have reached its last step, in the time of `time.monotonic`.
        log: Gets faults and violations.
        processes: Samples the processes, and finds those left behind.
        environment: Variables of the driver beside those of this process.
        disk: On which the run directory is; None: a file system that is left alone.
    """

    def __init__(
        self,
        run: Path,
        output: Path,
        arguments: Sequence[str],
        drawn: Drawn,
        *,
        step_s: float = 0.0,
        end: float,
        log: Log,
        processes: ProcessTable,
        environment: Mapping[str, str],
        disk: Disk | None = None,
    ) -> None:
        self._disk = disk
        self._output = output
        self._arguments = arguments
        self._schedule = drawn.schedule
        self._faults = list(drawn.faults)
        self._step_s = step_s
        self._end = end
        self._log = log
        self._processes = processes
        self._environment = environment
        self._stopped = Stopped(time.monotonic)
        self._watch = MomentWatch()
        self._armed_at: float | None = None
        self._may_exit: dict[int, tuple[str, ...]] = {}  # status -> what the driver may say then
        self._progress = (-2, time.monotonic())
        self._sampled_at = 0.0
        self._said_at = time.monotonic()
        self.trainer = self._start(run)

    def _start(self, run: Path) -> Trainer:
        self._may_exit = {}
        self._log.say(f"{run.name}: a driver starts")
        trainer = Trainer(run, self._output, self._arguments, self._environment)
        self._processes.keep(trainer.process.pid)
        return trainer

    def targets(self) -> Sequence[Target]:
        """Returns the rollout servers that serve now, with the run's token."""
        try:
            token = (self.trainer.run / "server_token").read_text()
        except FileNotFoundError:
            return ()
        servers = self.trainer.servers.values()
        return [Target(address=address, secret=token) for _, address in servers]

    def finish(self, also: Mapping[str, int]) -> bool:
        """Returns whether the run reached its end, in spite of the faults.

        Args:
            also: Further processes to sample, by name.
        """
        status = None
        try:
            while True:
                status = self.trainer.process.poll()
                if status is None:
                    self._continue_due()
                    self._inject()
                    self._sample(also)
                    if self._is_over_time():
                        return False
                    # A moment in a step may be over in a tenth of a second.
                    time.sleep(_POLL_S if self._armed_at is None else _WATCH_S)
                    continue
                self._continue_due(everything=True)  # the next driver finds its disk as it was
                if not self._ended_well(status):
                    return False
                if status == 0:
                    return True
                self._log.count("resumed", f"after exit status {status}")
                self.trainer = self._start(self.trainer.run)
                self._progress = (-2, time.monotonic())
        finally:
            self._continue_due(everything=True)
            self.trainer.end()
            self._stopped.continue_due(everything=True)
            for problem in self._processes.check_orphans(_ORPHANS_S):
                self._log.violation(f"{self.trainer.run.name}: {problem}")
            for fault in self._faults:
                self._log.count("left out, for the run had ended", fault.kind.name)
            if status == 0:
                for problem in check_status(self.trainer.run):
                    self._log.violation(problem)
                for name in partial_files(self.trainer.run):
                    self._log.violation(f"{self.trainer.run.name}: {name} was left behind")

    def _continue_due(self, *, everything: bool = False) -> None:
        """Continues what was stopped and whose time has come, or all; then frees the disk too."""
        self._stopped.continue_due(everything=everything)
        if self._disk is None:
            return
        self._disk.continue_due(everything=everything)
        if everything:
            self._disk.free()

    def _hit(self, fault: Fault, targets: Sequence[int]) -> list[int]:
        """Does what the fault says; returns the pids that it hit."""
        if fault.kind.target != "disk":
            return self._stopped.send(targets, fault)
        assert self._disk is not None, "faults of the disk are drawn only with one"
        match fault.kind.signal:
            case signal.SIGKILL:
                self._disk.fill()
            case signal.SIGUSR2:
                self._disk.slow_down(fault.stopped_s)
            case _:
                self._disk.stand_still(fault.stopped_s)
        return []

    def _ended_well(self, status: int) -> bool:
        if status == 0:
            return True
        output = self.trainer.output
        said = " ".join(output.split())
        if any(says in said for says in self._may_exit.get(status, ())):
            return True
        expected = self._may_exit or "none but 0"
        self._log.violation(
            f"{self.trainer.run.name}: the driver ended with status {status} ({expected} was to be "
            f"expected); it said:\n{output[-3000:]}"
        )
        return False

    def _inject(self) -> None:
        """Does the next fault if its time has come."""
        if not self._faults:
            return
        fault, now, done = self._faults[0], time.monotonic(), self.trainer.last_step
        if done < fault.step - 1 or self._waits_for_the_disk(fault):
            return
        targets: Sequence[int] = ()
        if fault.kind.target != "disk" and not (targets := fault.targets(self.trainer)):
            return
        if self._armed_at is None:
            self._armed_at = now
        missed = done > fault.step + 1
        if fault.moment == "at any time":
            due = now >= self._armed_at + fault.after * self._step_s
        else:
            due = missed or self._watch.is_now(fault.moment, self.trainer, done)
        if not due:
            return
        self._faults.pop(0)
        self._armed_at = None
        if fault.kind.exit is not None:  # before it is sent: the driver may end at once
            self._may_exit[fault.kind.exit] = (fault.kind.says,)
            if fault.kind.target == "disk":  # where a log was written, and no checkpoint
                for status in (1, 2):
                    self._may_exit[status] = (fault.kind.says, "No space left on device")
            if "run directory" not in self.trainer.output:  # it is still being loaded
                self._may_exit[-fault.kind.signal] = ("",)
        hit = self._hit(fault, targets)
        moment = "at any time" if missed else fault.moment
        self._log.write(
            "fault",
            f"{fault.kind.name} {moment}",
            run=self.trainer.run.name,
            step=done + 1,
            pids=hit,
            stopped_s=fault.stopped_s,
        )
        if fault.kind.signal is signal.SIGKILL and hit:
            process = fault.kind.target.removeprefix("all ").rstrip("s")
            self._log.killed(self._schedule, process, len(hit))

    def _waits_for_the_disk(self, fault: Fault) -> bool:
        if self._disk is None:
            return False
        if self._disk.is_slow:  # it does one thing at a time
            return fault.kind.target == "disk"
        return self._disk.stands_still  # nothing is seen on it

    def _sample(self, also: Mapping[str, int]) -> None:
        now = time.monotonic()
        if now < self._sampled_at + _SAMPLE_S:
            return
        self._sampled_at = now
        name = self.trainer.run.name
        found: dict[str, int | None] = {
            "driver": self.trainer.process.pid,
            "rank": self.trainer.rank,
            "router": self.trainer.router,
            **self.trainer.workers,
            **{server: pid for server, (pid, _) in self.trainer.servers.items()},
        }
        # Until the first step has ended, memory grows for good reasons.
        if self.trainer.has_stepped:
            self._processes.sample(
                {f"{name}, {process}": pid for process, pid in found.items() if pid is not None}
            )
        self._processes.sample(also)

    def _is_over_time(self) -> bool:
        """Returns whether it is not worth waiting for; says now and then how far it is."""
        now, done, name = time.monotonic(), self.trainer.last_step, self.trainer.run.name
        if done != self._progress[0]:
            self._progress = (done, now)
        if now > self._said_at + _SAY_S:
            self._said_at = now
            said = self.trainer.output.strip().splitlines() or ["nothing"]
            self._log.say(f"{name}: after step {done}; the driver's last line: {said[-1]}")
        if now > self._progress[1] + _STALL_S:
            problem = f"no step ended for {_STALL_S:g} s"
        elif now > self._end:
            problem = "the time that the soak has was over"
        else:
            return False
        self._log.violation(
            f"{name}: {problem} after step {done}; the driver said:\n{self.trainer.output[-3000:]}"
        )
        return True


class Soak:
    """An undisturbed run, and rounds of it under faults.

    Args:
        directory: For runs and temporary files; exists and is empty.
        log: Gets everything.
        steps: Of each run.
        seed: Of the faults and of the bad requests.
        at_most: Minutes, after which a run that has not ended is a violation.
        disk: For the runs; None: they are in the directory, and the disk is left alone.
        vllm: The command of a vLLM server; empty: the fake engine.
        kills: Number of processes after whose kill no further round begins: a campaign of kills
            alone, with the fake engine and policy. 0: all faults, for some minutes.
    """

    def __init__(
        self,
        directory: Path,
        log: Log,
        *,
        steps: int,
        seed: int,
        at_most: float,
        disk: Disk | None = None,
        kills: int = 0,
        vllm: Sequence[str] = (),
    ) -> None:
        self._began = time.monotonic()
        self._end = self._began + 60 * at_most
        self._directory = directory
        self._log = log
        self._steps = steps
        self._seed = seed
        temporary = directory / "tmp"
        temporary.mkdir()
        # What torch compiled is kept for the next process: no file that was left behind.
        cache = str(directory / "torch-cache")
        self._environment = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": cache}
        self._disk = disk
        self._runs = directory if disk is None else disk.path
        self._kills = kills
        self._vllm = vllm
        self._kinds = KINDS + WORKER_KINDS + (() if disk is None else DISK_KINDS)
        if kills:
            self._kinds = KILLS
        self._reference = self._runs / "undisturbed"
        self._step_s = 0.0
        self._processes = ProcessTable()
        self._files = FilesLeft(temporary)

    def run(self, *, minutes: float, first_round: int, each: int) -> None:
        """Makes the undisturbed run, then rounds until the time is over.

        Args:
            minutes: After which no further round begins; one is made in any case.
            first_round: Number of the first round that is made.
            each: Number of faults of a round.
        """
        if not self._begin(self._reference).finish({}):
            return
        self._judge_processes(but=())
        took = time.monotonic() - self._began
        self._step_s = _mean_step_s(self._reference)
        self._log.write("round", "undisturbed", seconds=round(took, 1))
        self._check_files()
        with ExitStack() as stack:
            standing: Mapping[str, Service] = {}
            if not self._kills:
                log = self._directory / "services.log"
                standing = stack.enter_context(services(log, self._environment))
            for service in standing.values():
                self._processes.keep(service.pid)
            rounds = draw_rounds(self._seed, self._steps, each, kinds=self._kinds)
            for number, drawn in islice(enumerate(rounds), first_round, None):
                over = time.monotonic() > self._began + 60 * minutes
                if number > first_round and (over or 0 < self._kills <= self._log.num_killed):
                    break
                self._disturbed(number, drawn, standing)
        self._check(self._processes.check_orphans(_ORPHANS_S))
        self._judge_processes(but=())
        self._check_files()

    def _begin(self, run: Path, drawn: Drawn = _UNDISTURBED) -> Round:
        return Round(
            run,
            self._output_of(run),
            settings(
                self._steps,
                drawn.schedule,
                workers=drawn.workers,
                fake=bool(self._kills),
                vllm=self._vllm,
            ),
            drawn,
            step_s=self._step_s,
            end=self._end,
            log=self._log,
            processes=self._processes,
            environment=self._environment,
            disk=self._disk,
        )

    def _disturbed(self, number: int, drawn: Drawn, standing: Mapping[str, Service]) -> None:
        """Makes one round, and keeps its run directory if something was wrong."""
        before, began = len(self._log.violations), time.monotonic()
        schedule = drawn.schedule
        run = self._runs / f"round-{number}-{schedule}{'-workers' if drawn.workers else ''}"
        targets = {name: one.target for name, one in standing.items() if one.target is not None}
        pids = {name: service.pid for name, service in standing.items()}
        made = self._begin(run, drawn)
        with ExitStack() as stack:
            if standing:
                seed = f"{self._seed}/{number}"
                bad = BadRequests(targets, self._log, made.targets, seed=seed)
                stack.enter_context(bad)
            ended = made.finish(pids)
        if ended:
            self._check(check_verified(run))
        if ended and schedule == "sync":
            self._check(check_metrics(self._reference, run))
            self._check(check_trajectories(self._reference, run))
        elif ended:
            self._check(
                check_groups(
                    run,
                    steps=self._steps,
                    per_step=PROMPTS * SAMPLES,
                    max_staleness=_MAX_STALENESS.get(schedule),
                )
            )
        if standing:
            self._check(check_good_requests(targets))
        self._judge_processes(but=pids.values())
        wrong = len(self._log.violations) - before
        self._log.write(
            "round",
            "as it must be" if not wrong else "NOT as it must be",
            number=number,
            schedule=schedule,
            workers=drawn.workers,
            seconds=round(time.monotonic() - began, 1),
            violations=wrong,
        )
        if not wrong:
            shutil.rmtree(run)
            self._output_of(run).unlink()

    def _output_of(self, run: Path) -> Path:
        return self._directory / f"{run.name}.output"

    def _judge_processes(self, *, but: Collection[int]) -> None:
        for series in self._processes.take_series(but=but):
            problems = series.problems()
            self._check(problems)
            if series.is_judged:
                self._log.write("memory", series.kind, shown=False, **series.told())

    def _check_files(self) -> None:
        self._check(self._files.problems())

    def _check(self, problems: Sequence[str]) -> None:
        for problem in problems:
            self._log.violation(problem)


def _mean_step_s(run: Path) -> float:
    """Returns how long a step took."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return fmean(line["time/step_s"] for line in map(json.loads, lines) if line["step"])


@contextmanager
def _disk(directory: Path, log: Log) -> Iterator[Disk | None]:
    """Mounts the disk of the runs; where that may not be done, says so and yields None."""
    with ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(mounted_disk(directory))
        except PermissionError as error:
            log.write("left out", f"full and slow disks, and disks that stand still: {error}")
        yield disk


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks for the time that was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="soak", description="Runs the main job under faults and checks that it holds."
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="no round begins later (default %(default)g)")
    add("--at-most", type=float, help="minutes, after which it fails (default 4 x MINUTES + 40)")
    add("--seed", type=int, default=0, help="of faults and bad requests (default %(default)s)")
    add("--first-round", type=int, default=0, metavar="N", help="begin with this round")
    add("--steps", type=int, default=12, help="of each run (default %(default)s)")
    add("--faults", type=int, default=6, help="of each round (default %(default)s)")
    add("--kills", type=int, default=0, help="kill so many processes, and do nothing else")
    add("--vllm", type=shlex.split, default=(), help="with --kills: the command of a vLLM server")
    add("--directory", type=Path, help="for logs and runs; default: a new one for temporary files")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="treadle-soak-"))
    directory.mkdir(exist_ok=True)
    log = Log(directory / "soak.jsonl")
    log.write("soak", str(directory), seed=arguments.seed, minutes=arguments.minutes)
    at_most = arguments.at_most
    try:
        disks: AbstractContextManager[Disk | None] = nullcontext()
        if not arguments.kills:
            disks = _disk(directory.resolve(), log)
        with disks as disk:
            Soak(
                directory.resolve(),
                log,
                steps=arguments.steps,
                seed=arguments.seed,
                at_most=4 * arguments.minutes + 40 if at_most is None else at_most,
                disk=disk,
                kills=arguments.kills,
                vllm=arguments.vllm,
            ).run(
                minutes=arguments.minutes, first_round=arguments.first_round, each=arguments.faults
            )
            if disk is not None and log.violations:
                shutil.copytree(disk.path, directory / "runs", dirs_exist_ok=True)
    finally:
        sys.stdout.write(log.summary() + "\n")
        log.close()
    return 1 if log.violations else 0


if __name__ == "__main__":
    sys.exit(main())
