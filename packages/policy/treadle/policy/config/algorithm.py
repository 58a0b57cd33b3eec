"""The algorithm's settings: advantages, the policy loss, and how a batch becomes updates.

Invariant: each value has one default, here; the formulas are in `treadle.policy.algorithms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from treadle.policy.config.base import Section
from treadle.policy.config.choices import LossAggregation
from treadle.policy.config.correction import CorrectionConfig

KlType = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
LossName = Literal[
    "ppo",
    "policy_gradient",
    "gspo",
    "gmpo",
    "cispo",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "distillation",
]
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)


class CovarianceConfig(Section):
    """Selects the tokens that loss=clip_cov and loss=kl_cov treat apart, by their covariance.

    It is that of advantage and log-probability over the mini-batch, and costs one more forward pass
    per update.
    """

    ratio: float = Field(default=0.0002, gt=0, le=1)
    """Share of the mini-batch's loss tokens to select, at least one token."""
    clip_low: float = 1.0
    """clip_cov: select above this covariance only."""
    clip_high: float = 5.0
    """clip_cov: select below this covariance only."""
    kl_coef: float = Field(default=0.1, ge=0)
    """kl_cov: coefficient of the penalty |log p - log p_old| of selected tokens."""


class RewardKlConfig(Section):
    """Charges each sampled token for its distance from the reference, before advantages.

    From a trajectory's reward, coef times the sum of KL(policy || reference) over its sampled
    tokens is subtracted, estimated with the probabilities at the start of the batch. Advantages per
    token see what each token costs.
    """

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the penalty; with control=adaptive, of the first step. 0: none."""
    type: KlType = "k1"
    """Estimator of the penalty. A reward has no gradient, so a + changes nothing here."""
    control: Literal["fixed", "adaptive"] = "fixed"
    """fixed: always coef. adaptive: the coefficient grows while the KL is above target, and
    shrinks below it."""
    target: float = Field(default=0.1, gt=0)
    """adaptive: the KL to keep, in nats per token."""
    horizon: float = Field(default=10000.0, gt=0)
    """adaptive: how slowly the coefficient changes, in sequences; in a step of this many it
    changes by a fifth at most."""


class AlgorithmConfig(BaseModel):
    """How a step's trajectories become advantages, a loss and updates."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    advantage: str = "grpo"
    """How rewards become advantages: dr_grpo, gae (PPO, with the critic of `critic`), gpg, grpo,
    grpo_passk, maxrl, opo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo, one that
    an installed package provides, or your own function as path.py:function or
    package.module:function."""
    norm_by_std: bool = True
    """Divide the advantage by the group's standard deviation; read by grpo and grpo_passk. With
    grpo, false is Dr. GRPO."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the return per sampled token; below 1 only with gae and reinforce_plus_plus."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """gae: weight of later temporal differences. 1: the return minus the critic's value; lower
    numbers trust the critic more. Below 1 only with gae."""
    dynamic_sampling: Literal["reward", "accuracy"] | None = None
    """Replace groups without signal by groups of further rows, as DAPO does. reward: groups whose
    rewards are all equal. accuracy: groups whose accuracies are all equal; rewards decide if a
    trajectory has no accuracy. Only with an advantage that compares the trajectories of a row,
    so not with gae, reinforce_plus_plus or remax. Null: train on all groups."""
    max_generation_batches: int = Field(default=10, ge=1)
    """Maximum number of batches of data.prompts_per_step rows that a step samples with
    dynamic_sampling. After that, groups without signal fill the step, and places are empty where
    failures left too few."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Number of optimizer steps per epoch; the batch is split into this many parts of whole
    trajectories, in order."""
    old_logprobs: Literal["policy", "rollout"] = "policy"
    """Log-probabilities in the denominator of the ratio. policy: the trainer's at the start of the
    batch (recomputed only when the batch gives more than one update). rollout: those that the
    engine reported, which also corrects the difference between engine and trainer."""
    loss: str = "ppo"
    """The policy loss: ppo, policy_gradient, gspo, gmpo, cispo, clip_cov, kl_cov, dppo_tv, dppo_kl
    or distillation, one that an installed package provides, or your own as path.py:name or
    package.module:name. docs/losses.md has the formulas."""
    loss_args: Mapping[str, JsonValue] = {}
    """Keyword arguments of your own loss, by their names."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Lower bound of the ratio: 1 - clip_low. dppo_tv, dppo_kl: bound of the divergence downwards;
    gmpo: of the log-ratio, -clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper bound of the ratio: 1 + clip_high. DAPO's clip-higher uses 0.28. dppo_tv, dppo_kl:
    bound of the divergence upwards; gmpo: of the log-ratio, clip_high."""
    clip_dual: float | None = Field(default=3.0, gt=1)
    """Maximum loss of a token with a negative advantage, as a multiple of |advantage|. Null: no
    maximum. dppo_tv, dppo_kl: maximum of the ratio as a weight. Other losses do not read it."""
    cov: CovarianceConfig = CovarianceConfig()
    """Which tokens loss=clip_cov and loss=kl_cov treat apart."""
    correction: CorrectionConfig = CorrectionConfig()
    """What to do with tokens that were sampled at another probability than the policy's."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the loss, against the reference."""
    kl_type: KlType = "k3"
    """Estimator of the KL penalty in the loss. With a +, its gradient is that of k2."""
    reward_kl: RewardKlConfig = RewardKlConfig()
    """The KL penalty in the reward, against the reference."""
    reference_path: Path | None = None
    """Model that is the reference of both KL penalties and the teacher of loss=distillation, as
    model.path takes it, of any size, with the tokenizer of the policy. Null: the weights that the
    run starts from. Either stays in memory beside the policy, where something reads it; see
    policy.offload.reference."""
    reference_addresses: tuple[str, ...] = ()
    """Rollout servers, host:port each, that hold the reference in the place of the ranks: any
    engine that reports log-probabilities of prompts, with one model and the tokenizer of the
    policy. You start and end them. They score at temperature 1, so rollout.temperature must be 1.
    Empty: see reference_path."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    loss_aggregation: LossAggregation = "token-mean"
    """How the losses of tokens are reduced to one number, over the whole mini-batch. A sequence is
    a trajectory with all its samples."""
    aggregation_length: int | None = Field(default=None, ge=1)
    """Constant divisor of loss_aggregation=seq-mean-token-sum-norm, in tokens."""

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps per batch."""
        return self.epochs * self.mini_batches

    @property
    def needs_critic(self) -> bool:
        """Whether there is a critic."""
        return self.advantage == "gae"

    @property
    def loss_needs_reference(self) -> bool:
        """Whether the loss reads `ref_logprobs`."""
        return self.kl_coef > 0 or self.loss == "distillation"

    @property
    def needs_reference(self) -> bool:
        """Whether something reads the reference."""
        return self.loss_needs_reference or self.reward_kl.coef > 0

    @property
    def keeps_reference(self) -> bool:
        """Whether the policy ranks hold the reference."""
        return self.needs_reference and not self.reference_addresses

    @model_validator(mode="after")
    def _arguments_go_with_an_own_loss(self) -> Self:
        if self.loss_args and self.loss in LOSS_NAMES:
            raise ValueError(
                f"loss_args={dict(self.loss_args)} are for a loss of your own, and "
                f"loss={self.loss} is built in: its settings are other keys of `algorithm`"
            )
        return self

    @model_validator(mode="after")
    def _a_ratio_is_corrected_once(self) -> Self:
        weighted = self.correction.weights != "none"
        if weighted and self.old_logprobs == "rollout" and self.loss != "policy_gradient":
            raise ValueError(
                f"correction.weights={self.correction.weights} with old_logprobs=rollout corrects "
                f"twice, as the ratio of loss={self.loss} is against the servers' probabilities "
                "already: set correction.weights=none, or old_logprobs=policy"
            )
        return self

    @model_validator(mode="after")
    def _discount_has_a_reader(self) -> Self:
        if self.gamma != 1 and self.advantage not in ("gae", "reinforce_plus_plus"):
            raise ValueError(
                f"gamma={self.gamma} discounts with advantage=gae or reinforce_plus_plus only, and "
                f"advantage={self.advantage}: set gamma=1, or one of these"
            )
        if self.lam != 1 and self.advantage != "gae":
            raise ValueError(
                f"lam={self.lam} weights the differences of advantage=gae, and "
                f"advantage={self.advantage}: set lam=1, or advantage=gae"
            )
        return self

    @model_validator(mode="after")
    def _the_reference_has_a_reader(self) -> Self:
        given = {
            name: value
            for name in ("reference_path", "reference_addresses")
            if (value := getattr(self, name))
        }
        if len(given) > 1:
            raise ValueError(
                f"reference_path={self.reference_path} and reference_addresses="
                f"{list(self.reference_addresses)} both name the reference: set one of them"
            )
        for name, value in given.items():
            if not self.needs_reference:
                raise ValueError(
                    f"{name}={value} is read by nothing: set kl_coef or reward_kl.coef above 0, or "
                    "loss=distillation"
                )
        return self

    @model_validator(mode="after")
    def _a_charged_reward_may_be_negative(self) -> Self:
        if self.reward_kl.coef and self.advantage == "maxrl":
            raise ValueError(
                f"reward_kl.coef={self.reward_kl.coef} makes rewards negative, and advantage=maxrl "
                "divides by their mean: put the KL in the loss (kl_coef), or choose another "
                "advantage"
            )
        return self

    @model_validator(mode="after")
    def _length_goes_with_its_mode(self) -> Self:
        by_constant = self.loss_aggregation == "seq-mean-token-sum-norm"
        if by_constant != (self.aggregation_length is not None):
            raise ValueError(
                "aggregation_length must be set with loss_aggregation=seq-mean-token-sum-norm, and"
                f" only then; got aggregation_length={self.aggregation_length} with"
                f" loss_aggregation={self.loss_aggregation}"
            )
        return self
