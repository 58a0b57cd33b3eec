from pathlib import Path

import pytest

from treadle.agent_loop import SetupError, SingleTurnLoop, TruncateSide
from treadle.agent_loop.testing import ScriptedTool
from treadle.tools.interactions import Gsm8kInteraction
from treadle.tracing import Reduce
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.own_code import collect
from treadle.trainer.rollout.loops_from_config import loop_limits, prompt_rules

_LOOP = "treadle.agent_loop:SingleTurnLoop"


def config(*overrides: str) -> Config:
    return load_config([], ["model.path=m", "data.train_files=t.jsonl", *overrides]).config


def test_loops_of_the_configuration_stand_beside_ours() -> None:
    loops = prompt_rules(config(f"agent.loops.mine={_LOOP}", "agent.default_loop=mine")).loops
    assert {"mine", "single_turn_agent", "tool_agent"} <= set(loops.names)
    assert isinstance(loops.resolve("mine"), SingleTurnLoop)


class Counted(SingleTurnLoop):
    """Counts its instances."""

    made = 0

    def __init__(self) -> None:
        Counted.made += 1


def test_each_loop_is_made_once() -> None:
    target = f"{__name__}:Counted"
    rules = prompt_rules(config(f"agent.loops.a={target}", f"agent.loops.b={_LOOP}"))
    assert type(rules.loops.resolve("a")).__name__ == "Counted"
    assert type(rules.loops.resolve("a")).made == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "agent.loops.mine=no.such:Loop",
            "agent.loops.mine=no.such:Loop: .*no such module",
        ),
        (f"agent.loops.tool_agent={_LOOP}", "agent.loops.tool_agent=.*is already registered"),
        (
            "agent.default_loop=tool_agnt",
            "agent.default_loop=tool_agnt: .*registered agent loops: ",
        ),
        ("agent.tool_catalogue=none.yaml", "cannot read the tool catalogue"),
        ("agent.interaction_catalogue=none.yaml", "cannot read the interaction catalogue"),
    ],
)
def test_what_is_not_there_is_named_with_its_key(override: str, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        prompt_rules(config(override))


class _Asks(ScriptedTool):
    def __init__(self, name: str, rule: Reduce) -> None:
        super().__init__(name)
        self.metric_rules = {"asked": rule}


def test_tools_that_report_one_metric_under_two_rules_are_told_at_start() -> None:
    tools = (_Asks("a", Reduce.SUM), _Asks("b", Reduce.MEAN))
    own = collect(config(), reward=None, tools=tools, loops={}, on_step=None)
    with pytest.raises(SetupError, match="'asked' is combined by SUM as tool 'a' reports it, and"):
        prompt_rules(config(), own)


def test_interactions_are_read_from_verls_file(tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    name = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    file.write_text(f"interaction: [{{name: gsm8k, class_name: {name}}}]")
    rules = prompt_rules(config(f"agent.interaction_catalogue={file}"))
    assert isinstance(rules.interactions["gsm8k"], Gsm8kInteraction)


def test_limits_are_those_of_the_configuration() -> None:
    limits = loop_limits(
        config(
            "rollout.prompt_length=10",
            "rollout.response_length=20",
            "agent.max_tool_response_chars=null",
            "agent.max_tool_response_tokens=7",
            "agent.tool_response_truncate_side=left",
            "agent.max_user_turns=3",
        )
    )
    assert (limits.max_response_tokens, limits.max_context_tokens) == (20, 30)
    assert (limits.max_tool_response_chars, limits.max_tool_response_tokens) == (None, 7)
    assert limits.tool_response_truncate_side is TruncateSide.LEFT
    assert (limits.max_user_turns, limits.max_assistant_turns) == (3, None)
