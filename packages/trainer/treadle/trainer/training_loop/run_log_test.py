import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from treadle.trainer.report import open_progress
from treadle.trainer.training_loop.run_log import run_log


def test_a_log_that_cannot_be_written_is_said_once_and_hides_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainer.log"
    path.symlink_to("/dev/full")
    shown = io.StringIO()
    with (
        open_progress(total_steps=None, console=Console(file=shown, width=200)) as progress,
        pytest.raises(ValueError, match="the cause"),
        run_log(path, progress),
    ):
        for _ in range(3):
            logging.getLogger("treadle.trainer").info("a line")
        raise ValueError("the cause")
    assert shown.getvalue().count(f"{path} is not complete: No space left on device") == 1
    assert "Traceback" not in capfd.readouterr().err
