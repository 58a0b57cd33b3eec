"""The Megatron backend keeps the policy contract; and what is its own."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import torch

from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backend import CheckpointError, LossInputs, LossOutput, PolicyBackend
from treadle.policy.backends.megatron.architecture import MODEL_TYPES, Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.memory import estimate_memory
from treadle.policy.backends.vision.shape import NAMING
from treadle.policy.client.types import StepStats
from treadle.policy.config.choices import BackendName
from treadle.policy.config.policy import OffloadConfig, ParallelConfig, PolicyConfig
from treadle.policy.testing.contract_base import (
    LINEAR,
    OpenPolicy,
    Weights,
    exported,
    largest_difference,
)
from treadle.policy.testing.layout_contract import Rounds, case
from treadle.policy.testing.policy_contract import PolicyContract
from treadle.policy.testing.tiny import sequences, write_model

YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Models with experts have names of their own in transformers: experts/step_test.py has them.
# Those that see: vision/parity_test.py has them.
DENSE: Final = tuple(
    name for name, blocks in MODEL_TYPES.items() if not blocks.experts and name not in NAMING
)
CASES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    **{model_type: (model_type, {}) for model_type in DENSE},
    **{f"{name}-untied": (name, {"tied": False}) for name in ("llama", "qwen3", "glm4")},
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3-linear": ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "glm4-yarn": ("glm4", {"rope_scaling": YARN}),
    "gemma3_text-yarn": ("gemma3_text", {"rope_scaling": YARN}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "glm4-no-bias": ("glm4", {"attention_bias": False}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
}
ROUNDS: Final[Rounds] = [
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


class TestMegatronPolicy(PolicyContract):
    backend: ClassVar[BackendName] = "megatron"
    models: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = CASES
    adapted: ClassVar[Sequence[str]] = ("phi3", "glm4", "gemma2", "gemma3_text")
    lora_layouts: ClassVar[Sequence[Sequence[Mapping[str, Any]]]] = (
        ({"tensor": 2}, {"pipeline": 2}),
        ({"tensor": 2, "sequence": True}, {"data": 2}),
        ({"context": 2},),
    )
    critic_layouts: ClassVar[Sequence[Sequence[Mapping[str, Any]]]] = (
        ({"tensor": 2}, {"pipeline": 2}),
        ({"data": 2}, {"tensor": 2, "sequence": True}),
        ({"context": 2},),
    )
    offload_layouts: ClassVar[Sequence[Mapping[str, Any]]] = ({"tensor": 2}, {"data": 2})
    rounds: ClassVar[Rounds] = ROUNDS
    writers: ClassVar[Mapping[str, tuple[Mapping[str, Any], int]]] = {
        "tensor x data": ({"tensor": 2, "data": 2}, 0),
        "folder": ({"pipeline": 2}, 0),
        "context": ({"context": 2}, 2),
    }
    readers: ClassVar[Sequence[tuple[Mapping[str, Any], int]]] = (
        ({"context": 2, "data": 2}, 0),
        ({"tensor": 2}, 2),
    )

    def value_head(self, critic: Any) -> torch.Tensor:
        head: torch.Tensor = critic._model.value_weight
        return head

    @classmethod
    def held(cls, model: Any) -> Iterable[Any]:
        buffers = [*model._net.buffers, *model._net.expert_parallel_buffers]
        flat = [t for b in buffers for t in (b.grad_data, b.param_data) if t is not None]
        return [*super().held(model), *flat]

    def check_model(self, policy: PolicyBackend, reference: Any) -> None:
        assert isinstance(policy, MegatronPolicy)
        parameters = sum(p.numel() for p in reference.parameters())
        assert policy.architecture.num_parameters == parameters

    def check_reference(self, policy: PolicyBackend, folder: Path) -> None:
        assert isinstance(policy, MegatronPolicy)
        estimate = estimate_memory(
            policy.architecture,
            PolicyConfig(),
            rows=64,
            reference=True,
            other_reference=Architecture.from_folder(folder),
        )
        assert isinstance(policy._reference, torch.nn.Module)
        assert estimate.reference == sum(p.nbytes for p in policy._reference.parameters())

    def check_damaged(self, policy: PolicyBackend, directory: Path) -> None:
        whole = (directory / "common.pt").read_bytes()
        (directory / "common.pt").write_bytes(whole[:-100])
        with pytest.raises(CheckpointError, match=r"common\.pt is damaged"):
            policy.load(directory)
        (directory / "common.pt").write_bytes(whole)
        cut = directory.with_name("cut")
        shutil.copytree(directory, cut)
        (cut / "__0_0.distcp").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"cut is damaged: "):
            policy.load(cut)

    def test_recomputing_changes_no_bit_and_keeps_less(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        def run(recompute: str, *modules: str) -> tuple[StepStats, Weights, int]:
            loss = KeptActivations()
            settings: dict[str, Any] = {"recompute_modules": modules} if modules else {}
            policy = open_policy(folder, optimizer=LINEAR, recompute=recompute, **settings)
            with torch.autograd.graph.saved_tensors_hooks(loss.keep, lambda tensor: tensor):
                stats = policy.train_step(sequences(), loss)
            return stats, exported(policy), loss.num_bytes[-1]

        want, weights, everything = run("none")
        kept = [everything]
        for how in (["selective", "core_attn"], ["selective", "mlp"], ["full"]):
            got, recomputed, num_bytes = run(*how)
            assert got.metrics == want.metrics
            assert (got.loss, got.grad_norm) == (want.loss, want.grad_norm)
            assert largest_difference(recomputed, weights) == 0.0
            kept.append(num_bytes)
        assert sorted(kept, reverse=True) == kept
        assert len(set(kept)) == len(kept), kept

    def test_weights_that_are_not_finite_are_noticed_and_never_loaded(
        self, folder: Path, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder)
        norm = next(t.tensor for t in policy.export_weights() if t.name == "model.norm.weight")
        norm[3] = torch.nan  # the live parameter: the model's own norm is not copied
        assert not policy.weights_are_finite()
        policy.save(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=r"the weights in .*saved are not finite"):
            policy.load(tmp_path / "saved")

    def test_a_world_of_another_size_is_refused(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        with pytest.raises(ValueError, match=r"need 2 ranks, but 1 were started"):
            open_policy(folder, parallel=ParallelConfig(data=2))


@dataclass(frozen=True)
class KeptActivations(ClippedSurrogate):
    """The same loss, which notes the bytes that the forward pass has kept for the backward pass."""

    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    num_bytes: list[int] = field(default_factory=list)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.num_bytes.append(sum(t.untyped_storage().nbytes() for t in self.kept.values()))
        return super().__call__(inputs)


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Any]:
    write_model(tmp_path, hidden_size=256, vocab_size=100_000, num_hidden_layers=1)
    settings = PolicyConfig(micro_batch_tokens=100, offload=OffloadConfig(parameters=True))
    policy = MegatronPolicy(settings, tmp_path)
    yield policy
    policy.close()


def test_memory_really_leaves_the_process(large: Any) -> None:
    """Where the device is the host, gradients leave it and weights change their place."""
    short = sequences((12,))
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
