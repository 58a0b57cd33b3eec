"""Keeps all trajectories of a run, as Parquet files that are written beside training.

Dataflow: `hold` takes the trajectories of a step as soon as they are logged, `write` begins the
file once the update has returned its values per token, and the loop continues while a thread makes
rows and writes them. Trajectories held when the run ends, because the update failed, are written
without these values.

Bound: one step is held or in work beside the one before it, which `write` waits for; its error ends
the run there, or in `flush`, or at the end of the context. `flush` comes before a checkpoint is
completed, so that a run that resumes from it has every file up to its step.

Once the files have reached the budget, only failures and the groups that the trajectory log has
are kept; each file records how many it lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from treadle.agent_loop import Trajectory
from treadle.policy.client.types import TokenValues
from treadle.tracing import FinishedSpan
from treadle.tracing.trajectories import (
    DIRECTORY,
    file_name,
    image_bytes,
    image_name,
    remove_files_after,
    total_bytes,
    write_file,
    write_image,
)
from treadle.trainer.report.seals import seal_file
from treadle.trainer.report.trajectories import Decode, Phase, choose
from treadle.trainer.training_loop.trajectory_rows import make_rows

if TYPE_CHECKING:
    from treadle.trainer.training_loop.groups import StepBatch

__all__ = ["TrajectoryStore"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    step: int
    phase: Phase
    trajectories: Sequence[Trajectory]
    spans: Iterable[FinishedSpan]
    batch: StepBatch | None
    left_out: int


class TrajectoryStore:
    """Writes `trajectories/` of a run directory; a context that waits for the last file.

    Args:
        decode: For the text of the token spans.
        max_bytes: The budget. The file that reaches it is still written whole.
        resume_after: See `MetricsLog`: files of later steps are removed; None: all are.
    """

    def __init__(
        self, run_dir: Path, *, decode: Decode, max_bytes: int, resume_after: int | None = None
    ) -> None:
        self._directory = run_dir / DIRECTORY
        remove_files_after(self._directory, resume_after)
        self._decode = decode
        self._max_bytes = max_bytes
        self._num_bytes = total_bytes(self._directory) + image_bytes(self._directory)
        self._said = False
        self._held: _Held | None = None
        self._writing: asyncio.Task[int] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the budget is spent: of later steps few trajectories are kept."""
        return self._num_bytes >= self._max_bytes

    def hold(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        phase: Phase,
        limit: int,
        spans: Iterable[FinishedSpan] = (),
        batch: StepBatch | None = None,
    ) -> str | None:
        """Takes what `write` writes. One step is held at a time.

        Args:
            step: The step; 0 before training.
            limit: Once the budget is spent, `choose` picks groups by it.
            spans: Spans recorded while they were sampled.
            batch: The step's training batch; None: there is none.

        Returns:
            Note for the user when trajectories are first left out; else None.
        """
        assert self._held is None, "each step is written before the next one is held"
        kept = trajectories
        if self.is_full:
            chosen = {id(trajectory) for trajectory in choose(trajectories, limit)}
            kept = [t for t in trajectories if t.error is not None or id(t) in chosen]
        self._held = _Held(
            step=step,
            phase=phase,
            trajectories=kept,
            spans=spans,
            batch=batch,
            left_out=len(trajectories) - len(kept),
        )
        if len(kept) == len(trajectories) or self._said:
            return None
        self._said = True
        return (
            f"trajectories/ has reached run.trajectories_max_bytes={self._max_bytes}: from here on "
            f"it gets failures and what trajectories.jsonl gets, now {len(kept)} of "
            f"{len(trajectories)} trajectories"
        )

    async def write(self, tokens: TokenValues | None = None) -> None:
        """Begins to write what is held, when the file before it is written.

        Args:
            tokens: Numbers that the update computed of each token of the batch; None: there was
                none.

        Raises:
            OSError: The file before it could not be written.
        """
        await self.flush()
        held, self._held = self._held, None
        if held is None:
            return
        rows = make_rows(
            held.trajectories,
            step=held.step,
            phase=held.phase,
            decode=self._decode,
            spans=held.spans,
            batch=held.batch,
            tokens=tokens,
        )
        file = asyncio.to_thread(self._write, held, rows)
        self._writing = asyncio.create_task(file, name=f"trajectories of step {held.step}")

    def _write(self, held: _Held, rows: Iterable[Mapping[str, object]]) -> int:
        """Writes the images, then the file that names them; returns the number of bytes."""
        images = (image for trajectory in held.trajectories for image in trajectory.images)
        # The samples of a row show the same images: each is hashed once per object.
        named = {id(image): image for image in images}.values()
        size = sum(
            write_image(self._directory, image_name(image.data, image.mime), image.data)
            for image in named
        )
        size += write_file(
            self._directory,
            step=held.step,
            phase=held.phase,
            rows=rows,
            left_out=held.left_out,
        )
        name = f"{DIRECTORY}/{file_name(held.step, held.phase)}"
        seal_file(self._directory.parent, held.step, name)
        return size

    async def flush(self) -> None:
        """Waits for the file in work.

        Raises:
            OSError: It could not be written.
        """
        writing = self._writing
        if writing is None:
            return
        try:
            # A caller that is cancelled leaves the file to the end of the context.
            self._num_bytes += await asyncio.shield(writing)
        finally:
            if writing.done():
                self._writing = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Writes what is left; logs the error of that if another one ends the context."""
        try:
            await self.write()
            await self.flush()
        except OSError as own:
            if error is None:
                raise
            _log.warning("the last trajectories are not written: %s", own)
