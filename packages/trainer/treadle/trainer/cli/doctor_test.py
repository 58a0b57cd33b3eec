import json
import socket

import pytest

from treadle.tracing.diagnosis import as_table, fail, ok
from treadle.trainer.cli.doctor import as_json
from treadle.trainer.demo import DEMO
from treadle.trainer.main import main


def test_a_run_of_the_demo_with_one_fault(capsys: pytest.CaptureFixture[str]) -> None:
    demo = ("--config-path", str(DEMO.parent), "--config-name", DEMO.stem)
    few = (*demo, "data.prompts_per_step=2", "data.max_val_rows=2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--json", *few, f"run.metrics_port={port}"]) == 1
    found = json.loads(capsys.readouterr().out)
    wrong = [f["check"] for findings in found.values() for f in findings if f["level"] == "FAIL"]
    assert wrong == ["run.metrics_port"]
    checks = {area: {f["check"] for f in findings} for area, findings in found.items()}
    assert {"python", "torch", "megatron-core", "flash-attn", "datasets"} <= checks["environment"]
    assert {"open files", "/dev/shm", "ports", "sandbox", "GPUs"} <= checks["machine"]
    # The server's doctor ran in its environment, which is this one.
    assert {"settings", "server: torch", "server: model", "server: address"} <= checks["run"]


def test_a_finding_names_what_was_found_why_it_is_bad_and_what_to_do() -> None:
    found = {
        "machine": [ok("memory", "9 GiB"), fail("ports", "refused\ntwice", "no lo", "ip link up")]
    }
    assert as_table(found).splitlines() == [
        "machine",
        "  OK    memory  9 GiB",
        "  FAIL  ports   refused",
        "                twice",
        "                because: no lo",
        "                do: ip link up",
        "1 OK, 0 WARN, 1 FAIL",
    ]
    assert json.loads(as_json(found))["machine"][1]["fix"] == "ip link up"


def test_a_word_that_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--nope"])
    assert "--nope" in capsys.readouterr().err
