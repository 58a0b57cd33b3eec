"""The checks themselves work: those of the policy, a server, a run and a benchmark, on the CPU."""

from pathlib import Path

import pytest
from gpu.main import main

pytestmark = pytest.mark.timeout(900)
CHOSEN = (
    *("torch", "policy_logprobs", "policy_gradient", "policy_prefixes", "policy_offload"),
    *("torch_bfloat16", "run_torch_in_turn", "speed_training"),
)


def test_checks_hold_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    arguments = ["--device", "cpu", "--out", str(out), "--logs", str(tmp_path / "logs")]
    assert main([*arguments, "--only", *CHOSEN]) == 0, out.read_text()
    assert f"{len(CHOSEN)} hold, 0 fail, 0 skipped" in out.read_text()
