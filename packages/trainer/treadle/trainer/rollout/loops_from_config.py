"""Makes the loops, tools, interactions, limits and sampling of a run from its configuration.

Invariant: what the configuration names exists; otherwise a `SetupError` names what does. Nothing
here needs the tokenizer or the model, or waits.
"""

from collections.abc import Mapping
from typing import Literal

from treadle.agent_loop import (
    LoopLimits,
    LoopRegistry,
    OnMalformedCall,
    SamplingParams,
    SetupError,
    Tool,
    TruncateSide,
    default_loops,
)
from treadle.tools import load_catalogue
from treadle.tools.interactions import load_interactions
from treadle.trainer.config.schema import AgentConfig, Config
from treadle.trainer.data import PromptRules
from treadle.trainer.own_code import NOTHING, OwnCode

__all__ = ["loop_limits", "prompt_rules", "sampling_params"]


def prompt_rules(config: Config, own: OwnCode = NOTHING) -> PromptRules:
    """Returns what the rows of a run may ask for.

    Args:
        config: The run's configuration.
        own: The user's objects beside the configuration.

    Raises:
        SetupError: a catalogue cannot be used, a name in `agent.loops` is taken, or one of its
            loops or `agent.default_loop` cannot be made.
    """
    agent = config.agent
    tools, users = agent.tool_catalogue, agent.interaction_catalogue
    return PromptRules(
        loops=_loops(agent, own),
        default_loop=agent.default_loop,
        max_prompt_tokens=config.rollout.prompt_length,
        overlong=config.data.overlong_prompts,
        tools=_tools(load_catalogue(tools) if tools is not None else {}, own),
        interactions=load_interactions(users) if users is not None else {},
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


def sampling_params(config: Config, split: Literal["train", "val"]) -> SamplingParams:
    """Returns how completions are sampled; seeds come with the tasks."""
    settings = config.rollout if split == "train" else config.rollout.val
    return SamplingParams(
        max_tokens=config.rollout.response_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )


def _tools(configured: Mapping[str, Tool], own: OwnCode) -> Mapping[str, Tool]:
    if twice := sorted(configured.keys() & own.tools.keys()):
        raise SetupError(
            f"train got a tool {twice[0]!r}, and agent.tool_catalogue has one: rename one"
        )
    return {**configured, **own.tools}


def _loops(config: AgentConfig, own: OwnCode) -> LoopRegistry:
    loops = default_loops(on_malformed_call=OnMalformedCall(config.on_malformed_call))
    for name, loop in own.loops.items():
        loops = loops.adding(name, loop)
    for name, target in config.loops.items():
        try:
            loops = loops.adding(name, target)
        except SetupError as error:
            raise SetupError(f"agent.loops.{name}={target}: {error}") from error
    for name, target in config.loops.items():
        try:  # after all are added: a new registry would make its loops again
            loops.resolve(name)
        except SetupError as error:
            raise SetupError(f"agent.loops.{name}={target}: {error}") from error
    try:
        loops.resolve(config.default_loop)
    except SetupError as error:
        raise SetupError(f"agent.default_loop={config.default_loop}: {error}") from error
    return loops
