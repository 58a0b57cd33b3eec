"""New weights while completions run: nothing is lost, and every token says what sampled it.

The pieces of a run, real and in their processes, with an update in the middle of a rollout. The
policy of version n is one optimizer step ahead of version n - 1, so a token with the wrong label
would be off by far more than the programs are. A step is small: with ten times the learning rate
the third version has logits so large that float32 alone puts the programs 1e-4 apart.

How fast trainer and engine are beside each other decides what an update meets, so that is left to
neither: trajectories end before it and begin after it, and a server is told to commit at the moment
at which a long completion has its first tokens. Where even that was too late, since the test itself
may stand still for longer than a completion takes, another update follows, until one is crossed.

The engine is vLLM. That every engine labels its tokens rightly is part of the engine contract.
"""

import asyncio
import contextlib
import io
import itertools
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from treadle.agent_loop import (
    Completion,
    FinishReason,
    Origin,
    RequestContext,
    SamplingParams,
    Tokens,
    Trajectory,
)
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
from treadle.agent_loop.rpc.completion_stream import CompletionStream
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.weight_sync import InFlight
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.rollout.v1 import generation_service_pb2 as generation_pb2
from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.trainer.checkpoint.begin_or_resume import ResumePoint
from treadle.trainer.checkpoint.run_directory import Checkpoints
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.preflight import check_run
from treadle.trainer.report.prometheus import RunMetrics
from treadle.trainer.report.terminal.progress import PlainProgress
from treadle.trainer.rollout.server_security import server_security
from treadle.trainer.training_loop.build_context import build_context
from treadle.trainer.training_loop.context import TrainingContext
from treadle.trainer.training_loop.groups import groups_of, make_batch
from treadle.trainer.training_loop.run_record import OpenRun, RunRecord
from treadle.trainer.training_loop.update_metrics import update_metrics

from .testing import server_command

pytestmark = [pytest.mark.timeout(1200), pytest.mark.asyncio]
_PROMPTS, _SAMPLES = 32, 8
_ENDED_BEFORE = 40
_BEGUN_AFTER = 2
_TRAINED = 24
_LONG, _SHORTER = 8, 20
_POLICIES: tuple[InFlight, ...] = ("interrupt", "continue")


class _Midway:
    """Knows the long completions, which alone ignore the end, and when one has its first tokens."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    @classmethod
    def watch(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes each commit wait until a long completion has just begun."""
        midway, accept, commit = cls(), CompletionStream.accept, WeightSyncClient.commit

        def watched(stream: CompletionStream, event: generation_pb2.GenerateResponse) -> None:
            first = not stream.chunks
            accept(stream, event)
            if first and stream.chunks and stream.params.ignore_eos:
                midway._begun.set()

        async def held(server: WeightSyncClient, update_id: str, policy: pb.InFlightPolicy) -> int:
            midway._begun.clear()
            await midway._begun.wait()
            return await commit(server, update_id, policy)

        monkeypatch.setattr(CompletionStream, "accept", watched)
        monkeypatch.setattr(WeightSyncClient, "commit", held)


class _Trigger(PlainProgress):
    """Tells when so many trajectories have ended."""

    def __init__(self) -> None:
        super().__init__(total_steps=len(_POLICIES), stream=io.StringIO())
        self.left = 0
        self.reached = asyncio.Event()

    def arm(self, count: int) -> None:
        self.left = count
        self.reached.clear()

    def advance(self, count: int = 1) -> None:
        self.left -= count
        if self.left == 0:
            self.reached.set()


@contextlib.asynccontextmanager
async def _running(tmp_path: Path, progress: _Trigger) -> AsyncIterator[TrainingContext]:
    arguments = [
        "rollout.name=vllm",
        server_command("vllm"),
        "rollout.max_in_flight=48",
        "rollout.threads=1",
        "launch.policy_threads=1",
        f"data.prompts_per_step={_PROMPTS}",
        "policy.optimizer.lr=1e-4",
        "policy.optimizer.warmup_steps=0",
    ]
    # Given, so that the test can call the servers too.
    token = tmp_path / "token"
    token.write_text("of-the-test")
    arguments.append(f"rollout.token_file={token}")
    config = load_config([DEMO], arguments).config
    run = check_run(config, tmp_path)
    metrics = RunMetrics(project="treadle", name="in flight")
    opened = OpenRun(
        record=RunRecord(progress, metrics, total_steps=len(_POLICIES)),
        checkpoints=Checkpoints(tmp_path / "checkpoints", keep=1),
        resume=ResumePoint(begun=False, checkpoint=None, notes=()),
        has_steps=True,
    )
    async with build_context(run, opened) as context:
        yield context


def _sequences(trajectories: Sequence[Trajectory], version: int) -> list[TrainSequence]:
    """Some with tokens of older weights and some without, each with a gradient.

    Their rewards are left out: where all of a group were right, it would have none.
    """
    estimator = find_estimator(AlgorithmConfig())
    batch = make_batch(groups_of(trajectories), estimator, version=version)
    older = [sequence for sequence in batch.sequences if sequence.stale]
    newer = [sequence for sequence in batch.sequences if not sequence.stale]
    return [
        replace(sequence, advantages=(-1.0) ** place)
        for place, sequence in enumerate(older[:_TRAINED] + newer[:_TRAINED])
    ]


