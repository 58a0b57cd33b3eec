"""Where the processes of a run are started: the section `launch`."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from treadle.policy.config.base import Count, Seconds, Section, kind_alone

__all__ = ["LaunchConfig", "LocalLaunchConfig", "RayLaunchConfig"]


class _LaunchConfig(Section):
    policy_threads: Count | None = None
    """CPU threads per policy rank. Null: all CPUs, divided by the number of ranks; training and
    rollout take turns, so policy and servers share them."""
    start_deadline_s: Seconds = 300.0
    """Maximum time for a policy rank to start; servers have rollout.start_deadline_s."""
    max_failures: Annotated[int, Field(ge=0)] = 0
    """Number of times that the run resumes by itself from its latest checkpoint because a policy
    rank or its node is lost, counted from each checkpoint on; it needs schedule.save_every,
    schedule.save_minutes or schedule.best. What a rank raises by itself, and errors of the
    input, end the run."""
    nodes: Count = 1
    """Number of machines whose GPUs the run uses. Above 1, Ray places the processes."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs of each machine that the run uses; every process then has its own. Where they
    are not set, policy.parallel.data, rollout.num_replicas, rollout.max_in_flight (what a step
    needs of a server, at most 1024), rollout.release_memory and policy.offload follow from it, and
    both dtypes are bfloat16. 0: GPUs are not assigned."""
    placement: Literal["colocated", "separate"] = "colocated"
    """With gpus_per_node. colocated: policy and servers use all GPUs, in turn with
    rollout.release_memory and at once without. separate: each has its own; set policy.parallel.data
    or rollout.num_replicas, and the other follows."""


class LocalLaunchConfig(_LaunchConfig):
    """All processes run on this machine."""

    kind: Literal["local"] = "local"

    @model_validator(mode="after")
    def _one_machine(self) -> Self:
        if self.nodes > 1:
            raise ValueError(f"nodes={self.nodes} needs launch.kind=ray, and launch.kind is local")
        return self


class RayLaunchConfig(_LaunchConfig):
    """Ray places the processes; it carries neither tokens nor weights."""

    kind: Literal["ray"] = "ray"
    address: str | None = None
    """Address of a running cluster, or `auto`. Null: start Ray on this machine."""
    cpus_per_process: Annotated[float, Field(gt=0)] = 1.0
    """CPUs reserved per process."""
    gpus_per_policy_rank: Annotated[float, Field(ge=0)] = 0.0
    """GPUs reserved per policy rank."""
    gpus_per_replica: Annotated[float, Field(ge=0)] = 0.0
    """GPUs reserved per rollout server."""
    allow_plaintext_on_network: bool = False
    """Leave out TLS and tokens between hosts. Anyone in that network can then use the servers. By
    default a run with `address` makes certificates for its processes."""

    @model_validator(mode="after")
    def _gpus_are_counted_once(self) -> Self:
        if self.gpus_per_node and (self.gpus_per_policy_rank or self.gpus_per_replica):
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} gives each process its GPUs, so "
                f"gpus_per_policy_rank={self.gpus_per_policy_rank:g} and "
                f"gpus_per_replica={self.gpus_per_replica:g} must be 0: set one or the other"
            )
        return self


LaunchConfig = Annotated[
    Annotated[LocalLaunchConfig | RayLaunchConfig, Field(discriminator="kind")],
    BeforeValidator(kind_alone),
]
