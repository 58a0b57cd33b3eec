"""Pages that are followed from an empty directory: your own task to the exported model, TRL's."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.trainer.cli.new import TEMPLATE
from treadle.trainer.launch.process import child_python_path
from treadle.trainer.main import main
from treadle.trainer.report.metrics import read_metrics

from .testing import SMALL

pytestmark = pytest.mark.timeout(300)

_DOCS = Path(__file__).parents[2] / "docs"
_PAGE = _DOCS / "your_own_task.md"
_TRAIN = "treadle --config config.yaml run.dir=runs/first"


_BLOCKS = r"^(?:`([\w.]+)`[^\n]*:\n\n)?```(\w+)\n(.*?)^```$"


def _commands(folder: Path) -> Path:
    """Makes `treadle` and `python` as an installation has them; returns their folder."""
    folder.mkdir()
    for name, module in (("treadle", "-m treadle.trainer.main "), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (folder / name).chmod(0o755)
    return folder


def test_the_page_leads_from_an_empty_directory_to_a_model(tmp_path: Path) -> None:
    page = _PAGE.read_text(encoding="utf-8")
    task = tmp_path / "my_task"
    path = f"{_commands(tmp_path / 'bin')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": child_python_path()}
    files, ran = set(), []
    for name, language, text in re.findall(_BLOCKS, page, re.MULTILINE | re.DOTALL):
        if name:
            (task / name).write_text(text, encoding="utf-8")
            files.add(name)
            continue
        if text.strip() == _TRAIN:
            text = " ".join((_TRAIN, *SMALL, "schedule.total_steps=1", "schedule.val_every=null"))
        command = ["python", "-c", text] if language == "python" else ["bash", "-euc", text]
        result = subprocess.run(
            command,
            cwd=task if task.exists() else tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{text}\n{result.stdout}{result.stderr}"
        ran.append(text)
    assert any(_TRAIN in text for text in ran)
    assert (task / "model" / "config.json").is_file()
    assert (task / "runs" / "first" / "report.html").is_file()
    template = {file.name: file.read_bytes() for file in TEMPLATE.iterdir() if file.is_file()}
    assert {*files, "README.md", "train.jsonl", "val.jsonl"} == set(template)
    for name in template.keys() - {"README.md"}:
        assert (task / name).read_bytes() == template[name], name


@pytest.mark.parametrize("library", ["trl", "verifiers"])
def test_the_task_of_the_page_for_users_of_another_library_trains(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (_DOCS / f"coming_from_{library}.md").read_text(encoding="utf-8")
    (command,) = [
        shlex.split(text)
        for name, language, text in re.findall(_BLOCKS, page, re.MULTILINE | re.DOTALL)
        if language == "bash" or (name and not Path(name).write_text(text, encoding="utf-8"))
    ]
    assert command.pop(0) == "treadle"
    small = [*SMALL, "schedule.total_steps=1", "schedule.val_every=null", "data.max_val_rows=null"]
    fake = ["rollout.name=fake", "policy.backend=fake", "run.dir=run"]
    assert main([*command, *small, *fake, "model.path=demo:calculator"]) == 0
    (line,) = read_metrics(Path("run/metrics.jsonl"))
    assert (line["rollout/num_failed"], line["reward/mean"]) == (0, 0), "it makes no call"
    if library != "trl":
        return
    Path("rows.jsonl").write_text('{"prompt": "What is 6 * 7?", "answer": 42}\n')
    several = re.search(r"`(reward\.name=\[.*?\])`, `(reward\.weights\..*?)`", page)
    assert several is not None
    rows = ["data.train_files=rows.jsonl", "data.prompts_per_step=1", "model.path=demo:calculator"]
    assert main(["--dry-run", *rows, *several.groups()]) == 0
