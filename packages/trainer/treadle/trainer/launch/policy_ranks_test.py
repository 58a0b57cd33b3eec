"""The driver's end against real ranks: real processes; several of them have Megatron on gloo."""

import asyncio
import logging
import os
import platform
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.policy.client.group import PolicyError, PolicyGroup
from treadle.policy.client.process import wait_until_ended
from treadle.policy.client.signs_of_life import Silence
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import ParallelConfig, PolicyConfig
from treadle.policy.config.settings import to_json
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import SaveRequest
from treadle.policy.v1.weights_service_pb2 import GetWeightSpecsRequest
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.launch.local import LocalLauncher, LocalProcess
from treadle.trainer.launch.policy_ranks import ask_rank_command, rank_starter
from treadle.trainer.launch.process import ProcessError, ProcessSpec


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
    tmp_path: Path,
    model_path: Path,
    parallel: ParallelConfig | None = None,
    *,
    unresponsive_s: float | None = None,
    collective_timeout_s: float = 60.0,
) -> AsyncIterator[tuple[PolicyGroup, _KeepingLauncher]]:
    """Starts a group; `unresponsive_s` counts from then on, for an import gives no sign of life."""
    config = PolicyConfig(
        backend="fake" if parallel is None else "megatron",
        parallel=parallel or ParallelConfig(),
        collective_timeout_s=collective_timeout_s,
    )
    async with (
        _KeepingLauncher(tmp_path / "logs") as launcher,
        PolicyGroup(
            rank_starter(launcher, threads=1),
            config,
            model_path,
            with_reference=False,
            start_deadline_s=60.0,
        ) as group,
    ):
        if unresponsive_s is not None:
            group._config = config.model_copy(update={"unresponsive_s": unresponsive_s})
        yield group, launcher


class _Continue(logging.Handler):
    """Lets a stopped process go on when a warning of its silence comes."""

    def __init__(self, pid: int) -> None:
        super().__init__(logging.WARNING)
        self.pid = pid
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if "no sign of life" in self.said[-1]:
            os.kill(self.pid, signal.SIGCONT)


@pytest.mark.asyncio
async def test_a_rank_that_stands_still_is_waited_for_and_what_fails_later_has_its_traceback(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyGroup, "_PATIENCE_S", 0.05)
    async with _group(tmp_path, model_path, unresponsive_s=10.0) as (group, launcher):
        pid = launcher.processes["policy-0"].pid
        handler = _Continue(pid)
        logger = logging.getLogger("treadle.policy.client.group")
        logger.addHandler(handler)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await group.call(GetWeightSpecsRequest())
        finally:
            os.kill(pid, signal.SIGCONT)
            logger.removeHandler(handler)
        half = (*_sequences()[:1], replace(_sequences()[1], rollout_logprobs=None))
        with launcher.processes["policy-0"].log_path.open("a") as log:
            log.write("what the rank said last\n")
        with pytest.raises(PolicyError, match=r"(?s)1 of 2 .*Traceback") as failed:
            await group.call(_UPDATE, half)
    assert not failed.value.from_input
    text = str(failed.value)
    assert text.startswith(f"policy rank 0 (pid {pid} on {platform.node()}) failed: ")
    assert text.count("Traceback") == 1
    end = text.partition("\nIts log ends with:\n")[2]
    assert "what the rank said last" in end and end.endswith("failed\n(this traceback)")
    assert "no answer to GetWeightSpecs for 0.05 s: policy rank 0 is at " in handler.said[0]
    assert f"policy rank 0 (pid {pid} on " in handler.said[-1]
    assert ") has given no sign of life for " in handler.said[-1]


