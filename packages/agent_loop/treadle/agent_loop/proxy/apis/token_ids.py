"""vLLM's `/inference/v1/generate`: ids in, ids out, for clients that render chats themselves.

verifiers' training client speaks it. Invariant: as in `chat_request`: pure, and nothing is ignored
silently. The answer has the sampled ids, with the log-probabilities of the distribution that they
were drawn from. It is never a stream.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from treadle.agent_loop.capture import CapturedTurn
from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.apis.common import (
    AgentRequest,
    integer,
    number,
    same,
    show,
    stop_strings,
)
from treadle.agent_loop.proxy.errors import bad_value, unsupported
from treadle.agent_loop.proxy.messages import is_absent, read_given

_NO_EFFECT = ("model", "request_id", "cache_salt")
_COUNTED = ("priority", "sampling_params.routed_experts_prompt_start")
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "stream": (False,),
        "return_token_ids": (True, False),
        "sampling_params.logprobs": (0, 1),
        "sampling_params.top_k": (-1, 0),
        "sampling_params.min_p": (0,),
        "sampling_params.min_tokens": (0,),
        "sampling_params.repetition_penalty": (1,),
        "sampling_params.frequency_penalty": (0,),
        "sampling_params.presence_penalty": (0,),
        "sampling_params.ignore_eos": (False,),
        "sampling_params.skip_special_tokens": (True, False),
        "sampling_params.detokenize": (True, False),
    }
)
_USED = (
    *("token_ids", "sampling_params"),
    *(f"sampling_params.{name}" for name in ("max_tokens", "temperature", "top_p", "seed", "n")),
    *("sampling_params.stop", "sampling_params.stop_token_ids"),
)


def read_token_request(body: bytes, allowed: Allowances) -> AgentRequest:
    """Parses a request's body.

    Args:
        allowed: Counts what is ignored in the request.

    Raises:
        ApiError: The request cannot be answered; the message names the cause.
    """
    given = read_given(body)
    params = given.get("sampling_params", {})
    if not isinstance(params, dict):
        raise bad_value("sampling_params", "it must be an object")
    params = {key: value for key, value in params.items() if value is not None}
    for name, value in given.items():
        _check(name, value, allowed)
    for name, value in params.items():
        _check(f"sampling_params.{name}", value, allowed)
    prompt = _ids(given.get("token_ids"), "token_ids")
    if not prompt:
        raise bad_value("token_ids", "it must have at least one id")
    return AgentRequest(
        messages=(),
        prompt_ids=prompt,
        stop_token_ids=_ids(params.get("stop_token_ids", []), "sampling_params.stop_token_ids"),
        max_tokens=integer(params, "max_tokens", low=1, high=2**31 - 1),
        temperature=number(params, "temperature", low=0.0, high=100.0),
        top_p=number(params, "top_p", low=0.0, high=1.0, open_low=True),
        seed=integer(params, "seed", low=0, high=2**63 - 1),
        stop=stop_strings(params.get("stop", []), "sampling_params.stop"),
        n=integer(params, "n", low=1, high=128) or 1,
    )


def _check(name: str, value: object, allowed: Allowances) -> None:
    if name in _USED or name in _NO_EFFECT or is_absent(value):
        return
    if name in _COUNTED:
        allowed.unread_key(name)
    elif name not in _NEUTRAL:
        raise unsupported(name, "this is not supported; leave it out")
    elif not any(same(value, neutral) for neutral in _NEUTRAL[name]):
        accepted = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL[name])
        raise unsupported(name, f"{show(value)} is not supported; leave it out, or set {accepted}")


def _ids(value: object, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value
    ):
        raise bad_value(place, "it must be a list of token ids")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer:
    """Writes the answer; a `WholeAnswer`."""

    id: str
    request: AgentRequest

    def whole(self, turns: Sequence[CapturedTurn]) -> dict[str, object]:
        """Returns the JSON object of the answer."""
        return {
            "request_id": self.id,
            "choices": [_choice(index, turn) for index, turn in enumerate(turns)],
            "prompt_token_ids": list(self.request.prompt_ids),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }


def _choice(index: int, turn: CapturedTurn) -> dict[str, object]:
    logprobs: list[dict[str, object]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for chunk in turn.completion.chunks
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": list(turn.completion.token_ids),
        "logprobs": {"content": logprobs},
        "finish_reason": turn.finish.value,
    }
