"""Weights of Megatron in four parts, in real vLLM and SGLang servers, by every transport.

One server of each engine and four policy ranks serve all tests here. A step of the optimizer makes
each version, and says how far Megatron's probabilities are from those that the servers reported:
before an update far, after it as near as two programs can be. A policy that a test drives breaks
groups in the middle. The last test kills a server, so it comes last.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from treadle.conformance.client.remote_engine import RemoteEngine, connect_engine
from treadle.conformance.contracts.reader import Output, random_prompt, request, run_all
from treadle.conformance.contracts.reference import reference
from treadle.conformance.contracts.remote_contract import plain_channel
from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import ElementType, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.config.settings import to_json
from treadle.policy.config.weight_sync import WeightSyncConfig
from treadle.policy.testing.tiny import VOCAB, write_model
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.publisher import PublishReport, WeightPublisher
from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout_server.testing.descendants import Descendants
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.rollout_server.testing.process import ServerProcess

from .policies import DrivenPolicy, ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
ENGINES = ("vllm", "sglang")
_COLLECTIVE = {"kind": "collective", "bucket_bytes": 1 << 16, "timeout_s": 250}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "inline": {"transport": "inline"},
    "file in place": {"transport": "file", "in_place": True},
    "shared memory in place": {"transport": "shared_memory", "in_place": True},
    "collective": {"transport": _COLLECTIVE},
}
_SYNC: Mapping[str, Any] = {"control_deadline_s": 250, "push_deadline_s": 250}
_POLICY = PolicyConfig(
    parallel=ParallelConfig(tensor=2, pipeline=2), optimizer=OptimizerConfig(lr=3e-5)
)
_REQUESTS = [
    request(random_prompt(40, VOCAB, seed=seed), temperature=1.0, seed=seed, max_tokens=24)
    for seed in range(4)
]
_NEAR, _FAR = 1e-4, 1e-2
"""Nats between two programs with one set of weights, and between two versions."""


def _model(path: Path) -> Path:
    """Tied, with heads as wide as vLLM's attention takes on a CPU."""
    write_model(path, hidden_size=128, head_dim=32)
    return path


@dataclass(kw_only=True)
class Fleet:
    """The policy, and the servers by name; `version` is what they have."""

    policy: PolicyGroup
    model: Path
    directory: Path
    processes: dict[str, ServerProcess] = field(default_factory=dict)
    clients: dict[str, WeightSyncClient] = field(default_factory=dict)
    engines: dict[str, RemoteEngine] = field(default_factory=dict)
    version: int = 0

    def publisher(
        self, way: Mapping[str, Any], *, policy: Any = None, element_type: ElementType = "float32"
    ) -> WeightPublisher:
        """Of the ranks' weights, unless another policy is to be published."""
        return WeightPublisher(
            policy or self.policy,
            WeightSyncConfig.model_validate({**_SYNC, **way}),
            element_type=element_type,
            directory=self.directory,
        )

    async def publish(self, publisher: WeightPublisher, *names: str) -> PublishReport:
        """The next version, to the servers of these names; to all by default."""
        self.version += 1
        return await publisher.publish(self.version, [self.clients[n] for n in names or ENGINES])

    async def publish_to_all(self, publisher: WeightPublisher) -> PublishReport:
        report = await self.publish(publisher)
        assert (report.served, report.failed) == (ENGINES, {})
        return report

    async def update_ended(self, name: str) -> None:
        """Waits until a server has noticed that its update will not go on."""
        while (await self.clients[name].info()).state == server_pb.SERVER_STATE_UPDATING:
            pass

    async def sample(self, name: str) -> list[Output]:
        """The requests, side by side, labelled with the version."""
        outputs = await run_all(self.engines[name], _REQUESTS)
        assert {version for one in outputs for version in one.versions} == {self.version}
        return outputs

    async def sample_all(self) -> list[Output]:
        return [output for name in ENGINES for output in await self.sample(name)]

    async def step(self, outputs: Sequence[Output]) -> float:
        """Trains on what was sampled; how far from it the ranks were before, at most."""
        sequences = tuple(map(_sequence, _prompts(outputs), outputs))
        request = pb.UpdateRequest(algorithm=to_json(AlgorithmConfig()), temperature=1.0)
        stats = (await self.policy.call(request, sequences))[0]
        metrics = stats.mismatch or stats.steps[0].metrics
        gap: float = metrics["rollout/logprob_diff_max"]
        return gap


