import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import CheckpointError, Rendezvous
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.testing.ranks import RankTask, run_ranks
from treadle.policy.backends.megatron.testing.tiny import sequences, write_model
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig

# Adam's second moment and the schedule both matter to the steps after loading.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, schedule="linear", decay_steps=9)
LOSS = policy_loss(AlgorithmConfig())


def config(dtype: Any = "float32", **parallel: Any) -> PolicyConfig:
    return PolicyConfig(
        parallel=ParallelConfig(**parallel),
        optimizer=OPTIMIZER,
        micro_batch_tokens=100,
        dtype=dtype,
    )


def batch(step: int) -> Any:
    return sequences(seed=step)


def go_on(policy: MegatronPolicy, steps: int) -> list[tuple[float, ...]]:
    stats = [policy.train_step(batch(policy.step), LOSS) for _ in range(steps)]
    return [(s.step, s.learning_rate, s.loss, s.grad_norm) for s in stats]


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen2"
    write_model(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_gives_the_same_numbers_bit_for_bit(
    model: Path, tmp_path: Path, opened: list[MegatronPolicy], dtype: Any
) -> None:
    first = MegatronPolicy(config(dtype), model)
    go_on(first, 2)
    first.save(tmp_path / "step_2")
    uninterrupted = go_on(first, 2)
    first.close()
    second = MegatronPolicy(config(dtype), model)
    opened.append(second)
    second.load(tmp_path / "step_2")
    assert go_on(second, 2) == uninterrupted
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]


def test_a_checkpoint_may_be_written_before_the_first_step(
    model: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(config(), model)
    opened.append(policy)
    policy.save(tmp_path / "start")
    want = go_on(policy, 2)
    policy.load(tmp_path / "start")
    assert policy.step == 0
    assert go_on(policy, 2) == want


def test_errors_name_the_checkpoint(
    model: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(config(), model)
    policy.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="a exists"):
        policy.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="b holds no complete checkpoint"):
        policy.load(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"cannot write .*saved exists"):
        (tmp_path / "saved").mkdir()
        policy.save_hf(tmp_path / "saved")
    whole = (tmp_path / "a" / "common.pt").read_bytes()
    (tmp_path / "a" / "common.pt").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"common\.pt is damaged"):
        policy.load(tmp_path / "a")
    (tmp_path / "a" / "common.pt").write_bytes(whole)
    shutil.copytree(tmp_path / "a", tmp_path / "cut")
    (tmp_path / "cut" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cut is damaged: "):
        policy.load(tmp_path / "cut")
    policy.close()
    write_model(tmp_path / "other", num_hidden_layers=2)
    other = MegatronPolicy(config(), tmp_path / "other")
    opened.append(other)
    with pytest.raises(CheckpointError, match="another model: num_layers is 4, not 2"):
        other.load(tmp_path / "a")


WRITERS: dict[str, dict[str, int]] = {
    "one": {},
    "tensor x data": {"tensor": 2, "data": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
}
READERS: list[dict[str, int]] = [{"context": 2, "data": 2}, {"tensor": 2}]


def resharded(task: RankTask) -> dict[str, Any]:
    """Write at three sizes on ranks 0-3, then read all four checkpoints at two others."""
    results: dict[str, Any] = {}
    model, places = task.argument

    def world(name: str, sizes: dict[str, int], first: int) -> MegatronPolicy | None:
        settings = config(**sizes)
        size = settings.parallel.num_ranks
        if not first <= task.rank < first + size:
            return None
        place = Rendezvous(
            rank=task.rank - first,
            world_size=size,
            shared_file=task.folder / name.replace(" ", ""),
        )
        return MegatronPolicy(settings, model, place)

    for name, first in (("tensor x data", 0), ("pipeline", 0), ("context", 2)):
        policy = world(name, WRITERS[name], first)
        if policy is not None:
            go_on(policy, 2)
            policy.save(places[name])
            results[name] = go_on(policy, 2)
            if name == "pipeline":
                policy.save_hf(places["folder"])
            policy.close()
    for number, sizes in enumerate(READERS):
        policy = world(f"read{number}", sizes, 2 * number)
        if policy is not None:
            for name, place in places.items():
                if name != "folder" and (place / "metadata.json").exists():
                    policy.load(place)
                    results[f"{name} read by {sizes}"] = go_on(policy, 2)
            policy.close()
    policy = world("full", {"tensor": 2}, 2)
    if policy is not None:
        results["full disk"] = full_disk(policy, places["folder"].parent, task.rank == 3)
        policy.close()
    return results


def full_disk(policy: MegatronPolicy, folder: Path, mine_is_full: bool) -> list[str]:
    """Save, save while one rank can write no large file, save again."""
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


def test_checkpoints_reshard_and_survive_a_full_disk(
    model: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    places = {name: tmp_path / name for name in WRITERS}
    places["folder"] = tmp_path / "full" / "hf"
    places["folder"].parent.mkdir()
    alone = MegatronPolicy(config(), model)
    opened.append(alone)
    go_on(alone, 2)
    alone.save(places["one"])
    want = go_on(alone, 2)

    ranks = run_ranks(f"{__name__}:resharded", 4, (model, places))
    everything = {name: value for rank in ranks for name, value in rank.items()}
    message, *names = everything.pop("full disk")
    assert re.search(r"cannot write .*refused .*disk or a quota full.* MiB are free", message)
    assert names == ["after", "before", "hf"]
    assert len(everything) == 3 + len(WRITERS) * len(READERS)
    for name in WRITERS:
        alone.load(places[name])
        everything[f"{name} read by one"] = go_on(alone, 2)
    for name, got in everything.items():
        for got_step, want_step in zip(got, want, strict=True):
            assert got_step == pytest.approx(want_step, rel=1e-4, abs=1e-6), name

    alone.close()
    opened[:] = [MegatronPolicy(config(), places["folder"])]  # written by two pipeline stages
