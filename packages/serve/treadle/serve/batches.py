"""Data of the SDK as sequences of the policy's contract, and the losses by the SDK's names.

A datum has at position i the input token x[i] and what the loss needs of the target t[i], which
follows x[:i + 1]. A sequence of the contract is the ids x[0], t[0], t[1], ..., so t[i] must be
x[i + 1]. Where it is not, the loss must not read it: its weight or advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from treadle.agent_loop import BoolArray, FloatArray, IntArray
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.settings import to_json
from treadle.serve.errors import ServiceError, refused
from treadle.serve.wire import Datum, Passes

__all__ = ["LOSSES", "PolicyPass", "make_batch"]

_MODULE: Final = "treadle.policy.algorithms.service_losses"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """A loss; `own` is its name in `treadle.policy.algorithms.service_losses`.

    Attributes:
        factors: The input that multiplies the loss of a token.
        settings: Name in the request's settings -> name of the loss's argument, and its default.
    """

    own: str
    factors: str
    settings: Mapping[str, tuple[str, float]]


def _clip(low: float, high: float) -> Mapping[str, tuple[str, float]]:
    return {"clip_low_threshold": ("low", low), "clip_high_threshold": ("high", high)}


LOSSES: Final = MappingProxyType(
    {
        "cross_entropy": _Loss(own="weighted", factors="weights", settings={}),
        "importance_sampling": _Loss(own="importance", factors="advantages", settings={}),
        "ppo": _Loss(own="clipped", factors="advantages", settings=_clip(0.8, 1.2)),
        "cispo": _Loss(own="cispo", factors="advantages", settings=_clip(0.8, 1.2)),
        "dro": _Loss(own="dro", factors="advantages", settings={"beta": ("beta", 0.05)}),
        "gspo": _Loss(own="gspo", factors="advantages", settings=_clip(1 - 3e-4, 1 + 4e-4)),
    }
)
"""By their names in the SDK."""

_REFUSED: Final = {
    "stable_reinforce": (
        "its formula is in neither the SDK nor the cookbook; set loss_fn=importance_sampling, or "
        "ppo where samples are of older weights"
    ),
    "custom": "losses that run on the server are switched off, so the SDK runs them in the client",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPass:
    """A forward or forward-and-backward pass, as the policy takes it.

    Attributes:
        loss: Its name in the SDK.
        algorithm: JSON of the policy's `algorithm`.
        factors: [N] numbers of each datum, by which the loss of a token is multiplied.
        forward_only: Whether no gradient is wanted.
    """

    loss: str
    algorithm: str
    sequences: Sequence[TrainSequence]
    factors: Sequence[NDArray[np.float32]]
    forward_only: bool

    def of_positions(self, values_M: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Returns [N] of each datum from the values of all loss tokens; 0.0 where there is none."""
        found, done = [], 0
        for sequence in self.sequences:
            values: NDArray[np.float32] = np.zeros(len(sequence.ids) - 1, np.float32)
            where = sequence.loss_positions - 1
            values[where] = values_M[done : done + len(where)]
            done += len(where)
            found.append(values)
        return found


def make_batch(passes: Passes, *, vocab_size: int, context_length: int) -> PolicyPass:
    """Returns the batch of a request.

    Raises:
        ServiceError: It cannot be computed.
    """
    if passes.loss in _REFUSED:
        raise refused(f"loss {passes.loss!r}", _REFUSED[passes.loss])
    if (loss := LOSSES.get(passes.loss)) is None:
        raise ServiceError(f"there is no loss {passes.loss!r}: use one of {', '.join(LOSSES)}")
    if passes.forward_only and passes.loss != "cross_entropy":
        raise refused(
            f"forward with loss {passes.loss!r}",
            "use cross_entropy, whose outputs are the log-probabilities that any loss reads",
        )
    if not passes.data:
        raise ServiceError("the request has no data: send at least one datum")
    made = [
        _sequence(number, datum, passes.loss, vocab_size=vocab_size, context_length=context_length)
        for number, datum in enumerate(passes.data)
    ]
    return PolicyPass(
        loss=passes.loss,
        algorithm=_algorithm(passes, loss),
        sequences=[sequence for sequence, _ in made],
        factors=[factors for _, factors in made],
        forward_only=passes.forward_only,
    )


