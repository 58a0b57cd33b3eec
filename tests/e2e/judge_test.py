"""A language model judges: a training step against an address, and a judge on rollout servers."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from treadle.agent_loop import AgentTask, Message, StopReason, Trajectory
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.rpc.testing import (
    STARTED,
    Context,
    ScriptedServer,
    finished,
    says,
    serving,
    tokens,
)
from treadle.rollout.v1 import server_service_pb2
from treadle.tools import rewards
from treadle.tools.rewards.judge import Judge
from treadle.trainer import demo

from .testing import StartTrainer

_MODEL = Path(demo.__file__).parent / "calculator" / "model"
_CRITERION = {
    "name": "correct",
    "question": "Said: {answer}\nTruth: {ground_truth}",
    "verdicts": {"yes": 1, "no": 0},
}


class _Judge(BaseHTTPRequestHandler):
    """Compares numbers; it cannot judge what has no number, which the first answer shows."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = re.search(r"Said: (.*)\nTruth: (\S+)", body["messages"][-1]["content"], re.DOTALL)
        assert found is not None
        right = found[1].replace("<|im_end|>", "").strip().endswith(found[2])
        message = {"role": "assistant", "content": f"Verdict: {'yes' if right else 'no'}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        data = json.dumps({**answer, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.timeout(300)
def test_a_step_is_rewarded_by_a_judge(tmp_path: Path, start_trainer: StartTrainer) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    rubric = tmp_path / "rubric.yaml"
    document = {
        "model": {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "name": "m"},
        "criteria": [_CRITERION],
        "accuracy": "correct",
        "cache": "verdicts.sqlite",
        "max_attempts": 1,
    }
    rubric.write_text(yaml.safe_dump(document), encoding="utf-8")
    settings = (
        f"reward.name={rubric}",
        "schedule.total_steps=1",
        "schedule.val_every=1",
        "policy.backend=fake",
    )
    try:
        run = start_trainer(*settings)
        assert run.wait() == 0, run.output
    finally:
        server.shutdown()
        server.server_close()
    (line,) = (line for line in run.metrics() if line["step"] == 1)
    assert 0 < line["reward/accuracy"] < 1
    assert line["reward/accuracy"] == line["reward/judge_correct"] == line["reward/mean"]
    assert 0 < line["reward/judge_calls"] <= 16
    assert line["val/accuracy"] > 0


class _Server(ScriptedServer):
    """Follows the script as a server of the demo's model."""

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        renderer = HfRenderer.from_directory(_MODEL)
        return server_service_pb2.GetServerInfoResponse(
            engine="scripted",
            capabilities=server_service_pb2.Capabilities(sampled_logprobs=True),
            model=server_service_pb2.ModelInfo(
                architecture="Test",
                vocab_size=renderer.vocab_size,
                context_length=512,
                tokenizer_sha256=renderer.tokenizer_sha256,
            ),
        )


@pytest.mark.asyncio
async def test_a_judge_on_rollout_servers_is_asked_in_its_own_chat_format(tmp_path: Path) -> None:
    renderer = HfRenderer.from_directory(_MODEL)
    said = renderer.encode("It is.\nVerdict: yes<|im_end|>")
    server = _Server(says(STARTED, tokens(*said), finished(len(said))))
    async with serving(server) as addresses:
        rubric = tmp_path / "rubric.yaml"
        model = {"servers": list(addresses), "path": str(_MODEL)}
        document = {"model": model, "system": "Be strict.", "criteria": [_CRITERION]}
        rubric.write_text(yaml.safe_dump(document), encoding="utf-8")
        judge = rewards.resolve(str(rubric))
        assert isinstance(judge, Judge)
        async with judge:
            score = await judge(_trajectory())
    assert score.value == 1.0
    (request,) = server.requests
    prompt = renderer.decode(tuple(request.prompt_token_ids))
    assert prompt.startswith("<|im_start|>system\nBe strict.<|im_end|>\n<|im_start|>user\nSaid: 42")
    assert prompt.endswith("Verdict: one of no, yes<|im_end|>\n<|im_start|>assistant\n")


def _trajectory() -> Trajectory:
    question = Message(role="user", content="6 * 7?")
    task = AgentTask(
        task_id="train/0",
        sample_index=0,
        rollout_index=0,
        loop="single_turn_agent",
        messages=(question,),
        fields={"reward_model": {"ground_truth": "42"}},
    )
    return Trajectory(
        task=task,
        samples=(),
        messages=(question, Message(role="assistant", content="42")),
        stop=StopReason.FINISHED,
    )
