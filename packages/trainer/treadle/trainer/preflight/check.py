"""The checks of a run: they find errors before anything is started.

Invariant: `--dry-run` and a run make the same checks of the table and report the same problems,
with one exception: a machine without a GPU can plan a run for one that has some.

Not checked: whether servers and policy fit their devices (the plan has an estimate), and what a Ray
cluster has (a plan queries it, and a run waits for it).
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.policy.backends.registry import describe as describe_backend
from treadle.trainer.config.load import MissingSettings
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import Inputs
from treadle.trainer.own_code import NOTHING, OwnCode
from treadle.trainer.plan import Plan
from treadle.trainer.preflight.describe import describe, memory_line
from treadle.trainer.preflight.devices import ask_cluster, device_rows
from treadle.trainer.preflight.model_checks import with_backend
from treadle.trainer.preflight.table import (
    OWN_CODE,
    PROCESSES,
    PROMPTS,
    ROWS,
    RUN_DIRECTORY,
    TRAINED_MODEL,
    TRIAL,
    Findings,
)
from treadle.trainer.preflight.without_torch import transformers_without_torch

__all__ = ["CheckedRun", "check_run"]

_ANSWERS = ("server_settings", "policy_ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run that can be started.

    Attributes:
        own: The user's objects beside the configuration.
        inputs: The user's files, read and checked.
    """

    config: Config
    run_dir: Path
    own: OwnCode
    inputs: Inputs
    plan: Plan


def check_run(
    config: Config,
    run_dir: Path,
    own: OwnCode = NOTHING,
    *,
    plan_only: bool = False,
    missing: MissingSettings | None = None,
    resumes: bool = False,
) -> CheckedRun:
    """Makes all checks; takes seconds, and longer for many rows.

    Args:
        run_dir: Where it would write; need not exist.
        own: The user's objects beside the configuration.
        plan_only: The process ends after this. torch is kept out of it
            (`transformers_without_torch`), and the GPUs may be those of another machine.
        missing: Settings that `config` has in form only: one of the problems, whose values are
            not looked at.
        resumes: Whether the run resumes by itself. As for one whose directory holds steps, the
            user's code is not tried then: it has run, and what it needs may be down for a moment.

    Raises:
        ConfigError: A setting cannot be carried out on this machine.
        DataError: A row cannot be used.
        RunDirectoryError: `run_dir` cannot be used.
        SetupError: The configuration names something that does not exist or does not fit.
        SeveralProblems: More than one of these.
    """
    missing_keys = () if missing is None else missing.keys
    why = "the default"
    if "model.path" not in missing_keys:
        config, why = with_backend(config)
    backend = describe_backend(config.policy.backend)
    found = Findings(
        config=config,
        run_dir=run_dir,
        own=own,
        missing=missing_keys,
        backend=backend,
        fetch=False,
        needed=not plan_only,
    )
    for error in () if missing is None else missing.errors:
        found.problems.add(error)
    # The user's code comes before the tokenizer: it may need torch.
    found.make((*ROWS, RUN_DIRECTORY, *OWN_CODE))
    with transformers_without_torch() if plan_only else nullcontext():
        found.make(TRAINED_MODEL)
    resume = found.get("resume")
    has_run = resumes or (resume is not None and resume.begun)
    found.make((*PROMPTS, *(() if has_run else (TRIAL,)), *PROCESSES))
    # A run reserves its GPUs as it starts.
    cluster = ask_cluster(config) if plan_only else None
    found.problems.raise_if_any()
    inputs, plan, architecture = found.inputs(), found["plan"], found["architecture"]
    per_update = plan.trajectories_per_step // config.algorithm.mini_batches
    line, memory = memory_line(config, backend, architecture, per_update, found.get("reference"))
    details = (
        *describe(config, own, inputs, backend, architecture),
        ("memory of a policy rank", line),
        *device_rows(config, architecture, memory, found["gpus"], cluster),
        ("policy backend", f"{config.policy.backend}: {why}"),
        *((name.replace("_", " "), found[name]) for name in _ANSWERS if name in found),
    )
    plan = replace(plan, details=details)
    return CheckedRun(config=config, run_dir=run_dir, own=own, inputs=inputs, plan=plan)