def _wait_stopped(pid: int) -> None:
    """Polls, since the kernel reports a stop to the parent only, which is the supervisor."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)


class _SilenceBesideRank0(Silence):
    """Counts a look only when rank 0 has given a sign since the last one that counted."""

    signs_of_rank_0 = -1

    def look(self, heard: Iterable[tuple[int, int]]) -> list[int]:
        signs = dict(heard)
        if signs[0] == self.signs_of_rank_0:
            return []
        self.signs_of_rank_0 = signs[0]
        return super().look(signs.items())


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_a_rank_without_a_sign_of_life_is_dead_and_named(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, rank 0 gives signs while rank 1 gives none.
    monkeypatch.setattr("treadle.policy.client.group.Silence", _SilenceBesideRank0)
    monkeypatch.setattr("treadle.policy.client.signs_of_life._LOOKS", 3)
    parallel = ParallelConfig(data=2)
    async with _group(tmp_path, model_path, parallel) as (group, launcher):
        await _check_that_ranks_answer_alike(group)
        group._config = group._config.model_copy(update={"unresponsive_s": 3.0})
        pid = launcher.processes["policy-1"].pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(_wait_stopped, pid)
        with pytest.raises(PolicyError) as error:
            await group.call(_UPDATE, _sequences())
    text = str(error.value)
    assert f"policy rank 1 (pid {pid} on {platform.node()}) stands still: it was given " in text
    assert re.search(r"it was given Update \d\S* s ago, and has given no sign of life", text)
    assert "no sign of life for 3 s (policy.unresponsive_s); it gave the last one at " in text
    assert "rank 0" not in text
    ends = [await wait_until_ended(process, 0) for process in launcher.processes.values()]
    assert ends[1] == -signal.SIGKILL
    assert None not in ends


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_ranks_that_wait_for_each_other_for_ever_live_until_the_limit_of_the_operation(
    tmp_path: Path, model_path: Path
) -> None:
    """Rank 0 waits in a collective operation to which rank 1 never comes, and both are well."""
    parallel = ParallelConfig(tensor=2)
    limits = {"unresponsive_s": 8.0, "collective_timeout_s": 15.0}
    async with _group(tmp_path, model_path, parallel, **limits) as (group, _):
        await _check_that_ranks_answer_alike(group)
        began = asyncio.get_running_loop().time()
        with pytest.raises(PolicyError, match=r"policy rank 0 \(pid .*\) failed: ") as error:
            await group._exchange([SaveRequest(directory=str(tmp_path / "checkpoint")), None])
        assert asyncio.get_running_loop().time() - began >= limits["collective_timeout_s"]
    assert "policy.collective_timeout_s=15" in str(error.value)


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


_UPDATE = pb.UpdateRequest(algorithm=to_json(AlgorithmConfig()), temperature=1.0)


async def _check_that_ranks_answer_alike(group: PolicyGroup) -> None:
    """For two ranks; each way to split a model over them is that of one test here."""
    first, second = await group.call(_UPDATE, _sequences())
    assert first.steps[0].loss == second.steps[0].loss
    assert first.steps[0].num_computed == 4
    assert len({len(r.specs) for r in await group.call(GetWeightSpecsRequest())}) == 1


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_killed_rank_is_named(tmp_path: Path, model_path: Path) -> None:
    async with _group(tmp_path, model_path, ParallelConfig(pipeline=2)) as (group, launcher):
        await _check_that_ranks_answer_alike(group)
        os.kill(launcher.processes["policy-1"].pid, signal.SIGKILL)
        with pytest.raises(PolicyError, match="policy rank 1 was ended by SIGKILL on node"):
            await group.call(_UPDATE, _sequences())
    assert await wait_until_ended(launcher.processes["policy-0"], 0) is not None


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_what_a_rank_cannot_write_is_the_users_to_mend(
    tmp_path: Path, model_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    async with _group(tmp_path, model_path) as (group, _):
        with pytest.raises(PolicyError) as error:
            await group.call(SaveRequest(directory=str(tmp_path / "file" / "checkpoint")))
    assert error.value.from_input
    assert "checkpoint" in str(error.value)


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="nowhere") as error:
        async with _group(tmp_path, tmp_path / "nowhere"):
            raise AssertionError("it started")
    assert error.value.from_input


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_rank_that_ends_before_the_driver_has_reached_it_is_named(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = LocalProcess.ready

    async def ready_and_killed(process: LocalProcess, deadline_s: float) -> str:
        address = await ready(process, deadline_s)
        os.kill(process.pid, signal.SIGKILL)
        return address

    monkeypatch.setattr(LocalProcess, "ready", ready_and_killed)
    with pytest.raises(PolicyError, match="policy rank 0 was ended by SIGKILL"):
        async with asyncio.timeout(50), _group(tmp_path, model_path):
            raise AssertionError("there is no rank")


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_rank_that_ends_before_its_first_sign_of_life_is_named(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = LocalProcess.ready

    async def ready_and_stopped(process: LocalProcess, deadline_s: float) -> str:
        address = await ready(process, deadline_s)
        os.kill(process.pid, signal.SIGSTOP)  # its machine takes the connection all the same
        asyncio.get_running_loop().call_later(0.2, os.kill, process.pid, signal.SIGKILL)
        return address

    monkeypatch.setattr(LocalProcess, "ready", ready_and_stopped)
    with pytest.raises(PolicyError, match="policy rank 0 was ended by SIGKILL"):
        async with asyncio.timeout(50), _group(tmp_path, model_path):
            raise AssertionError("there is no rank")


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_cancelling_a_start_leaves_no_process(tmp_path: Path, model_path: Path) -> None:
    launcher = _KeepingLauncher(tmp_path / "logs")

    async def start() -> None:
        async with (
            launcher,
            PolicyGroup(
                rank_starter(launcher, threads=1),
                PolicyConfig(backend="fake"),
                model_path,
                with_reference=False,
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


@pytest.mark.asyncio
async def test_a_command_takes_the_place_of_the_interpreter(tmp_path: Path) -> None:
    async with LocalLauncher(tmp_path / "logs") as launcher:
        group = PolicyGroup(
            rank_starter(launcher, threads=1),
            PolicyConfig(command=("/nowhere/treadle-policy-rank",)),
            tmp_path,
            with_reference=False,
            start_deadline_s=60.0,
        )
        with pytest.raises(ProcessError, match="policy-0: cannot run /nowhere/treadle-policy-rank"):
            await group.__aenter__()


# A rank of another release, which serves what its arguments name, by answers without any field.
_OTHER_RELEASE = """
import asyncio, json, os, sys
import grpc