def _prompts(outputs: Sequence[Output]) -> list[tuple[int, ...]]:
    prompts = [one.prompt for one in _REQUESTS]
    return prompts * (len(outputs) // len(prompts))


def _sequence(prompt: tuple[int, ...], output: Output) -> TrainSequence:
    length = len(prompt) + len(output.token_ids)
    return TrainSequence(
        ids=prompt + output.token_ids,
        loss_mask=tuple(place >= len(prompt) for place in range(length)),
        advantages=(1.0,) * length,
        rollout_logprobs=(0.0,) * len(prompt) + output.logprobs,
    )


def assert_sampled_from(model: Path, outputs: Sequence[Output]) -> None:
    """Whether transformers, with the weights of a directory, reports the same."""
    for wanted, output in zip(_REQUESTS, outputs, strict=True):
        told = reference(model).logprobs(wanted.prompt, output.token_ids, wanted.sampling)
        assert output.logprobs == pytest.approx(told, abs=_NEAR)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The servers start with other weights than the policy's."""
    commands = {name: engine_command(name) for name in ENGINES}
    model, other = (_model(tmp_path_factory.mktemp(name)) for name in ("policy", "other"))
    _halve(other)
    directory = tmp_path_factory.mktemp("weights")
    async with AsyncExitStack() as stack:
        processes = {
            name: stack.enter_context(
                ServerProcess(
                    *("--engine", name, "--model.path", str(other), "--model.num_threads", "1"),
                    *("--model.dtype", "float32", "--model.max_num_seqs", "8"),
                    *("--weights.directory", str(directory)),
                    command=command,
                )
            )
            for name, command in commands.items()
        }
        logs = tmp_path_factory.mktemp("logs")
        policy = await stack.enter_async_context(ranks(model, logs, _POLICY))
        found = Fleet(policy=policy, model=model, directory=directory, processes=processes)
        for name, process in processes.items():
            await asyncio.to_thread(process.wait_ready)
            channel = await stack.enter_async_context(plain_channel(process.address))
            found.engines[name] = await stack.enter_async_context(connect_engine(channel))
            client = WeightSyncClient(
                name, process.address, control_deadline_s=250, commit_deadline_s=250
            )
            stack.push_async_callback(client.aclose)
            found.clients[name] = client
        yield found


def _halve(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    halved = {name: tensor / 2 for name, tensor in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})


@pytest.mark.parametrize("way", WAYS)
async def test_both_sample_from_what_the_ranks_hold(fleet: Fleet, way: str) -> None:
    publisher = fleet.publisher(WAYS[way])
    before = await fleet.sample_all()
    assert await fleet.step(before) > _FAR
    for _ in range(2):  # With collective, the second one goes through the group of the first.
        await fleet.step(before)
        await fleet.publish_to_all(publisher)
    assert await fleet.step(await fleet.sample_all()) < _NEAR


async def test_changes_alone_make_the_same_version(fleet: Fleet) -> None:
    # A step that bfloat16 mostly rounds away.
    publisher = fleet.publisher(
        {"transport": "inline", "delta": {"enabled": True}}, element_type="bfloat16"
    )
    whole = await fleet.publish_to_all(publisher)
    assert whole.sent_bytes == whole.num_bytes
    before = await fleet.sample_all()
    await fleet.step(before)
    changes = await fleet.publish_to_all(publisher)
    assert 0 < changes.sent_bytes < changes.num_bytes
    by_changes = await fleet.sample_all()
    assert [one.logprobs for one in by_changes] != [one.logprobs for one in before]
    await fleet.publish_to_all(fleet.publisher(WAYS["inline"], element_type="bfloat16"))
    pairs = tuple(zip(by_changes, await fleet.sample_all(), strict=True))
    same = [(one, other) for one, other in pairs if one.token_ids == other.token_ids]
    # Batches differ from run to run, and so may a draw that is a matter of rounding.
    assert len(same) >= 3 * len(pairs) / 4
    for one, other in same:
        assert one.logprobs == pytest.approx(other.logprobs, abs=_NEAR)


async def test_a_policy_that_fails_halfway_leaves_servers_that_take_the_next_version(
    fleet: Fleet,
) -> None:
    policy = DrivenPolicy(fleet.model)
    publisher = fleet.publisher(WAYS["collective"], policy=policy)

    def fail(name: str) -> None:
        if name == "model.norm.weight":  # The last one, when layers have been written.
            raise ArithmeticError("no such weight")

    policy.before = fail
    with pytest.raises(ArithmeticError):
        await fleet.publish(publisher)
    for name in ENGINES:
        await fleet.update_ended(name)
    policy.before = lambda name: None
    await fleet.publish_to_all(fleet.publisher(WAYS["collective"], policy=policy))
    for name in ENGINES:
        assert_sampled_from(fleet.model, await fleet.sample(name))
    policy.close()


async def test_a_server_killed_halfway_is_dropped_and_the_other_goes_on_in_a_new_group(
    fleet: Fleet,
) -> None:
    doomed, kept = ENGINES
    policy = DrivenPolicy(fleet.model)
    publisher = fleet.publisher(WAYS["collective"], policy=policy)
    left = Descendants(fleet.processes[doomed].popen.pid)
    assert left
    await fleet.engines[doomed].aclose()

    def kill(name: str) -> None:
        if name == "model.norm.weight":
            fleet.processes[doomed].popen.kill()
            fleet.processes[doomed].popen.wait()
            left.wait_gone()  # Or its worker could still take the last bucket.

    policy.before = kill
    report = await fleet.publish(publisher)
    assert report.served == (kept,)
    assert list(report.failed) == [doomed] and doomed in report.failed[doomed]
    assert len(policy.groups) == 2
    assert_sampled_from(fleet.model, await fleet.sample(kept))

    policy.before = lambda name: None
    assert (await fleet.publish(publisher, kept)).served == (kept,)
    assert len(policy.groups) == 2  # The one of those who are left.
    assert_sampled_from(fleet.model, await fleet.sample(kept))
    policy.close()
