"""The options that name the configuration of a run, and the files that they give."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.config.hydra import named_file

__all__ = ["add_config_options", "add_run_options", "config_files"]


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`, and `--config-path` with `--config-name` as verl's scripts have them."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="YAML file; may be repeated, later ones win",
    )
    parser.add_argument(
        "--config-path", metavar="DIR", help="with --config-name: a file of DIR, as verl's scripts"
    )
    parser.add_argument("--config-name", metavar="NAME", help="NAME or NAME.yaml in --config-path")


def add_run_options(parser: argparse.ArgumentParser, *, section: str) -> None:
    """Adds the options of a command that runs for long."""
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="SECTION",
        help=f"this text, or the keys of a section as {section}, or of all",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every key, its value and its source"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="make every check, print the plan and stop"
    )


def config_files(args: argparse.Namespace) -> Sequence[Path]:
    """Returns the files in the order of their layers.

    Raises:
        ConfigError: `--config-path` and `--config-name` name no file.
    """
    named = named_file(args.config_path, args.config_name)
    return [*([] if named is None else [named]), *args.config]
