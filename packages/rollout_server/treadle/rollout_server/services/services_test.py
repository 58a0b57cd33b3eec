"""The three services over real gRPC, in front of the fake engine."""

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.config import AdmissionConfig, ServerConfig, WeightsConfig
from treadle.rollout_server.engine import ElementType, ModelInfo, TensorSpec
from treadle.rollout_server.engines.fake import FakeEngine, FakeLatency
from treadle.rollout_server.errors import CapabilityMissing
from treadle.rollout_server.lifecycle import ServerState
from treadle.rollout_server.server import Server
from treadle.rollout_server.testing import FakeClock, serve_in_process, stubs_for

MODEL = ModelInfo(
    architecture="fake", vocab_size=64, context_length=256, tokenizer_sha256=b"\7" * 32
)
PARAMETERS = (
    TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(4, 8)),
    TensorSpec(name="b", element_type=ElementType.FLOAT32, shape=()),
)
BYTES = (bytes(range(128)), b"abcd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    server: Server
    engine: FakeEngine
    clock: FakeClock
    generation: Any
    weights: Any
    control: Any

    async def generate(self, **fields: object) -> list[gen.GenerateResponse]:
        return [message async for message in self.generation.Generate(want(**fields), timeout=10)]

    async def settle(self) -> None:
        """Answers one call, so that everything sent before it has been handled."""
        await self.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=10)


@asynccontextmanager
async def bench(
    *, latency_s: float = 0.0, max_running: int = 8, config: ServerConfig | None = None
) -> AsyncIterator[Bench]:
    """With latency, the clock must be moved by hand."""
    clock = FakeClock()
    engine = FakeEngine(
        model=MODEL,
        parameters=PARAMETERS,
        latency=FakeLatency(decode_s_per_token=latency_s),
        max_running=max_running,
        clock=clock,
    )
    async with (
        serve_in_process(engine, config=config, clock=clock) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stubs = stubs_for(channel)
        yield Bench(
            server=server,
            engine=engine,
            clock=clock,
            generation=stubs.generation,
            weights=stubs.weights,
            control=stubs.control,
        )


def want(**fields: object) -> gen.GenerateRequest:
    values: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "sampling": gen.SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True),
        "logprob_mode": gen.LOGPROB_MODE_SAMPLED,
    } | fields
    return gen.GenerateRequest(**values)


def begin_request(version: int = 1, update_id: str = "u", **fields: Any) -> sync.BeginUpdateRequest:
    values: dict[str, Any] = {
        "tensors": [
            sync.TensorSpec(name=s.name, element_type=sync.ELEMENT_TYPE_FLOAT32, shape=s.shape)
            for s in PARAMETERS
        ],
        "lease": duration_pb2.Duration(seconds=60),
        "inline": sync.InlineTransport(),
    } | fields
    return sync.BeginUpdateRequest(update_id=update_id, weight_version=version, **values)


def chunk(
    index: int, offset: int, data: bytes, crc32: int | None = None
) -> sync.PushWeightsRequest:
    return sync.PushWeightsRequest(
        chunk=sync.WeightChunk(
            tensor_index=index,
            offset=offset,
            data=data,
            crc32=zlib.crc32(data) if crc32 is None else crc32,
        )
    )


def push(update_id: str = "u") -> list[sync.PushWeightsRequest]:
    header = sync.PushWeightsRequest(header=sync.PushHeader(update_id=update_id))
    whole = BYTES[0]
    return [header, chunk(0, 0, whole[:100]), chunk(1, 0, BYTES[1]), chunk(0, 100, whole[100:])]


async def commit(
    it: Bench, policy: "sync.InFlightPolicy" = sync.IN_FLIGHT_POLICY_DRAIN, update_id: str = "u"
) -> int:
    request = sync.CommitUpdateRequest(update_id=update_id, in_flight=policy)
    response = await it.weights.CommitUpdate(request, timeout=10)
    return int(response.weight_version)


