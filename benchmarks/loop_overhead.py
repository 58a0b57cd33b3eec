"""What the agent loop costs beside an engine that costs nothing, and what verl's loop costs.

Each of 1,000 trajectories has five turns: four calls of a calculator and an answer. The sides take
turns, over the rounds, with the same tokenizer, chat template and tool:

* in one process: the runner calls the engine as a coroutine;
* over gRPC: the same process calls a server process (`null_server`), as without loop workers;
* N loop workers: processes that the driver gives tasks, with the router that they share;
* verl, N workers: verl 0.9.1 (`verl_subject`), whose workers, load balancer and server are Ray
  actors; the server is a stub, all else is verl's code.

All of them end with the same tokens, which is checked. Processor time and memory (PSS, right after
a batch) are those of all processes of a side, the server included. Processor time hardly depends on
what else the machine does; rates do. A batch of verl's is cut evenly, so `--trajectories` must be
divisible by each of `--workers`. verl gets an environment, below `--environment`, which is made
where it is missing::

    python benchmarks/loop_overhead.py --model DIRECTORY [--rounds 5] [--trajectories 1000]
        [--turns 5] [--workers 2 8] [--without_verl] [--json results.json]

The directory needs a tokenizer only, such as that of Qwen2.5; without it, the demo's is used.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from loop_setting import (
    QUESTION,
    SETTINGS,
    config_of,
    cpu_s,
    pss_mib,
    running_workers,
    script_of,
    started,
    task,
)
from loop_subject import InProcess
from null_server import RunningServer, Script, null_server
from peer_process import PeerProcess, python_of

from treadle.agent_loop import TokenGenerator, Trajectory
from treadle.agent_loop.rpc import connect
from treadle.rollout_server.testing.descendants import descendants
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import load_renderer, load_reward
from treadle.trainer.launch.garbage import exempt_present_objects
from treadle.trainer.rollout.loops_from_config import prompt_rules
from treadle.trainer.rollout.make_runner import Runner, make_runner

_REQUIREMENTS = (
    "verl==0.9.1",
    "ray==2.60.0",
    "torch==2.13.0",
    "transformers==5.10.4",
    *("cachetools", "fastapi", "uvicorn"),  # verl imports them and does not require them
)
_Run = Callable[[int], Awaitable[list[Trajectory]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run a batch.

    Attributes:
        run: Runs the given number of trajectories; returns how long that took in seconds.
        pids: Returns the ids of its processes.
    """

    run: Callable[[int], Awaitable[float]]
    pids: Callable[[], set[int]]


async def collect(runner: Runner, count: int) -> list[Trajectory]:
    """Runs a batch and returns its trajectories."""
    found: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        found.append(trajectory)

    await runner.run((task(number) for number in range(count)), sink)
    return found


def tokens_of(trajectory: Trajectory) -> tuple[list[int], list[bool]]:
    """Returns the ids of a trajectory, and which of them were sampled."""
    return list(trajectory.tokens.ids), list(trajectory.tokens.loss_mask)


async def timed(run: _Run, expected: Trajectory, count: int) -> float:
    """Runs a batch of ours, checks it, and returns its seconds."""
    began = time.perf_counter()
    found = await run(count)
    wall_s = time.perf_counter() - began
    assert len(found) == count
    for trajectory in found:
        assert trajectory.error is None, trajectory.error
        assert trajectory.reward == 1.0
        assert tokens_of(trajectory) == tokens_of(expected)
    return wall_s


def local_runner(config: Config, generator: TokenGenerator, in_flight: int) -> Runner:
    """Returns the runner of a process with loops, tools and reward."""
    return make_runner(
        config,
        SETTINGS,
        generator=generator,
        renderer=load_renderer(config),
        rules=prompt_rules(config),
        reward=load_reward(config, (), rules=None),
        max_in_flight=in_flight,
    )


@asynccontextmanager
async def worker_side(
    config: Config, server: RunningServer, in_flight: int
) -> AsyncIterator[tuple[_Run, set[int]]]:
    """Starts loop workers and their router; yields how they run a batch, and their processes."""
    async with running_workers(config, server) as (workers, logs):
        pids = started(logs, "*")
        runner = workers.runner(SETTINGS, max_in_flight=in_flight)
        yield partial(collect, runner), pids


class VerlSide:
    """verl's process, and the check of what it samples.

    Args:
        peer: The process.
        expected: A trajectory of ours.
    """

    def __init__(self, peer: PeerProcess, expected: Trajectory) -> None:
        self._peer = peer
        self._expected = expected

    async def run(self, count: int) -> float:
        """Runs a batch, whose size it knows; returns its seconds."""
        return float((await self._peer.ask("batch"))["wall_s"])

    def pids(self) -> set[int]:
        """Returns its processes, Ray's included."""
        return {self._peer.pid, *descendants(self._peer.pid)}

    async def check(self) -> None:
        """Checks that the last batch has the same tokens as ours."""
        sample = await self._peer.ask("sample")
        ids, mask = tokens_of(self._expected)
        if (sample["ids"], sample["num_sampled"]) != (ids, sum(mask)):
            raise SystemExit(f"verl's trajectories are not ours: {sample}, ours {ids}")


