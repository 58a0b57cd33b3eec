"""A reference that rollout servers serve: the teacher of a distillation, and of a KL penalty."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers  # noqa: F401  # before a dry run in this process keeps torch out of it
from safetensors.torch import load_file, save_file

from treadle.rollout_server.testing import running_server
from treadle.trainer.demo import MODELS
from treadle.trainer.main import main

from .testing import StartTrainer, Trainer

pytestmark = pytest.mark.timeout(600)

MODEL = str(MODELS["demo:calculator"])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model whose probabilities differ from the policy's."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(MODEL, folder)
    path = folder / "model.safetensors"
    weights = {name: tensor * 1.05 for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def servers(teacher: Path) -> Iterator[tuple[str, str]]:
    arguments = ("--engine", "torch", "--model.path", str(teacher), "--model.num_threads", "1")
    with running_server(*arguments) as first, running_server(*arguments) as second:
        yield first.address, second.address


def test_servers_stand_in_for_the_reference_of_the_ranks(
    train: Callable[..., Trainer], teacher: Path, servers: tuple[str, str]
) -> None:
    """As the teacher, and for both KL penalties."""
    settings = (
        "algorithm.loss=distillation",
        "algorithm.kl_coef=0.1",
        "algorithm.reward_kl.coef=0.1",
        "schedule.total_steps=1",
        "schedule.val_every=null",
    )
    held = train(*settings, f"algorithm.reference_path={teacher}", name="held")
    given = f"algorithm.reference_addresses={list(servers)}"
    served = train(*settings, given, name="served")
    ours, theirs = held.metrics()[-1], served.metrics()[-1]
    assert "time/reference_s" in theirs and "time/reference_s" not in ours
    for name in ("actor/teacher_kl", "actor/kl_loss", "actor/loss", "actor/reward_kl_penalty"):
        assert abs(ours[name]) > 1e-4, f"{name} shows nothing"
        assert theirs[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-4), name


def test_servers_that_cannot_score_are_refused_before_the_start(
    capsys: pytest.CaptureFixture[str], servers: tuple[str, str]
) -> None:
    def said(*arguments: str) -> str:
        assert main(["--dry-run", "algorithm.loss=distillation", *arguments]) == 2
        return capsys.readouterr().err

    nobody = said("algorithm.reference_addresses=[127.0.0.1:1]")
    assert "algorithm.reference_addresses=['127.0.0.1:1']" in nobody
    with running_server("--engine", "fake") as other:
        text = said(f"algorithm.reference_addresses=[{other.address}]")
    assert "tokenizer.json has sha256" in text and "algorithm.reference_addresses" in text
    warm = said(f"algorithm.reference_addresses=[{servers[0]}]", "rollout.temperature=0.7")
    assert "rollout.temperature=0.7" in warm and "temperature 1" in warm
    twice = said(
        f"algorithm.reference_addresses=[{servers[0]}]", f"algorithm.reference_path={MODEL}"
    )
    assert "both name the reference" in twice


def test_a_run_whose_reference_is_gone_ends_with_its_address(
    start_trainer: StartTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server("--engine", "torch", "--model.path", MODEL) as server:
        address = server.address
        trainer = start_trainer(
            "algorithm.loss=distillation",
            f"algorithm.reference_addresses=[{address}]",
            "schedule.total_steps=100",
        )
        trainer.read_until("step 1")
    assert trainer.wait() == 1
    assert address in trainer.output.splitlines()[-1]