async def _sample(
    context: TrainingContext, step: int, *, prompts: int = _PROMPTS
) -> list[Trajectory]:
    tasks = [
        task
        for index in context.order.batch(step)[:prompts]
        for task in context.train[index].tasks(samples=_SAMPLES, seed=0, step=step)
    ]
    return list((await context.sample("rollout", tasks, step=step)).trajectories)


async def _generate_until(
    updated: asyncio.Event,
    generator: GrpcTokenGenerator,
    prompt: Sequence[int],
    name: str,
    max_tokens: int,
) -> list[Completion]:
    """Completions of one length, one after another; the last begins before the event."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    completions: list[Completion] = []
    while not updated.is_set():
        request = RequestContext(
            request_id=f"{name}-{len(completions)}", session_id=name, deadline=math.inf
        )
        completions.append(await generator.generate(prompt, params, request=request))
    return completions


def _completions(trajectories: Sequence[Trajectory]) -> Iterator[list[int]]:
    """The weight versions of each completion's runs of tokens, in order."""
    for trajectory in trajectories:
        (tokens,) = trajectory.samples
        for sampled, spans in itertools.groupby(
            tokens.spans, key=lambda span: span.origin is Origin.SAMPLED
        ):
            if sampled:
                yield [span.weight_version for span in spans if span.weight_version is not None]


@torch.no_grad()
def _gap(model: torch.nn.Module, ids: Sequence[int], reported: Mapping[int, float]) -> float:
    """How far the model is, at most, from the log-probabilities reported for these places."""
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return max(
        (
            abs(float(logprobs[place - 1, ids[place]]) - logprob)
            for place, logprob in reported.items()
        ),
        default=0.0,
    )


def _reported(tokens: Tokens, version: int) -> dict[int, float]:
    return {
        place: tokens.logprobs[place]
        for span in tokens.spans
        if span.weight_version == version
        for place in range(span.start, span.stop)
    }


async def test_every_token_of_an_update_in_flight_is_of_the_weights_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Midway.watch(monkeypatch)
    progress = _Trigger()
    async with (
        _running(tmp_path, progress) as context,
        connect(
            [server.address for server in context.servers.live],
            security=server_security(context.config.rollout).read(),
        ) as generator,
    ):
        config = context.config
        first = await _sample(context, 1)
        await context.update_policy(1, _sequences(first, 0))
        prompt = first[0].samples[0].ids[:8]
        room = generator.context_length - len(prompt)
        # Of different lengths: or all of them could be between two when the weights change.
        lengths = [room - _SHORTER * n for n in range(_LONG)]
        policies = list(_POLICIES)
        for version in itertools.count(1):
            policy = policies[0]
            publisher = WeightPublisher(
                context.policy,
                config.sync.model_copy(update={"in_flight": policy}),
                element_type=config.rollout.dtype,
                security=server_security(config.rollout),
                directory=tmp_path,
            )
            context.servers._publish = publisher.publish
            progress.arm(_ENDED_BEFORE)
            updated = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(_sample(context, version + 1))
                long = [
                    group.create_task(
                        _generate_until(updated, generator, prompt, f"{policy}-{length}", length)
                    )
                    for length in lengths
                ]
                await progress.reached.wait()
                await context.sync_weights(version)
                updated.set()
            after = await _sample(context, version + 2, prompts=_BEGUN_AFTER)
            trajectories = sampling.result() + after

            assert [trajectory.error for trajectory in trajectories] == [None] * len(trajectories)
            spans = list(_completions(trajectories))
            assert set(itertools.chain(*spans)) == {version - 1, version}
            completions = [completion for task in long for completion in task.result()]
            assert {completion.finish for completion in completions} == {FinishReason.LENGTH}
            spans += [[chunk.weight_version for chunk in c.chunks] for c in completions]
            assert all(versions == sorted(versions) for versions in spans)
            crossed = [c for c in completions if len(c.chunks) == 2]
            if version == 1:
                model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
                for (tokens,) in (trajectory.samples for trajectory in trajectories):
                    assert _gap(model, tokens.ids, _reported(tokens, 0)) < 1e-4
                for completion in crossed:
                    ids = [*prompt, *completion.token_ids]
                    before = enumerate(completion.chunks[0].logprobs, start=len(prompt))
                    assert _gap(model, ids, dict(before)) < 1e-4
            stats = await context.update_policy(version + 1, _sequences(trajectories, version))
            metrics = update_metrics(stats)
            assert 0 < metrics["rollout/stale_tokens"] < 1
            assert metrics["rollout/logprob_diff_fresh_max"] < 1e-4
            assert metrics["rollout/logprob_diff_max"] > 1e-2
            if crossed:
                policies.pop(0)
            if not policies:
                break
