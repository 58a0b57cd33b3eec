import re
from dataclasses import dataclass, replace

import pytest

from treadle.policy.backends.description import RankMemory
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.demo import DEMO
from treadle.trainer.launch.gpus import Gpu
from treadle.trainer.launch.process import ProcessError
from treadle.trainer.preflight import devices
from treadle.trainer.preflight.devices import ask_cluster, check_gpus, device_rows

_MEMORY = RankMemory(peak=30_000_000_000, between=2_000_000_000, host=0)
_80_GB = Gpu(
    index="0",
    uuid="GPU-aaaa",
    name="H100",
    memory_bytes=80_000_000_000,
    free_bytes=80_000_000_000,
    driver="570.1",
)


def _config(*arguments: str) -> Config:
    return load_config([DEMO], [*arguments]).config


def _rows(config: Config, *found: Gpu) -> dict[str, str]:
    architecture = Architecture.from_folder(DEMO.parent / "model")
    return dict(device_rows(config, architecture, _MEMORY, found))


def test_the_plan_names_the_gpus_of_every_process() -> None:
    rows = _rows(_config("launch.gpus_per_node=4", "rollout.tensor_model_parallel_size=2"))
    assert rows["GPUs"] == (
        "4: launch.nodes=1 x launch.gpus_per_node=4, policy and servers on the same, in turn"
    )
    assert rows["  node 0"] == (
        "GPUs 0 to 3  policy-0 to policy-3; rollout-0 to rollout-1 on 2 GPUs each  "
        "about 30 GB to train, then 24 MB to sample beside 2 GB of the policy"
    )
    assert rows["  found"].startswith("none on this machine: the plan is for another")
    assert not any("fit" in row for row in rows.values())


def test_separate_processes_and_what_nobody_uses_are_rows_of_one_table() -> None:
    config = _config(
        *("launch.nodes=2", "launch.gpus_per_node=8", "launch.placement=separate"),
        *("policy.parallel.data=4", "rollout.num_replicas=3"),
        *("rollout.tensor_model_parallel_size=3", "rollout.gpu_memory_utilization=0.85"),
    )
    architecture = Architecture.from_folder(DEMO.parent / "model")
    rows = list(device_rows(config, architecture, _MEMORY, ()))
    table = [(what.strip(), *re.split(r" {2,}", which)) for what, which in rows[1:6]]
    assert table == [
        ("node 0", "GPUs 0 to 3", "policy-0 to policy-3", "about 30 GB to train"),
        ("node 0", "GPUs 4 to 6", "rollout-0 on 3 GPUs", "about 0.85 of the GPU to sample"),
        ("node 0", "GPU 7", "not used"),
        (
            "node 1",
            "GPUs 0 to 5",
            "rollout-1 to rollout-2 on 3 GPUs each",
            "about 0.85 of the GPU to sample",
        ),
        ("node 1", "GPUs 6 to 7", "not used"),
    ]


def test_nodes_that_are_used_alike_are_one_row() -> None:
    nodes = ("launch.nodes=128", "launch.gpus_per_node=8", "launch.placement=separate")
    rows = _rows(_config(*nodes, "policy.parallel.data=512"))
    assert rows["  nodes 0 to 63"].startswith("GPUs 0 to 7  policy-0 to policy-511    about 30")
    assert rows["  nodes 64 to 127"].startswith("GPUs 0 to 7  rollout-0 to rollout-511 ")
    assert rows["  found"].startswith("not looked for: Ray")


def test_ray_on_this_machine_finds_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("launch=ray", "launch.gpus_per_node=1")
    monkeypatch.setattr(devices, "find_gpus", lambda: (_80_GB,))
    assert _rows(config, *check_gpus(config, needed=True))["  found"].startswith(
        "1 on this machine"
    )


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([8, 8, 4], "3 nodes in the cluster, with 8, 8, 4 GPUs; some may be in use"),
        ([8, 4], "1 of launch.nodes=2 with launch.gpus_per_node=8; a run would wait"),
        (ProcessError("refused"), "no cluster (refused): the plan is for another"),
    ],
)
def test_a_plan_asks_the_cluster(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int] | Exception, says: str
) -> None:
    def answer(address: str) -> list[int]:
        assert address == "head:6379"
        if isinstance(nodes, Exception):
            raise nodes
        return nodes

    monkeypatch.setattr("treadle.trainer.launch.ray.gpus_of_nodes", answer)
    config = _config(
        "launch=ray", "launch.nodes=2", "launch.gpus_per_node=8", "launch.address=head:6379"
    )
    said = ask_cluster(config)
    assert said is not None and says in said
    architecture = Architecture.from_folder(DEMO.parent / "model")
    assert dict(device_rows(config, architecture, _MEMORY, (), said))["  found"] == said
    assert ask_cluster(_config("launch.gpus_per_node=8")) is None


