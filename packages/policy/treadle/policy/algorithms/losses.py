"""Losses: pure functions from one micro-batch's log-probabilities to one loss per token.

Invariant: a loss reduces nothing. The backend multiplies it by `policy/batch.py: token_weights`,
which are normalised once over the whole batch, and sums. What a loss needs of a whole sample
(GSPO, GMPO) it takes by `over_samples`: a sample is never split over micro-batches. What it needs
of the whole mini-batch (the covariances) is selected before, in `token_selection.py`.

`choose_loss.py` chooses by the settings, and adds KL, entropy and the correction. In all formulas
r = exp(log p - log p_old), clamped at exp(+-20), A is the advantage, and sg stops the gradient.

Shape suffixes: T tokens that are trained on, S samples of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from treadle.policy.backend import LossInputs, LossOutput

MAX_LOG_RATIO: Final = 20.0
MAX_LOG_SAMPLE_RATIO: Final = 10.0


def over_samples(values_T: Tensor, inputs: LossInputs, how: str) -> Tensor:
    """Returns for each token the mean, sum, min or max over the loss tokens of its sample.

    Without a gradient: a loss that needs one adds `x_T - x_T.detach()`, as `Gspo` does.
    """
    lengths_S = inputs.sample_lengths_S
    if not len(lengths_S):
        return values_T.detach()
    reduced_S = torch.segment_reduce(values_T.detach(), how, lengths=lengths_S, unsafe=True)
    # With the size given, a GPU does not stop the host to count.
    return reduced_S.repeat_interleave(lengths_S, output_size=len(values_T))


def _log_ratio(inputs: LossInputs) -> Tensor:
    return inputs.logprobs_T - inputs.old_logprobs_T


def _ratio(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _output(loss_T: Tensor, log_ratio_T: Tensor, **metrics_T: Tensor) -> LossOutput:
    return LossOutput(
        loss_T=loss_T,
        metrics_T={
            **{f"actor/{name}": values.detach().float() for name, values in metrics_T.items()},
            "actor/ppo_kl": -log_ratio_T.detach(),
            "actor/pg_loss": loss_T.detach(),
        },
    )


class _Surrogate:
    """A loss that is proportional to the advantage."""

    __slots__ = ()

    @property
    def zero_without_advantage(self) -> bool:
        """A token whose advantage is 0 has gradient 0."""
        return True


class _OfAllTokens:
    """A loss that has a gradient without an advantage too."""

    __slots__ = ()

    @property
    def zero_without_advantage(self) -> bool:
        """Every token in the mask may have a gradient."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate(_Surrogate):
    """The clipped policy-gradient objective, negated.

    - L1 = -A r and L2 = -A clip(r, 1 - low, 1 + high); the loss is max(L1, L2).
      PPO (arXiv:1707.06347), equation 7; high > low is DAPO's clip-higher (arXiv:2503.14476),
      equation 10.
    - For A < 0 the loss is at most -A c. Dual-clip PPO (arXiv:1912.09729), equation 5.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        advantages_T = inputs.advantages_T
        log_ratio_T = _log_ratio(inputs)
        ratio_T = _ratio(log_ratio_T)
        plain_T = -advantages_T * ratio_T
        clipped_T = -advantages_T * ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss_T = torch.maximum(plain_T, clipped_T)
        metrics_T = {"pg_clipfrac": clipped_T > plain_T}
        if self.clip_dual is not None:
            bound_T = -advantages_T * self.clip_dual
            over_T = (advantages_T < 0) & (loss_T > bound_T)
            metrics_T["pg_clipfrac_lower"] = over_T
            loss_T = torch.where(over_T, bound_T, loss_T)
        return _output(loss_T, log_ratio_T, **metrics_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(_Surrogate):
    """The plain policy gradient: -A log p. REINFORCE (Williams 1992); GPG (arXiv:2504.02546)."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token; the old log-probabilities are in no part of it."""
        return _output(-inputs.advantages_T * inputs.logprobs_T, _log_ratio(inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(_Surrogate):
    """Group sequence policy optimisation: the ratio and its clipping belong to a whole sample.

    s = exp(mean over the sample's tokens of log p - log p_old), at most exp(10), and
    s_t = sg(s) p_t / sg(p_t); the loss is max(-A s_t, -A clip(s_t, 1 - low, 1 + high)).
    GSPO (arXiv:2507.18071), equations 7 and 14. The paper clips at 3e-4 and 4e-4, and aggregates
    by seq-mean-token-mean.
    """

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        advantages_T, logprobs_T = inputs.advantages_T, inputs.logprobs_T
        log_ratio_T = _log_ratio(inputs)
        means_T = over_samples(log_ratio_T, inputs, "mean").clamp(max=MAX_LOG_SAMPLE_RATIO)
        ratio_T = (means_T + (logprobs_T - logprobs_T.detach())).exp()
        plain_T = -advantages_T * ratio_T
        clipped_T = -advantages_T * ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return _output(
            torch.maximum(plain_T, clipped_T), log_ratio_T, pg_clipfrac=clipped_T > plain_T
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(_Surrogate):
    """Geometric-mean policy optimisation: the mean of clipped log-ratios is a sample's log-ratio.

    With d = log p - log p_old and s = sign(A), c = s min(s d, s clip(d, -low, high)); a token's
    loss is -A exp(m + c - sg(c)), where m is the mean of c over the sample's tokens. Under
    seq-mean-token-mean, value and gradient are those of -A exp(m), the loss of a sample.
    GMPO (arXiv:2507.20673), section 3. The paper clips at 0.4 and 0.4.
    """

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        advantages_T = inputs.advantages_T
        log_ratio_T = _log_ratio(inputs)
        clamped_T = log_ratio_T.clamp(-self.clip_low, self.clip_high)
        sign_T = advantages_T.sign()
        kept_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clamped_T)
        means_T = over_samples(kept_T, inputs, "mean").clamp(max=MAX_LOG_SAMPLE_RATIO)
        loss_T = -advantages_T * (means_T + (kept_T - kept_T.detach())).exp()
        cut_T = (kept_T != log_ratio_T) & (advantages_T != 0)
        return _output(loss_T, log_ratio_T, pg_clipfrac=cut_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(_Surrogate):
    """Clipped importance weights; no token loses its gradient: -sg(clip(r)) A log p.

    MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
    """

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        log_ratio_T = _log_ratio(inputs)
        ratio_T = _ratio(log_ratio_T).detach()
        weight_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss_T = -weight_T * inputs.advantages_T * inputs.logprobs_T
        return _output(loss_T, log_ratio_T, pg_clipfrac=weight_T != ratio_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(_Surrogate):
    """Divergence PPO: a token is masked by how far its probability has moved, not by its ratio.

    The loss is -sg(min(r, c)) A log p, and 0 where the update would move the token further away
    than the bound. With p and q the token's probability now and before, the divergence is

    - tv: p - q, of all tokens: masked above `high` for A > 0, and below -`low` otherwise.
    - kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)), of the two outcomes "this token" and
      "another": masked above `high` for A > 0 where p > q, and above `low` otherwise where p < q.

    DPPO (arXiv:2602.04879), the binary approximations; c is `clip_dual`, of its section 5.4.
    """

    divergence: Literal["tv", "kl"]
    clip_low: float
    clip_high: float
    clip_dual: float | None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        advantages_T = inputs.advantages_T
        log_ratio_T = _log_ratio(inputs)
        ratio_T = _ratio(log_ratio_T).detach()
        far_up_T, far_down_T = self._far(inputs.logprobs_T.detach(), inputs.old_logprobs_T)
        masked_T = torch.where(advantages_T > 0, far_up_T, far_down_T)
        metrics_T = {"pg_clipfrac": masked_T}
        if self.clip_dual is not None:
            metrics_T["pg_clipfrac_lower"] = (ratio_T > self.clip_dual) & ~masked_T
            ratio_T = ratio_T.clamp(max=self.clip_dual)
        loss_T = -ratio_T * advantages_T * inputs.logprobs_T
        return _output(torch.where(masked_T, 0.0, loss_T), log_ratio_T, **metrics_T)

    def _far(self, logprobs_T: Tensor, old_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
        p_T, q_T = logprobs_T.exp(), old_logprobs_T.exp()
        if self.divergence == "tv":
            return p_T - q_T > self.clip_high, q_T - p_T > self.clip_low
        tiny = 1e-8  # of a probability that is 1 up to rounding
        kl_T = q_T * (old_logprobs_T - logprobs_T) + (1.0 - q_T) * torch.log(
            (1.0 - q_T + tiny) / (1.0 - p_T + tiny)
        )
        return (kl_T > self.clip_high) & (p_T > q_T), (kl_T > self.clip_low) & (p_T < q_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(_Surrogate):
    """The clipped surrogate without the selected tokens, whose covariance is in a band.

    A selected token has loss 0. Entropy mechanism (arXiv:2505.22617), section 4.2;
    `token_selection.py` selects.
    """

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        advantages_T = inputs.advantages_T
        log_ratio_T = _log_ratio(inputs)
        ratio_T = _ratio(log_ratio_T)
        plain_T = -advantages_T * ratio_T
        clipped_T = -advantages_T * ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        selected_T = _selected(inputs)
        loss_T = torch.where(selected_T, 0.0, torch.maximum(plain_T, clipped_T))
        return _output(
            loss_T, log_ratio_T, pg_clipfrac=clipped_T > plain_T, cov_selected=selected_T
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(_OfAllTokens):
    """The unclipped surrogate; the tokens of largest covariance have a penalty.

    The loss is -A r, and -A r + coef |log p - log p_old| of the selected tokens. Entropy mechanism
    (arXiv:2505.22617), section 4.2; `token_selection.py` selects.
    """

    coef: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token."""
        log_ratio_T = _log_ratio(inputs)
        selected_T = _selected(inputs)
        plain_T = -inputs.advantages_T * _ratio(log_ratio_T)
        penalty_T = self.coef * log_ratio_T.abs()
        loss_T = torch.where(selected_T, plain_T + penalty_T, plain_T)
        return _output(loss_T, log_ratio_T, cov_selected=selected_T)


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected_T is None:
        raise ValueError("the sequences have no `selected`, which this loss needs")
    return inputs.selected_T


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(_OfAllTokens):
    """On-policy distillation: the reference is the teacher, and the rewards are not read.

    The advantage of a token is sg(log p_teacher - log p), the negated estimate of the reverse
    KL(policy || teacher) at this token, discount 0; the loss is -A r. On the policy's own samples
    its expected gradient is that of the KL. Agarwal et al. (arXiv:2306.13649), with the reverse
    KL, and Thinking Machines, "On-Policy Distillation" (2025).
    """

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss of each token.

        Raises:
            ValueError: There are no reference log-probabilities.
        """
        if inputs.ref_logprobs_T is None:
            raise ValueError("the sequences have no ref_logprobs, those of the teacher")
        log_ratio_T = _log_ratio(inputs)
        ratio_T = _ratio(log_ratio_T)
        kl_T = (inputs.logprobs_T - inputs.ref_logprobs_T).detach()
        plain_T = kl_T * ratio_T
        clipped_T = kl_T * ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return _output(
            torch.maximum(plain_T, clipped_T),
            log_ratio_T,
            pg_clipfrac=clipped_T > plain_T,
            teacher_kl=kl_T,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeLogLikelihood(_OfAllTokens):
    """Supervised fine-tuning: -log p of the tokens in the loss mask. Advantages are not read."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns the loss; of `inputs` it needs only the log-probabilities."""
        return LossOutput(loss_T=-inputs.logprobs_T)
