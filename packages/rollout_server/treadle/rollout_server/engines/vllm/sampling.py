"""Translates a request's `Sampling` to vLLM's `SamplingParams`.

Invariant: pure, and does not import vLLM. The ids that end a completion are decided here, as for
every engine, and never by the files that vLLM reads from the model directory.

The sampling settings bypass vLLM and go to `sampler.py`. vLLM's own sampler applies min-p before
top-k and top-p, supports temperatures from 0.01 to 2 only, and uses a stateful generator.
"""

import secrets
from typing import Any

from treadle.rollout_server.engine import Constraint, ConstraintForm, EngineRequest, Sampling
from treadle.rollout_server.engines.constraints import structural_tag

EXTRA_ARGS_KEY = "treadle"
"""Our key in ``SamplingParams.extra_args``."""

EXPERTS_KEY = "treadle_experts"
"""Our key that marks requests for experts."""

MASK_KEY = "treadle_mask"
"""Our key that marks requests for sampling masks."""

_FORMS = {
    ConstraintForm.JSON_SCHEMA: "json",
    ConstraintForm.REGEX: "regex",
    ConstraintForm.GRAMMAR: "grammar",
}
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "seed")


def sampling_params(request: EngineRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Returns the arguments of ``SamplingParams``.

    Args:
        request: A request that `services/codec.py` has validated.
        eos_token_ids: End-of-sequence ids of the model.
    """
    sampling = request.sampling
    settings = {name: getattr(sampling, name) for name in _SAMPLING_KEYS}
    if sampling.seed is None:
        settings["seed"] = secrets.randbits(64)
    extra_args: dict[str, object] = {EXTRA_ARGS_KEY: settings}
    experts_from = request.routed_experts_from
    if experts_from is not None:
        extra_args[EXPERTS_KEY] = True
    if request.sampling_mask:
        extra_args[MASK_KEY] = True
    return {
        "max_tokens": sampling.max_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(_stop_ids(sampling, eos_token_ids)),
        "ignore_eos": True,  # The stop ids include them.
        "extra_args": extra_args,
        "routed_experts_prompt_start": (
            len(request.prompt) if experts_from is None else experts_from
        ),
        "logprobs": 0 if request.logprobs else None,  # Of the sampled id only.
        "prompt_logprobs": None if request.prompt_logprobs_from is None else 0,  # Likewise.
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Returns the arguments of ``StructuredOutputsParams``.

    vLLM masks the logits before `sampler.py` draws, so our log-probabilities are those of the
    constrained distribution.
    """
    if constraint.tagged is not None:
        return {"structural_tag": structural_tag(constraint.tagged)}
    if constraint.form is ConstraintForm.CHOICES:
        return {"choice": list(constraint.texts)}
    return {_FORMS[constraint.form]: constraint.texts[0]}


def sampling_of(extra_args: dict[str, Any]) -> Sampling:
    """Returns the settings that `sampling_params` put into ``extra_args``; others are defaults."""
    return Sampling(max_tokens=1, **extra_args[EXTRA_ARGS_KEY])


def _stop_ids(sampling: Sampling, eos_token_ids: frozenset[int]) -> frozenset[int]:
    if sampling.ignore_eos:
        return sampling.stop_token_ids
    return sampling.stop_token_ids | eos_token_ids
