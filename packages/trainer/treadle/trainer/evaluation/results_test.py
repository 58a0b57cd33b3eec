import datetime
import json
from dataclasses import replace

from treadle.agent_loop import RewardError, Trajectory
from treadle.agent_loop.rpc import ServerInfo
from treadle.trainer.config.load import load_config
from treadle.trainer.evaluation.results import make_results
from treadle.trainer.evaluation.source import Source
from treadle.trainer.report.testing import make_task, make_trajectory

SERVER = ServerInfo(
    address="h:1",
    server_version="1.2",
    engine="vllm",
    engine_version="0.9",
    capabilities=frozenset({"sampled_logprobs"}),
    architecture="Qwen2ForCausalLM",
    vocab_size=8,
    context_length=8,
    tokenizer_sha256=b"",
    weight_version=3,
    max_in_flight=1,
    max_queued=1,
    max_request_bytes=1,
)


def _of_version(trajectory: Trajectory, version: int) -> Trajectory:
    [tokens] = trajectory.samples
    spans = tuple(
        span if span.weight_version is None else replace(span, weight_version=version)
        for span in tokens.spans
    )
    return replace(trajectory, samples=(replace(tokens, spans=spans),))


def test_the_file_says_what_was_evaluated_how_and_with_what() -> None:
    trajectories = [
        _of_version(make_trajectory(task=make_task("val/0")), 4),
        _of_version(make_trajectory(task=make_task("val/1")), 3),
        Trajectory.failed(make_task("val/2"), RewardError("no tests")),
    ]
    results = make_results(
        load_config([], ["model.path=/m", "data.train_files=/t.jsonl", "run.seed=5"]).config,
        Source(text="h:1", address="h:1"),
        trajectories,
        servers=[SERVER],
        began=datetime.datetime.now().astimezone(),
    )
    assert results.weight_versions == (3, 4)
    record = json.loads(json.dumps(results.record))
    assert record["source"]["address"] == "h:1"
    assert record["source"]["model"] is None
    assert record["servers"][0]["weight_version"] == 3
    assert record["sampling"]["seed"] == 5
    assert record["data"]["rows"] == 3
    assert record["failures"] == ["1 x RewardError, as: no tests"]
    assert record["scores"][-1]["reward"]["mean"] == record["metrics"]["val/reward"]
