"""Rotary positions of the ids of a sequence with images.

Positions follow multimodal rotary embedding (Wang et al. 2024, arXiv 2409.12191, 2.1): text
advances time, height and width together. An image has one time and its own rows and columns,
and the text after it continues from the larger of the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treadle.rollout_server.engines.images.reader import PlacedImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePositions:
    """Rotary positions of the ids of a sequence with images.

    Attributes:
        prompt: ``[3, prompt length]``: time, height, width.
        offset: Added to the index of an id after the prompt; its position in all three.
    """

    prompt: torch.Tensor
    offset: int

    @classmethod
    def of(cls, images: Sequence[PlacedImage], num_prompt_ids: int) -> "ImagePositions":
        """Computes the positions of a prompt."""
        positions = torch.arange(num_prompt_ids).repeat(3, 1)
        offset = done = 0
        for placed in images:
            positions[:, done : placed.start] += offset
            rows, columns = placed.grid
            begin = placed.start + offset
            inside = positions[:, placed.start : placed.stop]
            inside[0] = begin
            inside[1] = begin + torch.arange(rows).repeat_interleave(columns)
            inside[2] = begin + torch.arange(columns).repeat(rows)
            done = placed.stop
            offset = begin + max(rows, columns) - done
        positions[:, done:] += offset
        return cls(prompt=positions, offset=offset)

    def within(self, start: int, stop: int) -> torch.Tensor:
        """Returns positions ``[3, n]`` of ids ``[start, stop)``."""
        end = self.prompt.shape[1]
        after = torch.arange(max(start, end), max(stop, end)) + self.offset
        return torch.cat((self.prompt[:, start:stop], after.expand(3, -1)), dim=1)