async def refusal(call: Awaitable[object]) -> tuple[str, str, list[Any]]:
    """Status name, reason, and the other details of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value.details()
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == "treadle.rollout.v1"
    details = []
    for packed in status.details[1:]:
        name = packed.type_url.rpartition(".")[2]
        kind = getattr(errors_pb2, name, None) or getattr(error_details_pb2, name)
        detail = kind()
        packed.Unpack(detail)
        details.append(detail)
    return caught.value.code().name, info.reason, details


def ids(messages: Sequence[gen.GenerateResponse]) -> list[int]:
    return [i for message in messages for i in message.tokens.token_ids]


@pytest.mark.asyncio
async def test_a_completion_is_started_chunks_finished() -> None:
    async with bench() as it:
        messages = await it.generate(sampling=gen.SamplingParams(max_tokens=70, ignore_eos=True))
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", "tokens", "tokens", "tokens", "finished"]
    assert [len(m.tokens.token_ids) for m in messages[1:-1]] == [32, 32, 6]
    assert all(len(m.tokens.logprobs) == len(m.tokens.token_ids) for m in messages[1:-1])
    assert messages[-1].finished.num_tokens == 70
    assert messages[-1].finished.reason == gen.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_unset_is_the_default_and_zero_is_zero() -> None:
    async with bench() as it:
        plain = ids(await it.generate(sampling=gen.SamplingParams(max_tokens=8, seed=5)))
        explicit = gen.SamplingParams(
            max_tokens=8, seed=5, temperature=1, top_p=1, min_p=0, repetition_penalty=1
        )
        same = ids(await it.generate(sampling=explicit))
        greedy = [
            ids(await it.generate(sampling=gen.SamplingParams(max_tokens=8, temperature=0, seed=s)))
            for s in (1, 2)
        ]
        unlogged = await it.generate(logprob_mode=gen.LOGPROB_MODE_NONE)
    assert plain == same
    assert greedy[0] == greedy[1]
    assert not any(message.tokens.logprobs for message in unlogged)


SAMPLING = gen.SamplingParams


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 129}),
        ("session_id", {"session_id": "x" * 129}),
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("prompt_token_ids[1]", {"prompt_token_ids": [1, 64]}),
        ("logprob_mode", {"logprob_mode": gen.LOGPROB_MODE_UNSPECIFIED}),
        ("logprob_mode", {"logprob_mode": 9}),
        ("sampling.max_tokens", {"sampling": SAMPLING()}),
        ("sampling.max_tokens", {"sampling": SAMPLING(max_tokens=0)}),
        ("sampling.temperature", {"sampling": SAMPLING(max_tokens=1, temperature=-1)}),
        ("sampling.temperature", {"sampling": SAMPLING(max_tokens=1, temperature=float("nan"))}),
        ("sampling.top_p", {"sampling": SAMPLING(max_tokens=1, top_p=0)}),
        ("sampling.top_p", {"sampling": SAMPLING(max_tokens=1, top_p=1.5)}),
        ("sampling.top_k", {"sampling": SAMPLING(max_tokens=1, top_k=0)}),
        ("sampling.min_p", {"sampling": SAMPLING(max_tokens=1, min_p=2)}),
        ("sampling.repetition_penalty", {"sampling": SAMPLING(max_tokens=1, repetition_penalty=0)}),
        ("sampling.stop_token_ids[0]", {"sampling": SAMPLING(max_tokens=1, stop_token_ids=[64])}),
    ],
)
async def test_a_value_out_of_range_is_named(field: str, fields: dict[str, Any]) -> None:
    async with bench() as it:
        code, reason, (detail,) = await refusal(it.generate(**fields))
        assert it.engine.counters.started == 0
    assert (code, reason, detail.field) == ("INVALID_ARGUMENT", "INVALID_FIELD", field)
    assert detail.expected


@pytest.mark.asyncio
async def test_the_context_bounds_prompt_and_completion() -> None:
    async with bench() as it:
        code, reason, (detail,) = await refusal(it.generate(prompt_token_ids=[1] * 256))
        greedy = gen.SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        messages = await it.generate(prompt_token_ids=[1] * 250, sampling=greedy)
    assert (code, reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert (detail.prompt_tokens, detail.context_length) == (256, 256)
    assert len(ids(messages)) == 6
    assert messages[-1].finished.reason == gen.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_a_call_without_a_deadline_is_refused() -> None:
    async with bench() as it:
        code, reason, _ = await refusal(it.generation.Generate(want()).read())
        other = await refusal(it.control.GetServerInfo(srv.GetServerInfoRequest()))
    assert (code, reason) == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")
    assert other[1] == "DEADLINE_REQUIRED"


@pytest.mark.asyncio
async def test_cancelling_the_call_aborts_the_sequence() -> None:
    async with bench(latency_s=1.0) as it:
        call = it.generation.Generate(want(), timeout=60)
        assert (await call.read()).WhichOneof("event") == "started"
        call.cancel()
        # Draining waits for the sequence, so once it answers the abort has happened.
        await it.control.Pause(srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=10)
        counters = it.engine.counters
    assert (counters.started, counters.aborted, counters.running) == (1, 1, 0)


@pytest.mark.asyncio
async def test_a_deadline_aborts_the_sequence() -> None:
    async with bench(latency_s=1.0) as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in it.generation.Generate(want(), timeout=0.2):
                pass
        await it.control.Pause(srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=10)
        assert it.engine.counters.aborted == 1
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.asyncio
async def test_a_full_queue_is_resource_exhausted_with_a_delay() -> None:
    config = ServerConfig(admission=AdmissionConfig(max_in_flight=1, max_queued=1))
    async with bench(latency_s=1.0, config=config) as it:
        first = it.generation.Generate(want(), timeout=60)
        await first.read()
        second = asyncio.create_task(it.generate())
        while it.server.replica.admission.queued == 0:
            await it.settle()
        code, reason, (retry,) = await refusal(it.generate())
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        first.cancel()
        while not second.done():
            it.clock.advance(1.0)
            await it.settle()
        assert len(ids(await second)) == 8


@pytest.mark.asyncio
async def test_tokens_do_not_wait_longer_than_fifty_milliseconds() -> None:
    async with bench(latency_s=0.03) as it:
        call = it.generation.Generate(want(), timeout=60)
        await call.read()
        it.clock.advance(0.03)
        await it.settle()
        assert it.engine.counters.running == 1
        it.clock.advance(0.05)
        chunk = await call.read()
        assert chunk.WhichOneof("event") == "tokens"
        assert 1 <= len(chunk.tokens.token_ids) < 8
        call.cancel()


@pytest.mark.asyncio
async def test_the_handshake_tells_what_clients_compare() -> None:
    async with bench() as it:
        info = await it.control.GetServerInfo(srv.GetServerInfoRequest(client="t/1"), timeout=10)
    assert (info.engine, info.state) == ("fake", srv.SERVER_STATE_SERVING)
    assert info.model.tokenizer_sha256 == b"\7" * 32
    assert (info.model.vocab_size, info.model.context_length) == (64, 256)
    assert info.capabilities.inline_transport and not info.capabilities.file_transport
    assert info.limits.max_in_flight == 256


@pytest.mark.asyncio
async def test_an_update_replaces_the_weights_at_commit() -> None:
    async with bench() as it:
        before = ids(await it.generate())
        begun = await it.weights.BeginUpdate(begin_request(), timeout=10)
        assert list(begun.received_bytes) == [0, 0]
        pushed = await it.weights.PushWeights(push(), timeout=10)
        assert pushed.received_bytes == 132
        assert ids(await it.generate()) == before
        assert await commit(it) == 1
        assert await commit(it) == 1
        after = await it.generate()
        code, reason, (behind,) = await refusal(it.generate(min_weight_version=2))
        stale = await refusal(it.weights.BeginUpdate(begin_request(1, "v"), timeout=10))
    assert ids(after) != before
    assert {m.tokens.weight_version for m in after[1:-1]} == {1}
    assert (code, reason) == ("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND")
    assert (behind.serving, behind.wanted) == (1, 2)
    assert stale[1] == "WEIGHT_VERSION_BEHIND"


@pytest.mark.asyncio
async def test_new_weights_begin_a_new_chunk() -> None:
    async with bench(latency_s=0.001) as it:
        call = it.generation.Generate(want(), timeout=60)
        await call.read()
        for _ in range(3):
            it.clock.advance(0.001)
            await it.settle()
        await it.weights.BeginUpdate(begin_request(), timeout=10)
        await it.weights.PushWeights(push(), timeout=10)
        await commit(it, sync.IN_FLIGHT_POLICY_CONTINUE)
        rest = asyncio.create_task(_read_all(call))
        while not rest.done():
            it.clock.advance(0.001)
            await it.settle()
        messages = await rest
    chunks = [m.tokens for m in messages if m.WhichOneof("event") == "tokens"]
    assert [c.weight_version for c in chunks] == [0, 1]
    assert sum(len(c.token_ids) for c in chunks) == 8


async def _read_all(call: Any) -> list[gen.GenerateResponse]:
    """The rest of a stream that `read` has begun."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.asyncio
