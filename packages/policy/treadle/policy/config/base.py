"""The base class of a section, a frozen node of the configuration tree.

A section rejects unknown keys and holds the only copy of its defaults. Sections are values: they
can be compared, hashed and sent to another process.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "Seconds", "Section", "kind_alone"]

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def kind_alone(value: object) -> object:
    """Reads `ray` as `{kind: ray}`, so that a variant without settings needs one word."""
    return {"kind": value} if isinstance(value, str) else value


class Section(BaseModel):
    """Base of every section; fields are declared with a description and bounds."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
