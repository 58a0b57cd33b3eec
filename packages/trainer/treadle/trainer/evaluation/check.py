"""The checks of an evaluation: what can be known to be wrong before anything is started or written.

Invariant: a check reads and does not write. All problems are said at once, as of a run; see
`preflight/check.py`, which makes more of them, since a run also trains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop import RewardFn, SetupError
from treadle.policy.backends.registry import describe
from treadle.trainer.config.load import ConfigError
from treadle.trainer.config.schema import Config
from treadle.trainer.data import DataError, PromptRules, Row, check_rows, make_prompts, read_rows
from treadle.trainer.data.load_data import (
    Inputs,
    check_context,
    check_ground_truth,
    load_renderer,
    load_reward,
)
from treadle.trainer.data.own_reader import load_reader
from treadle.trainer.evaluation.source import Source
from treadle.trainer.model_source import resolve_model, with_model
from treadle.trainer.own_code import NOTHING
from treadle.trainer.preflight.model_checks import check_config_file, check_weights
from treadle.trainer.preflight.process_checks import check_launcher, check_workers
from treadle.trainer.problems import Problems
from treadle.trainer.rollout.loops_from_config import prompt_rules
from treadle.trainer.rollout.server_process import check_engine_settings, check_server_command
from treadle.trainer.tracing.backends import check_tracing

__all__ = ["CheckedEvaluation", "check_evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEvaluation:
    """An evaluation that can be started.

    Attributes:
        given: The configuration as the user gave it.
        config: The same with `model.path` as a local directory.
        inputs: The user's files, read and checked; the rows are in `val`.
    """

    source: Source
    given: Config
    config: Config
    out: Path
    inputs: Inputs


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
    checks = _Checks(config, source)
    with checks.problems.collected():
        _check_place(out)
    checks.rows_and_code()
    checks.model()
    checks.processes()
    return CheckedEvaluation(
        source=source, given=config, config=checks.config, out=out, inputs=checks.inputs()
    )


class _Checks:
    """The findings so far; None where a check failed or could not be made."""

    def __init__(self, config: Config, source: Source) -> None:
        self.config = config
        self.problems = Problems(ConfigError, DataError, SetupError)
        self._attached = source.address is not None
        self._rows: Sequence[Row] | None = None
        self._rules: PromptRules | None = None
        self._reward: RewardFn | None = None
        self._inputs: Inputs | None = None

    def rows_and_code(self) -> None:
        """Reads the rows; loads loops, tools, interactions and the reward."""
        data, check = self.config.data, self.problems.collected
        with check():
            reader = None if data.reader is None else load_reader(data.reader)
            self._rows = read_rows(data.val_files, limit=data.max_val_rows, reader=reader)
        with check():
            self._rules = prompt_rules(self.config, images=True)
        with check():
            self._reward = load_reward(self.config, self._rows or (), rules=self._rules)
        if self._rows is not None:
            with check():
                check_ground_truth(
                    self.config, self._rows, split="val", reward=self._reward, rules=self._rules
                )

    def model(self) -> None:
        """Looks at the model's files; loads its tokenizer and renders the prompts."""
        check = self.problems.collected
        if self._rows is not None and self._rules is not None:
            with check():
                check_rows(self._rows, split="val", rules=self._rules)
        with check():
            folder = resolve_model(self.config.model.path, weights=not self._attached)
            check_config_file(folder, describe("megatron").model_types)
            if not self._attached:
                check_weights(folder)
            self.config = with_model(self.config, folder)
            check_context(self.config)
            renderer = load_renderer(self.config)
            if self._rows is None or self._rules is None or self._reward is None:
                return
            prompts = make_prompts(self._rows, split="val", rules=self._rules, renderer=renderer)
            self._inputs = Inputs(
                renderer=renderer,
                rules=self._rules,
                reward=self._reward,
                train=(),
                val=prompts.prompts,
                loops=prompts.loops,
                notes=prompts.notes,
                images=prompts.has_images,
            )

    def processes(self) -> None:
        """Looks for the programs that will be started."""
        if not self._attached:
            with self.problems.collected():
                check_engine_settings(self.config.rollout)
            with self.problems.collected():
                check_server_command(self.config)
            with self.problems.collected():
                check_launcher(self.config)
        with self.problems.collected():
            check_workers(self.config, NOTHING)
        check_tracing(self.config, self.problems)

    def inputs(self) -> Inputs:
        """Returns the inputs.

        Raises:
            Exception: See `check_evaluation`.
        """
        self.problems.raise_if_any()
        assert self._inputs is not None, "what is missing has left a problem"
        return self._inputs


def _check_place(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SetupError(f"{out} is not empty: choose another place with --out, or remove it")
