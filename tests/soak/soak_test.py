"""The soak notices what it looks for: each check fails where what it checks does not hold."""

import asyncio
import ctypes
import errno
import fcntl
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from soak.bad_requests import BadRequests, Target, check_good_requests
from soak.checks import (
    FilesLeft,
    ProcessTable,
    Series,
    check_groups,
    check_metrics,
    check_status,
    check_trajectories,
)
from soak.disk import mounted_disk
from soak.faults import (
    KINDS,
    MOMENTS,
    SCHEDULES,
    WORKER_KINDS,
    Fault,
    Stopped,
    draw_rounds,
    partial_files,
)
from soak.log import Log
from soak.main import main
from soak.proxied_server import DELAY_S, Proxy

from treadle.trainer.report.status import Status, read_status, write_status

Lines = list[dict[str, Any]]


@pytest.fixture
def processes() -> Iterator[ProcessTable]:
    """The table of this process, which adopts orphans until the test has ended."""
    yield ProcessTable()
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "soak.jsonl")
    yield log
    log.close()


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that are equal."""
    for name in ("undisturbed", "round-0"):
        run = tmp_path / name
        run.mkdir()
        _write(run / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5, "servers/lost": 0.0}])
        _write(
            run / "trajectories.jsonl",
            [
                _trajectory("val", step=1, index=0, version=1),
                _trajectory("train", step=1, index=0, version=0),
                _trajectory("train", step=1, index=1, version=0),
            ],
        )
    return tmp_path / "undisturbed", tmp_path / "round-0"


def _trajectory(phase: str, *, step: int, index: int, version: int) -> dict[str, Any]:
    spans = [
        {"origin": "prompt", "weight_version": None},
        {"origin": "sampled", "weight_version": version},
    ]
    return {
        "phase": phase,
        "step": step,
        "task_id": f"{phase}/7",
        "rollout_index": index,
        "samples": [{"ids": [1, 2, 3], "spans": spans}],
    }


def _write(path: Path, lines: Lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _edit(path: Path, edit: Callable[[Lines], object]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    _write(path, lines)


def test_equal_runs_have_no_problem(runs: tuple[Path, Path]) -> None:
    _edit(runs[1] / "metrics.jsonl", lambda lines: lines[0].update({"servers/lost": 1.0}))
    assert check_metrics(*runs) == []
    assert check_trajectories(*runs) == []


def test_a_metric_that_differs_is_noticed(runs: tuple[Path, Path]) -> None:
    _edit(runs[1] / "metrics.jsonl", lambda lines: lines[0].update({"reward/mean": 0.5000000001}))
    (problem,) = check_metrics(*runs)
    assert "reward/mean: 0.5 and 0.5000000001" in problem


def test_a_line_too_many_is_noticed(runs: tuple[Path, Path]) -> None:
    _edit(runs[1] / "metrics.jsonl", lambda lines: lines.append({"step": 2}))
    assert check_metrics(*runs)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda lines: lines.append(lines[1]), "is logged 2 times"),
        (lambda lines: lines.pop(), "is missing"),
        (lambda lines: lines[2].update(rollout_index=9), "is one too many"),
        (lambda lines: lines[1]["samples"][0].update(ids=[1, 2, 4]), "has other tokens"),
        (
            lambda lines: lines[1]["samples"][0]["spans"][1].update(weight_version=1),
            "of step 1 has tokens of versions [1], not 0",
        ),
        (
            lambda lines: lines[0]["samples"][0]["spans"][1].update(weight_version=0),
            "of step 1 has tokens of versions [0], not 1",
        ),
    ],
)
def test_a_wrong_trajectory_is_noticed(
    runs: tuple[Path, Path], edit: Callable[[Lines], object], says: str
) -> None:
    _edit(runs[1] / "trajectories.jsonl", edit)
    assert any(says in problem for problem in check_trajectories(*runs))


def test_growth_is_noticed_and_a_warm_up_is_none() -> None:
    warm = [10.0 * n for n in range(100)] + [1000.0] * 200
    leaking = [0.3 * n for n in range(300)]
    flat = [20.0] * 300
    working = [300.0, 450.0, 370.0] * 100
    assert Series("server", memory=warm, descriptors=flat).problems() == []
    assert Series("rank", memory=working, descriptors=flat).problems() == []
    grows = Series("server", memory=leaking, descriptors=flat)
    assert grows.told()["memory_mib_over_time"] == leaking[::25]
    (problem,) = grows.problems()
    assert "memory in MiB grew by 30.0" in problem
    (problem,) = Series("server", memory=flat, descriptors=leaking).problems()
    assert "descriptors grew by 30.0" in problem


def test_memory_and_descriptors_are_those_of_the_process(processes: ProcessTable) -> None:
    processes.sample({"this": os.getpid()})
    (series,) = processes.take_series()
    assert series.memory[0] > 5
    assert series.descriptors[0] >= 3
    assert processes.take_series() == []


def test_a_process_that_is_left_behind_is_noticed_and_ended(processes: ProcessTable) -> None:
    parent = subprocess.run(
        ["sh", "-c", "tail -f /dev/null >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
    )
    (problem,) = processes.check_orphans(0.0)
    assert problem.startswith(f"process {int(parent.stdout)} was left behind: tail -f")
    assert processes.check_orphans(10.0) == []


def test_files_that_are_left_behind_are_noticed(tmp_path: Path) -> None:
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    for directory in (temporary, shared):
        directory.mkdir()
    (shared / "of another program").touch()
    left = FilesLeft(temporary, shared)
    with (shared / "held").open("w"):
        assert left.problems() == []
    (temporary / "file").touch()
    names = [Path(problem.removesuffix(" was left behind")).name for problem in left.problems()]
    assert names == ["held", "file"]


def test_what_a_run_left_in_its_directory_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002.partial").mkdir(parents=True)
    (tmp_path / "server_token").touch()
    assert sorted(partial_files(tmp_path)) == ["checkpoints/step-00000002.partial", "server_token"]


def test_the_faults_follow_from_the_seed_and_all_come() -> None:
    rounds = list(islice(draw_rounds(1, 12, 14), 6))
    assert rounds == list(islice(draw_rounds(1, 12, 14), 6))
    assert rounds != list(islice(draw_rounds(2, 12, 14), 6))
    drawn = {(fault.kind.name, fault.moment) for each in rounds for fault in each.faults}
    assert len(drawn) == (len(KINDS) + len(WORKER_KINDS)) * len(MOMENTS) == 57


def test_every_schedule_comes_with_and_without_loop_workers() -> None:
    rounds = list(islice(draw_rounds(7, 12, 6), 8))
    first, then = (
        {(each.schedule, each.workers) for each in half} for half in (rounds[:4], rounds[4:])
    )
    assert {schedule for schedule, _ in first} == {schedule for schedule, _ in then}
    assert len(first | then) == 2 * len(SCHEDULES)
    assert [each.workers for each in rounds[:4]] == [True, False, True, False]
    hit = {each.workers: {fault.kind for fault in each.faults} for each in rounds}
    assert hit[False].isdisjoint(WORKER_KINDS)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A run that sampled beside training: one trajectory in each of two steps."""
    run = tmp_path / "round-1-async"
    (run / "groups").mkdir(parents=True)
    _write(run / "metrics.jsonl", [{"step": step} for step in range(3)])
    trajectories = [_trajectory("train", step=s, index=s, version=0) for s in (1, 2)]
    _write(run / "trajectories.jsonl", trajectories)
    return run


