"""`treadle [train]`: argv -> configuration -> plan -> run.

To resume a failed or interrupted run, repeat the command with its `run.dir`; it continues from the
latest checkpoint.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.trainer.checkpoint.run_directory import new_run_dir
from treadle.trainer.cli.config_files import add_config_options, add_run_options, config_files
from treadle.trainer.cli.console import fail, say
from treadle.trainer.cli.run_command import run_command
from treadle.trainer.config.load import ConfigError, LoadedConfig, MissingSettings, load_config
from treadle.trainer.demo import DEMO

if TYPE_CHECKING:
    from treadle.trainer.report import Summary

__all__ = ["main"]

_USAGE = """\
Trains a language model by reinforcement learning with tools. Without --config and model.path it
trains the demo: a small model learns to use a calculator, on the CPU, in a few minutes."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle",
        description=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add_run_options(parser, section="rollout")
    parser.add_argument("--version", action="store_true", help="print the version")
    add_config_options(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="as rollout.top_p=0.9; wins over files; preset=dapo or gspo sets a recipe",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    if args.help is not None:
        return _help(parser, args.help or None)
    if args.version:
        say(f"treadle-trainer {_version()}")
        return 0
    return _run(args)


def _help(parser: argparse.ArgumentParser, topic: str | None) -> int:
    from treadle.trainer.cli.help import help_text

    try:
        say(help_text(parser.format_help(), topic))
    except ConfigError as error:
        return fail(error)
    return 0


def _version() -> str:
    try:
        return importlib.metadata.version("treadle-trainer")
    except importlib.metadata.PackageNotFoundError:
        return "from source, not installed"


def _run(args: argparse.Namespace) -> int:
    try:
        args.config = config_files(args)
        loaded = load_config(args.config, args.overrides, default_file=DEMO)
    except MissingSettings as missing:
        return fail(missing if args.print_config else _with_other_problems(args, missing))
    except ConfigError as error:
        return fail(error)
    for note in loaded.notes:
        say(f"note: {note}")
    if args.print_config:
        from treadle.trainer.config.describe import value_listing

        say(value_listing(loaded))
    if args.dry_run:
        return _dry_run(loaded)
    return 0 if args.print_config else _train(loaded)


def _with_other_problems(args: argparse.Namespace, missing: MissingSettings) -> Exception:
    """Returns what else is wrong too, as far as it does not depend on what is missing."""
    from treadle.trainer.preflight import check_run
    from treadle.trainer.preflight.table import INPUT_ERRORS

    below = [f"{key}=none" for key in missing.keys]
    loaded = load_config(args.config, args.overrides, default_file=DEMO, below=below)
    try:
        check_run(loaded.config, _run_dir(loaded), plan_only=True, missing=missing)
    except INPUT_ERRORS as error:
        return error
    return missing


def _dry_run(loaded: LoadedConfig) -> int:
    from treadle.trainer.preflight import check_run
    from treadle.trainer.preflight.table import INPUT_ERRORS

    wrote, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # beside the user's reward.py
    try:
        run = check_run(loaded.config, _run_dir(loaded), plan_only=True)
    except INPUT_ERRORS as error:
        return fail(_as_written(error, loaded))
    finally:
        sys.dont_write_bytecode = wrote
    for note in run.inputs.notes:
        say(note)
    say(run.plan.text())
    return 0


def _as_written(error: Exception, loaded: LoadedConfig) -> Exception:
    """Returns the error with the arguments that set a key of it by another name, as verl's."""
    for key, source in loaded.sources.items():
        own = source.lstrip("+").startswith(f"{key}=")
        if f"{key}=" in str(error) and "=" in source and not own:
            error.add_note(f"{key} was given as {source}")
    return error


def _run_dir(loaded: LoadedConfig) -> Path:
    return loaded.config.run.dir or new_run_dir(loaded.config.run.name)


def _train(loaded: LoadedConfig) -> int:
    from treadle.trainer.launch.resuming import settings_to_resume
    from treadle.trainer.preflight import check_run
    from treadle.trainer.preflight.table import INPUT_ERRORS
    from treadle.trainer.training_loop.train import run_training

    config, run_dir = loaded.config, _run_dir(loaded)

    def attempt(losses: Sequence[str]) -> "Coroutine[Any, Any, Summary]":
        try:
            checked = check_run(settings_to_resume(config, losses), run_dir, resumes=bool(losses))
        except INPUT_ERRORS as error:
            _as_written(error, loaded)
            raise
        return run_training(checked, losses=losses)

    say("checking settings, rows, your code, model and tokenizer")
    return run_command(attempt, run_dir, max_failures=config.launch.max_failures)
