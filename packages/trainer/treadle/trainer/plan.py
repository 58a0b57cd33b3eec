"""The plan: the processes and sizes of a run. Pure; nothing is started.

It is printed at the start of a run and by `--dry-run`.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from treadle.policy.config.critic import CriticConfig
from treadle.trainer.config.logger_names import ALWAYS
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.data.order import rows_per_step
from treadle.trainer.rollout.server_process import engine_settings

__all__ = ["Plan", "make_plan"]

_UNREAD: Final = (
    "no server has it, as rollout.num_replicas=0 starts none; set it where the servers of "
    "rollout.addresses are started"
)


def policy_threads(config: Config, cpus: int) -> int:
    """Returns the number of CPU threads of one policy rank."""
    return config.launch.policy_threads or max(1, cpus // config.policy.parallel.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Processes and sizes of a run.

    Attributes:
        cpus: Number of CPUs of this machine.
        details: Lines about what the run uses, as (what, which).
    """

    config: Config
    num_train_rows: int
    num_val_rows: int
    cpus: int
    details: Sequence[tuple[str, str]] = ()

    @property
    def steps_per_epoch(self) -> int:
        """Number of full steps in one pass over the training rows."""
        return self.num_train_rows // self.config.data.prompts_per_step

    @property
    def total_steps(self) -> int:
        """Number of steps of the run."""
        schedule = self.config.schedule
        if schedule.total_steps is not None:
            return schedule.total_steps
        return schedule.total_epochs * self.steps_per_epoch

    @property
    def trajectories_per_step(self) -> int:
        """Number of trajectories that one step samples."""
        return self.config.data.prompts_per_step * self.config.rollout.samples_per_prompt

    @property
    def policy_threads(self) -> int:
        """Number of CPU threads of one policy rank."""
        return policy_threads(self.config, self.cpus)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields (what, how much), one pair per line of the table."""
        config = self.config
        parallel, rollout, algorithm = config.policy.parallel, config.rollout, config.algorithm
        updates = algorithm.updates_per_batch
        per_update = self.trajectories_per_step // algorithm.mini_batches
        yield "model", str(config.model.path)
        yield from self.details
        yield (
            "training rows",
            f"{self.num_train_rows} ({self.steps_per_epoch} steps of "
            f"{config.data.prompts_per_step} prompts an epoch)",
        )
        if config.data.weights:
            counts = rows_per_step(config.data.weights, config.data.prompts_per_step)
            mix = ", ".join(f"{count} of {name}" for name, count in counts.items())
            yield "prompts of a step", mix
        yield "steps", f"{self.total_steps} ({self.total_steps / self.steps_per_epoch:.2g} epochs)"
        yield (
            "a step",
            f"{config.data.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
            f"{self.trajectories_per_step} trajectories of at most {rollout.context_length} tokens "
            f"({rollout.prompt_length} + {rollout.response_length})",
        )
        yield (
            "updates a step",
            f"{updates} of {per_update} trajectories, in micro-batches of "
            f"{config.policy.micro_batch_tokens} tokens per rank",
        )
        if rollout.context_length > config.policy.micro_batch_tokens * parallel.context:
            yield (
                "long trajectories",
                "those of more tokens than a micro-batch train in a separate one, and need the "
                "memory for it",
            )
        yield (
            "policy",
            f"{parallel.num_ranks} processes ({parallel.sizes}), {self.policy_threads} threads "
            f"each, {config.policy.dtype}",
        )
        if (critic := config.used_critic) is not None:
            yield "critic", self._critic(critic)
        yield from self._servers()
        if rollout.truncation is not None:
            yield (
                "truncation",
                f"{rollout.truncation}: servers report the tokens that it keeps, and the policy "
                "is trained on the distribution over these",
            )
        if offloaded := config.policy.offload.names:
            yield "policy memory", f"{', '.join(offloaded)} in host memory between its phases"
        if rollout.release_memory:
            yield "server memory", self._memory_offload()
        yield "weight sync", f"{config.sync.transport.kind}, lease {config.sync.lease_s:g} s"
        if (schedule := self._schedule()) is not None:
            yield "schedule", schedule
        yield "launcher", config.launch.kind
        yield "validation", self._validation()
        yield "checkpoints", self._checkpoints()
        yield "loggers", ", ".join(dict.fromkeys((*ALWAYS, *config.run.loggers)))
        yield "seed", str(config.run.seed)

    def _servers(self) -> Iterator[tuple[str, str]]:
        config, rollout = self.config, self.config.rollout
        if rollout.addresses:
            yield (
                "servers of others",
                f"{', '.join(rollout.addresses)}: {rollout.max_in_flight} completions at a time "
                f"each, given {rollout.dtype} weights",
            )
        if rollout.num_replicas:
            yield (
                "rollout servers",
                f"{rollout.num_replicas} x {rollout.name}, {rollout.max_in_flight} completions at "
                f"a time each, {rollout.dtype}",
            )
            yield "server command", self._server_command()
        if workers := config.agent.num_workers:
            yield (
                "loop workers",
                f"{workers} processes, 1 thread each, and a router: loops, tools and rewards run "
                "there",
            )
        if settings := engine_settings(rollout):
            given = ", ".join(f"{key}={value}" for key, value in settings.items())
            unread = "" if rollout.num_replicas else f": {_UNREAD}"
            yield "engine", f"{given}{unread}"

    def _critic(self, critic: CriticConfig) -> str:
        updates = (
            critic.epochs or self.config.algorithm.epochs
        ) * self.config.algorithm.mini_batches
        alone = f"; learns alone for {critic.warmup_steps} steps" if critic.warmup_steps else ""
        return (
            f"a second model in the policy's processes, from the same start weights; {updates} "
            f"updates a step, learning rate {critic.optimizer.lr:g}{alone}"
        )

    def _schedule(self) -> str | None:
        """Returns what the policy trains on beside fresh tokens, and whether that is corrected."""
        schedule, algorithm = self.config.schedule, self.config.algorithm
        match schedule.kind:
            case "sync":
                return None
            case "overlap":
                text = "overlap: groups are trained on one version after they were begun"
            case "stream":
                text = f"stream: {schedule.surplus:g} of a step more groups in work than it takes"
            case "async":
                text = f"async: groups of at most {schedule.max_staleness} versions ago"
        if algorithm.correction.active:
            return f"{text}; algorithm.correction weights stale tokens"
        if algorithm.old_logprobs == "rollout":
            return f"{text}; the ratio is against the probabilities of sampling"
        return f"{text}; stale tokens are not corrected: algorithm.correction.weights=token would"

    def _server_command(self) -> str:
        command = self.config.rollout.server_command
        return shlex.join(command) if command else "this interpreter's own environment"

    def _memory_offload(self) -> str:
        if self.config.rollout.multi_stage_wake_up:
            return "released while the policy trains; weights back, update, then the KV cache"
        return "released while the policy trains; all of it back, then the update"

    def _checkpoints(self) -> str:
        schedule = self.config.schedule
        kept = schedule.when_saved()
        if schedule.save_hf == "never" or not schedule.keeps_checkpoints:
            return kept
        return f"{kept}; {schedule.save_hf} as a Hugging Face directory too"

    def _validation(self) -> str:
        if not self.num_val_rows:
            return "none: data.val_files is empty"
        val, schedule = self.config.rollout.val, self.config.schedule
        before = "before training, " if schedule.val_before_train else ""
        return (
            f"{self.num_val_rows} rows x {val.samples_per_prompt} at temperature "
            f"{val.temperature:g}, {before}{_every(schedule.val_every)}"
        )

    def text(self) -> str:
        """Returns the plan as a table."""
        rows = list(self.rows())
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {how_much}" for what, how_much in rows)


def _every(steps: int | None) -> str:
    return "never" if steps is None else f"every {steps} steps and after the last"


def make_plan(config: Config, *, num_train_rows: int, num_val_rows: int, cpus: int) -> Plan:
    """Returns the plan of a configuration.

    Args:
        cpus: Number of CPUs of this machine.

    Raises:
        ConfigError: There are too few rows for one step, or too few trajectories for its updates.
    """
    plan = Plan(config=config, num_train_rows=num_train_rows, num_val_rows=num_val_rows, cpus=cpus)
    if not plan.steps_per_epoch:
        raise ConfigError(
            f"data.prompts_per_step={config.data.prompts_per_step} exceeds the {num_train_rows} "
            "training rows: lower it or give more rows"
        )
    if config.data.weights and config.schedule.total_steps is None:
        raise ConfigError(
            "data.weights gives each source another number of passes over its rows, and "
            "schedule.total_steps=null counts passes over all: set schedule.total_steps"
        )
    if config.algorithm.mini_batches > plan.trajectories_per_step:
        raise ConfigError(
            f"algorithm.mini_batches={config.algorithm.mini_batches} exceeds the "
            f"{plan.trajectories_per_step} trajectories of a step (data.prompts_per_step x "
            "rollout.samples_per_prompt): lower it"
        )
    return plan
