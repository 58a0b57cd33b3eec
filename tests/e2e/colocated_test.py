"""A colocated run, whose server releases its memory to the policy in every step."""

from collections.abc import Callable

import pytest

from .testing import Trainer

pytestmark = pytest.mark.timeout(600)
Train = Callable[..., Trainer]


_COLOCATED = {
    "in stages, in place": ("rollout.multi_stage_wake_up=true", "sync.in_place=true"),
    "at once, staged, policy offloaded": (
        *("rollout.multi_stage_wake_up=false", "sync.in_flight=interrupt"),
        *("policy.offload.parameters=true", "policy.offload.optimizer=true"),
    ),
}


def test_memory_offload_in_every_step_changes_nothing_else(train: Train) -> None:
    apart = train(name="apart")
    for name, arguments in _COLOCATED.items():
        colocated = train("rollout.release_memory=true", *arguments, name=name)
        assert "released while the policy trains" in colocated.output, name
        for one, two in zip(colocated.metrics(), apart.metrics(), strict=True):
            assert one.get("val/reward") == two.get("val/reward"), name
            if one["step"]:
                assert one["time/release_s"] > 0, name
                assert (one.get("offload/host_bytes", 0) > 0) is ("offloaded" in name), name
                assert "time/release_s" not in two
                assert one["tokens/sampled"] == two["tokens/sampled"], name
                assert one["rollout/logprob_diff_max"] < 1e-4, name
