"""Makes the loops, tools, interactions, limits and sampling of a run from its configuration.

Invariant: what the configuration names exists; otherwise a `SetupError` names what does. Nothing
here needs the tokenizer or the model, or waits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from treadle.agent_loop import (
    LoopLimits,
    LoopRegistry,
    OnMalformedCall,
    SamplingParams,
    SetupError,
    Tool,
    TruncateSide,
    check_metric_rules,
    default_loops,
)
from treadle.tools import load_catalogue
from treadle.tools.interactions import load_interactions
from treadle.trainer.config.schema import AgentConfig, Config
from treadle.trainer.data import PromptRules
from treadle.trainer.own_code import NOTHING, OwnCode
from treadle.trainer.problems import Problems

__all__ = ["load_loops", "loop_limits", "prompt_rules", "sampling_params"]


def prompt_rules(config: Config, own: OwnCode = NOTHING, *, images: bool = False) -> PromptRules:
    """Returns the loops, tools and interactions that the rows of a run may select.

    Args:
        own: The user's objects beside the configuration.
        images: Whether rows may have images.

    Raises:
        SetupError: A catalogue cannot be used, a name in `agent.loops` is taken, one of its
            loops or `agent.default_loop` cannot be made, or tools and interactions report one
            metric under two rules.
        SeveralProblems: More than one of these.
    """
    agent = config.agent
    problems = Problems(SetupError)
    loops = tools = interactions = None
    with problems.collected():
        loops = load_loops(agent, own)
    with problems.collected():
        tools = _load_tools(agent, own)
    with problems.collected():
        users = agent.interaction_catalogue
        interactions = load_interactions(users) if users is not None else {}
    problems.raise_if_any()
    assert loops is not None and tools is not None and interactions is not None
    check_metric_rules(
        {
            **{f"tool {name!r}": tool for name, tool in tools.items()},
            **{f"interaction {name!r}": user for name, user in interactions.items()},
        }
    )
    return PromptRules(
        loops=loops,
        default_loop=agent.default_loop,
        max_prompt_tokens=config.rollout.prompt_length,
        overlong=config.data.overlong_prompts,
        tools=tools,
        interactions=interactions,
        images=images,
    )


def loop_limits(config: Config) -> LoopLimits:
    """Returns the limits of one trajectory."""
    agent = config.agent
    return LoopLimits(
        max_response_tokens=config.rollout.response_length,
        max_context_tokens=config.rollout.context_length,
        max_assistant_turns=agent.max_assistant_turns,
        max_user_turns=agent.max_user_turns,
        max_parallel_calls=agent.max_parallel_calls,
        max_tool_response_chars=agent.max_tool_response_chars,
        max_tool_response_tokens=agent.max_tool_response_tokens,
        tool_response_truncate_side=TruncateSide(agent.tool_response_truncate_side),
        tool_timeout_s=agent.tool_timeout_s,
    )


def sampling_params(
    config: Config, phase: Literal["rollout", "greedy", "validate"]
) -> SamplingParams:
    """Returns how completions are sampled; seeds come with the tasks."""
    settings = config.rollout.val if phase == "validate" else config.rollout
    whole = phase == "greedy"
    return SamplingParams(
        max_tokens=config.rollout.response_length,
        temperature=0.0 if whole else settings.temperature,
        top_p=1.0 if whole else settings.top_p,
        top_k=None if whole else settings.top_k,
        min_p=0.0 if whole else settings.min_p,
        sampling_mask=phase == "rollout" and config.rollout.truncation is not None,
    )


def load_loops(config: AgentConfig, own: OwnCode = NOTHING) -> LoopRegistry:
    """Returns the loops that rows may name.

    Raises:
        SetupError: A name in `agent.loops` is taken, or one of its loops or `agent.default_loop`
            cannot be made.
        SeveralProblems: More than one of these.
    """
    loops = default_loops(on_malformed_call=OnMalformedCall(config.on_malformed_call))
    for name, loop in own.loops.items():
        loops = loops.adding(name, loop)
    problems = Problems(SetupError)
    for name, target in config.loops.items():
        with problems.collected(), _named(f"agent.loops.{name}={target}"):
            loops = loops.adding(name, target)
    for name, target in config.loops.items():
        # After all are added: a new registry would make its loops again.
        with problems.collected(), _named(f"agent.loops.{name}={target}"):
            loops.resolve(name)
    if config.default_loop not in config.loops:
        with problems.collected(), _named(f"agent.default_loop={config.default_loop}"):
            loops.resolve(config.default_loop)
    problems.raise_if_any()
    return loops


@contextmanager
def _named(setting: str) -> Iterator[None]:
    try:
        yield
    except SetupError as error:
        raise SetupError(f"{setting}: {error}") from error


def _load_tools(agent: AgentConfig, own: OwnCode) -> Mapping[str, Tool]:
    path = agent.tool_catalogue
    configured = load_catalogue(path) if path is not None else {}
    if twice := sorted(configured.keys() & own.tools.keys()):
        raise SetupError(
            f"train got a tool {twice[0]!r}, and agent.tool_catalogue has one: rename one"
        )
    return {**configured, **own.tools}
