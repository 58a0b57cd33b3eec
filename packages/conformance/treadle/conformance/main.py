"""The command: checks the server at an address, prints a table, and returns an exit code.

The exit code is 0 if all checks that ran pass, 1 if a check fails, and 2 if there is no result,
because of the command line or because no server answered.

pytest is imported late, so that `--help` works without it.
"""

import argparse
import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.conformance.run import CheckResult

PROGRAM = "python -m treadle.conformance"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Checks a running server against the rollout contract, or a service against "
        "Tinker's API, and prints the result. Nothing else may use a rollout server meanwhile: it "
        "is paused, and its weights are replaced.",
    )
    _add_server(command_line)
    _add_extent(command_line)
    return command_line


def _add_server(command_line: argparse.ArgumentParser) -> None:
    """Adds how the server is reached, and what it has."""
    server = command_line.add_mutually_exclusive_group(required=True)
    server.add_argument("--address", metavar="HOST:PORT", help="address of the rollout server")
    server.add_argument(
        "--tinker",
        metavar="URL",
        help="address of a service with Tinker's HTTP API, without /api/v1; of the other options, "
        "--ca, --token-file (the key), --tolerance, --only and --json are for it",
    )
    command_line.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM certificate of its CA, or its own if self-signed",
    )
    command_line.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with its bearer token"
    )
    weights = command_line.add_mutually_exclusive_group()
    weights.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory of the model it serves; its samples are compared with "
        "transformers, and its weights are updated",
    )
    weights.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="like --model, for a server that runs no model: weights are updated but nothing is "
        "compared",
    )
    command_line.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="directory that its file transport reads, as a path on this machine; if unset, the "
        "file transport is not checked",
    )
    command_line.add_argument(
        "--continue-recomputes",
        action="store_true",
        help="new weights recompute the KV cache of sequences kept by CONTINUE; by default they "
        "keep their keys and values",
    )
    command_line.add_argument(
        "--no-prefix-cache", action="store_true", help="it has no prefix cache"
    )
    command_line.add_argument(
        "--places",
        type=int,
        metavar="N",
        help="number of sequences that it runs at once; if unset, priorities are not checked",
    )


def _add_extent(command_line: argparse.ArgumentParser) -> None:
    """Adds what is checked, and how strictly."""
    command_line.add_argument(
        "--tolerance",
        type=float,
        default=2e-4,
        metavar="NATS",
        help="maximum difference between its log-probs and those of transformers (default "
        "%(default)s, for float32; use 0.15 for bfloat16)",
    )
    command_line.add_argument(
        "--long",
        type=int,
        default=300,
        metavar="N",
        help="length in tokens of completions that must still be running when the kit interferes "
        "(default %(default)s)",
    )
    command_line.add_argument(
        "--draws",
        type=int,
        default=300,
        metavar="N",
        help="number of completions used to measure a distribution (default %(default)s)",
    )
    command_line.add_argument(
        "--only",
        metavar="WORDS",
        help="run only checks whose name has these words; 'or' separates alternatives",
    )
    command_line.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result here"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the kit and returns the exit code."""
    options = parser().parse_args(argv)
    missing = [name for name in ("pytest", "pytest_asyncio") if not importlib.util.find_spec(name)]
    if missing:
        return _fail(f"{' and '.join(missing)} not installed: pip install treadle-conformance")
    # Late, so that --help needs neither gRPC nor pytest.
    from treadle.conformance import report, run, settings
    from treadle.conformance.tinker import run as tinker

    try:
        if options.tinker is not None:
            about, checks = tinker.run(options, sys.stdout.write)
        else:
            about, checks = _check_rollout_server(options)
    except (settings.Unusable, RuntimeError) as error:
        return _fail(str(error))
    sys.stdout.write(report.table(checks))
    if options.json is not None:
        options.json.write_text(report.as_json(about, checks))
    if not checks:
        return _fail(f"--only {options.only!r} matches no check")
    return int(any(check.outcome is run.ContractOutcome.FAILS for check in checks))


def _check_rollout_server(
    options: argparse.Namespace,
) -> "tuple[Mapping[str, str], Sequence[CheckResult]]":
    from treadle.conformance import report, run, settings

    with tempfile.TemporaryDirectory() as scratch:
        found = settings.resolve(options, Path(scratch) / "rotated")
        info = asyncio.run(settings.handshake(found))
        sys.stdout.write(report.heading(found.address, info))
        checks = run.run(found, settings.skipped_parts(found, info), only=options.only)
    return report.about(found.address, info), checks


def _fail(message: str) -> int:
    sys.stderr.write(f"{PROGRAM}: {message}\n")
    return 2
