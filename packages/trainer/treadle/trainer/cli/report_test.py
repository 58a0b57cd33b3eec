from pathlib import Path

import pytest

from treadle.trainer.main import main
from treadle.trainer.report import MetricsLog


def test_the_report_of_a_run_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append(1, {"reward/mean": -3.0})
    assert main(["report", str(tmp_path)]) == 0
    assert "report.html: 1 step, state not recorded" in capsys.readouterr().out
    assert (tmp_path / "curves.png").exists()
    page = tmp_path / "pages" / "mine.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    assert "-3.000" in page.read_text()
    assert [file.name for file in page.parent.iterdir()] == ["mine.html"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["empty"], 2, "empty is not a run directory"),
        (["damaged"], 2, "metrics.jsonl, line 1 is damaged"),
        (["run", "--out=empty"], 2, "empty is a directory: name a file"),
        (["run", "--out=a_file/x.html"], 1, "cannot make a_file/x.html"),
    ],
)
def test_what_cannot_be_reported_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("run", ""), ("damaged", "oops\n")):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text(content)
    Path("empty").mkdir()
    Path("a_file").write_text("")
    assert main(["report", *arguments]) == status
    assert text in capsys.readouterr().err
