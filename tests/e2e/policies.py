"""Policies for tests: Megatron's ranks as processes, and one that a test drives step by step."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import Message
from safetensors.torch import load_file

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import NamedTensor, TensorSpec
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.payload import specs_response
from treadle.policy.weight_sync.transports.collective import CollectiveSender
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.policy_ranks import rank_starter


class DrivenPolicy:
    """A policy of one rank in this process, over the collective transport.

    Attributes:
        before: Called with each weight's name before it is sent.
        groups: Names of the groups that were opened.
    """

    def __init__(self, path: Path) -> None:
        self.groups: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        self._tensors = load_file(path / "model.safetensors")
        self._sender = CollectiveSender(rank=0, host="127.0.0.1", device=torch.device("cpu"))

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), element_type="float32", sender=0)
            for name, tensor in self._tensors.items()
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        for name, tensor in self._tensors.items():
            self.before(name)
            yield NamedTensor(name=name, tensor=tensor)

    async def call(self, request: Message) -> Sequence[Any]:
        """As `PolicyGroup.call`."""
        match request:
            case weights_pb.GetWeightSpecsRequest():
                return [specs_response(self.weight_specs())]
            case weights_pb.OpenGroupRequest():
                self.groups.append(request.group_name)
                return [self._sender.open_group(request)]
            case weights_pb.BroadcastRequest():
                return [await asyncio.to_thread(self._sender.broadcast, self, request)]
        raise NotImplementedError(request)

    def close(self) -> None:
        """Leaves the group."""
        self._sender.close()


@asynccontextmanager
async def ranks(model_path: Path, logs: Path, config: PolicyConfig) -> AsyncIterator[PolicyGroup]:
    """Starts Megatron's ranks as processes."""
    async with (
        LocalLauncher(logs) as launcher,
        PolicyGroup(
            rank_starter(launcher, threads=1),
            config,
            model_path,
            with_reference=False,
            start_deadline_s=240.0,
        ) as group,
    ):
        yield group
