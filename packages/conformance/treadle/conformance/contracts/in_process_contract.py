# ruff: noqa: D102  (a test's name says what it shows)
"""The part of the engine contract that only an engine in the test's own process shows.

Over gRPC the server rejects such updates before the engine sees them, and outlives its clients.
An engine whose server passes the rest of the contract needs only this part in process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import Reader, request, run, stream
from treadle.conformance.contracts.update_contract import PROMPT, Torn, torn
from treadle.rollout_server.engine import FinishReason, InFlightPolicy, NamedTensor
from treadle.rollout_server.errors import TensorMismatch

_Change = Callable[[list[NamedTensor]], list[NamedTensor]]


def in_parts(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Returns the first halves of all tensors, then the second halves in reverse order."""
    heads, tails = [], []
    for tensor in tensors:
        size = tensor.spec.element_type.size_bytes
        cut = len(tensor.data) // 2 // size * size
        if cut:
            heads.append(replace(tensor, data=tensor.data[:cut], place=None))
        tails.append(replace(tensor, data=tensor.data[cut:], place=None, offset=cut))
    return heads + tails[::-1]


def _missing(tensors: list[NamedTensor]) -> list[NamedTensor]:
    return tensors[:-1]


def _unknown(tensors: list[NamedTensor]) -> list[NamedTensor]:
    first = tensors[0]
    return [*tensors, replace(first, spec=replace(first.spec, name="nowhere.weight"))]


def _renamed(tensors: list[NamedTensor]) -> list[NamedTensor]:
    first = tensors[0]
    return [replace(first, spec=replace(first.spec, name="nowhere.weight")), *tensors[1:]]


def _misshapen(tensors: list[NamedTensor]) -> list[NamedTensor]:
    first = tensors[0]
    return [replace(first, spec=replace(first.spec, shape=(1, *first.spec.shape))), *tensors[1:]]


_WRONG = (_missing, _unknown, _renamed, _misshapen)


@pytest.mark.asyncio
class InProcessContract(ContractBase):
    """The tests of this part; see `ContractBase`."""

    @pytest.mark.parametrize("wrong", _WRONG, ids=["missing", "unknown", "renamed", "misshapen"])
    async def test_a_refused_update_keeps_the_old_weights(self, wrong: _Change) -> None:
        async with self.engine() as engine:
            skip_unless(engine.info.parameters is not None, "this engine takes any tensors")
            base = engine.weight_version
            before = await run(engine, request())
            await engine.pause(InFlightPolicy.DRAIN)
            with pytest.raises(TensorMismatch):
                given = wrong(list(self.weights(1)))
                await engine.load_weights(stream(given), version=base + 3)
            await engine.resume()
            after = await run(engine, request())
        assert (after.token_ids, after.versions) == (before.token_ids, before.versions)

    async def test_a_torn_update_keeps_the_old_weights(self) -> None:
        async with self.engine() as engine:
            before = await run(engine, request())
            await engine.pause(InFlightPolicy.DRAIN)
            with pytest.raises(Torn):
                tensors = torn(self.weights(1))
                await engine.load_weights(tensors, version=engine.weight_version + 1)
            await engine.resume()
            after = await run(engine, request())
        assert (after.token_ids, after.versions) == (before.token_ids, before.versions)

    async def test_tensors_may_come_in_parts_in_place(self) -> None:
        async with self.engine(weights=1) as engine:
            wanted = await run(engine, request(PROMPT))
        async with self.engine() as engine:
            skip_unless(engine.info.capabilities.split_tensors, "this engine takes whole tensors")
            version = engine.weight_version + 1
            await engine.pause(InFlightPolicy.DRAIN)
            tensors = stream(in_parts(self.weights(1)))
            await engine.load_weights(tensors, version=version, in_place=True)
            await engine.resume()
            after = await run(engine, request(PROMPT))
        assert after.token_ids == wanted.token_ids
        assert set(after.versions) == {version}

    async def test_closing_ends_what_runs(self) -> None:
        skip_unless(self.ends, "the server outlives its tests")
        async with self.engine() as engine:
            reader = Reader(engine, request(max_tokens=self.long))
            await reader.first_tokens()
            await engine.aclose()
            output = await reader.output()
            await engine.aclose()
        assert output.reason is FinishReason.INTERRUPTED
