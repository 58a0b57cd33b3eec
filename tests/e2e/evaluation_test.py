"""`treadle eval`: a model, a server at an address, failures and an interrupt, with real servers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from treadle.rollout_server.testing import running_server
from treadle.tracing.trajectories import Filter, TrajectoryFiles
from treadle.trainer.demo import DEMO, MODELS
from treadle.trainer.launch.process import child_python_path
from treadle.trainer.main import main

pytestmark = pytest.mark.timeout(300)

# The trainer, in an interpreter that has neither torch nor Megatron.
_WITHOUT_TORCH = """
import sys
sys.modules |= {"torch": None, "megatron": None}
from treadle.trainer.main import main
sys.exit(main(sys.argv[1:]))
"""
_CODE = """
import asyncio

from treadle.agent_loop import AgentTask, Services, SingleTurnLoop, Trajectory


def first_row_fails(trajectory):
    if trajectory.task.sample_index == 0:
        raise ValueError("no tests for it")
    return 1.0


def all_fail(trajectory):
    raise ValueError("no tests for it")


class StopsAtTheSecondRow:
    async def __aenter__(self):
        print("the loop is open", flush=True)

    async def __aexit__(self, kind, *rest):
        print(f"the loop is closed after {kind.__name__}", flush=True)

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        if task.sample_index:
            await asyncio.Event().wait()
        return await SingleTurnLoop().run(task, services)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    model = str(MODELS["demo:calculator"])
    with running_server("--engine", "fake", "--model.path", model) as server:
        yield server.address


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(_CODE)
    return path


def _results(out: Path) -> Mapping[str, Any]:
    results = json.loads((out / "results.json").read_text())
    assert isinstance(results, dict)
    return results


def _lines(out: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]


