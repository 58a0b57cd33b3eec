"""`treadle --help`: the front page, and the keys of the configuration by section."""

import textwrap
from types import MappingProxyType

from pydantic import BaseModel

from treadle.trainer.config.describe import key_listing, section_listing
from treadle.trainer.config.keys import all_sections, nearest
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import SftConfig
from treadle.trainer.config.verl_keys import ConfigError

__all__ = ["COMMANDS", "help_text", "sft_help_text", "unknown_command"]

COMMANDS = MappingProxyType(
    {
        "train": "train a model; the command if none is named",
        "sft": "train a model on conversations (supervised fine-tuning)",
        "eval": "score a model, a run or a server on a data file; trains nothing",
        "servers": "list the rollout servers of a running run; add and drain them",
        "export": "write the model of a run as a Hugging Face directory",
        "data": "convert a published data set to training rows",
        "doctor": "check this machine and, with its arguments, a run; say how to fix what is wrong",
        "new": "write a folder with a task of your own, which trains as it is",
        "serve": "serve the HTTP API of Tinker's SDK (treadle-serve)",
        "report": "make the report of a run again",
        "trajectories": "show the trajectories of a run that pass a filter, or query them with SQL",
        "verify": "check a run: its files against each other, and its steps computed again",
        "view": "show runs in a browser or as text: curves, trajectories, where the time went",
    }
)
"""The purpose of each command; `treadle COMMAND --help` describes its arguments."""

_EVERYTHING = "all"


def sft_help_text(options: str, topic: str | None) -> str:
    """Returns what `treadle sft --help` or `--help TOPIC` prints; see `help_text`.

    Raises:
        ConfigError: There is no such section.
    """
    if topic == _EVERYTHING:
        return key_listing(SftConfig)
    if topic is None:
        return f"{options}\n{_sections(SftConfig, 'treadle sft')}"
    return _section(topic, SftConfig)


def help_text(options: str, topic: str | None) -> str:
    """Returns what `--help` or `--help TOPIC` prints.

    Args:
        options: The usage and the options of `treadle train`.
        topic: None for the front page; a section of the configuration, as "rollout" or
            "policy.optimizer"; or "all".

    Raises:
        ConfigError: There is no such section.
    """
    if topic == _EVERYTHING:
        return key_listing()
    if topic is None:
        return f"{options}\n{_commands()}\n\n{_sections(Config, 'treadle')}"
    return _section(topic, Config)


def _section(topic: str, root: type[BaseModel]) -> str:
    sections = all_sections(root)
    if topic not in sections:
        near = nearest(topic, sections, limit=1)
        known = f"did you mean {near[0]}?" if near else f"sections: {', '.join(_top(root))}"
        raise ConfigError(f"--help {topic}: there is no such section; {known}")
    return section_listing(topic, root)


def unknown_command(word: str) -> str:
    """Returns the message for a first word that is neither a command nor key=value."""
    if word.endswith((".yaml", ".yml")):
        return f"{word!r} is a configuration file: give it as --config {word}"
    near = nearest(word, COMMANDS, limit=1)
    meant = f"did you mean `treadle {near[0]}`?" if near else "`treadle --help` lists the commands"
    return f"{word!r} is neither a command ({', '.join(COMMANDS)}) nor key=value; {meant}"


def _top(root: type[BaseModel]) -> list[str]:
    return [name for name in all_sections(root) if name and "." not in name]


def _commands() -> str:
    lines = [f"  {name:<12} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["commands (`treadle COMMAND --help` for more):", *lines])


def _sections(root: type[BaseModel], command: str) -> str:
    lines = [f"configuration (`{command} --help SECTION` lists its keys, `--help all` every key):"]
    for name in _top(root):
        first = " ".join(all_sections(root)[name].doc.split()).partition(". ")[0].removesuffix(".")
        lines += textwrap.wrap(
            first, 92, initial_indent=f"  {name:<11} ", subsequent_indent=" " * 14
        )
    return "\n".join(lines)
