"""The checks of an evaluation: they find errors before anything is started or written.

Invariant: all problems are reported at once, by checks from the table of `preflight`. A training
run selects more of them.
"""

from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop import SetupError
from treadle.policy.backends.registry import describe
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import Inputs
from treadle.trainer.evaluation.source import Source
from treadle.trainer.own_code import NOTHING
from treadle.trainer.preflight.table import (
    CONTEXT,
    LAUNCHER,
    MODEL,
    PROMPTS,
    RENDERER,
    REWARD,
    ROWS,
    RULES,
    SERVERS,
    TRACING,
    TRIAL,
    TRUTH,
    WORKERS,
    Check,
    Findings,
)
from treadle.trainer.rollout.chat_api.renderer import ApiRenderer

__all__ = ["CheckedEvaluation", "check_evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEvaluation:
    """An evaluation that can be started.

    Attributes:
        given: The configuration as the user gave it.
        config: The same with `model.path` as a local directory.
        inputs: The user's files, read and checked; the rows are in `val`.
        api_renderer: The renderer of the inputs, if the source is an API.
    """

    source: Source
    given: Config
    config: Config
    out: Path
    inputs: Inputs
    api_renderer: ApiRenderer | None = None


def check_evaluation(config: Config, source: Source, out: Path) -> CheckedEvaluation:
    """Makes all checks; takes seconds, and longer for many rows.

    Args:
        out: Where everything is written; absent or empty.

    Raises:
        ConfigError: A setting cannot be carried out on this machine.
        DataError: A row cannot be used.
        SetupError: `out` is not empty, or the configuration names something that does not exist or
            does not fit.
        SeveralProblems: More than one of these.
    """
    attached = source.address is not None or source.url is not None
    found = Findings(
        config=config,
        out=out,
        source=source,
        own=NOTHING,
        missing=("data.train_files",),
        backend=describe("megatron"),
        sees=True,
        fetch=not attached,
    )
    found.make((Check("", "out", _check_place), *ROWS, *RULES, REWARD, *TRUTH))
    if source.url is None:
        found.make((*MODEL, CONTEXT, RENDERER))
    else:
        found["local"] = config
        found["renderer"] = found["api_renderer"] = ApiRenderer()
        found.make((Check("", "config", _check_workers),))
    found.make((*PROMPTS, TRIAL))
    found.make((WORKERS, TRACING) if attached else (*SERVERS, LAUNCHER, WORKERS, TRACING))
    found.problems.raise_if_any()
    return CheckedEvaluation(
        source=source,
        given=config,
        config=found["local"],
        out=out,
        inputs=found.inputs(),
        api_renderer=found.get("api_renderer"),
    )


def _check_workers(config: Config) -> None:
    if config.agent.num_workers:
        raise SetupError(
            f"agent.num_workers={config.agent.num_workers}: loop workers sample on rollout "
            "servers, and not at the URL of an API: add agent.num_workers=0"
        )


def _check_place(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SetupError(f"{out} is not empty: choose another place with --out, or remove it")
