from collections.abc import Sequence
from functools import partial

import pytest

from treadle.agent_loop import AgentTask, Services, SetupError, Trajectory, function_tool
from treadle.tools.rewards import WeightedRewards
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.demo import DEMO
from treadle.trainer.own_code import OwnCode, collect
from treadle.trainer.rollout.loops_from_config import prompt_rules


def _config(*overrides: str) -> Config:
    return load_config([DEMO], overrides).config


def _collect(config: Config, **given: object) -> OwnCode:
    nothing: dict[str, object] = {"reward": None, "tools": (), "loops": {}, "on_step": None}
    return collect(config, **{**nothing, **given})  # type: ignore[arg-type]


def double(number: int) -> str:
    """Doubles a number."""
    return str(2 * number)


def score(trajectory: Trajectory) -> float:
    return 1.0


def accuracy(trajectory: Trajectory) -> float:
    return 1.0


class Newest:
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [1.0 for _ in trajectories]


class Loop:
    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        raise NotImplementedError


class NeedsArguments(Loop):
    def __init__(self, size: int) -> None:
        self.size = size


def test_functions_and_tools_join_those_of_the_catalogue() -> None:
    config = _config()
    own = _collect(config, tools=[double])
    assert sorted(prompt_rules(config, own).tools) == ["calculator", "double"]
    assert _collect(config, tools=[function_tool(double)]).tools["double"].spec.name == "double"


def test_a_loop_is_given_as_a_class_or_an_object() -> None:
    config = _config()
    own = _collect(config, loops={"mine": Loop, "other": NeedsArguments(3)})
    rules = prompt_rules(config, own)
    assert isinstance(rules.loops.resolve("mine"), Loop)
    assert rules.loops.resolve("other") is own.loops["other"]


def test_an_object_is_named_by_its_class_and_a_partial_by_its_function() -> None:
    assert _collect(_config(), reward=accuracy).reward is not None  # alone it has no metric
    found = _collect(_config(), reward=[Newest(), partial(score)]).reward
    assert isinstance(found, WeightedRewards)
    assert list(found.parts) == ["Newest", "score"]


@pytest.mark.parametrize(
    ("overrides", "given", "text"),
    [
        (["reward.name=gsm8k"], {"reward": score}, "reward.name=gsm8k names another"),
        (["reward.mode=fixed"], {"reward": score}, "reward.mode=fixed"),
        (["reward.timeout_s=5"], {"reward": score}, "reward.timeout_s=5 .*path.py:function"),
        ([], {"reward": "gsm8k"}, "'gsm8k', which is not a function"),
        ([], {"reward": lambda *, one: 0.0}, r"takes \(one\); it must take"),
        ([], {"reward": []}, r"reward=\[\], which has no function"),
        ([], {"reward": [score, accuracy]}, "a reward is named 'accuracy', .* another metric"),
        (["reward.weights.scre=2"], {"reward": [score, double]}, "did you mean 'score'"),
        ([], {"tools": [double, double]}, "two tools with the name 'double'"),
        ([], {"tools": ["double"]}, "'double'; a tool is a typed function"),
        ([], {"tools": [lambda x: x]}, "has no docstring"),
        ([], {"loops": {"mine": NeedsArguments}}, "cannot be made without arguments: TypeError"),
        ([], {"loops": {"mine": score}}, "needs a method run"),
    ],
)
def test_what_a_run_cannot_use_is_refused(
    overrides: list[str], given: dict[str, object], text: str
) -> None:
    with pytest.raises(SetupError, match=text):
        _collect(_config(*overrides), **given)


def test_a_name_of_the_configuration_is_not_taken_twice() -> None:
    config = _config()

    def calculator(expression: str) -> str:
        """Calculates."""
        return expression

    with pytest.raises(SetupError, match=r"a tool 'calculator', and agent.tool_catalogue has one"):
        prompt_rules(config, _collect(config, tools=[calculator]))
    with pytest.raises(SetupError, match="'tool_agent' is already registered"):
        prompt_rules(config, _collect(config, loops={"tool_agent": Loop}))
