"""All checks on the GPUs of this machine, with each engine that has an environment here."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.main import ENGINES, main

from treadle.rollout_server.testing.engine_command import engine_command


@pytest.mark.timeout(14400)
def test_every_check_holds(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    status = main(["--out", str(out), "--logs", str(tmp_path / "logs"), *_engines()])
    assert status == 0, out.read_text()


def _engines() -> Iterator[str]:
    for engine in ENGINES:
        try:
            yield from (f"--{engine}", shlex.join(engine_command(engine)))
        except pytest.skip.Exception:
            continue  # the page says so
