from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from treadle.agent_loop import (
    Interaction,
    Message,
    RenderError,
    Rendering,
    Tool,
    ToolSpec,
    default_loops,
)
from treadle.agent_loop.testing import ByteRenderer
from treadle.tools import CalculatorTool, Gsm8kTool
from treadle.tools.interactions import Gsm8kInteraction
from treadle.trainer.data import DataError, PromptRules, PromptSet, Row, make_prompts

RENDERER = ByteRenderer()
SECOND = ToolSpec(name="second", description="Another calculator.")
CALCULATOR: Mapping[str, Tool] = {"calculator": CalculatorTool()}


def make_row(
    index: int = 0,
    *,
    content: str = "What is 2 + 2?",
    agent_name: object = "tool_agent",
    **more: object,
) -> Row:
    columns = {
        "data_source": "openai/gsm8k",
        "agent_name": agent_name,
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": "4"},
        **more,
    }
    return Row(index=index, place=f"train.jsonl, line {index + 1}", columns=columns)


def prepare(
    *rows: Row,
    tools: Mapping[str, Tool] = CALCULATOR,
    interactions: Mapping[str, Interaction] | None = None,
    default_loop: str = "single_turn_agent",
    max_prompt_tokens: int = 10_000,
    overlong: Literal["error", "drop", "left", "right", "middle"] = "error",
    images: bool = False,
) -> PromptSet:
    rules = PromptRules(
        images=images,
        loops=default_loops(),
        default_loop=default_loop,
        max_prompt_tokens=max_prompt_tokens,
        overlong=overlong,
        tools=tools,
        interactions=interactions or {},
    )
    return make_prompts(rows, split="train", rules=rules, renderer=RENDERER)


def test_a_row_becomes_a_prompt_and_a_group_of_tasks() -> None:
    (prompt,) = prepare(make_row(7)).prompts
    tasks = prompt.tasks(samples=3, seed=1, step=2)
    assert [task.rollout_index for task in tasks] == [0, 1, 2]
    for task in tasks:
        assert (task.task_id, task.sample_index, task.loop) == ("train/7", 7, "tool_agent")
        assert task.messages == (Message(role="user", content="What is 2 + 2?"),)
        assert task.fields["reward_model"] == {"ground_truth": "4"}
        assert "prompt" not in task.fields


def test_seeds_depend_on_everything_that_tells_attempts_apart_and_on_nothing_else() -> None:
    first, second = prepare(make_row(0), make_row(1)).prompts
    seeds = {
        task.seed
        for prompt in (first, second)
        for seed in (1, 2)
        for step in (1, 2)
        for task in prompt.tasks(samples=4, seed=seed, step=step)
    }
    assert len(seeds) == 2 * 2 * 2 * 4
    again = prepare(make_row(0)).prompts[0].tasks(samples=8, seed=1, step=1)
    assert again[:4] == first.tasks(samples=4, seed=1, step=1)
    assert again[0].seed == 3592578386047413272


def test_the_length_counts_the_tool_schemas() -> None:
    (with_tools,) = prepare(make_row()).prompts
    (without,) = prepare(make_row(), tools={}).prompts
    specs = (CALCULATOR["calculator"].spec,)
    assert with_tools.num_tokens == len(RENDERER.render(with_tools.messages, tools=specs).ids)
    assert without.num_tokens < with_tools.num_tokens


def test_an_overlong_prompt_is_an_error_that_says_how_long() -> None:
    (fits,) = prepare(make_row()).prompts
    bound = fits.num_tokens
    assert prepare(make_row(), max_prompt_tokens=bound).num_dropped == 0
    rows = [make_row(0), make_row(1, content="x" * 100), make_row(2, content="y" * 200)]
    with pytest.raises(
        DataError,
        match=rf"2 of 3 train prompts are longer than {bound} tokens; "
        rf"the first is train.jsonl, line 2 \({bound + 86} tokens\)",
    ):
        prepare(*rows, max_prompt_tokens=bound)


def test_overlong_prompts_are_left_out_and_counted_where_that_is_asked_for() -> None:
    bound = prepare(make_row()).prompts[0].num_tokens
    kept = prepare(
        make_row(0), make_row(1, content="x" * 100), max_prompt_tokens=bound, overlong="drop"
    )
    assert [prompt.row.index for prompt in kept.prompts] == [0]
    assert kept.num_dropped == 1
    assert kept.notes[0].startswith("left out: 1 of 2 train prompts are longer than")
    with pytest.raises(DataError, match="no train row is left: left out: 1 of 1"):
        prepare(make_row(content="x" * 100), max_prompt_tokens=bound, overlong="drop")


