"""What a trajectory that ended well proves of the tools, the simulated user and the reward."""

import pytest

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    StopReason,
    ToolCall,
    ToolError,
    Trajectory,
)
from treadle.tracing import Metric
from treadle.trainer.rollout.outages import Outages, OwnCodeError, check_own_code

_ASKED = Message(role="user", content="hi")
_CALL = Message(
    role="assistant", content="", tool_calls=(ToolCall(id="1", name="search", arguments={}),)
)
_RESULT = Message(role="tool", tool_call_id="1", name="search", content="found")
_NAMELESS = Message(role="tool", tool_call_id="1", content="found")


def _ended(
    *, given: tuple[Message, ...] = (_ASKED,), then: tuple[Message, ...] = (), replies: int = 0
) -> Trajectory:
    task = AgentTask(task_id="0", sample_index=0, rollout_index=0, loop="mine", messages=given)
    return Trajectory(
        task=task,
        samples=(),
        messages=(*given, *then),
        stop=StopReason.FINISHED,
        reward=0.0,
        metrics=(Metric("interaction/replies", replies),),
    )


def test_a_bug_in_a_share_of_a_step_ends_the_run_and_every_cause_is_named() -> None:
    good = _ended()
    wrong = [
        Trajectory.failed(good.task, RewardError(f"the reward is {what}"))
        for what in ("nan", "None", "'1'")
    ]
    with pytest.raises(OwnCodeError, match=r"step 3: 3 of 11 .*share=0.25") as raised:
        check_own_code([*wrong, *[good] * 8], step=3, limit=0.25)
    assert [line.strip()[:3] for line in str(raised.value).splitlines()[1:]] == ["1 x"] * 3
    check_own_code([*wrong, *[good] * 9], step=3, limit=0.25)
    check_own_code(wrong, step=3, limit=None)
    down = [Trajectory.failed(good.task, ToolError("sandbox down"))] * 9
    check_own_code([good, *down], step=3, limit=0.25)


@pytest.mark.parametrize(
    ("trajectory", "beside_the_reward"),
    [
        (_ended(), set()),
        (_ended(given=(_ASKED, _CALL, _RESULT)), set()),
        (_ended(then=(_CALL, _RESULT)), {"tool 'search'", "a tool"}),
        (_ended(then=(_CALL, _NAMELESS)), {"a tool"}),
        (_ended(then=(_ASKED,)), {"the simulated user"}),
        (_ended(replies=1), {"the simulated user"}),
    ],
    ids=["nothing", "the row's own call", "a tool", "a nameless tool", "a reply", "the last reply"],
)
def test_only_what_was_used_has_served(trajectory: Trajectory, beside_the_reward: set[str]) -> None:
    down = dict.fromkeys(("the reward", "the simulated user", "a tool", "tool 'search'"), 3)
    outages = Outages(failures=dict(down), given_up=set(down))
    outages.count(trajectory)
    used = {"the reward", *beside_the_reward}
    assert outages.served == used
    assert set(outages.failures) == outages.given_up == set(down) - used
