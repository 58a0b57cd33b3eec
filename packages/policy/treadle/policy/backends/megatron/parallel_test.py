import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.testing.ranks import RankTask, run_ranks
from treadle.policy.backends.megatron.testing.tiny import (
    LENGTHS,
    forked_sequences,
    sequences,
    write_model,
)
from treadle.policy.client.shards import assign, decode, encode
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig, CovarianceConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.rank.train_batch import measure_reference, run_update
from treadle.policy.v1 import training_service_pb2 as pb

# With eps = 1, Adam's step is about lr * g / (|g| + 1): parameters compare as gradients do. With a
# usual eps, a rounding difference in a gradient near 0 would be blown up to a difference of 2 * lr.
CONFIG = PolicyConfig(
    optimizer=OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0), micro_batch_tokens=80
)
LOSS = policy_loss(AlgorithmConfig(entropy_coef=0.01))
OF_ROLLOUT = AlgorithmConfig.model_validate({"old_logprobs": "rollout", "reward_kl": {"coef": 0.1}})
SELECTING = AlgorithmConfig(loss="kl_cov", mini_batches=2, cov=CovarianceConfig(ratio=0.3))
OF_SAMPLES = policy_loss(AlgorithmConfig(loss="gspo"))


def case(
    model: str, lengths: tuple[int, ...] = LENGTHS, recompute: str = "none", **parallel: Any
) -> dict[str, Any]:
    sizes = ParallelConfig(**parallel)
    return {"model": model, "parallel": sizes, "lengths": lengths, "recompute": recompute}


# Rounds run one after another in one group of processes; the cases of a round run side by side, and
# have work for each of the processes.
ROUNDS = [
    [
        case("qwen2", tensor=2),
        case("qwen3-untied", tensor=2, sequence=True),
        case("qwen2", pipeline=2),
        case("llama-untied", data=2),
    ],
    [case("qwen2", tensor=2, pipeline=2), case("qwen3-untied", tensor=2, data=2, sequence=True)],
    [
        case("llama-untied", pipeline=2, data=2),
        case("llama-untied", tensor=2),
        case("qwen2", lengths=(20,), data=2),  # one of the ranks has nothing to compute
    ],
    [case("qwen2", tensor=2, pipeline=2, data=2, sequence=True)],
    [
        case("qwen2", context=2),
        case("qwen2", lengths=(200, 31), context=2),  # most of it is one sequence
        case("qwen3-untied", recompute="full", tensor=2, context=2, sequence=True),
    ],
    [
        case("llama-untied", recompute="selective", pipeline=2, context=2),
        case("llama-untied", context=2, data=2),
    ],
]


def name_of(case: dict[str, Any]) -> str:
    p = case["parallel"]
    sizes = f"tp{p.tensor}-pp{p.pipeline}-cp{p.context}-dp{p.data}{'-sp' if p.sequence else ''}"
    return f"{case['model']}-{sizes}-n{len(case['lengths'])}"


