# ruff: noqa: D102  (a test's name says what it shows)
"""The image contract: tests to inherit for every `Engine` with the images capability.

class TestMyEngineSees(ImageContract):
    @asynccontextmanager
    async def engine(self):
        ...

    def pictured(self, which):
        return prompt, PromptImage(...)
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import (
    Output,
    Reader,
    request,
    run,
    run_all,
    stream,
    update,
)
from treadle.rollout_server.engine import Engine, EngineRequest, InFlightPolicy, PromptImage


@pytest.mark.asyncio
class ImageContract(ContractBase):
    """Inherit, name the subclass `Test...`, and define `engine` and `pictured`."""

    @abstractmethod
    def pictured(self, which: int) -> tuple[tuple[int, ...], PromptImage]:
        """Returns a prompt with image 0 or 1; the ids are the same, the pixels differ.

        At least 16 ids precede the image and 32 follow it.
        """

    def wanted(self, which: int, **sampling: object) -> EngineRequest:
        prompt, image = self.pictured(which)
        values = {"temperature": 1.0, "seed": 5} | sampling
        return replace(request(prompt, **values), images=(image,))  # type: ignore[arg-type]

    async def test_the_image_decides_and_repeats(self) -> None:
        async with self.engine() as engine:
            assert engine.info.capabilities.images
            first = await run(engine, self.wanted(0))
            other = await run(engine, self.wanted(1))
            again = await run(engine, self.wanted(0))
            without = await run(engine, replace(self.wanted(0), images=()))
        assert _close(first, again)
        assert not _close(first, other)
        assert not _close(first, without)

    async def test_a_prefix_is_shared_up_to_an_image_that_differs(self) -> None:
        prompt, image = self.pictured(0)
        async with self.engine() as engine:
            await run(engine, self.wanted(0))
            other = await run(engine, self.wanted(1))
            same = await run(engine, self.wanted(0))
        async with self.engine() as fresh:
            alone = await run(fresh, self.wanted(1))
        assert 0 < other.cached_prompt_tokens <= image.start
        assert image.stop < same.cached_prompt_tokens < len(prompt)
        assert _close(other, alone)

    async def test_two_images_in_one_batch_do_not_meet(self) -> None:
        kinds = [0, 1, None, 1, 0, None]
        wanted = [
            request((3, 4, 5), temperature=1.0, seed=5) if kind is None else self.wanted(kind)
            for kind in kinds
        ]
        async with self.engine() as engine:
            readers = [Reader(engine, one) for one in wanted]
            together = [await reader.output() for reader in readers]
        async with self.engine() as fresh:
            alone = [await run(fresh, one) for one in wanted[:3]]
        for kind, output in zip(kinds, together, strict=True):
            assert _close(output, alone[2 if kind is None else kind])

    async def test_a_completion_goes_on_from_its_middle(self) -> None:
        async with self.engine() as engine:
            whole = await run(engine, self.wanted(0, max_tokens=12))
            start = self.wanted(0, max_tokens=7)
            rest = await run(engine, replace(start, prompt=start.prompt + whole.token_ids[:5]))
        assert whole.token_ids[5:] == rest.token_ids

    async def test_an_interrupted_completion_goes_on(self) -> None:
        async with self.engine() as engine:
            whole = await run(engine, self.wanted(0, max_tokens=self.long))
            reader = Reader(engine, self.wanted(0, max_tokens=self.long))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.INTERRUPT)
            begun = await reader.output()
            await engine.resume()
            start = self.wanted(0, max_tokens=self.long - len(begun.token_ids))
            rest = await run(engine, replace(start, prompt=start.prompt + begun.token_ids))
        assert 0 < len(begun.token_ids) < self.long
        assert begun.token_ids + rest.token_ids == whole.token_ids

    async def test_what_continue_kept_goes_on_as_if_nothing_had_been(self) -> None:
        async with self.engine() as engine:
            whole = await run(engine, self.wanted(0, max_tokens=self.long))
            reader = Reader(engine, self.wanted(0, max_tokens=self.long))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.CONTINUE)
            await engine.resume()
            kept = await reader.output()
        assert _close(kept, whole)

    async def test_cancelling_frees_the_sequence(self) -> None:
        async with self.engine() as engine:
            before = engine.counters.aborted
            reader = Reader(engine, self.wanted(0, max_tokens=self.long))
            await reader.first_tokens()
            await reader.abort()
            await engine.pause(InFlightPolicy.DRAIN)
            assert (engine.counters.running, engine.counters.aborted) == (0, before + 1)


@pytest.mark.asyncio
class VisionModelContract(ContractBase):
    """The model part for images: the engine computes what transformers computes.

    Needs torch, transformers and Pillow. See `ContractBase`; subclasses also define `checkpoint`
    and `gallery`.

    Attributes:
        model_tolerance: Maximum difference from transformers' log-probs in nats, for the engine's
            element type.
    """

    model_tolerance: float = 1e-4

    @abstractmethod
    def checkpoint(self, which: int) -> Path:
        """Returns the Hugging Face directory of weight set 0 or 1."""

    @abstractmethod
    def gallery(self) -> Sequence[tuple[tuple[int, ...], tuple[PromptImage, ...]]]:
        """Returns prompts of the same model with none, one and several images."""

    async def test_logprobs_are_those_of_transformers_before_and_after_updates(self) -> None:
        """Two updates, because the first may leave what the second needs."""
        async with self.engine() as engine:
            await self._fits(engine, 0)
            await update(engine, self.weights(1), engine.weight_version + 1)
            await self._fits(engine, 1)
            await update(engine, self.weights(0), engine.weight_version + 1)
            await self._fits(engine, 0)

    async def test_logprobs_are_those_of_transformers_after_an_update_in_place(self) -> None:
        async with self.engine() as engine:
            skip_unless(self.takes_in_place(engine), "this server takes no updates in place")
            await self._fits(engine, 0)
            await engine.pause(InFlightPolicy.DRAIN)
            version = engine.weight_version + 1
            await engine.load_weights(stream(self.weights(1)), version=version, in_place=True)
            await engine.resume()
            await self._fits(engine, 1)

    async def _fits(self, engine: Engine, which: int) -> None:
        """Compares all prompts, run in one batch, and then each from the prefix cache."""
        # Late: it needs torch, and the kit loads this module where there is none.
        from treadle.conformance.contracts.reference import vision_reference

        wanted = [
            replace(request(prompt, temperature=1.0, seed=5, max_tokens=12), images=images)
            for prompt, images in self.gallery()
        ]
        reference = vision_reference(self.checkpoint(which))
        first = await run_all(engine, wanted)
        second = [await run(engine, one) for one in wanted]
        for one, output, again in zip(wanted, first, second, strict=True):
            # transformers refuses a placeholder that was sampled.
            marks = {one.prompt[image.start] for image in one.images}
            stop = next((i for i, token in enumerate(output.token_ids) if token in marks), None)
            ids = output.token_ids[:stop]
            assert ids
            told = reference.logprobs(one.prompt, one.images, ids)
            assert output.logprobs[: len(ids)] == pytest.approx(told, abs=self.model_tolerance)
            assert _close(output, again)


def _close(left: Output, right: Output) -> bool:
    """Returns whether the draws are the same, up to rounding in different batches."""
    return left.token_ids == right.token_ids and left.logprobs == pytest.approx(
        right.logprobs, abs=1e-4
    )