async def test_a_broken_push_resumes_where_it_broke() -> None:
    async with bench() as it:
        await it.weights.BeginUpdate(begin_request(), timeout=10)
        messages = push()
        corrupt = chunk(0, 100, BYTES[0][100:], crc32=1)
        code, reason, _ = await refusal(
            it.weights.PushWeights([*messages[:2], corrupt], timeout=10)
        )
        assert (code, reason) == ("DATA_LOSS", "CHUNK_CORRUPT")
        again = await it.weights.BeginUpdate(begin_request(), timeout=10)
        assert list(again.received_bytes) == [100, 0]
        code, reason, (order,) = await refusal(it.weights.PushWeights(messages, timeout=10))
        assert (code, reason) == ("OUT_OF_RANGE", "CHUNK_OUT_OF_ORDER")
        assert (order.tensor_index, order.expected_offset) == (0, 100)
        code, reason, (lacking,) = await refusal(commit(it))
        assert (code, reason) == ("FAILED_PRECONDITION", "UPDATE_INCOMPLETE")
        assert list(lacking.tensor_indices) == [0, 1]
        await it.weights.PushWeights([messages[0], *messages[2:]], timeout=10)
        held = await it.weights.GetUpdate(sync.GetUpdateRequest(update_id="u"), timeout=10)
        assert list(held.received_bytes) == [128, 4]
        assert await commit(it) == 1


