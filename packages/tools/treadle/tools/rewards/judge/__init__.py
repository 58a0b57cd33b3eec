"""A reward by a language model: a rubric file names the model and what it is asked.

- `rubric`: reads the file: the model, the criteria, their verdicts and weights.
- `models`: asks the model, at an OpenAI-compatible address or on rollout servers.
- `verdicts`: reads a verdict from what the model answers.
- `cache`: keeps verdicts, in a file or in memory.
- `judge`: the reward.

    reward.name=rubric.yaml

docs/judges.md shows a rubric. What the policy writes is a part of what the judge reads, so a policy
may learn to persuade the judge; look at trajectories with a high reward.
"""

from treadle.tools.rewards.judge.judge import Judge, JudgeError
from treadle.tools.rewards.judge.rubric import Criterion, Rubric, read_rubric

__all__ = ["Criterion", "Judge", "JudgeError", "Rubric", "read_rubric"]
