"""The process of one logger: reads records on its standard input, and gives them to the logger.

Invariant: whatever the logger raises is reported to the driver and loses one record. A step that
the logger took before the run was resumed is not given again, unless the logger overwrites it
(`overwrites_steps`). Steps missing after the last one that it took are given to it from
`metrics.jsonl`; a step lost before that one stays lost, since services such as W&B take only
increasing steps. The process ends when its input ends, whatever the logger does.

The first line is a `Hello`; each later one is a record: {"kind": "metrics", "step", "values"},
{"kind": "table", "step", "name", "columns", "rows"}, {"kind": "alert", "step", "name", "text"} or
{"kind": "finish", "end", "summary"}. The
answers, on the standard output that the process was given, are {"kind": "started"}, then for each
record {"kind": "done", "sent"} or {"kind": "failed", "sent", "what", "text"}, and {"kind":
"ended"}. `sent` is false for a record that the process itself took from `metrics.jsonl`, and for a
failure to start.
"""

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from treadle.agent_loop import SetupError, user_place
from treadle.trainer.loggers.named import load_logger
from treadle.trainer.loggers.run_logger import End, LoggedRun, RunLogger, Table, TakesAlerts
from treadle.trainer.report.metrics import STEP, read_metrics

__all__ = ["main"]

Record = Mapping[str, Any]


class _Taken:
    """The last step of each kind of record that the logger took, in a file of the run directory.

    Raises:
        SetupError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = _read_taken(path)

    def last(self, kind: str) -> int:
        """Returns the step; -1: none."""
        return self._last.get(kind, -1)

    def take(self, kind: str, step: int) -> None:
        """Keeps the step."""
        self._last[kind] = step
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._last))
        partial.replace(self._path)


def _read_taken(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    try:
        last = json.loads(path.read_bytes())
        why = "it must be a mapping of whole numbers"
    except ValueError as error:
        last, why = None, str(error)
    if isinstance(last, dict) and all(type(step) is int for step in last.values()):
        return last
    raise SetupError(
        f"{path}, which holds the last step that the logger took, is damaged: {why}. Remove it: "
        "the logger then gets all steps of metrics.jsonl again when the run is resumed"
    )


@dataclass(slots=True)
class _Logging:
    """A logger in use."""

    logger: RunLogger
    taken: _Taken
    resumed_after: int | None

    def give(self, record: Record) -> None:
        """Gives one record to the logger."""
        kind = record["kind"]
        if kind == "finish":
            self.logger.finish(cast(End, record["end"]), record["summary"])
            return
        key = "metrics" if kind == "metrics" else f"{kind} {record['name']}"
        step: int = record["step"]
        if step <= self._has(key):
            return
        if kind == "metrics":
            self.logger.metrics(step, record["values"])
        elif kind == "alert":
            if isinstance(self.logger, TakesAlerts):
                self.logger.alert(step, record["name"], record["text"])
        else:
            table = Table(name=record["name"], columns=record["columns"], rows=record["rows"])
            self.logger.table(step, table)
        self.taken.take(key, step)

    def _has(self, key: str) -> int:
        last = self.taken.last(key)
        if getattr(self.logger, "overwrites_steps", False) and self.resumed_after is not None:
            return min(last, self.resumed_after)
        return last


def main() -> None:
    """Runs until the input ends or the logger has finished."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a client prints belongs into the log

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")

    records: queue.SimpleQueue[Record] = queue.SimpleQueue()
    hello = json.loads(sys.stdin.readline())
    threading.Thread(target=_read, args=(records, hello["deadline_s"]), daemon=True).start()
    _serve(hello, records, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a client's own end at exit may hang; it has finished


def _read(records: "queue.SimpleQueue[Record]", deadline_s: float) -> None:
    """Reads to the end of the input; the logger then has a limited time to finish."""
    for line in sys.stdin:
        records.put(json.loads(line))
    records.put({"kind": "finish", "end": "interrupted", "summary": {}})
    threading.Event().wait(deadline_s)
    os._exit(1)


def _serve(
    hello: Record, records: "queue.SimpleQueue[Record]", answer: Callable[..., None]
) -> None:
    run = hello["run"]
    logged = LoggedRun(**{**run, "directory": Path(run["directory"]).absolute()})
    try:  # the files first: a client that was made would have to be finished
        taken, before = _Taken(Path(hello["taken"])), _before(logged)
        logger = load_logger(hello["logger"])(logged)
    except BaseException as error:  # the client's or the user's; SystemExit too
        _tell(answer, "the start", error, sent=False)
        return
    logging = _Logging(logger, taken, logged.resumed_after)
    answer(kind="started")
    for record in before:
        _attempt(logging, record, answer, sent=False)
    while True:
        record = records.get()
        _attempt(logging, record, answer, sent=True)
        if record["kind"] == "finish":
            answer(kind="ended")
            return


def _before(run: LoggedRun) -> list[Record]:
    """Returns the steps that a resumed run keeps; those that the logger has are not given again."""
    path = run.directory / "metrics.jsonl"
    if run.resumed_after is None or not path.exists():
        return []
    lines = ({**line} for line in read_metrics(path) if line[STEP] <= run.resumed_after)
    return [{"kind": "metrics", "step": int(line.pop(STEP)), "values": line} for line in lines]


def _attempt(logging: _Logging, record: Record, answer: Callable[..., None], *, sent: bool) -> None:
    kind = record["kind"]
    try:
        logging.give(record)
    except BaseException as error:  # the client's or the user's; SystemExit too
        what = "the end" if kind == "finish" else f"the {kind} of step {record['step']}"
        _tell(answer, what, error, sent=sent)
    else:
        answer(kind="done", sent=sent)


def _tell(answer: Callable[..., None], what: str, error: BaseException, *, sent: bool) -> None:
    traceback.print_exception(error)
    place = user_place(error) if isinstance(error, Exception) else None
    where = "" if place is None else f" ({place})"
    text = f"{type(error).__name__}: {error}{where}"
    answer(kind="failed", sent=sent, what=what, text=text)


if __name__ == "__main__":
    main()
