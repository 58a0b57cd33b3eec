"""A sequence: the state of one request in the engine.

Invariant: `ids` only grows, `num_cached <= len(ids)`, and the first `num_cached` positions of
the sequence's cache row hold the keys and values of its first `num_cached` ids. Only the
compute thread touches a sequence; the event loop sees its `sink`, where events arrive in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from treadle.rollout_server.engine import EngineEvent, EngineRequest
from treadle.rollout_server.engines.images.positions import ImagePositions
from treadle.rollout_server.engines.images.reader import PlacedImage
from treadle.rollout_server.engines.torch.drafter import Drafting
from treadle.rollout_server.engines.torch.prefix_cache import FIRST_IMAGE_KEY, prefix_key

Sink = Callable[[EngineEvent | BaseException], None]
"""Receives an event on the event loop's thread."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request.

    Attributes:
        seed: The request's seed, or a random one.
        stop_ids: The request's stop ids and, unless `ignore_eos` is set, the model's.
        images: Images of the prompt, in order of position.
        ids: The prompt, then the sampled ids.
        num_cached: Number of `ids` whose keys and values are in the cache row.
        row: The cache row; None while the sequence waits and after it ended.
        epoch: Epoch of the weights that began to fill the cache row. Once the weights change,
            the row is a mixture that only this sequence may use.
        positions: Positions of its ids; None if they equal the indices.
        image_embeddings: Embeddings of images that are only partly read, by start index.
        started_at: When it got its row; seconds of the core's clock.
        prefill_s: Seconds from then to its first token; None before that.
        unsent_ids: Sampled ids that are not yet emitted.
        routed_experts: Experts of the first `num_cached` ids, as `Tokens.routed_experts`; empty
            for a model without experts.
        num_routed_sent: Position of the first row whose experts are not yet emitted.
        drafting: Its drafts; None if the engine drafts nothing, and before it has a row.
        num_scored: Position of the first id of the prompt whose log-probability is wanted and not
            yet reported; None if none are wanted.
    """

    request: EngineRequest
    sink: Sink
    seed: int
    stop_ids: frozenset[int]
    images: tuple[PlacedImage, ...] = ()
    ids: list[int] = field(init=False)
    prompt_key: bytes = field(init=False)
    positions: ImagePositions | None = field(init=False, default=None)
    image_embeddings: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    num_cached: int = 0
    row: int | None = None
    epoch: int = 0
    started_at: float = 0.0
    prefill_s: float | None = None
    ended: bool = False
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[float] = field(default_factory=list)
    unsent_masks: list[bytes] = field(default_factory=list)
    routed_experts: bytearray = field(default_factory=bytearray)
    num_routed_sent: int = field(init=False)
    drafting: Drafting | None = None
    num_scored: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self.num_routed_sent = self.request.routed_experts_from or 0
        self.num_scored = self.request.prompt_logprobs_from
        self.prompt_key = self.prefix_key(len(self.ids))
        if self.images:
            self.positions = ImagePositions.of(self.images, len(self.ids))

    def prefix_key(self, num_ids: int) -> bytes:
        """Returns the prefix key of the first ids; image serials replace placeholder ids."""
        ids = self.ids[:num_ids]
        for placed in self.images:
            key = FIRST_IMAGE_KEY + placed.image.serial
            for place in range(placed.start, min(placed.stop, num_ids)):
                ids[place] = key
        return prefix_key(ids)

    def read_again(self, epoch: int) -> None:
        """Forgets what was read of the prompt, so that the weights of `epoch` read all of it."""
        self.num_cached = 0
        self.epoch = epoch
        self.image_embeddings.clear()
        self.routed_experts.clear()

    @property
    def draft(self) -> list[int]:
        """Ids that the next pass reads after `ids`, should it sample them."""
        return [] if self.drafting is None else self.drafting.draft

    @property
    def num_uncached(self) -> int:
        """Number of ids that the next steps must read: 1 in decode, more in prefill."""
        return len(self.ids) - self.num_cached

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled so far."""
        return len(self.ids) - len(self.request.prompt)
