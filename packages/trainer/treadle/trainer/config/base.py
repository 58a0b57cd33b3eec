"""The base class of a section, a frozen node of the configuration tree.

A section rejects unknown keys and holds the only copy of its defaults. Sections are values: they
can be compared, hashed and sent to another process.
"""

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """Base of every section; fields are declared with a description and bounds."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
