"""`treadle sft`: argv -> configuration -> plan -> supervised fine-tuning.

To resume a failed or interrupted run, repeat the command with its `run.dir`; it continues from the
latest checkpoint.
"""

import argparse
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.trainer.checkpoint.run_directory import new_run_dir
from treadle.trainer.cli.config_files import add_run_options
from treadle.trainer.cli.console import fail, say
from treadle.trainer.cli.run_command import run_command
from treadle.trainer.config.load import ConfigError, LoadedSftConfig, load_sft_config

if TYPE_CHECKING:
    from treadle.trainer.report import Summary

__all__ = ["command", "main"]

_USAGE = """\
Trains a language model on conversations, with tools or without: the loss is on what the assistant
says. Rows have the columns `messages` and, optionally, `tools`. The run directory is a model for
`treadle`, `treadle eval` and `treadle export`."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treadle sft", description=_USAGE, add_help=False)
    add_run_options(parser, section="data")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="YAML file; may be repeated, later ones win",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as data.batch_size=32; wins over files"
    )
    return parser


def command() -> int:
    """The command line of `./pants run packages/trainer:sft`."""
    return main(sys.argv[1:])


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    try:
        if args.help is not None:
            from treadle.trainer.cli.help import sft_help_text

            say(sft_help_text(parser.format_help(), args.help or None))
            return 0
        loaded = load_sft_config(args.config, args.overrides)
    except ConfigError as error:
        return fail(error)
    for note in loaded.notes:
        say(f"note: {note}")
    if args.print_config:
        from treadle.trainer.config.describe import value_listing

        say(value_listing(loaded))
    if args.print_config and not args.dry_run:
        return 0
    return _run(loaded, dry=args.dry_run)


def _run(loaded: LoadedSftConfig, *, dry: bool) -> int:
    from treadle.trainer.launch.resuming import settings_to_resume
    from treadle.trainer.preflight.table import INPUT_ERRORS
    from treadle.trainer.sft.check import check_sft
    from treadle.trainer.sft.run import run_sft

    config = loaded.config
    run_dir = config.run.dir or new_run_dir(config.run.name)
    say("checking settings, rows, model and tokenizer")
    try:
        run = check_sft(config, run_dir, keep_torch_out=True, gpus_needed=not dry)
    except INPUT_ERRORS as error:
        return fail(error)
    if dry:
        say("\n".join((*run.notes, run.plan())))
        return 0

    def attempt(losses: Sequence[str]) -> "Coroutine[Any, Any, Summary]":
        again = settings_to_resume(config, losses)
        checked = check_sft(again, run_dir, keep_torch_out=True) if losses else run
        return run_sft(checked, losses=losses)

    return run_command(attempt, run_dir, max_failures=config.launch.max_failures)
