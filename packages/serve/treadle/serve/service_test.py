"""What the service accepts, refuses and answers before any rank is needed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from treadle.agent_loop.hf import HfRenderer
from treadle.serve.app import make_app
from treadle.serve.errors import Limits, ServiceError
from treadle.serve.policies import Policies, Shape
from treadle.serve.record import Records
from treadle.serve.sampling import Sampler
from treadle.serve.service import Service
from treadle.serve.store import Store
from treadle.serve.training import Models
from treadle.tinker.sdk import MESSAGES
from treadle.trainer import demo
from treadle.trainer.config.load import load_config

MODEL_PATH = Path(demo.__file__).parent / "calculator" / "model"
SHAPE = Shape(rank=4, targets="q_proj")
LIMITS = Limits(models=2, session_models=2, session_requests=4)


class Served:
    """The models of a store, of which `s:m` is trained by no ranks."""

    def __init__(self, directory: Path) -> None:
        self.store = Store(directory)
        self.store.write(
            (
                "INSERT OR IGNORE INTO models (id, session, shape, content, applied, used) VALUES "
                "('s:m', 's', ?, 'state', 0, 0)",
                SHAPE.text,
            )
        )
        config = load_config([], ["data.train_files=none", f"model.path={MODEL_PATH}"]).config
        self.policies = Policies(config, self.store, limit=1)
        renderer = HfRenderer.from_directory(MODEL_PATH)
        self.records = Records(directory / "runs", renderer, MODEL_PATH)
        self.models = Models(
            self.store,
            self.policies,
            vocab_size=16,
            context_length=8,
            architecture="llama",
            limits=LIMITS,
            records=self.records,
        )
        sampler = Sampler(
            self.store, self.policies, renderer, self.records, at_once=1, limits=LIMITS
        )
        service = Service(
            self.store, self.models, sampler, renderer, name="demo", model_path=MODEL_PATH
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(service, "key")),
            base_url="http://here/api/v1",
            headers={"X-API-Key": "key"},
        )
        self.models.start()

    async def close(self) -> None:
        await self.client.aclose()
        await self.models.close()
        self.store.close()

    def accept(self, seq: int) -> str:
        return self.models.accept("s:m", seq, "optim_step", b'{"adam_params": {}}')

    async def answer(self, seq: int) -> bytes:
        answer = await self.models.answer(f"s:m:{seq}", 10.0)
        assert answer is not None
        return answer.body

    def count(self, name: str, **labels: str) -> float:
        return self.records.totals.registry.get_sample_value(name, labels) or 0.0


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    yield made
    await made.close()


@pytest.mark.asyncio
async def test_requests_that_wait_for_an_earlier_one_leave_room_for_it(served: Served) -> None:
    async with served.policies.turn(SHAPE):  # so that nothing is done yet
        for seq in (2, 3, 4, 5, 6, 7, 1):  # as the SDK sends the parts of a pass
            served.accept(seq)
        gauge = {"kind": "train"}
        assert served.count("treadle_serve_requests_in_flight", **gauge) == 7.0
        with pytest.raises(ServiceError, match="7 requests in flight") as raised:
            served.accept(8)
        assert raised.value.status == 429
        served.accept(7)  # again
    assert b"send forward_backward first" in await served.answer(7)
    served.accept(8)


@pytest.mark.asyncio
async def test_a_full_line_has_room_for_what_it_waits_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.serve.training._MAX_WAITING", 2)
    served.accept(3)
    served.accept(2)
    with pytest.raises(ServiceError, match="2 requests wait for model s:m"):
        served.accept(4)
    served.accept(1)
    assert b"send forward_backward first" in await served.answer(3)


@pytest.mark.asyncio
async def test_a_pass_that_failed_is_counted_as_failed(served: Served) -> None:
    message = MESSAGES["ForwardBackwardRequest"](model_id="s:m", seq_id=1, loss_fn="nothing")
    served.models.accept("s:m", 1, "forward_backward", message.SerializeToString())
    assert b"error" in await served.answer(1)
    name = "treadle_serve_requests_total"
    assert served.count(name, kind="forward_backward", outcome="failed") == 1.0
    assert served.count(name, kind="forward_backward", outcome="done") == 0.0


@pytest.mark.asyncio
async def test_a_model_that_cannot_go_on_fails_its_requests(served: Served, tmp_path: Path) -> None:
    async with served.policies.turn(SHAPE):
        for seq in (1, 2, 4):
            served.accept(seq)
        served.store.write(
            (
                "CREATE TRIGGER full BEFORE UPDATE OF answer ON requests WHEN OLD.seq = 1 BEGIN "
                "SELECT RAISE(ABORT, 'the disk is full'); END",
            )
        )
        polls = [asyncio.create_task(served.answer(seq)) for seq in (1, 2, 4)]
        await asyncio.sleep(0)
    for body in await asyncio.gather(*polls):
        assert b"model s:m has stopped, by IntegrityError: the disk is full" in body
    assert b"has stopped" in await served.answer(1)
    with pytest.raises(ServiceError, match="Start the server again") as raised:
        served.accept(3)
    assert raised.value.status == 503
    served.store.write(("DROP TRIGGER full",))
    await served.models.close()
    again = Served(tmp_path)
    again.accept(3)
    for seq in (1, 2, 3, 4):
        assert b"send forward_backward first" in await again.answer(seq)
    await again.close()


@pytest.mark.asyncio
async def test_a_model_that_could_not_be_created_is_gone_after_a_restart(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(model: str) -> None:
        raise RuntimeError(f"killed before it unloads {model}")

    monkeypatch.setattr(served.models, "unload", killed)
    created = served.models.create("s:n", "s", "create_model", {}, Shape(rank=4, targets=" "))
    served.models.accept("s:n", 1, "optim_step", b'{"adam_params": {}}')
    answer = await served.models.answer(created, 10.0)
    assert answer is not None and b"error" in answer.body
    await served.models.close()
    again = Served(tmp_path)
    assert await again.models.answer(created, 0.0) == answer
    with pytest.raises(ServiceError, match="no model 's:n'"):
        await again.models.answer("s:n:1", 10.0)
    with pytest.raises(ServiceError, match="no model 's:n'"):
        again.models.accept("s:n", 2, "optim_step", b'{"adam_params": {}}')
    await again.close()


@pytest.mark.asyncio
async def test_a_full_disk_is_the_servers_fault_and_a_repeat_is_served(served: Served) -> None:
    begun = await served.client.post("/create_session", json={})
    session = begun.json()["session_id"]
    wanted = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "demo",
        "user_metadata": {"notes": "x" * 100_000},
    }
    for extra in (3, 40):  # pages: there is no room for the model, or none for its request
        (pages,) = served.store.rows("PRAGMA page_count")[0]
        served.store.rows(f"PRAGMA max_page_count = {pages + extra}")
        refused = await served.client.post("/create_model", json=wanted)
        assert (refused.status_code, "disk is full" in refused.text) == (503, True)
    served.store.rows("PRAGMA max_page_count = 1000000")
    async with served.policies.turn(Shape(rank=0, targets="")):  # so that no ranks are started
        made = await served.client.post("/create_model", json=wanted)
        assert made.json()["model_id"] == f"{session}:train:0"
        again = await served.client.post("/create_model", json=wanted)
        assert again.json() == made.json()
        await served.models.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("session", [{"a": 1}, 1 << 70, "\ud800"])
async def test_a_value_that_no_database_takes_is_the_clients_fault(
    served: Served, session: object
) -> None:
    content = json.dumps({"session_id": session})
    refused = await served.client.post("/session_heartbeat", content=content)
    assert (refused.status_code, "does not fit" in refused.text) == (400, True)


@pytest.mark.asyncio
async def test_what_stable_reinforce_needs_is_refused_by_its_name(served: Served) -> None:
    given = {"record_stability_info": True, "sampling_session_id": "s:sample:0", "seq_id": 1}
    answer = await served.client.post("/asample", json=given)
    assert answer.status_code == 400
    told = answer.json()["detail"]
    assert "no record_stability_info" in told and "loss_fn=importance_sampling" in told


@pytest.mark.asyncio
@pytest.mark.parametrize("stop", ["", ["end", ""]])
async def test_a_stop_without_text_is_refused_by_its_name(served: Served, stop: object) -> None:
    begun = await served.client.post("/create_session", json={})
    wanted = {
        "session_id": begun.json()["session_id"],
        "sampling_session_seq_id": 0,
        "base_model": "demo",
    }
    made = await served.client.post("/create_sampling_session", json=wanted)
    given = {
        "sampling_session_id": made.json()["sampling_session_id"],
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 2, "stop": stop},
    }
    answer = await served.client.post("/asample", json=given)
    assert answer.status_code == 400
    assert f"sampling_params: stop={stop!r} has an empty text" in answer.json()["detail"]
