"""Treadle installed as a stranger installs it: built, from git, by pip, uv and another Pants.

These tests ask the package index that pip is configured for. Each begins in an empty folder, with
the sources in a git repository, and types what docs/install.md and the README say.
"""

import re
import shutil
from pathlib import Path

import pytest

from installs.foreign import (
    APP,
    APP_PRINTS,
    PROJECTS,
    PYTHONS,
    ROOT,
    code_blocks,
    environment,
    install_torch,
    make_venv,
    run,
)

# All that can be installed beside each other without torch.
WITHOUT_TORCH = (
    "treadle-agent-loop[hf,langgraph,proxy,router]",
    "treadle-conformance",
    "treadle-rollout-server",
    "treadle-tools[math,mcp,sandbox,search]",
    "treadle-tracing[mlflow,otlp,viewer,weave]",
)
IMPORT_ALL = """\
import importlib, pkgutil, warnings
import treadle

warnings.filterwarnings("error", module=r"treadle\\.")
imported, missing = 0, set()
for module in pkgutil.walk_packages(treadle.__path__, "treadle.", onerror=lambda name: None):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
        imported += 1
    except ModuleNotFoundError as error:
        missing.add(error.name)
print(imported, *sorted(missing))
"""


def test_each_package_is_built_without_pants(wheels: Path) -> None:
    found = {path.name for path in wheels.iterdir()}
    for project in PROJECTS:
        stem = f"treadle_{Path(project).name}"
        for suffix in (r"-.*-py3-none-any\.whl", r"-.*\.tar\.gz"):
            assert [name for name in found if re.fullmatch(stem + suffix, name)], (stem, found)


def test_pip_installs_one_package_from_git_by_the_command_of_the_page(
    repository: str, programs: Path, tmp_path: Path
) -> None:
    bin_folder = make_venv(tmp_path / "venv", programs, "3.11", "--seed")
    (command, *_) = code_blocks("docs/install.md", "One package with pip", "bash")
    run(
        ["bash", "-ec", command.replace("REPOSITORY", repository)],
        cwd=tmp_path,
        env=environment(bin_folder),
    )
    assert run([bin_folder / "python", "-c", APP], cwd=tmp_path).strip() == APP_PRINTS


def test_uv_installs_one_package_from_git_by_the_lines_of_the_page(
    repository: str, programs: Path, tmp_path: Path
) -> None:
    (lines, *_) = code_blocks("docs/install.md", "One package with uv", "toml")
    project = '[project]\nname = "stranger"\nversion = "1"\nrequires-python = ">=3.11"\n'
    (tmp_path / "pyproject.toml").write_text(project + lines.replace("REPOSITORY", repository))
    (tmp_path / "app.py").write_text(APP)
    printed = run([programs / "uv", "run", "-q", "app.py"], cwd=tmp_path, env=environment(programs))
    assert printed.strip() == APP_PRINTS


def test_pants_installs_one_package_from_git_by_the_target_of_the_page(
    repository: str, programs: Path, tmp_path: Path
) -> None:
    (target,) = code_blocks(
        "docs/install.md", "One package in a repository that uses Pants", "python"
    )
    (tmp_path / "BUILD").write_text(
        f"{target.replace('REPOSITORY', repository)}\npython_sources()\n"
    )
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "pants.toml").write_text(
        '[GLOBAL]\npants_version = "2.17.1"\nbackend_packages = ["pants.backend.python"]\n'
        'pantsd = false\ndynamic_ui = false\n[python]\ninterpreter_constraints = ["==3.11.*"]\n'
        "[python-infer]\nuse_rust_parser = true\n"
    )
    # How Pants comes onto this machine; the official launcher needs the network.
    for name in ("pants", ".pants.bootstrap", "build-support"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    env = environment(programs) | {"TREADLE_TORCH": "cuda"}  # no lock of ours for the CPU
    printed = run([tmp_path / "pants", "run", "app.py"], cwd=tmp_path, env=env)
    assert printed.strip() == APP_PRINTS


@pytest.mark.parametrize("python", PYTHONS)
def test_every_module_is_imported_and_the_fakes_run(
    python: str, wheels: Path, programs: Path, tmp_path: Path
) -> None:
    bin_folder = make_venv(tmp_path / "venv", programs, python)
    install: list[str | Path] = [
        programs / "uv",
        "pip",
        "install",
        "-q",
        "--python",
        bin_folder / "python",
    ]
    run([*install, "--find-links", wheels, *WITHOUT_TORCH], cwd=tmp_path)
    imported, *missing = run([bin_folder / "python", "-c", IMPORT_ALL], cwd=tmp_path).split()
    # environments_test.py imports that of verifiers, and harbor_test.py that of Harbor.
    assert set(missing) <= {"harbor", "sglang", "torch", "verifiers", "vllm"}
    assert int(imported) > 100
    loop_and_test = "\n".join(code_blocks("README.md", "Your own agent loop", "python"))
    run(
        [bin_folder / "python", "-W", "error::DeprecationWarning:treadle", "-c", loop_and_test],
        cwd=tmp_path,
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_the_demo_trains_by_the_commands_of_the_readme(
    python: str, repository: str, programs: Path, tmp_path: Path
) -> None:
    env = install_torch(make_venv(tmp_path / "venv", programs, python), programs)
    (commands, *_) = code_blocks("README.md", "Install and train", "bash")
    short = "treadle schedule.total_steps=1 schedule.val_every=null data.prompts_per_step=2"
    for typed, run_here in (
        ("REPOSITORY", repository),
        ("\npip ", "\nuv pip "),  # the same, sooner
        ("\ntreadle ", f"\n{short} "),
    ):
        assert typed in commands
        commands = commands.replace(typed, run_here)
    assert "step 1/1" in run(["bash", "-ec", commands], cwd=tmp_path, env=env)
