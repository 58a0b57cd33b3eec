"""The part of the policy contract about images, for backends that have models that see.

The truth is the model's class in transformers, called as its documentation shows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import PolicyBackend, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.choices import BackendName
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from treadle.policy.testing.contract_base import LINEAR, ContractBase, OpenPolicy, exported
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.seeing import (
    SEEING,
    Transformers,
    seeing_sequences,
    write_seeing_model,
)
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.delta import DeltaSender

LOSS: Final = policy_loss(AlgorithmConfig())


def tower_of(policy: PolicyBackend) -> dict[str, torch.Tensor]:
    """Returns copies of the tower's weights."""
    return {t.name: t.tensor.clone() for t in policy.export_weights() if "visual." in t.name}


def train(
    backend: BackendName, folder: Path, layout: Mapping[str, Any], place: Rendezvous
) -> dict[str, Any]:
    """The policy's view of the batch, the reference's, steps that teach the tower too.

    In the last, only one rank has an image.
    """
    config = PolicyConfig(
        backend=backend,
        parallel=ParallelConfig(**layout),
        optimizer=LINEAR,
        micro_batch_tokens=80,
        freeze_vision_tower=False,
    )
    policy = registry.build(config, folder, place, keep_reference=True, reference_path=None)
    batch = seeing_sequences()
    logprobs = policy.logprobs(batch)
    again = [replace(s, old_logprobs=o) for s, o in zip(batch, logprobs, strict=True)]
    steps = [policy.train_step(b, LOSS) for b in (batch, again, [again[0], *again[5:7]])]
    result = {
        "logprobs": [*logprobs, *policy.reference_logprobs(batch)],
        "steps": [(s.loss, s.grad_norm) for s in steps],
        "weights": exported(policy),
    }
    policy.close()
    return result


def run(task: RankTask) -> dict[str, Any]:
    """Trains each model in each layout."""
    backend, layouts, models = task.argument
    found = {}
    for name in (f"{model}-{number}" for model in SEEING for number in range(len(layouts))):
        place = Rendezvous(rank=task.rank, world_size=2, shared_file=task.folder / name)
        model, number = name.rsplit("-", 1)
        found[name] = train(backend, models / model, layouts[int(number)], place)
    return found


