"""A sequence: one request as SGLang takes it, and SGLang's answers as events.

Invariant: what is yielded is `Started`, then every token once and in order, then `Finished`.
SGLang's answers are cumulative, and answers that nobody read yet are replaced by later ones,
so only the number of tokens already given out is kept here. A token carries the version that
sampled it, even when it is read after the next update: `mark` says how many were there before.

Pure; `engine.py` feeds it on the event loop.
"""

import math
import secrets
from collections.abc import Iterator
from typing import Any

from treadle.rollout_server.engine import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.sglang.sampling import to_wire

SETTINGS_KEY = "treadle"
"""Of our settings among the request's own parameters; see `sampling.to_wire`."""

_SEED_BITS = 64


def sampling_params(request: EngineRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """What SGLang is told of a request's sampling: where to end, and how we draw.

    Args:
        request: What was asked for.
        eos_token_ids: The model's; SGLang itself is told of none.
    """
    sampling = request.sampling
    stops = sampling.stop_token_ids
    if not sampling.ignore_eos:
        stops |= eos_token_ids
    # Drawn here and not by the workers, which must all draw the same.
    seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed
    return {
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sorted(stops),
        "custom_params": {SETTINGS_KEY: to_wire(sampling, seed)},
    }


class Sequence:
    """Reads the answers to one request.

    Attributes:
        request: What was asked for.
        rid: SGLang's name of it.
        interrupted: Whether it was told to end, so that an abort is what was wanted.
    """

    def __init__(self, request: EngineRequest, rid: str) -> None:
        self.request = request
        self.rid = rid
        self.interrupted = False
        self._started = False
        self._given = 0
        self._marks: list[tuple[int, int]] = []

    def mark(self, count: int, version: int) -> None:
        """Says that of all its tokens those up to `count` are from `version` or older ones."""
        self._marks.append((count, version))

    def read(self, answer: dict[str, Any], version: int) -> Iterator[EngineEvent]:
        """The events that an answer of SGLang adds.

        Args:
            answer: Its cumulative ids and their meta information.
            version: Of the weights after the last mark.

        Raises:
            RuntimeError: SGLang ended the sequence for a reason of its own.
            FloatingPointError: A log-prob is not finite.
        """
        meta = answer["meta_info"]
        if not self._started:
            self._started = True
            yield Started(meta.get("cached_tokens", 0))
        yield from self._tokens(answer, meta["completion_tokens"], version)
        if meta["finish_reason"] is not None:
            yield Finished(self._reason(meta["finish_reason"]))

    def _tokens(self, answer: dict[str, Any], count: int, version: int) -> Iterator[Tokens]:
        entries = answer["meta_info"].get("output_token_logprobs", ())
        while self._given < count:
            stop, sampled_by = count, version
            for mark, marked in self._marks:
                if self._given < mark:
                    stop, sampled_by = min(count, mark), marked
                    break
            span = slice(self._given, stop)
            logprobs = tuple(entry[0] for entry in entries[span])
            if not all(map(math.isfinite, logprobs)):
                raise FloatingPointError(
                    "the model's logits are not finite: the weights are broken, start again "
                    "with others"
                )
            self._given = stop
            shown = logprobs if self.request.logprobs else ()
            yield Tokens(tuple(answer["output_ids"][span]), shown, sampled_by)

    def _reason(self, reason: dict[str, Any]) -> FinishReason:
        match reason["type"]:
            case "stop":
                return FinishReason.STOP
            case "length" if self._given == self.request.sampling.max_tokens:
                return FinishReason.LENGTH
            case "abort" if self.interrupted:
                return FinishReason.INTERRUPTED
        raise RuntimeError(
            f"SGLang ended a sequence after {self._given} of "
            f"{self.request.sampling.max_tokens} tokens: {reason}"
        )
