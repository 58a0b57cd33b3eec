"""The configuration of supervised fine-tuning (`treadle sft`).

Invariant: a key that reinforcement learning has too means the same here, has the same bounds and,
where they are one section, the same declaration.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from treadle.agent_loop.parsers import PARSER_NAMES
from treadle.policy.config.base import Count, Section
from treadle.policy.config.policy import PolicyConfig
from treadle.trainer.config.launch import LaunchConfig, LocalLaunchConfig
from treadle.trainer.config.schema import (
    AnyRunConfig,
    Config,
    ModelConfig,
    StepsConfig,
    check_max_failures,
)
from treadle.trainer.config.topology import make_topology

__all__ = ["VERL_NAMES", "VERL_NOTED", "AnyConfig", "SftConfig"]

VERL_NAMES = MappingProxyType(
    {
        "data.multiturn.messages_key": "data.messages_key",
        "data.multiturn.tools_key": "data.tools_key",
        "data.train_batch_size": "data.batch_size",
        "data.apply_chat_template_kwargs": "agent.template_kwargs",
        "model.partial_pretrain": "model.path",
        "optim.lr": "policy.optimizer.lr",
        "optim.weight_decay": "policy.optimizer.weight_decay",
        "trainer.total_epochs": "schedule.total_epochs",
        "trainer.total_training_steps": "schedule.total_steps",
        "trainer.test_freq": "schedule.val_every",
        "trainer.save_freq": "schedule.save_every",
        "trainer.default_local_dir": "run.dir",
        "trainer.project_name": "run.project",
        "trainer.experiment_name": "run.name",
        "trainer.logger": "run.loggers",
        "trainer.seed": "run.seed",
        "trainer.n_gpus_per_node": "launch.gpus_per_node",
        "trainer.nnodes": "launch.nodes",
        "ulysses_sequence_parallel_size": "policy.parallel.context",
    }
)
"""Keys of verl's SFT trainer that are accepted, and ours with the same meaning."""

VERL_NOTED = MappingProxyType(
    {
        "data.micro_batch_size_per_gpu": (
            "micro-batches are packed by tokens: policy.micro_batch_tokens"
        ),
        "data.multiturn.enable": "a row is a conversation of any number of turns",
        "model.strategy": "the policy is Megatron's",
        "use_remove_padding": "sequences are always packed",
    }
)
"""Keys of verl's SFT trainer that have no effect here, and why."""


class SftDataConfig(Section):
    """The conversations to imitate, and how many make a step."""

    train_files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files of training conversations (.jsonl or .parquet), read in this order. A file on the
    Hugging Face Hub is hf://datasets/ORG/NAME/PATH, where `*` stands for any characters."""
    val_files: tuple[Path, ...] = ()
    """Files of validation conversations. Empty: the run never validates."""
    max_val_rows: Count | None = None
    """Maximum number of validation rows, counted from the first; null means all."""
    messages_key: str = "messages"
    """Column with the messages of a conversation."""
    tools_key: str = "tools"
    """Column with the tools that the model is shown; a row without it shows none."""
    images_key: str = "images"
    """Column with the images of a conversation, shown where its messages say `<image>`, or, if none
    does, before the first text of the user; a row without it shows none."""
    batch_size: Count = 16
    """Conversations per training step, which is one optimizer step."""
    shuffle: bool = True
    """Shuffle the rows for each epoch, seeded by run.seed; false keeps the file order."""
    max_length: Annotated[int, Field(ge=2)] = 1024
    """Maximum number of tokens of a sequence, prompt and tool schemas included."""
    truncation: Literal["error", "drop", "right"] = "error"
    """What to do with a conversation that has a longer sequence: stop before training, drop the
    conversation and report the number of dropped ones, or keep the first max_length tokens of the
    sequence and report the number of cut ones."""


class SftAgentConfig(Section):
    """How conversations are rendered."""

    parser: str | None = None
    """Format of tool calls and reasoning in the model's text, as in agent.parser of reinforcement
    learning. Null: derived from the model's chat template."""
    template_kwargs: Mapping[str, Any] = {}
    """Variables for the chat template besides messages and tools, such as enable_thinking."""

    @field_validator("parser")
    @classmethod
    def _parser_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in PARSER_NAMES:
            raise ValueError(f"unknown parser; known are: {', '.join(PARSER_NAMES)}")
        return name


class SftAlgorithmConfig(Section):
    """The loss: the mean of -log p over what the assistant said."""

    loss_aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """How the losses of a step's tokens are reduced to one number. token-mean: each token counts
    the same. seq-mean-token-mean: each conversation counts the same, however many sequences it
    gives."""


class SftScheduleConfig(StepsConfig):
    """The number of steps, validation and checkpoints."""

    kind: Literal["sft"] = "sft"
    """sft: supervised fine-tuning; a run directory is known by it."""


class SftConfig(Section):
    """The configuration of a supervised fine-tuning, with defaults, files and arguments merged."""

    data: SftDataConfig
    model: ModelConfig
    agent: SftAgentConfig = SftAgentConfig()
    algorithm: SftAlgorithmConfig = SftAlgorithmConfig()
    policy: PolicyConfig = PolicyConfig()
    schedule: SftScheduleConfig = SftScheduleConfig()
    launch: LaunchConfig = LocalLaunchConfig()
    """Where the processes run."""
    run: AnyRunConfig = AnyRunConfig()

    @model_validator(mode="after")
    def _validation_has_rows(self) -> Self:
        if self.schedule.val_every is not None and not self.data.val_files:
            raise ValueError(
                f"schedule.val_every={self.schedule.val_every} asks for validation, but "
                "data.val_files is empty: name a file or set schedule.val_every=null"
            )
        return self

    @model_validator(mode="after")
    def _processes_have_gpus(self) -> Self:
        make_topology(self.launch, self.policy)
        return self

    @model_validator(mode="after")
    def _resumes_from_a_checkpoint(self) -> Self:
        check_max_failures(self.launch, self.schedule)
        return self

    @model_validator(mode="after")
    def _nothing_is_replayed(self) -> Self:
        if self.policy.moe.routing_replay:
            raise ValueError(
                "policy.moe.routing_replay=true needs the experts that a rollout engine chose, and "
                "fine-tuning has no engine: set it to false"
            )
        return self


AnyConfig = Config | SftConfig
"""The configuration of either kind of run."""
ConfigT = TypeVar("ConfigT", Config, SftConfig)
