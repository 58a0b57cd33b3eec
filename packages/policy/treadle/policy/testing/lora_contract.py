"""The part of the policy contract about LoRA.

The truth is transformers' model, into whose weights the tests merge adapters themselves.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.policy.backend import CheckpointError, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.adapter import AdapterError
from treadle.policy.config.policy import (
    TARGETS,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from treadle.policy.testing.contract_base import ContractBase, OpenPolicy
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.state_contract import LOSS, go_on
from treadle.policy.testing.tiny import sequences

# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
LINEAR = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)
RANK, ALPHA = 4, 6.0
SOME = ("v_proj", "up_proj", "down_proj")  # fused layers of which only a part is adapted


def lora(**settings: Any) -> LoraConfig:
    """Returns adapters of one rank and scale."""
    return LoraConfig(**({"rank": RANK, "alpha": ALPHA} | settings))


def config(parallel: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Returns settings of `PolicyConfig`."""
    given: dict[str, Any] = {"lora": lora(), "optimizer": LINEAR, "micro_batch_tokens": 100}
    return {**given, **settings, "parallel": ParallelConfig(**(parallel or {}))}


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
    """Returns the log-probabilities of ids 1, 2, ... under other weights."""
    inputs = torch.tensor([list(ids)])
    output = torch.func.functional_call(model, dict(weights), (inputs,), {"use_cache": False})
    logits = output.logits[0, :-1].log_softmax(-1)
    values: Tensor = logits.gather(-1, inputs[0, 1:, None])[:, 0]
    return values


def train(
    settings: PolicyConfig, model: Path, out: Path, place: Rendezvous | None = None
) -> dict[str, Any]:
    """Takes steps, and writes a checkpoint and a model folder between them."""
    policy = registry.build(
        settings, model, place or Rendezvous(), keep_reference=True, reference_path=None
    )
    result: dict[str, Any] = {"random": policy.logprobs(sequences()), "steps": go_on(policy, 3)}
    result["after"] = policy.logprobs(sequences())
    result["reference"] = policy.reference_logprobs(sequences())
    policy.save(out / "checkpoint")
    policy.save_hf(out / "hf")
    result["next"] = go_on(policy, 1)
    policy.close()
    return result


