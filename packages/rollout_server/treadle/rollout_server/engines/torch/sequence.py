"""A sequence: one request on its way through the engine.

Invariant: `ids` only grows, `num_cached <= len(ids)`, and `num_cached` positions of the
sequence's cache row hold what its first `num_cached` ids computed. Only the compute thread
touches a sequence; the event loop sees its `sink`, where events arrive in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from treadle.rollout_server.engine import EngineEvent, EngineRequest
from treadle.rollout_server.engines.torch.images import PlacedImage
from treadle.rollout_server.engines.torch.prefix import FIRST_IMAGE_KEY, prefix_key
from treadle.rollout_server.engines.torch.vision import ImagePositions

Sink = Callable[[EngineEvent | BaseException], None]
"""Takes an event on the event loop's thread."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request.

    Attributes:
        seed: The request's, or one drawn for it.
        stop_ids: The request's and, unless told to ignore them, the model's.
        images: Of the prompt, in the order of their places.
        ids: Prompt, then what was sampled.
        num_cached: How many of `ids` have their keys and values in the cache row.
        row: The cache row; None while the sequence waits and after it ended.
        epoch: Of the weights that began to fill the cache row. Once they change, the row is
            a mixture that only this sequence may use.
        positions: Where its ids stand, if that is not their index.
        vectors: Of images that are being read, by their place.
        ended: No event follows.
        unsent_ids: Sampled, not yet handed out.
    """

    request: EngineRequest
    sink: Sink
    seed: int
    stop_ids: frozenset[int]
    images: tuple[PlacedImage, ...] = ()
    ids: list[int] = field(init=False)
    prompt_key: bytes = field(init=False)
    positions: ImagePositions | None = field(init=False, default=None)
    vectors: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    num_cached: int = 0
    row: int | None = None
    epoch: int = 0
    ended: bool = False
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self.prompt_key = self.prefix_key(len(self.ids))
        if self.images:
            self.positions = ImagePositions.of(self.images, len(self.ids))

    def prefix_key(self, num_ids: int) -> bytes:
        """The key of its first ids, in which images differ as their pixels do."""
        ids = self.ids[:num_ids]
        for placed in self.images:
            key = FIRST_IMAGE_KEY + placed.picture.serial
            for place in range(placed.start, min(placed.stop, num_ids)):
                ids[place] = key
        return prefix_key(ids)

    @property
    def num_uncached(self) -> int:
        """Ids that the next steps must read: 1 while decoding, more while in the prompt."""
        return len(self.ids) - self.num_cached

    @property
    def num_sampled(self) -> int:
        """Ids sampled so far."""
        return len(self.ids) - len(self.request.prompt)
