"""What a run trained on, sent to `treadle serve` as its clients do, makes the steps of the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from treadle.conformance.tinker.client import KitDatum, RemoteService, read_answer
from treadle.trainer.report import read_metrics

from .served import KEY, ServeProcess
from .testing import SMALL, Trainer

pytestmark = pytest.mark.timeout(900)

LOSS = (
    "algorithm.loss=treadle.policy.algorithms.service_losses:importance",
    "algorithm.loss_aggregation=token-sum",
    "algorithm.old_logprobs=rollout",
    "algorithm.norm_by_std=false",
)
ADAPTERS = ("policy.backend=fsdp", "policy.lora.rank=4", "policy.lora.alpha=32", "policy.seed=0")
OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}


def datum(line: dict[str, Any]) -> KitDatum:
    """Returns a line of the trajectory log as the SDK sends it."""
    (sample,) = line["samples"]
    sampled = [0.0] * len(sample["ids"])
    for span in sample["spans"]:
        if span["origin"] == "sampled":
            length = span["stop"] - span["start"]
            sampled[span["start"] : span["stop"]] = [1.0] * length
    advantages = [line["advantage"] * each for each in sampled[1:]]
    inputs = {"logprobs": sample["logprobs"][1:], "advantages": advantages}
    return KitDatum(tokens=sample["ids"], inputs=inputs)


def test_the_steps_of_a_run_are_those_of_its_batches_through_the_service(tmp_path: Path) -> None:
    optimizer = [f"policy.optimizer.{name}={value}" for name, value in OPTIMIZER.items()]
    more = ("policy.optimizer.warmup_steps=0", "schedule.total_steps=3", "schedule.val_every=null")
    run = tmp_path / "run"
    trainer = Trainer(
        run, [*SMALL, *LOSS, *ADAPTERS, *optimizer, *more, "run.trajectories_per_step=1000"]
    )
    assert trainer.wait() == 0, trainer.output
    lines = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["advantage"]]
    served = ServeProcess(tmp_path / "serve" / "state", "policy.backend=fsdp")
    service = RemoteService(served.base_url, KEY)
    model = service.model()
    adam = {"learning_rate": OPTIMIZER["lr"], "grad_clip_norm": 1.0, **OPTIMIZER}
    compared = 0
    for values in read_metrics(run / "metrics.jsonl"):
        data = [datum(line) for line in trained if line["step"] == values["step"]]
        if not data:
            continue
        answer = service.call("POST", "/forward_backward", model.body(data, "importance_sampling"))
        step = model.request("/optim_step", adam_params=adam)["metrics"]
        found = read_answer(service.result(answer)).metrics["loss:sum"]
        assert math.isclose(found, values["actor/loss"], rel_tol=1e-3, abs_tol=1e-3), values
        assert math.isclose(step["optim/grad_norm"], values["actor/grad_norm"], rel_tol=1e-3)
        compared += 1
    assert compared >= 2
    served.process.terminate()
    assert served.process.wait() == 0
