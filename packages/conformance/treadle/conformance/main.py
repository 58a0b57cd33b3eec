"""The command: a server's address -> a table of what holds, and an exit code.

Invariant: exit code 0 says that everything that ran holds; 1 that something does not; 2 that
nothing was found out, because of the command line or because no server answered.

Needs pytest, which it imports late: `--help` does without.
"""

import argparse
import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "python -m treadle.conformance"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Checks a running server against the rollout contract, and prints what holds. "
        "The server must do nothing else meanwhile: it is paused, and its weights are replaced.",
    )
    made.add_argument("--address", required=True, metavar="HOST:PORT", help="of the server")
    made.add_argument("--ca", type=Path, metavar="FILE", help="PEM certificate that signed its own")
    made.add_argument("--token-file", type=Path, metavar="FILE", help="holds its bearer token")
    weights = made.add_mutually_exclusive_group()
    weights.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the Hugging Face directory that it serves; what it samples is compared with "
        "transformers, and its weights are updated",
    )
    weights.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="as --model, for a server that computes no model: weights are updated and nothing is "
        "compared",
    )
    made.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="the directory that its file transport reads, as it is called here; unset, files are "
        "not checked",
    )
    made.add_argument(
        "--tolerance",
        type=float,
        default=2e-4,
        metavar="NATS",
        help="by which its log-probs may differ from transformers' (default %(default)s, for "
        "float32; 0.15 for bfloat16)",
    )
    made.add_argument(
        "--continue-recomputes",
        action="store_true",
        help="what CONTINUE keeps is read anew by new weights; else its keys and values stay",
    )
    made.add_argument("--no-prefix-cache", action="store_true", help="it keeps no prefixes")
    made.add_argument(
        "--places",
        type=int,
        metavar="N",
        help="sequences that it runs side by side; unset, priorities are not checked",
    )
    made.add_argument(
        "--long",
        type=int,
        default=300,
        metavar="N",
        help="tokens of a completion that must still run when it is disturbed (default "
        "%(default)s)",
    )
    made.add_argument(
        "--draws",
        type=int,
        default=300,
        metavar="N",
        help="completions by which a distribution is measured (default %(default)s)",
    )
    made.add_argument("--only", metavar="WORDS", help="checks with these words; 'or' is understood")
    made.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the kit; returns the exit code."""
    options = parser().parse_args(argv)
    lacking = [name for name in ("pytest", "pytest_asyncio") if not importlib.util.find_spec(name)]
    if lacking:
        return _fail(f"{' and '.join(lacking)} not installed: pip install treadle-conformance")
    # Late, so that --help needs neither gRPC nor pytest.
    from treadle.conformance import report, run, settings

    with tempfile.TemporaryDirectory() as scratch:
        try:
            found = settings.resolve(options, Path(scratch) / "turned")
            answer = asyncio.run(settings.handshake(found))
        except settings.Unusable as error:
            return _fail(str(error))
        sys.stdout.write(report.heading(found.address, answer))
        try:
            checks = run.run(found, settings.lacking(found, answer), only=options.only)
        except RuntimeError as error:
            return _fail(str(error))
    sys.stdout.write(report.table(checks))
    if options.json is not None:
        options.json.write_text(report.as_json(found.address, answer, checks))
    if not checks:
        return _fail(f"no check has the words {options.only!r}")
    return int(any(check.outcome is run.Outcome.FAILS for check in checks))


def _fail(message: str) -> int:
    sys.stderr.write(f"{PROGRAM}: {message}\n")
    return 2
