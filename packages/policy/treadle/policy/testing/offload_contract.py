"""The part of the policy contract about `policy.offload`: it changes no bit of any answer.

Every command of a rank runs with and without it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from google.protobuf.message import Message
from torch.distributed.tensor import DTensor

from treadle.agent_loop import FloatArray
from treadle.policy.backend import Rendezvous
from treadle.policy.backends import registry
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import LOSS_NAMES, AlgorithmConfig, RewardKlConfig
from treadle.policy.config.choices import BackendName
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import (
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from treadle.policy.config.settings import to_json
from treadle.policy.rank.rank import PolicyRank
from treadle.policy.rank.train_batch import run_critic_update, run_update
from treadle.policy.testing.contract_base import ContractBase
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import sequences
from treadle.policy.v1 import checkpoint_service_pb2 as checkpoint_pb
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.weights_service_pb2 import WriteFilesRequest

Asked = tuple[Message, Sequence[TrainSequence]]
EVERYTHING = OffloadConfig(parameters=True, optimizer=True, reference=True)
TWICE = AlgorithmConfig(mini_batches=2)
WITH_REFERENCE = AlgorithmConfig(mini_batches=2, kl_coef=0.1)
KEPT = AlgorithmConfig(kl_coef=0.1, reward_kl=RewardKlConfig(coef=0.1))


def config(
    backend: BackendName, offload: OffloadConfig | None = None, **settings: Any
) -> PolicyConfig:
    """Returns the settings of a rank."""
    given: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2), "micro_batch_tokens": 100}
    return PolicyConfig(backend=backend, **(given | settings), offload=offload or OffloadConfig())


def update(step: int, algorithm: AlgorithmConfig = TWICE) -> Asked:
    """Returns the request of a step."""
    request = pb.UpdateRequest(algorithm=to_json(algorithm), temperature=1.0)
    return request, sequences(seed=step)


def init(folder: Path, settings: PolicyConfig, **given: Any) -> Asked:
    """Returns the request that builds the policy."""
    request = rank_pb.InitializeRequest(
        policy=to_json(settings), model_path=str(folder), world_size=1, **given
    )
    return request, ()


def untimed(response: Message) -> Message:
    """Returns a response without what the clock shows."""
    for step in getattr(response, "steps", ()):
        step.time_s = 0.0
        for name in [name for name in step.metrics if name.startswith("policy/")]:
            del step.metrics[name]
    if isinstance(response, pb.UpdateResponse):
        response.logprobs_s = 0.0
    return response


def local(tensor: Any) -> torch.Tensor:
    """Returns a rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def num_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of all storages; some may be counted twice."""
    return sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)


def on_two_ranks(task: RankTask) -> list[list[Any]]:
    """Trains a policy and its critic in each layout, with and without, from the start and on."""
    backend, layouts, folder, places = task.argument

    def life(layout: Mapping[str, Any], offload: OffloadConfig | None, load: bool) -> list[Any]:
        name = f"{layout}-{offload is None}"
        settings = config(backend, offload, dtype="bfloat16", parallel=ParallelConfig(**layout))
        meeting = Rendezvous(
            rank=task.rank, world_size=2, shared_file=task.folder / f"{name}-{load}"
        )
        policy: Any = registry.build(
            settings, folder, meeting, keep_reference=True, reference_path=None
        )
        critic: Any = policy.make_critic(CriticConfig())
        result: list[Any] = []

        def rest() -> None:
            for model in (policy, critic):
                model.release_memory()
                assert (num_bytes(model._net.parameters()) == 0) is (offload is not None)

        start = policy.reference_logprobs(sequences())
        rest()
        if load:
            policy.load(places / name)
            rest()
        for step in range(policy.step, 4, 2):
            batch = sequences(seed=step)
            values = critic.values(batch)
            rest()
            taught = [replace(s, values=v, returns=v) for s, v in zip(batch, values, strict=True)]
            if not load:  # the checkpoint has no critic
                result.append(untimed(run_critic_update(critic, taught, TWICE, epochs=1)))
                rest()
            result.append(untimed(run_update(policy, batch, WITH_REFERENCE, temperature=1.0)))
            rest()
            if step == 0:
                policy.save(places / name)
                rest()
        assert policy.logprobs(sequences()) != start
        assert policy.reference_logprobs(sequences()) == start
        exported = {t.name: t.tensor.float().sum().item() for t in policy.export_weights()}
        rest()
        policy.close()
        return [*result[-1:], exported] if load else [*result, exported]

    return [
        life(layout, offload, load)
        for layout in layouts
        for load in (False, True)
        for offload in (None, EVERYTHING)
    ]


def assert_same(folder: Path, name: str) -> None:
    """Checks that a file of both runs is the same."""
    one, two = (folder / place / name for place in ("without", "with"))
    assert one.read_bytes() == two.read_bytes()


class OffloadContract(ContractBase):
    """See the module.

    Attributes:
        offload_layouts: Sizes of `policy.parallel` of two ranks.
    """

    offload_layouts: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @classmethod
    def held(cls, model: Any) -> Iterable[Any]:
        """Yields what is on the device of a policy or critic, unless it is away."""
        for parameter in model._net.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from model._optimizer.tensors()

    def on_the_device(self, rank: PolicyRank) -> int:
        """Returns the bytes that the models of a rank have there."""
        total = sum(num_bytes(self.held(model)) for model in rank._models())
        other = getattr(rank._policy, "_reference", None)
        return total + (num_bytes(other.parameters()) if isinstance(other, torch.nn.Module) else 0)

    def answers(self, asked: Sequence[Asked], *, away: bool) -> list[Message]:
        """Executes requests in this process, as a rank; `away`: everything leaves the device."""
        rank = PolicyRank("127.0.0.1")
        result = []
        try:
            for request, batch in asked:
                result.append(untimed(rank.execute(request, batch)))
                assert (self.on_the_device(rank) == 0) is away, type(request)
            report: Any = rank.execute(rank_pb.ReportOffloadRequest())
            assert (report.host_bytes > 0) is away
        finally:
            rank.execute(rank_pb.StopRequest())
        return result

    @pytest.mark.parametrize(("half", "losses"), [(False, ["ppo"]), (True, LOSS_NAMES)])
    def test_every_loss_trains_as_without_offload(
        self, folder: Path, tmp_path: Path, half: bool, losses: Sequence[str]
    ) -> None:
        """The reference is the model of the start, in host memory."""
        self.needs("offload")

        def life(place: Path, offload: OffloadConfig | None) -> list[Message]:
            steps = [
                update(number, AlgorithmConfig(loss=loss, mini_batches=2, kl_coef=0.1))
                for number, loss in enumerate(losses)
            ]
            settings = config(self.backend, offload, dtype="bfloat16" if half else "float32")
            save = checkpoint_pb.SaveHfRequest(directory=str(place))
            asked = [init(folder, settings, with_reference=True), *steps, (save, ())]
            return self.answers(asked, away=offload is not None)

        want, got = life(tmp_path / "without", None), life(tmp_path / "with", EVERYTHING)
        assert got == want
        assert all(isinstance(each, pb.UpdateResponse) and not each.broken for each in got[1:-1])
        assert_same(tmp_path, "model.safetensors")

    @pytest.mark.parametrize("lora", [0, 4])
    def test_critic_reference_and_resume_are_as_without_offload(
        self, folder: Path, tmp_path: Path, lora: int
    ) -> None:
        self.needs("offload")
        self.write(tmp_path / "other", "llama", tied=False, hidden_size=32)
        targets = [
            replace(
                s, values=FloatArray((0.1,) * len(s.ids)), returns=FloatArray((0.5,) * len(s.ids))
            )
            for s in sequences(seed=5)
        ]

        def life(place: Path, offload: OffloadConfig | None) -> list[Message]:
            start = init(
                folder,
                config(self.backend, offload, dtype="bfloat16", lora=LoraConfig(rank=lora)),
                with_reference=True,
                reference_path=str(tmp_path / "other"),
                critic=to_json(CriticConfig()),
            )
            batch = sequences(seed=1)
            teach: Asked = pb.UpdateCriticRequest(algorithm=to_json(TWICE), epochs=1), targets
            a, b, hf = (str(place / name) for name in ("a", "b", "hf"))
            # The checksums tell what was written.
            write = WriteFilesRequest(directory=str(place), element_type="float32", version=1)
            more: list[Asked] = [
                (pb.MeasureReferenceRequest(algorithm=to_json(KEPT), temperature=1.0), batch),
                update(3, KEPT),
                teach,
                (pb.ValuesRequest(), batch),
                (write, ()),
            ]
            first = [start, teach, update(2, KEPT)]
            first += [(checkpoint_pb.SaveRequest(directory=a), ())]
            first += [(checkpoint_pb.SaveCriticRequest(directory=b), ())]
            first += [(checkpoint_pb.SaveHfRequest(directory=hf), ()), *more]
            place.mkdir()
            resumed = [start, (checkpoint_pb.LoadRequest(directory=a), ())]
            resumed += [(checkpoint_pb.LoadCriticRequest(directory=b), ()), *more]
            away = offload is not None
            went_on = self.answers(first, away=away)
            assert self.answers(resumed, away=away)[-len(more) :] == went_on[-len(more) :]
            return went_on

        want, got = life(tmp_path / "without", None), life(tmp_path / "with", EVERYTHING)
        assert got == want
        assert_same(tmp_path, "hf/model.safetensors")
        if lora:
            assert_same(tmp_path, "hf/adapter/adapter_model.safetensors")

    def test_layouts_train_and_resume_as_without_offload(
        self, folder: Path, tmp_path: Path
    ) -> None:
        layouts = self.offload_layouts
        if not layouts:
            pytest.skip(f"policy.backend={self.backend} has no offload over several ranks")
        argument = (self.backend, layouts, folder, tmp_path)
        for results in run_ranks(f"{__name__}:on_two_ranks", 2, argument):
            for layout in layouts:
                want, got, resumed, resumed_away = results[:4]
                del results[:4]
                assert got == want, layout
                assert resumed_away == resumed == want[-2:], layout

    def test_one_part_alone_leaves_the_device(self, folder: Path) -> None:
        self.needs("offload")
        described, sizes = registry.describe(self.backend), {}
        for name in ("parameters", "optimizer"):
            rank = PolicyRank("127.0.0.1")
            offload = OffloadConfig.model_validate({name: True})
            settings = config(self.backend, offload, dtype="bfloat16")
            rank.execute(*init(folder, settings))
            rank.execute(*update(1))
            report: Any = rank.execute(rank_pb.ReportOffloadRequest())
            sizes[name] = report.host_bytes
            assert report.freed_bytes >= report.host_bytes
            assert report.release_s > 0 and report.restore_s > 0
            assert self.on_the_device(rank) > 0
            rank.execute(rank_pb.StopRequest())
        estimate = described.memory(described.read_model(folder), settings, rows=1)
        weights, optimizer = estimate.weights, estimate.optimizer
        assert sizes["optimizer"] * weights == sizes["parameters"] * optimizer
