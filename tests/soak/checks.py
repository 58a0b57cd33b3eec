"""What must hold after a round: equal results, whole trajectories, flat memory, nothing left.

Each check returns sentences about what does not hold; none means that all does.
"""

import contextlib
import ctypes
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_runs import differences

from treadle.rollout_server.testing.descendants import descendants
from treadle.trainer.checkpoint.run_directory import CONFIG
from treadle.trainer.config.load import load_config
from treadle.trainer.report.status import read_status
from treadle.trainer.verify.quick import quick_problems

# They count what was done to the servers and the workers, so they differ.
OF_FAULTS = (
    *("servers/", "workers/", "run/resumes"),
    *("agent_loop/interruptions", "sync/bytes", "sync/delta_ratio"),
)
MAX_GROWTH_MIB, MAX_GROWTH_DESCRIPTORS, LEAST_SAMPLES = 24.0, 8.0, 300
_PARTS = 12
_PR_SET_CHILD_SUBREAPER = 36
_MIB = 1 << 20


def check_metrics(reference: Path, run: Path) -> list[str]:
    """Compares all metrics of two runs bit for bit, except wall times and counts of the faults."""
    found = differences(reference, run, leave_out=OF_FAULTS)
    return [f"{run.name} learned something else than the undisturbed run: {one}" for one in found]


def check_trajectories(reference: Path, run: Path) -> list[str]:
    """Checks that each task ended once in each step, with the same tokens of the right version."""
    wanted, found = (_trajectories(directory) for directory in (reference, run))
    problems = [
        f"{run.name}: trajectory {key} is logged {number} times"
        for key, number in Counter(key for key, _ in found).items()
        if number != 1
    ]
    by_key = dict(found)
    for key, line in wanted:
        other = by_key.pop(key, None)
        if other is None:
            problems.append(f"{run.name}: trajectory {key} is missing")
        elif [sample["ids"] for sample in line["samples"]] != [
            sample["ids"] for sample in other["samples"]
        ]:
            problems.append(f"{run.name}: trajectory {key} has other tokens")
    problems += [f"{run.name}: trajectory {key} is one too many" for key in by_key]
    for (phase, step, *task), line in found:
        version = step if phase == "val" else step - 1
        versions = {
            span["weight_version"]
            for sample in line["samples"]
            for span in sample["spans"]
            if span["origin"] == "sampled"
        }
        if versions != {version}:
            problems.append(
                f"{run.name}: {phase} {task} of step {step} has tokens of versions "
                f"{sorted(versions)}, not {version}"
            )
    return problems


def check_groups(run: Path, *, steps: int, per_step: int, max_staleness: int | None) -> list[str]:
    """Checks a run that sampled beside training: each task once, and tokens of allowed versions.

    Such a run depends on which trajectory ends first, so no other run is equal to it.

    Args:
        run: The run directory.
        steps: Of the run.
        per_step: Trajectories that a step trains on.
        max_staleness: Of a group, in versions; None: it has no bound.
    """
    problems = []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [line["step"] for line in lines] != list(range(steps + 1)):
        problems.append(f"{run.name}: the steps are {[line['step'] for line in lines]}")
    if lost := sum(line.get("sampling/groups_failed", 0.0) for line in lines):
        problems.append(f"{run.name}: {lost:.0f} groups were lost")
    found = _trajectories(run)
    trained = [key for key, _ in found if key[0] == "train"]
    of_rows = Counter(key[2:] for key in trained)
    problems += [
        f"{run.name}: trajectory {task} was trained on {number} times"
        for task, number in of_rows.items()
        if number != 1
    ]
    of_steps = Counter(key[1] for key in trained)
    problems += [
        f"{run.name}: step {step} trained on {of_steps[step]} trajectories, not {per_step}"
        for step in range(1, steps + 1)
        if of_steps[step] != per_step
    ]
    for (phase, step, *task), line in found:
        newest = step if phase == "val" else step - 1
        oldest = newest if phase == "val" else max(0, newest - (max_staleness or newest))
        for sample in line["samples"]:
            versions = [s["weight_version"] for s in sample["spans"] if s["origin"] == "sampled"]
            if versions != sorted(versions) or not all(oldest <= v <= newest for v in versions):
                problems.append(
                    f"{run.name}: {phase} {task} of step {step} has tokens of versions {versions}, "
                    f"not from {oldest} to {newest} in order"
                )
    problems += [
        f"{run.name}: group {path.name} was left behind" for path in (run / "groups").glob("*")
    ]
    return problems


def check_status(run: Path) -> list[str]:
    """Checks that a run that reached its end says so, also where its disk was full."""
    if (state := read_status(run).state) == "finished":
        return []
    return [f"{run.name}: it reached its end, and its status is {state!r}"]


def check_verified(run: Path) -> list[str]:
    """Checks what `treadle verify` finds by the files of a run."""
    config = load_config([run / CONFIG], []).config
    return [f"{run.name}: {problem}" for problem in quick_problems(run, config)]


