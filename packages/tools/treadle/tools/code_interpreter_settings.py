"""The settings of `code_interpreter`, read from a catalogue: verl's keys and `backend`.

Invariant: every key is used or refused, and a value of the wrong type or range is an error that
says so. Pure; nobody waits.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from treadle.agent_loop import SetupError
from treadle.tools.arguments import did_you_mean


class Backend(enum.StrEnum):
    """Where programs run."""

    SANDBOX_FUSION = "sandbox_fusion"
    """On a server with SandboxFusion's API: that, or `python -m treadle.tools.sandbox`."""
    LOCAL = "local"
    """Isolated with bubblewrap, started by this process."""
    RESTRICTED = "restricted"
    """In Monty, a restricted interpreter: small arithmetic, no libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeInterpreterSettings:
    """See `treadle.tools.code_interpreter`; the defaults are verl's."""

    backend: Backend = Backend.SANDBOX_FUSION
    sandbox_fusion_url: str = ""
    num_workers: int = 10
    rate_limit: int = 10
    enable_global_rate_limit: bool = True
    default_timeout: float = 30.0
    default_language: str = "python"
    memory_limit_mb: int = 1024

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Check a catalogue's `config`.

        Raises:
            SetupError: A key is unknown, or a value has the wrong type or range.
        """
        kinds = {field.name: type(getattr(cls(), field.name)) for field in fields(cls)}
        for key in config:
            if key not in kinds:
                raise SetupError(
                    f"unknown setting {key!r} of code_interpreter{did_you_mean(key, kinds)}; "
                    f"known are: {', '.join(kinds)}"
                )
        values = {key: _checked(key, value, kinds[key]) for key, value in config.items()}
        settings = cls(**values)  # type: ignore[arg-type]  # checked just now
        if settings.backend is Backend.SANDBOX_FUSION and not settings.sandbox_fusion_url:
            raise SetupError(
                "sandbox_fusion_url is not set: start a sandbox (python -m "
                "treadle.tools.sandbox) and give its address, such as "
                "http://127.0.0.1:8080/run_code; or set backend to local or restricted"
            )
        if settings.backend is not Backend.SANDBOX_FUSION and settings.sandbox_fusion_url:
            raise SetupError(
                f"sandbox_fusion_url has no meaning with the backend {settings.backend}; "
                "remove one of the two"
            )
        return settings


def _checked(key: str, value: object, kind: type) -> object:
    if kind is Backend:
        if value not in list(Backend):
            raise SetupError(f"backend is {value!r}; it must be one of {', '.join(Backend)}")
        return Backend(str(value))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise SetupError(f"{key} must be of type {kind.__name__}, not {value!r}")
    if isinstance(value, int | float) and kind is not bool and not 0 < value < float("inf"):
        raise SetupError(f"{key} is {value!r}; it must be above 0")
    return value
