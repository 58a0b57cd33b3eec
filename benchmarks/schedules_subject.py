"""The agent loop and the loss that `schedules.py` trains with: long-tailed tools, a known cost."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import replace

from treadle.agent_loop import (
    AgentTask,
    RequestContext,
    Services,
    StopReason,
    Trajectory,
    Transcript,
    derive_seed,
)
from treadle.policy.backend import LossInputs, LossOutput
from treadle.tracing import Metric

MEDIAN_S, P99_S = 1.0, 30.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263
"""Standard deviation of the logarithm of a tool's seconds; 2.3263 is the 99 % normal quantile."""
SCALE = 0.2
"""By which all times of the subject are multiplied."""
TURNS = 3
TOKENS = 12
"""At most, of a completion."""


class LongTail:
    """Samples `TURNS` completions with a tool call between them, whose times are the row's own."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """See `AgentLoop.run`."""
        assert task.seed is not None
        draw = random.Random(task.seed)
        transcript = Transcript(services.renderer.render(task.messages, tools=()).ids)
        session = f"{task.task_id}/{task.seed}"
        for turn in range(TURNS):
            if turn:
                await asyncio.sleep(SCALE * draw.lognormvariate(math.log(MEDIAN_S), SIGMA))
                transcript.observe((1,))
            request = RequestContext(
                request_id=f"{session}/{turn}",
                session_id=session,
                deadline=services.deadline,
                min_weight_version=services.min_weight_version,
            )
            params = replace(services.sampling, max_tokens=TOKENS)
            completion = await services.generator.generate(transcript.ids, params, request=request)
            transcript.sample(completion)
        services.generator.finish_session(session)
        return Trajectory(
            task=task,
            samples=(transcript.freeze(),),
            messages=task.messages,
            stop=StopReason.FINISHED,
            assistant_turns=TURNS,
            metrics=(Metric("agent_loop/assistant_turns", TURNS),),
            reward=float(derive_seed(task.seed, "reward") % 2),
        )


def costly(inputs: LossInputs, seconds: float = 0.0) -> LossOutput:
    """The plain policy gradient, in a process that is busy elsewhere for some seconds."""
    if len(inputs.logprobs_T) > TOKENS:  # it is tried on two tokens before the run
        time.sleep(seconds)
    return LossOutput(loss_T=-inputs.advantages_T * inputs.logprobs_T)
