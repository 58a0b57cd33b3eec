"""The default run learns what the README promises, and its model comes out: one run for all."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.trainer.demo import DEMO
from treadle.trainer.main import main

from .testing import Trainer

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("learned") / "run", [])
    try:
        assert trainer.wait() == 0, trainer.output
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.wait()


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _data(page: str) -> dict[str, Any]:
    """Returns the data that a report holds."""
    text = page.partition('id="one-file">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_default_run_learns_to_use_the_tool(learned: Trainer) -> None:
    assert learned.mean("tool/call_rate", range(1, 6)) <= 0.65
    assert learned.mean("tool/call_rate", range(31, 41)) >= 0.98
    assert learned.mean("reward/mean", range(31, 41)) >= 0.9
    assert learned.mean("val/reward", [0]) <= 0.75
    assert learned.mean("val/reward", [40]) >= 0.95


def test_a_run_that_learns_raises_no_alert(learned: Trainer) -> None:
    path = learned.run_dir / "alerts.jsonl"
    alerts = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    # Whether servers idle is a matter of the machine.
    assert [alert for alert in alerts if alert["name"] != "idle"] == []


def test_the_report_shows_the_run_with_its_groups(learned: Trainer, tmp_path: Path) -> None:
    page = (learned.run_dir / "report.html").read_text()
    data = _data(page)
    assert data["runs"][0]["state"] == "finished"
    assert data["metrics"]["lines"][-1]["step"] == 40
    trained = [line for line in learned.trajectories() if line["phase"] == "train"]
    groups = [trained[start : start + 8] for start in range(0, len(trained), 8)]
    assert len(groups) == 40
    for group in groups:
        assert len({(line["step"], line["task_id"]) for line in group}) == 1
        assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-5)
    shown = {(row["step"], row["phase"], row["task_id"]) for row in data["trajectories"]}
    assert len(shown) >= 100
    anew = tmp_path / "anew.html"
    assert main(["report", str(learned.run_dir), "--out", str(anew)]) == 0
    assert _data(anew.read_text()) | {"written": data["written"]} == data


def test_the_model_of_any_checkpoint_comes_out(learned: Trainer, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    last, earlier = tmp_path / "last", tmp_path / "earlier"
    assert main(["export", str(learned.run_dir), str(last)]) == 0  # copied
    assert main(["export", str(learned.run_dir), str(earlier), "--step", "30"]) == 0  # converted
    begun, after_30, after_40 = map(_tensors, (DEMO.parent / "model", earlier, last))
    assert begun.keys() == after_30.keys() == after_40.keys()
    assert any(not torch.equal(begun[name], after_30[name]) for name in begun)
    assert any(not torch.equal(after_30[name], after_40[name]) for name in begun)
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in after_40.items())
    held = {file.name for file in (DEMO.parent / "model").iterdir()}
    assert {file.name for file in last.iterdir()} == held | {"README.md"}


def test_a_run_begins_with_the_model_of_another(learned: Trainer, tmp_path: Path) -> None:
    more = Trainer(
        tmp_path / "more",
        [
            *(f"--config={DEMO}", f"model.path={learned.run_dir}", "schedule.total_steps=1"),
            *("schedule.val_every=null", "schedule.save_last=false"),
        ],
    )
    assert more.wait() == 0, more.output
    assert more.mean("val/reward", [0]) == learned.mean("val/reward", [40])


def test_an_evaluation_of_the_run_repeats_its_last_validation(
    learned: Trainer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["eval", str(learned.run_dir), "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["source"]["step"] == 40
    [at_40] = [line for line in learned.metrics() if line["step"] == 40]
    validated = {name: value for name, value in at_40.items() if name.startswith("val/")}
    assert len(validated) >= 4
    assert {name: results["metrics"][name] for name in validated} == validated


def test_the_metrics_page_has_what_a_run_writes_and_nothing_else(learned: Trainer) -> None:
    every, _, some = METRICS_PAGE.read_text().partition("## Only in some runs")
    written = set[str]().union(*learned.metrics())
    explained: set[str] = set()
    for pattern in _named_metrics(every):
        found = {name for name in written if re.fullmatch(pattern, name)}
        assert found, f"no run writes {pattern}"
        explained |= found
    others = _named_metrics(some)
    assert {n for n in written - explained if not any(re.fullmatch(p, n) for p in others)} == set()


def _named_metrics(page: str) -> list[str]:
    """Returns the names in the first cells of the page's tables, as patterns."""
    cells = "".join(re.findall(r"^\|([^|]*)\|", page, re.MULTILINE))
    return [re.sub("<[^>]+>", ".+", name) for name in re.findall(r"`([^`]+)`", cells)]
