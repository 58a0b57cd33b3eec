"""`treadle verify RUN`: checks a run by its files, and by computing its steps again."""

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.trainer.cli.console import fail, say

if TYPE_CHECKING:
    from treadle.trainer.config.schema import Config

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle verify",
        description="Compares the files of a run with each other: seals, checkpoints, spans, "
        "masks, versions, rewards, advantages, metrics. With --replay, trains its steps again "
        "from the recorded trajectories and compares log-probabilities, metrics and weights.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--replay", action="store_true", help="compute the steps again")
    parser.add_argument(
        "--after",
        type=int,
        default=0,
        metavar="N",
        help="replay from the checkpoint of step N; from model.path if left out",
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=0.0,
        metavar="NATS",
        help="largest difference that a replay may have on another machine; bit for bit if left "
        "out",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Returns:
        0, everything fits; 1, something does not; 2, the run cannot be read or replayed.
    """
    from treadle.agent_loop import SetupError
    from treadle.policy.client.group import PolicyError
    from treadle.trainer.checkpoint.run_directory import CONFIG, RunDirectoryError
    from treadle.trainer.config.load import ConfigError, is_sft, load_config
    from treadle.trainer.launch.process import ProcessError
    from treadle.trainer.verify.quick import quick_problems
    from treadle.trainer.verify.recorded import RecordError
    from treadle.trainer.verify.replay import CannotReplayError

    args = _parser().parse_args(argv)
    try:
        if is_sft(args.run / CONFIG):
            raise ConfigError(f"{args.run} is a run of treadle sft: it has no trajectories")
        config = load_config([args.run / CONFIG], []).config
        problems = list(quick_problems(args.run, config))
        if problems:
            return _fails(args.run, problems)
        say("the files of the run fit each other")
        if args.replay:
            problems = asyncio.run(_replayed(args, config))
            if problems:
                return _fails(args.run, problems)
    except (
        CannotReplayError,
        ConfigError,
        OSError,
        RecordError,
        RunDirectoryError,
        SetupError,
    ) as error:
        return fail(error)
    except (PolicyError, ProcessError) as error:
        return fail(error, status=1)
    return 0


async def _replayed(args: argparse.Namespace, config: "Config") -> list[str]:
    from treadle.trainer.report.metrics import read_metrics
    from treadle.trainer.verify.replay import replay_problems

    metrics = {int(each["step"]): each for each in read_metrics(args.run / "metrics.jsonl")}
    steps = 0
    replay = replay_problems(args.run, config, metrics, after=args.after, bound=args.bound)
    async with contextlib.aclosing(replay) as found:
        async for step, problems in found:
            if problems:
                return [f"step {step}: {problem}" for problem in problems]
            steps += 1
    exact = f"within {args.bound:g} nats" if args.bound else "bit for bit"
    say(f"{steps} steps were computed again, and are what the run recorded, {exact}")
    return []


def _fails(run: Path, problems: Sequence[str]) -> int:
    for problem in problems:
        say(problem)
    return fail(ValueError(f"{run} is not what it says: {problems[0]}"), status=1)
