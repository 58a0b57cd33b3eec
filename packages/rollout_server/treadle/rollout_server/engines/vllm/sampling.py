"""A request's `Sampling` as vLLM's `SamplingParams` take it.

Invariant: pure, and nothing here imports vLLM. Which ids end a completion is decided here,
for every engine alike, and never by what vLLM reads in the model's directory.

How a token is drawn travels past vLLM to `sampler.py`. vLLM's own sampler applies min-p before
top-k and top-p, takes temperatures from 0.01 to 2 only, and draws from a generator that
remembers what it drew before.
"""

import secrets
from typing import Any

from treadle.rollout_server.engine import EngineRequest, Sampling

EXTRA = "treadle"
"""Our key of ``SamplingParams.extra_args``."""

_DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "seed")


def translate(request: EngineRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """The arguments of ``SamplingParams``.

    Args:
        request: Checked already, see `services/codec.py`.
        eos_token_ids: Of the model.
    """
    sampling = request.sampling
    drawn_by = {name: getattr(sampling, name) for name in _DRAWN_BY}
    if sampling.seed is None:
        drawn_by["seed"] = secrets.randbits(64)
    return {
        "max_tokens": sampling.max_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(_stop_ids(sampling, eos_token_ids)),
        "ignore_eos": True,  # They are among the stop ids.
        "extra_args": {EXTRA: drawn_by},
        "logprobs": 0 if request.logprobs else None,  # Of the sampled id, and of no other.
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


def drawn_by(extra_args: dict[str, Any]) -> Sampling:
    """What `translate` sent past vLLM; the other settings are not in it."""
    return Sampling(max_tokens=1, **extra_args[EXTRA])


def _stop_ids(sampling: Sampling, eos_token_ids: frozenset[int]) -> frozenset[int]:
    if sampling.ignore_eos:
        return sampling.stop_token_ids
    return sampling.stop_token_ids | eos_token_ids
