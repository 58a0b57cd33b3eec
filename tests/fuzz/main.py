"""Fuzzes targets for a while: `./pants run tests/fuzz:main -- parsers --seconds 60`.

The smallest input that falls is written to a file, which belongs into the corpus with the remedy:
the tests replay it from then on.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz.engine import fuzz, replay
from fuzz.inputs import read_corpus, read_input, write_input
from fuzz.target import Fell, peak_mib
from fuzz.targets import TARGETS


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if an input fell."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, help="repeats a run; else another one each time")
    parser.add_argument("--input", type=Path, metavar="FILE", help="give the target this one alone")
    parser.add_argument("--out", type=Path, default=Path(), help="where fallen inputs are written")
    args = parser.parse_args(argv)
    names = args.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    seed = int(time.time()) << 16 if args.seed is None else args.seed
    failed = False
    for name in names:
        failed |= not _run(name, args.seconds, seed, args.input, args.out)
    return int(failed)


def _run(name: str, seconds: float, seed: int, only: Path | None, out: Path) -> bool:
    with TARGETS[name]() as target:
        try:
            replay(
                target,
                read_corpus(name)
                if only is None
                else {str(only): read_input(only.read_text("utf-8"))},
            )
        except Fell as error:
            _say(f"{name}: {error}")
            return False
        if only is not None:
            _say(f"{name}: {only} holds")
            return True
        before = peak_mib()
        outcome = fuzz(name, target, seconds=seconds, first_seed=seed)
    _say(
        f"{name}: {outcome.inputs} inputs in {outcome.seconds:.0f} s, seed {seed}, at most "
        f"{peak_mib()} MiB (+{peak_mib() - before})"
    )
    if outcome.fallen is None:
        return True
    text = write_input(outcome.fallen)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    file.write_text(text, encoding="utf-8")
    _say(f"  fell: {outcome.why}\n  written to {file}")
    return False


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
