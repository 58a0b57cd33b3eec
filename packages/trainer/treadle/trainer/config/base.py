"""The section: a frozen node of the configuration tree.

A section refuses keys it does not have and has the only copy of its defaults. Sections are
values: comparing, hashing into a file and sending to another process need no care.
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
