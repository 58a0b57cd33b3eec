"""Training end to end: all processes real, over gRPC, with the demo's model.

One plain run is shared. How weights travel, where processes run, how a model is split over them and
who has the memory meanwhile change nothing of what is learned, so other runs are compared with it.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing.trajectories import Filter, TrajectoryFiles
from treadle.trainer.demo import DEMO
from treadle.trainer.loggers.testing import brittle

from .span_table import Spans, add_span, documented_spans
from .testing import SMALL, Trainer

pytestmark = pytest.mark.timeout(600)
Train = Callable[..., Trainer]


_LOGGERS = f"run.loggers=[{brittle('Records')},{brittle('RaisesAtStart')},{brittle('Dies')}]"


def _arguments(texts: Path) -> tuple[str, ...]:
    folders = (f"run.rollout_data_dir={texts}/train", f"run.validation_data_dir={texts}/val")
    return (*folders, "rollout.val.samples_per_prompt=2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """The run whose weights are sent to two servers in the calls, with traces."""
    folder = tmp_path_factory.mktemp("plain")
    arguments = ("sync.transport=inline", "rollout.num_replicas=2", "rollout.cache_tokens=2000")
    trainer = Trainer(
        folder / "run",
        [*SMALL, *arguments, *_arguments(folder / "texts"), "tracing.backends=jsonl"],
    )
    try:
        assert trainer.wait() == 0, trainer.output
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.wait()


def _check_versions(trainer: Trainer) -> None:
    """Checks that sampled tokens name the weight version that sampled them."""
    for line in trainer.trajectories():
        spans = [span for span in line["samples"][-1]["spans"] if span["origin"] == "sampled"]
        expected = line["step"] if line["phase"] == "val" else line["step"] - 1
        assert {span["weight_version"] for span in spans} == {expected}


def test_a_run_trains_validates_and_writes_its_files(plain: Trainer) -> None:
    _check_run(plain, plain.run_dir.with_name("texts"))
    _check_spans(plain)


@pytest.mark.parametrize(
    "arguments",
    [
        (
            *("sync.transport=file", "sync.in_flight=interrupt"),
            *("rollout.release_memory=true", "rollout.multi_stage_wake_up=false"),
            *("policy.offload.parameters=true", "policy.offload.optimizer=true"),
            _LOGGERS,
        ),
        (
            *("sync.transport=shared_memory", "sync.in_place=true", "policy.parallel.pipeline=2"),
            *("rollout.release_memory=true", "rollout.multi_stage_wake_up=true"),
        ),
        ("sync.transport=collective", "policy.parallel.pipeline=2", "rollout.num_replicas=2"),
    ],
    ids=[
        "file, staged, server sleeping and policy offloaded at once",
        "shared memory, in place, two senders, server sleeping in stages",
        "collective, two senders",
    ],
)
def test_transports_and_released_memory_change_nothing(
    plain: Trainer, train: Train, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    trainer = train(*arguments, *_arguments(tmp_path / "texts"))
    _check_run(trainer, tmp_path / "texts")
    _check_same(trainer, plain)
    releases, offloads = (
        any(argument.startswith(name) for argument in arguments)
        for name in ("rollout.release_memory", "policy.offload")
    )
    assert ("released while the policy trains" in trainer.output) is releases
    for line in trainer.metrics():
        if line["step"]:
            assert (line.get("time/release_s", 0) > 0) is releases
            assert (line.get("offload/host_bytes", 0) > 0) is offloads
            assert line["rollout/logprob_diff_max"] < 1e-4
    assert all("time/release_s" not in line for line in plain.metrics())
    if _LOGGERS in arguments:
        _check_loggers(trainer)


def _check_same(trainer: Trainer, plain: Trainer) -> None:
    """Checks that two runs have sampled and learned the same."""
    for one, two in zip(trainer.metrics(), plain.metrics(), strict=True):
        assert one.get("val/reward") == two.get("val/reward")
        if one["step"]:
            assert one["reward/mean"] == two["reward/mean"]
            assert one["tokens/sampled"] == two["tokens/sampled"]
            assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-5)
            assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)


def _check_run(trainer: Trainer, texts: Path) -> None:
    """Checks what every run of two steps writes, and that its numbers are in their ranges."""
    before, first, last = trainer.metrics()
    for process in ("servers", "policy"):  # also of step 0, the validation before training
        shares = [before[name] for name in before if name.startswith(f"{process}/time_share/")]
        assert sum(shares) == pytest.approx(1.0)
        assert 0 <= before[f"{process}/busy_min"] <= before[f"{process}/busy_max"] <= 1
    assert before["policy/time_share/start"] > 0
    of_source = "val/treadle/calculator/reward"
    assert before[f"{of_source}/mean@2"] == before["val/reward"]
    assert before[f"{of_source}/worst@2"] <= before["val/reward"] <= before[f"{of_source}/best@2"]
    files = {path.relative_to(texts).as_posix() for path in texts.rglob("*.jsonl")}
    assert files == {"train/1.jsonl", "train/2.jsonl", "val/0.jsonl", "val/2.jsonl"}
    assert len((texts / "train/1.jsonl").read_text().splitlines()) == 16
    assert [line["step"] for line in (before, first, last)] == [0, 1, 2]
    assert "val/reward" in before
    assert "val/reward" not in first
    assert "val/reward" in last
    for line in (first, last):
        assert 0 <= line["reward/mean"] <= 1
        assert 0 <= line["tool/call_rate"] <= 1
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/num_failed"] == 0
        assert line["weights/version"] == line["step"]
        assert line["tokens/sampled"] > 0
        assert line["actor/grad_norm"] >= 0
        phases = sum(line[f"time/{name}_s"] for name in ("rollout", "train", "sync"))
        assert 0 < phases <= line["time/step_s"]
        # Trainer and server compute the same probabilities, after the weights have changed too.
        assert line["rollout/logprob_diff_max"] < 1e-3
    for name in ("config.json", "curves.png", "report.html", "trajectories.jsonl"):
        assert (trainer.run_dir / name).stat().st_size > 0
    _check_versions(trainer)
    _check_all_trajectories(trainer)
    weights = trainer.run_dir / "weights"
    assert not weights.exists() or not list(weights.iterdir())


def _check_all_trajectories(trainer: Trainer) -> None:
    """Checks that every trajectory is kept, with what was computed of its tokens."""
    with TrajectoryFiles(trainer.run_dir) as files:
        counts = files.sql(
            "SELECT step, phase, count(*) AS n FROM trajectories GROUP BY ALL ORDER BY ALL"
        )
        rows = files.query(Filter.parse("advantage!="), columns=["advantage", "samples", "trace"])
    assert [tuple(row.values()) for row in counts.to_pylist()] == [
        *((0, "val", 16), (1, "train", 16), (2, "train", 16), (2, "val", 16)),
    ]
    assert len(rows) == 32
    computed = 0
    for row in rows:
        assert row["trace"][0]["name"] == "trajectory"
        (sample,) = row["samples"]
        columns = ("logprobs", "advantages", "policy_logprobs", "entropy")
        for theirs, advantage, ours, entropy in zip(*map(sample.get, columns), strict=True):
            sampled = not math.isnan(theirs)
            assert sampled is not math.isnan(advantage)
            if sampled and row["advantage"]:
                computed += 1
                assert advantage == pytest.approx(row["advantage"])
                assert ours == pytest.approx(theirs, abs=1e-3)
                assert 0 <= entropy < 7
    assert computed


def _check_spans(trainer: Trainer) -> None:
    """Checks that each span says of which step it is and, within a trajectory, of which one."""
    lines = (trainer.run_dir / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    spans = [json.loads(line) for line in lines]
    of_steps = [span for span in spans if span["name"] in ("update", "weight_sync")]
    assert [(span["name"], span["attributes"]["step"]) for span in of_steps] == [
        ("update", 1),
        ("weight_sync", 1),
        ("update", 2),
        ("weight_sync", 2),
    ]
    assert {"trajectory", "turn", "generate", "reward"} <= {span["name"] for span in spans}
    recorded: Spans = {}
    for span in of_steps:
        add_span(recorded, "driver", span["name"], span["attributes"])
    assert recorded.items() <= documented_spans().items()
    attributes = [span["attributes"] for span in spans]
    assert {(each["step"], each["validate"]) for each in attributes} == {
        (0, True),
        (1, False),
        (2, False),
        (2, True),
    }
    assert all(each["experiment_name"] == "calculator" for each in attributes)
    found = {
        (each["step"], each["sample_index"], each["rollout_n"])
        for each in attributes
        if not each["validate"] and "sample_index" in each
    }
    assert len(found) == 2 * 16
    by_id = {span["span_id"]: span for span in spans}
    for name in ("rollout-0", "rollout-1"):
        text = (trainer.run_dir / "traces" / f"{name}.jsonl").read_text(encoding="utf-8")
        served = [json.loads(line) for line in text.splitlines()]
        calls = [span for span in served if span["name"] == "server.generate"]
        assert {by_id[call["parent_id"]]["name"] for call in calls} == {"generate"}
        assert {"queue", "prefill", "decode"} <= {span["name"] for span in served}


def _check_loggers(trainer: Trainer) -> None:
    """Checks that the good logger was told everything, and that each bad one is one warning."""
    told = (trainer.run_dir / "Records.txt").read_text().splitlines()
    assert [line.split()[:2] for line in told[1:-1]] == [
        ["table", "0"],
        ["metrics", "0"],
        ["metrics", "1"],
        ["table", "2"],
        ["metrics", "2"],
    ]
    assert told[-1].startswith("finished {'reward': ")
    log = (trainer.run_dir / "logs" / "trainer.log").read_text()
    warnings = [line for line in log.splitlines() if " WARNING " in line and ": logger " in line]
    died, raised = sorted(warnings, key=lambda line: line.partition(": logger ")[2])
    assert "logger Dies exited with status 3, and logs nothing more" in died
    assert "logger RaisesAtStart failed at its start" in raised


_NO_VALIDATION = ("schedule.val_every=null", "schedule.val_before_train=false")


def _write_mixture_of_experts(folder: Path) -> None:
    """Writes a random model with the demo's tokenizer."""
    import torch
    import transformers

    untyped: Any = transformers
    shutil.copytree(DEMO.parent / "model", folder)
    torch.manual_seed(0)
    config = untyped.Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=64,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        initializer_range=0.1,
        eos_token_id=1019,
        pad_token_id=1017,
    )
    untyped.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_a_mixture_of_experts_trains_on_ranks_that_share_experts(
    train: Train, tmp_path: Path
) -> None:
    _write_mixture_of_experts(tmp_path / "moe")
    trainer = train(
        *_NO_VALIDATION,
        *(f"--config={DEMO}", f"model.path={tmp_path / 'moe'}"),
        "rollout.response_length=24",
        "algorithm.entropy_coef=0.01",  # a random model has no reward to learn from
        *("policy.parallel.data=2", "policy.parallel.expert=2"),
        *("policy.moe.aux_loss_coef=0.01", "policy.optimizer.lr=1e-2"),
    )
    for line in trainer.metrics():
        # The second step's tokens were sampled with weights that both ranks sent. Not the largest
        # difference: where two experts are as good but for rounding, server and policy may differ.
        assert line["rollout/logprob_diff_mean"] < 1e-2
        assert line["actor/grad_norm"] > 0
        assert line["moe/load_balance_loss"] > 1
        assert 1 < line["moe/max_load"] < 4


