"""Packages that are broken for real: small stand-ins on the import path of a real interpreter."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from treadle.policy.backends.megatron import VERSIONS
from treadle.tracing.diagnosis import Level
from treadle.trainer.doctor.environment import (
    LEAST,
    check_build,
    check_datasets,
    check_flash_attention,
    check_import_path,
    check_places,
    check_triton,
    check_virtual_environment,
    release,
)
from treadle.trainer.doctor.probe import probe

_TORCH = """
class version:
    cuda = {cuda!r}
class cuda:
    is_available = staticmethod(lambda: {devices} > 0)
    device_count = staticmethod(lambda: {devices})
    @staticmethod
    def init():
        if not {devices}:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")
"""
_TRITON = """
class _Drivers:
    @property
    def active(self):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
class runtime:
    driver = _Drivers()
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of all installed packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _install(folder: Path, name: str, version: str, module: str = "", *needs: str) -> None:
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    (information / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / name.replace("-", "_")).with_suffix(".py").write_text(module)


def test_triton_without_a_driver_where_torch_has_a_gpu(packages: Path) -> None:
    _install(packages, "torch", "2.13.0", _TORCH.format(cuda="13.0", devices=2))
    _install(packages, "triton", "3.7.1", _TRITON)
    found = probe(["torch", "triton"])
    (finding,) = check_triton(found)
    assert finding.level is Level.FAIL
    assert "0 active drivers ([]). There should only be one" in finding.value
    assert "--gpus all" in finding.fix


def test_triton_without_a_driver_is_no_fault_where_there_is_no_gpu(packages: Path) -> None:
    _install(packages, "torch", "2.13.0", _TORCH.format(cuda=None, devices=0))
    _install(packages, "triton", "3.7.1", _TRITON)
    (finding,) = check_triton(probe(["torch", "triton"]))
    assert (finding.level, finding.value) == (Level.OK, "3.7.1, no driver, as there is no GPU")


def test_triton_of_another_torch(packages: Path) -> None:
    _install(packages, "torch", "2.13.0", "", 'triton==3.7.1 ; platform_system == "Linux"')
    _install(packages, "triton", "3.1.0", _TRITON)
    (finding,) = check_triton(probe(["triton"]))
    assert (finding.level, finding.value) == (Level.FAIL, "3.1.0")
    assert finding.fix == 'pip install "triton==3.7.1"'


def test_a_flash_attention_built_for_another_torch(packages: Path) -> None:
    error = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"
    _install(packages, "flash-attn", "2.8", f"raise ImportError({error!r})")
    finding = check_flash_attention(probe(["flash_attn"]))
    assert finding.level is Level.FAIL
    assert finding.value == f"ImportError: {error}"
    assert "pip uninstall flash-attn" in finding.fix
    assert "--no-build-isolation" in finding.fix
    assert check_flash_attention(probe([])).level is Level.OK


def test_a_module_that_kills_its_process_is_named_and_what_was_before_it_is_kept(
    packages: Path,
) -> None:
    (packages / "crashes.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = probe(["json", "crashes", "math"])
    assert found.errors["json"] == ""
    assert "ended with -11" in found.errors["crashes"]
    assert "ended with -11" in found.errors["math"]


@pytest.mark.parametrize(
    ("cuda", "num_gpus", "level", "cause"),
    [
        ("13.0", 1, Level.FAIL, "driver on your system is too old"),
        (None, 1, Level.FAIL, "torch cannot use the GPUs"),
        ("13.0", 0, Level.WARN, "compute on the CPU"),
        (None, 0, Level.OK, ""),
    ],
)
def test_the_build_of_torch(
    packages: Path, cuda: str | None, num_gpus: int, level: Level, cause: str
) -> None:
    _install(packages, "torch", "2.13.0", _TORCH.format(cuda=cuda, devices=0))
    (finding,) = check_build(probe(["torch"]), num_gpus)
    assert finding.level is level
    assert cause in finding.cause


def test_a_library_datasets_that_cannot_read_what_newer_ones_wrote(packages: Path) -> None:
    _install(packages, "datasets", "2.21.0")
    finding = check_datasets()
    assert finding.level is Level.WARN
    assert "Feature type 'List' not found" in finding.cause
    assert 'pip install "datasets>=4.0"' in finding.fix


def test_packages_of_another_environment(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (packages / "strays.py").write_text("")
    finding = check_places(probe(["json", "strays"]))
    assert finding.level is Level.WARN
    assert f"strays from {packages / 'strays.py'}" in finding.value
    assert "json" not in finding.value

    monkeypatch.syspath_prepend("/usr/local/lib/python3.6/dist-packages")
    finding = check_import_path({"PYTHONPATH": "/usr/local/lib/python3.6/dist-packages"})
    assert finding.level is Level.FAIL
    assert "/usr/local/lib/python3.6/dist-packages" in finding.value
    assert "PYTHONPATH" in finding.fix


def test_another_environment_is_activated_than_the_one_that_runs(tmp_path: Path) -> None:
    finding = check_virtual_environment({"VIRTUAL_ENV": str(tmp_path)})
    assert finding.level is Level.WARN
    assert str(tmp_path / "bin" / "treadle") in finding.fix
    assert check_virtual_environment({"VIRTUAL_ENV": sys.prefix}).level is Level.OK
    assert check_virtual_environment({}).level is Level.OK


def test_the_versions_are_those_that_the_packages_require() -> None:
    packages = Path(__file__).resolve().parents[4]
    wanted: dict[str, set[str]] = {}
    for package in ("policy", "trainer"):
        file = packages / package / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extra = project["optional-dependencies"].get("megatron", [])
        for text in (*project["dependencies"], *extra):
            found = re.fullmatch(r"([\w-]+)[^=~>]*[=~>]=([\w.]*)(; .*)?", text)
            assert found is not None, text
            wanted.setdefault(found[1], set()).add(found[2])
    for name, version in LEAST.items():
        assert wanted[name] == {version}, name
    assert wanted["megatron-core"] == set(VERSIONS)


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9", "2.13.0+cpu"), ("4", "4.0.1"), ("5.22.9", "5.23.0rc1")]
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert release(older) < release(newer)
