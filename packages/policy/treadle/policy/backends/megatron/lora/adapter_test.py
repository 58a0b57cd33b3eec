"""The truth is transformers' model, into whose weights the tests merge adapters themselves."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import CheckpointError, Rendezvous
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.lora.adapter import AdapterError
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import (
    TARGETS,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import sequences, write_model

LOSS = policy_loss(AlgorithmConfig())
# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
LINEAR = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)
RANK, ALPHA = 4, 6.0
SOME = ("v_proj", "up_proj", "down_proj")  # fused layers of which only a part is adapted


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**({"rank": RANK, "alpha": ALPHA} | settings))


def config(parallel: Mapping[str, Any] | None = None, **settings: Any) -> PolicyConfig:
    given: dict[str, Any] = {"lora": lora(), "optimizer": LINEAR, "micro_batch_tokens": 100}
    return PolicyConfig(**(given | settings), parallel=ParallelConfig(**(parallel or {})))


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "qwen2", "qwen2")
    write_model(folder / "qwen3", "qwen3", tied=False)
    return folder


def write_adapter(folder: Path, model: Path, targets: tuple[str, ...] = TARGETS) -> Path:
    """A random adapter of a model, in PEFT's format."""
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] in targets and name.endswith(".weight"):
            rows, columns = weight.shape
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=draw) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """W + (alpha / rank) B A, for every matrix with an adapter."""
    result = dict(base)
    for name, a in adapter.items():
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        if kind == "lora_A":
            b = adapter[f"{stem}.lora_B.weight"]
            weight = f"{stem.removeprefix('base_model.model.')}.weight"
            result[weight] = base[weight] + ALPHA / RANK * (b @ a)
    return result


