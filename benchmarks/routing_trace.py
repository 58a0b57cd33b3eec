"""The synthetic trace: sessions of a coding agent, as a function of a seed.

What is published is the distribution of turns of 610 recorded sessions: 5, 29, 56, 85, 99 (least,
median, 90th, 99th percentile, most). Between these points it is taken as linear. The rest is
assumed, and stated here:

* `COMMON_TOKENS` of system prompt and tool schemas, the same for all;
* tasks of 10 sessions each (a GRPO group), a task of 500 to 3,000 tokens, uniform;
* completions log-normal with a median of 150 tokens and sigma 0.8, at most 2,000;
* tool answers log-normal with a median of 300 tokens and sigma 1.0, at most 4,000;
* tools log-normal with a median of 1.5 s and sigma 1.2, at most 60 s.

A session of the median length ends with a context of about 22,000 tokens.
"""

import itertools
import math
import random

from routing_sim import Session, Turn

NUM_SESSIONS = 610
GROUP_SIZE = 10
COMMON_TOKENS = 2000
_TURNS = ((0.0, 5.0), (0.5, 29.0), (0.9, 56.0), (0.99, 85.0), (1.0, 99.0))


def make_trace(
    seed: int, *, num_sessions: int = NUM_SESSIONS, max_turns: int = 99
) -> list[Session]:
    """Returns sessions in the order in which they start: group by group."""
    rng = random.Random(seed)
    tasks = [rng.randint(500, 3000) for _ in range(math.ceil(num_sessions / GROUP_SIZE))]
    # Stratified, so that every trace has the published distribution and seeds shuffle it.
    shares = [(i + 0.5) / num_sessions for i in range(num_sessions)]
    shares[0], shares[-1] = 0.0, 1.0
    rng.shuffle(shares)
    return [
        Session(
            index=index,
            task=index // GROUP_SIZE,
            turns=tuple(
                Turn(
                    new_tokens=_lognormal(rng, 300, 1.0, 4000)
                    if turn
                    else tasks[index // GROUP_SIZE],
                    sampled_tokens=_lognormal(rng, 150, 0.8, 2000),
                    tool_s=min(60.0, rng.lognormvariate(math.log(1.5), 1.2)),
                )
                for turn in range(min(max_turns, num_turns(share)))
            ),
        )
        for index, share in enumerate(shares)
    ]


def num_turns(share: float) -> int:
    """The number of turns below which a share of the sessions lies."""
    for (low, below), (high, above) in itertools.pairwise(_TURNS):
        if share <= high:
            return round(below + (above - below) * (share - low) / (high - low))
    raise ValueError(f"share is {share}; it must be in [0, 1]")


def _lognormal(rng: random.Random, median: int, sigma: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(median), sigma))))
