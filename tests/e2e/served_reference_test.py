"""A reference that rollout servers serve: the teacher of a distillation, and of a KL penalty."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import transformers  # noqa: F401  # before a dry run in this process keeps torch out of it
from safetensors.torch import load_file, save_file

from treadle.rollout_server.testing import ServerProcess, running_server
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


def _serving(model: Path) -> AbstractContextManager[ServerProcess]:
    return running_server(
        "--engine", "torch", "--model.path", str(model), "--model.num_threads", "1"
    )


def test_servers_stand_in_for_the_reference_of_the_ranks_until_they_are_gone(
    train: Callable[..., Trainer], start_trainer: StartTrainer, teacher: Path
) -> None:
    """As the teacher, and for both KL penalties."""
    settings = (
        "algorithm.loss=distillation",
        "algorithm.kl_coef=0.1",
        "algorithm.reward_kl.coef=0.1",
        "schedule.val_every=null",
    )
    held = train(
        *settings, f"algorithm.reference_path={teacher}", "schedule.total_steps=1", name="held"
    )
    with _serving(teacher) as first, _serving(teacher) as second:
        addresses = [first.address, second.address]
        given = f"algorithm.reference_addresses={addresses}"
        served = start_trainer(*settings, given, "schedule.total_steps=1000", name="served")
        served.read_until("1/1000")
        for server in (first, second):
            server.popen.kill()
        assert served.wait() == 1
    assert any(address in served.output.splitlines()[-1] for address in addresses)
    [ours], [theirs] = (
        [line for line in run.metrics() if line["step"] == 1] for run in (held, served)
    )
    assert "time/reference_s" in theirs and "time/reference_s" not in ours
    for name in ("actor/teacher_kl", "actor/kl_loss", "actor/loss", "actor/reward_kl_penalty"):
        assert abs(ours[name]) > 1e-4, f"{name} shows nothing"
        assert theirs[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-4), name


def test_servers_that_cannot_score_are_refused_before_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*arguments: str) -> str:
        assert main(["--dry-run", "algorithm.loss=distillation", *arguments]) == 2
        return capsys.readouterr().err

    given = "algorithm.reference_addresses=[127.0.0.1:1]"
    assert "algorithm.reference_addresses=['127.0.0.1:1']" in said(given)
    with running_server("--engine", "fake") as other:
        text = said(f"algorithm.reference_addresses=[{other.address}]")
    assert "tokenizer.json has sha256" in text and "algorithm.reference_addresses" in text
    warm = said(given, "rollout.temperature=0.7")
    assert "rollout.temperature=0.7" in warm and "temperature 1" in warm
    assert "both name the reference" in said(given, f"algorithm.reference_path={MODEL}")