def logp(model: Any, weights: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    inputs = torch.tensor([list(ids)])
    output = torch.func.functional_call(model, dict(weights), (inputs,), {"use_cache": False})
    logits = output.logits[0, :-1].log_softmax(-1)
    values: Tensor = logits.gather(-1, inputs[0, 1:, None])[:, 0]
    return values


@pytest.mark.parametrize(("name", "targets"), [("qwen2", TARGETS), ("qwen3", SOME)])
def test_a_step_from_an_adapter_is_that_of_torch(
    models: Path,
    tmp_path: Path,
    opened: list[MegatronPolicy],
    name: str,
    targets: tuple[Any, ...],
) -> None:
    """One gradient step on A and B in transformers and torch, as the truth."""
    import transformers

    place = write_adapter(tmp_path / "adapter", models / name, targets)
    adapter = {
        name: tensor.requires_grad_()
        for name, tensor in load_file(place / "adapter_model.safetensors").items()
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(models / name)
    base = {name: p.detach() for name, p in model.named_parameters()}
    batch = sequences()
    total = sum(s.num_loss_tokens for s in batch)
    loss = torch.zeros(())
    started = []
    for s in batch:
        values = logp(model, merged(base, adapter), s.ids)
        started.append(values.detach())
        ratio, mask = (values - values.detach()).exp(), torch.tensor(s.loss_mask[1:])
        assert isinstance(s.advantages, float)
        loss = loss - (ratio * s.advantages * mask).sum() / total
    loss.backward()
    norm = torch.cat([t.grad.flatten() for t in adapter.values() if t.grad is not None]).norm()

    settings = config(lora=lora(path=place, targets=targets), recompute="full")
    policy = MegatronPolicy(settings, models / name, keep_reference=True)
    opened.append(policy)
    began = policy.logprobs(batch)
    for s, got, want in zip(batch, began, started, strict=True):
        assert got[1:] == pytest.approx((want * torch.tensor(s.loss_mask[1:])).tolist(), abs=1e-4)
    stats = policy.train_step(batch, LOSS)
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert policy.reference_logprobs(batch) == began

    # Adam's first step is lr g / (|g| + eps), on the clipped gradient; matrices decay.
    policy.save_adapter(tmp_path / "after")
    after = load_file(tmp_path / "after" / "adapter_model.safetensors")
    assert after.keys() == adapter.keys()
    scale = min(1.0, LINEAR.grad_clip / float(norm))
    for name, tensor in adapter.items():
        assert tensor.grad is not None
        g = tensor.grad * scale
        decayed = tensor.detach() * (1 - LINEAR.lr * LINEAR.weight_decay)
        assert torch.allclose(after[name], decayed - LINEAR.lr * g / (g.abs() + 1), atol=1e-6)


def test_servers_get_merged_weights_and_the_base_is_the_reference(
    models: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    import transformers

    policy = MegatronPolicy(config(), models / "qwen3", keep_reference=True)
    opened.append(policy)
    base = load_file(models / "qwen3" / "model.safetensors")
    batch = sequences()
    started = policy.logprobs(batch)
    assert all(torch.equal(t.tensor, base[t.name]) for t in policy.export_weights())  # B is 0
    for _ in range(3):
        assert not policy.train_step(batch, LOSS).skipped
    assert policy.reference_logprobs(batch) == started
    trained = policy.logprobs(batch)
    assert trained != started

    policy.save_hf(tmp_path / "hf")
    adapter = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    want = merged(base, adapter)
    exported = {t.name: t.tensor for t in policy.export_weights()}
    assert exported.keys() == base.keys() == {spec.name for spec in policy.weight_specs()}
    moved = {name for name in exported if not torch.equal(exported[name], base[name])}
    assert moved == {n for n in base if n.split(".")[-2] in TARGETS}
    assert all(torch.allclose(exported[name], want[name], atol=1e-6) for name in want)

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        for s, got in zip(batch, trained, strict=True):
            values = logp(model, {}, s.ids) * torch.tensor(s.loss_mask[1:])
            assert got[1:] == pytest.approx(values.tolist(), abs=1e-4)

    # The next run starts from that folder, whose adapter it neither adds again nor copies.
    policy.close()
    opened[:] = [MegatronPolicy(PolicyConfig(), tmp_path / "hf")]
    for got, want_now in zip(opened[0].logprobs(batch), trained, strict=True):
        assert got == pytest.approx(want_now, abs=1e-5)
    opened[0].save_hf(tmp_path / "again")
    assert not (tmp_path / "again" / "adapter").exists()
    with pytest.raises(RuntimeError, match="no adapter"):
        opened[0].save_adapter(tmp_path / "none")


def go_on(policy: MegatronPolicy, steps: int) -> list[tuple[float, ...]]:
    stats = [policy.train_step(sequences(seed=policy.step), LOSS) for _ in range(steps)]
    return [(s.step, s.loss, s.grad_norm) for s in stats]


def test_resuming_gives_the_same_numbers_bit_for_bit(
    models: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    settings = config(dtype="bfloat16")
    first = MegatronPolicy(settings, models / "qwen2")
    go_on(first, 2)
    first.save(tmp_path / "two")
    uninterrupted = go_on(first, 2)
    first.close()
    second = MegatronPolicy(settings, models / "qwen2")
    second.load(tmp_path / "two")
    assert go_on(second, 2) == uninterrupted
    assert {t.tensor.dtype for t in second.export_weights()} == {torch.bfloat16}
    second.close()
    written = sum(file.stat().st_size for file in (tmp_path / "two").iterdir())
    assert written < (models / "qwen2" / "model.safetensors").stat().st_size

    for other, model, said in (
        (config(dtype="bfloat16", lora=lora(rank=2)), models / "qwen2", "lora.rank is 4, not 2"),
        (config(lora=lora()), models / "qwen2", "frozen weights' checksum"),  # of another type
        (config(lora=LoraConfig()), models / "qwen2", "lora.rank is 4, not None"),
    ):
        policy = MegatronPolicy(other, model)
        with pytest.raises(CheckpointError, match=f"of another model: .*{said}"):
            policy.load(tmp_path / "two")
        policy.close()


def test_an_adapter_that_does_not_fit_is_refused(models: Path, tmp_path: Path) -> None:
    place = write_adapter(tmp_path / "adapter", models / "qwen2", SOME)
    for settings, said in (
        ({"path": tmp_path}, "has no adapter_config.json"),
        ({"path": place, "rank": 3}, "its r is 4, not 3: set policy.lora.rank to it"),
        ({"path": place, "alpha": 1.0}, "its lora_alpha is 6.0, not 1.0: set policy.lora.alpha"),
        ({"path": place}, "lacks '.*gate_proj.*': set policy.lora.targets"),
        ({"path": place, "targets": ("v_proj",)}, "also has '.*down_proj"),
    ):
        with pytest.raises(AdapterError, match=said):
            MegatronPolicy(config(lora=lora(**settings)), models / "qwen2")
    write_model(tmp_path / "wide", "qwen2", intermediate_size=192)
    fitting = config(lora=lora(path=place, targets=SOME))
    with pytest.raises(AdapterError, match="is of another model"):
        MegatronPolicy(fitting, tmp_path / "wide")


# --- layouts -------------------------------------------------------------------------------------

# One after another; those of a group run side by side.
LAYOUTS: list[list[dict[str, Any]]] = [
    [{"tensor": 2}, {"pipeline": 2}],
    [{"tensor": 2, "sequence": True}, {"data": 2}],
    [{"context": 2}],
]


def train(settings: PolicyConfig, model: Path, place: Rendezvous | None, out: Path) -> Any:
    policy = MegatronPolicy(settings, model, place)
    result: dict[str, Any] = {"random": policy.logprobs(sequences()), "steps": go_on(policy, 3)}
    result["after"] = policy.logprobs(sequences())
    result["reference"] = policy.reference_logprobs(sequences())
    policy.save(out / "checkpoint")
    policy.save_hf(out / "hf")
    result["next"] = go_on(policy, 1)
    policy.close()
    return result


def run(task: RankTask) -> dict[str, Any]:
    results = {}
    model, out = task.argument
    for group, layouts in enumerate(LAYOUTS):
        if task.rank // 2 == len(layouts):
            break
        mine, first = layouts[task.rank // 2], task.rank // 2 * 2
        place = Rendezvous(
            rank=task.rank - first,
            world_size=2,
            shared_file=task.folder / f"{group}-{first}",
        )
        results[str(mine)] = train(config(mine), model, place, out / str(mine))
    return results


def test_layouts_equal_one_process(
    models: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    model = models / "qwen2"
    places = {str(layout): tmp_path / str(layout) for group in LAYOUTS for layout in group}
    for place in (tmp_path / "one", *places.values()):
        place.mkdir()
    ranks = run_ranks(f"{__name__}:run", 4, (model, tmp_path))
    want = train(config(), model, None, tmp_path / "one")
    adapter = load_file(tmp_path / "one" / "hf" / "adapter" / "adapter_model.safetensors")
    whole = load_file(tmp_path / "one" / "hf" / "model.safetensors")
    alone = MegatronPolicy(config(), model)
    opened.append(alone)
    for layout, place in places.items():
        for rank in (rank for rank in ranks if layout in rank):
            for key in ("random", "after", "reference"):
                for mine, theirs in zip(rank[layout][key], want[key], strict=True):
                    assert mine == pytest.approx(theirs, abs=1e-5), (layout, key)
            for mine, theirs in zip(
                rank[layout]["steps"] + rank[layout]["next"],
                want["steps"] + want["next"],
                strict=True,
            ):
                assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6), layout
        got = load_file(place / "hf" / "adapter" / "adapter_model.safetensors")
        assert got.keys() == adapter.keys()
        assert all(torch.allclose(got[n], adapter[n], atol=1e-6) for n in got), layout
        merged_there = load_file(place / "hf" / "model.safetensors")
        assert all(torch.allclose(merged_there[n], whole[n], atol=1e-6) for n in whole), layout
        alone.load(place / "checkpoint")  # written by two ranks, read by one
        assert go_on(alone, 1)[0] == pytest.approx(want["next"][0], rel=1e-5, abs=1e-6)
