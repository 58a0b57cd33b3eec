"""Every command runs with and without `policy.offload`; all answers must be equal, bit for bit."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message

from treadle.agent_loop import FloatArray
from treadle.policy.backends.megatron.offload import Offload
from treadle.policy.backends.megatron.trained import TrainedModel
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import LOSS_NAMES, AlgorithmConfig, RewardKlConfig
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
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import sequences, write_model
from treadle.policy.v1 import checkpoint_service_pb2 as checkpoint_pb
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.weights_service_pb2 import WriteFilesRequest

Asked = tuple[Message, Sequence[TrainSequence]]
EVERYTHING = OffloadConfig(parameters=True, optimizer=True, reference=True)
TWICE = AlgorithmConfig(mini_batches=2)
KEPT = AlgorithmConfig(kl_coef=0.1, reward_kl=RewardKlConfig(coef=0.1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen2"
    write_model(path)
    return path


def config(offload: OffloadConfig | None = None, **settings: Any) -> PolicyConfig:
    given: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2), "micro_batch_tokens": 100}
    return PolicyConfig(**(given | settings), offload=offload or OffloadConfig())


def update(step: int, algorithm: AlgorithmConfig = TWICE) -> Asked:
    request = pb.UpdateRequest(algorithm=to_json(algorithm), temperature=1.0)
    return request, sequences(seed=step)


def init(folder: Path, settings: PolicyConfig, **given: Any) -> Asked:
    request = rank_pb.InitializeRequest(
        policy=to_json(settings), model_path=str(folder), world_size=1, **given
    )
    return request, ()


def untimed(response: Message) -> Message:
    for step in getattr(response, "steps", ()):
        step.time_s = 0.0
    if isinstance(response, pb.UpdateResponse):
        response.logprobs_s = 0.0
    return response


def on_the_device(rank: PolicyRank) -> int:
    """Returns the bytes that the models of a rank have there."""
    total = 0
    for model in rank._models():
        assert isinstance(model, TrainedModel)
        tensors = [*model._net.parameters(), *model._optimizer.tensors()]
        buffers = [*model._net.buffers, *model._net.expert_parallel_buffers]
        tensors += [t for b in buffers for t in (b.grad_data, b.param_data) if t is not None]
        total += sum(t.untyped_storage().nbytes() for t in tensors)
    other = getattr(rank._policy, "_reference", None)
    if isinstance(other, torch.nn.Module):
        total += sum(t.untyped_storage().nbytes() for t in other.parameters())
    return total


def answers(asked: Sequence[Asked], *, away: bool) -> list[Message]:
    """Executes requests in this process, as a rank; `away`: everything leaves the device."""
    rank = PolicyRank("127.0.0.1")
    result = []
    try:
        for request, batch in asked:
            result.append(untimed(rank.execute(request, batch)))
            assert (on_the_device(rank) == 0) is away, type(request)
        report: Any = rank.execute(rank_pb.ReportOffloadRequest())
        assert (report.host_bytes > 0) is away
    finally:
        rank.execute(rank_pb.StopRequest())
    return result


@pytest.mark.parametrize(("dtype", "losses"), [("float32", ["ppo"]), ("bfloat16", LOSS_NAMES)])
def test_every_loss_trains_as_without_offload(
    folder: Path, tmp_path: Path, dtype: Any, losses: Sequence[str]
) -> None:
    """The reference is the model of the start, in host memory."""

    def life(place: Path, offload: OffloadConfig | None) -> list[Message]:
        steps = [
            update(number, AlgorithmConfig(loss=loss, mini_batches=2, kl_coef=0.1))
            for number, loss in enumerate(losses)
        ]
        start = init(folder, config(offload, dtype=dtype), with_reference=True)
        save = checkpoint_pb.SaveHfRequest(directory=str(place))
        return answers([start, *steps, (save, ())], away=offload is not None)

    want, got = life(tmp_path / "without", None), life(tmp_path / "with", EVERYTHING)
    assert got == want
    assert all(isinstance(each, pb.UpdateResponse) and not each.broken for each in got[1:-1])
    assert_same(tmp_path, "model.safetensors")


def assert_same(folder: Path, name: str) -> None:
    one, two = (folder / place / name for place in ("without", "with"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("lora", [0, 4])
def test_critic_reference_and_resume_are_as_without_offload(
    folder: Path, tmp_path: Path, lora: int
) -> None:
    write_model(tmp_path / "other", "llama", tied=False, hidden_size=32)
    targets = [
        replace(s, values=FloatArray((0.1,) * len(s.ids)), returns=FloatArray((0.5,) * len(s.ids)))
        for s in sequences(seed=5)
    ]

    def life(place: Path, offload: OffloadConfig | None) -> list[Message]:
        start = init(
            folder,
            config(offload, dtype="bfloat16", lora=LoraConfig(rank=lora)),
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
        went_on = answers(first, away=away)
        assert answers(resumed, away=away)[-len(more) :] == went_on[-len(more) :]
        return went_on

    want, got = life(tmp_path / "without", None), life(tmp_path / "with", EVERYTHING)
    assert got == want
    assert_same(tmp_path, "hf/model.safetensors")
    if lora:
        assert_same(tmp_path, "hf/adapter/adapter_model.safetensors")


LAYOUTS: list[dict[str, Any]] = [{"tensor": 2}, {"data": 2}]


def on_two_ranks(task: RankTask) -> list[list[Any]]:
    from treadle.policy.backend import Rendezvous
    from treadle.policy.backends.megatron.backend import MegatronPolicy
    from treadle.policy.rank.train_batch import run_critic_update, run_update

    folder, places = task.argument

    def life(layout: dict[str, Any], offload: OffloadConfig | None, load: bool) -> list[Any]:
        name = f"{layout}-{offload is None}"
        settings = config(offload, dtype="bfloat16", parallel=ParallelConfig(**layout))
        meeting = Rendezvous(
            rank=task.rank, world_size=2, shared_file=task.folder / f"{name}-{load}"
        )
        policy = MegatronPolicy(settings, folder, meeting, keep_reference=True)
        critic = policy.make_critic(CriticConfig())
        result: list[Any] = []

        def rest() -> None:
            for model in (policy, critic):
                model.release_memory()
                size = sum(p.untyped_storage().nbytes() for p in model._net.parameters())
                assert (size == 0) is (offload is not None)

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
            result.append(untimed(run_update(policy, batch, replace_kl(TWICE), temperature=1.0)))
            rest()
            if step == 0:
                policy.save(places / name)
                rest()
        exported = {t.name: t.tensor.float().sum().item() for t in policy.export_weights()}
        rest()
        policy.close()
        return [*result[-1:], exported] if load else [*result, exported]

    return [
        life(layout, offload, load)
        for layout in LAYOUTS
        for load in (False, True)
        for offload in (None, EVERYTHING)
    ]


def replace_kl(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    return algorithm.model_copy(update={"kl_coef": 0.1})


def test_layouts_train_and_resume_as_without_offload(folder: Path, tmp_path: Path) -> None:
    for results in run_ranks(f"{__name__}:on_two_ranks", 2, (folder, tmp_path)):
        for layout in LAYOUTS:
            want, got, resumed, resumed_away = results[:4]
            del results[:4]
            assert got == want, layout
            assert resumed_away == resumed == want[-2:], layout


def test_one_part_alone_leaves_the_device(folder: Path) -> None:
    sizes = {}
    for name in ("parameters", "optimizer"):
        rank = PolicyRank("127.0.0.1")
        settings = config(OffloadConfig.model_validate({name: True}), dtype="bfloat16")
        rank.execute(*init(folder, settings))
        rank.execute(*update(1))
        report: Any = rank.execute(rank_pb.ReportOffloadRequest())
        sizes[name] = report.host_bytes
        assert report.freed_bytes == (3 if name == "parameters" else 1) * report.host_bytes
        assert report.release_s > 0 and report.restore_s > 0
        assert on_the_device(rank) > 0
        rank.execute(rank_pb.StopRequest())
    assert sizes["optimizer"] == 6 * sizes["parameters"]  # 12 bytes a weight, and 2


def test_views_stay_valid_and_bits_come_back() -> None:
    bits = torch.tensor(random.Random(3).choices(range(-(2**31), 2**31), k=1000)).int()
    flat = bits.view(torch.float32).clone()  # some are NaN
    view = flat[100:900].view(40, 20).t()
    gradients = torch.ones(500)
    offload = Offload(
        {"parameters": lambda: [view, flat], "gradients": lambda: [gradients], "reference": tuple}
    )
    offload.release_all()
    offload.release_all()
    assert flat.untyped_storage().size() == gradients.untyped_storage().size() == 0
    assert (offload.take_report().freed_bytes, offload.take_report().host_bytes) == (6000, 4000)
    offload.restore("parameters", "optimizer")
    assert torch.equal(flat.view(torch.int32), bits)
    assert torch.equal(view, flat[100:900].view(40, 20).t()) or bool(view.isnan().any())
    assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert gradients.untyped_storage().size() == 0
    offload.restore("gradients")
    assert gradients.fill_(2.0).sum() == 1000


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Any]:
    from treadle.policy.backends.megatron.backend import MegatronPolicy

    write_model(tmp_path, hidden_size=256, vocab_size=100_000, num_hidden_layers=1)
    policy = MegatronPolicy(config(OffloadConfig(parameters=True)), tmp_path)
    yield policy
    policy.close()


def test_memory_really_leaves_the_process(large: Any) -> None:
    """Where the device is the host, gradients leave it and weights change their place."""
    short: list[TrainSequence] = sequences((12,))
    from treadle.policy.algorithms.losses import ClippedSurrogate

    large.train_step(short, ClippedSurrogate())
    num_bytes = sum(p.nbytes for p in large._model.parameters())
    assert num_bytes > 100e6
    before = resident()
    large.release_memory()
    away = resident()
    assert large.take_offload_report().freed_bytes == 2 * num_bytes
    assert before - away == pytest.approx(num_bytes, rel=0.05)
    large.logprobs(short)
    assert resident() - away < 0.05 * num_bytes
