"""Checks a machine with GPUs, in order, and writes a page of results.

    python -m gpu.main --out gpu_results.md --vllm /opt/vllm/bin/treadle-rollout-server

With `--minutes` it runs what matters most first, and goes on from the results of an earlier call
with the same page. Each check runs in a separate process. One that fails stops only those that need
it; one that cannot run here is skipped and says why. `--device cpu` runs what a CPU can show, at a
small size: it shows that the checks work, and nothing about GPUs.

The exit status is 0 if no check fails, 1 if one does, 2 if the command line or the machine permits
no run.
"""

import argparse
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpu import records
from gpu.check import Context
from gpu.checks import CHECKS, by_value
from gpu.machine import machine_rows
from gpu.page import line, page, totals
from gpu.runner import Outcome, Result, run_all

from treadle.trainer.launch.gpus import find_gpus

ENGINES = ("vllm", "sglang")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        for check in CHECKS:
            _say(f"{check.name:24} {check.shows}")
        return 0
    if unknown := set(args.only) - {check.name for check in CHECKS}:
        parser.error(f"there is no check {', '.join(sorted(unknown))}: --list shows all")
    checks = [check for check in CHECKS if not args.only or check.name in args.only]
    gpus = find_gpus() if args.device == "cuda" else ()
    if args.device == "cuda" and not gpus:
        parser.error(
            "nvidia-smi lists no GPU, or CUDA_VISIBLE_DEVICES hides them all: run it where a GPU "
            "is, give the container the driver (docker run --gpus all), or try the checks "
            "themselves with --device cpu"
        )
    commands = {name: shlex.split(getattr(args, name) or "") for name in ENGINES}
    context = Context(
        device=args.device,
        num_gpus=len(gpus),
        folder=(args.logs or Path(tempfile.mkdtemp(prefix="treadle-gpu-"))).resolve(),
        engines={name: tuple(words) for name, words in commands.items() if words},
        model=args.model.resolve() if args.model else None,
    )
    _say(f"logs of the checks: {context.folder}")
    title = "Results on GPUs" if gpus else "The checks of GPUs on a CPU: no result about GPUs"
    machine = machine_rows(gpus)
    write = partial(page, machine, title=title, planned=len(checks))
    kept = args.out.with_suffix(".jsonl")
    before: list[Result] = []
    if args.minutes is not None:
        before = records.read(kept, machine, CHECKS)
        planned = {*(check.name for check in checks), *(result.check.name for result in before)}
        write = partial(page, machine, title=title, planned=len(planned))
        checks = by_value(checks)
        _say(f"{len(before)} results of {kept} are taken over")

    def note(results: Sequence[Result]) -> None:
        _say(line(results[-1]))
        args.out.write_text(write(results))  # each time: what ends this program leaves a page
        records.write(kept, machine, results)

    results = run_all(
        checks,
        context,
        after_each=note,
        before=before,
        seconds=math.inf if args.minutes is None else 60 * args.minutes,
    )
    names = {result.check.name for result in results}
    if left := [check.name for check in checks if check.name not in names]:
        _say(f"no time was left for {', '.join(left)}: the same command goes on there")
    _say(f"{totals(results)}; {args.out}")
    return int(any(result.outcome is Outcome.FAILS for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_results.md"), metavar="FILE", help="the page"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="directory of the checks' files; default: a new one",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name in ENGINES:
        variable = f"TREADLE_{name.upper()}_SERVER"
        parser.add_argument(
            f"--{name}",
            metavar="COMMAND",
            default=os.environ.get(variable),
            help=f"starts a server in the environment of {name}; default: {variable}",
        )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory that the servers load; default: a small one",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CHECK", help="these; what they need is not run"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="end after so many, what matters most first; the next call with the same --out goes "
        "on from there, as its results are in a file beside it that ends in .jsonl",
    )
    parser.add_argument("--list", action="store_true", help="print the checks and what they show")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