class VisionContract(ContractBase):
    """See the module.

    Attributes:
        seeing_layouts: Sizes of `policy.parallel` of two ranks.
    """

    seeing_layouts: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def seeing_models(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of a model of each type."""
        folder = tmp_path_factory.mktemp("models")
        for name in SEEING:
            write_seeing_model(folder / name, name)
        return folder

    @pytest.mark.parametrize("trained", [False, True])
    @pytest.mark.parametrize("model_type", SEEING)
    def test_a_model_that_sees_is_that_of_transformers(
        self, tmp_path: Path, open_policy: OpenPolicy, model_type: str, trained: bool
    ) -> None:
        """Log-probabilities, weights bit for bit, and the weights after a step of GRPO."""
        model = write_seeing_model(tmp_path / "model", model_type, tied=trained)
        reference = Transformers(tmp_path / "model", model)
        policy = open_policy(tmp_path / "model", optimizer=LINEAR, freeze_vision_tower=not trained)
        batch = seeing_sequences()
        for sequence, got in zip(batch, policy.logprobs(batch), strict=True):
            with torch.no_grad():
                want = reference.logprobs(sequence) * torch.tensor(sequence.loss_mask[1:])
            assert got == pytest.approx([0.0, *want.tolist()], abs=2e-5)
        described = registry.describe(self.backend).read_model(tmp_path / "model")
        assert described.num_parameters == sum(p.numel() for p in model.parameters())

        policy.save_hf(tmp_path / "saved")
        saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
        wanted = model.state_dict()
        assert all(torch.equal(t, wanted[name]) for name, t in saved.state_dict().items())
        assert saved.state_dict().keys() == wanted.keys()

        total = sum(s.num_loss_tokens for s in batch)
        loss = torch.zeros(())
        model.requires_grad_(True)
        reference.model.model.visual.requires_grad_(trained)
        for s in batch:
            logp = reference.logprobs(s)
            mask = torch.tensor(s.loss_mask[1:])
            assert isinstance(s.advantages, float)
            loss = loss - ((logp - logp.detach()).exp() * s.advantages * mask).sum() / total
        loss.backward()
        learning = [p for p in model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(learning, LINEAR.grad_clip)
        torch.optim.AdamW(learning, lr=LINEAR.lr, eps=1.0, weight_decay=0.0).step()
        stats = policy.train_step(batch, LOSS)
        assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        policy.save_hf(tmp_path / "stepped")
        stepped = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "stepped")
        for name, tensor in stepped.state_dict().items():
            assert (tensor - model.state_dict()[name]).abs().max() < 5e-6, name

    @pytest.mark.parametrize("name", SEEING)
    def test_adapters_are_of_the_language_model(
        self, seeing_models: Path, tmp_path: Path, open_policy: OpenPolicy, name: str
    ) -> None:
        """What a step taught adapters is in merged weights, and in PEFT's files by its names."""
        settings: dict[str, Any] = {"optimizer": LINEAR, "lora": LoraConfig(rank=4)}
        policy = open_policy(seeing_models / name, keep_reference=True, **settings)
        batch, tower = seeing_sequences(), tower_of(policy)
        before = policy.logprobs(batch)
        policy.train_step(batch, LOSS)
        after = policy.logprobs(batch)
        assert policy.reference_logprobs(batch) == before != after
        assert all(torch.equal(tensor, tower[key]) for key, tensor in tower_of(policy).items())
        policy.save_hf(tmp_path / "saved")
        merged: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
        reference = Transformers(tmp_path / "saved", merged)
        for sequence, got in zip(batch, after, strict=True):
            with torch.no_grad():
                want = reference.logprobs(sequence) * torch.tensor(sequence.loss_mask[1:])
            assert got == pytest.approx([0.0, *want.tolist()], abs=1e-4)

        folder = tmp_path / "saved" / "adapter"
        modules = {f"base_model.model.{module}" for module, _ in merged.named_modules()}
        adapted = {key.rsplit(".", 2)[0] for key in load_file(folder / "adapter_model.safetensors")}
        assert len(adapted) == 4 * 7 and adapted <= modules
        said = json.loads((folder / "adapter_config.json").read_text())
        assert said["exclude_modules"] == r".*\bvisual\b.*"
        settings["lora"] = LoraConfig(rank=4, path=folder)
        again = open_policy(seeing_models / name, **settings)
        for got, first in zip(again.logprobs(batch), after, strict=True):
            assert got == pytest.approx(first, abs=1e-5)

    def test_a_critic_sees(self, seeing_models: Path, open_policy: OpenPolicy) -> None:
        policy = open_policy(seeing_models / SEEING[1], optimizer=LINEAR)
        critic = policy.make_critic(CriticConfig())
        batch = [
            replace(
                s, values=FloatArray((0.0,) * len(s.ids)), returns=FloatArray((1.0,) * len(s.ids))
            )
            for s in seeing_sequences()
        ]
        critic.train_step(batch)
        values = critic.values(batch)
        # The first and the fourth have the same prompt but for the pixels of an image.
        place = batch[0].loss_mask.index(True)
        assert batch[0].ids[:place] == batch[3].ids[:place]
        assert values[0][place] != values[3][place]

    @pytest.mark.parametrize("frozen", [True, False])
    def test_training_that_sees_goes_on_exactly(
        self, seeing_models: Path, tmp_path: Path, open_policy: OpenPolicy, frozen: bool
    ) -> None:
        settings: dict[str, Any] = {"optimizer": LINEAR, "freeze_vision_tower": frozen}
        batch = seeing_sequences()
        policy = open_policy(seeing_models / SEEING[0], **settings)
        tower = tower_of(policy)
        sender = DeltaSender()
        changes: dict[str, Any] = {"element_type": "bfloat16"}
        begin = weights_pb.ComputeDeltaRequest(version=0, base_version=None, **changes)
        sender.compute(policy, begin, rank=0)
        policy.train_step(batch, LOSS)
        after = weights_pb.ComputeDeltaRequest(version=1, base_version=0, **changes)
        sizes = sender.compute(policy, after, rank=0).encoded_bytes
        # A delta sends nothing of a tower that stays.
        assert (sum(sizes[name] for name in tower) == 0) == frozen
        assert sum(sizes.values()) > 0
        assert all(torch.equal(t, tower[key]) for key, t in tower_of(policy).items()) == frozen
        policy.save(tmp_path / "step_1")
        want = policy.train_step(batch, LOSS)
        again = open_policy(seeing_models / SEEING[0], **settings)
        again.load(tmp_path / "step_1")
        assert again.train_step(batch, LOSS).loss == want.loss

    def test_what_cannot_see_is_refused_by_name(
        self, seeing_models: Path, folder: Path, open_policy: OpenPolicy
    ) -> None:
        with pytest.raises(UnsupportedModelError, match="qwen2 sees no images, and the policy"):
            open_policy(seeing_models / SEEING[1], keep_reference=True, reference_path=folder)
        text = open_policy(folder)
        with pytest.raises(ValueError, match="sequences have images, and the model has no vision"):
            text.logprobs(seeing_sequences())

    def test_layouts_do_not_change_what_is_seen(self, seeing_models: Path) -> None:
        layouts = self.seeing_layouts
        if not layouts:
            pytest.skip(f"policy.backend={self.backend} has its own test of layouts that see")
        ranks = run_ranks(f"{__name__}:run", 2, (self.backend, layouts, seeing_models))
        for name in SEEING:
            alone = train(self.backend, seeing_models / name, {}, Rendezvous())
            for got in (rank[f"{name}-{n}"] for rank in ranks for n in range(len(layouts))):
                for mine, want in zip(got["logprobs"], alone["logprobs"], strict=True):
                    assert mine == pytest.approx(want, abs=1e-5)
                for step, wanted in zip(got["steps"], alone["steps"], strict=True):
                    assert step == pytest.approx(wanted, rel=1e-5, abs=1e-5)
                for key, tensor in got["weights"].items():
                    assert abs(tensor - alone["weights"][key]).max() < 2e-6, key