def _algorithm(passes: Passes, loss: _Loss) -> str:
    arguments: dict[str, float] = dict(loss.settings.values())
    for name, value in passes.settings.items():
        if name not in loss.settings:
            raise ServiceError(
                f"loss {passes.loss!r} has no setting {name!r}; it has "
                f"{', '.join(loss.settings) or 'none'}"
            )
        if not isinstance(value, float) or not math.isfinite(value):
            raise ServiceError(f"{name}={value!r} of loss {passes.loss!r}: give a finite number")
        arguments[loss.settings[name][0]] = value
    return to_json(
        AlgorithmConfig(
            loss=f"{_MODULE}:{loss.own}",
            loss_args=arguments,
            loss_aggregation="token-sum",
            # What sampled is the denominator of the ratio. Cross-entropy has none.
            old_logprobs="policy" if passes.loss == "cross_entropy" else "rollout",
        )
    )


def _sequence(
    number: int, datum: Datum, name: str, *, vocab_size: int, context_length: int
) -> tuple[TrainSequence, NDArray[np.float32]]:
    """Returns a datum's sequence, and its factors."""
    tokens, targets, loss = datum.tokens, datum.inputs["target_tokens"], LOSSES[name]
    length = len(tokens)
    if not 1 <= length < context_length:
        raise ServiceError(
            f"datum {number} has {length} input tokens; give 1 to {context_length - 1}, as the "
            f"server's context is {context_length} tokens"
        )
    wanted = {loss.factors} | ({"logprobs"} if name != "cross_entropy" else set())
    optional = {"mask", "weights", *(("sequence_ratio_mask",) * (name == "gspo"))}
    inputs: dict[str, Any] = dict(datum.inputs)
    inputs.setdefault("weights", np.ones(length, np.float32))
    if missing := sorted(wanted - inputs.keys()):
        raise ServiceError(f"datum {number} has no {missing[0]}, which loss {name!r} reads: add it")
    if more := sorted(datum.inputs.keys() - wanted - optional - {"target_tokens"}):
        raise refused(
            f"input {more[0]!r} of loss {name!r} (datum {number})",
            f"leave it out; it reads {', '.join(sorted(wanted))}",
        )
    factors = np.asarray(inputs[loss.factors], np.float32)
    if "mask" in datum.inputs:
        factors = factors * (np.asarray(datum.inputs["mask"]) != 0)
    ids = np.concatenate([tokens[:1], targets]).astype(np.int64)
    logprobs = np.asarray(inputs.get("logprobs", np.zeros(length)), np.float32)
    for what, values in ((loss.factors, factors), ("logprobs", logprobs)):
        if not np.isfinite(values).all():
            raise ServiceError(
                f"datum {number} has {what} that are not finite: give finite numbers"
            )
    follows: NDArray[np.bool_] = np.ones(length, np.bool_)
    follows[:-1] = targets[:-1] == tokens[1:]
    if (wrong := np.flatnonzero(~follows & (factors != 0))).size:
        at = int(wrong[0])
        raise refused(
            f"targets other than the next input token (datum {number}, position {at}: "
            f"{targets[at]}, and the next token is {tokens[at + 1]})",
            f"send such a target as a datum of its own, or give it {loss.factors} 0",
        )
    ids[1:-1] = tokens[1:]
    used = follows
    if name == "gspo":  # its ratio is the mean over the tokens that are trained on
        averaged = np.asarray(inputs.get("sequence_ratio_mask", factors)) != 0
        if (factors[~averaged] != 0).any():
            raise ServiceError(
                f"datum {number} has advantages where its sequence_ratio_mask is 0: let the mask "
                "be 1 at every position with an advantage"
            )
        used = follows & averaged
    elif not factors[-1] and not 0 <= ids[-1] < vocab_size:
        used = follows.copy()  # a place holder behind the last token
        used[-1], ids[-1] = False, tokens[-1]
    if (wrong := np.flatnonzero((ids < 0) | (ids >= vocab_size))).size:
        raise ServiceError(
            f"datum {number} has the token {ids[wrong[0]]}; the model has ids below {vocab_size}"
        )

    def at_ids(values: NDArray[np.float32]) -> FloatArray:
        return FloatArray.of_buffer(np.concatenate([np.zeros(1, np.float32), values]).data)

    mask = np.concatenate([np.zeros(1, np.bool_), used])
    sequence = TrainSequence(
        ids=IntArray.of(ids.tolist()),
        loss_mask=BoolArray.of(mask.tolist()),
        advantages=at_ids(factors),
        rollout_logprobs=None if name == "cross_entropy" else at_ids(logprobs),
    )
    return sequence, factors
