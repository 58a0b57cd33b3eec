"""Configurations: the head is `file` for YAML, or `argument` for one `key=value`."""

import tempfile
from pathlib import Path

from fuzz.inputs import Input
from fuzz.target import Fell, Target

from treadle.trainer.config.load import ConfigError, load_config

_MAX_CHARACTERS = 20_000


class ConfigTarget(Target):
    """What files and arguments make of a configuration."""

    promises = (
        "A configuration, or a ConfigError of bounded length; nothing else. What is taken can be "
        "written as JSON and read again, and is the same then."
    )
    form = "text"
    heads = ("file", "argument")
    words = tuple(
        word.encode()
        for word in (
            *(
                ": ",
                "- ",
                "? ",
                "&a ",
                "*a",
                "<<: ",
                "!!python/object:os.system ",
                "!!binary ",
                "|\n",
            ),
            *("null", "true", "1e400", ".inf", ".nan", "0x1f", "0o17", "1_000", "2001-01-01", "~"),
            *("[", "]", "{", "}", "\n", "  ", "\t", "#", "'", '"', "\\", "=", "%", "@", "---\n"),
            *("[" * 300, "{a: " * 300, "9" * 5000, "\x00", "\ud7ff", "\u2028", "${oc.env:HOME}"),
            *(
                "model:",
                "path",
                "run.dir=",
                "schedule.total_steps=",
                "trainer.total_epochs=",
                "kind",
            ),
            *(
                "algorithm.kind=",
                "data.train_files=[",
                "reward.name=",
                "+",
                "rollout.n",
                "agent.loops",
            ),
        )
    )

    def check(self, parts: Input) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files: list[Path] = []
            arguments: list[str] = []
            for number, part in enumerate(parts):
                if part.head == "argument":
                    arguments.append(part.body.decode(errors="replace"))
                else:
                    file = Path(folder, f"{number}.yaml")
                    file.write_bytes(part.body)
                    files.append(file)
            try:
                config = load_config(files, arguments).config
                again = Path(folder, "again.json")
                again.write_text(config.model_dump_json(), encoding="utf-8")
                if load_config([again], []).config != config:
                    raise Fell("what was written as JSON is another configuration")
            except ConfigError as error:
                if len(str(error)) > _MAX_CHARACTERS:
                    raise Fell(f"an error of {len(str(error))} characters") from error
            except Fell:
                raise
            except Exception as error:
                raise Fell(f"{type(error).__name__}: {error}") from error
