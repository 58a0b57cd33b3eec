"""The generator interface: tokens in, tokens out.

Invariant: the unit of exchange is the token id. A generator returns a whole completion or raises
a `GenerationError`; it never returns a partial one as if it were whole. It resumes completions
that a weight update interrupts, so the caller only sees more chunks.

The caller waits in `generate`; cancelling its task aborts the sequence in the engine.
`treadle.agent_loop.rpc.connect` returns the real generator, `treadle.agent_loop.testing` has the
fakes, and all of them pass the suite `testing.generator_contract`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import Completion, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The identity, deadline and priority of a request.

    Attributes:
        request_id: Unique per call; 1 to 128 bytes; names the call in logs and traces.
        session_id: The same for every turn of one trajectory, so that its growing prefix stays
            in one replica's cache.
        deadline: `loop.time()` seconds; `math.inf` leaves it to the generator's own bound.
        min_weight_version: Oldest weights that may sample; 0 means any.
        priority: Requests with a larger value run earlier; 0 is the default priority.
        routed_experts_from: First position of the prompt whose experts are wanted, and those of
            all rows after it; None: of none.
        prompt_logprobs_from: First id of the prompt whose log-probability is wanted, and those of
            all ids after it, 1 to P; None: of none.
        on_tokens: Called with the tokens as they arrive, for who shows them meanwhile. A generator
            that cannot report tokens early does not call it; none is reported twice or taken back,
            and those that are reported begin the completion's. An error in it fails the request.
    """

    request_id: str
    session_id: str
    deadline: float
    min_weight_version: int = 0
    priority: int = 0
    routed_experts_from: int | None = None
    prompt_logprobs_from: int | None = None
    on_tokens: Callable[[TokenChunk], None] | None = field(default=None, compare=False)

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
            images: The images that the placeholder ids in the prompt stand for, in order. A
                generator without image support must refuse them, never ignore them.

        Raises:
            GenerationError: The completion could not be made; the subclass names the cause.
        """
        ...

    def finish_session(self, session_id: str) -> None:
        """Ends a session: no more of its requests will come.

        The session no longer counts as a load of its replica. Idempotent, never raises, never
        waits.
        """
        ...