def train(case: dict[str, Any], models: Path, rendezvous: Any = None) -> dict[str, Any]:
    """The policy's view of the batch, then five steps: one on-policy, four against that view.

    In the fourth, every second sequence is a sample of one trajectory, which spreads over the
    ranks; the fifth has a loss of whole samples. A sixth step takes sequences that begin alike:
    flat in one process, with shared prefixes in several.
    """
    from treadle.policy.backends.megatron.backend import MegatronPolicy

    config = CONFIG.model_copy(update={key: case[key] for key in ("parallel", "recompute")})
    policy = MegatronPolicy(
        config,
        models / case["model"],
        rendezvous,
        keep_reference=True,
        reference_path=models / "llama-untied",
    )

    def dealt(whole: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Returns the batch as the driver gives it to this rank."""
        if rendezvous is None:
            return whole
        world = policy.world
        shards = list(encode(whole, assign(whole, world.data), world.data))
        shard = shards[world.data_rank]
        given = [shard.head.SerializeToString(), b"".join(shard.buffers)]
        head, memory = (world.share(part if world.leads else None) for part in given)
        return decode(pb.Shard.FromString(bytes(head)), memory)

    whole = sequences(case["lengths"])
    batch = dealt(whole)
    logprobs = policy.logprobs(batch)
    again = [replace(s, old_logprobs=o) for s, o in zip(batch, logprobs, strict=True)]
    forked = dealt(forked_sequences() if len(batch) > 1 else whole)
    policy.share_prefixes = "never" if rendezvous is None else "always"
    # These each rank has, and plans by itself.
    samples = [
        replace(s, old_logprobs=o, trajectory=None if i % 2 else 0)
        for i, (s, o) in enumerate(zip(whole, logprobs, strict=True))
    ]
    result: dict[str, Any] = {
        "logprobs": logprobs,
        "reference": policy.reference_logprobs(batch),
        "specs": policy.weight_specs(),
        "steps": [
            *(policy.train_step(b, LOSS) for b in (batch, again, again)),
            policy.train_step(samples, LOSS, aggregation="seq-mean-token-mean"),
            policy.train_step(again, OF_SAMPLES, aggregation="token-sum"),
            policy.train_step(forked, LOSS),
        ],
        "weights": {t.name: t.tensor.clone().numpy() for t in policy.export_weights()},
    }
    if case["model"] == "llama-untied":
        spread = dealt([replace(s, advantages=FloatArray(_ramp(s))) for s in whole])
        result["measured"] = measure_reference(policy, spread, OF_ROLLOUT, temperature=1.0)
        result["update"] = run_update(policy, spread, SELECTING, temperature=1.0)
    policy.close()
    return result


def _ramp(sequence: TrainSequence) -> tuple[float, ...]:
    """Returns advantages that differ by token."""
    assert isinstance(sequence.advantages, float)
    return tuple(sequence.advantages + t / 50 for t in range(len(sequence.ids)))


def run(task: RankTask) -> list[dict[str, Any]]:
    from treadle.policy.backends.megatron.parallel import Rendezvous

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
                results.append(train(c, task.argument, place))
            first += size
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "qwen2", "qwen2", tied=True)
    write_model(folder / "qwen3-untied", "qwen3", tied=False)
    write_model(folder / "llama-untied", "llama", tied=False)
    return folder


@pytest.fixture(scope="module")
def outcomes(models: Path) -> list[Any]:
    return run_ranks(f"{__name__}:run", 8, models)


@pytest.fixture(scope="module")
def single(models: Path) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    wanted = {(c["model"], c["lengths"]) for cases in ROUNDS for c in cases}
    return {(model, lengths): train(case(model, lengths), models) for model, lengths in wanted}


PLACES = [
    (round_, sum(c["parallel"].num_ranks for c in cases[:i]), c)
    for round_, cases in enumerate(ROUNDS)
    for i, c in enumerate(cases)
]


@pytest.mark.parametrize(
    ("round_", "first", "case"), PLACES, ids=[f"{r}-{name_of(c)}" for r, _, c in PLACES]
)
def test_parallel_sizes_do_not_change_the_result(
    outcomes: list[Any], single: dict[Any, Any], round_: int, first: int, case: dict[str, Any]
) -> None:
    ranks = [outcomes[first + r][round_] for r in range(case["parallel"].num_ranks)]
    alone = single[case["model"], case["lengths"]]
    for rank in ranks:
        assert rank["specs"] == ranks[0]["specs"]
        for got, want in zip(rank["logprobs"], alone["logprobs"], strict=True):
            assert got == pytest.approx(want, abs=2e-5)
        for got, want in zip(rank["reference"], alone["reference"], strict=True):
            assert got == pytest.approx(want, abs=2e-5)
        for got, want in zip(rank["steps"], alone["steps"], strict=True):
            assert not got.skipped
            # The fifth loss is a sum over tokens: its float32 has fewer digits after the point.
            assert got.loss == pytest.approx(want.loss, rel=1e-6, abs=2e-6)
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
            assert got.metrics == pytest.approx(want.metrics, abs=2e-5)
            assert (got.num_tokens, got.num_loss_tokens) == (want.num_tokens, want.num_loss_tokens)
        if "update" in alone:
            of_rank, want = rank["update"], alone["update"]
            assert dict(of_rank.mismatch) == pytest.approx(dict(want.mismatch), abs=2e-5)
            got, tokens = (np.frombuffer(r.tokens.logprobs, "<f4") for r in (of_rank, want))
            assert got == pytest.approx(tokens, abs=2e-5)
            # Later steps may differ: rounding makes covariances that are close change places.
            first, wanted = (dict(r.steps[0].metrics) for r in (of_rank, want))
            assert first == pytest.approx(wanted, abs=2e-5)
            got, kl = (np.frombuffer(r["measured"].kl, "<f4") for r in (rank, alone))
            assert got == pytest.approx(kl, abs=2e-5)
    for spec in ranks[0]["specs"]:
        tensor = ranks[spec.sender]["weights"][spec.name]
        assert tensor.shape == spec.shape
        assert abs(tensor - alone["weights"][spec.name]).max() < 2e-6, spec.name
    assert {spec.name for spec in ranks[0]["specs"]} == alone["weights"].keys()


def test_a_rank_group_reports_the_failing_rank() -> None:
    with pytest.raises(AssertionError, match="rank 0 ended with 1"):
        run_ranks(f"{__name__}:fail", 1, None)


def fail(task: RankTask) -> None:
    raise ValueError(f"no such thing as {pickle.__name__} in {task}")
