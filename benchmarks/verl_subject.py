"""verl's side of `loop_overhead`: its agent loop over Ray, one batch per line of standard input.

Runs in an environment with verl and without Treadle's requirements. verl's own code are the manager
and its workers, the tool loop, parser, token builder, client, load balancer and the tensors of the
batch. The server is a stub: an actor that answers at once, as `null_server` does. The arithmetic of
the tool is Treadle's, which imports the standard library alone. Prints a line of JSON when it is
ready, one after each batch, and one with the tokens where the line asks for `sample`.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from treadle.tools.arithmetic import evaluate, format_number

_ANSWERS = os.dup(1)  # verl prints to standard output


def answer(value: Mapping[str, Any]) -> None:
    """Sends one line to `loop_overhead`."""
    os.write(_ANSWERS, (json.dumps(value) + "\n").encode())


class Calculator(BaseTool):  # type: ignore[misc]
    """The demo's calculator."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Evaluates the expression."""
        return ToolResponse(text=format_number(evaluate(parameters["expression"]))), 0.0, {}


class StubServer:
    """verl's server actor with an engine that takes no time.

    Args:
        replies: The completion for each length of a prompt.
    """

    def __init__(self, replies: list[tuple[int, list[int]]]) -> None:
        self._replies = dict(replies)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Replies at once."""
        reply = self._replies.get(len(prompt_ids))
        if reply is None:
            raise ValueError(
                f"verl's prompt has {len(prompt_ids)} tokens, Treadle's have {list(self._replies)}"
            )
        return TokenOutput(token_ids=reply, stop_reason="completed")


def config_of(settings: Mapping[str, Any], tools: Path) -> DictConfig:
    """Returns verl's configuration: its defaults, and what `loop_overhead` asks for."""
    folder = Path(verl.trainer.__file__).parent / "config"
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(
            config_name="ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={settings['model']}",
                f"{rollout}.name=vllm",
                f"{rollout}.mode=async",
                f"{rollout}.prompt_length={settings['prompt_length']}",
                f"{rollout}.response_length={settings['response_length']}",
                f"{rollout}.agent.num_workers={settings['workers']}",
                f"{rollout}.multi_turn.enable=true",
                f"{rollout}.multi_turn.format=hermes",
                f"{rollout}.multi_turn.max_assistant_turns={settings['turns']}",
                f"{rollout}.multi_turn.tool_config_path={tools}",
            ],
        )


def batch_of(settings: Mapping[str, Any]) -> DataProto:
    """Returns the prompts of a batch."""
    count = settings["trajectories"]
    prompts = np.empty(count, dtype=object)
    prompts[:] = [[{"role": "user", "content": settings["question"]}] for _ in range(count)]
    return DataProto(
        non_tensor_batch={
            "raw_prompt": prompts,
            "agent_name": np.array(["tool_agent"] * count, dtype=object),
            "index": np.arange(count),
        },
        meta_info={},
    )


def sample_of(output: DataProto) -> dict[str, Any]:
    """Returns the tokens of the batch's trajectories, which are all the same."""
    batch = output.batch
    for key in ("input_ids", "attention_mask", "response_mask"):
        if not torch.equal(batch[key], batch[key][:1].expand_as(batch[key])):
            raise ValueError(f"the trajectories differ in {key}")
    ids = batch["input_ids"][0][batch["attention_mask"][0].bool()]
    return {"ids": ids.tolist(), "num_sampled": int(batch["response_mask"][0].sum())}


async def serve(settings: Mapping[str, Any]) -> None:
    """Runs a batch whenever it is asked to, until standard input ends."""
    with tempfile.TemporaryDirectory() as directory:
        tools = Path(directory) / "tools.yaml"
        tool = {
            "class_name": "verl_subject.Calculator",
            "config": {"type": "native"},
            "tool_schema": settings["tool_schema"],
        }
        tools.write_text(json.dumps({"tools": [tool]}))
        config = config_of(settings, tools)
        options = {"num_cpus": 0, "max_concurrency": 100_000}
        server: Any = ray.remote(StubServer).options(**options).remote(settings["replies"])
        balancer: Any = ray.remote(GlobalRequestLoadBalancer).remote(servers={"stub": server})
        client = LLMServerClient(config, load_balancer_handle=balancer)
        manager: Any = await AgentLoopManager.create(config, client)
        answer({"ready": True})
        output = None
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if line == "sample":
                assert output is not None
                answer(sample_of(output))
                continue
            batch = batch_of(settings)
            began = time.perf_counter()
            output = await manager.generate_sequences(batch)
            answer({"wall_s": time.perf_counter() - began})


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", type=json.loads, required=True, help="see `loop_overhead`")
    settings = parser.parse_args().settings
    os.dup2(2, 1)
    # An actor of verl's asks for a CPU to start with: with fewer than there are, it waits forever.
    cpus = max(os.cpu_count() or 1, settings["workers"] + 2)
    # A new cluster, also where another one runs on this machine.
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        asyncio.run(serve(settings))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
