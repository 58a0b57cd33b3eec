# ruff: noqa: D102  (a test's name says what it shows)
"""The collective part of the engine contract: broadcasts from senders to an engine's workers.

The test is the sender, so it controls which broadcasts happen and which do not.

Needs torch.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from treadle.conformance.client.refusals import Refused
from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import Output, request, run, stream
from treadle.rollout.v1 import errors_pb2
from treadle.rollout_server.engine import Engine, InFlightPolicy
from treadle.rollout_server.errors import CollectiveBroken

if TYPE_CHECKING:
    from treadle.conformance.client.collective_sender import TensorBroadcaster

PROMPT = tuple(range(1, 31))
_BROKEN = (CollectiveBroken, Refused)


@pytest.mark.asyncio
class CollectiveContract(ContractBase):
    """See `ContractBase`.

    Attributes:
        sender_host: The address of this machine as the engine's workers reach it.
    """

    sender_host: str = "127.0.0.1"

    async def test_what_a_group_brings_is_what_an_update_brings(self) -> None:
        """Updates twice through one group, because engines keep groups."""
        wanted = [await self._wanted(which) for which in (0, 1)]
        async with self.engine() as engine, self._sender(engine) as sender:
            for which in (1, 0):
                version = engine.weight_version + 1
                await engine.pause(InFlightPolicy.DRAIN)
                await self._receive(engine, sender, which, version)
                await engine.resume()
                output = await run(engine, request(PROMPT))
                assert output.token_ids == wanted[which].token_ids
                assert set(output.versions) == {version}
                assert output.cached_prompt_tokens == 0
        assert wanted[0].token_ids != wanted[1].token_ids

    async def test_a_member_that_does_not_come_ends_the_update(self) -> None:
        wanted = await self._wanted(1)
        async with self.engine() as engine:
            version = engine.weight_version + 1
            await engine.pause(InFlightPolicy.DRAIN)
            async with self._sender(engine, absent=1, timeout_s=1.0) as sender:
                with pytest.raises(_BROKEN) as caught:
                    await self._receive(engine, sender, 0, version)
            self._check_refusal(caught.value)
            await self._mend(engine, version, wanted)

    async def test_a_sender_that_leaves_in_the_middle_ends_the_update(self) -> None:
        wanted = await self._wanted(1)
        async with self.engine() as engine:
            version = engine.weight_version + 1
            await engine.pause(InFlightPolicy.DRAIN)
            # A server that does not look for the sender's failure waits this long.
            async with self._sender(engine, timeout_s=10.0) as sender:
                with pytest.raises(_BROKEN) as caught:
                    await self._receive(engine, sender, 0, version, leaves=True)
            self._check_refusal(caught.value)
            async with self._sender(engine) as sender:  # Another group, the same version.
                await self._receive(engine, sender, 1, version)
            await engine.resume()
            assert (await run(engine, request(PROMPT))).token_ids == wanted.token_ids

    async def _wanted(self, which: int) -> Output:
        async with self.engine(weights=which) as engine:
            skip_unless(engine.info.capabilities.collective, "this engine joins no groups")
            return await run(engine, request(PROMPT))

    @asynccontextmanager
    async def _sender(self, engine: Engine, **how: Any) -> AsyncIterator["TensorBroadcaster"]:
        # Late: it needs torch, and the kit loads this module where there is none.
        from treadle.conformance.client.collective_sender import TensorBroadcaster

        sender = TensorBroadcaster(
            self.weights(0), num_workers=engine.info.num_workers, host=self.sender_host, **how
        )
        try:
            yield sender
        finally:
            sender.close()

    async def _receive(
        self,
        engine: Engine,
        sender: "TensorBroadcaster",
        which: int,
        version: int,
        *,
        leaves: bool = False,
    ) -> None:
        """Updates a paused engine once through a group."""
        tensors = self.weights(which)
        specs = [tensor.spec for tensor in tensors]

        def send() -> None:
            sender.send(tensors, num_buckets=1 if leaves else None)
            if leaves:
                sender.leave("the test ends it")

        sending = asyncio.create_task(asyncio.to_thread(send))
        try:
            await engine.receive_weights(sender.group, specs, version=version)
        except _BROKEN as error:
            sender.leave("the other side failed")
            with suppress(RuntimeError):
                await sending
            self._need_reachable(error)
            raise
        await sending

    def _need_reachable(self, error: Exception) -> None:
        """Skips the test if a server with TLS refuses an unencrypted group on a network."""
        if isinstance(error, Refused) and error.refusal.reason == "INVALID_FIELD":
            detail = error.refusal.detail(errors_pb2.InvalidField)
            if detail.field == "collective.rendezvous":
                pytest.skip(f"{detail.field} is {detail.received}, expected {detail.expected}")

    def _check_refusal(self, error: Exception) -> None:
        if isinstance(error, Refused):
            found = error.refusal
            assert (found.code, found.reason) == ("NOT_FOUND", "UPDATE_UNKNOWN")

    async def _mend(self, engine: Engine, version: int, wanted: Output) -> None:
        """Checks that a whole update, with the same version, repairs the engine."""
        await engine.load_weights(stream(self.weights(1)), version=version)
        await engine.resume()
        output = await run(engine, request(PROMPT))
        assert output.token_ids == wanted.token_ids
        assert set(output.versions) == {version}
