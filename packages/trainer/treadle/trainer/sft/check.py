"""The checks before a fine-tuning, of `--dry-run` and of every start, and its plan.

Invariant: a check reads and does not write, and starts nothing. Each check whose own preconditions
hold is made, so all problems are said at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.agent_loop import SetupError
from treadle.policy.backends.registry import describe
from treadle.trainer.checkpoint.begin_or_resume import check_run_directory
from treadle.trainer.checkpoint.run_directory import RunDirectoryError
from treadle.trainer.config.logger_names import ALWAYS
from treadle.trainer.config.sft import SftConfig
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.data import DataError
from treadle.trainer.data.load_data import load_renderer, model_context
from treadle.trainer.hub import is_model_id
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.launch.gpus import Gpu
from treadle.trainer.launch.policy_ranks import ask_rank_command
from treadle.trainer.model_source import resolve_model
from treadle.trainer.preflight.devices import check_gpus, found_gpus, topology_rows
from treadle.trainer.preflight.model_checks import (
    check_backend,
    check_config_file,
    check_policy_parallel,
    check_training,
    check_vocabulary,
    check_weights,
    read_architecture,
    with_backend,
)
from treadle.trainer.preflight.process_checks import check_launcher, check_loggers
from treadle.trainer.preflight.without_torch import transformers_without_torch
from treadle.trainer.problems import Problems
from treadle.trainer.sft.conversations import Conversations, read_conversations
from treadle.trainer.sft.examples import ExampleSet, make_examples

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = ["CheckedSft", "check_sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSft:
    """A fine-tuning that can be started.

    Attributes:
        config: As the user gave it.
        val: Validation examples; None: it never validates.
        notes: Lines to print at start.
        policy_threads: CPU threads of one policy rank.
        gpus: Of this machine, if the run is to use some.
    """

    config: SftConfig
    run_dir: Path
    train: ExampleSet
    val: ExampleSet | None
    notes: tuple[str, ...]
    policy_threads: int
    gpus: tuple[Gpu, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        """Number of full steps in one pass over the training conversations."""
        return len(self.train.examples) // self.config.data.batch_size

    @property
    def total_steps(self) -> int:
        """Number of steps of the run."""
        schedule = self.config.schedule
        return schedule.total_steps or schedule.total_epochs * self.steps_per_epoch

    def plan(self) -> str:
        """Returns the sizes of the run as a table."""
        rows = list(self._rows())
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {how_much}" for what, how_much in rows)

    def _rows(self) -> Iterator[tuple[str, str]]:
        config, train = self.config, self.train
        parallel, schedule = config.policy.parallel, config.schedule
        yield "model", str(config.model.path)
        yield "training data", _size(train)
        yield (
            "validation data",
            "none: data.val_files is empty" if self.val is None else _size(self.val),
        )
        yield (
            "steps",
            f"{self.total_steps} of {config.data.batch_size} conversations ({self.steps_per_epoch} "
            "an epoch)",
        )
        yield (
            "a step",
            "one optimizer step, in micro-batches of "
            f"{config.policy.micro_batch_tokens} tokens per rank; the loss is the "
            f"{config.algorithm.loss_aggregation}",
        )
        yield (
            "policy",
            f"{parallel.num_ranks} processes ({parallel.sizes}), {self.policy_threads} threads "
            f"each, {config.policy.dtype}",
        )
        every = "never" if schedule.val_every is None else f"every {schedule.val_every} steps"
        yield "validation", every
        yield "checkpoints", schedule.when_saved()
        yield from topology_rows(config)
        if config.launch.gpus_per_node:
            yield "  found", found_gpus(config, self.gpus)
        yield "launcher", config.launch.kind
        yield "loggers", ", ".join(dict.fromkeys((*ALWAYS, *config.run.loggers)))
        yield "seed", str(config.run.seed)


def _size(examples: ExampleSet) -> str:
    return (
        f"{len(examples.examples)} conversations, {examples.num_tokens} tokens, "
        f"{examples.num_loss_tokens} of them under the loss"
    )


def check_sft(
    config: SftConfig, run_dir: Path, *, keep_torch_out: bool = False, gpus_needed: bool = True
) -> CheckedSft:
    """Makes all checks; takes as long as rendering every conversation.

    Args:
        run_dir: Where it would write; need not exist.

    Raises:
        ConfigError: A setting cannot be carried out on this machine.
        DataError: A row cannot be used.
        RunDirectoryError: `run_dir` cannot be used.
        SetupError: The model does not exist or does not fit.
        SeveralProblems: More than one of these.
    """
    problems = Problems(ConfigError, DataError, RunDirectoryError, SetupError)
    config, why = with_backend(config)
    data, rows = config.data, dict[str, Conversations]()
    with problems.collected():
        rows["train"] = read_conversations(data.train_files, data, split="train")
    if data.val_files:
        with problems.collected():
            rows["val"] = read_conversations(
                data.val_files, data, split="val", limit=data.max_val_rows
            )
    with problems.collected():
        check_run_directory(run_dir, config)
    with problems.collected():
        check_launcher(config)
    with problems.collected():
        ask_rank_command(config)
    gpus: tuple[Gpu, ...] = ()
    with problems.collected():
        gpus = check_gpus(config, needed=gpus_needed)
    check_loggers(config, problems)
    with transformers_without_torch() if keep_torch_out else nullcontext():
        renderer = _check_model(config, problems)
    made = {} if renderer is None else _examples(rows, config, renderer, problems)
    problems.raise_if_any()
    train, val = made["train"], made.get("val")
    notes = [note for split in rows.values() for note in split.notes]
    notes += [note for split in made.values() for note in split.notes]
    notes.append(f"policy.backend={config.policy.backend}: {why}")
    ranks = config.policy.parallel.num_ranks
    return CheckedSft(
        config=config,
        run_dir=run_dir,
        train=train,
        val=val,
        notes=tuple(notes),
        policy_threads=config.launch.policy_threads or max(1, cpu_count() // ranks),
        gpus=gpus,
    )


def _check_model(config: SftConfig, problems: Problems) -> "HfRenderer | None":
    """Looks at the model's files; returns its chat format if that can be used."""
    source = config.model.path
    folder = renderer = architecture = None
    backend = describe(config.policy.backend)
    with problems.collected():
        check_backend(backend, config.policy)
    with problems.collected():
        folder = resolve_model(source, weights=False)
    if folder is None:
        return None
    if source.expanduser().is_dir() or not is_model_id(str(source)):
        with problems.collected():
            check_weights(folder)
    readable = False
    with problems.collected():
        check_config_file(folder, backend.model_types)
        readable = True
    if not readable:
        return None
    with problems.collected():
        longest, length = model_context(folder), config.data.max_length
        if longest is not None and length > longest:
            raise SetupError(
                f"data.max_length={length} tokens, and the model in {folder} has a context of "
                f"{longest}: lower it"
            )
    with problems.collected():
        architecture = read_architecture(folder, backend)
    with problems.collected():
        model = config.model.model_copy(update={"path": folder})
        renderer = load_renderer(config.model_copy(update={"model": model}))
    if architecture is not None:
        with problems.collected():
            check_policy_parallel(backend, config.policy.parallel, architecture)
        with problems.collected():
            check_training(backend, config.policy, architecture)
        if renderer is not None:
            with problems.collected():
                check_vocabulary(folder, architecture, renderer)
    return renderer


def _examples(
    rows: Mapping[str, Conversations],
    config: SftConfig,
    renderer: "HfRenderer",
    problems: Problems,
) -> dict[str, ExampleSet]:
    made: dict[str, ExampleSet] = {}
    for split, read in rows.items():
        with problems.collected():
            made[split] = make_examples(
                read.conversations, config.data, split=split, renderer=renderer
            )
    if "train" in made and (left := len(made["train"].examples)) < config.data.batch_size:
        problems.add(
            DataError(
                f"data.batch_size={config.data.batch_size} exceeds the {left} training "
                "conversations: lower it or give more rows"
            )
        )
    return made
