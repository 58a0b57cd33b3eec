"""The command, up to checks that a CPU shows within a moment; the others are in `cpu_mode_*`."""

import re
from pathlib import Path

import pytest
from gpu.check import Context
from gpu.checks import _FIRST, CHECKS, by_value
from gpu.main import main
from gpu.run_checks import KINDS, settings

from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_checks_come_after_what_they_need() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:place]), check.name
        # What only some machines can run may not hide what all can.
        for other in CHECKS[:place]:
            if other.name in check.needs:
                assert other.gpus <= check.gpus and other.engine in ("", check.engine), check.name


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_the_settings_of_runs_are_valid(num_gpus: int, tmp_path: Path) -> None:
    """Of all those on so many GPUs, which no CPU runs."""
    context = Context(
        device="cuda",
        num_gpus=num_gpus,
        folder=tmp_path,
        engines={"vllm": ("server",)},
        model=None,
    )
    needed = {"collective": 2, "tensor_parallel": 2, "two_gpus": 2, "four_gpus": 4}
    for kind in KINDS:
        if needed.get(kind, 1) > num_gpus:
            continue
        for engine in ("torch", "vllm"):
            if kind in ("two_gpus", "four_gpus") and engine == "torch":
                continue  # it has its model on one device
            load_config([DEMO], settings(context, kind, engine))


def test_the_page_names_every_check() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {check.name for check in CHECKS} <= named


def test_it_runs_a_check_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.md"
    arguments = ["--device", "cpu", "--out", str(out), "--logs", str(tmp_path / "logs")]
    assert main([*arguments, "--only", "optional_kernels", "run_all_gpus"]) == 0
    assert "1 hold, 0 fail, 1 skipped" in capsys.readouterr().out
    text = out.read_text()
    assert text.startswith("# The checks of GPUs on a CPU: no result about GPUs\n")
    assert "| optional_kernels | holds |" in text
    assert "| run_all_gpus | skipped |" in text
    assert "| driver | none |" in text


def test_a_second_call_goes_on_where_the_first_one_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.md"
    arguments = ["--device", "cpu", "--out", str(out), "--logs", str(tmp_path / "logs")]
    two = ["--only", "optional_kernels", "run_all_gpus"]
    assert main([*arguments, *two, "--minutes", "0"]) == 0
    said = capsys.readouterr().out
    assert "no time was left for optional_kernels: the same command goes on there" in said
    assert "NOT COMPLETE: 1 were not reached" in out.read_text()
    assert main([*arguments, *two, "--minutes", "5"]) == 0
    assert "1 hold, 0 fail, 1 skipped" in capsys.readouterr().out
    first = out.read_text()
    assert main([*arguments, *two, "--minutes", "5"]) == 0
    said = capsys.readouterr().out
    assert "1 results of" in said and "optional_kernels" not in said.partition("taken over")[2]
    assert out.read_text() == first
    kept = out.with_suffix(".jsonl")
    kept.write_text(kept.read_text().replace("processors", "other processors"))
    assert main([*arguments, *two, "--minutes", "0"]) == 0
    assert "0 results of" in capsys.readouterr().out


def test_what_nobody_has_seen_comes_first() -> None:
    names = [check.name for check in by_value(CHECKS)]
    assert sorted(names) == sorted(check.name for check in CHECKS)
    assert names[:2] == ["run_vllm", "speed_training"]
    assert set(_FIRST) <= set(names)


def test_a_machine_without_gpus_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "page.md")])
    assert ended.value.code == 2
    assert "nvidia-smi lists no GPU" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_an_unknown_check_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "policy"])
    assert "there is no check policy" in capsys.readouterr().err
