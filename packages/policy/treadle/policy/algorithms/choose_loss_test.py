import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from treadle.agent_loop import SetupError
from treadle.policy.algorithms.choose_loss import BUILT_IN, check_loss, policy_loss
from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backend import LossInputs
from treadle.policy.config.algorithm import LOSS_NAMES, AlgorithmConfig

INPUTS = LossInputs(
    logprobs_T=torch.tensor([-1.0, -2.0]),
    entropy_T=torch.tensor([1.5, 0.5]),
    advantages_T=torch.tensor([2.0, -2.0]),
    old_logprobs_T=torch.tensor([-1.0, -2.0]),
    rollout_logprobs_T=None,
    ref_logprobs_T=torch.tensor([-1.5, -3.0]),
    stale_T=torch.tensor([False, False]),
    sample_lengths_S=torch.tensor([2]),
)


def test_the_settings_become_the_loss() -> None:
    config = AlgorithmConfig(clip_high=0.28, clip_dual=10.0)
    assert policy_loss(config) == ClippedSurrogate(clip_high=0.28, clip_dual=10.0)
    assert policy_loss(AlgorithmConfig()).zero_without_advantage


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_name_is_a_loss(name: str) -> None:
    assert list(BUILT_IN) == list(LOSS_NAMES)
    check_loss(AlgorithmConfig(loss=name))


def test_kl_and_entropy_are_added_to_any_loss() -> None:
    for name in ("ppo", "policy_gradient"):
        alone = policy_loss(AlgorithmConfig(loss=name))(INPUTS)
        loss = policy_loss(AlgorithmConfig(loss=name, kl_coef=0.1, kl_type="k2", entropy_coef=0.01))
        added = loss(INPUTS).loss_T - alone.loss_T
        assert added.tolist() == pytest.approx(
            [0.1 * 0.125 - 0.01 * 1.5, 0.1 * 0.5 - 0.01 * 0.5], abs=1e-6
        )
        assert not loss.zero_without_advantage
        assert loss(INPUTS).metrics_T["actor/kl_loss"].tolist() == [0.125, 0.5]


def test_kl_without_reference_is_refused() -> None:
    loss = policy_loss(AlgorithmConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss(replace(INPUTS, ref_logprobs_T=None))


OWN = """
from dataclasses import dataclass
import torch

def scaled(inputs, scale=1.0):
    return -scale * inputs.advantages_T * inputs.logprobs_T

def summed(inputs):
    return inputs.logprobs_T.sum()

def broken(inputs):
    raise KeyError("no such thing")

@dataclass
class Mine:
    scale: float
    zero_without_advantage = True

    def __call__(self, inputs):
        return scaled(inputs, self.scale)

class Picky:
    def __init__(self, tau=0.0):
        if tau <= 0:
            raise ValueError(f"tau={tau} must be positive")

    def __call__(self, inputs):
        return inputs.logprobs_T
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_loss_of_ones_own(own: Path) -> None:
    for name in ("scaled", "Mine"):
        config = AlgorithmConfig(loss=f"{own}:{name}", loss_args={"scale": 3.0})
        check_loss(config)
        output = policy_loss(config)(INPUTS)
        assert output.loss_T.tolist() == [6.0, -12.0]
        assert output.metrics_T["actor/pg_loss"].tolist() == [6.0, -12.0]
        assert policy_loss(config).zero_without_advantage == (name == "Mine")


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("scaled", {"size": 1}, "size"),
        ("Mine", {}, "scale"),
        ("summed", {}, "one value per token"),
        ("broken", {}, "KeyError: 'no such thing'"),
        ("broken", {}, r"own\.py:12, in broken"),
        ("absent", {}, "has no 'absent'"),
        (
            "Picky",
            {"tau": -1},
            r"algorithm\.loss=.*own\.py:Picky with algorithm\.loss_args=\{'tau': -1\}: "
            r"ValueError: tau=-1 must be positive \(.*own\.py:25, in __init__\)",
        ),
        ("scaled", {"scale": "a"}, "fails for two tokens"),
    ],
)
def test_a_loss_of_ones_own_that_cannot_work(
    own: Path, name: str, args: dict[str, object], says: str
) -> None:
    config = AlgorithmConfig.model_validate({"loss": f"{own}:{name}", "loss_args": args})
    with pytest.raises(SetupError, match=says):
        check_loss(config)


def test_a_loss_of_an_installed_package(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = own.parent / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[treadle.losses]\nmine_scaled = own:scaled\nmine_gone = own:gone\n"
    )
    monkeypatch.syspath_prepend(str(own.parent))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    check_loss(AlgorithmConfig(loss="mine_scaled", loss_args={"scale": 2.0}))
    with pytest.raises(SetupError, match="mine_gone"):
        check_loss(AlgorithmConfig(loss="mine_gone"))
    with pytest.raises(
        SetupError, match=r"algorithm\.loss=gspoo.* gspo, .* mine_gone, mine_scaled"
    ):
        check_loss(AlgorithmConfig(loss="gspoo"))


def test_arguments_of_a_built_in_loss_are_refused() -> None:
    with pytest.raises(ValidationError, match="loss=gspo is built in"):
        AlgorithmConfig(loss="gspo", loss_args={"scale": 1})