def test_overlong_prompts_are_cut_and_counted_where_that_is_asked_for() -> None:
    bound = prepare(make_row(content="x" * 50)).prompts[0].num_tokens
    long = make_row(1, content="a" * 30 + "b" * 30)
    cut = prepare(make_row(0), long, max_prompt_tokens=bound, overlong="left")
    assert cut.num_dropped == 0
    assert cut.prompts[1].messages[0].content == "a" * 20 + "b" * 30
    assert cut.prompts[1].num_tokens == bound
    assert cut.notes[0].startswith("cut (left): 1 of 2 train prompts are longer than")
    with pytest.raises(DataError, match=r"line 2: the prompt has .* without its longest message"):
        prepare(long, max_prompt_tokens=10, overlong="middle")


def test_a_row_that_names_no_loop_is_an_error_where_tools_are_configured() -> None:
    """verl issues #2966 and #2986: the tools were silently never called (spec A3.9 #3)."""
    rows = [make_row(0), make_row(1, agent_name=None), make_row(2, agent_name=None)]
    with pytest.raises(
        DataError,
        match=r"2 of 3 train rows have no agent_name .* the first is train\.jsonl, line 2\. "
        r'Add "agent_name": "tool_agent"',
    ):
        prepare(*rows)


def test_without_tools_or_with_a_default_that_uses_them_no_name_is_needed() -> None:
    assert prepare(make_row(agent_name=None), tools={}).prompts[0].loop == "single_turn_agent"
    chosen = prepare(make_row(agent_name=None), default_loop="tool_agent")
    assert chosen.prompts[0].loop == "tool_agent"


def test_tools_that_no_row_reaches_are_an_error() -> None:
    with pytest.raises(DataError, match="agent_name of every train row is 'single_turn_agent'"):
        prepare(make_row(agent_name="single_turn_agent"))
    mixed = prepare(make_row(0), make_row(1, agent_name="single_turn_agent"))
    assert [prompt.loop for prompt in mixed.prompts] == ["tool_agent", "single_turn_agent"]


def test_an_unknown_loop_is_named_with_its_row() -> None:
    with pytest.raises(DataError, match=r"line 1: agent loop 'tool_agnt' is not registered"):
        prepare(make_row(agent_name="tool_agnt"))


def test_a_row_can_select_its_tools_and_they_alone_are_counted() -> None:
    both: Mapping[str, Tool] = {**CALCULATOR, "second": CalculatorTool(spec=SECOND)}
    (chosen,) = prepare(make_row(extra_info={"tool_selection": ["calculator"]}), tools=both).prompts
    assert chosen.num_tokens == prepare(make_row()).prompts[0].num_tokens
    (null,) = prepare(make_row(extra_info={"tool_selection": None}), tools=both).prompts
    assert null.num_tokens > chosen.num_tokens
    (single, _) = prepare(make_row(agent_name="single_turn_agent"), make_row(1)).prompts
    assert single.num_tokens == prepare(make_row(), tools={}).prompts[0].num_tokens


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"tool_selection": ["calc"]}, r"names \['calc'\], which .*tools: \['calculator'\]"),
        (
            {"tool_selection": "calculator"},
            "tool_selection must be a list of names, got 'calculator'",
        ),
        ({"tool_selection": [{"name": "calculator"}]}, "must be a list of names"),
        ({"tool_selection": []}, "every train row selects none of them"),
        (
            {"interaction_kwargs": {"ground_truth": "4"}},
            r"has \['ground_truth'\] and no name; .*: \['gsm8k'\]",
        ),
        (
            {"interaction_kwargs": {"name": "gsm9k"}},
            r"names 'gsm9k', .*: \['gsm8k'\]; set agent\.inter",
        ),
    ],
)
def test_a_row_that_asks_for_what_is_not_there_is_an_error(
    extra: Mapping[str, object], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        prepare(make_row(extra_info=extra), interactions={"gsm8k": Gsm8kInteraction()})


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            {},
            r"line 2: .* the tool calc_gsm8k_reward needs a string or .* in extra_info\.tools_kw",
        ),
        (
            {"tool_selection": [], "interaction_kwargs": {"name": "gsm8k"}},
            r"line 2: .*needs a string or .* in extra_info\.interaction_kwargs\.ground_truth",
        ),
    ],
)
def test_a_row_that_lacks_what_its_tools_need_is_an_error(
    extra: Mapping[str, object], text: str
) -> None:
    """Otherwise the run would end at the first call, whenever the model makes it."""
    whole = {
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}},
        "interaction_kwargs": {"name": "gsm8k", "ground_truth": "4"},
    }
    tools: Mapping[str, Tool] = {"calc_gsm8k_reward": Gsm8kTool()}
    rows = [make_row(extra_info=whole), make_row(1, extra_info=extra)]
    interactions = {"gsm8k": Gsm8kInteraction()}
    assert prepare(rows[0], tools=tools, interactions=interactions).prompts
    with pytest.raises(DataError, match=text):
        prepare(*rows, tools=tools, interactions=interactions)


