"""The models of a service: their requests in order, each applied once.

A request to train has a number, and its model takes requests in the order of their numbers, however
they arrive. A request that comes again is the one that came before.

Invariant: what a step of the optimizer has done is in the database together with its answer, or
has not been done. After a restart the requests behind the last state are done again: gradients are
computed anew, from the same weights and data.

A model waits for its turn, which it shares with the models of its shape, and for its policy. Who
asks for an answer waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treadle.policy.client.types import TokenValues
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import SaveAdapterRequest, SaveHfRequest
from treadle.serve.batches import PolicyPass, make_batch
from treadle.serve.errors import Limits, ServiceError, refused, unknown
from treadle.serve.policies import Policies, Shape
from treadle.serve.record import Records
from treadle.serve.store import Change, Store, StoredAnswer, expiry
from treadle.serve.wire import encode_output, read_passes

__all__ = ["MODEL_KINDS", "Models"]

_log = logging.getLogger(__name__)

_PROTOBUF: Final = "application/x-protobuf"
_CREATED: Final = 0
"""Number of the request that creates a model."""
_ABANDONED_S: Final = 3600.0
"""How long a client has given no heartbeat when its models may make room for others."""
_MAX_WAITING: Final = 1024
"""Requests of a model that wait, beside the one that is next."""
_RESTART: Final = (
    "Start the server again: the model goes on from its last state, with the requests that it has "
    "accepted. See logs/serve.log"
)
_SEGMENTS: Final = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
MODEL_KINDS: Final = ("optim_step", "load_weights", *_SEGMENTS)
"""Requests to a model in JSON, by the names of their paths."""
_Done: TypeAlias = tuple[StoredAnswer, Sequence[Change]]
"""The answer to a request, and what it changes in the database."""


class Models:
    """The models of a service.

    Args:
        vocab_size: Ids of the base model are below it.
        context_length: Maximum number of tokens of a sequence.
        architecture: The type of the base model.
        limits: Maximum numbers of models and of a session's models and requests.
    """

    def __init__(
        self,
        store: Store,
        policies: Policies,
        *,
        vocab_size: int,
        context_length: int,
        architecture: str,
        limits: Limits,
        records: Records,
    ) -> None:
        self.store = store
        self.records = records
        self.policies = policies
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.architecture = architecture
        self._limits = limits
        self._models: dict[str, _Model] = {}
        records.totals.models.set_function(lambda: len(self._models))
        records.totals.waiting.labels("train").set_function(
            lambda: sum(len(model.waiting) for model in self._models.values())
        )
        self._answered: dict[str, asyncio.Event] = {}

    def start(self) -> None:
        """Goes on with the models of an earlier process."""
        for row in self.store.rows("SELECT id FROM models WHERE alive"):
            model = self._models[row["id"]] = _Model(row["id"], self)
            model.start()

    async def close(self) -> None:
        """Stops all models where they are."""
        tasks = [model.task for model in self._models.values() if model.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def create(
        self, model: str, session: str, kind: str, body: Mapping[str, Any], shape: Shape
    ) -> str:
        """Accepts the request that creates a model; returns its name.

        Raises:
            ServiceError: There are too many models.
        """
        request = f"{model}:{_CREATED}"
        if self.store.row("SELECT id FROM requests WHERE id = ?", request) is not None:
            return request
        own = sum(name.startswith(f"{session}:") for name in self._models)
        if own >= self._limits.session_models:
            raise ServiceError(
                f"session {session} has {own} models, as many as --max-session-models: unload one",
                status=403,
            )
        if len(self._models) >= self._limits.models and not self._unload_abandoned():
            raise ServiceError(
                f"the server has {self._limits.models} models, as many as --max-models: unload "
                "one, or start it with more"
            )
        row = (
            "INSERT INTO models (id, session, shape, applied, used, metadata) VALUES "
            "(?, ?, ?, -1, ?, ?)",
            *(model, session, shape.text, time.time()),
            json.dumps(body.get("user_metadata")),
        )
        given = json.dumps(dict(body)).encode()
        self.store.accept(request, model, _CREATED, kind, given, row)  # both or none
        made = self._models[model] = _Model(model, self)
        made.start()
        return request

    def _unload_abandoned(self) -> bool:
        """Frees the model that was used last longest ago, of those whose clients have gone."""
        row = self.store.row(
            "SELECT models.id FROM models JOIN sessions ON sessions.id = models.session WHERE "
            "alive AND seen < ?1 AND used < ?1 ORDER BY used",
            time.time() - _ABANDONED_S,
        )
        if row is None or row["id"] not in self._models:
            return False
        _log.warning("model %s makes room: its client has gone", row["id"])
        self.unload(row["id"])
        return True

    def accept(self, model: str, seq: int, kind: str, body: bytes) -> str:
        """Accepts a request to a model, once; returns its name.

        Raises:
            ServiceError: There is no such model, or too much waits for it.
        """
        found = self._models.get(model)
        if found is None:
            raise unknown("model", model, "it was unloaded, or never created; create it first")
        if not isinstance(seq, int) or seq <= _CREATED:
            raise ServiceError(f"seq_id={seq!r} of model {model}: number its requests from 1")
        session = model.partition(":")[0]
        if not found.has(seq):
            own = [m for name, m in self._models.items() if name.startswith(f"{session}:")]
            self._limits.check_requests(session, sum(m.runnable for m in own))
        return found.accept(seq, kind, body)

    def unload(self, model: str) -> None:
        """Frees a model; its checkpoints stay.

        Raises:
            ServiceError: There is no such model.
        """
        found = self._models.pop(model, None)
        if found is None:
            raise unknown("model", model, "it was unloaded already, or never created")
        found.ended = True  # after what it does now: ranks cannot be interrupted
        self.store.write(*self.store.unloaded(model))
        self.store.sweep()
        self.records.end(model)

    async def answer(self, request: str, wait_s: float) -> StoredAnswer | None:
        """Returns the answer to a request; None: not yet.

        Raises:
            ServiceError: There is no such request.
        """
        if (answer := self.store.answer_of(request)) is not None:
            return answer
        model = request.rpartition(":")[0]
        if self.store.row("SELECT id FROM requests WHERE id = ?", request) is None:
            raise unknown("request", request, "it was never made, or its answer is too old")
        if (found := self._models.get(model)) is None:
            raise unknown("model", model, "it was unloaded before it came to this request")
        if found.stopped is not None:
            return found.stopped
        event = self._answered.setdefault(request, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await event.wait()
        return self.store.answer_of(request) or found.stopped

    def wake(self, request: str) -> None:
        """Wakes the polls that wait for an answer."""
        if (event := self._answered.pop(request, None)) is not None:
            event.set()


class _Model:
    """One model: its queue of requests, and the task that executes them in order."""

    def __init__(self, name: str, models: Models) -> None:
        self._name = name
        self._models = models
        self._store = models.store
        row = self._store.row("SELECT shape, content, applied FROM models WHERE id = ?", name)
        assert row is not None
        self._shape = Shape.read(row["shape"])
        self._content: str | None = row["content"]
        self._next = row["applied"] + 1
        self._gradients: list[tuple[str, PolicyPass]] = []
        self.waiting: dict[int, tuple[str, bytes]] = {}
        self._stepped: dict[str, float] | None = None
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self.stopped: StoredAnswer | None = None
        for each in self._store.rows(
            "SELECT id, seq, kind, body, type FROM requests WHERE model = ? AND seq >= ? AND body "
            "IS NOT NULL ORDER BY seq",
            *(name, self._next),
        ):
            if each["type"] is None:
                self.waiting[each["seq"]] = each["kind"], each["body"]
                continue
            self._next = each["seq"] + 1  # it was answered, and only gradients must come again
            if each["kind"] == "forward_backward" and each["type"] == _PROTOBUF:
                batch = self._batch(each["body"])
                if not batch.forward_only and any(s.num_loss_tokens for s in batch.sequences):
                    self._gradients.append((each["id"], batch))

    def start(self) -> None:
        """Begins to work."""
        self._models.records.begin(self._name)
        self.task = asyncio.create_task(self._work(), name=f"model {self._name}")
        self._news.set()

    def has(self, seq: int) -> bool:
        """Returns whether a request was accepted before."""
        return seq < self._next or seq in self.waiting

    @property
    def runnable(self) -> int:
        """Number of requests that wait for no other request to come."""
        return next(n for n in itertools.count() if self._next + n not in self.waiting)

    def accept(self, seq: int, kind: str, body: bytes) -> str:
        """See `Models.accept`."""
        request = f"{self._name}:{seq}"
        if self.has(seq):
            return request
        if self.stopped is not None:
            raise ServiceError(f"model {self._name} has stopped. {_RESTART}", status=503)
        if len(self.waiting) >= _MAX_WAITING and seq != self._next:  # for which the others wait
            raise ServiceError(
                f"{_MAX_WAITING} requests wait for model {self._name}: wait for answers", status=429
            )
        self._store.accept(request, self._name, seq, kind, body)
        self.waiting[seq] = kind, body
        self._news.set()
        return request

    async def _work(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._next in self.waiting and not self.ended:
                    async with self._models.policies.turn(self._shape):
                        await self._take_turn()
        except Exception as error:  # a defect, or a database that cannot be written
            _log.exception("model %s has stopped", self._name)
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Fails what waits, until the server is started again."""
        text = f"model {self._name} has stopped, by {type(error).__name__}: {error}. {_RESTART}"
        self.stopped = StoredAnswer.failed(ServiceError(text, category="server"))
        waiting, self.waiting = self.waiting, {}
        for seq in waiting:
            self._models.wake(f"{self._name}:{seq}")

    async def _take_turn(self) -> None:
        """Does what waits, up to a step: another model would take up the policy in between."""
        kind = ""
        while kind != "optim_step" and self._next in self.waiting and not self.ended:
            seq = self._next
            kind, body = self.waiting[seq]
            await self._do(seq, kind, body)
            del self.waiting[seq]

    async def _do(self, seq: int, kind: str, body: bytes) -> None:
        request = f"{self._name}:{seq}"
        changes: Sequence[Change] = ()
        outcome = "failed"
        try:
            if kind == "forward_backward":
                answer = await self._pass(request, body)
            else:
                answer, changes = await self._execute(seq, kind, json.loads(body))
            outcome = "done"
        except Exception as error:  # a defect of the service must not stop the model
            if not isinstance(error, ServiceError):
                _log.exception("request %s failed", request)
            answer = StoredAnswer.failed(error)
        self._next = seq + 1
        could_not_be_created = self._content is None and not self.ended
        if could_not_be_created:  # with its answer: a restart must not find it alive
            changes = self._store.unloaded(self._name)
        self._store.answered(request, answer, *changes)
        self._models.wake(request)
        self._models.records.totals.requests.labels(kind, outcome).inc()
        stepped, self._stepped = self._stepped, None
        if stepped is not None:
            await self._models.records.step(self._name, stepped)
        if could_not_be_created:
            self._models.unload(self._name)
        elif changes:
            self._store.sweep()

    async def _execute(self, seq: int, kind: str, given: Mapping[str, Any]) -> _Done:
        """Does a request in JSON."""
        match kind:
            case "create_model":
                policy = await self._models.policies.of(self._shape)
                seed = (given.get("lora_config") or {}).get("seed") or 0
                self._content = await policy.use(lambda: policy.begin(seed))
                answer = StoredAnswer.of({"type": "create_model", "model_id": self._name})
                return answer, self._store.moved(self._name, seq, self._content)
            case "load_weights":
                return await self._load(seq, given)
            case "optim_step":
                return await self._step(seq, given)
        return await self._save(kind, given)

    # --- passes and steps ----------------------------------------------------------------------

    def _batch(self, body: bytes) -> PolicyPass:
        return make_batch(
            read_passes(body),
            vocab_size=self._models.vocab_size,
            context_length=self._models.context_length,
        )

    def _state(self) -> str:
        assert self._content is not None, "a model that could not be created is unloaded"
        return self._content

    async def _pass(self, request: str, body: bytes) -> StoredAnswer:
        batch, content = self._batch(body), self._state()
        counted = sum(sequence.num_loss_tokens for sequence in batch.sequences)
        logprobs_M: NDArray[np.float32] = np.zeros(0, np.float32)
        loss = 0.0
        policy = await self._models.policies.of(self._shape)

        if counted and batch.forward_only:
            asked = pb.LogProbsRequest(temperature=1.0)
            answers = await policy.use(lambda: policy.call(asked, batch.sequences), content)
            logprobs_M = np.frombuffer(answers[0].logprobs, "<f4")
        elif counted:
            began = time.monotonic()
            response = await policy.use(
                lambda: policy.add_gradient(request, batch), content, self._gradients
            )
            self._gradients.append((request, batch))
            logprobs_M, loss = TokenValues.of(response.tokens).logprobs_M, response.loss
            tokens = sum(len(sequence.ids) for sequence in batch.sequences)
            self._models.records.totals.tokens.labels("trained").inc(tokens)
            self._sums["loss"] += loss
            self._sums["tokens"] += tokens
            self._sums["s"] += time.monotonic() - began
            self._sums[batch.loss] += sum(float(factors.sum()) for factors in batch.factors)
        logprobs = batch.of_positions(logprobs_M)
        fields = {"logprobs": logprobs}
        if batch.loss == "cross_entropy":
            pairs = zip(batch.factors, logprobs, strict=True)
            fields["elementwise_loss"] = [-factors * values for factors, values in pairs]
            if batch.forward_only:
                loss = sum(float(x.sum(dtype=np.float64)) for x in fields["elementwise_loss"])
        return StoredAnswer(body=encode_output({"loss:sum": loss}, fields), type=_PROTOBUF)

    async def _step(self, seq: int, given: Mapping[str, Any]) -> _Done:
        settings, content = _adamw(given), self._state()
        if not self._gradients:
            raise ServiceError("there is no gradient to step with: send forward_backward first")
        policy = await self._models.policies.of(self._shape)

        async def step() -> tuple[pb.OptimizerStepResponse, str]:
            done = await policy.step(settings)
            return done, await policy.save()

        began = time.monotonic()
        done, moved = await policy.use(step, content, self._gradients)
        self._stepped = self._of_step(done, time.monotonic() - began)
        self._content = moved
        self._gradients.clear()
        metrics = {
            "optim/grad_norm": done.grad_norm,
            "optim/lr": done.learning_rate,
            "optim/step": float(done.step),
            "optim/skipped": float(done.skipped),
        }
        return StoredAnswer.of({"metrics": metrics}), self._store.moved(self._name, seq, moved)

    def _of_step(self, done: pb.OptimizerStepResponse, took_s: float) -> dict[str, float]:
        """Returns what is recorded of a step, by the names of a run's metrics."""
        sums, self._sums = self._sums, defaultdict(float)
        values = {
            "actor/loss": sums["loss"],
            "actor/grad_norm": done.grad_norm,
            "actor/lr": done.learning_rate,
            "actor/skipped_updates": float(done.skipped),
            "tokens/trained": sums["tokens"],
            "time/train_s": sums["s"] + took_s,
        }
        if sums["cross_entropy"] > 0.0:
            values["train/loss"] = sums["loss"] / sums["cross_entropy"]
        return values

    # --- checkpoints -----------------------------------------------------------------------------

    async def _load(self, seq: int, given: Mapping[str, Any]) -> _Done:
        row = self._store.checkpoint(given["path"])
        content: str = row["content"]
        saved = Shape.read(row["shape"])
        if saved != self._shape:
            raise ServiceError(
                f"{row['path']} has adapters of rank {saved.rank} of {saved.targets}, and model "
                f"{self._name} of rank {self._shape.rank} of {self._shape.targets}: create the "
                "model from the checkpoint (create_training_client_from_state)"
            )
        policy = await self._models.policies.of(self._shape)

        async def load() -> str:
            if given.get("optimizer"):
                return content  # the next pass takes it up
            await policy.load(content, weights_only=True)
            return await policy.save()

        moved = await policy.use(load)
        self._content = moved
        self._gradients.clear()
        answer = {"type": "load_weights", "path": row["path"], "model_id": self._name}
        return StoredAnswer.of(answer), self._store.moved(self._name, seq, moved)

    async def _save(self, kind: str, given: Mapping[str, Any]) -> _Done:
        content, name = self._state(), given.get("path")
        if name is None and kind == "save_weights_for_sampler":
            return self._sampler(content, given)
        name = str(self._next) if name is None else str(name)
        if not name or "/" in name or name.startswith("."):
            raise ServiceError(f"{name!r} cannot name a checkpoint: use letters, digits, - and _")
        size = self._store.size(content)
        about = expiry(given), json.dumps(given.get("user_metadata"))
        path, added = self._store.named(self._name, _SEGMENTS[kind], name, content, *about, size)
        there = self._store.row("SELECT path FROM checkpoints WHERE path = ?", path)
        if there is not None and not given.get("overwrite"):
            raise ServiceError(f"{path} exists: choose another name, or save with overwrite=True")
        if kind == "save_weights_external":
            added = (*added[:-1], await self._export(content, given, name))
        changes = [("DELETE FROM checkpoints WHERE path = ?", path), added]
        return StoredAnswer.of({"type": kind, "path": path}), changes

    def _sampler(self, content: str, given: Mapping[str, Any]) -> _Done:
        """Makes a sampling session with the present weights, which have no name."""
        session, number = self._name.partition(":")[0], given.get("sampling_session_seq_id")
        sampler, change = self._store.new_sampler(
            session, number, content, model=self._name, path=None
        )
        answer = {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
        return StoredAnswer.of(answer), [change]

    async def _export(self, content: str, given: Mapping[str, Any], name: str) -> int:
        """Writes a model for others: PEFT's adapter, or all weights; returns its bytes."""
        if given.get("age_encryption_recipients"):
            raise refused("encryption of an export", "leave age_encryption_recipients out")
        directory = self._store.export_directory(self._name, name)
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(directory, ignore_errors=True)  # of a process that was killed
        policy = await self._models.policies.of(self._shape)
        make: Callable[..., Any] = SaveAdapterRequest if self._shape.rank else SaveHfRequest

        asked = make(directory=str(directory.absolute()))
        await policy.use(lambda: policy.call(asked), content)
        return sum(file.stat().st_size for file in directory.rglob("*"))


def _adamw(given: Mapping[str, Any]) -> pb.AdamW:
    if "adam_params" not in given:
        raise refused("other optimizer than Adam", "send AdamParams with optim_step")
    adam = given["adam_params"]
    return pb.AdamW(
        lr=adam.get("learning_rate", 1e-4),
        beta1=adam.get("beta1", 0.9),
        beta2=adam.get("beta2", 0.95),
        eps=adam.get("eps", 1e-12),
        weight_decay=adam.get("weight_decay", 0.0),
        grad_clip=adam.get("grad_clip_norm", 0.0),
    )