def verl_settings(
    config: Config, model: Path, expected: Trajectory, script: Script, count: int, workers: int
) -> dict[str, Any]:
    """Returns what `verl_subject` needs to run the batch that ours was."""
    _, mask = tokens_of(expected)
    starts = [at for at, sampled in enumerate(mask) if sampled and not mask[at - 1]]
    replies = [*[script.call] * (script.turns - 1), script.last]
    assert config.agent.tool_catalogue is not None
    catalogue = yaml.safe_load(config.agent.tool_catalogue.read_text(encoding="utf-8"))
    return {
        "model": str(model),
        "tool_schema": catalogue["tools"][0]["tool_schema"],
        "question": QUESTION,
        "turns": script.turns,
        "trajectories": count,
        "workers": workers,
        "prompt_length": config.rollout.prompt_length,
        "response_length": config.rollout.response_length,
        "replies": list(zip(starts, replies, strict=True)),
    }


async def measure(side: Side, trajectories: int, turns: int) -> dict[str, float]:
    """Runs one batch; returns its rate, processor time and memory."""
    pids = side.pids()
    before_s = cpu_s(pids)
    wall_s = await side.run(trajectories)
    used_s = cpu_s(pids) - before_s
    if began := side.pids() - pids:
        raise SystemExit(f"{len(began)} processes began during the batch: it cannot be counted")
    return {
        "rate": trajectories / wall_s,
        "cpu_ms": used_s / trajectories / turns * 1000,
        "memory_gib": pss_mib(pids) / 1024,
    }


async def run_all(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Measures every side in turn, after one round to warm up."""
    count, turns = arguments.trajectories, arguments.turns
    rows: dict[str, list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = model_directory(arguments.model, directory)
        config = config_of(turns=turns, model=model)
        script = script_of(config, turns)
        server = await stack.enter_async_context(null_server(script))
        over_grpc = await stack.enter_async_context(connect([server.address]))
        expected = (await collect(local_runner(config, over_grpc, 1), 1))[0]
        own = os.getpid()

        def ours(run: _Run, *others: int) -> Side:
            return Side(run=partial(timed, run, expected), pids=lambda: {own, *others})

        inside = local_runner(config, InProcess(script), count)
        outside = local_runner(config, over_grpc, count)
        sides = {
            "in one process": ours(partial(collect, inside)),
            "over gRPC": ours(partial(collect, outside), server.pid),
        }
        for workers in arguments.workers:
            with_workers = config_of(turns=turns, workers=workers, model=model)
            run, pids = await stack.enter_async_context(worker_side(with_workers, server, count))
            sides[f"{workers} loop workers"] = ours(run, server.pid, *pids)
        verl: list[VerlSide] = []
        if not arguments.without_verl:
            python = python_of(arguments.environment, _REQUIREMENTS)
            for workers in arguments.workers:
                settings = verl_settings(config, model, expected, script, count, workers)
                log = directory / f"verl-{workers}.log"
                peer = await PeerProcess.start("verl", python, "verl_subject.py", settings, log)
                stack.push_async_callback(peer.end)
                verl.append(VerlSide(peer, expected))
                sides[f"verl, {workers} workers"] = Side(run=verl[-1].run, pids=verl[-1].pids)
        exempt_present_objects()  # as a run does
        for number in range(arguments.rounds + 1):
            for name, side in sides.items():
                if not number:
                    await side.run(count)
                else:
                    rows.setdefault(name, []).append(await measure(side, count, turns))
            print(f"round {number}, load {os.getloadavg()[0]:.1f}", flush=True)
        for side_of_verl in verl:
            await side_of_verl.check()
    return rows


def model_directory(given: Path | None, scratch: Path) -> Path:
    """Returns a directory that both sides take as a model's: the tokenizer's, with a config."""
    if given is None:
        return config_of(turns=1).model.path
    if (given / "config.json").exists():
        return given.resolve()
    model = scratch / "model"
    model.mkdir()
    for file in given.iterdir():
        (model / file.name).symlink_to(file.resolve())
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    )
    return model


def print_table(rows: dict[str, list[dict[str, float]]], workers: Sequence[int]) -> None:
    """Prints medians and ranges over the rounds, and verl's ratios to ours within each round."""
    print(f"{'':18} {'trajectories/s':>22} {'CPU ms per turn':>22} {'GiB':>22}")
    for name, results in rows.items():
        columns = (("rate", 0), ("cpu_ms", 2), ("memory_gib", 2))
        texts = [_spread([each[key] for each in results], digits) for key, digits in columns]
        print(f"{name:18} " + " ".join(f"{text:>22}" for text in texts))
    for count in workers:
        theirs = rows.get(f"verl, {count} workers")
        if theirs is None:
            continue
        for ours in ("over gRPC", f"{count} loop workers"):
            ratios = [t["cpu_ms"] / o["cpu_ms"] for t, o in zip(theirs, rows[ours], strict=True)]
            more = [
                t["memory_gib"] / o["memory_gib"] for t, o in zip(theirs, rows[ours], strict=True)
            ]
            print(
                f"verl with {count} workers / {ours}: CPU {_spread(ratios, 2)}, "
                f"memory {_spread(more, 1)}"
            )


def _spread(values: Sequence[float], digits: int) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def main() -> None:
    """Prints the table; writes the numbers with ``--json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory with a tokenizer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 8], help="of both sides")
    parser.add_argument("--without_verl", action="store_true")
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path.home() / ".cache" / "treadle" / "verl-0.9.1",
        help="verl's virtual environment",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if uneven := [count for count in arguments.workers if arguments.trajectories % count]:
        parser.error(f"--trajectories={arguments.trajectories} is not divisible by {uneven}")
    rows = asyncio.run(run_all(arguments))
    print_table(rows, arguments.workers)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
