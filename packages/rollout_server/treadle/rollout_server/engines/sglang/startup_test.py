import os
import pickle
from pathlib import Path

import pytest

from treadle.rollout_server.engines.sglang import startup
from treadle.rollout_server.engines.sglang.startup import ProcessSetup


def test_a_process_is_prepared_by_what_it_unpickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(startup, "install_stubs", lambda: prepared.append(True))
    setup = ProcessSetup(True, tmp_path)
    assert pickle.loads(pickle.dumps(setup)) == setup
    assert prepared == [True, True]
    ProcessSetup(False, tmp_path)
    assert len(prepared) == 2


def test_a_process_leaves_the_cause_of_its_end(tmp_path: Path) -> None:
    setup = ProcessSetup(False, tmp_path)
    setup.report(RuntimeError("no room"))
    assert (tmp_path / str(os.getpid())).read_text() == "RuntimeError: no room"
