"""The part of the policy contract about layouts: any sizes of `policy.parallel` equal one process.

Ranks are real processes. They are started once, and run the cases in rounds.
"""

import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import CheckpointError, PolicyBackend, Rendezvous, step_stats
from treadle.policy.backends import registry
from treadle.policy.backends.description import refusals
from treadle.policy.client.shards import assign, decode, encode
from treadle.policy.client.types import StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig, CovarianceConfig
from treadle.policy.config.choices import BackendName
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import ParallelConfig, PolicyConfig
from treadle.policy.rank.train_batch import measure_reference, run_update
from treadle.policy.testing.contract_base import LINEAR, ContractBase, OpenPolicy, exported
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.state_contract import SETTINGS, go_on
from treadle.policy.testing.tiny import LENGTHS, forked_sequences, sequences, with_masks
from treadle.policy.v1 import training_service_pb2 as pb

LOSS = policy_loss(AlgorithmConfig(entropy_coef=0.01))
OF_ROLLOUT = AlgorithmConfig.model_validate({"old_logprobs": "rollout", "reward_kl": {"coef": 0.1}})
SELECTING = AlgorithmConfig(loss="kl_cov", mini_batches=2, cov=CovarianceConfig(ratio=0.3))
OF_SAMPLES = policy_loss(AlgorithmConfig(loss="gspo"))
REFERENCE = "llama-untied"
MODELS: Mapping[str, tuple[str, bool]] = {
    "qwen2": ("qwen2", True),
    "qwen3-untied": ("qwen3", False),
    REFERENCE: ("llama", False),
}


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    model: str
    parallel: ParallelConfig
    lengths: tuple[int, ...] = LENGTHS
    recompute: str = "none"

    @property
    def name(self) -> str:
        """For the test's id."""
        p = self.parallel
        sizes = f"tp{p.tensor}-pp{p.pipeline}-cp{p.context}-dp{p.data}{'-sp' if p.sequence else ''}"
        replicas = f"-r{p.replicas}" if p.replicas > 1 else ""
        return f"{self.model}-{sizes}{replicas}-n{len(self.lengths)}"


def case(
    model: str, lengths: tuple[int, ...] = LENGTHS, recompute: str = "none", **sizes: Any
) -> Case:
    """Returns a case; `sizes` are those of `ParallelConfig`."""
    return Case(model, ParallelConfig(**sizes), lengths, recompute)


Rounds = Sequence[Sequence[Case]]
"""Rounds run one after another in one group of processes; the cases of a round run side by side,
and have work for each of the processes."""


def train(
    backend: BackendName, case: Case, models: Path, place: Rendezvous | None = None
) -> dict[str, Any]:
    """The policy's view of the batch, then five steps: one on-policy, four against that view.

    In the fourth, every second sequence is a sample of one trajectory, which spreads over the
    ranks; the fifth has a loss of whole samples. A sixth step takes sequences that begin alike:
    flat in one process, with shared prefixes in several.
    """
    can_share = registry.describe(backend).capabilities.shared_prefixes
    policy = registry.build(
        PolicyConfig.model_validate(
            {
                "backend": backend,
                "optimizer": LINEAR.model_copy(update={"weight_decay": 0.01}),
                "micro_batch_tokens": 80,
                "parallel": case.parallel,
                "recompute": case.recompute,
                "share_prefixes": "always" if place is not None and can_share else "never",
            }
        ),
        models / case.model,
        place or Rendezvous(),
        keep_reference=True,
        reference_path=models / REFERENCE,
    )

    def dealt(whole: Sequence[TrainSequence]) -> Sequence[TrainSequence]:
        """Returns the batch as the driver gives it to this rank."""
        if place is None:
            return whole
        parallel = case.parallel
        shards = list(encode(whole, assign(whole, parallel.data), parallel.data))
        shard = shards[parallel.data_rank(place.rank)]
        given = [shard.head.SerializeToString(), b"".join(shard.buffers)]
        head, memory = (policy.share(part if policy.leads else None) for part in given)
        return decode(pb.Shard.FromString(bytes(head)), memory)

    whole = with_masks(sequences(case.lengths))
    batch = dealt(whole)
    logprobs = policy.logprobs(batch)
    again = [replace(s, old_logprobs=o) for s, o in zip(batch, logprobs, strict=True)]
    forked = dealt(with_masks(forked_sequences()) if len(batch) > 1 else whole)
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
            *(policy.train_step(b, LOSS) for b in (batch, again)),
            _in_parts(policy, again),
            policy.train_step(samples, LOSS, aggregation="seq-mean-token-mean"),
            policy.train_step(again, OF_SAMPLES, aggregation="token-sum"),
            policy.train_step(forked, LOSS),
        ],
        "weights": exported(policy),
    }
    if case.model == REFERENCE:
        spread = dealt([replace(s, advantages=FloatArray(_ramp(s))) for s in whole])
        result["measured"] = measure_reference(policy, spread, OF_ROLLOUT, temperature=1.0)
        result["update"] = run_update(policy, spread, SELECTING, temperature=1.0)
    policy.close()
    return result


