"""Settings as JSON: how a section of the configuration travels to a program of another version.

Only what is not the default travels, so that a program that lacks a key refuses it only where it is
used. Reading gives an equal section.
"""

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from treadle.agent_loop import SetupError

__all__ = ["from_json", "to_json"]

T = TypeVar("T", bound=BaseModel)


def to_json(section: BaseModel) -> str:
    """Returns what of a section is not the default."""
    return json.dumps(section.model_dump(mode="json", exclude_defaults=True))


def from_json(section: type[T], text: str) -> T:
    """Returns the section that was written.

    Raises:
        SetupError: It has a key or a value that this version does not support.
    """
    try:
        return section.model_validate(json.loads(text))
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(str(part) for part in found["loc"])
        raise SetupError(
            f"{section.__name__} {key}: {found['msg']}; driver and policy ranks have different "
            "versions of treadle: leave the setting out, or install the same version"
        ) from error