def test_versions_travel_as_deltas_and_greedy_trajectories_are_counted_apart(
    train: Train,
) -> None:
    trainer = train(
        *_NO_VALIDATION,
        "schedule.total_steps=3",
        "sync.transport=file",
        "sync.delta.enabled=true",
        "rollout.dtype=bfloat16",
        "policy.parallel.pipeline=2",  # each rank writes a file
        "policy.optimizer.lr=1e-6",
        "algorithm.advantage=remax",
    )
    for line in trainer.metrics():
        assert line["rollout/num_trajectories"] == 16
        assert line["greedy/num_trajectories"] == line["groups/trained"] + line["groups/dropped"]
        assert line["greedy/num_trajectories"] == 4
    first, *others = trainer.metrics()
    assert first["sync/delta_ratio"] == 1
    for line in others:
        assert line["sync/delta_ratio"] == line["sync/bytes"] / line["weights/bytes"] < 0.1
        assert line["rollout/logprob_diff_max"] < 0.2  # of rounding
    assert not list((trainer.run_dir / "weights").iterdir())


def test_ranks_that_ray_starts_from_a_saved_configuration_learn_the_same(
    plain: Trainer, train: Train, tmp_path: Path
) -> None:
    saved = ("--config", str(plain.run_dir / "config.json"))
    changed = ("policy.parallel.tensor=2", "launch=ray", "rollout.num_replicas=1")
    _check_same(train(*saved, *changed, *_arguments(tmp_path / "texts"), base=()), plain)


def test_what_dynamic_sampling_samples_is_counted(train: Train) -> None:
    trainer = train(
        *_NO_VALIDATION,
        "preset=dapo",
        "algorithm.max_generation_batches=2",
        "rollout.temperature=0.7",
    )
    for line in trainer.metrics():
        # Trainer and server compute the same probabilities at another temperature too.
        assert line["rollout/logprob_diff_max"] < 1e-3
        assert line["rollout/num_trajectories"] == 16 * line["sampling/batches"]
        assert line["groups/trained"] == 4
        assert line["sampling/groups_failed"] == 0
        assert line["reward/overlong_penalty"] <= 0