@pytest.mark.asyncio
async def test_tensors_that_are_not_the_models_are_named() -> None:
    wrong = sync.TensorSpec(name="a", element_type=sync.ELEMENT_TYPE_FLOAT32, shape=[8, 4])
    async with bench() as it:
        code, reason, (detail,) = await refusal(
            it.weights.BeginUpdate(begin_request(tensors=[wrong]), timeout=10)
        )
        other = await it.weights.BeginUpdate(begin_request(), timeout=10)
    assert (code, reason) == ("FAILED_PRECONDITION", "TENSOR_MISMATCH")
    assert (detail.name, detail.expected, detail.received) == (
        "a",
        "float32[4, 8]",
        "float32[8, 4]",
    )
    assert other.max_chunk_bytes == 2 << 20


@pytest.mark.asyncio
async def test_one_update_at_a_time_until_its_lease_runs_out() -> None:
    async with bench() as it:
        await it.weights.BeginUpdate(begin_request(), timeout=10)
        second = begin_request(2, "v")
        code, reason, (detail,) = await refusal(it.weights.BeginUpdate(second, timeout=10))
        assert (code, reason) == ("ABORTED", "UPDATE_IN_PROGRESS")
        assert (detail.update_id, detail.lease_left.seconds) == ("u", 60)
        it.clock.advance(60.0)
        late = await refusal(it.weights.PushWeights(push(), timeout=10))
        assert late[:2] == ("NOT_FOUND", "UPDATE_UNKNOWN")
        await it.weights.BeginUpdate(second, timeout=10)
        await it.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="v"), timeout=10)
        await it.weights.AbortUpdate(sync.AbortUpdateRequest(update_id="v"), timeout=10)
        assert (await refusal(commit(it, update_id="v")))[1] == "UPDATE_UNKNOWN"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("lease", {"lease": None}),
        ("lease", {"lease": duration_pb2.Duration(seconds=10**6)}),
        ("lease", {"lease": duration_pb2.Duration(seconds=10**17)}),
        ("tensors", {"tensors": []}),
        ("tensors[0].element_type", {"tensors": [sync.TensorSpec(name="a", shape=[1])]}),
        ("transport", {"inline": None}),
        ("update_id", {"update_id": ""}),
        ("file.crc32", {"file": sync.FileTransport(directory="x"), "inline": None}),
    ],
)
async def test_a_malformed_begin_is_named(field: str, fields: dict[str, Any]) -> None:
    async with bench() as it:
        request = begin_request(**fields)
        _, reason, (detail,) = await refusal(it.weights.BeginUpdate(request, timeout=10))
    assert (reason, detail.field) == ("INVALID_FIELD", field)