def test_a_model_is_evaluated_by_a_process_without_torch(tmp_path: Path, code: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        *("eval", "demo:calculator", "--limit=4", "--samples=4", "--out", str(out)),
        *("rollout.val.temperature=1", "rollout.threads=1"),
        *(f"reward.name={code}:first_row_fails", "agent.try_once=false"),
    ]
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *arguments],
        env={**os.environ, "PYTHONPATH": child_python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "treadle/calculator     4       16  0.7500 ± 0.2500" in ended.stdout
    assert f'File "{code}", line 9, in first_row_fails' in ended.stdout
    assert "4 of 16 trajectories failed" in ended.stderr
    assert "no tests for it" in ended.stderr
    results = _results(out)
    assert results["source"]["model"] == str(MODELS["demo:calculator"])
    assert results["servers"][0]["engine"] == "torch"
    [every] = [each for each in results["scores"] if each["data_source"] == "all"]
    assert every["pass_at"] == {"1": 0.75, "2": 0.75, "4": 0.75}
    assert results["metrics"]["val/reward"] == results["metrics"]["val/accuracy"] == 0.75
    assert sorted((line["task_id"], line["rollout_index"]) for line in _lines(out)) == [
        (f"val/{row}", sample) for row in range(4) for sample in range(4)
    ]
    with TrajectoryFiles(out) as files:
        assert files.count() == 16
        assert files.count(Filter.parse('error!= text~"no tests for it"')) == 4
        assert all(row["duration_s"] is not None for row in files.query())
    assert '"num_trajectories":16' in (out / "report.html").read_text()
    assert main(["report", str(out)]) == 0


def test_a_server_at_an_address_is_named_and_used_as_it_is(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["eval", address, "model.path=demo:calculator", "--limit=3"]
    assert main([*base, "--out", str(tmp_path / "one")]) == 0
    assert f"server     {address}: Qwen2ForCausalLM with fake" in capsys.readouterr().out
    one = _results(tmp_path / "one")
    assert (one["source"]["address"], one["source"]["model"]) == (address, None)
    assert one["weight_versions"] == [0]
    assert one["data"]["rows"] == 3
    assert not list((tmp_path / "one" / "logs").glob("rollout-*"))  # it started none
    # The same seeds, so the same tokens; the server is still there.
    config = str(tmp_path / "one" / "config.json")
    assert main(["eval", address, "--config", config, "--out", str(tmp_path / "two")]) == 0
    assert _results(tmp_path / "two")["scores"] == one["scores"]
    ids = [
        {line["task_id"]: line["samples"][0]["ids"] for line in _lines(tmp_path / name)}
        for name in ("one", "two")
    ]
    assert ids[0] == ids[1]
    assert main([*base, "--out", str(tmp_path / "one")]) == 2
    assert "one is not empty" in capsys.readouterr().err


@contextmanager
def _chat_completions(replica: str, model: str) -> Iterator[tuple[str, str]]:
    """Serves a rollout server by OpenAI's API, with the capture endpoint; yields URL and key."""
    options = ("--replicas", replica, "--tokenizer", model, "--port=0", "--agent-sampling=agent")
    module = ("-m", "treadle.agent_loop.proxy")
    endpoint = subprocess.Popen(
        (sys.executable, *module, *options, "--max-session-requests=64"),
        env={**os.environ, "PYTHONPATH": child_python_path()},
        stdout=subprocess.PIPE,
    )
    try:
        assert endpoint.stdout is not None
        ready = json.loads(endpoint.stdout.readline())
        headers = {"authorization": f"Bearer {ready['key']}"}
        url = f"{ready['address']}/sessions"
        session = httpx.post(url, json={"task_id": "t"}, headers=headers).json()
        yield session["base_url"], session["api_key"]
    finally:
        endpoint.terminate()
        endpoint.communicate()


def test_an_api_gives_the_scores_of_the_server_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(MODELS["demo:calculator"])
    base = ["--config", str(DEMO), "--limit=12"]
    with running_server("--engine", "torch", "--model.path", model) as server:
        ids = tmp_path / "ids"
        of_server = [f"model.path={model}", "--out", str(ids)]
        assert main(["eval", server.address, *base, *of_server]) == 0
        with _chat_completions(server.address, model) as (url, key):
            api = ["eval", url, "--model", "any", *base]
            assert main([*api, "--out", str(tmp_path / "refused")]) == 2
            assert "refuses the key of OPENAI_API_KEY" in capsys.readouterr().err
            assert not (tmp_path / "refused").exists()
            monkeypatch.setenv("OPENAI_API_KEY", key)
            assert main([*api, "--out", str(tmp_path / "api")]) == 0
    by_ids, by_api = (_results(tmp_path / name) for name in ("ids", "api"))
    assert by_api["source"]["model"] == "any"
    assert by_api["scores"][-1]["failed"] == 0
    assert 0 < by_api["metrics"]["val/reward"] == by_ids["metrics"]["val/reward"]
    texts = [
        {line["task_id"]: [m["content"] for m in line["messages"]] for line in _lines(folder)}
        for folder in (ids, tmp_path / "api")
    ]
    assert texts[0] == texts[1]
    # What it got right is a data set for fine-tuning, as the rows of the same run by ids are.
    rows = []
    for folder in (ids, tmp_path / "api"):
        capsys.readouterr()
        arguments = [str(folder), "--format=sft", "--filter=reward=1", "--order-by=task_id"]
        assert main(["trajectories", *arguments]) == 0
        rows.append(capsys.readouterr().out)
    good = tmp_path / "good.jsonl"
    good.write_text(rows[1])
    of_ids, of_api = ([json.loads(line) for line in text.splitlines()] for text in rows)
    assert len(of_api) == 12 * by_api["metrics"]["val/reward"]
    assert [row["tools"] for row in of_api] == [row["tools"] for row in of_ids]
    sft = ["sft", "--dry-run", f"model.path={model}", f"data.train_files={good}"]
    assert main([*sft, "data.batch_size=2", "schedule.total_steps=1"]) == 0


def test_a_server_of_another_model_is_refused(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in MODELS["demo:calculator"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    rows = MODELS["demo:calculator"].parent / "val.jsonl"
    tools = f"agent.tool_catalogue={rows.parent / 'tools.yaml'}"
    out = tmp_path / "out"
    arguments = [address, f"model.path={model}", tools, "--data", str(rows), "--out", str(out)]
    assert main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert "tokenizer.json has sha256" in err
    assert f"model.path={model}" in err
    assert not out.exists()


def test_an_environment_is_played_and_gives_the_scores(address: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Twice:\n"
        "    def reset(self, *, seed=None):\n"
        "        self.turns = 0\n"
        "        return f'hello {seed}', {}\n"
        "    def step(self, action):\n"
        "        self.turns += 1\n"
        "        return 'again', 0.25, self.turns == 2, False, {}\n"
    )
    rows = tmp_path / "twice.yaml"
    rows.write_text("gymnasium: mine.py:Twice\nrows: 3\nfirst_seed: 5\n")
    out = tmp_path / "out"
    arguments = ["model.path=demo:calculator", "rollout.response_length=700"]
    assert main(["eval", address, *arguments, "--data", str(rows), "--out", str(out)]) == 0
    lines = _lines(out)
    assert len(lines) == 3
    for line in lines:
        shown = [m["content"] for m in line["messages"] if m["role"] == "user"]
        assert shown[0] == f"hello {5 + int(line['task_id'].partition('/')[2])}"
        assert shown[1:] in ([], ["again"])
        # The fake engine's text may be cut by a limit.
        assert (line["stop"] == "finished") is (line["reward"] == 0.5)


def test_nothing_that_ends_well_is_status_1(
    address: str, tmp_path: Path, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["model.path=demo:calculator", f"reward.name={code}:all_fail", "--limit=2"]
    arguments.append("agent.try_once=false")
    assert main(["eval", address, *arguments, "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert "2 of 2 trajectories failed" in err
    assert "code.py:14, in all_fail" in err
    assert _results(out)["scores"][-1]["failed"] == 2


def test_an_interrupt_ends_the_servers_and_keeps_what_is_written(
    tmp_path: Path, code: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    one = json.loads((MODELS["demo:calculator"].parent / "val.jsonl").read_text().splitlines()[0])
    rows.write_text("".join(json.dumps({**one, "agent_name": "mine"}) + "\n" for _ in range(10)))
    out = tmp_path / "out"
    arguments = [
        *("eval", "demo:calculator", "--data", str(rows), "--out", str(out)),
        *("rollout.name=fake", f"agent.loops.mine={code}:StopsAtTheSecondRow"),
        "agent.tool_catalogue=null",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "treadle.trainer.main", *arguments],
        env={**os.environ, "PYTHONPATH": child_python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "evaluate 1/10" in line:
                break
        else:
            raise AssertionError("".join(said))
        server = int(json.loads((out / "logs" / "rollout-0.ready").read_text())["pid"])
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert f"interrupted; finished rows are in {out}" in rest
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    assert "".join(said).count("the loop is open") == 1
    assert "the loop is closed after CancelledError" in rest
    assert [line["task_id"] for line in _lines(out)] == ["val/0"]
    assert not (out / "results.json").exists()
    assert json.loads((out / "status.json").read_text())["state"] == "interrupted"
