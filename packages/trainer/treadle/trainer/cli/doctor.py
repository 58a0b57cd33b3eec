"""`treadle doctor`: what is wrong with this environment, this machine and a run, and what to do."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from treadle.trainer.cli.config_files import add_config_options, config_files
from treadle.trainer.cli.console import fail, say
from treadle.trainer.config.load import ConfigError

if TYPE_CHECKING:
    from treadle.trainer.doctor import Finding

__all__ = ["as_json", "as_table", "main"]

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
        Level,
        check_environment,
        check_gpus,
        check_machine,
        check_settings,
    )
    from treadle.trainer.launch.gpus import all_gpus

    gpus = all_gpus()
    found: dict[str, Sequence[Finding]] = {
        "environment": list(check_environment(num_gpus=len(gpus))),
        "machine": [*check_machine(), *check_gpus(gpus)],
    }
    if files or args.overrides:
        found["run"] = list(check_settings(files, args.overrides, gpus=gpus))
    say(as_json(found) if args.json else as_table(found))
    every = [finding for findings in found.values() for finding in findings]
    return int(any(finding.level is Level.FAIL for finding in every))


def as_table(found: Mapping[str, Sequence["Finding"]]) -> str:
    """Returns the findings of each area as text for people."""
    from treadle.trainer.doctor import Level

    every = [finding for findings in found.values() for finding in findings]
    width = min(24, max(len(finding.check) for finding in every))
    lines = []
    for area, findings in found.items():
        lines.append(area)
        for finding in findings:
            value = finding.value.replace("\n", f"\n{'':{width + 10}}")
            lines.append(f"  {finding.level.value:4}  {finding.check:{width}}  {value}")
            if finding.cause:
                lines.append(f"        {'':{width}}  because: {finding.cause}")
            if finding.fix:
                lines.append(f"        {'':{width}}  do: {finding.fix}")
    counts = [f"{sum(f.level is level for f in every)} {level.value}" for level in Level]
    return "\n".join([*lines, ", ".join(counts)])


def as_json(found: Mapping[str, Sequence["Finding"]]) -> str:
    """Returns a JSON object: area -> array of findings."""
    rows = {
        area: [dataclasses.asdict(f) | {"level": f.level.value} for f in findings]
        for area, findings in found.items()
    }
    return json.dumps(rows, indent=1)
