"""What a captured session has recorded: its branches, and what is counted and found."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.agent_loop.capture.branch import Branch, BranchPlan, Continuation
from treadle.agent_loop.capture.template_fit import TemplateFit
from treadle.agent_loop.loops.conversation import Turn
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.loops.sampler import TurnSampler
from treadle.agent_loop.tokens.retokenization_drift import RecordedSample, measure_drift
from treadle.agent_loop.tokens.transcript import Tokens
from treadle.agent_loop.trajectory import Finding, Trajectory
from treadle.agent_loop.types import AgentTask, Completion, FinishReason, StopReason
from treadle.tracing import Metric, Reduce

_log = logging.getLogger(__name__)
_COUNTS = (
    *(how.value for how in Continuation),
    "refused",
    "fitted",
    "tokens_past_stop",
    "constrained_tokens",
    "all_constrained",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn(Turn):
    """One completion of a captured session.

    Attributes:
        completion: Ids, log-probabilities and weight versions, as written to the ledger.
        num_prompt_tokens: Number of tokens of the prompt.
        how: How the request relates to the recorded branches.
        number: Number of the request in its session, from 0; unique.
        stop_string: The stop string that was cut off its text, if one was.
        constrained: Whether it was sampled under a constraint, and is not trained on.
        call_ids: The ids of its calls as the model wrote them; those of the message are unique.
    """

    completion: Completion
    num_prompt_tokens: int
    how: Continuation
    number: int
    stop_string: str | None = None
    constrained: bool = False
    call_ids: tuple[str, ...] = ()


class SessionRecord:
    """The completions of a session, each in its branch.

    Attributes:
        branches: In the order in which they began.
        assistant_turns: Number of completions so far.
        user_turns: Number of requests that answered a completion.
        refused: The limit that refused the latest request; None if it was answered.
    """

    def __init__(
        self, task: AgentTask, services: Services, fit: TemplateFit, sampler: TurnSampler
    ) -> None:
        self._task = task
        self._services = services
        self._fit = fit
        self._sampler = sampler
        self._counts: Counter[str] = Counter()
        self._findings: list[Finding] = []
        self.branches: list[Branch] = []
        self.assistant_turns = 0
        self.user_turns = 0
        self.refused: StopReason | None = None

    def by_age(self) -> list[Branch]:
        """Returns the branches; the one with the latest request comes last."""
        return sorted(self.branches, key=lambda branch: branch.last_request)

    def write(
        self, plan: BranchPlan, turn: CapturedTurn, *, uncut: str | None, num_past_stop: int
    ) -> None:
        """Records a completion in its branch.

        Args:
            uncut: The turn's text with the stop string, if it was cut there.
            num_past_stop: Number of tokens that were sampled after a stop string.
        """
        branch = plan.branch
        is_new = branch.last_request < 0
        branch.write(
            plan.observed,
            plan.messages,
            turn.completion,
            turn.parsed.message,
            uncut=uncut,
            call_ids=turn.call_ids,
            request=turn.number,
            trained=not turn.constrained,
            turns=plan.turns,
        )
        if is_new:
            self.branches.append(branch)
        self.assistant_turns += 1
        self.user_turns += plan.is_answer
        self.refused = None
        self._counts[plan.how.value] += 1
        self._counts["fitted"] += plan.fitted
        self._counts["constrained_tokens"] += turn.completion.num_tokens if turn.constrained else 0
        self._counts["parse_errors"] += len(turn.parsed.malformed)
        self._counts["tokens_past_stop"] += num_past_stop
        if plan.why:
            self._findings.append(Finding(kind="fork", text=f"request {turn.number}: {plan.why}"))
        self._findings.extend(
            Finding(kind="malformed_call", text=f"{bad.reason}: {bad.text:.200}")
            for bad in turn.parsed.malformed
        )

    def refuse(self, stop: StopReason) -> None:
        """Counts a request that a limit forbids."""
        self.refused = stop
        self._counts["refused"] += 1

    def samples(self) -> tuple[Tokens, ...]:
        """Returns each branch's tokens, in the order of `by_age`."""
        return tuple(branch.transcript.freeze() for branch in self.by_age())

    def trajectory(
        self, stop: StopReason | None, *, reward: float | None, metrics: Sequence[Metric]
    ) -> Trajectory:
        """Returns the trajectory; `CapturedSession.finish` has the arguments."""
        branches = self.by_age()
        recorded = [
            RecordedSample(
                tokens=b.transcript.freeze(),
                messages=self._fit.opening(b.written_messages),
                tools=b.tools,
            )
            for b in branches
            if not b.by_ids
        ]
        drift = measure_drift(recorded, self._services.renderer)
        samples = self.samples()
        self._note_untrained(samples)
        return Trajectory(
            task=self._task,
            samples=samples,
            messages=tuple(branches[-1].messages),
            stop=stop or self._natural_stop(branches[-1]),
            assistant_turns=self.assistant_turns,
            user_turns=self.user_turns,
            reward=reward,
            metrics=(*self._metrics(), *drift.metrics, *metrics),
            findings=(*self._findings, *drift.findings),
        )

    def _note_untrained(self, samples: Sequence[Tokens]) -> None:
        """Says so if all turns were sampled under constraints."""
        tokens = self._counts["constrained_tokens"]
        if not tokens or any(sample.num_sampled_tokens for sample in samples):
            return
        self._counts["all_constrained"] = 1
        text = (
            f"all {self.assistant_turns} turns ({tokens} tokens) were sampled under a constraint: "
            "nothing of this trajectory is trained on"
        )
        self._findings.append(Finding(kind="all_constrained", text=text))
        _log.warning("session %s: %s", self._sampler.session_id, text)

    def _natural_stop(self, last: Branch) -> StopReason:
        if self.refused is not None:
            return self.refused
        if last.finish is FinishReason.STOP:
            return StopReason.FINISHED
        stop = self._services.limits.length_stop(
            prompt=last.transcript.num_prompt_tokens, response=last.transcript.num_response_tokens
        )
        return stop or StopReason.TURN_LENGTH

    def _metrics(self) -> tuple[Metric, ...]:
        failed = self._sampler.num_requests - self.assistant_turns
        counts = (Metric(f"capture/{name}", self._counts[name], Reduce.SUM) for name in _COUNTS)
        return (
            Metric("agent_loop/generate_s", self._sampler.generate_s, Reduce.MEAN),
            Metric("agent_loop/interruptions", self._sampler.num_interruptions, Reduce.SUM),
            Metric("agent_loop/assistant_turns", self.assistant_turns, Reduce.MEAN),
            Metric("agent_loop/user_turns", self.user_turns, Reduce.MEAN),
            Metric("tool/parse_errors", self._counts["parse_errors"], Reduce.SUM),
            Metric("capture/failed", failed, Reduce.SUM),
            Metric("capture/samples", len(self.branches), Reduce.MEAN),
            *counts,
        )
