"""The generator: tokens in, tokens out.

Invariant: the unit of exchange is the token id. A generator returns whole completions or
raises a `GenerationError`; it never returns part of one as if it were whole. Interruptions by a
weight update are resumed below this border, so a caller sees only longer chunk lists.

The caller waits in `generate`; cancelling that task aborts the sequence in the engine.
`treadle.agent_loop.rpc.connect` gives the real one, `treadle.agent_loop.testing` the fakes, and
`testing.generator_contract` is the suite that all of them pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, and until when.

    Attributes:
        request_id: Unique per call; 1 to 128 bytes; names it in logs and traces.
        session_id: The same for every turn of one trajectory, so that its growing prefix stays
            in one replica's cache.
        deadline: `loop.time()` seconds; `math.inf` leaves it to the generator's own bound.
        min_weight_version: Refuse to sample from weights older than this. 0: any.
        priority: Larger runs earlier. 0: ordinary.
    """

    request_id: str
    session_id: str
    deadline: float
    min_weight_version: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        size = len(self.request_id.encode())
        if not 1 <= size <= 128:
            raise ValueError(f"request_id has {size} bytes; 1 to 128 are accepted")


class TokenGenerator(Protocol):
    """Samples continuations of token prompts."""

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Samples one completion of at most `params.max_tokens` tokens.

        Args:
            prompt: [P] ids, at least one.
            params: How to sample.
            request: Who asks, and until when.
            images: What the placeholder ids in the prompt stand for, in order. A generator that
                cannot take them refuses: it never samples as if they were not there.

        Raises:
            GenerationError: The completion could not be made; the subclass says why.
        """
        ...

    def finish_session(self, session_id: str) -> None:
        """Says that no more requests of this session will come.

        Frees its place in the balance of the replicas. Idempotent, never raises, never waits.
        """
        ...
