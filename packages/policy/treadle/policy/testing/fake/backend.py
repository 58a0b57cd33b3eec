"""The fake policy: a model without its layers, in numpy, for tests that need any policy.

The logits of a token are those of its predecessor's embedding, after the last norm: what a model of
the Llama family computes if it has no layers. So it is a real policy: it reads and writes model
folders, its gradients are exact, and it learns. The weights of the layers are exported as they were
read. It starts without Megatron, and torch is imported only for a loss, which is written in torch,
and for the weights that leave it.

Shape suffixes: T loss tokens of a micro-batch, M of the batch, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from treadle.policy.backend import CheckpointError, LossInputs, PolicyBackend, Rendezvous
from treadle.policy.client.batch import (
    check_optional_fields,
    has_gradient,
    input_length,
    pack,
    token_weights,
)
from treadle.policy.client.hf_files import weight_files
from treadle.policy.client.sampling_masks import decode, masks_of
from treadle.policy.client.types import (
    LOGPROB_FIELDS,
    LossStats,
    NamedTensor,
    OffloadReport,
    OptimizerStats,
    TensorSpec,
    TokenValues,
    TrainSequence,
)
from treadle.policy.rank_time import spent_on
from treadle.policy.testing.fake.description import FakeDescription, FakeModel

if TYPE_CHECKING:
    import torch

    from treadle.agent_loop import FloatArray
    from treadle.policy.backend import CriticBackend, Frame, LossFn, LossOutput
    from treadle.policy.client.types import LossAggregation
    from treadle.policy.config.critic import CriticConfig
    from treadle.policy.config.policy import AdamSettings, PolicyConfig

Floats = NDArray[np.float64]
Weights = dict[str, NDArray[np.float32]]

EMBEDDING: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
_DROPPED: Final = -1e30  # As good as minus infinity, but 0 times it is 0.


@dataclass(frozen=True, slots=True)
class _Computed:
    """One forward pass over loss tokens, and what its backward pass needs."""

    previous_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]
    scaled_TH: Floats
    """The embeddings, each divided by `root_T1`."""
    root_T1: Floats
    logp_TV: Floats
    entropy_T: Floats

    @property
    def logprobs_T(self) -> Floats:
        found: Floats = self.logp_TV[np.arange(len(self.targets_T)), self.targets_T]
        return found


class FakePolicy(PolicyBackend):
    """`PolicyBackend` in numpy, of one process."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: Path,
        rendezvous: Rendezvous | None = None,
        *,
        keep_reference: bool = False,
        reference_path: Path | None = None,
    ) -> None:
        """Loads the model; see `MegatronPolicy`.

        Raises:
            UnsupportedModelError: The type of the model is not supported.
            ValueError: A weight is not finite, or neither float32 nor bfloat16.
            FileNotFoundError: The folder is not a model folder.
        """
        self._config, self._model_path = config, model_path
        self._model, self._weights = _read(model_path)
        self._trained = [EMBEDDING, NORM] + [HEAD] * (not self._model.tied)
        self._moments = {
            f"{moment}.{name}": np.zeros_like(self._weights[name])
            for moment in ("first", "second")
            for name in self._trained
        }
        self._gradient: dict[str, Floats] | None = None
        self._step = self._adam_steps = 0
        self._reference: tuple[FakeModel, Weights] | None = None
        if keep_reference and reference_path is None:
            copied = {name: self._weights[name].copy() for name in self._trained}
            self._reference = self._model, copied
        elif keep_reference and reference_path is not None:
            self._reference = _read(reference_path)

    @property
    def step(self) -> int:
        """See `PolicyBackend.step`."""
        return self._step

    @property
    def device(self) -> torch.device:
        """See `PolicyBackend.device`."""
        import torch

        return torch.device("cpu")

    @property
    def leads(self) -> bool:
        """See `PolicyBackend.leads`."""
        return True

    def share(self, frame: Frame | None) -> Frame:
        """See `PolicyBackend.share`."""
        assert frame is not None, "a rank without siblings leads"
        return frame

    def sum_over_shards(self, values_M: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `PolicyBackend.sum_over_shards`."""
        return values_M

    # --- computing ---------------------------------------------------------------------------

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.logprobs`."""
        return self._logprobs(self._model, self._weights, sequences, temperature)

    def reference_logprobs(
        self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `PolicyBackend.reference_logprobs`."""
        if self._reference is None:
            raise RuntimeError("this policy keeps no reference; build it with keep_reference=True")
        return self._logprobs(*self._reference, sequences, temperature)

    def _logprobs(
        self,
        model: FakeModel,
        weights: Weights,
        sequences: Sequence[TrainSequence],
        temperature: float,
    ) -> list[FloatArray]:
        _check(sequences)
        return [s.aligned(_forward(model, weights, [s], temperature).logprobs_T) for s in sequences]

    def add_gradient(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        aggregation: LossAggregation = "token-mean",
        aggregation_length: int | None = None,
        temperature: float = 1.0,
        keep_tokens: bool = False,
    ) -> Callable[[], LossStats]:
        """See `PolicyBackend.add_gradient`."""
        from treadle.policy.algorithms.mismatch import mismatch_metrics

        began = time.perf_counter()
        _check(sequences)
        weights = token_weights(sequences, aggregation, aggregation_length)
        computed = [
            i
            for i, s in enumerate(sequences)
            if s.num_loss_tokens and (has_gradient(s) or not loss.zero_without_advantage)
        ]
        lengths = [input_length(sequences[i]) for i in computed]
        packs = pack(lengths, max_tokens=self._config.micro_batch_tokens)
        if self._gradient is None:
            self._gradient = {n: np.zeros(self._weights[n].shape) for n in self._trained}
        offsets = [0, *accumulate(s.num_loss_tokens for s in sequences)]
        values_2M = np.full((2, offsets[-1]), np.nan, dtype=np.float32)
        gaps: list[torch.Tensor] = []
        stale: list[torch.Tensor] = []
        total, sums = 0.0, dict[str, float]()
        for chosen in ([computed[member] for member in members] for members in packs):
            batch = [sequences[i] for i in chosen]
            found = _forward(self._model, self._weights, batch, temperature)
            weights_T = np.concatenate(
                [np.full(sequences[i].num_loss_tokens, weights[i], np.float32) for i in chosen]
            )
            inputs, output, gradients = _loss(batch, found, loss, weights_T)
            self._backward(found, *gradients, temperature)
            total += float(np.dot(_numpy(output.loss_T).astype(np.float64), weights_T))
            metrics = {"actor/entropy": inputs.entropy_T, **output.metrics_T}
            for name, value_T in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(_numpy(value_T).sum(dtype=np.float64))
            if inputs.rollout_logprobs_T is not None:
                gaps.append(inputs.logprobs_T.detach() - inputs.rollout_logprobs_T)
                stale.append(inputs.stale_T)
            slots = [np.arange(offsets[i], offsets[i + 1]) for i in chosen]
            values_2M[:, np.concatenate(slots)] = found.logprobs_T, found.entropy_T
        tokens = sum(sequences[i].num_loss_tokens for i in computed)
        means = {name: value / tokens for name, value in sums.items()}
        if gaps:
            import torch

            means |= mismatch_metrics(torch.cat(gaps), torch.cat(stale))
        stats = LossStats(
            loss=total,
            num_sequences=len(sequences),
            num_computed=len(computed),
            num_tokens=sum(lengths),
            num_rows=sum(lengths),
            num_loss_tokens=offsets[-1],
            num_micro_batches=len(packs),
            time_s=time.perf_counter() - began,
            metrics=means,
            tokens=TokenValues(logprobs_M=values_2M[0], entropy_M=values_2M[1])
            if keep_tokens
            else None,
        )
        return lambda: stats

    def _backward(
        self, found: _Computed, by_logprob_T: Floats, by_entropy_T: Floats, temperature: float
    ) -> None:
        """Adds to the gradient, given those of the loss by what `_forward` has returned."""
        assert self._gradient is not None
        tied, embedding = self._model.tied, self._weights[EMBEDDING]
        head, norm = self._weights[EMBEDDING if tied else HEAD], self._weights[NORM]
        p_TV = np.exp(found.logp_TV)
        z_TV = -by_logprob_T[:, None] * p_TV
        z_TV[np.arange(len(p_TV)), found.targets_T] += by_logprob_T
        z_TV -= by_entropy_T[:, None] * p_TV * (found.logp_TV + found.entropy_T[:, None])
        z_TV /= temperature
        x_TH = found.scaled_TH
        self._gradient[EMBEDDING if tied else HEAD] += z_TV.T @ (x_TH * norm)
        y_TH = z_TV @ head
        self._gradient[NORM] += (y_TH * x_TH).sum(0)
        y_TH = y_TH * norm
        y_TH = (y_TH - x_TH * (y_TH * x_TH).mean(1, keepdims=True)) / found.root_T1
        assert embedding.shape[1] == y_TH.shape[1]
        np.add.at(self._gradient[EMBEDDING], found.previous_T, y_TH)

    def optimizer_step(self, settings: AdamSettings | None = None) -> OptimizerStats:
        """See `PolicyBackend.optimizer_step`."""
        if self._gradient is None:
            raise RuntimeError("there is no gradient: call add_gradient before optimizer_step")
        gradient, self._gradient = self._gradient, None
        settings = settings or self._config.optimizer.at_step(self._step)
        norm = float(np.sqrt(sum(float(np.square(g).sum()) for g in gradient.values())))
        self._step += 1
        if np.isfinite(norm):
            self._adam_steps += 1
            scale = min(1.0, settings.grad_clip / (norm + 1e-6))
            with spent_on("optimizer"):
                for name, g in gradient.items():
                    self._adam(name, g * scale, settings)
        return OptimizerStats(
            step=self._step,
            grad_norm=norm,
            skipped=not np.isfinite(norm),
            learning_rate=settings.lr,
        )

    def _adam(self, name: str, g: Floats, settings: AdamSettings) -> None:
        weight, rate = self._weights[name], settings.lr
        first, second = self._moments[f"first.{name}"], self._moments[f"second.{name}"]
        first += (1 - settings.beta1) * (g - first)
        second += (1 - settings.beta2) * (g * g - second)
        steps = self._adam_steps
        root = np.sqrt(second / (1 - settings.beta2**steps)) + settings.eps
        decay = settings.weight_decay if weight.ndim > 1 else 0.0
        weight *= 1 - rate * decay
        weight -= rate * first / (1 - settings.beta1**steps) / root

    # --- weights and checkpoints ---------------------------------------------------------------

    def weights_are_finite(self) -> bool:
        """See `PolicyBackend.weights_are_finite`."""
        return _are_finite(self._weights)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `PolicyBackend.weight_specs`."""
        return tuple(
            TensorSpec(name=name, shape=weight.shape, element_type="float32", sender=0)
            for name, weight in self._weights.items()
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        """See `PolicyBackend.export_weights`."""
        import torch

        for name, weight in self._weights.items():
            yield NamedTensor(name=name, tensor=torch.from_numpy(weight))

    def save_hf(self, folder: Path) -> None:
        """See `PolicyBackend.save_hf`."""
        from treadle.policy.backends.hf_weights import write_folder

        try:
            write_folder(self.export_weights(), folder, like=self._model_path)
        except OSError as error:
            raise CheckpointError(f"cannot write {folder}: {error}") from error

    def save_adapter(self, folder: Path) -> None:
        """See `PolicyBackend.save_adapter`."""
        raise RuntimeError("policy.backend=fake has no adapter")

    def save(self, directory: Path) -> None:
        """See `PolicyBackend.save`."""
        from safetensors.numpy import save_file

        building = directory.with_name(f".{directory.name}.writing")
        try:
            if directory.exists():
                raise FileExistsError(f"{directory} exists")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            save_file({**self._weights, **self._moments}, building / "policy.safetensors")
            state = {"step": self._step, "adam_steps": self._adam_steps}
            (building / "state.json").write_text(json.dumps(state), encoding="utf-8")
            building.rename(directory)
        except OSError as error:
            raise CheckpointError(f"cannot write {directory}: {error}") from error
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `PolicyBackend.load`."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        if not (directory / "state.json").is_file():
            raise CheckpointError(f"{directory} holds no complete checkpoint")
        try:
            state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
            read = load_file(directory / "policy.safetensors")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory} is damaged: {error}") from error
        own = {**self._weights, **self._moments}
        if {n: a.shape for n, a in own.items()} != {n: a.shape for n, a in read.items()}:
            raise CheckpointError(f"{directory} is of another model")
        for name, array in own.items():
            array[...] = read[name]
        self._gradient = None
        self._step, self._adam_steps = state["step"], state["adam_steps"]
        if weights_only:
            self._step = self._adam_steps = 0
            for moment in self._moments.values():
                moment[...] = 0.0
        if not self.weights_are_finite():
            raise CheckpointError(f"the weights in {directory} are not finite")

    def make_critic(self, config: CriticConfig) -> CriticBackend:
        """See `PolicyBackend.make_critic`."""
        raise RuntimeError("policy.backend=fake has no critic")

    def release_memory(self) -> None:
        """See `PolicyBackend.release_memory`; there is no device."""

    def take_offload_report(self) -> OffloadReport:
        """See `PolicyBackend.take_offload_report`."""
        return OffloadReport(release_s=0.0, restore_s=0.0, freed_bytes=0, host_bytes=0)

    def close(self) -> None:
        """See `PolicyBackend.close`; there are no other ranks."""


def _read(folder: Path) -> tuple[FakeModel, Weights]:
    """Returns the sizes and all weights of a model folder."""
    from safetensors import deserialize

    model = FakeDescription().read_model(folder)
    weights: Weights = {}
    for file in weight_files(folder):
        for name, stored in deserialize(file.read_bytes()):  # type: ignore[no-untyped-call]
            numbers = _as_float32(stored["dtype"], stored["data"])
            if numbers is None:
                raise ValueError(
                    f"{file} has {name} as {stored['dtype']}; policy.backend=fake reads F32, BF16"
                )
            weights[name] = numbers.reshape(stored["shape"])
    if not _are_finite(weights):
        raise ValueError(f"model.path={folder}: its weights are not finite")
    return model, weights


def _as_float32(element_type: str, data: bytes) -> NDArray[np.float32] | None:
    """Returns a copy of the numbers of a safetensors file; None: of another element type."""
    match element_type:
        case "F32":
            return np.frombuffer(data, "<f4").astype(np.float32)
        case "BF16":  # the upper half of a float32
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return None


def _are_finite(weights: Mapping[str, NDArray[np.float32]]) -> bool:
    return all(bool(np.isfinite(weight).all()) for weight in weights.values())


def _check(sequences: Sequence[TrainSequence]) -> None:
    check_optional_fields(sequences)
    if any(sequence.images for sequence in sequences):
        raise ValueError("sequences have images, and the model has no vision tower")


def _forward(
    model: FakeModel, weights: Weights, batch: Sequence[TrainSequence], temperature: float
) -> _Computed:
    """Computes the loss tokens of some sequences."""
    ids = [np.asarray(s.ids, dtype=np.int64) for s in batch]
    places = [s.loss_positions for s in batch]
    previous_T = np.concatenate([own[where - 1] for own, where in zip(ids, places, strict=True)])
    targets_T = np.concatenate([own[where] for own, where in zip(ids, places, strict=True)])
    embedded_TH = weights[EMBEDDING][previous_T].astype(np.float64)
    root_T1 = np.sqrt(np.square(embedded_TH).mean(1, keepdims=True) + model.norm_eps)
    scaled_TH = embedded_TH / root_T1
    head = weights[EMBEDDING if model.tied else HEAD]
    logits_TV = (scaled_TH * weights[NORM]) @ head.T / temperature
    if masks := masks_of(batch):
        logits_TV[_dropped(masks, targets_T, logits_TV.shape[1])] = _DROPPED
    logits_TV -= logits_TV.max(1, keepdims=True)
    logp_TV = logits_TV - np.log(np.exp(logits_TV).sum(1, keepdims=True))
    return _Computed(
        previous_T=previous_T,
        targets_T=targets_T,
        scaled_TH=scaled_TH,
        root_T1=root_T1,
        logp_TV=logp_TV,
        entropy_T=-(np.exp(logp_TV) * logp_TV).sum(1),
    )


def _dropped(
    masks: Sequence[bytes], targets_T: NDArray[np.int64], columns: int
) -> NDArray[np.bool_]:
    """Returns which columns the sampling masks leave out, [T, V]."""
    kept = decode(masks, columns)
    dropped_TV = np.repeat(~kept.whole_T[:, None], columns, axis=1)
    dropped_TV[kept.rows_N, kept.ids_N] = False
    dropped_TV[np.arange(len(targets_T)), targets_T] = False
    return dropped_TV


def _loss(
    batch: Sequence[TrainSequence], found: _Computed, loss: LossFn, weights_T: NDArray[np.float32]
) -> tuple[LossInputs, LossOutput, tuple[Floats, Floats]]:
    """Calls a loss; returns its gradients by the log-probabilities and by the entropies too."""
    import torch

    def leaf(values_T: Floats) -> torch.Tensor:
        return torch.tensor(values_T, dtype=torch.float32, requires_grad=True)

    def given(name: str) -> torch.Tensor | None:
        if getattr(batch[0], name) is None:
            return None
        return torch.from_numpy(np.concatenate([s.at_loss_tokens(name) for s in batch]))

    def flags(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([s.flags_at_loss_tokens(name) for s in batch]))

    logprobs_T, entropy_T = leaf(found.logprobs_T), leaf(found.entropy_T)
    rollout_T, old_T, ref_T = (given(name) for name in LOGPROB_FIELDS)
    advantages_T = given("advantages")
    assert advantages_T is not None, "every sequence has advantages"
    inputs = LossInputs(
        logprobs_T=logprobs_T,
        entropy_T=entropy_T,
        advantages_T=advantages_T,
        old_logprobs_T=logprobs_T.detach() if old_T is None else old_T,
        rollout_logprobs_T=rollout_T,
        ref_logprobs_T=ref_T,
        stale_T=flags("stale"),
        sample_lengths_S=torch.tensor([s.num_loss_tokens for s in batch]),
        selected_T=None if batch[0].selected is None else flags("selected"),
    )
    output = loss(inputs)
    (output.loss_T * torch.from_numpy(weights_T)).sum().backward()
    zero = torch.zeros_like(logprobs_T)
    gradients = [_numpy(zero if x.grad is None else x.grad) for x in (logprobs_T, entropy_T)]
    by_logprob_T, by_entropy_T = (g.astype(np.float64) for g in gradients)
    return inputs, output, (by_logprob_T, by_entropy_T)


def _numpy(values: torch.Tensor) -> NDArray[Any]:
    found: NDArray[Any] = values.detach().numpy()
    return found
