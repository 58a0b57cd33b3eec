from pathlib import Path

import pytest

from treadle.trainer.launch.gpus import Gpu, find_gpus, visible_devices

_SMI = """\
#!/bin/sh
echo "0, GPU-aaaa, 81559, 81000, 570.1, NVIDIA H100 80GB HBM3"
echo "1, GPU-bbbb, 24564, 1000, 570.1, NVIDIA GeForce RTX 4090"
"""
_H100 = Gpu(
    index="0",
    uuid="GPU-aaaa",
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=81559 << 20,
    free_bytes=81000 << 20,
    driver="570.1",
)
_4090 = Gpu(
    index="1",
    uuid="GPU-bbbb",
    name="NVIDIA GeForce RTX 4090",
    memory_bytes=24564 << 20,
    free_bytes=1000 << 20,
    driver="570.1",
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `nvidia-smi` that lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_machine_without_a_driver_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, (_H100, _4090)),
        ("1,0", (_4090, _H100)),
        ("GPU-bbbb", (_4090,)),
        ("0,7,1", (_H100,)),  # as CUDA does, what follows an unknown device is hidden
        ("", ()),
    ],
)
@pytest.mark.usefixtures("driver")
def test_the_variable_hides_some(
    variable: str | None, found: tuple[Gpu, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert find_gpus() == found


def test_a_child_sees_its_share_of_what_its_parent_sees() -> None:
    assert visible_devices((1, 2), {}) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    shown = {"CUDA_VISIBLE_DEVICES": "4, 6,GPU-bbbb"}
    assert visible_devices((1, 2), shown) == {"CUDA_VISIBLE_DEVICES": "6,GPU-bbbb"}
    assert visible_devices((), shown) == {}