def test_what_is_offloaded_needs_memory_of_the_host() -> None:
    memory = replace(_MEMORY, host=10_000_000_000)
    config = _config("launch.nodes=2", "launch.gpus_per_node=8", "policy.parallel.data=12")
    architecture = Architecture.from_folder(DEMO.parent / "model")
    rows = dict(device_rows(config, architecture, memory, ()))
    assert rows["  host memory"].startswith("about 80 GB on a node with 8 ranks")
    assert "  host memory" not in _rows(config)


def test_a_server_holds_weights_and_a_cache() -> None:
    """919,680 parameters of the demo in bfloat16; the cache has 4 layers of 2 heads of 32."""
    config = _config("launch.gpus_per_node=1", "rollout.max_in_flight=1000")
    architecture = Architecture.from_folder(DEMO.parent / "model")
    token = 2 * 4 * architecture.num_kv_heads * architecture.head_dim * 2
    cache = 1000 * config.rollout.context_length * token / 1e6
    assert _rows(config)["  a server"] == (
        f"per GPU 1.84 MB of weights, and {cache:.3g} MB of KV cache for 1000 completions of 352 "
        "tokens"
    )


def test_an_engine_takes_its_part_of_a_gpu_whether_it_is_set_or_not() -> None:
    servers = ("launch.gpus_per_node=1", "rollout.name=vllm", "rollout.server_command=[/bin/true]")
    rows = _rows(_config(*servers), _80_GB)
    assert "takes 0.9 of the GPU (about the engine's default)" in rows["  a server"]
    assert "72 GB to sample" in rows["  node 0"]
    rows = _rows(_config(*servers, "rollout.gpu_memory_utilization=0.0001"), _80_GB)
    assert rows["  a server"].endswith(
        "0.0001 of the GPU (rollout.gpu_memory_utilization), with room for 17 of such completions: "
        "the others wait"
    )


@dataclass(frozen=True)
class _Case:
    arguments: tuple[str, ...]
    node: str
    advice: str | None = None
    free: int = 80_000_000_000


_PART = "rollout.gpu_memory_utilization"


@pytest.mark.parametrize(
    "case",
    [
        _Case(
            (f"{_PART}=0.85",),
            "about 30 GB to train, then 68 GB to sample beside 2 GB of the policy, of 80 GB: fits",
        ),
        _Case(
            (f"{_PART}=0.85", "rollout.release_memory=false"),
            "about 30 GB to train and 68 GB to sample, of 80 GB: may NOT fit",
            "rollout.release_memory=true",
        ),
        _Case(
            (f"{_PART}=0.85", "launch.gpus_per_node=2", "launch.placement=separate",
             "policy.parallel.data=1"),
            "about 68 GB to sample, of 80 GB: fits",
        ),
        _Case((f"{_PART}=2e-5",), "1.6 MB to sample beside 2 GB of the policy, of 80 GB: may NOT",
              "of a server, see"),
        _Case((f"{_PART}=0.85",), "of 80 GB with 20 GB in use: may NOT fit",
              "end what nvidia-smi lists", 60_000_000_000),
        _Case((f"{_PART}=0.5",), "of 80 GB with 20 GB in use: fits", None, 60_000_000_000),
    ],
)  # fmt: skip
def test_what_a_gpu_needs_is_compared_with_what_it_has(case: _Case) -> None:
    gpu = replace(_80_GB, free_bytes=case.free)
    rows = _rows(_config("launch.gpus_per_node=1", *case.arguments), gpu, gpu)
    assert case.node in rows["  node 0"]
    assert rows.get("  to make it fit", "").startswith(case.advice or "")
    assert ("  to make it fit" in rows) == (case.advice is not None)
    assert rows["  found"] == "2 on this machine (H100)"


def test_a_policy_that_is_too_large_is_told_apart_from_a_server_that_is() -> None:
    config = _config("launch.gpus_per_node=1")
    small = replace(_80_GB, memory_bytes=20_000_000_000, free_bytes=20_000_000_000)
    assert _rows(config, small)["  to make it fit"].startswith("of the policy, see policy.offload")


def test_fewer_gpus_than_the_run_is_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("launch.gpus_per_node=2")
    monkeypatch.setattr(devices, "find_gpus", lambda: (_80_GB,))
    for needed in (True, False):
        with pytest.raises(ConfigError, match=r"gpus_per_node=2, and this machine has 1 GPUs"):
            check_gpus(config, needed=needed)
    monkeypatch.setattr(devices, "find_gpus", lambda: ())
    assert check_gpus(config, needed=False) == ()
    with pytest.raises(ConfigError, match=r"has 0 GPUs .* launch\.gpus_per_node=0"):
        check_gpus(config, needed=True)
    assert check_gpus(_config(), needed=True) == ()
