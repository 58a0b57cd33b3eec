"""The table of GPUs: which GPUs of which nodes the same kinds of processes use. Pure.

Nodes whose GPUs are used alike, one after another, are one entry, so that the table of a large
cluster is short.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.trainer.config.topology import Devices, Topology

__all__ = ["Block", "aligned", "blocks"]

_SHOWN_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """GPUs of a node, or the same of several nodes.

    Attributes:
        ranks: Numbers of the policy ranks on all of them, ascending.
        servers: Numbers of the rollout servers, ascending; one on GPUs of two blocks is in both.
        server_gpus: Number of GPUs of a server.
    """

    nodes: range
    gpus: range
    ranks: tuple[int, ...]
    servers: tuple[int, ...]
    server_gpus: int

    @property
    def _shape(self) -> tuple[range, int, int]:
        return self.gpus, len(self.ranks), len(self.servers)

    @property
    def where(self) -> str:
        """The nodes, in words."""
        return _span("node", self.nodes)

    @property
    def devices(self) -> str:
        """The GPUs, in words."""
        return _span("GPU", self.gpus)

    @property
    def processes(self) -> str:
        """The processes, in words."""
        parts = []
        if self.ranks:
            parts.append(_names("policy", self.ranks))
        if self.servers:
            each = f" on {self.server_gpus} GPUs" if self.server_gpus > 1 else ""
            each += " each" if each and len(self.servers) > 1 else ""
            parts.append(_names("rollout", self.servers) + each)
        return "; ".join(parts) or "not used"


def blocks(topology: Topology) -> Iterator[Block]:
    """Yields all GPUs of a topology, by node and number."""
    rank_at, server_at = _by_place(topology.ranks), _by_place(topology.servers)
    size = max((len(each.indices) for each in topology.servers), default=1)

    def used(node: int) -> Iterator[Block]:
        def kinds(gpu: int) -> tuple[bool, bool]:
            return (node, gpu) in rank_at, (node, gpu) in server_at

        for _, group in itertools.groupby(range(topology.gpus_per_node), kinds):
            gpus = list(group)
            places = [(node, gpu) for gpu in gpus]
            yield Block(
                nodes=range(node, node + 1),
                gpus=range(gpus[0], gpus[-1] + 1),
                ranks=tuple(rank_at[place] for place in places if place in rank_at),
                servers=tuple(
                    dict.fromkeys(server_at[place] for place in places if place in server_at)
                ),
                server_gpus=size,
            )

    nodes = (tuple(used(node)) for node in range(topology.nodes))
    for _, alike in itertools.groupby(nodes, lambda node: [block._shape for block in node]):
        for same in zip(*alike, strict=True):
            yield _joined(same)


def _joined(same: Sequence[Block]) -> Block:
    """Returns the same GPUs of several nodes as one block."""
    return Block(
        nodes=range(same[0].nodes.start, same[-1].nodes.stop),
        gpus=same[0].gpus,
        ranks=tuple(rank for block in same for rank in block.ranks),
        servers=tuple(server for block in same for server in block.servers),
        server_gpus=same[0].server_gpus,
    )


def aligned(table: Sequence[Block], last: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the rows of a table in two columns, as the plan has them."""
    devices = max(len(block.devices) for block in table)
    processes = max(len(block.processes) for block in table)
    for block, text in zip(table, last, strict=True):
        row = f"{block.devices:<{devices}}  {block.processes:<{processes}}  {text}"
        yield f"  {block.where}", row.rstrip()


def _by_place(every: Sequence[Devices]) -> dict[tuple[int, int], int]:
    """Returns the number of the process of each (node, GPU)."""
    return {(each.node, gpu): n for n, each in enumerate(every) for gpu in each.indices}


def _span(name: str, numbers: range) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"


def _names(name: str, numbers: Sequence[int]) -> str:
    """Returns processes by their numbers, those that follow one another as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        f"{name}-{run[0]}" if len(run) == 1 else f"{name}-{run[0]} to {name}-{run[-1]}"
        for run in runs[:_SHOWN_RUNS]
    ]
    more = sum(map(len, runs[_SHOWN_RUNS:]))
    return ", ".join(shown) + (f" and {more} more" if more else "")
