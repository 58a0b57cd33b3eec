from collections.abc import Mapping
from pathlib import Path

import pytest

from treadle.tracing.diagnosis import Diagnosis, Level
from treadle.trainer.doctor.gpus import check_gpus
from treadle.trainer.launch.gpus import all_gpus


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program nvidia-smi that lists two GPUs, the second in use."""
    program = tmp_path / "nvidia-smi"
    rows = (
        "0, GPU-aaaa, 143771, 143000, 570.1, NVIDIA H200",
        "1, GPU-bbbb, 143771, 1000, 570.1, NVIDIA H200",
    )
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def _found(tmp_path: Path, environ: Mapping[str, str]) -> dict[str, Diagnosis]:
    interfaces = tmp_path / "net"
    for name in ("lo", "eth0"):
        (interfaces / name).mkdir(parents=True, exist_ok=True)
    return {f.check: f for f in check_gpus(all_gpus(), environ, interfaces=interfaces)}


@pytest.mark.usefixtures("two_gpus")
def test_gpus_and_which_of_them_are_visible(tmp_path: Path) -> None:
    found = _found(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found["GPU 0"].level is Level.OK
    assert found["GPU 0"].value == "NVIDIA H200, 139.6 GiB of 140.4 GiB free, driver 570.1"
    assert found["GPU 1"].level is Level.WARN
    assert "another process" in found["GPU 1"].cause
    assert found["CUDA_VISIBLE_DEVICES"].level is Level.OK

    missing = _found(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,2"})["CUDA_VISIBLE_DEVICES"]
    assert missing.level is Level.FAIL
    assert "there is no GPU 2" in missing.cause
    hidden = _found(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"]
    assert hidden.level is Level.WARN


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert all_gpus() == ()
    assert [f.check for f in check_gpus((), {})] == ["GPUs"]


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NCCL_CUMEM_ENABLE", "0", Level.WARN),
        ("NCCL_P2P_DISABLE", "1", Level.WARN),
        ("NCCL_SOCKET_IFNAME", "ib", Level.FAIL),
        ("NCCL_SOCKET_IFNAME", "=eth", Level.FAIL),
        ("NCCL_SOCKET_IFNAME", "eth", Level.OK),
        ("GLOO_SOCKET_IFNAME", "eth", Level.FAIL),
        ("GLOO_SOCKET_IFNAME", "eth0", Level.OK),
    ],
)
def test_variables_that_steer_nccl(tmp_path: Path, name: str, value: str, level: Level) -> None:
    finding = _found(tmp_path, {name: value})[name]
    assert (finding.level, finding.value) == (level, value)
    assert (level is Level.OK) == (finding.fix == "")


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_CUMEM_ENABLE", "1"), ("NCCL_P2P_DISABLE", "0"), ("NCCL_SOCKET_IFNAME", "^docker")],
)
def test_variables_that_do_no_harm(tmp_path: Path, name: str, value: str) -> None:
    assert name not in _found(tmp_path, {name: value})


def test_the_warning_is_the_one_that_users_see(tmp_path: Path) -> None:
    finding = _found(tmp_path, {"NCCL_CUMEM_ENABLE": "0"})["NCCL_CUMEM_ENABLE"]
    assert "NCCL_CUMEM_ENABLE is set to 0, skipping override" in finding.cause
    assert "unset NCCL_CUMEM_ENABLE" in finding.fix