@pytest.mark.asyncio
async def test_files_are_read_at_begin_and_only_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "weights" / "1").mkdir(parents=True)
    header = (
        b'{"a":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},'
        b'"b":{"dtype":"F32","shape":[],"data_offsets":[128,132]}}'
    )
    path = tmp_path / "weights" / "1" / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(BYTES))
    crc32 = [zlib.crc32(data) for data in BYTES]
    config = ServerConfig(weights=WeightsConfig(directory=tmp_path / "weights"))

    def request(directory: str, update_id: str, sums: list[int]) -> sync.BeginUpdateRequest:
        transport = sync.FileTransport(directory=directory, crc32=sums)
        return begin_request(1, update_id, inline=None, file=transport)

    async with bench(config=config) as it:
        outside = await refusal(it.weights.BeginUpdate(request("..", "x", crc32), timeout=10))
        assert outside[:2] == ("PERMISSION_DENIED", "FILE_OUTSIDE_ROOT")
        wrong = await refusal(it.weights.BeginUpdate(request("1", "y", [1, 2]), timeout=10))
        assert wrong[:2] == ("DATA_LOSS", "FILE_UNREADABLE")
        begun = await it.weights.BeginUpdate(request("1", "z", crc32), timeout=10)
        assert list(begun.received_bytes) == [128, 4]
        path.unlink()
        assert await it.weights.BeginUpdate(request("1", "z", crc32), timeout=10) == begun
        assert await commit(it, update_id="z") == 1


@pytest.mark.asyncio
async def test_pause_turns_away_and_resume_brings_back() -> None:
    async with bench() as it:
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
        before = ids(await it.generate())
        await it.control.Pause(pause, timeout=10)
        await it.control.Pause(pause, timeout=10)
        code, reason, (retry,) = await refusal(it.generate())
        assert (code, reason) == ("UNAVAILABLE", "PAUSED") and retry.HasField("retry_delay")
        release = srv.ReleaseMemoryRequest(kinds=[srv.MEMORY_KIND_WEIGHTS])
        await it.control.ReleaseMemory(release, timeout=10)
        resume = srv.ResumeRequest()
        assert (await refusal(it.control.Resume(resume, timeout=10)))[1] == "STATE_CONFLICT"
        restore = srv.RestoreMemoryRequest(kinds=[srv.MEMORY_KIND_WEIGHTS])
        await it.control.RestoreMemory(restore, timeout=10)
        await it.control.Resume(resume, timeout=10)
        assert ids(await it.generate()) == before
        early = await refusal(it.control.ReleaseMemory(release, timeout=10))
        unnamed = await refusal(it.control.Pause(srv.PauseRequest(), timeout=10))
    assert early[:2] == ("FAILED_PRECONDITION", "STATE_CONFLICT")
    assert unnamed[1] == "INVALID_FIELD"