def _in_parts(policy: PolicyBackend, batch: Sequence[TrainSequence]) -> StepStats:
    """Takes a step on a gradient that is added up."""
    parts = (batch[::2], batch[1::2]) if len(batch) > 1 else (batch, batch)
    *_, last = [policy.add_gradient(part, LOSS)() for part in parts]
    return step_stats(last, policy.optimizer_step(), time_s=0.0)


def _ramp(sequence: TrainSequence) -> tuple[float, ...]:
    """Returns advantages that differ by token."""
    assert isinstance(sequence.advantages, float)
    return tuple(sequence.advantages + t / 50 for t in range(len(sequence.ids)))


def run_rounds(task: RankTask) -> list[dict[str, Any]]:
    """Runs the cases of this rank."""
    backend, rounds, models = task.argument
    results = []
    for number, cases in enumerate(rounds):
        first = 0
        for each in cases:
            size = each.parallel.num_ranks
            if first <= task.rank < first + size:
                place = Rendezvous(
                    rank=task.rank - first,
                    world_size=size,
                    shared_file=task.folder / f"{number}-{first}",
                )
                results.append(train(backend, each, models, place))
            first += size
    return results


def reshard(task: RankTask) -> dict[str, Any]:
    """Writes at several sizes, then reads all checkpoints at the sizes of the readers."""
    results: dict[str, Any] = {}
    backend, model, places, writers, readers = task.argument

    def world(name: str, sizes: Mapping[str, Any], first: int) -> PolicyBackend | None:
        config = PolicyConfig(backend=backend, parallel=ParallelConfig(**sizes), **SETTINGS)
        size = config.parallel.num_ranks
        if not first <= task.rank < first + size:
            return None
        place = Rendezvous(
            rank=task.rank - first,
            world_size=size,
            shared_file=task.folder / name.replace(" ", ""),
        )
        return registry.build(config, model, place, keep_reference=False, reference_path=None)

    for name, (sizes, first) in writers.items():
        policy = world(name, sizes, first)
        if policy is not None:
            go_on(policy, 2)
            policy.save(places[name])
            results[name] = go_on(policy, 2)
            if name == "folder":
                policy.save_hf(places["hf"])
            policy.close()
    for number, (sizes, first) in enumerate(readers):
        policy = world(f"read{number}", sizes, first)
        if policy is not None:
            for name in ("one", *writers):
                policy.load(places[name])
                results[f"{name} read by {sizes}"] = go_on(policy, 2)
            policy.close()
    sizes, first = readers[-1]
    policy = world("full", sizes, first)
    if policy is not None:
        last = task.rank == first + ParallelConfig(**sizes).num_ranks - 1
        results["full disk"] = full_disk(policy, places["hf"].parent, last)
        policy.close()
    return results


