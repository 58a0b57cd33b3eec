from dataclasses import dataclass

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.demo import DEMO
from treadle.trainer.launch.gpus import Gpu
from treadle.trainer.policy.megatron.architecture import Architecture
from treadle.trainer.policy.megatron.memory import RankMemory
from treadle.trainer.preflight import devices
from treadle.trainer.preflight.devices import check_gpus, device_rows

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
        "policy-0 to policy-3 on GPUs 0 to 3, one each; rollout-0 on GPUs 0 to 1, rollout-1 on "
        "GPUs 2 to 3"
    )
    assert rows["  found"].startswith("none on this machine: the plan is for another")
    assert "  at most" not in rows


def test_many_nodes_are_not_all_shown() -> None:
    rows = _rows(_config("launch.nodes=6", "launch.gpus_per_node=1"))
    assert rows["  node 3"] == "policy-3 on GPU 0; rollout-3 on GPU 0"
    assert rows["  2 more nodes"] == "in the same order"
    assert rows["  found"].startswith("not looked for: Ray")


def test_a_server_holds_weights_and_a_cache() -> None:
    """919,680 parameters of the demo in bfloat16; the cache has 4 layers of 2 heads of 32."""
    config = _config("launch.gpus_per_node=1", "rollout.max_in_flight=1000")
    architecture = Architecture.from_folder(DEMO.parent / "model")
    token = 2 * 4 * architecture.num_kv_heads * architecture.head_dim * 2
    cache = 1000 * config.rollout.context_length * token / 1e9
    assert (
        f"a server 0.00184 GB of weights and {cache:.3g} GB of KV cache"
        in (_rows(config)["  a GPU holds"])
    )


@dataclass(frozen=True)
class _Case:
    arguments: tuple[str, ...]
    says: str


@pytest.mark.parametrize(
    "case",
    [
        _Case(("rollout.gpu_memory_utilization=0.85",), "about 70 GB at a time, of 80 GB: it fits"),
        _Case(
            ("rollout.gpu_memory_utilization=0.85", "rollout.release_memory=false"),
            "about 98 GB at a time, of 80 GB: it may NOT fit: see policy.offload",
        ),
        _Case(
            (
                *("rollout.gpu_memory_utilization=0.85", "launch.gpus_per_node=2"),
                *("launch.placement=separate", "policy.parallel.data=1"),
            ),
            "about 68 GB at a time, of 80 GB: it fits",
        ),
    ],
)
def test_what_a_gpu_holds_at_most(case: _Case) -> None:
    rows = _rows(_config("launch.gpus_per_node=1", *case.arguments), _80_GB)
    assert rows["  at most"].startswith(case.says)
    assert rows["  found"] == "1 on this machine (H100)"


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
