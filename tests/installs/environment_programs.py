"""Plays one environment of another library to its end, with a scripted model; prints JSON.

python environment_programs.py LIBRARY FILE REPLY...
"""

import asyncio
import json
import sys

from treadle.agent_loop import (
    AgentTask,
    Drop,
    LoopLimits,
    LoopRegistry,
    Message,
    RolloutRunner,
    SamplingParams,
    Services,
    Trajectory,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator
from treadle.tools.environments import read_rows


async def play(path: str, replies: list[str]) -> dict[str, object]:
    """Runs the first row of an environment, opened and closed as a run does it."""
    row = next(columns for _, columns in read_rows(path))
    name = row["agent_name"]
    prompt = row["prompt"]
    assert isinstance(name, str) and isinstance(prompt, list)
    task = AgentTask(
        task_id="row-0",
        sample_index=0,
        rollout_index=0,
        loop=name,
        messages=tuple(Message(**message) for message in prompt),
        fields=row,
    )
    ended: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    loops = LoopRegistry({})
    runner = RolloutRunner(
        loops,
        Services(
            generator=ScriptedGenerator(replies),
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=20_000),
            sampling=SamplingParams(max_tokens=500, temperature=1.0),
        ),
        max_in_flight=1,
        deadline_s=300.0,
        failure_policy=Drop(),
    )
    async with loops.opened([name]):
        await runner.run([task], keep)
    (trajectory,) = ended
    return {
        "error": None if trajectory.error is None else str(trajectory.error),
        "stop": trajectory.stop.value,
        "reward": trajectory.reward,
        "players": {each.player: each.value for each in trajectory.sample_rewards},
        "samples": len(trajectory.samples),
        "sampled": [
            token
            for sample in trajectory.samples
            for token, own in zip(sample.ids, sample.loss_mask, strict=True)
            if own
        ],
        "heard": [m.content for m in trajectory.messages if m.role in ("user", "tool")],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(play(sys.argv[1], sys.argv[2:]))) + "\n")
