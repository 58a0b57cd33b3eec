"""Constrained sampling by xgrammar, which vLLM and SGLang use.

Invariant: does not import xgrammar.
"""

import json
from pathlib import Path

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import TaggedText
from treadle.rollout_server.errors import InvalidField


def has_tokenizer(config: ServerConfig) -> bool:
    """Returns whether the model has the tokenizer that constrained sampling needs."""
    path = config.model.path
    names = ("tokenizer.json", "tokenizer_config.json")
    return path is not None and all((Path(path) / name).is_file() for name in names)


def structural_tag(tagged: TaggedText) -> str:
    """Returns the structural tag of tagged text, as JSON.

    Raises:
        InvalidField: A schema is no JSON.
    """
    return json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": [tagged.trigger],
                "tags": [
                    {
                        "type": "tag",
                        "begin": tag.begin,
                        "content": {"type": "json_schema", "json_schema": _schema(tag.json_schema)},
                        "end": tag.end,
                    }
                    for tag in tagged.tags
                ],
                "at_least_one": tagged.required,
                "stop_after_first": tagged.single,
            },
        }
    )


def _schema(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        field = "constraint.tagged.tags.json_schema"
        raise InvalidField(field, text, f"a JSON Schema ({error})") from None
