"""The checkpoint: weights, optimizer state and step of the policy, readable by any parallel sizes.

Invariant: a checkpoint directory is complete or does not exist. It is written under a temporary
name, and rank 0 renames it when every rank has written its part. A failure on any rank fails on all
ranks with the same message and leaves earlier checkpoints untouched.

The format is Megatron's `torch_dist`: every tensor is stored by its name and its place in the
whole, so all parallel sizes may differ at loading. The optimizer state has the same names under
Megatron's plain and its distributed optimizer, so that may change too.
Nothing in the policy draws random numbers and the learning rate is a function of the step, so the
step counter is the only state besides tensors.

With LoRA a checkpoint has the adapters only, and a checksum of the weights below them, which are
those of the model that training started from.

Tensors are written by `torch.distributed.checkpoint` in the calling thread. Megatron's own writer
forks, which a process that also speaks gRPC must not do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from treadle.policy.backend import CheckpointError
from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.lora.linears import is_adapter
from treadle.policy.backends.ranks import check_identity, explain, write_directory
from treadle.policy.client.types import NamedTensor, TensorSpec

device.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.core import (  # noqa: E402
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import apply_factories  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor  # noqa: E402
from megatron.core.dist_checkpointing.serialization import save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as torch_dist  # noqa: E402
from megatron.core.dist_checkpointing.utils import (  # noqa: E402
    extract_sharded_tensors_and_factories,
)

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.optimizer import PolicyOptimizer
    from treadle.policy.backends.megatron.parallel import World

_TENSORS: Final = ("param", "exp_avg", "exp_avg_sq")
_COMMON: Final = "common.pt"  # Megatron's name, which its `load` reads too


class PolicyState:
    """The policy's tensors as named parts of a whole, to be written or to be filled."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        architecture: Architecture,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        """Names the objects; their tensors are looked up when needed.

        Args:
            adapter: With LoRA what the adapter must fit, by the name that an error gives it.
        """
        self._model = model
        self._optimizer = optimizer
        self._adapters_only = adapter is not None
        # Settings at their defaults are left out: a checkpoint written before there was one fits.
        defaults = {field.name: field.default for field in fields(architecture)}
        chosen = {k: v for k, v in asdict(architecture).items() if v != defaults[k]}
        self.identity: dict[str, Any] = {**chosen, **(adapter or {})}
        """The settings that a checkpoint must have been written with."""

    def sharded(self, *, loading: bool) -> dict[str, Any]:
        """Megatron's sharded state dict of model and optimizer; collective when not loading."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self._model.sharded_state_dict(metadata=metadata)
        if self._adapters_only:
            model = {name: part for name, part in model.items() if is_adapter(name)}
        if self._optimizer.distributed:
            states = (
                part.sharded_param_state_fully_reshardable(model, loading, metadata)
                for part in self._optimizer.parts
            )
            # A stage without experts has an optimizer of none.
            optimizer = {number: state for number, state in enumerate(states) if state}
        else:
            optimizer = self._plain_optimizer_state(model)
        return {"model": model, "optimizer": optimizer}

    @property
    def adam_steps(self) -> int:
        """See `PolicyOptimizer.adam_steps`."""
        return self._optimizer.adam_steps

    @torch.no_grad()
    def fill(self, loaded: dict[str, Any], *, adam_steps: int) -> None:
        """Takes over what was read into the structure that `sharded(loading=True)` gave."""
        self._model.load_state_dict(loaded["model"], strict=not self._adapters_only)
        if self._optimizer.distributed:
            # Megatron copies every entry of Adam's state, but stores no "step" (that is torch's).
            for state in self._optimizer.adam_state.values():
                del state["step"]
            for number, state in loaded["optimizer"].items():
                self._optimizer.parts[number].load_parameter_state_from_fully_reshardable(state)
        else:
            of_tensor = self._optimizer.adam_state
            for number, parameter in enumerate(self._trained()):
                main = self._main(parameter)
                state = of_tensor[main]
                for name, target in zip(
                    _TENSORS, (main, state["exp_avg"], state["exp_avg_sq"]), strict=True
                ):
                    target.copy_(loaded["optimizer"][number][name])
        self._optimizer.adam_steps = adam_steps

    def _plain_optimizer_state(self, model: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Returns undistributed state under the distributed optimizer's names and shapes."""
        parts, _ = extract_sharded_tensors_and_factories(model)
        by_parameter = {id(part.data): part for part in nested_values(parts)}
        of_tensor = self._optimizer.adam_state
        result: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self._trained()):
            main = self._main(parameter)
            state = of_tensor[main]
            result[number] = {
                name: make_sharded_optimizer_tensor(
                    by_parameter[id(parameter)], tensor, prefix=f"optimizer.state.{name}"
                )
                for name, tensor in zip(
                    _TENSORS, (main, state["exp_avg"], state["exp_avg_sq"]), strict=True
                )
            }
        return result

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (p for p in self._model.parameters() if p.requires_grad)

    @staticmethod
    def _main(parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns what Adam updates: a bfloat16 parameter's float32 copy, else the parameter."""
        main: torch.Tensor = getattr(parameter, "main_param", parameter)
        return main


def save(state: PolicyState, directory: Path, *, step: int, world: World) -> None:
    """Writes a checkpoint; collective.

    Args:
        directory: Made by this call, on a file system that all ranks see.

    Raises:
        CheckpointError: `directory` exists, or some rank could not write; on every rank.
    """
    common = {
        "step": step,
        "adam_steps": state.adam_steps,
        "architecture": state.identity,
    }

    sharded, _ = save_preprocess(state.sharded(loading=False))

    def finish(building: Path) -> None:
        torch.save(common, building / _COMMON)
        save_config(CheckpointingConfig("torch_dist", 1), str(building))

    write_directory(
        directory, lambda place: _write_tensors(sharded, place), finish, first=world.rank == 0
    )


def load(state: PolicyState, directory: Path) -> int:
    """Fills `state` from a checkpoint; collective.

    Returns:
        The step it was written at.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another architecture.
    """
    if not (directory / "metadata.json").is_file():
        raise CheckpointError(f"{directory} holds no complete checkpoint")
    common = _load_common(directory)
    check_identity(directory, common["architecture"], state.identity)
    try:
        loaded = dist_checkpointing.load(state.sharded(loading=True), str(directory))
    except (CheckpointException, CheckpointingException) as error:
        raise CheckpointError(f"{directory} is damaged: {explain(error)}") from error
    state.fill(loaded, adam_steps=common["adam_steps"])
    return int(common["step"])


def _load_common(directory: Path) -> dict[str, Any]:
    """Returns what all ranks share: step, Adam's steps and architecture."""
    path = directory / _COMMON
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        common: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from error
    return common


def collect(
    mine: Iterator[NamedTensor], specs: Sequence[TensorSpec], world: World
) -> Iterator[NamedTensor]:
    """On rank 0 the tensors of all stages; other ranks send theirs and yield nothing."""
    own = {spec.name for spec in specs if spec.sender == world.rank}
    for item in mine:
        if item.name not in own:
            continue
        if world.rank == 0:
            yield item
        else:
            dist.send(item.tensor.contiguous(), dst=0)
    if world.rank == 0:
        for spec in specs:
            if spec.sender != 0:
                dtype: torch.dtype = getattr(torch, spec.element_type)
                tensor = torch.empty(spec.shape, dtype=dtype, device=device.device())
                dist.recv(tensor, src=spec.sender)
                yield NamedTensor(name=spec.name, tensor=tensor)


def _write_tensors(sharded: dict[str, Any], directory: Path) -> None:
    """Collective; an error on one rank is raised by torch on all."""
    apply_factories(sharded)
    by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, True)
    save_tensors(
        torch_dist.mcore_to_pyt_state_dict(by_key, False),
        storage_writer=FileSystemWriter(directory, thread_count=1, sync_files=True),
        planner=torch_dist.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        ),
    )
