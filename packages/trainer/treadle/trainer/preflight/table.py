"""The table of checks that train, sft and eval select from, with their dry runs and the doctor.

Invariant: a check reads and does not write, and starts nothing that outlives it. Each check whose
needs were found is made, so all problems are reported at once and none is the consequence of
another.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from treadle.agent_loop import LoopRegistry, SetupError
from treadle.policy.backends.description import BackendDescription
from treadle.policy.config.algorithm import LOSS_NAMES
from treadle.trainer.checkpoint.begin_or_resume import check_run_directory, check_steps_left
from treadle.trainer.checkpoint.run_directory import RunDirectoryError
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig
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
from treadle.trainer.launch.policy_ranks import ask_rank_command
from treadle.trainer.model_source import resolve_model, with_model
from treadle.trainer.own_code import OwnCode
from treadle.trainer.plan import Plan, make_plan
from treadle.trainer.preflight.devices import check_gpus
from treadle.trainer.preflight.model_checks import (
    check_backend,
    check_config_file,
    check_parallel,
    check_reference,
    check_served_weights,
    check_training,
    check_vocabulary,
    check_weights,
    read_architecture,
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
from treadle.trainer.preflight.trial import try_own_code
from treadle.trainer.problems import Problems
from treadle.trainer.rollout.engine_checks import (
    check_engine_settings,
    check_row_features,
    check_training_features,
)
from treadle.trainer.rollout.loops_from_config import load_loops, prompt_rules
from treadle.trainer.rollout.server_process import ask_server_command, check_server_command
from treadle.trainer.tracing.backends import check_tracing

__all__ = ["INPUT_ERRORS", "Check", "Findings"]

INPUT_ERRORS: Final = (ConfigError, DataError, RunDirectoryError, SetupError)
"""The problems of a user's input."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Others find its result under it; "" if none needs it.
        needs: Names of its arguments, in order, separated by spaces. It is made if all were found;
            an argument whose name ends with "?" is None if it was not.
        run: Returns the result; None: there is nothing to be found.
    """

    name: str
    needs: str
    run: Callable[..., object]


class Findings(dict[str, Any]):
    """The results of the checks so far, and what they begin with, by name."""

    def __init__(self, **given: object) -> None:
        super().__init__(given)
        self.problems = self["problems"] = Problems(*INPUT_ERRORS)

    def make(self, checks: Iterable[Check]) -> None:
        """Makes the checks in order, as far as what they need was found."""
        for check in checks:
            needs = check.needs.split()
            if all(need in self for need in needs if not need.endswith("?")):
                with self.problems.collected():
                    result = check.run(*(self.get(need.removesuffix("?")) for need in needs))
                    if check.name and result is not None:
                        self[check.name] = result

    def inputs(self) -> Inputs:
        """Returns what a run reads, once no check has found a problem."""
        train, val = self.get("train_prompts"), self.get("val_prompts")
        splits = [split for split in (train, val) if split is not None]
        return Inputs(
            renderer=self["renderer"],
            rules=self["rules"],
            reward=self["reward"],
            train=() if train is None else train.prompts,
            val=() if val is None else val.prompts,
            loops=frozenset().union(*(split.loops for split in splits)),
            notes=tuple(note for split in splits for note in split.notes),
            images=any(split.has_images for split in splits),
        )


def _read(config: Config) -> Callable[..., Sequence[Row]]:
    reader = config.data.reader
    return partial(read_rows, reader=None if reader is None else load_reader(reader))


def _train_rows(
    config: Config, read: Callable[..., Sequence[Row]], missing: Collection[str]
) -> Sequence[Row] | None:
    if "data.train_files" in missing:
        return None
    return read(config.data.train_files, in_files=config.data.streaming)


def _val_rows(
    config: Config, read: Callable[..., Sequence[Row]], source: object
) -> Sequence[Row] | None:
    """An evaluation has no other rows, so that none are a problem."""
    data = config.data
    wanted = data.val_files or source is not None
    return read(data.val_files, limit=data.max_val_rows) if wanted else None


def _may_see(config: Config, backend: BackendDescription, missing: Collection[str]) -> bool:
    """Returns whether rows may have images: the model sees, or another check rejects the model."""
    if "model.path" in missing:
        return True
    try:
        folder = resolve_model(config.model.path, weights=False)
        return read_model_config(folder).get("model_type") in backend.vision_types
    except SetupError:
        return True


def _loops(config: Config, own: OwnCode, rules: PromptRules | None) -> LoopRegistry | None:
    """Loads the loops where the rules failed: the loops alone may be right."""
    return load_loops(config.agent, own) if rules is None else None


def _fitting_rows(
    split: str,
    config: Config,
    rows: Sequence[Row],
    rules: PromptRules | None,
    loops: LoopRegistry | None,
) -> Sequence[Row] | None:
    if rules is not None:
        check_rows(rows, split=split, rules=rules)
        return rows
    if loops is not None:
        check_row_loops(rows, split=split, loops=loops, default_loop=config.agent.default_loop)
    return None


def _loss(config: Config) -> None:
    if config.algorithm.loss not in LOSS_NAMES:
        # Needs torch, which a loss of the user's own needs too.
        from treadle.policy.algorithms.choose_loss import check_loss

        check_loss(config.algorithm)


def _folder(config: AnyConfig, missing: Collection[str], fetch: bool) -> Path | None:
    return None if "model.path" in missing else resolve_model(config.model.path, weights=fetch)


def _weights(config: AnyConfig, folder: Path, fetch: bool) -> None:
    source = config.model.path
    if fetch or source.expanduser().is_dir() or not is_model_id(str(source)):
        check_weights(folder)


def _readable(folder: Path, backend: BackendDescription) -> Path:
    check_config_file(folder, backend.model_types)
    return folder


def _reference(config: Config, model: Path, backend: BackendDescription) -> object:
    if (reference := config.algorithm.reference_path) is None:
        return None
    return check_reference(reference, model, config.policy.parallel, backend)


def _served_reference(config: Config, renderer: Any) -> None:
    if config.algorithm.reference_addresses:
        # It loads grpc, which no other check needs.
        from treadle.trainer.rollout.served_reference import check_served_reference

        check_served_reference(config, renderer)


def _plan(config: Config, train: Sequence[Row], val: Sequence[Row] | None) -> Plan:
    return make_plan(
        config, num_train_rows=len(train), num_val_rows=len(val or ()), cpus=cpu_count()
    )


def _row_features(config: Config, rules: PromptRules, *prompts: PromptSet | None) -> None:
    splits = [split for split in prompts if split is not None]
    loops = frozenset[str]().union(*(split.loops for split in splits))
    check_row_features(
        config.rollout,
        images=any(split.has_images for split in splits),
        constraints="constrained_sampling" in rules.loops.required_capabilities(loops),
    )


def _server_command(config: Config) -> Config:
    check_server_command(config)
    return config


def _server_answer(config: Config) -> str | None:
    asks = config.rollout.server_command and config.launch.kind == "local"
    return ask_server_command(config) if asks else None


def _hosts(config: Config) -> None:
    check_addresses(config)
    check_network(config)


ROWS: Final = (
    Check("read", "config", _read),
    Check("train_rows", "config read missing", _train_rows),
    Check("val_rows", "config read source?", _val_rows),
)
RUN_DIRECTORY: Final = Check("resume", "run_dir config", check_run_directory)
RULES: Final = (
    Check("rules", "config own sees", lambda c, own, sees: prompt_rules(c, own, images=sees)),
    Check("loops", "config own rules?", _loops),
    *(
        Check(
            f"{split}_fitting", f"config {split}_rows rules? loops?", partial(_fitting_rows, split)
        )
        for split in ("train", "val")
    ),
)
REWARD: Final = Check(
    "reward",
    "config own rules? train_rows? val_rows?",
    lambda config, own, rules, *rows: load_reward(
        config, itertools.chain.from_iterable(filter(None, rows)), own, rules=rules
    ),
)
TRUTH: Final = tuple(
    Check("", f"config {split}_rows reward? rules?", partial(check_ground_truth, split=split))
    for split in ("train", "val")
)
OWN_CODE: Final = (
    Check("sees", "config backend missing", _may_see),
    *RULES,
    Check("", "config", check_estimator),
    REWARD,
    Check("", "config", _loss),
    *TRUTH,
)
MODEL: Final = (
    Check("folder", "config missing fetch", _folder),
    Check("", "config folder fetch", _weights),
    Check("model", "folder backend", _readable),
    Check("local", "config model", with_model),
)
CONTEXT: Final = Check("", "local", check_context)
RENDERER: Final = Check("renderer", "local", load_renderer)
ARCHITECTURE: Final = (
    Check("architecture", "model backend", read_architecture),
    RENDERER,
)
FIT: Final = (
    Check(
        "",
        "config backend architecture",
        lambda config, backend, shape: check_training(backend, config.policy, shape),
    ),
    Check("", "model architecture renderer", check_vocabulary),
)
TRAINED_MODEL: Final = (
    Check(
        "",
        "config backend",
        lambda config, backend: check_backend(
            backend,
            config.policy,
            critic=config.critic if config.algorithm.needs_critic else None,
            other_reference=config.algorithm.reference_path is not None,
        ),
    ),
    *MODEL,
    Check("", "config model", check_served_weights),
    CONTEXT,
    *ARCHITECTURE,
    Check("", "local backend architecture", check_parallel),
    *FIT,
    Check("reference", "config model backend", _reference),
    Check("", "local renderer", _served_reference),
)
PROMPTS: Final = tuple(
    Check(
        f"{split}_prompts",
        f"{split}_fitting rules renderer",
        lambda rows, rules, renderer, split=split: make_prompts(
            rows, split=split, rules=rules, renderer=renderer
        ),
    )
    for split in ("train", "val")
)
TRIAL: Final = Check("", "config rules reward train_prompts? val_prompts?", try_own_code)
PLAN: Final = (
    Check("plan", "config train_rows val_rows?", _plan),
    Check("", "resume plan", lambda resume, plan: check_steps_left(resume, plan.total_steps)),
    Check("", "config train_prompts plan", lambda c, prompts, _: check_rows_left(c, prompts)),
)
SERVERS: Final = (
    Check("", "config", check_engine_settings),
    Check("", "config rules train_prompts? val_prompts?", _row_features),
    Check("startable", "config", _server_command),
)
RANKS: Final = Check("policy_ranks", "config", ask_rank_command)
LAUNCHER: Final = Check("", "config", check_launcher)
WORKERS: Final = Check("", "config own", check_workers)
LOGGERS: Final = Check("", "config problems", check_loggers)
TRACING: Final = Check("", "config problems", check_tracing)
GPUS: Final = Check("gpus", "config needed", lambda c, needed: check_gpus(c, needed=needed))
PROCESSES: Final = (
    *PLAN,
    *SERVERS,
    Check("", "config", check_training_features),
    Check("server_settings", "startable", _server_answer),
    RANKS,
    LAUNCHER,
    WORKERS,
    Check("", "config", _hosts),
    LOGGERS,
    TRACING,
    GPUS,
)
