"""The record of each model, kept as that of a run: `treadle view DIR/runs/*` shows it.

Invariants:

1. A step is recorded after it is in the database, so a killed service may lack the line of its
   last one.
2. What cannot be written is logged, and holds up nobody. A record that failed is opened anew.
3. A model has a record while it lives: what is sampled from its checkpoints later is counted in
   `Totals` alone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as Total

from treadle.agent_loop import AgentTask, Completion, Message, StopReason, Trajectory, Transcript
from treadle.agent_loop.hf import HfRenderer
from treadle.trainer.checkpoint.run_directory import RunDirectory
from treadle.trainer.report import MetricsLog
from treadle.trainer.report.status import Status, running, write_status
from treadle.trainer.training_loop.trajectory_store import TrajectoryStore

__all__ = ["Records", "Totals"]

_log = logging.getLogger(__name__)

_KEPT_PER_STEP: Final = 64
"""Samples of a model that are kept between two steps, the first ones."""
_MAX_BYTES: Final = 256 << 20
"""Of the samples of one model."""


class Totals:
    """The service's Prometheus metrics, served at `GET /metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here: Any = {"registry": self.registry}
        text = "Requests that were answered, by kind and outcome."
        self.requests = Total("treadle_serve_requests", text, ("kind", "outcome"), **here)
        text = "Tokens that were sampled, and that went through a pass."
        self.tokens = Total("treadle_serve_tokens", text, ("kind",), **here)
        text = "Requests that were accepted and not answered."
        self.waiting = Gauge("treadle_serve_requests_in_flight", text, ("kind",), **here)
        self.models = Gauge("treadle_serve_models", "Models that are alive.", **here)


class Records:
    """The records of the models of a service, each in a directory that is locked as a run's."""

    def __init__(self, directory: Path, renderer: HfRenderer, model_path: Path) -> None:
        self.totals = Totals()
        self._directory = directory
        self._renderer = renderer
        self._model_path = model_path
        self._living: dict[str, _Record | None] = {}

    def begin(self, model: str) -> None:
        """Permits the record of a model, which is opened when there is something to record."""
        self._living[model] = None

    async def step(self, model: str, values: Mapping[str, float]) -> None:
        """Takes a step of a model, and what was sampled from it since the one before."""
        try:
            if (record := self._of(model)) is not None:
                await record.step(values)
        except Exception as error:  # a model trains on without its record
            _log.warning("the record of model %s is not written: %r", model, error)
            if (failed := self._living.get(model)) is not None:
                self._living[model] = None
                await self._interrupt(model, failed)

    def sampled(
        self, model: str | None, name: str, prompt: Sequence[int], completions: Sequence[Completion]
    ) -> None:
        """Counts the completions of a request, and keeps those of a model that lives."""
        count = sum(len(each.token_ids) for each in completions)
        self.totals.tokens.labels("sampled").inc(count)
        try:
            if (record := self._of(model)) is not None:
                record.sampled += count
                room = _KEPT_PER_STEP - len(record.kept)
                record.kept += self._trajectories(name, prompt, completions[:room])
        except Exception as error:  # they are answered already
            _log.warning("samples of model %s are not recorded: %r", model, error)

    def _trajectories(
        self, name: str, prompt: Sequence[int], completions: Sequence[Completion]
    ) -> Iterator[Trajectory]:
        for number, completion in enumerate(completions):
            transcript = Transcript(prompt)
            transcript.sample(completion)
            asked = Message(role="user", content=self._renderer.decode(prompt))
            said = Message(role="assistant", content=self._renderer.decode(completion.token_ids))
            yield Trajectory(
                task=AgentTask(
                    task_id=name,
                    sample_index=0,
                    rollout_index=number,
                    loop="sample",
                    messages=(asked,),
                ),
                samples=(transcript.freeze(),),
                messages=(asked, said),
                stop=StopReason.FINISHED,
                assistant_turns=1,
            )

    def _of(self, model: str | None) -> _Record | None:
        """Returns the record of a model; None: the model is freed, or is the base model."""
        if model is None or model not in self._living:
            return None
        if (record := self._living[model]) is None:
            directory = self._directory / model.replace(":", "-")
            about = {
                "run": {"project": "serve", "name": model},
                "model": {"path": str(self._model_path)},
            }
            record = self._living[model] = _Record(directory, about, self._renderer)
        return record

    def end(self, model: str) -> None:
        """Ends the record of a model that is freed."""
        if (record := self._living.pop(model, None)) is not None:
            self._close(model, record, Status(state="finished"))

    async def close(self) -> None:
        """Ends all records, as those of runs that go on when the service is started again."""
        for model, record in self._living.items():
            if record is not None:
                await self._interrupt(model, record)

    async def _interrupt(self, model: str, record: _Record) -> None:
        try:
            await record.flush()
        except Exception as error:  # the others are ended all the same
            _log.warning("the last samples of model %s are not written: %r", model, error)
        self._close(model, record, Status(state="interrupted"))

    def _close(self, model: str, record: _Record, status: Status) -> None:
        try:
            record.close(status)
        except Exception as error:  # it is closed, with an older status
            _log.warning("the status of model %s is not written: %r", model, error)


class _Record:
    def __init__(self, directory: Path, about: Mapping[str, object], renderer: HfRenderer) -> None:
        self.kept: list[Trajectory] = []
        self.sampled = 0
        self._directory = directory
        self._began = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(run := RunDirectory(directory))
            run.write_config(about)
            # Nothing is removed: a step that was recorded has been answered.
            self._metrics = stack.enter_context(
                MetricsLog(directory / "metrics.jsonl", resume_after=sys.maxsize)
            )
            self._trajectories = TrajectoryStore(
                directory, decode=renderer.decode, max_bytes=_MAX_BYTES, resume_after=sys.maxsize
            )
            write_status(directory, running(max(0, self._metrics.last_step), None))
            self._stack = stack.pop_all()

    async def step(self, values: Mapping[str, float]) -> None:
        step = max(0, self._metrics.last_step) + 1
        now = time.monotonic()
        kept, self.kept = self.kept, []
        if kept:
            self._trajectories.hold(step, kept, phase="train", limit=_KEPT_PER_STEP)
            await self._trajectories.write()
        own = {"tokens/sampled": float(self.sampled), "time/step_s": now - self._began}
        self._metrics.append(step, {**values, **own})
        self._began, self.sampled = now, 0
        write_status(self._directory, running(step, None))

    async def flush(self) -> None:
        await self._trajectories.flush()

    def close(self, status: Status) -> None:
        with self._stack:
            write_status(self._directory, status)
