import asyncio
import io
from collections.abc import Mapping

import pytest

from treadle.trainer.report.prometheus import RunMetrics
from treadle.trainer.report.terminal.progress import PlainProgress
from treadle.trainer.report.warning_signs import Watch
from treadle.trainer.training_loop.run_record import RunRecord


def _record(*, total_steps: int | None) -> tuple[RunRecord, io.StringIO]:
    shown = io.StringIO()
    display = PlainProgress(total_steps=total_steps, stream=shown)
    metrics = RunMetrics(project="p", name="n")
    return RunRecord(display, metrics, total_steps=total_steps), shown


def test_a_step_reaches_its_subscribers_in_order_and_its_alerts_are_notes() -> None:
    record, shown = _record(total_steps=2)
    seen: list[tuple[str, object]] = []
    record.on_note.append(lambda step, text: seen.append(("note", step)))
    record.on_alert.append(lambda step, alert: seen.append(("alert", alert.name)))
    record.on_step += [lambda step, metrics: seen.append(("file", step)), record.show_step]
    record.raise_alerts(Watch())

    async def own(step: int, metrics: Mapping[str, float]) -> None:
        await asyncio.sleep(0)
        seen.append(("own", step))

    record.call(own)
    failed = {"rollout/num_failed": 8.0, "rollout/num_trajectories": 8.0}
    asyncio.run(record.step(1, failed))
    assert seen == [("file", 1), ("note", 1), ("alert", "failed"), ("own", 1)]
    line, note = shown.getvalue().splitlines()[:2]
    assert line.startswith("step 1/2")
    assert note.startswith("step 1: ")


@pytest.mark.parametrize(("total_steps", "text"), [(2, "step 0: odd"), (None, "odd")])
def test_a_note_of_an_evaluation_names_no_step(total_steps: int | None, text: str) -> None:
    record, shown = _record(total_steps=total_steps)
    record.note(0, "odd")
    assert shown.getvalue().splitlines() == [text]
