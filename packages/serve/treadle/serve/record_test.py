"""The record of a model is kept while the model lives, and fails without holding it up."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import Completion, FinishReason, TokenChunk
from treadle.agent_loop.hf import HfRenderer
from treadle.serve.record import Records
from treadle.trainer import demo
from treadle.trainer.report import read_metrics
from treadle.trainer.report.status import read_status

MODEL_PATH = Path(demo.__file__).parent / "calculator" / "model"
RENDERER = HfRenderer.from_directory(MODEL_PATH)
PROMPT = (5, 6, 7)


def sample(records: Records, times: int = 1) -> None:
    chunk = TokenChunk(token_ids=(8, 9), logprobs=(-1.0, -2.0), weight_version=1)
    completion = Completion(chunks=(chunk,), finish=FinishReason.LENGTH)
    for number in range(times):
        records.sampled("m", str(number), PROMPT, [completion])


@pytest.mark.asyncio
async def test_a_record_that_failed_is_opened_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records(tmp_path, RENDERER, MODEL_PATH)
    records.begin("m")
    blocked = tmp_path / "m" / "trajectories"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    sample(records)
    await records.step("m", {"actor/loss": 1.0})
    for _ in range(3):  # the file of the step before could not be written
        sample(records)
        await records.step("m", {"actor/loss": 2.0})
    assert "record of model m is not written" in caplog.text
    blocked.unlink()
    await records.step("m", {"actor/loss": 3.0})
    sample(records)
    await records.step("m", {"actor/loss": 4.0})
    await records.close()
    losses = [line["actor/loss"] for line in read_metrics(tmp_path / "m" / "metrics.jsonl")]
    assert losses[-2:] == [3.0, 4.0]
    assert [*(tmp_path / "m" / "trajectories").glob(f"step-{len(losses):06}-*.parquet")]


@pytest.mark.asyncio
async def test_a_record_that_does_not_open_leaves_no_lock(tmp_path: Path) -> None:
    records = Records(tmp_path, RENDERER, MODEL_PATH)
    records.begin("m")
    (tmp_path / "m" / "metrics.jsonl").mkdir(parents=True)
    await records.step("m", {"actor/loss": 1.0})
    (tmp_path / "m" / "metrics.jsonl").rmdir()
    await records.step("m", {"actor/loss": 2.0})
    (line,) = read_metrics(tmp_path / "m" / "metrics.jsonl")
    assert line["actor/loss"] == 2.0
    shutil.rmtree(tmp_path / "m")
    records.end("m")  # whose status cannot be written
    await records.close()


@pytest.mark.asyncio
async def test_a_freed_model_has_no_record_any_more(tmp_path: Path) -> None:
    records = Records(tmp_path, RENDERER, MODEL_PATH)
    records.begin("m")
    await records.step("m", {"actor/loss": 1.0})
    records.end("m")
    sample(records)  # from a checkpoint
    await records.step("m", {"actor/loss": 2.0})  # which ran when the model was freed
    assert read_status(tmp_path / "m").state == "finished"
    assert len(read_metrics(tmp_path / "m" / "metrics.jsonl")) == 1


@pytest.mark.asyncio
async def test_samples_beyond_those_kept_are_counted_and_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Sequence[int]] = []
    decode: Any = HfRenderer.decode

    def noted(self: HfRenderer, ids: Sequence[int]) -> Any:
        decoded.append(ids)
        return decode(self, ids)

    monkeypatch.setattr(HfRenderer, "decode", noted)
    records = Records(tmp_path, RENDERER, MODEL_PATH)
    records.begin("m")
    sample(records, 70)
    assert decoded.count(PROMPT) == 64
    await records.step("m", {})
    await records.close()
    (line,) = read_metrics(tmp_path / "m" / "metrics.jsonl")
    assert line["tokens/sampled"] == 140.0
