"""Steps of a model with experts: against torch, in every layout, over checkpoints."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.agent_loop import RoutedExperts
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.hf_weights import WeightsReader
from treadle.policy.backends.megatron.experts.shape import ExpertShape
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import (
    LoraConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import forked_sequences, sequences, write_model

# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
CONFIG = PolicyConfig(
    optimizer=OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0),
    micro_batch_tokens=80,
    moe=MoeConfig(routing_replay=True),
)
LOSS = policy_loss(AlgorithmConfig(entropy_coef=0.01))
BALANCED = MoeConfig(aux_loss_coef=0.02)
LENGTHS = (18, 41, 9, 33, 26)


ADAPTERS = LoraConfig(rank=2, targets=("q_proj", "v_proj", "o_proj"))


def case(
    model: str,
    lengths: tuple[int, ...] = LENGTHS,
    recompute: str = "none",
    lora: LoraConfig | None = None,
    **parallel: Any,
) -> dict[str, Any]:
    return {
        "model": model,
        "lengths": lengths,
        "settings": {
            "parallel": ParallelConfig(**parallel),
            "recompute": recompute,
            "lora": lora or LoraConfig(),
        },
    }


# Rounds run one after another in one group of processes; the cases of a round run side by side.
ROUNDS = [
    [
        case("sparse", data=2, expert=2),
        case("sparse", tensor=2, sequence=True, expert=2),
    ],
    [case("mixed", tensor=2, sequence=True, data=2, expert=2, recompute="full")],
    [case("mixed", pipeline=2, recompute="selective"), case("sparse", data=2)],
    [
        case("sparse", lengths=(20,), data=2, expert=2),  # one of the ranks has blank rows only
        case("mixed", tensor=2, sequence=True),
    ],
    [case("mixed", pipeline=2, data=2, expert=2)],
    [
        case("sparse", lora=ADAPTERS, data=2, expert=2),
        case("mixed", context=2, expert=2),
    ],
]


def name_of(case: dict[str, Any]) -> str:
    p = case["settings"]["parallel"]
    sizes = f"tp{p.tensor}-pp{p.pipeline}-cp{p.context}-dp{p.data}-ep{p.expert}"
    lora = "-lora" if case["settings"]["lora"].rank else ""
    return f"{case['model']}-{sizes}-n{len(case['lengths'])}{lora}"


def key_of(case: dict[str, Any]) -> tuple[Any, ...]:
    return case["model"], case["lengths"], case["settings"]["lora"]


def open_policy(models: Path, case: dict[str, Any], rendezvous: Any = None, **update: Any) -> Any:
    from treadle.policy.backends.megatron.backend import MegatronPolicy

    settings = case["settings"] | {"recompute_modules": ("core_attn", "mlp")} | update
    return MegatronPolicy(
        CONFIG.model_copy(update=settings), models / case["model"], rendezvous, keep_reference=True
    )


def weights_of(policy: Any) -> dict[str, Any]:
    return {t.name: t.tensor.clone().numpy() for t in policy.export_weights()}


def with_experts(batch: list[TrainSequence], shape: ExpertShape) -> list[TrainSequence]:
    """Each row goes to the experts that its id and its layer say; the last few rows choose."""
    layers, top_k = len(shape.layers), shape.per_token
    result = []
    for sequence in batch:
        choices = itertools.product(sequence.ids[:-7], range(layers), range(top_k))
        experts = RoutedExperts(
            first=0,
            num_layers=layers,
            top_k=top_k,
            id_bytes=1,
            data=bytes(sum(choice) % shape.number for choice in choices),
        )
        result.append(replace(sequence, routed_experts=experts))
    return result


def train(
    case: dict[str, Any], models: Path, places: Iterator[Any], folder: Path, other: Path | None
) -> dict[str, Any]:
    """Takes steps, and saves and resumes between the last two, which have one more loss.

    They also have one sequence per micro-batch, on which the load-balancing loss depends.

    Args:
        case: The model and how it is spread.
        models: Where models are.
        places: For each policy in turn, where its ranks meet.
        folder: For a checkpoint.
        other: That of one process; None: this is the one.
    """
    policy = open_policy(models, case, next(places))
    batch = sequences(case["lengths"])
    logprobs = policy.logprobs(batch)
    again = [replace(s, old_logprobs=o) for s, o in zip(batch, logprobs, strict=True)]
    policy.planner.share_prefixes = "never" if other is None else "always"
    forked = forked_sequences(groups=1) if len(batch) > 1 else batch
    result = {
        "logprobs": logprobs,
        "specs": policy.weight_specs(),
        "started": weights_of(policy),
        "steps": [policy.train_step(b, LOSS) for b in (batch, again)],
        "shared": policy.train_step(forked, LOSS),
        "weights": weights_of(policy),
    }
    policy.save_hf(folder.with_name(f"{folder.name}-hf"))
    result["replayed"] = policy.train_step(with_experts(batch, policy.architecture.experts), LOSS)
    policy.close()

    alone = {"micro_batch_tokens": 2, "moe": BALANCED, "share_prefixes": "never"}
    policy = open_policy(models, case, next(places), **alone)
    result["balanced"] = [policy.train_step(batch, LOSS)]
    policy.save(folder)
    result["balanced"].append(policy.train_step(again, LOSS))
    result["moved"] = weights_of(policy)
    policy.close()

    policy = open_policy(models, case, next(places), **alone)
    policy.load(folder)
    result["resumed"] = policy.train_step(again, LOSS)
    result["resumed weights"] = weights_of(policy)
    if other is not None:
        policy.load(other)
        result["resharded"] = policy.train_step(again, LOSS)
    policy.close()
    return result


SINGLE = {
    key: f"single-{number}"
    for number, key in enumerate({key_of(c): None for cases in ROUNDS for c in cases})
}


def run(task: RankTask) -> list[dict[str, Any]]:
    from treadle.policy.backend import Rendezvous

    models, saved = task.argument
    results = []
    for number, cases in enumerate(ROUNDS):
        first = 0
        for c in cases:
            size = c["settings"]["parallel"].num_ranks
            if first <= task.rank < first + size:
                places = (
                    Rendezvous(
                        rank=task.rank - first,
                        world_size=size,
                        shared_file=task.folder / f"{number}-{first}-{meeting}",
                    )
                    for meeting in itertools.count()
                )
                folder = saved / f"{number}-{first}"
                results.append(train(c, models, places, folder, saved / SINGLE[key_of(c)]))
            first += size
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "sparse", "qwen3_moe", tied=False, num_hidden_layers=2)
    write_model(
        folder / "mixed",
        "qwen3_moe",
        num_hidden_layers=2,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        num_experts=4,
        num_experts_per_tok=3,
    )
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def single(models: Path, saved: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (model, lengths, lora): train(
            case(model, lengths, lora=lora), models, itertools.repeat(None), saved / name, None
        )
        for (model, lengths, lora), name in SINGLE.items()
    }


@pytest.fixture(scope="module")
def outcomes(models: Path, saved: Path, single: Any) -> list[Any]:
    return run_ranks(f"{__name__}:run", 4, (models, saved))


PLACES = [
    (round_, sum(c["settings"]["parallel"].num_ranks for c in cases[:i]), c)
    for round_, cases in enumerate(ROUNDS)
    for i, c in enumerate(cases)
]


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float(abs(a[name] - b[name]).max()) for name in a)


@pytest.mark.parametrize(
    ("round_", "first", "case"), PLACES, ids=[f"{r}-{name_of(c)}" for r, _, c in PLACES]
)
def test_a_layout_changes_nothing(
    outcomes: list[Any],
    single: dict[Any, Any],
    models: Path,
    saved: Path,
    round_: int,
    first: int,
    case: dict[str, Any],
) -> None:
    size = case["settings"]["parallel"].num_ranks
    ranks = [outcomes[first + r][round_] for r in range(size)]
    alone = single[key_of(case)]
    for rank in ranks:
        assert rank["specs"] == ranks[0]["specs"]
        for got, want in zip(rank["logprobs"], alone["logprobs"], strict=True):
            assert got == pytest.approx(want, abs=1e-5)
        # A shared prefix counts once, so only its load differs.
        assert rank["shared"].loss == pytest.approx(alone["shared"].loss, abs=2e-6)
        assert rank["shared"].grad_norm == pytest.approx(alone["shared"].grad_norm, rel=1e-5)
        for kind in ("steps", "balanced"):
            for got, want in zip(rank[kind], alone[kind], strict=True):
                assert not got.skipped
                assert got.loss == pytest.approx(want.loss, rel=1e-6, abs=2e-6)
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
                assert got.metrics == pytest.approx(want.metrics, abs=1e-5)
        for kind, want in (("replayed", alone["replayed"]), ("resharded", alone["balanced"][1])):
            assert rank[kind].loss == pytest.approx(want.loss, rel=1e-6, abs=2e-6)
            assert rank[kind].grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        assert rank["resumed"].grad_norm == rank["balanced"][1].grad_norm
        assert difference(rank["resumed weights"], rank["moved"]) == 0.0

    whole = {
        s.name: torch.from_numpy(ranks[s.sender]["weights"][s.name]) for s in ranks[0]["specs"]
    }
    with WeightsReader(saved / f"{round_}-{first}-hf") as written:
        assert written.names == whole.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in whole.items())
    with WeightsReader(models / case["model"]) as published:
        assert {spec.name for spec in ranks[0]["specs"]} == published.names
        for spec in ranks[0]["specs"]:
            started = ranks[spec.sender]["started"][spec.name]
            assert started.shape == spec.shape
            assert torch.equal(torch.from_numpy(started), published[spec.name]), spec.name
            for kind in ("weights", "moved"):
                tensor = ranks[spec.sender][kind][spec.name]
                assert abs(tensor - alone[kind][spec.name]).max() < 1e-5, spec.name
    assert len({spec.name for spec in ranks[0]["specs"]}) == len(ranks[0]["specs"])


@pytest.mark.parametrize("case", [ROUNDS[0][0], ROUNDS[1][0]], ids=name_of)
def test_one_process_reads_a_checkpoint_of_several(
    outcomes: list[Any], models: Path, saved: Path, case: dict[str, Any]
) -> None:
    number = next(n for n, cases in enumerate(ROUNDS) if case in cases)
    alone = {"micro_batch_tokens": 2, "moe": BALANCED, "parallel": ParallelConfig()}
    policy = open_policy(models, case, **alone)
    try:
        policy.load(saved / f"{number}-0")
        batch, logprobs = sequences(case["lengths"]), outcomes[0][number]["logprobs"]
        again = [replace(s, old_logprobs=o) for s, o in zip(batch, logprobs, strict=True)]
        got = policy.train_step(again, LOSS)
    finally:
        policy.close()
    want = outcomes[0][number]["balanced"][1]
    assert got.loss == pytest.approx(want.loss, rel=1e-6, abs=2e-6)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
