import re
from typing import Any

import pytest

from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.engine_checks import (
    check_engine_settings,
    check_row_features,
    check_training_features,
)

_STOCK = "rollout.name=vllm_stock"
_REPLAY = "policy.moe.routing_replay=true"
_ATTACHED = "rollout.addresses=[h:1]"


def _config(*overrides: str) -> Config:
    least = ["data.train_files=/t.jsonl", "model.path=/m", "rollout.threads=1"]
    return load_config([], [*least, *overrides]).config


def test_what_the_torch_engine_lacks_is_refused_before_a_server_is_started() -> None:
    lacking = ("rollout.tensor_model_parallel_size=2", "rollout.engine_args.block_size=16")
    expected = (
        "rollout.name=torch does not have rollout.tensor_model_parallel_size=2: set "
        'rollout.name=vllm or sglang; rollout.engine_args={"block_size": 16}: leave it out'
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        check_engine_settings(_config(*lacking))
    check_engine_settings(_config("rollout.enforce_eager=true"))
    check_engine_settings(_config("rollout.name=vllm", *lacking))
    check_engine_settings(_config(_ATTACHED, *lacking))


@pytest.mark.parametrize("name", ["vllm", "vllm_stock", "sglang", "fake"])
@pytest.mark.parametrize("setting", ["max_draft_tokens=4", "batch_invariant=true"])
def test_what_the_torch_engine_alone_has_is_refused_with_another(name: str, setting: str) -> None:
    expected = f"rollout.name={name} does not have rollout.{setting}: set rollout.name=torch"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_engine_settings(_config(f"rollout.name={name}", f"rollout.{setting}"))
    check_engine_settings(_config("rollout.name=torch", f"rollout.{setting}"))


@pytest.mark.parametrize(
    ("others", "cause", "fix"),
    [
        (("rollout.dtype=bfloat16",), "rollout.dtype=bfloat16", "set rollout.dtype=float32"),
        (
            ("launch.gpus_per_node=1", "rollout.dtype=float32"),
            "launch.gpus_per_node=1 gives servers GPUs",
            "set launch.gpus_per_node=0",
        ),
        (
            ("launch=ray", "launch.gpus_per_replica=0.5"),
            "launch.gpus_per_replica=0.5 gives servers GPUs",
            "set launch.gpus_per_replica=0",
        ),
    ],
)
def test_the_same_bits_in_every_batch_need_float32_on_a_cpu(
    others: tuple[str, ...], cause: str, fix: str
) -> None:
    drafts = "rollout.max_draft_tokens=4"
    with pytest.raises(ConfigError, match=f"and {re.escape(cause)}: {fix}, or leave"):
        check_engine_settings(_config("rollout.batch_invariant=true", drafts, *others))
    check_engine_settings(_config(drafts, *others))


@pytest.mark.parametrize(
    "setting", ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05", _REPLAY]
)
def test_what_a_stock_vllm_does_not_report_is_refused_by_its_key(setting: str) -> None:
    expected = rf"vllm_stock does not support .*: {setting} needs .*Set rollout\.name=vllm"
    with pytest.raises(ConfigError, match=expected):
        check_training_features(_config(_STOCK, setting))
    check_training_features(_config("rollout.name=vllm", setting))
    check_training_features(_config(_STOCK, _ATTACHED, setting))
    check_training_features(_config(_STOCK, "rollout.val.top_p=0.9"))


def test_rows_that_a_stock_vllm_does_not_take_are_refused() -> None:
    rows: dict[str, Any] = {"images": True, "constraints": True}
    with pytest.raises(ConfigError, match="rows have images and agent loops have constraints"):
        check_row_features(_config(_STOCK).rollout, **rows)
    check_row_features(_config("rollout.name=vllm").rollout, **rows)
    check_row_features(_config(_STOCK).rollout, images=False, constraints=False)