def _problems(run: Path) -> list[str]:
    return check_groups(run, steps=2, per_step=1, max_staleness=1)


def test_a_run_beside_training_that_is_whole_has_no_problem(beside: Path) -> None:
    assert _problems(beside) == []


@pytest.mark.parametrize(
    ("file", "edit", "says"),
    [
        ("metrics", lambda lines: lines.pop(1), "the steps are [0, 2]"),
        ("metrics", lambda lines: lines[1].update({"sampling/groups_failed": 1.0}), "1 groups wer"),
        ("trajectories", lambda lines: lines[1].update(rollout_index=1), "was trained on 2 times"),
        ("trajectories", lambda lines: lines.pop(), "step 2 trained on 0 trajectories, not 1"),
        (
            "trajectories",
            lambda lines: lines[0]["samples"][0]["spans"][1].update(weight_version=1),
            "of step 1 has tokens of versions [1], not from 0 to 0 in order",
        ),
        (
            "trajectories",
            lambda lines: lines[1]["samples"][0]["spans"].insert(
                1, {"origin": "sampled", "weight_version": 1}
            ),
            "of step 2 has tokens of versions [1, 0], not from 0 to 1 in order",
        ),
    ],
)
def test_what_a_run_beside_training_must_not_do_is_noticed(
    beside: Path, file: str, edit: Callable[[Lines], object], says: str
) -> None:
    _edit(beside / f"{file}.jsonl", edit)
    assert any(says in problem for problem in _problems(beside))


def test_a_run_that_does_not_say_how_it_ended_is_noticed(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="running"))
    assert check_status(tmp_path) == [
        f"{tmp_path.name}: it reached its end, and its status is 'killed'"
    ]
    write_status(tmp_path, Status(state="finished"))
    assert check_status(tmp_path) == []


