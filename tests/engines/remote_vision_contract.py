"""The image contract, from outside, for servers of tiny vision models."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engines.tiny_vision_model import PATCH_SIZE, PLACEHOLDER, shown

from treadle.conformance.client.refusals import Refused
from treadle.conformance.contracts.image_contract import ImageContract, VisionModelContract
from treadle.conformance.contracts.reader import request, run
from treadle.conformance.contracts.remote_contract import RemoteContract
from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.engines.torch.testing.vision_model import picture


class RemoteVisionContract(RemoteContract, ImageContract, VisionModelContract):
    """Inherit, define `family`, and `ENGINE`, `MODELS` and `ARGUMENTS` in the module."""

    # On a busy machine, an engine in another process runs ahead of its reader.
    long = 600
    family: str

    def checkpoint(self, which: int) -> Path:
        assert self.target.checkpoints is not None
        return self.target.checkpoints[which]

    def pictured(self, which: int) -> tuple[tuple[int, ...], PromptImage]:
        """A prefix cache of blocks of 32 ids holds ids before the image and after it."""
        prompt, images = shown(self.family, [*range(4, 67), (5, 4, which), *range(4, 84)])
        return prompt, images[0]

    def gallery(self) -> Sequence[tuple[tuple[int, ...], tuple[PromptImage, ...]]]:
        parts: list[list[int | tuple[int, int, int]]] = [
            [5, 6, 7, 8],
            [5, 6, (3, 4, 1), 8, 9],
            [(6, 2, 2), 7, (3, 3, 3), 8],
            [5, (3, 3, 3), 7, (3, 3, 3), 8, (2, 6, 4), 9],
        ]
        return [shown(self.family, one) for one in parts]

    @pytest.mark.asyncio
    async def test_a_placeholder_that_the_model_sampled_is_text(self) -> None:
        prompt, images = shown(self.family, [5, (3, 4, 1), PLACEHOLDER, 8, PLACEHOLDER, 9])
        bare = (5, 6, PLACEHOLDER, 7)
        async with self.engine() as engine:
            seen = await run(engine, replace(request(prompt, max_tokens=6), images=images))
            text = await run(engine, request(bare, max_tokens=6))
        assert len(seen.token_ids) == len(text.token_ids) == 6

    @pytest.mark.asyncio
    async def test_what_does_not_fit_is_refused_by_name_and_the_engine_goes_on(self) -> None:
        side = 2 * PATCH_SIZE[self.family]
        prompt, (image,) = shown(self.family, [5, (3, 4, 1), 6])
        good = picture(3 * side, 4 * side, seed=1)
        wrong = {
            r"IMAGE_UNREADABLE: images\[0\] cannot be read as image/png": replace(
                image, data=good[:-60]
            ),
            r"images\[0\] has 11 placeholder ids at 2 and the model makes 12": replace(
                image, num_tokens=11
            ),
            rf"prompt_token_ids\[1\] is 248, expected {PLACEHOLDER}": replace(image, start=1),
        }
        async with self.engine() as engine:
            for message, bad in wrong.items():
                with pytest.raises(Refused, match=f"INVALID_ARGUMENT .*{message}"):
                    await run(engine, replace(request(prompt), images=(bad,)))
            output = await run(engine, replace(request(prompt, max_tokens=4), images=(image,)))
        assert len(output.token_ids) == 4