def run(task: RankTask) -> dict[str, Any]:
    """Trains in this rank's layout of each group."""
    results = {}
    backend, groups, model, out = task.argument
    for group, layouts in enumerate(groups):
        if task.rank // 2 == len(layouts):
            break
        mine, first = layouts[task.rank // 2], task.rank // 2 * 2
        place = Rendezvous(
            rank=task.rank - first,
            world_size=2,
            shared_file=task.folder / f"{group}-{first}",
        )
        settings = PolicyConfig(backend=backend, **config(mine))
        results[str(mine)] = train(settings, model, out / str(mine), place)
    return results


class LoraContract(ContractBase):
    """See the module.

    Attributes:
        lora_layouts: Sizes of `policy.parallel` of two ranks; those of a group run side by side.
    """

    lora_layouts: ClassVar[Sequence[Sequence[Mapping[str, Any]]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def adapted_models(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of a tied and an untied model."""
        folder = tmp_path_factory.mktemp("models")
        cls.write(folder / "qwen2", "qwen2")
        cls.write(folder / "qwen3", "qwen3", tied=False)
        return folder

    @pytest.mark.parametrize(("name", "targets"), [("qwen2", TARGETS), ("qwen3", SOME)])
    def test_a_step_from_an_adapter_is_that_of_torch(
        self,
        adapted_models: Path,
        tmp_path: Path,
        open_policy: OpenPolicy,
        name: str,
        targets: tuple[Any, ...],
    ) -> None:
        """One gradient step on A and B in transformers and torch, as the truth."""
        self.needs("lora")
        import transformers

        place = write_adapter(tmp_path / "adapter", adapted_models / name, targets)
        adapter = {
            name: tensor.requires_grad_()
            for name, tensor in load_file(place / "adapter_model.safetensors").items()
        }
        model = transformers.AutoModelForCausalLM.from_pretrained(adapted_models / name)
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
        policy = open_policy(adapted_models / name, keep_reference=True, **settings)
        began = policy.logprobs(batch)
        for s, got, want in zip(batch, began, started, strict=True):
            assert got[1:] == pytest.approx(
                (want * torch.tensor(s.loss_mask[1:])).tolist(), abs=1e-4
            )
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
        self, adapted_models: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        self.needs("lora")
        import transformers

        policy = open_policy(adapted_models / "qwen3", keep_reference=True, **config())
        base = load_file(adapted_models / "qwen3" / "model.safetensors")
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
        again = open_policy(tmp_path / "hf")
        for got, want_now in zip(again.logprobs(batch), trained, strict=True):
            assert got == pytest.approx(want_now, abs=1e-5)
        again.save_hf(tmp_path / "again")
        assert not (tmp_path / "again" / "adapter").exists()
        with pytest.raises(RuntimeError, match="no adapter"):
            again.save_adapter(tmp_path / "none")

    def test_adapters_resume_bit_for_bit_and_fit_what_they_were_trained_on(
        self, adapted_models: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        self.needs("lora")
        settings = config(dtype="bfloat16")
        first = open_policy(adapted_models / "qwen2", **settings)
        go_on(first, 2)
        first.save(tmp_path / "two")
        uninterrupted = go_on(first, 2)
        second = open_policy(adapted_models / "qwen2", **settings)
        second.load(tmp_path / "two")
        assert go_on(second, 2) == uninterrupted
        assert {t.tensor.dtype for t in second.export_weights()} == {torch.bfloat16}
        written = sum(file.stat().st_size for file in (tmp_path / "two").iterdir())
        assert written < (adapted_models / "qwen2" / "model.safetensors").stat().st_size

        shutil.copytree(adapted_models / "qwen2", tmp_path / "other")
        weights = load_file(tmp_path / "other" / "model.safetensors")
        weights["model.norm.weight"][3] += 1.0
        save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        for other, model, said in (
            (
                config(dtype="bfloat16", lora=lora(rank=2)),
                adapted_models / "qwen2",
                "lora.rank is 4, not 2",
            ),
            (settings, tmp_path / "other", "frozen weights' checksum"),
            (config(lora=LoraConfig()), adapted_models / "qwen2", "lora.rank is 4, not None"),
        ):
            policy = open_policy(model, **other)
            with pytest.raises(CheckpointError, match=f"of another model: .*{said}"):
                policy.load(tmp_path / "two")

    def test_an_adapter_that_does_not_fit_is_refused(
        self, adapted_models: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        self.needs("lora")
        place = write_adapter(tmp_path / "adapter", adapted_models / "qwen2", SOME)
        for settings, said in (
            ({"path": tmp_path}, "has no adapter_config.json"),
            ({"path": place, "rank": 3}, "its r is 4, not 3: set policy.lora.rank to it"),
            (
                {"path": place, "alpha": 1.0},
                "its lora_alpha is 6.0, not 1.0: set .*alpha",
            ),
            ({"path": place}, "lacks '.*gate_proj.*': set policy.lora.targets"),
            ({"path": place, "targets": ("v_proj",)}, "also has '.*down_proj"),
        ):
            with pytest.raises(AdapterError, match=said):
                open_policy(adapted_models / "qwen2", **config(lora=lora(**settings)))
        self.write(tmp_path / "wide", "qwen2", intermediate_size=192)
        fitting = config(lora=lora(path=place, targets=SOME))
        with pytest.raises(AdapterError, match="is of another model"):
            open_policy(tmp_path / "wide", **fitting)

    def test_adapters_do_not_depend_on_the_layout(
        self, adapted_models: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        if not self.lora_layouts:
            pytest.skip(f"policy.backend={self.backend} has no adapters over several ranks")
        model = adapted_models / "qwen2"
        groups = self.lora_layouts
        places = {str(layout): tmp_path / str(layout) for group in groups for layout in group}
        for place in (tmp_path / "one", *places.values()):
            place.mkdir()
        most = 2 * max(map(len, groups))
        ranks = run_ranks(f"{__name__}:run", most, (self.backend, groups, model, tmp_path))
        want = train(PolicyConfig(backend=self.backend, **config()), model, tmp_path / "one")
        adapter = load_file(tmp_path / "one" / "hf" / "adapter" / "adapter_model.safetensors")
        whole = load_file(tmp_path / "one" / "hf" / "model.safetensors")
        alone = open_policy(model, **config())
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