def test_the_disk_gets_full_slow_and_stands_still(tmp_path: Path) -> None:
    now = 0.0
    try:
        with mounted_disk(tmp_path, lambda: now) as disk:
            write_status(disk.path, Status(state="running"))
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                (disk.path / "file").write_bytes(bytes(1 << 16))
            write_status(disk.path, Status(state="failed", error="the disk is full " * 1000))
            assert read_status(disk.path).state == "failed"
            disk.free()
            (disk.path / "file").write_bytes(bytes(1 << 16))
            disk.stand_still(5.0)
            written = threading.Event()

            def write() -> None:
                (disk.path / "file").write_bytes(b"late")
                written.set()

            writer = threading.Thread(target=write)
            writer.start()
            assert not written.wait(0.2)
            now = 6.0
            disk.continue_due()
            assert written.wait(30)
            writer.join()
            disk.slow_down(1.0)
            turns = []
            for _ in range(12):
                turns.append(_is_frozen(disk.path))
                now += 0.1001
                disk.continue_due()
            assert turns == [True, True, False] * 3 + [True, False, False]
            assert not disk.is_slow
    except PermissionError as error:
        pytest.skip(str(error))
    assert list(tmp_path.iterdir()) == []


def _is_frozen(path: Path) -> bool:
    """Freezes a file system for a moment, which fails if it is frozen already."""
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, 0xC0045877, 0)
        fcntl.ioctl(directory, 0xC0045878, 0)
    except OSError as error:
        assert error.errno == errno.EBUSY
        return True
    finally:
        os.close(directory)
    return False


@pytest.mark.asyncio
async def test_the_proxy_cuts_and_delays_what_it_forwards() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            writer.write(piece)

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        proxy = Proxy("127.0.0.1", server.sockets[0].getsockname()[1])
        async with await asyncio.start_server(proxy.forward, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"at once")
            assert await reader.readexactly(7) == b"at once"
            proxy.delay()
            began = asyncio.get_running_loop().time()
            writer.write(b"late")
            assert await reader.readexactly(4) == b"late"
            assert asyncio.get_running_loop().time() - began >= DELAY_S
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            writer.close()


def test_a_stopped_process_goes_on_when_its_time_has_come() -> None:
    now = 0.0
    stopped = Stopped(lambda: now)
    (kind,) = (kind for kind in KINDS if kind.name == "a server stopped briefly")
    fault = Fault(kind=kind, moment="at any time", step=1, after=0.0, stopped_s=2.0, choice=0.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert stopped.send([process.pid, 2**22], fault) == [process.pid]
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped.continue_due()
        now = 3.0
        stopped.continue_due()
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        process.send_signal(signal.SIGKILL)


class _TakesEverything(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"run_result": {"stdout": "41\\n"}}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_takes_bad_requests_is_noticed(log: Log) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _TakesEverything) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        target = Target(address=f"127.0.0.1:{server.server_port}", secret="key")
        targets = {"proxy": target, "sandbox": target}
        bad = BadRequests(targets, log, tuple, seed="0")
        bad.send("proxy: no key")
        bad.send("sandbox: bad JSON")
        problems = check_good_requests({"sandbox": target})
        server.shutdown()
        serving.join()
    assert [sentence.rpartition(" was answered ")[2] for sentence in log.violations] == [
        "'200'"
    ] * 2
    assert len(problems) == 1
    assert "the sandbox answered a good request with 200" in problems[0]


def test_a_server_that_is_not_there_is_noticed(log: Log) -> None:
    targets = {name: Target(address="127.0.0.1:1") for name in ("proxy", "sandbox")}
    BadRequests(targets, log, tuple, seed="0").send("proxy: no key")
    (violation,) = log.violations
    assert "ConnectionRefusedError" in violation
    problems = check_good_requests(targets)
    assert len(problems) == 2
    assert all("ConnectionRefusedError" in problem for problem in problems)


def test_a_sender_that_dies_is_a_violation(log: Log) -> None:
    def servers() -> Sequence[Target]:
        raise RuntimeError("the harness is broken")

    with BadRequests({}, log, servers, seed="0", pause_s=0.0) as bad:
        bad._thread.join(30)
    (violation,) = log.violations
    assert violation.startswith("no more bad requests are sent:")
    assert "the harness is broken" in violation


def test_a_run_that_ends_without_a_fault_is_a_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: ProcessTable
) -> None:
    # No run has 0 steps: the driver ends at once with status 2.
    assert main(["--steps", "0", "--minutes", "0", "--directory", str(tmp_path / "soak")]) == 1
    printed = capsys.readouterr().out
    assert "undisturbed: the driver ended with status 2 (none but 0 was to be expected)" in printed
    assert "1 violations" in printed
    lines = (tmp_path / "soak" / "soak.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["soak", "VIOLATION"]


def test_a_run_without_end_is_a_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: ProcessTable
) -> None:
    assert main(["--minutes", "0", "--at-most", "0", "--directory", str(tmp_path / "soak")]) == 1
    printed = capsys.readouterr().out
    assert " s  undisturbed: a driver starts\n" in printed
    assert "undisturbed: the time that the soak has was over after step -1; the driver" in printed
    assert "1 violations" in printed
