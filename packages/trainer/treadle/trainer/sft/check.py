"""The checks before a fine-tuning, of `--dry-run` and of every start, and its plan.

Invariant: all problems are reported at once, by rows of the table of `preflight` and of this one.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.agent_loop import SetupError
from treadle.policy.backends.registry import describe
from treadle.trainer.config.logger_names import ALWAYS
from treadle.trainer.config.sft import SftConfig
from treadle.trainer.data import DataError
from treadle.trainer.data.load_data import model_context
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.launch.gpus import Gpu
from treadle.trainer.preflight.devices import found_gpus, topology_rows
from treadle.trainer.preflight.model_checks import (
    check_backend,
    check_policy_parallel,
    with_backend,
)
from treadle.trainer.preflight.table import (
    ARCHITECTURE,
    FIT,
    GPUS,
    LAUNCHER,
    LOGGERS,
    MODEL,
    RANKS,
    RUN_DIRECTORY,
    Check,
    Findings,
)
from treadle.trainer.preflight.without_torch import transformers_without_torch
from treadle.trainer.sft.conversations import Conversations, read_conversations
from treadle.trainer.sft.examples import ExampleSet, make_examples

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = ["CheckedSft", "check_sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSft:
    """A fine-tuning that can be started.

    Attributes:
        val: Validation examples; None: it never validates.
        notes: Lines to print at start.
        policy_threads: CPU threads of one policy rank.
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
    config, why = with_backend(config)
    found = Findings(
        config=config,
        run_dir=run_dir,
        missing=(),
        backend=describe(config.policy.backend),
        fetch=False,
        needed=gpus_needed,
    )
    found.make((*_CONVERSATIONS, RUN_DIRECTORY, LAUNCHER, RANKS, GPUS, LOGGERS))
    with transformers_without_torch() if keep_torch_out else nullcontext():
        found.make(_MODEL)
    found.make(_EXAMPLES)
    found.problems.raise_if_any()
    kinds = ("train_read", "val_read", "train_examples", "val_examples")
    ranks = config.policy.parallel.num_ranks
    return CheckedSft(
        config=config,
        run_dir=run_dir,
        train=found["train_examples"],
        val=found.get("val_examples"),
        notes=(
            *(note for kind in kinds if kind in found for note in found[kind].notes),
            f"policy.backend={config.policy.backend}: {why}",
        ),
        policy_threads=config.launch.policy_threads or max(1, cpu_count() // ranks),
        gpus=found["gpus"],
    )


def _read(split: str, config: SftConfig) -> Conversations | None:
    data = config.data
    if split == "train":
        return read_conversations(data.train_files, data, split=split)
    if not data.val_files:
        return None
    return read_conversations(data.val_files, data, split=split, limit=data.max_val_rows)


def _context(config: SftConfig, model: Path) -> None:
    longest, length = model_context(model), config.data.max_length
    if longest is not None and length > longest:
        raise SetupError(
            f"data.max_length={length} tokens, and the model in {model} has a context of "
            f"{longest}: lower it"
        )


def _examples(
    split: str, config: SftConfig, read: Conversations, renderer: "HfRenderer"
) -> ExampleSet:
    return make_examples(read.conversations, config.data, split=split, renderer=renderer)


def _full_batch(config: SftConfig, train: ExampleSet) -> None:
    if (left := len(train.examples)) < config.data.batch_size:
        raise DataError(
            f"data.batch_size={config.data.batch_size} exceeds the {left} training "
            "conversations: lower it or give more rows"
        )


_SPLITS = ("train", "val")
_CONVERSATIONS = tuple(Check(f"{split}_read", "config", partial(_read, split)) for split in _SPLITS)
_MODEL = (
    Check("", "config backend", lambda config, backend: check_backend(backend, config.policy)),
    *MODEL,
    Check("", "config model", _context),
    *ARCHITECTURE,
    Check(
        "",
        "config backend architecture",
        lambda config, backend, architecture: check_policy_parallel(
            backend, config.policy.parallel, architecture
        ),
    ),
    *FIT,
)
_EXAMPLES = (
    *(
        Check(f"{split}_examples", f"config {split}_read renderer", partial(_examples, split))
        for split in _SPLITS
    ),
    Check("", "config train_examples", _full_batch),
)