@pytest.mark.asyncio
async def test_what_fails_while_it_resumes_stays_failed() -> None:
    async with bench() as it:
        await it.control.Pause(srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN), timeout=10)

        async def resume() -> None:
            it.server.replica.lifecycle.move(ServerState.FAILED)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.engine, "resume", resume)
            await it.control.Resume(srv.ResumeRequest(), timeout=10)
        assert it.server.replica.state is ServerState.FAILED
        assert (await refusal(it.generate()))[:2] == ("UNAVAILABLE", "PAUSED")


@pytest.mark.asyncio
async def test_a_pause_that_is_given_up_leaves_the_server_serving() -> None:
    async with bench(latency_s=1.0) as it:
        call = it.generation.Generate(want(), timeout=60)
        await call.read()
        pause = srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
        with pytest.raises(grpc.aio.AioRpcError):
            await it.control.Pause(pause, timeout=0.2)
        info = srv.GetServerInfoRequest()
        while (await it.control.GetServerInfo(info, timeout=10)).state != srv.SERVER_STATE_SERVING:
            pass
        call.cancel()


@pytest.mark.asyncio
async def test_calls_during_a_commit_of_a_paused_server_are_turned_away_after_it() -> None:
    async with bench(latency_s=1.0) as it:
        call = it.generation.Generate(want(), timeout=60)
        await call.read()
        await it.control.Pause(
            srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE), timeout=10
        )
        await it.weights.BeginUpdate(begin_request(), timeout=10)
        await it.weights.PushWeights(push(), timeout=10)
        committing = asyncio.create_task(commit(it))
        while it.server.replica.state is not ServerState.UPDATING:
            await it.settle()
        queued = asyncio.create_task(refusal(it.generate()))
        while it.server.replica.admission.queued == 0:
            await it.settle()
        while not committing.done():
            it.clock.advance(1.0)
            await it.settle()
        assert await committing == 1
        assert (await queued)[:2] == ("UNAVAILABLE", "PAUSED")
        info = await it.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=10)
        assert info.state == srv.SERVER_STATE_PAUSED


@pytest.mark.asyncio
async def test_an_engine_that_refuses_new_weights_goes_on_with_the_old_ones() -> None:
    async with bench() as it:
        before = ids(await it.generate())
        await it.weights.BeginUpdate(begin_request(), timeout=10)
        await it.weights.PushWeights(push(), timeout=10)

        async def refuse(*_: object, **__: object) -> None:
            raise CapabilityMissing("fake", "float8")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.engine, "load_weights", refuse)
            assert (await refusal(commit(it)))[:2] == ("UNIMPLEMENTED", "CAPABILITY_MISSING")
        assert it.server.replica.state is ServerState.SERVING
        assert ids(await it.generate()) == before
        assert await commit(it) == 1


@pytest.mark.asyncio
async def test_calls_during_a_commit_queue_and_get_the_new_weights() -> None:
    async with bench(latency_s=1.0) as it:
        call = it.generation.Generate(want(), timeout=60)
        await call.read()
        await it.weights.BeginUpdate(begin_request(), timeout=10)
        await it.weights.PushWeights(push(), timeout=10)
        committing = asyncio.create_task(commit(it))
        info = srv.GetServerInfoRequest()
        while (await it.control.GetServerInfo(info, timeout=10)).state != srv.SERVER_STATE_UPDATING:
            pass
        queued = asyncio.create_task(it.generate(min_weight_version=1))
        while it.server.replica.admission.queued == 0:
            await it.settle()
        while not (committing.done() and queued.done()):
            it.clock.advance(1.0)
            await it.settle()
        old = await _read_all(call)
        assert await committing == 1
    assert {m.tokens.weight_version for m in old[:-1]} == {0}
    assert {m.tokens.weight_version for m in (await queued)[1:-1]} == {1}
