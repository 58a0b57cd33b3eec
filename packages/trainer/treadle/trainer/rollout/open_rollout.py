"""Opens what a rollout needs beside its servers: the user's loops and reward, or loop workers."""

import asyncio
from collections.abc import Set
from contextlib import AsyncExitStack

from treadle.agent_loop.rpc import Requirements
from treadle.agent_loop.time_limited import end_idle_processes
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import Inputs, enter_reward
from treadle.trainer.launch.process import Launcher
from treadle.trainer.rollout.attached_server import AttachedServer
from treadle.trainer.rollout.chat_api.model import ApiServers
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.workers.pool import loop_workers
from treadle.trainer.rollout.workers.router import RunRouter

__all__ = ["make_requirements", "open_own_code", "open_rollout"]


def make_requirements(config: Config, inputs: Inputs, capabilities: Set[str]) -> Requirements:
    """Returns what every server must offer.

    Args:
        capabilities: Named as in the contract, beside what the rows and the loops need.
    """
    return Requirements(
        tokenizer_sha256=inputs.renderer.tokenizer_sha256,
        vocab_size=inputs.renderer.vocab_size,
        context_length=config.rollout.context_length,
        capabilities=frozenset(capabilities)
        | ({"images"} if inputs.images else frozenset())
        | inputs.rules.loops.required_capabilities(inputs.loops),
    )


async def open_own_code(stack: AsyncExitStack, config: Config, inputs: Inputs) -> None:
    """Opens the loops and the reward until the stack ends, unless loop workers open their own.

    Processes that functions with a time limit have then end with the stack.

    Raises:
        SetupError: A judge's servers do not answer.
    """
    stack.push_async_callback(asyncio.to_thread, end_idle_processes)
    if not config.agent.num_workers:
        await enter_reward(stack, inputs.reward)
        await stack.enter_async_context(inputs.rules.loops.opened(inputs.loops))


async def open_rollout(
    stack: AsyncExitStack,
    config: Config,
    inputs: Inputs,
    *,
    launcher: Launcher,
    secured: Config,
    servers: ApiServers | AttachedServer | ServerPool,
    requirements: Requirements,
) -> tuple[Rollout, RunRouter | None]:
    """Returns the rollout, and the router of its loop workers if there are some.

    Args:
        secured: The configuration with the files that secure its servers.

    Raises:
        ProcessError: A process did not start, or a worker cannot be set up.
    """
    workers = router = None
    if config.agent.num_workers:
        workers, router = await stack.enter_async_context(
            loop_workers(
                launcher,
                secured,
                servers=servers.live,
                requirements=requirements,
                loops=inputs.loops,
                images=inputs.images,
                pool=servers if isinstance(servers, ServerPool) else None,
            )
        )
    rollout = Rollout(
        config=config,
        servers=servers,
        renderer=inputs.renderer,
        rules=inputs.rules,
        reward=inputs.reward,
        workers=workers,
    )
    return rollout, router
