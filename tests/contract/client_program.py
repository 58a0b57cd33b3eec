"""A program with an agent loop: two turns on the server at an address, printed as JSON.

The process tests run it with the packages of a release and with today's, so it uses only what both
have. It prints where its packages are, what the server says of itself, and the tokens it got.
"""

import asyncio
import json
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.rpc import Requirements, connect
from treadle.agent_loop.testing import ByteRenderer
from treadle.rollout.v1 import server_service_pb2, server_service_pb2_grpc

DEADLINE_S = 30.0


async def two_turns(task: AgentTask, services: Services) -> Trajectory:
    """Samples a turn, observes a message, and samples another."""
    with Conversation(task, services) as chat:
        await chat.generate()
        if stop := chat.answer([Message(role="user", content="Are you sure?")]):
            return chat.finish(stop)
        await chat.generate()
        return chat.finish(StopReason.FINISHED)


async def sampled_on(address: str) -> dict[str, object]:
    """Returns the tokens of one trajectory."""
    renderer = ByteRenderer()
    needs = Requirements(vocab_size=renderer.vocab_size, context_length=512)
    task = AgentTask(
        task_id="row-0",
        sample_index=0,
        rollout_index=0,
        loop="two_turns",
        messages=(Message(role="user", content="What is 6 * 7?"),),
    )
    async with connect([address], requirements=needs) as generator:
        services = Services(
            generator=generator,
            renderer=renderer,
            limits=LoopLimits(max_response_tokens=200),
            sampling=SamplingParams(max_tokens=40, temperature=1.0, seed=11),
        )
        tokens = (await two_turns(task, services)).tokens
    return {
        "ids": list(tokens.ids),
        "loss_mask": list(tokens.loss_mask),
        "logprobs": list(tokens.logprobs),
        "weight_versions": tokens.weight_versions,
    }


def said_by(address: str) -> dict[str, object]:
    """Returns what the server says of itself, over the stubs alone."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=DEADLINE_S
        )
        stub = server_service_pb2_grpc.ServerServiceStub(channel)
        request = server_service_pb2.GetServerInfoRequest(client="client_program")
        info = stub.GetServerInfo(request, timeout=DEADLINE_S)
    return {
        "health": health_pb2.HealthCheckResponse.ServingStatus.Name(health.status),
        "version": info.server_version,
        "weight_version": info.weight_version,
    }


def main() -> None:
    """Prints one line of JSON."""
    (address,) = sys.argv[1:]
    result = {
        "packages": list(sys.modules["treadle"].__path__),
        "server": said_by(address),
        "sampled": asyncio.run(sampled_on(address)),
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
