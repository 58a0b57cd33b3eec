"""The checks of a run: everything that can be known to be wrong before anything is started.

Invariant: a check reads and does not write, and starts nothing that outlives it. Each check whose
own preconditions hold is made, so all problems are said at once and none is the consequence of
another. `--dry-run` and a run make the same checks: what one says, the other does too. One thing
differs: a machine without any GPU can plan a run for one that has some.

Not known before a start: whether servers and policy fit their devices (the plan has an estimate),
and what a Ray cluster has (a plan asks it, and a run waits for it).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.agent_loop import LoopRegistry, RewardFn, SetupError
from treadle.policy.backends.registry import describe as describe_backend
from treadle.policy.config.algorithm import LOSS_NAMES
from treadle.trainer.checkpoint.begin_or_resume import (
    ResumePoint,
    check_run_directory,
    check_steps_left,
)
from treadle.trainer.checkpoint.run_directory import RunDirectoryError
from treadle.trainer.config.load import MissingSettings
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.data import (
    DataError,
    PromptRules,
    PromptSet,
    Row,
    check_row_loops,
    check_rows,
    make_prompts,
    read_rows,
)
from treadle.trainer.data.load_data import (
    Inputs,
    check_context,
    check_ground_truth,
    load_renderer,
    load_reward,
    read_model_config,
)
from treadle.trainer.data.own_reader import load_reader
from treadle.trainer.hub import is_model_id
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.launch.gpus import Gpu
from treadle.trainer.launch.policy_ranks import ask_rank_command
from treadle.trainer.model_source import resolve_model, with_model
from treadle.trainer.own_code import NOTHING, OwnCode
from treadle.trainer.plan import Plan, make_plan
from treadle.trainer.preflight.describe import describe, memory_line
from treadle.trainer.preflight.devices import ask_cluster, check_gpus, device_rows
from treadle.trainer.preflight.model_checks import (
    check_backend,
    check_config_file,
    check_parallel,
    check_reference,
    check_training,
    check_vocabulary,
    check_weights,
    read_architecture,
    with_backend,
)
from treadle.trainer.preflight.process_checks import (
    check_addresses,
    check_estimator,
    check_launcher,
    check_loggers,
    check_network,
    check_rows_left,
    check_workers,
)
from treadle.trainer.preflight.without_torch import transformers_without_torch
from treadle.trainer.problems import Problems
from treadle.trainer.rollout.loops_from_config import load_loops, prompt_rules
from treadle.trainer.rollout.server_process import (
    ask_server_command,
    check_engine_settings,
    check_server_command,
)
from treadle.trainer.tracing.backends import check_tracing

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer
    from treadle.policy.backends.description import ModelShape

__all__ = ["CheckedRun", "check_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run that can be started.

    Attributes:
        config: As the user gave it.
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
) -> CheckedRun:
    """Makes all checks; takes seconds, and longer for many rows.

    Args:
        run_dir: Where it would write; need not exist.
        own: The user's objects beside the configuration.
        plan_only: The process ends after this. torch is kept out of it
            (`transformers_without_torch`), and the GPUs may be those of another machine.
        missing: Settings that `config` has in form only: one of the problems, whose values are
            not looked at.

    Raises:
        ConfigError: A setting cannot be carried out on this machine.
        DataError: A row cannot be used.
        RunDirectoryError: `run_dir` cannot be used.
        SetupError: The configuration names something that does not exist or does not fit.
        SeveralProblems: More than one of these.
    """
    checks = _Checks(config, run_dir, own, missing)
    checks.files()
    checks.own_code()  # before the tokenizer: it may need torch
    with transformers_without_torch() if plan_only else nullcontext():
        checks.model()
    checks.prompts()
    checks.processes()
    checks.devices(needed=not plan_only)
    return checks.result()


class _Checks:
    """The findings so far; None, or left out, where a check failed or could not be made."""

    def __init__(
        self, config: Config, run_dir: Path, own: OwnCode, missing: MissingSettings | None
    ) -> None:
        self._missing: tuple[str, ...] = () if missing is None else missing.keys
        self._config = config
        why = "the default"
        if "model.path" not in self._missing:
            self._config, why = with_backend(config)
        backend = self._config.policy.backend
        self._backend = describe_backend(backend)
        self._run_dir = run_dir
        self._own = own
        self._problems = Problems(ConfigError, DataError, RunDirectoryError, SetupError)
        for error in () if missing is None else missing.errors:
            self._problems.add(error)
        self._rows: dict[str, Sequence[Row]] = {}
        self._rules: PromptRules | None = None
        self._fitting: list[str] = []
        self._reward: RewardFn | None = None
        self._architecture: ModelShape | None = None
        self._reference: ModelShape | None = None
        self._renderer: HfRenderer | None = None
        self._prompts: dict[str, PromptSet] = {}
        self._resume: ResumePoint | None = None
        self._plan: Plan | None = None
        self._answers = {"policy backend": f"{backend}: {why}"}
        self._gpus: tuple[Gpu, ...] = ()
        self._cluster: str | None = None

    def _check(self) -> AbstractContextManager[bool | None]:
        return self._problems.collected()

    def files(self) -> None:
        """Reads the rows; looks at the run directory."""
        data = self._config.data
        with self._check():
            reader = None if data.reader is None else load_reader(data.reader)
            if "data.train_files" not in self._missing:
                with self._check():
                    self._rows["train"] = read_rows(
                        data.train_files, reader=reader, in_files=data.streaming
                    )
            if data.val_files:
                with self._check():
                    self._rows["val"] = read_rows(
                        data.val_files, limit=data.max_val_rows, reader=reader
                    )
        with self._check():
            self._resume = check_run_directory(self._run_dir, self._config)

    def own_code(self) -> None:
        """Loads loops, tools, interactions, reward, loss and estimator; looks at the rows."""
        config, own = self._config, self._own
        loops: LoopRegistry | None = None
        with self._check():
            self._rules = prompt_rules(config, own, images=self._may_see())
        if self._rules is None:  # the loops alone may be right
            with self._check():
                loops = load_loops(config.agent, own)
        for split, rows in self._rows.items():
            with self._check():
                if self._rules is not None:
                    check_rows(rows, split=split, rules=self._rules)
                    self._fitting.append(split)
                elif loops is not None:
                    default = config.agent.default_loop
                    check_row_loops(rows, split=split, loops=loops, default_loop=default)
        with self._check():
            check_estimator(config)
        with self._check():
            every = itertools.chain.from_iterable(self._rows.values())
            self._reward = load_reward(config, every, own, rules=self._rules)
        if config.algorithm.loss not in LOSS_NAMES:
            with self._check():
                # Needs torch, which a loss of the user's own needs too.
                from treadle.policy.algorithms.choose_loss import check_loss

                check_loss(config.algorithm)
        if own.reward is None:
            for split, rows in self._rows.items():
                with self._check():
                    check_ground_truth(
                        config, rows, split=split, reward=self._reward, rules=self._rules
                    )

    def _may_see(self) -> bool:
        """Returns whether rows may have images: the model sees, or `model` says what is wrong."""
        if "model.path" in self._missing:
            return True
        try:
            folder = resolve_model(self._config.model.path, weights=False)
            return read_model_config(folder).get("model_type") in self._backend.vision_types
        except SetupError:
            return True

    def model(self) -> None:
        """Looks at the model's files; loads its tokenizer."""
        algorithm = self._config.algorithm
        with self._check():
            check_backend(
                self._backend,
                self._config.policy,
                critic=algorithm.needs_critic,
                other_reference=algorithm.reference_path is not None,
            )
        if "model.path" in self._missing:
            return
        source, folder = self._config.model.path, None
        with self._check():
            folder = resolve_model(source, weights=False)
        if folder is None:
            return
        config = with_model(self._config, folder)
        if source.expanduser().is_dir() or not is_model_id(str(source)):
            with self._check():
                check_weights(folder)
        readable = False
        with self._check():
            check_config_file(folder, self._backend.model_types)
            readable = True
        if not readable:
            return
        with self._check():
            check_context(config)
        with self._check():
            self._architecture = read_architecture(folder, self._backend)
        with self._check():
            self._renderer = load_renderer(config)
        if self._architecture is not None:
            with self._check():
                check_parallel(config, self._backend, self._architecture)
            with self._check():
                check_training(self._backend, config.policy, self._architecture)
        if self._architecture is not None and self._renderer is not None:
            with self._check():
                check_vocabulary(folder, self._architecture, self._renderer)
        if (reference := config.algorithm.reference_path) is not None:
            with self._check():
                self._reference = check_reference(
                    reference, folder, config.policy.parallel, self._backend
                )
        if config.algorithm.reference_addresses and self._renderer is not None:
            # It loads grpc, which no other check needs.
            from treadle.trainer.rollout.served_reference import check_served_reference

            with self._check():
                check_served_reference(config, self._renderer)

    def prompts(self) -> None:
        """Renders the prompt of every row."""
        if self._rules is None or self._renderer is None:
            return
        for split in self._fitting:
            with self._check():
                self._prompts[split] = make_prompts(
                    self._rows[split], split=split, rules=self._rules, renderer=self._renderer
                )

    def processes(self) -> None:
        """Computes the plan; looks for the programs that will be started."""
        config = self._config
        if "train" in self._rows:
            with self._check():
                self._plan = make_plan(
                    config,
                    num_train_rows=len(self._rows["train"]),
                    num_val_rows=len(self._rows.get("val", ())),
                    cpus=cpu_count(),
                )
        if self._plan is not None and self._resume is not None:
            with self._check():
                check_steps_left(self._resume, self._plan.total_steps)
        if self._plan is not None and (prompts := self._prompts.get("train")) is not None:
            with self._check():
                check_rows_left(config, prompts)
        with self._check():
            check_engine_settings(config.rollout)
        with self._check():
            check_server_command(config)
            if config.rollout.server_command and config.launch.kind == "local":
                self._answers["server settings"] = ask_server_command(config)
        with self._check():
            if (answer := ask_rank_command(config)) is not None:
                self._answers["policy ranks"] = answer
        with self._check():
            check_launcher(config)
        with self._check():
            check_workers(config, self._own)
            check_addresses(config)
            check_network(config)
        check_loggers(config, self._problems)
        check_tracing(config, self._problems)

    def devices(self, *, needed: bool) -> None:
        """Looks for the GPUs; see `check_gpus`."""
        with self._check():
            self._gpus = check_gpus(self._config, needed=needed)
        if not needed:  # a run reserves its GPUs as it starts
            self._cluster = ask_cluster(self._config)

    def result(self) -> CheckedRun:
        """Returns the run.

        Raises:
            Exception: See `check_run`.
        """
        self._problems.raise_if_any()
        # Whatever is missing has left a problem.
        assert self._rules is not None and self._reward is not None and self._plan is not None
        assert self._renderer is not None and self._architecture is not None
        train, val = self._prompts["train"], self._prompts.get("val")
        inputs = Inputs(
            renderer=self._renderer,
            rules=self._rules,
            reward=self._reward,
            train=train.prompts,
            val=() if val is None else val.prompts,
            loops=train.loops | (frozenset() if val is None else val.loops),
            notes=(*train.notes, *(() if val is None else val.notes)),
            images=train.has_images or (val is not None and val.has_images),
        )
        config, plan = self._config, self._plan
        per_update = plan.trajectories_per_step // config.algorithm.mini_batches
        line, memory = memory_line(
            config, self._backend, self._architecture, per_update, self._reference
        )
        details = (
            *describe(config, self._own, inputs, self._backend, self._architecture),
            ("memory of a policy rank", line),
            *device_rows(config, self._architecture, memory, self._gpus, self._cluster),
            *self._answers.items(),
        )
        return CheckedRun(
            config=config,
            run_dir=self._run_dir,
            own=self._own,
            inputs=inputs,
            plan=replace(plan, details=details),
        )
