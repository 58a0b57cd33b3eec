"""The loss that the settings describe: a built-in one, an installed package's, or the user's own.

Invariant: a name that cannot be resolved is an error that lists the known names. Whatever the loss
is, the correction multiplies it and KL penalty and entropy bonus are added by the same code.

A package offers losses by name with an entry point of the group `treadle.losses`::

    [project.entry-points."treadle.losses"]
    sapo = "my_package.losses:sapo"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import torch
from torch import Tensor

from treadle.agent_loop import SetupError, cannot_load, load_import_path, user_place
from treadle.agent_loop.errors import did_you_mean
from treadle.policy.algorithms.correction import Corrected
from treadle.policy.algorithms.kl import kl_penalty
from treadle.policy.algorithms.losses import (
    Cispo,
    ClipCov,
    ClippedSurrogate,
    Distillation,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
)
from treadle.policy.backend import LossFn, LossInputs, LossOutput
from treadle.policy.config.algorithm import AlgorithmConfig, KlType

ENTRY_POINTS: Final = "treadle.losses"

BUILT_IN: Final[Mapping[str, Callable[[AlgorithmConfig], LossFn]]] = {
    "ppo": lambda c: ClippedSurrogate(
        clip_low=c.clip_low, clip_high=c.clip_high, clip_dual=c.clip_dual
    ),
    "policy_gradient": lambda _: PolicyGradient(),
    "gspo": lambda c: Gspo(clip_low=c.clip_low, clip_high=c.clip_high),
    "gmpo": lambda c: Gmpo(clip_low=c.clip_low, clip_high=c.clip_high),
    "cispo": lambda c: Cispo(clip_low=c.clip_low, clip_high=c.clip_high),
    "clip_cov": lambda c: ClipCov(clip_low=c.clip_low, clip_high=c.clip_high),
    "kl_cov": lambda c: KlCov(coef=c.cov.kl_coef),
    "dppo_tv": lambda c: Dppo(
        divergence="tv", clip_low=c.clip_low, clip_high=c.clip_high, clip_dual=c.clip_dual
    ),
    "dppo_kl": lambda c: Dppo(
        divergence="kl", clip_low=c.clip_low, clip_high=c.clip_high, clip_dual=c.clip_dual
    ),
    "distillation": lambda c: Distillation(clip_low=c.clip_low, clip_high=c.clip_high),
}


def policy_loss(config: AlgorithmConfig) -> LossFn:
    """Returns the loss that the settings describe, of `load_loss`."""
    loss = load_loss(config)
    if config.correction.active:
        loss = Corrected(
            loss=loss,
            config=config.correction,
            of_current_policy=config.old_logprobs == "rollout",
        )
    if config.kl_coef or config.entropy_coef:
        return _Regularized(
            loss=loss,
            kl_coef=config.kl_coef,
            kl_type=config.kl_type,
            entropy_coef=config.entropy_coef,
        )
    return loss


def load_loss(config: AlgorithmConfig) -> LossFn:
    """Returns the loss that `algorithm.loss` names, without KL and entropy.

    Raises:
        SetupError: There is none of this name, it cannot be loaded or made, or it takes something
            other than `LossInputs` and `algorithm.loss_args`.
    """
    name, given = config.loss, dict(config.loss_args)
    if name in BUILT_IN:
        return BUILT_IN[name](config)
    if ":" in name:
        return _own(name, load_import_path(name, "loss"), given)
    installed: Mapping[str, EntryPoint] = {
        point.name: point for point in entry_points(group=ENTRY_POINTS)
    }
    if name not in installed:
        known = [*BUILT_IN, *sorted(installed)]
        raise SetupError(
            f"algorithm.loss={name}: there is no such loss{did_you_mean(name, known)}; the known "
            f"ones are {', '.join(known)}, and your own is path.py:name or package.module:name"
        )
    point = installed[name]
    try:
        found = point.load()
    except Exception as error:  # a package may raise anything while it is imported
        raise cannot_load(f"the entry point {name!r} = {point.value!r}", "loss", error) from error
    return _own(name, found, given)


def check_loss(config: AlgorithmConfig) -> None:
    """Tries the loss on two tokens, so that one that cannot work fails before a run.

    Raises:
        SetupError: See `load_loss`; or it raises, or does not return one value per token.
    """
    loss, two_T = load_loss(config), torch.tensor([-1.0, -2.0])
    inputs = LossInputs(
        logprobs_T=two_T.clone().requires_grad_(),
        entropy_T=-two_T,
        advantages_T=-two_T,
        old_logprobs_T=two_T,
        rollout_logprobs_T=two_T,
        ref_logprobs_T=two_T,
        stale_T=two_T < -9.0,
        sample_lengths_S=torch.tensor([2]),
        selected_T=two_T < -1.5,
    )
    try:
        loss(inputs)
    except SetupError:
        raise
    except Exception as error:  # the user's loss may raise anything
        raise SetupError(
            f"algorithm.loss={config.loss} fails for two tokens: {_said(error)}"
        ) from error


def _own(name: str, found: Any, given: dict[str, Any]) -> LossFn:
    """Takes a function of `LossInputs`, or a class of such objects."""
    try:
        if isinstance(found, type):
            call = found(**given)
            inspect.signature(call).bind(None)
        else:
            call = partial(found, **given)
            inspect.signature(found).bind(None, **given)
    except Exception as error:  # the user's class may raise anything
        raise SetupError(
            f"algorithm.loss={name} with algorithm.loss_args={given}: {_said(error)}; a loss is a "
            "function of LossInputs, or a class whose objects are called with them, and takes "
            "loss_args by keyword"
        ) from error
    zero = bool(getattr(call, "zero_without_advantage", False))
    return _OwnLoss(name=name, call=call, zero_without_advantage=zero)


def _said(error: Exception) -> str:
    """Returns an error's type and text, and its place in the user's code."""
    place = user_place(error)
    return f"{type(error).__name__}: {error}" + ("" if place is None else f" ({place})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnLoss:
    """Checks what the user's loss returns."""

    name: str
    call: Callable[[LossInputs], LossOutput | Tensor]
    zero_without_advantage: bool

    def __call__(self, inputs: LossInputs) -> LossOutput:
        given = self.call(inputs)
        output = given if isinstance(given, LossOutput) else LossOutput(loss_T=given)
        wanted = tuple(inputs.logprobs_T.shape)
        for what, values in {"its loss": output.loss_T, **output.metrics_T}.items():
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            if shape != wanted:
                raise SetupError(
                    f"algorithm.loss={self.name} returned {shape} for {what}, and there are "
                    f"{wanted[0]} tokens: return one value per token, neither summed nor averaged"
                )
        if "actor/pg_loss" in output.metrics_T:
            return output
        metrics_T = {**output.metrics_T, "actor/pg_loss": output.loss_T.detach()}
        return LossOutput(loss_T=output.loss_T, metrics_T=metrics_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Regularized:
    """Adds `kl_coef` times the KL penalty and subtracts `entropy_coef` times the entropy."""

    loss: LossFn
    kl_coef: float
    kl_type: KlType
    entropy_coef: float

    @property
    def zero_without_advantage(self) -> bool:
        """Only the loss may be proportional to the advantage."""
        return False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        output = self.loss(inputs)
        loss_T, metrics = output.loss_T, dict(output.metrics_T)
        if self.kl_coef:
            if inputs.ref_logprobs_T is None:
                raise ValueError("kl_coef is above 0, but the sequences have no ref_logprobs")
            kl_T = kl_penalty(inputs.logprobs_T, inputs.ref_logprobs_T, self.kl_type)
            metrics["actor/kl_loss"] = kl_T.detach()
            loss_T = loss_T + self.kl_coef * kl_T
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * inputs.entropy_T
        return LossOutput(loss_T=loss_T, metrics_T=metrics)