served = sys.argv[1].split(",")
ready = sys.argv[sys.argv.index("--ready_file") + 1]

async def answer(request, context):
    return b""

async def live(request, context):
    yield b""
    await asyncio.Event().wait()

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        name = details.method.rpartition("/")[2]
        if name in served and name == "Watch":
            return grpc.unary_stream_rpc_method_handler(live)
        return grpc.unary_unary_rpc_method_handler(answer) if name in served else None

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    address = "127.0.0.1:%d" % server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with open(ready + ".partial", "w") as file:
        json.dump({"address": address, "pid": os.getpid()}, file)
    os.rename(ready + ".partial", ready)
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("served", "settings", "message"),
    [
        ("none", {}, "do not serve /treadle.policy.v1.RankService/Watch: .*of another release"),
        ("Watch", {}, "do not serve /treadle.policy.v1.RankService/GetPolicyInfo"),
        ("Watch,GetPolicyInfo", {"lora": {"rank": 1}}, "has no lora, which policy.lora needs"),
        ("Watch,GetPolicyInfo", {}, "do not serve /treadle.policy.v1.RankService/Initialize"),
    ],
)
async def test_a_rank_of_another_release_is_refused_by_what_it_lacks(
    tmp_path: Path, served: str, settings: dict[str, Any], message: str
) -> None:
    command = (sys.executable, "-c", _OTHER_RELEASE, served)
    async with LocalLauncher(tmp_path / "logs") as launcher:
        group = PolicyGroup(
            rank_starter(launcher, threads=1),
            PolicyConfig.model_validate({"command": command, **settings}),
            tmp_path,
            with_reference=False,
            start_deadline_s=60.0,
        )
        with pytest.raises(PolicyError, match=message) as refused:
            await group.__aenter__()
    assert refused.value.from_input


def test_a_command_is_asked_for_its_versions_before_a_run() -> None:
    def asked(*command: str, **changes: Any) -> str | None:
        policy = PolicyConfig(command=command)
        return ask_rank_command(
            Config.model_validate(
                {"data": {"train_files": ["t"]}, "model": {"path": "m"}, **changes}
            ).model_copy(update={"policy": policy})
        )

    assert asked() is None
    assert asked("/nowhere/rank", launch={"kind": "ray"}) is None
    answer = asked("echo", "treadle-policy 1.0,")
    assert answer == "echo 'treadle-policy 1.0,': treadle-policy 1.0, --version megatron"
    with pytest.raises(ConfigError, match=r"policy\.command=\['/nowhere/rank'\]: there is no"):
        asked("/nowhere/rank")