def test_an_interaction_that_nothing_asks_is_an_error() -> None:
    interactions = {"gsm8k": Gsm8kInteraction()}
    extra = {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "4"}}
    assert prepare(make_row(extra_info=extra), interactions=interactions).prompts
    with pytest.raises(
        DataError, match=r"line 1: the row names an interaction and runs as 'single"
    ):
        prepare(make_row(extra_info=extra, agent_name=None), tools={}, interactions=interactions)


@pytest.mark.parametrize("selection", [["calculator"], ["no_such_tool"], "calculator"])
def test_tools_that_a_loop_does_not_have_are_not_selected(selection: object) -> None:
    row = make_row(extra_info={"tool_selection": selection}, agent_name="single_turn_agent")
    with pytest.raises(DataError, match="line 1: the row selects tools and runs as 'single_turn"):
        prepare(row, make_row(1))
    none = make_row(extra_info={"tool_selection": []}, agent_name="single_turn_agent")
    assert len(prepare(none, make_row(1)).prompts) == 2


def test_a_model_that_reads_text_refuses_rows_with_images_by_name() -> None:
    assert prepare(make_row(images=None), make_row(1, images=[], videos=[])).prompts
    with pytest.raises(
        DataError, match=r"line 2: the column 'images' holds 2 of them, and model\.path reads text"
    ):
        prepare(make_row(), make_row(1, images=[{"bytes": b"1"}, {"bytes": b"2"}]))


def test_a_model_that_sees_is_shown_images_and_they_are_checked() -> None:
    png = b"\x89PNG\r\n\x1a\n."
    made = prepare(make_row(images=[{"bytes": png}]), images=True)
    assert made.has_images and not prepare(make_row(), images=True).has_images
    (prompt,) = made.prompts
    assert [image.data for image in prompt.messages[0].images] == [png]
    (task,) = prompt.tasks(samples=1, seed=0, step=0)
    assert "images" not in task.fields  # they are in its messages
    with pytest.raises(DataError, match=r"line 1: images\[0\] begins with b'GIF'"):
        prepare(make_row(images=[{"bytes": b"GIF"}]), images=True)
    with pytest.raises(DataError, match="the column 'videos' holds 1 of them, and only images"):
        prepare(make_row(videos=[{}]), images=True)
    with pytest.raises(DataError, match=r"the prompt has images and .* tokens, .* is not cut"):
        prepare(
            make_row(images=[{"bytes": png}]), images=True, overlong="left", max_prompt_tokens=3
        )


def test_settings_for_a_tool_that_is_not_there_are_noted() -> None:
    row = make_row(extra_info={"tools_kwargs": {"calc_gsm8k_reward": {}}})
    assert prepare(row).notes == (
        "1 train rows have tools_kwargs for 'calc_gsm8k_reward', but no such tool is configured",
    )
    assert prepare(row, tools={"calc_gsm8k_reward": CalculatorTool(spec=SECOND)}).notes == ()
    null = make_row(extra_info={"tools_kwargs": {"calc_gsm8k_reward": None}})
    assert prepare(null).notes == ()


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    class Refusing(ByteRenderer):
        def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
            raise RenderError("roles must alternate")

    rules = PromptRules(
        loops=default_loops(),
        default_loop="single_turn_agent",
        max_prompt_tokens=10,
        overlong="error",
    )
    with pytest.raises(DataError, match=r"line 1: the prompt cannot be rendered: roles must alt"):
        make_prompts([make_row()], split="train", rules=rules, renderer=Refusing())
