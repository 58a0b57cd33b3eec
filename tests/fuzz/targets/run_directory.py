"""Run directories: a whole one, in which each part replaces a file.

The head is `PATH` or `without PATH`, relative to the run directory; the body is the content. Tried
are a resume up to where it would train, `treadle report`, `treadle export` and `treadle eval` up to
where it would start a server.
"""

import asyncio
import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from fuzz.inputs import Input, Part, read_corpus
from fuzz.target import Fell, Target, logged

from treadle.agent_loop import SetupError
from treadle.trainer.checkpoint.begin_or_resume import find_resume_point
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
)
from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.demo import DEMO
from treadle.trainer.evaluation.settings import load_settings
from treadle.trainer.evaluation.source import find_source
from treadle.trainer.main import main
from treadle.trainer.report import MetricsLog
from treadle.trainer.report.notes import NotesLog
from treadle.trainer.report.status import Status, write_status
from treadle.trainer.report.testing import make_trajectory
from treadle.trainer.report.trajectories import TrajectoryLog

_MAX_CHARACTERS = 4000
HERE, THERE = str(DEMO.parent), "$DEMO"
"""The demo's folder, whose path is another one on each machine, and what stands for it."""


class RunDirectoryTarget(Target):
    """A run directory with two checkpoints."""

    promises = (
        "A resume, a report, an export and an evaluation work, or end with one of their errors, of "
        "bounded length, never with a trace. No checkpoint is touched. A resume keeps every whole "
        "line of its steps, and the damaged files beside."
    )
    form = "json"

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.heads = tuple(
            head
            for parts in read_corpus("run_directory").values()
            for part in parts
            for head in (part.head, f"without {part.head}")
        )

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        make_run(self._folder / "base")
        self._config = load_config([DEMO], []).config
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, parts: Input) -> None:
        run = self._folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self._folder / "base", run)
        for part in parts:
            _change(run, part)
        before = _contents(run)
        for work in (self._report, self._export, self._evaluate, self._resume):
            with logged() as log:
                _ends_well(work, run)
            if (size := sum(map(len, log))) > _MAX_CHARACTERS:
                raise Fell(f"{work.__name__} logged {size} characters: {log[0][:2000]}")
        _check_nothing_lost(run, before)

    def _report(self, run: Path) -> None:
        _command("report", str(run), "--out", str(self._folder / "page.html"))

    def _export(self, run: Path) -> None:
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        if any((step / "hf").is_dir() for step in (run / CHECKPOINTS).glob("step-*")):
            _command("export", str(run), str(out))

    def _evaluate(self, run: Path) -> None:
        with contextlib.suppress(SetupError, ConfigError, RunDirectoryError):
            load_settings(find_source(str(run)), files=[], overrides=[])

    def _resume(self, run: Path) -> None:
        checkpoints = Checkpoints(run / CHECKPOINTS, keep=2)
        try:
            with RunDirectory(run) as directory:
                point = find_resume_point(directory, checkpoints, self._config)
                if not point.begun:
                    return
                MetricsLog(run / "metrics.jsonl", resume_after=point.after).close()
                TrajectoryLog(run / "trajectories.jsonl", resume_after=point.after).close()
                NotesLog(run / "notes.jsonl", resume_after=point.after)
        except RunDirectoryError as error:
            if len(str(error)) > _MAX_CHARACTERS:
                raise Fell(f"an error of {len(str(error))} characters") from error


def make_run(path: Path) -> None:
    """Makes the run directory of a run of two steps, without its tensors."""
    config = load_config([DEMO], []).config
    checkpoints = Checkpoints(path / CHECKPOINTS, keep=2)
    with (
        RunDirectory(path) as directory,
        MetricsLog(path / "metrics.jsonl") as metrics,
        TrajectoryLog(
            path / "trajectories.jsonl", decode=lambda ids: " ".join(map(str, ids))
        ) as log,
    ):
        directory.write_config(_written(config))
        notes = NotesLog(path / "notes.jsonl")
        for step in (1, 2):
            log.append(step, [make_trajectory(reward=step / 2)], phase="train", limit=1)
            notes.append(step, "said")
            values = {"reward/mean": step / 2, "time/step_s": 1.5, "time/save_s": 0.1}
            metrics.append(step, values)
            asyncio.run(checkpoints.save(step, values, _write_policy))
    write_status(path, Status(state="finished"))


async def _write_policy(folder: Path) -> None:
    for name in ("policy", "hf"):
        (folder / name).mkdir()
        (folder / name / "weights").write_text(f"{folder.name} {name}")


def _written(config: Config) -> dict[str, object]:
    return dict(config.model_dump(mode="json"))


def run_files() -> Iterator[Part]:
    """The small files of the run directory, as parts."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        make_run(run)
        for path in sorted(run.rglob("*")):
            if path.is_file() and path.name not in ("lock", "weights"):
                text = path.read_text().replace(HERE, THERE).replace(str(run), "$RUN")
                yield Part(path.relative_to(run).as_posix(), text.encode())


def _change(run: Path, part: Part) -> None:
    head = part.head.removeprefix("without ")
    path = run / head
    if head != part.head:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    body = part.body.replace(THERE.encode(), HERE.encode()).replace(b"$RUN", str(run).encode())
    path.write_bytes(body)


def _ends_well(work: Callable[[Path], None], run: Path) -> None:
    try:
        work(run)
    except Fell:
        raise
    except Exception as error:
        raise Fell(f"{work.__name__}: {type(error).__name__}: {error}") from error


def _command(*arguments: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    if status not in (0, 1, 2):
        raise Fell(f"{arguments[0]} ended with {status}")
    if (status != 0) != err.getvalue().startswith("error: ") or "Traceback" in err.getvalue():
        raise Fell(f"{arguments[0]} ended with {status} and said {err.getvalue()[:2000]}")
    if len(err.getvalue()) > _MAX_CHARACTERS:
        raise Fell(f"{arguments[0]}: an error of {len(err.getvalue())} characters")


def _contents(run: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file()
    }


def _check_nothing_lost(run: Path, before: dict[str, bytes]) -> None:
    after = _contents(run)
    for name, content in before.items():
        if name == "lock" or after.get(name) == content:
            continue
        if not name.endswith(".jsonl"):
            raise Fell(f"{name} was changed or removed")
        if after.get(f"{name}.damaged") == content:
            continue
        last = max((_step(line) or 0 for line in after.get(name, b"").splitlines()), default=0)
        for line in content.splitlines(keepends=True):
            step = _step(line)
            whole = line.endswith(b"\n") and step is not None and step <= last
            if whole and line not in after.get(name, b""):
                raise Fell(f"{name} lost a line of step {step}")


def _step(line: bytes) -> int | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        step = json.loads(line)["step"]
        return step if isinstance(step, int) else None
    return None
