"""`treadle doctor`: what is wrong with this environment, this machine and a run, and what to do."""

import argparse
import json
from collections.abc import Mapping, Sequence

from treadle.tracing.diagnosis import Diagnosis, Level, as_table
from treadle.trainer.cli.config_files import add_config_options, config_files
from treadle.trainer.cli.console import fail, say
from treadle.trainer.config.load import ConfigError

__all__ = ["as_json", "main"]

_MAX_WIDTH = 24

_USAGE = """\
Checks the environment and the machine and says how to fix what fails. With the arguments of a
training command it checks that run too: its settings, data, model and tokenizer, the engine in its
own environment, and the nodes of a Ray cluster. It trains nothing and changes nothing.

Exit status 0: no check fails; 1: one does; 2: the command line is wrong."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle doctor",
        description=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON object")
    add_config_options(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as launch.kind=ray; of the run"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_intermixed_args(argv)
    try:
        files = config_files(args)
    except ConfigError as error:
        return fail(error)
    from treadle.trainer.doctor import (
        check_environment,
        check_gpus,
        check_machine,
        check_settings,
    )
    from treadle.trainer.launch.gpus import all_gpus

    gpus = all_gpus()
    found: dict[str, Sequence[Diagnosis]] = {
        "environment": list(check_environment(num_gpus=len(gpus))),
        "machine": [*check_machine(), *check_gpus(gpus)],
    }
    if files or args.overrides:
        found["run"] = list(check_settings(files, args.overrides, gpus=gpus))
    say(as_json(found) if args.json else as_table(found, max_width=_MAX_WIDTH))
    every = [finding for findings in found.values() for finding in findings]
    return int(any(finding.level is Level.FAIL for finding in every))


def as_json(found: Mapping[str, Sequence[Diagnosis]]) -> str:
    """Returns a JSON object: area -> array of findings."""
    rows = {area: [finding.as_json() for finding in findings] for area, findings in found.items()}
    return json.dumps(rows, indent=1)
