"""What a change costs: one benchmark on this tree and on an older commit, in turns.

The older commit is checked out into a separate directory. Each round runs the script of each tree
once, with that tree's packages, so both meet the same weather of the machine; every second round
starts with the other tree. A figure is a number in the JSON that the script writes, named by its
place there; numbers in lists become their median first. A figure that only one tree has is left out
and named.

    python benchmarks/against_commit.py COMMIT SCRIPT [--rounds 5] [--option=--json]
        [--figures PATTERN ...] -- OPTIONS OF THE SCRIPT

`--option=` is the script's option for the file of its results (`--json` or `--out`), `--figures`
shell patterns of the figures to print. The printed ratio is this tree divided by the older commit:
the median of the rounds' ratios, and their range.
"""

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parents[1]


def figures(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yields every number of a JSON value with its place, for example `rounds.server.calls_s`."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield place, float(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from figures(part, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        found: dict[str, list[float]] = {}
        for part in value:
            for name, number in figures(part, place):
                found.setdefault(name, []).append(number)
        for name, numbers in found.items():
            yield name, statistics.median(numbers)


def run_once(tree: Path, script: str, option: str, options: list[str]) -> dict[str, float]:
    """Runs a tree's script in a separate interpreter and returns its figures.

    Raises:
        SystemExit: The script failed; its output is printed.
    """
    paths = [tree / "proto", *sorted((tree / "packages").iterdir()), tree / "benchmarks"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.json")
        command = [
            sys.executable,
            str(tree / "benchmarks" / script),
            option,
            str(results),
            *options,
        ]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode or not results.exists():
            sys.exit(f"{tree / 'benchmarks' / script} failed:\n{done.stdout}{done.stderr}")
        return dict(figures(json.loads(results.read_text())))


def main() -> None:
    """Prints one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="the older commit")
    parser.add_argument("script", help="of both trees' benchmarks/, for example sandbox.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--option", default="--json", help="that names the file of results")
    parser.add_argument("--figures", nargs="+", default=["*"], help="shell patterns")
    parser.epilog = "After -- follow the options of the script."
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]

    git = ["git", "-C", str(_HERE), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        old = Path(directory, "tree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), arguments.commit], check=True)
        try:
            rounds: dict[Path, list[dict[str, float]]] = {_HERE: [], old: []}
            for number in range(arguments.rounds):
                for tree in (_HERE, old) if number % 2 else (old, _HERE):
                    found = run_once(tree, arguments.script, arguments.option, options)
                    rounds[tree].append(found)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)

    new_names, old_names = (set(rounds[tree][0]) for tree in (_HERE, old))
    for name in sorted(new_names & old_names):
        if not any(fnmatch.fnmatch(name, pattern) for pattern in arguments.figures):
            continue
        then = [found[name] for found in rounds[old]]
        now = [found[name] for found in rounds[_HERE]]
        ratios = [a / b for a, b in zip(now, then, strict=True) if b]
        ratio = (
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            if ratios
            else "none"
        )
        print(
            f"{name}: then {statistics.median(then):.6g}, now {statistics.median(now):.6g},"
            f" ratio {ratio}"
        )
    if only := sorted(new_names ^ old_names):
        print("measured by one of the two only:", ", ".join(only))


if __name__ == "__main__":
    main()
