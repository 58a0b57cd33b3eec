# ruff: noqa: D102  (a check's name says what it shows)
"""The Generate call: order of events, values and refusals."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from treadle.conformance.client.refusals import refusal
from treadle.conformance.contracts.reader import TRIES
from treadle.conformance.server_harness import (
    CALL_S,
    Checks,
    ServerHarness,
    remaining_messages,
    token_ids_of,
)
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv

_S = gen.SamplingParams
_BEYOND = (1 << 32) - 1
_INVALID: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("request_id empty", "request_id", {"request_id": ""}),
    ("request_id of 129 bytes", "request_id", {"request_id": "x" * 129}),
    ("session_id of 129 bytes", "session_id", {"session_id": "x" * 129}),
    ("prompt empty", "prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt id too large", "prompt_token_ids[1]", {"prompt_token_ids": [1, _BEYOND]}),
    ("logprob_mode unspecified", "logprob_mode", {"logprob_mode": gen.LOGPROB_MODE_UNSPECIFIED}),
    ("logprob_mode unknown", "logprob_mode", {"logprob_mode": 9}),
    ("sampling unset", "sampling.max_tokens", {"sampling": None}),
    ("max_tokens unset", "sampling.max_tokens", {"sampling": _S()}),
    ("max_tokens 0", "sampling.max_tokens", {"sampling": _S(max_tokens=0)}),
    ("temperature -1", "sampling.temperature", {"sampling": _S(max_tokens=1, temperature=-1)}),
    (
        "temperature nan",
        "sampling.temperature",
        {"sampling": _S(max_tokens=1, temperature=float("nan"))},
    ),
    ("top_p 0", "sampling.top_p", {"sampling": _S(max_tokens=1, top_p=0)}),
    ("top_p 1.5", "sampling.top_p", {"sampling": _S(max_tokens=1, top_p=1.5)}),
    ("top_k 0", "sampling.top_k", {"sampling": _S(max_tokens=1, top_k=0)}),
    ("min_p 2", "sampling.min_p", {"sampling": _S(max_tokens=1, min_p=2)}),
    (
        "repetition_penalty 0",
        "sampling.repetition_penalty",
        {"sampling": _S(max_tokens=1, repetition_penalty=0)},
    ),
    (
        "stop id too large",
        "sampling.stop_token_ids[0]",
        {"sampling": _S(max_tokens=1, stop_token_ids=[_BEYOND])},
    ),
)


@pytest.mark.asyncio
class CheckStream(Checks):
    """The stream of one completion."""

    async def test_a_completion_is_started_then_tokens_then_finished(
        self, record_property: Any
    ) -> None:
        async with self.connect() as server:
            messages = await server.generate(sampling=_S(max_tokens=70, ignore_eos=True))
            version = (await server.refresh()).weight_version
        kinds = [message.WhichOneof("event") for message in messages]
        record_property("seen", f"70 tokens in {len(messages)} messages")
        assert kinds == ["started", *["tokens"] * (len(kinds) - 2), "finished"], kinds
        chunks = [message.tokens for message in messages[1:-1]]
        assert all(chunk.token_ids for chunk in chunks), "a chunk without tokens"
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
        assert {chunk.weight_version for chunk in chunks} == {version}
        end = messages[-1].finished
        assert end.num_tokens == len(token_ids_of(messages)) == 70
        assert end.reason == gen.FINISH_REASON_LENGTH
        assert messages[0].started.HasField("queue_time") and end.HasField("engine_time")

    async def test_a_batch_holds_the_same_events(self) -> None:
        async with self.connect() as server:
            plain = await server.generate(sampling=_S(max_tokens=40, seed=3, ignore_eos=True))
            batched = await server.generate(
                sampling=_S(max_tokens=40, seed=3, ignore_eos=True), batched=True
            )
        found: list[int] = []
        kinds: list[str] = []
        for message in batched:
            if message.WhichOneof("event") != "batch":
                kinds.append(message.WhichOneof("event") or "nothing")
                found.extend(message.tokens.token_ids)
                continue
            batch = message.batch
            kinds.extend(["started"] * batch.HasField("started"))
            kinds.extend(["tokens"] * len(batch.tokens))
            kinds.extend(["finished"] * batch.HasField("finished"))
            found.extend(i for chunk in batch.tokens for i in chunk.token_ids)
        assert kinds == ["started", *["tokens"] * (len(kinds) - 2), "finished"], kinds
        assert found == token_ids_of(plain)

    async def test_experts_come_for_every_row_that_is_asked_for(self) -> None:
        async with self.connect() as server:
            if not server.capabilities.routed_experts:
                pytest.skip("the server reports no routed experts")
            model, messages = server.info.model, await server.generate()
            assert not any(message.tokens.routed_experts for message in messages)
            prompt = [1, 2, 3] * 12
            found: list[bytes] = []
            for first in (0, 0, len(prompt)):  # At the second time the prompt is cached.
                messages = await server.generate(
                    prompt_token_ids=prompt,
                    sampling=_S(max_tokens=40, temperature=0, ignore_eos=True),
                    routed_experts_from=first,
                )
                found.append(b"".join(message.tokens.routed_experts for message in messages))
                assert len(token_ids_of(messages)) == 40
        layers, top_k = model.num_moe_layers, model.experts_per_token
        width = 1 if model.num_experts <= 256 else 2
        for first, data in zip((0, 0, len(prompt)), found, strict=True):
            rows = len(prompt) + 40 - 1 - first
            assert len(data) == rows * layers * top_k * width, f"{len(data)} bytes, {rows} rows"
        ids = [
            int.from_bytes(found[0][i : i + width], "little")
            for i in range(0, len(found[0]), width)
        ]
        assert max(ids) < model.num_experts
        chosen = [ids[i : i + top_k] for i in range(0, len(ids), top_k)]
        assert all(len(set(experts)) == top_k for experts in chosen), "an expert is there twice"

    async def test_logprobs_of_the_prompt_come_before_the_tokens(self) -> None:
        async with self.connect() as server:
            if not server.capabilities.prompt_logprobs:
                pytest.skip("the server reports no log-probabilities of prompts")
            version = (await server.refresh()).weight_version
            plain = await server.generate()
            prompt = [1, 2, 3] * 12
            for batched in (False, True):  # At the second time the prompt is cached.
                messages = await server.generate(
                    prompt_token_ids=prompt,
                    sampling=_S(max_tokens=8, temperature=0, ignore_eos=True),
                    prompt_logprobs_from=5,
                    batched=batched,
                )
                events = [event for message in messages for event in _events(message)]
                kinds = [type(event) for event in events]
                reports = [event for event in events if isinstance(event, gen.PromptLogprobs)]
                logprobs = [logprob for report in reports for logprob in report.logprobs]
                assert kinds[1 : 1 + len(reports)] == [gen.PromptLogprobs] * len(reports), kinds
                assert len(logprobs) == len(prompt) - 5, f"{len(logprobs)} log-probabilities"
                assert all(report.logprobs for report in reports), "an event without any"
                assert all(logprob <= 1e-3 for logprob in logprobs), max(logprobs)
                assert {report.weight_version for report in reports} == {version}
        assert not any(message.HasField("prompt_logprobs") for message in plain)

    async def test_no_logprobs_come_unasked(self) -> None:
        async with self.connect() as server:
            messages = await server.generate(logprob_mode=gen.LOGPROB_MODE_NONE)
        assert len(token_ids_of(messages)) == 8
        assert not any(message.tokens.logprobs for message in messages)

    async def test_unset_is_the_default_and_zero_is_zero(self) -> None:
        explicit = _S(
            max_tokens=8,
            seed=5,
            temperature=1,
            top_p=1,
            min_p=0,
            repetition_penalty=1,
            ignore_eos=False,
        )
        async with self.connect() as server:
            plain = token_ids_of(await server.generate(sampling=_S(max_tokens=8, seed=5)))
            same = token_ids_of(await server.generate(sampling=explicit))
            greedy = [
                token_ids_of(
                    await server.generate(sampling=_S(max_tokens=8, temperature=0, seed=s))
                )
                for s in (1, 2)
            ]
            zero = [
                token_ids_of(await server.generate(sampling=_S(max_tokens=8, seed=0)))
                for _ in range(2)
            ]
        assert plain == same
        assert greedy[0] == greedy[1]
        assert zero[0] == zero[1], "seed 0 was taken for no seed"

    async def test_fields_that_nobody_knows_are_ignored(self) -> None:
        async with self.connect() as server:
            wanted = token_ids_of(await server.generate())
            later = srv.GetServerInfoRequest(client="from a later release").SerializeToString()
            # Field 2047, of a length; and the same in a message within.
            field = b"\xfa\x7f" + bytes([len(later)]) + later
            request = server.generate_request()
            request.sampling.MergeFromString(field)
            request.MergeFromString(field)
            call = server.stubs.generation.Generate(request, timeout=CALL_S)
            assert token_ids_of([message async for message in call]) == wanted

    async def test_the_load_adds_up_while_completions_run(self) -> None:
        async with self.connect() as server:
            if not server.info.HasField("load"):
                pytest.skip("the server reports no load")
            before = server.info.load
            most = _S(max_tokens=server.info.model.context_length, ignore_eos=True)
            calls = [
                server.stubs.generation.Generate(
                    server.generate_request(sampling=most), timeout=CALL_S
                )
                for _ in range(4)
            ]
            seen = []
            for call in calls:
                await call.read()
                seen.append((await server.refresh()).load)
            for call in calls[::2]:
                call.cancel()
            for call in calls[1::2]:
                await remaining_messages(call)
            await server.pause()
            seen.append((await server.refresh()).load)
        for load in seen:
            assert load.started == load.finished + load.aborted + load.running, load
        assert seen[-1].started - before.started == len(calls)
        assert seen[-1].running == 0
        assert seen[-1].finished - before.finished >= 2

    async def test_the_context_bounds_the_completion(self) -> None:
        async with self.connect() as server:
            context = server.info.model.context_length
            prompt = [1] * (context - 6)
            wide = _S(max_tokens=1000, temperature=0, ignore_eos=True)
            messages = await server.generate(prompt_token_ids=prompt, sampling=wide)
        assert len(token_ids_of(messages)) == 6
        assert messages[-1].finished.reason == gen.FINISH_REASON_LENGTH

    async def test_a_deadline_aborts_the_sequence(self) -> None:
        async with self.connect() as server:
            after = (await server.refresh()).load
            if not server.info.HasField("load"):
                pytest.skip("the server reports no load")
            most = _S(max_tokens=server.info.model.context_length, ignore_eos=True)
            for _ in range(TRIES):  # A slow machine may be late with what ended in time.
                before = after
                request = server.generate_request(sampling=most)
                call = server.stubs.generation.Generate(request, timeout=0.05)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                    pytest.skip("the server samples a whole context within 50 ms")
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await server.pause()
                after = (await server.refresh()).load
                await server.resume()
                assert after.running == 0
                if after.finished == before.finished:
                    return
        pytest.fail("it ran past its deadline")


@pytest.mark.asyncio
class CheckSharedCall(Checks):
    """Many completions over one call."""

    async def test_completions_sample_what_calls_of_their_own_do(self) -> None:
        async with self.connect() as server:
            _require_many(server)
            samplings = [_S(max_tokens=40, seed=seed, ignore_eos=True) for seed in (3, 4)]
            wanted = [token_ids_of(await server.generate(sampling=each)) for each in samplings]
            parts = await _together(server, *({"sampling": each} for each in samplings))
        for number, ids in enumerate(wanted, start=1):
            mine = [part for part in parts if part.number == number]
            messages = [part.response for part in mine if part.HasField("response")]
            assert token_ids_of(messages) == ids
            assert messages[-1].WhichOneof("event") == "finished"
            assert [part.HasField("status") for part in mine[:-1]] == [False] * (len(mine) - 1)
            assert mine[-1].status == gen.CompletionStatus()

    async def test_a_refused_completion_leaves_the_others_alone(self) -> None:
        async with self.connect() as server:
            _require_many(server)
            parts = await _together(server, {"prompt_token_ids": []}, {})
        refused, served = (
            next(part.status for part in parts if part.number == n and part.HasField("status"))
            for n in (1, 2)
        )
        details = status_pb2.Status.FromString(refused.details).details
        invalid = errors_pb2.InvalidField()
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert any(detail.Unpack(invalid) for detail in details), "no InvalidField in the details"
        assert invalid.field == "prompt_token_ids"
        assert served == gen.CompletionStatus()

    async def test_a_cancelled_completion_leaves_the_engine(self) -> None:
        async with self.connect() as server:
            _require_many(server)
            if not server.info.HasField("load"):
                pytest.skip("the server reports no load")
            before = (await server.refresh()).load
            most = _S(max_tokens=server.info.model.context_length, ignore_eos=True)
            call = server.stubs.generation.GenerateMany(timeout=CALL_S)
            await call.write(_begin([server.generate_request(sampling=most)]))
            await call.read()
            await call.write(gen.GenerateManyRequest(cancel=[1]))
            await call.done_writing()
            async for message in _rest(call):
                if any(part.HasField("status") for part in message.parts):
                    pytest.skip("the server samples a whole context before it can be cancelled")
            after = (await server.refresh()).load
        assert after.running == 0
        assert after.aborted == before.aborted + 1

    async def test_it_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.generate_many:
                pytest.skip("the server serves GenerateMany")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.stubs.generation.GenerateMany(timeout=CALL_S).read()
        # Without details, if the server's gRPC does not know the method.
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def _require_many(server: ServerHarness) -> None:
    if not server.capabilities.generate_many:
        pytest.skip("the server does not report generate_many")


def _begin(requests: Sequence[gen.GenerateRequest]) -> gen.GenerateManyRequest:
    timeout = duration_pb2.Duration(seconds=int(CALL_S))
    return gen.GenerateManyRequest(
        begin=[
            gen.NumberedRequest(number=number, request=request, timeout=timeout)
            for number, request in enumerate(requests, start=1)
        ]
    )


async def _together(
    server: ServerHarness, *requests: Mapping[str, Any]
) -> list[gen.NumberedResponse]:
    """Returns the parts of completions over one call, numbered from 1."""
    call = server.stubs.generation.GenerateMany(timeout=CALL_S)
    await call.write(_begin([server.generate_request(**fields) for fields in requests]))
    await call.done_writing()
    return [part async for message in _rest(call) for part in message.parts]


async def _rest(call: Any) -> AsyncIterator[gen.GenerateManyResponse]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


@pytest.mark.asyncio
class CheckRefusals(Checks):
    """Requests that must be refused."""

    @pytest.mark.parametrize(
        ("field", "fields"), [row[1:] for row in _INVALID], ids=[row[0] for row in _INVALID]
    )
    async def test_a_value_out_of_range_is_named(self, field: str, fields: dict[str, Any]) -> None:
        async with self.connect() as server:
            found = await server.refused_generate(**fields)
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        detail = found.detail(errors_pb2.InvalidField)
        assert detail.field == field
        assert detail.expected, "it does not say what is accepted"

    async def test_a_prompt_that_fills_the_context_is_refused(self) -> None:
        async with self.connect() as server:
            context = server.info.model.context_length
            found = await server.refused_generate(prompt_token_ids=[1] * context)
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
        detail = found.detail(errors_pb2.PromptTooLong)
        assert (detail.prompt_tokens, detail.context_length) == (context, context)

    async def test_weights_that_are_too_old_are_refused(self) -> None:
        async with self.connect() as server:
            serving = server.info.weight_version
            found = await server.refused_generate(min_weight_version=serving + 5)
            fresh = await server.generate(min_weight_version=serving)
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "WEIGHT_VERSION_BEHIND")
        detail = found.detail(errors_pb2.WeightVersionBehind)
        assert (detail.serving, detail.wanted) == (serving, serving + 5)
        assert len(token_ids_of(fresh)) == 8

    async def test_images_are_refused_without_the_capability(self) -> None:
        image = gen.PromptImage(
            data=b"\x89PNG\r\n\x1a\n", media_type="image/png", num_placeholders=1
        )
        async with self.connect() as server:
            if server.capabilities.images:
                pytest.skip("the server takes images")
            found = await server.refused_generate(images=[image])
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_experts_are_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.routed_experts:
                pytest.skip("the server reports routed experts")
            found = await server.refused_generate(routed_experts_from=0)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_sampling_masks_are_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.sampling_mask:
                pytest.skip("the server reports sampling masks")
            found = await server.refused_generate(sampling_mask=True)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_experts_from_beyond_the_prompt_are_refused(self) -> None:
        async with self.connect() as server:
            if not server.capabilities.routed_experts:
                pytest.skip("the server reports no routed experts")
            beyond = len(server.generate_request().prompt_token_ids) + 1
            found = await server.refused_generate(routed_experts_from=beyond)
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert found.detail(errors_pb2.InvalidField).field == "routed_experts_from"

    async def test_logprobs_of_a_prompt_are_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.prompt_logprobs:
                pytest.skip("the server reports log-probabilities of prompts")
            found = await server.refused_generate(prompt_logprobs_from=1)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_logprobs_of_ids_that_have_none_are_refused(self) -> None:
        async with self.connect() as server:
            if not server.capabilities.prompt_logprobs:
                pytest.skip("the server reports no log-probabilities of prompts")
            beyond = len(server.generate_request().prompt_token_ids) + 1
            refusals = [await server.refused_generate(prompt_logprobs_from=n) for n in (0, beyond)]
        for found in refusals:
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            assert found.detail(errors_pb2.InvalidField).field == "prompt_logprobs_from"

    async def test_a_constraint_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.constrained_sampling:
                pytest.skip("the server constrains the sampling")
            found = await server.refused_generate(constraint=gen.Constraint(regex="1"))
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_a_constraint_that_nothing_can_read_is_refused(self) -> None:
        """The constraint has no form, an empty one, or text that the engine cannot parse."""
        async with self.connect() as server:
            if not server.capabilities.constrained_sampling:
                pytest.skip("the server does not constrain the sampling")
            wrong = [
                gen.Constraint(),
                gen.Constraint(choices=gen.Choices()),
                gen.Constraint(regex=""),
                gen.Constraint(json_schema="{"),
                gen.Constraint(grammar="this is no grammar"),
            ]
            refusals = [await server.refused_generate(constraint=one) for one in wrong]
            later = await server.generate()
        for found in refusals:
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            field = found.detail(errors_pb2.InvalidField).field
            assert field.startswith("constraint")
        assert later

    async def test_bytes_that_are_no_image_are_refused(self) -> None:
        image = gen.PromptImage(data=b"no image", media_type="image/png", num_placeholders=1)
        async with self.connect() as server:
            if not server.capabilities.images:
                pytest.skip("the server takes no images")
            found = await server.refused_generate(images=[image])
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "IMAGE_UNREADABLE")
        assert found.detail(errors_pb2.ImageUnreadable).media_type == "image/png"

    async def test_priority_is_refused_without_the_capability(self) -> None:
        async with self.connect() as server:
            if server.capabilities.priority:
                pytest.skip("the server supports priorities")
            found = await server.refused_generate(priority=1)
        assert (found.code, found.reason) == ("UNIMPLEMENTED", "CAPABILITY_MISSING")

    async def test_a_full_queue_is_refused_with_a_delay(self) -> None:
        async with self.connect() as server:
            limits = server.info.limits
            room = limits.max_in_flight + limits.max_queued
            if room > 128:
                pytest.skip(
                    f"the server takes {room} completions at once: start it with at most 128"
                )
            found = await self._overfill(server, room)
        assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        delay = found.detail(error_details_pb2.RetryInfo).retry_delay
        assert delay.ToTimedelta().total_seconds() > 0

    async def _overfill(self, server: ServerHarness, room: int) -> Any:
        """Starts more completions than fit and returns the first refusal."""
        most = _S(max_tokens=server.info.model.context_length, ignore_eos=True)
        calls = [
            server.stubs.generation.Generate(server.generate_request(sampling=most), timeout=CALL_S)
            for _ in range(room + 16)
        ]
        try:
            for call in reversed(calls):
                try:
                    await call.read()
                except grpc.aio.AioRpcError:
                    return await refusal(call.read())
            pytest.fail(f"{len(calls)} completions were accepted; the limit is {room}")
        finally:
            for call in calls:
                call.cancel()


def _events(message: gen.GenerateResponse) -> list[Any]:
    """Returns the events of a message, one or a batch, in the order of the contract."""
    kind = message.WhichOneof("event")
    if kind != "batch":
        return [getattr(message, kind or "")]
    batch = message.batch
    begun = [batch.started] if batch.HasField("started") else []
    ended = [batch.finished] if batch.HasField("finished") else []
    return [*begun, *batch.prompt_logprobs, *batch.tokens, *ended]
