"""Tasks of Harbor's, installed as it comes on Python 3.12, run by its agents in our sandbox."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from e2e.testing import SMALL, Trainer
from installs.foreign import PROJECTS, ROOT, environment, make_venv, run
from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    SetupError,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.agent_loop.testing.byte_renderer import END
from treadle.rollout_server.testing.descendants import descendants
from treadle.tools.environments import read_rows
from treadle.tools.environments.harbor import HarborLoop

pytestmark = pytest.mark.timeout(900)

PROGRAM = Path(__file__).with_name("environment_programs.py")
EXAMPLE = ROOT / "examples" / "harbor_tasks"
TRIAL = ("-m", "treadle.tools.environments.harbor.trial")
TERMINUS = "agent: {name: terminus-2, kwargs: {record_terminal_session: false}}\n"
# How much of the script of `one_command.py` is digits: a model that knows nothing gets some of it.
COUNT_DIGITS = """\
python3 -c "
text = open('/app/command.sh').read()
print(sum(c.isdigit() for c in text) / max(len(text), 1))" > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def harbor(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with Harbor, and with the example's agent."""
    folder = tmp_path_factory.mktemp("harbor")
    python = make_venv(folder / "venv", programs, "3.12") / "python"
    lock = ROOT / "3rdparty" / "python" / "harbor.lock.txt"
    install: list[str | Path] = [programs / "uv", "pip", "install", "-q", "--python", python, "-r"]
    run([*install, lock], cwd=folder, env=environment(programs))
    # With our sources, and without the PYTHONPATH of this test, which is for another Python.
    path = os.pathsep.join(map(str, [*(ROOT / project for project in PROJECTS), EXAMPLE]))
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {python} "$@"\n')
    command.chmod(0o755)
    return command


def _run(python: Path, folder: Path, *arguments: str | Path) -> str:
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return run([python, *arguments], cwd=folder, env=environment() | quiet)


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1), ("nop", 0)])
def test_tasks_are_scored_in_the_sandbox(
    harbor: Path, tmp_path: Path, agent: str, reward: int
) -> None:
    said = _run(harbor, tmp_path, *TRIAL, "score", EXAMPLE / "tasks", "--agent", agent)
    assert said == f"reverse_words {reward}\nsum_file {reward}\n"


def test_terminus_acts_and_its_tokens_are_those_that_were_sampled(
    harbor: Path, tmp_path: Path
) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(f"harbor: {EXAMPLE / 'tasks' / 'sum_file'}\n{TERMINUS}")
    keys = {"keystrokes": "echo $((3 + 11 + 28)) > answer.txt\n", "duration": 0.5}
    said = {"analysis": "three numbers", "plan": "add them", "task_complete": False}
    does, ends = said | {"commands": [keys]}, said | {"commands": [], "task_complete": True}
    replies = [json.dumps(turn) for turn in (does, ends, ends)]
    played = json.loads(_run(harbor, tmp_path, PROGRAM, file, *replies).splitlines()[-1])
    assert (played["error"], played["stop"], played["reward"]) == (None, "finished", 1.0)
    assert played["samples"] == 1  # its history only grows
    assert played["sampled"] == [i for reply in replies for i in (*reply.encode(), END)]
    assert "one whole number per line" in played["heard"][0]
    assert "answer.txt" in played["heard"][1]  # the terminal's


@pytest.mark.asyncio
async def test_a_trial_ends_with_its_trajectory(harbor: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(f"harbor: {EXAMPLE / 'tasks' / 'sum_file'}\npython: {harbor}\n{TERMINUS}")
    row = next(columns for _, columns in await asyncio.to_thread(lambda: [*read_rows(file)]))
    generator = ScriptedGenerator(["never"])
    generator.hold()
    services = Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=LoopLimits(max_response_tokens=20_000),
        sampling=SamplingParams(max_tokens=500, temperature=1.0),
    )
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=0,
        loop="harbor",
        messages=(Message(role="user", content="?"),),
        fields=row,
    )
    before = set(descendants(os.getpid()))
    async with HarborLoop() as loop:
        attempt = asyncio.create_task(loop.run(task, services))
        await generator.until_running(1)
        during = set(descendants(os.getpid())) - before
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        left = set(descendants(os.getpid())) - before
        assert left < during and len(left) == 2  # the server, and its supervisor
    assert set(descendants(os.getpid())) <= before


def test_a_run_trains_a_step_with_trials(harbor: Path, tmp_path: Path) -> None:
    task = tmp_path / "digits"
    for name, text in {
        "task.toml": '[environment]\nnetwork_mode = "no-network"\n',
        "instruction.md": "Write digits.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": COUNT_DIGITS,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    file = tmp_path / "digits.yaml"
    agent = 'agent: {import_path: "one_command:OneCommand"}'
    file.write_text(f"harbor: digits\npython: {harbor}\n{agent}\n")
    less = ("data.prompts_per_step=1", "schedule.total_steps=1", "schedule.val_every=null")
    trainer = Trainer(
        tmp_path / "run",
        [*SMALL, *less, f"data.train_files=[{file}]", "data.val_files=[]"],
    )
    assert trainer.wait() == 0, trainer.output
    (step,) = (line for line in trainer.metrics() if "actor/grad_norm" in line)
    assert step["rollout/logprob_diff_max"] < 1e-3  # the policy's, of the ids that were sampled
    assert step["actor/grad_norm"] > 0
    assert 0 < step["reward/mean"] < 1


def test_what_a_task_needs_and_cannot_have_is_one_sentence(harbor: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(f"harbor: {EXAMPLE / 'tasks'}\npython: {harbor}\nlimits: {{memory: 1}}\n")
    with pytest.raises(SetupError, match="unexpected keyword argument 'memory'"):
        list(read_rows(file))
    broken = tmp_path / "tasks" / "broken"
    shutil.copytree(EXAMPLE / "tasks" / "sum_file", broken)
    (broken / "environment" / "Dockerfile").write_text("FROM alpine\n")
    hosts = tmp_path / "tasks" / "hosts"
    shutil.copytree(EXAMPLE / "tasks" / "sum_file", hosts)
    listed = 'network_mode = "allowlist"\nallowed_hosts = ["example.com"]'
    (hosts / "task.toml").write_text(f"[environment]\n{listed}\n")
    (tmp_path / "tasks" / "empty").mkdir()
    (tmp_path / "tasks" / "empty" / "task.toml").touch()
    file.write_text(f"harbor: tasks\npython: {harbor}\n")
    with pytest.raises(SetupError, match="task broken: 'FROM alpine' is not a plain") as refused:
        list(read_rows(file))
    assert "task empty: " in str(refused.value) and "missing instruction.md" in str(refused.value)
    assert "task hosts: it allows some hosts only" in str(refused.value)
    file.write_text(f"harbor: tasks\npython: {harbor}\nunsupported: skip\n")
    with pytest.raises(SetupError, match=r"no task of .* can be used"):
        list(read_rows(file))