_Key = tuple[str, int, str, int]


def _trajectories(run: Path) -> list[tuple[_Key, Mapping[str, Any]]]:
    lines = (run / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        ((line["phase"], line["step"], line["task_id"], line["rollout_index"]), line)
        for line in map(json.loads, lines)
    ]


@dataclass(slots=True)
class Series:
    """Samples of one process: its memory that is not shared, in MiB, and its descriptors."""

    name: str
    memory: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    @property
    def is_judged(self) -> bool:
        """Whether there are enough samples."""
        return len(self.memory) >= LEAST_SAMPLES

    @property
    def kind(self) -> str:
        """What the process does, without its run and its number."""
        return self.name.rpartition(", ")[2].partition("-")[0]

    def told(self) -> Mapping[str, float | str | list[float]]:
        """Returns what was measured; the memory over time as the first of each twelfth."""
        return {
            "name": self.name,
            "samples": len(self.memory),
            "memory_mib": round(self.memory[-1], 1),
            "memory_grown_mib": round(growth(self.memory), 1),
            "memory_mib_over_time": [
                round(self.memory[len(self.memory) * part // _PARTS], 1) for part in range(_PARTS)
            ],
            "descriptors": self.descriptors[-1],
            "descriptors_grown": growth(self.descriptors),
        }

    def problems(self) -> list[str]:
        """Checks that neither grew: the least of the last and of the middle third are compared.

        The first third is the warm-up; what is allocated for a moment only is no growth. A process
        of too few samples is not judged.
        """
        found = []
        for what, values, limit in (
            ("memory in MiB", self.memory, MAX_GROWTH_MIB),
            ("descriptors", self.descriptors, MAX_GROWTH_DESCRIPTORS),
        ):
            if self.is_judged and (grown := growth(values)) > limit:
                found.append(
                    f"{self.name}: {what} grew by {grown:.1f} between the middle and the last "
                    f"third of {len(values)} samples, to {values[-1]:.1f}; at most {limit:g}"
                )
        return found


def growth(values: Sequence[float]) -> float:
    """Returns the least of the last third minus the least of the middle third."""
    third = len(values) // 3
    return min(values[-third:]) - min(values[third:-third])


class ProcessTable:
    """The processes that a soak started, directly or not: their memory, and those left behind.

    This process adopts descendants whose parents have ended, so none is lost from sight.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError("this process cannot adopt the orphans of its children")
        self.series: dict[tuple[int, str], Series] = {}
        self._clock = clock
        self._own: set[int] = set()

    def keep(self, pid: int) -> None:
        """Names a child that is waited for by whoever started it."""
        self._own.add(pid)

    def sample(self, processes: Mapping[str, int]) -> None:
        """Notes the memory and the descriptors of processes, by name."""
        for name, pid in processes.items():
            try:
                began = _stat(pid)[19]
                resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except (FileNotFoundError, ProcessLookupError):
                continue
            if not resident:  # it has ended
                continue
            series = self.series.setdefault((pid, began), Series(name))
            series.memory.append((resident - shared) * os.sysconf("SC_PAGE_SIZE") / _MIB)
            series.descriptors.append(descriptors)

    def take_series(self, *, but: Collection[int] = ()) -> list[Series]:
        """Returns the samples of all processes but some, and forgets them."""
        taken = {key: series for key, series in self.series.items() if key[0] not in but}
        self.series = {key: series for key, series in self.series.items() if key not in taken}
        return list(taken.values())

    def orphans(self) -> list[int]:
        """Returns the children of this process that it did not start, after reaping the dead."""
        found = []
        for pid in descendants(os.getpid()):
            try:
                stat = _stat(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) != os.getpid() or pid in self._own:
                continue
            if stat[0] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            else:
                found.append(pid)
        return found

    def check_orphans(self, within_s: float) -> list[str]:
        """Waits until no orphan is left; kills those that stay and returns them."""
        end = self._clock() + within_s
        while (left := self.orphans()) and self._clock() < end:
            time.sleep(0.1)
        problems = [f"process {pid} was left behind: {_command(pid)}" for pid in left]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return problems


class FilesLeft:
    """The objects in shared memory and the temporary files that appear while a soak runs.

    An object that a living process holds is not left behind: other programs of the machine have
    some too.
    """

    def __init__(self, temporary: Path, shared: Path = Path("/dev/shm")) -> None:
        self._temporary, self._shared = temporary, shared
        self._before = self._objects()

    def _objects(self) -> set[Path]:
        return {path for path in self._shared.rglob("*") if not path.is_dir()}

    def problems(self) -> list[str]:
        """Returns what was left behind."""
        new = self._objects() - self._before
        left = sorted(map(str, new - _held_files())) if new else []
        left += sorted(map(str, self._temporary.iterdir()))
        return [f"{path} was left behind" for path in left]


def _held_files() -> set[Path]:
    return set(map(Path, _links()))


def _links() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    yield line[line.index("/dev/shm/") :]
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield os.readlink(link)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "(it has ended meanwhile)"
