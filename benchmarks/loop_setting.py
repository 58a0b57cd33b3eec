"""The setting of `loop_overhead` and `loop_workers`: the demo's tool loop, and its cost.

Chat template, parser, calculator and reward are the demo's; the model is any directory with a
tokenizer. Processor time and memory are those of processes, as the kernel counts them.
"""

import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from null_server import RunningServer, Script

from treadle.agent_loop import AgentTask, Message, SamplingParams
from treadle.agent_loop.rpc import Requirements
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import load_renderer
from treadle.trainer.demo import DEMO
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.rollout.make_runner import RunnerSettings
from treadle.trainer.rollout.workers.pool import LoopWorkers, loop_workers

QUESTION = "What is 17 + 25?"
SETTINGS = RunnerSettings(
    sampling=SamplingParams(max_tokens=256, temperature=1.0), min_weight_version=0
)
_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 + 25"}}\n</tool_call>'
_LAST = "#### 42"
_TICKS = os.sysconf("SC_CLK_TCK")


def config_of(*, turns: int, workers: int = 0, model: Path | None = None) -> Config:
    """Returns the configuration of a run of the demo.

    Args:
        turns: Number of turns of a trajectory.
        workers: Number of loop workers.
        model: Whose tokenizer is used; None: the demo's.
    """
    return load_config(
        [DEMO],
        [
            f"agent.num_workers={workers}",
            f"agent.max_assistant_turns={turns}",
            "rollout.prompt_length=512",
            "rollout.response_length=512",
            *(() if model is None else (f"model.path={model}",)),
        ],
    ).config


def script_of(config: Config, turns: int) -> Script:
    """Returns what every session samples: calls of the calculator, then the answer."""
    renderer = load_renderer(config)
    end = renderer.stop_token_ids[0]
    return Script(
        call=(*renderer.encode(_CALL), end), last=(*renderer.encode(_LAST), end), turns=turns
    )


def task(number: int) -> AgentTask:
    """Returns a row's task."""
    return AgentTask(
        task_id=f"train/{number}",
        sample_index=number,
        rollout_index=0,
        loop="tool_agent",
        messages=(Message(role="user", content=QUESTION),),
        fields={
            "data_source": "treadle/calculator",
            "reward_model": {"style": "rule", "ground_truth": "42"},
        },
        seed=number,
    )


@asynccontextmanager
async def running_workers(
    config: Config, server: RunningServer
) -> AsyncIterator[tuple[LoopWorkers, Path]]:
    """Starts loop workers and their router; yields the workers, and the directory for `started`."""
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        async with (
            LocalLauncher(logs) as launcher,
            loop_workers(
                launcher,
                config,
                servers=[server],
                requirements=Requirements(),
                loops=frozenset({"tool_agent"}),
                images=False,
            ) as (workers, _),
        ):
            yield workers, logs


def started(logs: Path, name: str) -> set[int]:
    """Returns the ids of the processes of a launcher whose names match."""
    return {int(json.loads(ready.read_text())["pid"]) for ready in logs.glob(f"{name}.ready")}


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the user and system time of processes in seconds; of this one more exactly."""
    ticks, own_s = 0, 0.0
    for pid in pids:
        if pid == os.getpid():
            own_s = time.process_time()
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            # Fields 14 and 15 of proc(5), counted from the one after the name.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return own_s + ticks / _TICKS


def pss_mib(pids: Iterable[int]) -> float:
    """Returns the memory of processes in MiB; what several share counts once, in parts."""
    kib = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kib += int(line.split()[1])
    return kib / 1024
