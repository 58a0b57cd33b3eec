from typing import Any

import pytest

from treadle.trainer.config.load import ConfigError, LoadedConfig, load_config, load_sft_config
from treadle.trainer.config.topology import Devices, Topology, make_topology

_EIGHT = "launch.gpus_per_node=8"


def _load(*arguments: str) -> LoadedConfig:
    return load_config([], ["model.path=/m", "data.train_files=/t.jsonl", *arguments])


def _topology(*arguments: str) -> Topology:
    config = _load(*arguments).config
    topology = make_topology(config.launch, config.policy, config.rollout)
    assert topology is not None
    return topology


def _settings(*arguments: str) -> tuple[Any, ...]:
    config = _load(*arguments).config
    return (
        config.policy.parallel.data,
        config.rollout.num_replicas,
        config.rollout.max_in_flight,
        config.rollout.release_memory,
    )


def test_everything_follows_from_one_line() -> None:
    loaded = _load(_EIGHT, "rollout.tensor_model_parallel_size=2", "data.prompts_per_step=32")
    config = loaded.config
    assert _settings(_EIGHT, "rollout.tensor_model_parallel_size=2") == (8, 4, 32, True)
    assert config.rollout.max_in_flight == 64
    assert (config.policy.dtype, config.rollout.dtype) == ("bfloat16", "bfloat16")
    assert loaded.sources["rollout.num_replicas"] == f"follows from {_EIGHT}"
    assert config.launch.kind == "local"
    assert config.policy.offload.names == ("parameters", "optimizer", "reference")


def test_without_gpus_nothing_follows() -> None:
    config = _load().config
    assert (config.policy.parallel.data, config.rollout.num_replicas) == (1, 1)
    assert config.policy.dtype == "float32"
    assert make_topology(config.launch, config.policy, config.rollout) is None


def test_what_is_set_stays() -> None:
    given = ("rollout.num_replicas=2", "rollout.release_memory=false", "policy.dtype=float32")
    assert _settings(_EIGHT, *given) == (8, 2, 64, False)
    assert _load(*given, _EIGHT).config.policy.dtype == "float32"
    assert _load(*given, _EIGHT).config.policy.offload.names == ()
    kept = _load(_EIGHT, "policy.offload.optimizer=false").config.policy.offload
    assert kept.names == ("parameters", "reference")
    assert _settings(_EIGHT, "policy.parallel.tensor=4", "policy.parallel.pipeline=2")[0] == 1


def test_completions_at_a_time_are_what_a_step_needs_up_to_a_limit() -> None:
    assert _settings("launch.gpus_per_node=1", "data.prompts_per_step=1000")[2] == 1024
    assert _settings(_EIGHT, "data.prompts_per_step=1", "rollout.samples_per_prompt=4")[2] == 1


def test_colocated_processes_share_the_gpus() -> None:
    topology = _topology("launch.gpus_per_node=4", "rollout.tensor_model_parallel_size=2")
    assert topology.ranks == tuple(Devices(0, (n,)) for n in range(4))
    assert topology.servers == (Devices(0, (0, 1)), Devices(0, (2, 3)))


def test_separate_processes_have_their_own() -> None:
    separate = (_EIGHT, "launch.placement=separate", "rollout.tensor_model_parallel_size=2")
    assert _settings(*separate, "policy.parallel.data=4") == (4, 2, 64, False)
    assert _settings(*separate, "rollout.num_replicas=1") == (6, 1, 128, False)
    topology = _topology(*separate, "policy.parallel.data=4")
    assert topology.ranks[-1] == Devices(0, (3,))
    assert topology.servers == (Devices(0, (4, 5)), Devices(0, (6, 7)))


def test_a_server_is_on_one_node() -> None:
    nodes = ("launch.nodes=2", "launch.gpus_per_node=4", "launch.placement=separate")
    topology = _topology(*nodes, "policy.parallel.data=2", "rollout.num_replicas=1",
                         "rollout.tensor_model_parallel_size=4")  # fmt: skip
    assert topology.servers == (Devices(1, (0, 1, 2, 3)),)


def test_several_nodes_are_a_cluster() -> None:
    launch = _load("launch.nodes=2", _EIGHT).config.launch
    assert launch.kind == "ray"
    assert launch.address == "auto"
    assert _settings("launch.nodes=2", _EIGHT)[:2] == (16, 16)
    named = _load("launch.nodes=2", _EIGHT, "launch=ray", "launch.address=head:6379").config.launch
    assert named.kind == "ray"
    assert named.address == "head:6379"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy.parallel.tensor=3"], "8 GPUs do not divide into groups of 3 for policy.parallel"),
        (["rollout.tensor_model_parallel_size=16"], "8 GPUs do not divide into groups of 16"),
        (
            ["rollout.tensor_model_parallel_size=16", "rollout.num_replicas=1"],
            "are 16 GPUs of a server, and launch.gpus_per_node=8",
        ),
        (["policy.parallel.data=9"], "are 8 GPUs, and the policy has 9 ranks"),
        (["rollout.num_replicas=9"], "num_replicas=9 servers of 1 need GPUs up to number 9"),
        (["launch.placement=separate"], "set policy.parallel.data or rollout.num_replicas"),
        (
            ["launch.placement=separate", "policy.parallel.data=6", "rollout.num_replicas=3"],
            "need GPUs up to number 9 after the policy's 6",
        ),
        (["launch.nodes=2", "launch=local"], "nodes=2 needs launch.kind=ray"),
        (
            ["launch=ray", "launch.gpus_per_replica=1"],
            "gpus_per_node=8 gives each process its GPUs",
        ),
    ],
)
def test_what_does_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        _load(_EIGHT, *arguments)


def test_fine_tuning_has_ranks_only() -> None:
    given = ["model.path=/m", "data.train_files=/t.jsonl", "trainer.n_gpus_per_node=4"]
    config = load_sft_config([], [*given, "policy.parallel.tensor=2"]).config
    assert (config.policy.parallel.data, config.policy.dtype) == (2, "bfloat16")
    topology = make_topology(config.launch, config.policy)
    assert topology is not None
    assert topology.ranks[-1] == Devices(0, (3,))
    assert topology.servers == ()
