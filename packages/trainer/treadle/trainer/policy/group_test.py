"""The driver's end against real ranks: real processes, real Megatron on gloo."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.config.policy import ParallelConfig, PolicyConfig
from treadle.trainer.launch.local import LocalLauncher, LocalProcess
from treadle.trainer.launch.process import ProcessSpec, wait_until_ended
from treadle.trainer.policy.commands import Save, Specs, Update, UpdateStats
from treadle.trainer.policy.group import PolicyError, PolicyGroup
from treadle.trainer.policy.types import TrainSequence


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of two layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


class _KeepingLauncher(LocalLauncher):
    """A launcher whose processes a test can find; `started` is set with the first."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.processes: dict[str, LocalProcess] = {}
        self.started = asyncio.Event()

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        process = await super().start(spec)
        self.processes[spec.name] = process
        self.started.set()
        return process


@asynccontextmanager
async def _group(
    tmp_path: Path, model_path: Path, parallel: ParallelConfig | None = None
) -> AsyncIterator[tuple[PolicyGroup, _KeepingLauncher]]:
    config = PolicyConfig(parallel=parallel or ParallelConfig())
    async with (
        _KeepingLauncher(tmp_path / "logs") as launcher,
        PolicyGroup(
            launcher,
            config,
            model_path,
            with_reference=False,
            threads=1,
            gpus_per_rank=0.0,
            start_deadline_s=60.0,
        ) as group,
    ):
        yield group, launcher


class _Continue(logging.Handler):
    """Lets a stopped process go on when a warning comes."""

    def __init__(self, pid: int) -> None:
        super().__init__(logging.WARNING)
        self.pid = pid
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        os.kill(self.pid, signal.SIGCONT)


@pytest.mark.asyncio
async def test_a_rank_that_stands_still_is_named_and_waited_for(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyGroup, "_PATIENCE_S", 0.05)
    async with _group(tmp_path, model_path) as (group, launcher):
        pid = launcher.processes["policy-0"].pid
        handler = _Continue(pid)
        logger = logging.getLogger("treadle.trainer.policy.group")
        logger.addHandler(handler)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await group.call(Specs())
        finally:
            os.kill(pid, signal.SIGCONT)
            logger.removeHandler(handler)
    assert "no answer to Specs for 0.05 s from policy rank 0: it works, or its" in handler.said[0]


def _sequences() -> tuple[TrainSequence, ...]:
    return tuple(
        TrainSequence(
            ids=(1, 2, 3, n),
            loss_mask=(False, False, True, True),
            rollout_logprobs=(0.0, 0.0, -4.0, -4.0),
            advantages=(1.0 if n % 2 else -1.0,) * 4,
        )
        for n in range(4, 8)
    )


@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("along", ["data", "tensor", "pipeline"])
async def test_all_ranks_answer_alike_and_a_killed_one_is_named(
    tmp_path: Path, model_path: Path, along: str
) -> None:
    parallel = ParallelConfig.model_validate({along: 2})
    async with _group(tmp_path, model_path, parallel) as (group, launcher):
        first, second = await group.call(
            Update(sequences=_sequences(), algorithm=AlgorithmConfig(), temperature=1.0)
        )
        assert isinstance(first, UpdateStats)
        assert first.steps[0].loss == second.steps[0].loss
        assert first.steps[0].num_computed == 4
        assert len({len(specs) for specs in await group.call(Specs())}) == 1

        os.kill(launcher.processes["policy-1"].pid, signal.SIGKILL)
        with pytest.raises(PolicyError, match=r"(?s)policy rank 1 was ended by SIGKILL"):
            await group.call(
                Update(sequences=_sequences(), algorithm=AlgorithmConfig(), temperature=1.0)
            )
    assert await wait_until_ended(launcher.processes["policy-0"], 0) is not None


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_what_a_rank_cannot_write_is_the_users_to_mend(
    tmp_path: Path, model_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    async with _group(tmp_path, model_path) as (group, _):
        with pytest.raises(PolicyError) as error:
            await group.call(Save(directory=tmp_path / "file" / "checkpoint"))
    assert error.value.from_input
    assert "checkpoint" in str(error.value)


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_what_fails_in_training_is_shown_with_its_traceback(
    tmp_path: Path, model_path: Path
) -> None:
    half = (*_sequences()[:1], replace(_sequences()[1], rollout_logprobs=None))
    async with _group(tmp_path, model_path) as (group, _):
        with pytest.raises(PolicyError, match=r"(?s)1 of 2 .*Traceback") as error:
            await group.call(Update(sequences=half, algorithm=AlgorithmConfig(), temperature=1.0))
    assert not error.value.from_input


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="nowhere") as error:
        async with _group(tmp_path, tmp_path / "nowhere"):
            raise AssertionError("it started")
    assert error.value.from_input


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_cancelling_a_start_leaves_no_process(tmp_path: Path, model_path: Path) -> None:
    launcher = _KeepingLauncher(tmp_path / "logs")

    async def start() -> None:
        async with (
            launcher,
            PolicyGroup(
                launcher,
                PolicyConfig(),
                model_path,
                with_reference=False,
                threads=1,
                gpus_per_rank=0.0,
                start_deadline_s=60.0,
            ),
        ):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(start())
    await launcher.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ends = [await wait_until_ended(p, 0) for p in launcher.processes.values()]
    assert None not in ends
