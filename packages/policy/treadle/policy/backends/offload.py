"""Offload: parts of a model are in host memory while nothing is computed with them.

Invariant: a part that is away has no memory on the device. It comes back bit for bit, into the same
storages: parameters and the optimizer's shards may be views of flat buffers, and all views stay
valid. A storage belongs to one part only. A computation first restores what it needs; to
read a tensor of a part that is away is undefined.

    part          of it                                           kept
    parameters    all weights, frozen ones too                    yes
    gradients     of all that is trained; they leave with the     between `add_gradient`
                  parameters                                      and `optimizer_step` only
    optimizer     its state, and float32 weights that are not     yes
                  the parameters
    reference     another model for the KL penalties              yes

Without CUDA the device is the host: everything is done all the same, and only gradients are saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from treadle.policy.client.types import OffloadReport
from treadle.policy.rank_time import spent_on

if TYPE_CHECKING:
    from treadle.policy.config.policy import OffloadConfig

OffloadPart: TypeAlias = Literal["parameters", "gradients", "optimizer", "reference"]


@dataclass(frozen=True, slots=True)
class _Away:
    """A storage whose memory was released; `copy` has its bytes, where they are kept."""

    storage: UntypedStorage
    num_bytes: int
    copy: UntypedStorage | None


class Offload:
    """Takes the parts of one model off the device, and brings them back."""

    def __init__(
        self,
        parts: Mapping[OffloadPart, Callable[[], Iterable[Tensor]]],
        held: Mapping[str, Callable[[], Iterable[Tensor]]] = MappingProxyType({}),
    ) -> None:
        """Moves nothing yet.

        Args:
            parts: How to find the tensors of each part that leaves the device. They are looked up
                at each release, and must be the same or views of the same.
            held: How to find the tensors of each kind, for `held_bytes`.
        """
        self._parts, self._held = parts, held
        self._away: dict[OffloadPart, list[_Away]] = {}
        self._release_s = self._restore_s = 0.0

    @spent_on("memory")
    def restore(self, *names: OffloadPart) -> None:
        """Brings parts back, except those that are there already or never leave."""
        began = time.perf_counter()
        for name in names:
            for each in self._away.pop(name, ()):
                each.storage.resize_(each.num_bytes)
                if each.copy is not None:
                    each.storage.copy_(each.copy)
        self._restore_s += time.perf_counter() - began

    @spent_on("memory")
    def release(self, *names: OffloadPart, keep_gradients: bool = False) -> None:
        """Takes parts off the device, except those that are away already or never leave."""
        began = time.perf_counter()
        for name in names:
            if name not in self._parts or name in self._away:
                continue
            if storages := _storages(self._parts[name]()):
                self._away[name] = [
                    _release(storage, keep=keep_gradients or name != "gradients")
                    for storage in storages
                    # Without CUDA, memory of which NumPy has a view has to stay.
                    if storage.resizable()
                ]
        self._release_s += time.perf_counter() - began

    @spent_on("memory")
    def release_all(self, *, keep_gradients: bool = False) -> None:
        """Takes all parts off the device, and gives the memory to other processes."""
        there = len(self._parts) - len(self._away)
        self.release(*self._parts, keep_gradients=keep_gradients)
        if there:
            began = time.perf_counter()
            torch.cuda.empty_cache()  # does nothing without CUDA
            self._release_s += time.perf_counter() - began

    def held_bytes(self) -> dict[str, int]:
        """Returns the bytes of each kind that are on the device."""
        return {
            kind: sum(storage.nbytes() for storage in _storages(find()))
            for kind, find in self._held.items()
        }

    def take_report(self) -> OffloadReport:
        """Returns what is away, and the seconds spent since the last report."""
        away = [each for part in self._away.values() for each in part]
        report = OffloadReport(
            release_s=self._release_s,
            restore_s=self._restore_s,
            freed_bytes=sum(each.num_bytes for each in away),
            host_bytes=sum(each.num_bytes for each in away if each.copy is not None),
        )
        self._release_s = self._restore_s = 0.0
        return report


def offload_of(
    config: OffloadConfig,
    *,
    parameters: Callable[[], Iterable[Tensor]],
    gradients: Callable[[], Iterable[Tensor]],
    state: Callable[[], Iterable[Tensor]],
    reference: Callable[[], Iterable[Tensor]] = tuple,
) -> Offload:
    """Returns the offload of a model.

    Args:
        state: The optimizer's; views of parameters are left out.
    """

    def own_state() -> Iterator[Tensor]:
        of_parameters = {storage._cdata for storage in _storages(parameters())}
        for tensor in state():
            if tensor.untyped_storage()._cdata not in of_parameters:
                yield tensor

    parts: dict[OffloadPart, Callable[[], Iterable[Tensor]]] = {}
    if config.parameters:
        parts |= {"parameters": parameters, "gradients": gradients}
    if config.optimizer:
        parts["optimizer"] = own_state
    if config.reference:
        parts["reference"] = reference
    held = {"parameters": parameters, "gradients": gradients, "optimizer": own_state}
    return Offload(parts, held)


def copied(tensor: Tensor, *, to_host: bool) -> Tensor:
    """Returns a copy of a tensor, on the device or in host memory."""
    if not to_host or not tensor.is_cuda:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach())


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the storages of some tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())


def _release(storage: UntypedStorage, *, keep: bool) -> _Away:
    num_bytes, copy = storage.nbytes(), None
    if keep:
        # Pinned, which the copies need to reach the speed of the bus; torch keeps such memory for
        # the next time.
        pinned = storage.device.type == "cuda"
        copy = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        copy.copy_(storage)
    storage.resize_(0)
    return _Away(storage, num_bytes, copy)
