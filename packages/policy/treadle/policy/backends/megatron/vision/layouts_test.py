"""Steps of models that see: parallel layouts, shared prefixes, recomputation, against one process.

The tower is trained, so that its gradients count too.
"""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.seeing import (
    SEEING,
    seeing_sequences,
    write_seeing_model,
)

# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
CONFIG = PolicyConfig(
    optimizer=OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0),
    micro_batch_tokens=80,
    freeze_vision_tower=False,
)
LOSS = policy_loss(AlgorithmConfig(entropy_coef=0.01))


def case(model: str, **settings: Any) -> dict[str, Any]:
    sizes = ("tensor", "sequence", "pipeline", "data", "context")
    return {
        "model": model,
        "parallel": ParallelConfig(**{k: settings.pop(k) for k in sizes if k in settings}),
        "settings": settings,
    }


QWEN2_5, QWEN3 = SEEING
# The cases of a round run side by side.
ROUNDS = [
    [case(QWEN3, tensor=2, sequence=True), case(QWEN2_5, pipeline=2)],
    [case(QWEN3, pipeline=2), case(QWEN2_5, data=2)],
    [case(QWEN3, tensor=2, context=2, sequence=True, share_prefixes="always")],
]


def train(
    case: dict[str, Any], models: Path, rendezvous: Any = None, checkpoint: str = "alone"
) -> dict[str, Any]:
    """The policy's view of the batch, the reference's, two steps, a checkpoint, one more step."""
    settings = {"share_prefixes": "never", **case["settings"], "parallel": case["parallel"]}
    policy = MegatronPolicy(
        CONFIG.model_copy(update=settings), models / case["model"], rendezvous, keep_reference=True
    )
    batch = seeing_sequences()
    logprobs = policy.logprobs(batch)
    again = [replace(s, old_logprobs=o) for s, o in zip(batch, logprobs, strict=True)]
    steps = [policy.train_step(b, LOSS) for b in (batch, again)]
    result: dict[str, Any] = {
        "logprobs": logprobs,
        "reference": policy.reference_logprobs(batch),
        "steps": steps,
        "weights": {t.name: t.tensor.clone().numpy() for t in policy.export_weights()},
        "specs": [spec.name for spec in policy.weight_specs()],
    }
    if checkpoint:
        policy.save(models / "checkpoints" / case["model"] / checkpoint)
    result["steps"].append(policy.train_step(again, LOSS))
    policy.close()
    return result


def run(task: RankTask) -> list[dict[str, Any]]:
    from treadle.policy.backend import Rendezvous

    results = []
    for number, cases in enumerate(ROUNDS):
        first = 0
        for c in cases:
            size = c["parallel"].num_ranks
            if first <= task.rank < first + size:
                place = Rendezvous(
                    rank=task.rank - first,
                    world_size=size,
                    shared_file=task.folder / f"{number}-{first}",
                )
                results.append(train(c, task.argument, place, f"{number}-{first}"))
            first += size
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in SEEING:
        write_seeing_model(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def alone(models: Path) -> dict[str, dict[str, Any]]:
    return {name: train(case(name), models) for name in SEEING}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in ("logprobs", "reference"):
        for g, w in zip(got[name], want[name], strict=True):
            assert g == pytest.approx(w, abs=1e-5)
    for g, w in zip(got["steps"], want["steps"], strict=True):
        assert g.loss == pytest.approx(w.loss, abs=1e-5)
        assert g.grad_norm == pytest.approx(w.grad_norm, rel=1e-5)
    for name, tensor in got["weights"].items():
        assert abs(tensor - want["weights"][name]).max() < 2e-6, name


def test_every_layout_and_its_checkpoint_equal_one_process(
    models: Path, alone: dict[str, dict[str, Any]]
) -> None:
    ranks = run_ranks(f"{__name__}:run", 4, models)
    for number, cases in enumerate(ROUNDS):
        first = 0
        for c in cases:
            size = c["parallel"].num_ranks
            for rank in range(first, first + size):
                got = ranks[rank][number]
                assert_same(got, alone[c["model"]])
                assert sorted(got["specs"]) == sorted(alone[c["model"]]["specs"])
            first += size
    for name in SEEING:
        policy = MegatronPolicy(CONFIG, models / name)
        batch = seeing_sequences()
        again = [
            replace(s, old_logprobs=o) for s, o in zip(batch, alone[name]["logprobs"], strict=True)
        ]
        saved = sorted((models / "checkpoints" / name).iterdir())
        assert len(saved) == 1 + sum(c["model"] == name for cases in ROUNDS for c in cases)
        for checkpoint in saved:
            policy.load(checkpoint)
            third = policy.train_step(again, LOSS)
            assert third.grad_norm == pytest.approx(alone[name]["steps"][2].grad_norm, rel=1e-4)
        policy.close()


@pytest.mark.parametrize("name", SEEING)
def test_shared_prefixes_equal_flat_ones(
    models: Path, alone: dict[str, dict[str, Any]], name: str
) -> None:
    settings = {"share_prefixes": "always", "micro_batch_tokens": 8192}
    shared = train(case(name, **settings), models, checkpoint="")
    assert_same(shared, alone[name])
    assert shared["steps"][0].num_rows < shared["steps"][0].num_tokens


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", SEEING)
def test_recomputed_layers_equal_kept_ones(
    models: Path, alone: dict[str, dict[str, Any]], name: str, frozen: bool
) -> None:
    settings = {"freeze_vision_tower": frozen, "recompute_modules": ("core_attn", "mlp")}
    kept = train(case(name, **settings), models, checkpoint="") if frozen else alone[name]
    for recompute in ("full", "selective"):
        again = train(case(name, **settings, recompute=recompute), models, checkpoint="")
        assert_same(again, kept)


def test_a_batch_travels_with_each_image_once() -> None:
    batch = seeing_sequences()
    images = {placed.image for sequence in batch for placed in sequence.images}
    total = sum(len(image.data) for image in images)
    assert sum(len(p.image.data) for s in batch for p in s.images) > 3 * total
    bare = len(pickle.dumps([replace(s, images=()) for s in batch]))
    assert len(pickle.dumps(batch)) - bare < 1.5 * total