def full_disk(policy: PolicyBackend, folder: Path, mine_is_full: bool) -> list[str]:
    """Saves, saves while one rank can write no large file, and saves again."""
    policy.save(folder / "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mine_is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        policy.save(folder / "refused")
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    policy.load(folder / "before")
    policy.save(folder / "after")
    return [message, *sorted(p.name for p in folder.iterdir())]


class LayoutContract(ContractBase):
    """See the module.

    Attributes:
        rounds: The layouts; none for a backend of one process.
        writers: Sizes that write a checkpoint, and their first rank; `folder` writes a model folder
            too.
        readers: Sizes that read all of them, and their first rank. Those of different ranks read
            side by side; the last one also writes to a full disk.
    """

    rounds: ClassVar[Rounds] = ()
    writers: ClassVar[Mapping[str, tuple[Mapping[str, Any], int]]] = {}
    readers: ClassVar[Sequence[tuple[Mapping[str, Any], int]]] = ()

    def places(self) -> Mapping[str, tuple[int, int, Case]]:
        """Returns the round and the first rank of each case."""
        found = {}
        for number, cases in enumerate(self.rounds):
            for i, each in enumerate(cases):
                first = sum(other.parallel.num_ranks for other in cases[:i])
                found[f"{number}-{each.name}"] = (number, first, each)
        return found

    def parameters(self) -> Mapping[str, Sequence[Any]]:
        """See `ContractBase.parameters`."""
        return {**super().parameters(), "place": tuple(self.places())}

    @pytest.fixture(scope="class")
    @classmethod
    def models_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the cases' models."""
        folder = tmp_path_factory.mktemp("models")
        for name, (model_type, tied) in MODELS.items():
            cls.write(folder / name, model_type, tied=tied)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def outcomes(cls, models_folder: Path) -> list[Any]:
        """What each rank has computed, by round."""
        largest = max(sum(c.parallel.num_ranks for c in cases) for cases in cls.rounds)
        argument = (cls.backend, cls.rounds, models_folder)
        return run_ranks(f"{__name__}:run_rounds", largest, argument)

    @pytest.fixture(scope="class")
    @classmethod
    def single(cls, models_folder: Path) -> Mapping[tuple[str, tuple[int, ...]], dict[str, Any]]:
        """What one process computes."""
        wanted = {(c.model, c.lengths) for cases in cls.rounds for c in cases}
        return {
            (model, lengths): train(cls.backend, case(model, lengths), models_folder)
            for model, lengths in wanted
        }

    def test_parallel_sizes_do_not_change_the_result(
        self, outcomes: list[Any], single: Mapping[Any, Any], place: str
    ) -> None:
        number, first, case = self.places()[place]
        ranks = [outcomes[first + r][number] for r in range(case.parallel.num_ranks)]
        alone = single[case.model, case.lengths]
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
                assert got.num_tokens == want.num_tokens
                assert got.num_loss_tokens == want.num_loss_tokens
            if "update" in alone:
                of_rank, want = rank["update"], alone["update"]
                assert dict(of_rank.mismatch) == pytest.approx(dict(want.mismatch), abs=2e-5)
                got, tokens = (np.frombuffer(r.tokens.logprobs, "<f4") for r in (of_rank, want))
                assert got == pytest.approx(tokens, abs=2e-5)
                # Later steps may differ: rounding makes covariances that are close change places.
                stepped, wanted = (
                    {k: v for k, v in r.steps[0].metrics.items() if not k.startswith("policy/")}
                    for r in (of_rank, want)
                )
                assert stepped == pytest.approx(wanted, abs=2e-5)
                got, kl = (np.frombuffer(r["measured"].kl, "<f4") for r in (rank, alone))
                assert got == pytest.approx(kl, abs=2e-5)
        for spec in ranks[0]["specs"]:
            tensor = ranks[spec.sender]["weights"][spec.name]
            assert tensor.shape == spec.shape
            assert abs(tensor - alone["weights"][spec.name]).max() < 2e-6, spec.name
        assert {spec.name for spec in ranks[0]["specs"]} == alone["weights"].keys()

    def test_checkpoints_reshard_and_survive_a_full_disk(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        if not self.writers:
            pytest.skip(f"policy.backend={self.backend} is one process")
        places = {name: tmp_path / name for name in ("one", *self.writers)}
        places["hf"] = tmp_path / "full" / "hf"
        places["hf"].parent.mkdir()
        alone = open_policy(folder, **SETTINGS)
        go_on(alone, 2)
        alone.save(places["one"])
        want = go_on(alone, 2)

        argument = (self.backend, folder, places, self.writers, self.readers)
        sizes = [*self.writers.values(), *self.readers]
        most = max(first + ParallelConfig(**parallel).num_ranks for parallel, first in sizes)
        ranks = run_ranks(f"{__name__}:reshard", most, argument)
        everything = {name: value for rank in ranks for name, value in rank.items()}
        message, *names = everything.pop("full disk")
        assert re.search(r"cannot write .*refused .*disk or a quota full.* MiB are free", message)
        assert names == ["after", "before", "hf"]
        written = 1 + len(self.writers)
        assert len(everything) == len(self.writers) + written * len(self.readers)
        for name in ("one", *self.writers):
            alone.load(places[name])
            everything[f"{name} read by one"] = go_on(alone, 2)
        for name, got in everything.items():
            for got_step, want_step in zip(got, want, strict=True):
                assert got_step == pytest.approx(want_step, rel=1e-4, abs=1e-6), name
        open_policy(places["hf"], **SETTINGS)  # written by several ranks

    def test_what_it_cannot_do_is_refused_by_name(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        can = registry.describe(self.backend)
        sizes = ("tensor", "pipeline", "context", "data")
        wrong: list[dict[str, Any]] = [
            *({"parallel": {name: 2}} for name in sizes),
            *({"dtype": "bfloat16"}, {"recompute": "full"}, {"share_prefixes": "always"}),
            *({"lora": {"rank": 4}}, {"offload": {"optimizer": True}}),
            {"optimizer": {"name": "muon"}},
        ]
        for settings in wrong:
            config = PolicyConfig.model_validate({"backend": self.backend, **settings})
            for problem in refusals(can, config):
                name = f"policy.{next(iter(settings))}"
                assert problem.startswith(f"policy.backend={self.backend} has no {name}")
                with pytest.raises(ValueError, match=re.escape(problem)):
                    open_policy(folder, **{name: getattr(config, name) for name in settings})
        if not can.capabilities.critic:
            refused = "".join(refusals(can, config, critic=CriticConfig()))
            assert "algorithm.advantage=gae" in refused
            with pytest.raises(RuntimeError, match=f"policy.backend={self.backend} has no critic"):
                open_policy(folder).make_critic(CriticConfig())
