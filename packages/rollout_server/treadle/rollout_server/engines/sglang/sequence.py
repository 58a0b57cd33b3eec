"""A sequence: translates a request for SGLang, and SGLang's answers to events.

Invariant: the events are `Started`, then log-probs of the prompt if they are wanted, then every
token once and in order, then `Finished`.
SGLang's answers are cumulative, and later answers replace unread ones, so only the number of
emitted tokens is kept here. A token carries the version that sampled it, even if it is read
after the next update: `mark` records how many tokens there were before.

Pure; `engine.py` calls it on the event loop.
"""

import json
import math
import secrets
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from treadle.rollout_server.engine import (
    Constraint,
    ConstraintForm,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.constraints import structural_tag
from treadle.rollout_server.engines.sglang.sampling import to_wire
from treadle.rollout_server.errors import InvalidField

SETTINGS_KEY = "treadle"
"""Key of our settings in a request's custom parameters; see `sampling.to_wire`."""

EXPERTS_KEY = "treadle_experts"
"""Key in SGLang's meta information: for each token, the experts of the rows before it."""

MASKS_KEY = "treadle_masks"
"""Another one: for each token, its sampling mask."""

_SEED_BITS = 64
_FORMS = {
    ConstraintForm.JSON_SCHEMA: "json_schema",
    ConstraintForm.REGEX: "regex",
    ConstraintForm.GRAMMAR: "ebnf",
}


def sampling_params(request: EngineRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Returns SGLang's sampling parameters of a request: where it ends, and how we sample.

    Args:
        eos_token_ids: End-of-sequence ids of the model, which SGLang does not read itself.
    """
    sampling = request.sampling
    stops = sampling.stop_token_ids
    if not sampling.ignore_eos:
        stops |= eos_token_ids
    # Drawn here and not by the workers, which must all use the same seed.
    seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed
    return {
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sorted(stops),
        "custom_params": {SETTINGS_KEY: to_wire(sampling, seed, masked=request.sampling_mask)},
    } | ({} if request.constraint is None else _grammar(request.constraint))


def _grammar(constraint: Constraint) -> dict[str, str]:
    """Returns SGLang's parameter of a constraint; choices become a grammar."""
    if constraint.tagged is not None:
        return {"structural_tag": structural_tag(constraint.tagged)}
    if constraint.form is ConstraintForm.CHOICES:
        # JSON's escapes are those of the grammar's strings.
        texts = (json.dumps(text, ensure_ascii=False) for text in constraint.texts)
        return {"ebnf": f"root ::= {' | '.join(texts)}"}
    return {_FORMS[constraint.form]: constraint.texts[0]}


def logprob_start(request: EngineRequest) -> int:
    """Returns the first row of the prompt whose log-probs SGLang is to compute; -1: of none.

    SGLang lists them from that row's own id on, whose log-prob is missing; the next is that of the
    id that the row predicts.
    """
    return -1 if request.prompt_logprobs_from is None else request.prompt_logprobs_from - 1


def check_supported(request: EngineRequest) -> None:
    """Rejects what SGLang cannot compute.

    Raises:
        InvalidField: Log-probs are wanted of placeholders, in whose place SGLang has other ids.
    """
    wanted = request.prompt_logprobs_from
    if wanted is not None and any(image.stop > wanted for image in request.images):
        last = max(image.stop for image in request.images)
        raise InvalidField(
            "prompt_logprobs_from",
            wanted,
            f"{last} or more, after the last image: SGLang has no log-probs of placeholders",
        )


class Sequence:
    """Reads the answers to one request.

    Attributes:
        rid: SGLang's id of the request.
        interrupted: Whether we interrupted it, so an abort by SGLang is expected.
    """

    def __init__(self, request: EngineRequest, rid: str) -> None:
        self.request = request
        self.rid = rid
        self.interrupted = False
        self._submitted_at = time.monotonic()
        self._started = False
        self._num_emitted = 0
        self._marks: list[tuple[int, int]] = []

    def mark(self, count: int, version: int) -> None:
        """Records that the first `count` tokens are from `version` or older weights."""
        self._marks.append((count, version))

    def read(self, answer: dict[str, Any], version: int) -> Iterator[EngineEvent]:
        """Yields the events that an answer of SGLang adds.

        Args:
            answer: Its cumulative token ids and meta information.
            version: Version of the weights after the last mark.

        Raises:
            InvalidField: SGLang does not support the constraint. Raised before any token.
            RuntimeError: SGLang ended the sequence unexpectedly.
            FloatingPointError: A log-prob is not finite.
        """
        meta = answer["meta_info"]
        self._check_constraint(meta["finish_reason"])
        if not self._started:
            self._started = True
            # SGLang tells of a sequence with its first token.
            since_s = time.monotonic() - self._submitted_at
            yield Started(meta.get("cached_tokens", 0), since_s)
        if meta["completion_tokens"] and not self._num_emitted:
            # SGLang sends all of the prompt's with the first token.
            logprobs = tuple(entry[0] for entry in meta.get("input_token_logprobs", ())[1:])
            _check_finite(logprobs)
            if logprobs:
                yield PromptLogprobs(logprobs, self._run(version)[1])
        yield from self._tokens(answer, meta["completion_tokens"], version)
        if meta["finish_reason"] is not None:
            yield Finished(self._reason(meta["finish_reason"]))

    def _tokens(self, answer: dict[str, Any], count: int, version: int) -> Iterator[Tokens]:
        entries = answer["meta_info"].get("output_token_logprobs", ())
        # Other requests of a batch with experts, or masks, have them as None.
        asked = self.request.routed_experts_from is not None
        experts = answer["meta_info"].get(EXPERTS_KEY, ()) if asked else ()
        masks = answer["meta_info"].get(MASKS_KEY, ()) if self.request.sampling_mask else ()
        while self._num_emitted < count:
            stop, sampled_by = self._run(version)
            stop = count if stop is None else min(count, stop)
            span = slice(self._num_emitted, stop)
            logprobs = tuple(entry[0] for entry in entries[span])
            _check_finite(logprobs)
            self._num_emitted = stop
            shown = logprobs if self.request.logprobs else ()
            routed = b"".join(experts[span])
            ids = tuple(answer["output_ids"][span])
            yield Tokens(ids, shown, sampled_by, routed, tuple(masks[span]))

    def _check_constraint(self, reason: dict[str, Any] | None) -> None:
        constraint = self.request.constraint
        if constraint is None or reason is None or self.interrupted:
            return
        # Requests have been checked, so what SGLang refuses is the constraint.
        if reason["type"] == "abort" and reason.get("status_code") == HTTPStatus.BAD_REQUEST:
            expected = f"one that SGLang knows ({reason['message']})"
            raise InvalidField("constraint", f"a {constraint.form.value}", expected)

    def _run(self, version: int) -> tuple[int | None, int]:
        """Returns where the run of the next token's version ends, if it has, and that version."""
        return next((mark for mark in self._marks if self._num_emitted < mark[0]), (None, version))

    def _reason(self, reason: dict[str, Any]) -> FinishReason:
        match reason["type"]:
            case "stop":
                return FinishReason.STOP
            case "length" if self._num_emitted == self.request.sampling.max_tokens:
                return FinishReason.LENGTH
            case "abort" if self.interrupted:
                return FinishReason.INTERRUPTED
        raise RuntimeError(
            f"SGLang ended a sequence after {self._num_emitted} of "
            f"{self.request.sampling.max_tokens} tokens: {reason}"
        )


def _check_finite(logprobs: tuple[float, ...]) -> None:
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            "the model's logits are not finite: the weights are broken, load other weights"
        )
