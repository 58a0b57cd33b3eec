"""The service: sessions, models, checkpoints and samplers, as the paths of the API ask for them.

Invariant: what is accepted is in the store. Nothing here waits for ranks or servers but `result`,
and no longer than a poll lasts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from treadle.agent_loop import SamplingParams
from treadle.agent_loop.hf import HfRenderer
from treadle.policy.config.policy import LoraTarget
from treadle.serve.errors import ServiceError, gone, refused, unknown
from treadle.serve.policies import Shape
from treadle.serve.sampling import Sampler, SampleRequest
from treadle.serve.store import Store, StoredAnswer, expiry
from treadle.serve.training import Models
from treadle.serve.wire import read_passes

__all__ = ["Service"]

_POLL_S: Final = 20.0
"""How long a poll waits for its answer; the SDK allows 45 s."""
_ATTENTION: Final[Sequence[LoraTarget]] = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final[Sequence[LoraTarget]] = ("gate_proj", "up_proj", "down_proj")
_KINDS: Final = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_NOTE: Final = (
    "treadle serve: adapters are on attention and MLP; train_unembed is accepted and adds none"
)
_MAX_SAMPLES: Final = 1024
_TOO_MUCH: Final = {
    "topk_prompt_logprobs": "sample with prompt_logprobs, which are of the prompt's own tokens",
    "topk_sample_logprobs": "the log-probability of each sampled token is returned",
    "target_prompt_logprobs": "score each target as a prompt of its own, by compute_logprobs",
    "record_stability_info": (
        "it is for the loss stable_reinforce, whose formula is in neither the SDK nor the "
        "cookbook; set loss_fn=importance_sampling, or ppo where samples are of older weights"
    ),
    "prompt_alt_tokens_k": "sample from each prefix with max_tokens=1",
}


class Service:
    """What the paths of the API do.

    Args:
        name: Name that clients call the base model by; it is in `model_path`.
    """

    def __init__(
        self,
        store: Store,
        models: Models,
        sampler: Sampler,
        renderer: HfRenderer,
        *,
        name: str,
        model_path: Path,
    ) -> None:
        self._store = store
        self._models = models
        self.totals = models.records.totals
        self._sampler = sampler
        self._renderer = renderer
        self._name = name
        self._model_path = model_path
        self._context_length = models.context_length

    # --- sessions --------------------------------------------------------------------------------

    def create_session(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begins a session."""
        session = uuid.uuid4().hex
        info = {key: given.get(key) for key in ("user_metadata", "display_name", "tags")}
        self._store.write(
            (
                "INSERT INTO sessions (id, created, seen, info) VALUES (?, ?, ?, ?)",
                *(session, time.time(), time.time(), json.dumps(info)),
            )
        )
        return {"type": "create_session", "session_id": session, "info_message": _NOTE}

    def _session(self, session: str) -> Any:
        row = self._store.row("SELECT * FROM sessions WHERE id = ?", session)
        if row is None:
            raise unknown("session", session, "create one; the server's directory is another now")
        return row

    def heartbeat(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keeps the models of a session from making room for others."""
        session = self._session(given["session_id"])
        if session["finished"]:
            raise gone("session", session["id"], "it is finished; create another one")
        change = "UPDATE sessions SET seen = ? WHERE id = ?"
        self._store.write((change, time.time(), session["id"]))
        return {"type": "session_heartbeat"}

    def finish_session(self, session: str) -> None:
        """Ends a session: its models are freed, its checkpoints stay."""
        self._session(session)
        for row in self._store.rows("SELECT id FROM models WHERE session = ? AND alive", session):
            self._models.unload(row["id"])
        self._store.write(
            ("UPDATE sessions SET finished = 1 WHERE id = ?", session),
            ("DELETE FROM samplers WHERE session = ? AND path IS NULL", session),
        )
        self._store.sweep()

    def sessions(self, offset: int, limit: int) -> Mapping[str, Any]:
        """Lists sessions, the newest first."""
        query = "SELECT id FROM sessions ORDER BY created DESC LIMIT ? OFFSET ?"
        return {"sessions": [row["id"] for row in self._store.rows(query, limit, offset)]}

    def session(self, session: str) -> Mapping[str, Any]:
        """Describes a session."""
        info = json.loads(self._session(session)["info"])
        runs = self._store.rows("SELECT id FROM models WHERE session = ?", session)
        samplers = self._store.rows("SELECT id FROM samplers WHERE session = ?", session)
        return {
            "training_run_ids": [row["id"] for row in runs],
            "sampler_ids": [row["id"] for row in samplers],
            "user_metadata": info["user_metadata"],
            "display_name": info["display_name"],
        }

    def capabilities(self) -> Mapping[str, Any]:
        """Describes the model."""
        about = {"model_name": self._name, "max_context_length": self._context_length}
        return {"supported_models": [{**about, "trainable": True, "sampleable": True}]}

    # --- models ----------------------------------------------------------------------------------

    def create_model(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accepts the creation of a model."""
        self._check(given)
        model = self._new_model_name(given)
        lora = given.get("lora_config")
        shape = Shape(rank=0, targets="") if lora is None else _shape(lora)
        request = self._models.create(model, given["session_id"], "create_model", given, shape)
        return {"request_id": request, "model_id": model}

    def _new_model_name(self, given: Mapping[str, Any]) -> str:
        session, number = given["session_id"], given["model_seq_id"]
        self._session(session)
        if not isinstance(number, int) or number < 0:
            raise ServiceError(f"model_seq_id={number!r}: give the model's number in its session")
        return f"{session}:train:{number}"

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuses another base model or optimizer than the server has."""
        name = given.get("base_model")
        if name is not None and name not in (self._name, str(self._model_path)):
            raise ServiceError(
                f"the server has the base model {self._name}, not {name}: ask for this one, or "
                "start a server with the other"
            )
        kind = (given.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise refused(f"optimizer {kind!r}", "leave the optimizer out, for AdamW")

    def load_weights(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accepts a load, onto a model or as the creation of one."""
        self._check(given)
        row = self._store.checkpoint(given["path"])
        if given.get("session_id") is None:
            return self.model_request("load_weights", given)
        model, shape = self._new_model_name(given), Shape.read(row["shape"])
        request = self._models.create(model, given["session_id"], "load_weights", given, shape)
        return {"request_id": request, "model_id": model}

    def model_request(self, kind: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accepts a request in JSON to a model."""
        model = given["model_id"]
        body = json.dumps(dict(given)).encode()
        request = self._models.accept(model, given["seq_id"], kind, body)
        return {"request_id": request, "model_id": model}

    def passes(self, body: bytes) -> Mapping[str, Any]:
        """Accepts a forward pass, with its backward pass or without."""
        passes = read_passes(body)
        request = self._models.accept(passes.model_id, passes.seq_id, "forward_backward", body)
        return {"request_id": request, "model_id": passes.model_id}

    def get_info(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Describes a model."""
        model = given["model_id"]
        row = self._store.row("SELECT shape FROM models WHERE id = ?", model)
        if row is None:
            raise unknown("model", model, "create it first")
        shape = Shape.read(row["shape"])
        about = {"model_name": self._name, "tokenizer_id": str(self._model_path)}
        return {
            "type": "get_info",
            "model_data": {"arch": self._models.architecture, **about},
            "model_id": model,
            "model_name": self._name,
            **_lora(shape),
        }

    def unload_model(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Frees a model; the answer is there at once."""
        model = given["model_id"]
        self._models.unload(model)
        request = f"{model}:unload"
        self._store.accept(request, model, -1, "unload_model", b"")
        self._store.answered(request, StoredAnswer.of({"type": "unload_model", "model_id": model}))
        return {"request_id": request, "model_id": model}

    # --- sampling --------------------------------------------------------------------------------

    def create_sampler(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes a sampling session of a checkpoint or the base model."""
        session = given["session_id"]
        self._session(session)
        self._check(given)
        path = given.get("model_path")
        content = None if path is None else self._store.checkpoint(path)["content"]
        sampler, change = self._store.new_sampler(
            session, given["sampling_session_seq_id"], content, model=None, path=path
        )
        self._store.write(change)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _sampler_row(self, sampler: str) -> Any:
        row = self._store.row("SELECT * FROM samplers WHERE id = ?", sampler)
        if row is None:
            raise unknown(
                "sampling session",
                sampler,
                "of weights without a name the newest of each model are kept; save them under one",
            )
        return row

    def sampler(self, sampler: str) -> Mapping[str, Any]:
        """Describes a sampling session."""
        row = self._sampler_row(sampler)
        return {"sampler_id": sampler, "base_model": self._name, "model_path": row["path"]}

    def sample(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accepts a request to sample."""
        for name, instead in _TOO_MUCH.items():
            if given.get(name):
                raise refused(name, instead)
        sampler, seq = given.get("sampling_session_id"), given.get("seq_id")
        if sampler is None or seq is None:
            raise refused("sampling without a session", "use the SDK's create_sampling_client")
        row = self._sampler_row(sampler)
        named = (row["path"] or "").removeprefix("tinker://").partition("/")[0]
        prompt = _prompt(given["prompt"], self._models.vocab_size)
        if not 1 <= len(prompt) < self._context_length:
            raise ServiceError(
                f"the prompt has {len(prompt)} tokens; give 1 to {self._context_length - 1}, as "
                f"the server's context is {self._context_length} tokens"
            )
        count = given.get("num_samples", 1)
        if not isinstance(count, int) or not 1 <= count <= _MAX_SAMPLES:
            raise ServiceError(f"num_samples={count!r}: give 1 to {_MAX_SAMPLES}")
        params, stops = self._params(given["sampling_params"], len(prompt))
        name = f"{sampler}:{seq}"
        first = None
        if given.get("prompt_logprobs") and len(prompt) > 1:
            last = given.get("prompt_logprobs_last_n")
            first = 1 if last is None else max(1, len(prompt) - last)
        request = SampleRequest(
            name=name,
            content=row["content"],
            model=row["model"] or named or None,
            prompt=prompt,
            params=[_with_seed(params, number) for number in range(count)],
            scored=bool(given.get("prompt_logprobs")),
            prompt_logprobs_from=first,
            stops=stops,
        )
        self._sampler.add(request)
        ids = [f"{name}:{number}" for number in range(count)]
        return {"request_id": name, "sample_sequence_ids": ids}

    def _params(
        self, given: Mapping[str, Any], prompt_length: int
    ) -> tuple[SamplingParams, Sequence[str]]:
        """Returns the parameters of each sample, and the texts at which it ends."""
        stop = given.get("stop")
        listed = [stop] if isinstance(stop, str) else list(stop or ())
        ids = [each for each in listed if isinstance(each, int)]
        texts = [each for each in listed if isinstance(each, str)]
        if "" in texts:
            raise ServiceError(f"sampling_params: stop={stop!r} has an empty text: leave it out")
        # A token of its own ends a completion where it is sampled.
        encoded = map(self._renderer.encode, texts)
        ids += [each[0] for each in encoded if len(each) == 1]
        room = self._context_length - prompt_length
        top_k = given.get("top_k", -1)
        try:
            params = SamplingParams(
                max_tokens=min(given.get("max_tokens") or room, room),
                temperature=given.get("temperature", 1.0),
                top_p=given.get("top_p", 1.0),
                top_k=None if top_k in (-1, 0) else top_k,
                seed=given.get("seed"),
                stop_token_ids=tuple(ids),
                ignore_eos=stop is not None and not listed,
            )
        except (TypeError, ValueError) as error:
            raise ServiceError(f"sampling_params: {error}") from None
        return params, texts

    def cancel(self, given: Mapping[str, Any]) -> None:
        """Ends a request to sample."""
        self._sampler.cancel(given["request_id"])

    async def result(self, given: Mapping[str, Any]) -> StoredAnswer:
        """Returns the answer to a request, or that it is not there yet."""
        request = given["request_id"]
        asked = self._sampler if ":sample:" in request else self._models
        answer = await asked.answer(request, _POLL_S)
        if answer is None:
            later = {"type": "try_again", "request_id": request, "queue_state": "active"}
            return StoredAnswer.of(later)
        return answer

    # --- checkpoints -----------------------------------------------------------------------------

    def runs(self, offset: int, limit: int) -> Mapping[str, Any]:
        """Lists models, the last used first."""
        query = "SELECT * FROM models WHERE content IS NOT NULL ORDER BY used DESC"
        found = self._store.rows(query)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        runs = [self._run(row) for row in found[offset : offset + limit]]
        return {"training_runs": runs, "cursor": cursor}

    def run(self, model: str) -> Mapping[str, Any]:
        """Describes a model."""
        row = self._store.row("SELECT * FROM models WHERE id = ?", model)
        if row is None:
            raise unknown("training run", model, "see `tinker run list`")
        return self._run(row)

    def _run(self, row: Any) -> Mapping[str, Any]:
        shape = Shape.read(row["shape"])
        oldest_first = reversed(self._checkpoints("model = ?", row["id"]))
        last = {each["checkpoint_type"]: each for each in oldest_first}
        return {
            "training_run_id": row["id"],
            "base_model": self._name,
            "model_owner": "local",
            **_lora(shape),
            "last_request_time": _time(row["used"]),
            "last_checkpoint": last.get(_KINDS["weights"]),
            "last_sampler_checkpoint": last.get(_KINDS["sampler_weights"]),
            "user_metadata": json.loads(row["metadata"]),
        }

    def _checkpoints(self, where: str, *values: Any) -> list[Mapping[str, Any]]:
        self._store.sweep()
        query = f"SELECT * FROM checkpoints WHERE {where} ORDER BY created DESC"
        return [
            {
                "checkpoint_id": f"{row['kind']}/{row['name']}",
                "checkpoint_type": _KINDS[row["kind"]],
                "time": _time(row["created"]),
                "tinker_path": row["path"],
                "size_bytes": row["size"],
                "public": False,
                "user_metadata": json.loads(row["metadata"]),
                "expires_at": None if row["expires"] is None else _time(row["expires"]),
            }
            for row in self._store.rows(query, *values)
        ]

    def checkpoints_of(self, model: str) -> Mapping[str, Any]:
        """Lists the checkpoints of a model."""
        self.run(model)
        return {"checkpoints": self._checkpoints("model = ?", model)}

    def checkpoints(self, offset: int, limit: int) -> Mapping[str, Any]:
        """Lists all checkpoints, the newest first."""
        found = self._checkpoints("1")
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    def _checkpoint(self, model: str, checkpoint: str) -> Any:
        return self._store.checkpoint(f"tinker://{model}/{checkpoint}")

    def delete_checkpoint(self, model: str, checkpoint: str) -> None:
        """Deletes a checkpoint; models and sampling sessions made of it go on."""
        row = self._checkpoint(model, checkpoint)
        self._store.write(("DELETE FROM checkpoints WHERE path = ?", row["path"]))
        if row["kind"] == "external_weights":
            directory = self._store.export_directory(model, row["name"])
            shutil.rmtree(directory, ignore_errors=True)
        self._store.sweep()

    def set_expiry(self, given: Mapping[str, Any], *, model: str, checkpoint: str) -> None:
        """Sets when a checkpoint expires, or that it does not."""
        path = self._checkpoint(model, checkpoint)["path"]
        change = "UPDATE checkpoints SET expires = ? WHERE path = ?"
        self._store.write((change, expiry(given), path))

    def exported_files(self, model: str, checkpoint: str) -> Mapping[str, Any]:
        """Names the files of an export, on this machine."""
        row = self._checkpoint(model, checkpoint)
        if row["kind"] != "external_weights":
            raise ServiceError(f"{checkpoint} is no export: save one by save_weights_external")
        directory = self._store.export_directory(model, row["name"])
        files = {
            str(file.relative_to(directory)): file.absolute().as_uri()
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }
        return {"urls": files, "expires": _time(time.time() + 3600)}

    def weights_info(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Describes what a checkpoint is of."""
        shape = Shape.read(self._store.checkpoint(given["tinker_path"])["shape"])
        return {
            "base_model": self._name,
            **_lora(shape),
            "train_unembed": False,
            "train_mlp": "up_proj" in shape.targets,
            "train_attn": "q_proj" in shape.targets,
        }

    def copy_weights(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Gives a checkpoint another path, in a training run of its own; no byte is copied."""
        row = self._store.checkpoint(given["source_path"])
        if row["kind"] == "external_weights":
            raise refused("copies of exports", "copy the checkpoint that was exported")
        session, number = given.get("session_id"), given.get("model_seq_id")
        if session is None:
            session, number = str(self.create_session({})["session_id"]), 0
        model = f"{session}:train:{number}"
        about = expiry(given), row["metadata"], row["size"]
        path, added = self._store.named(model, row["kind"], row["name"], row["content"], *about)
        self._store.write(
            (
                "INSERT INTO models (id, session, shape, content, used, alive, metadata) VALUES "
                "(?, ?, ?, ?, ?, 0, 'null') ON CONFLICT DO NOTHING",
                *(model, session, row["shape"], row["content"], time.time()),
            ),
            added,
        )
        return {"tinker_path": path}


def _lora(shape: Shape) -> Mapping[str, Any]:
    return {"is_lora": bool(shape.rank), "lora_rank": shape.rank or None}


def _shape(lora: Mapping[str, Any]) -> Shape:
    rank, seed = lora.get("rank"), lora.get("seed") or 0
    targets = (*(_ATTENTION * lora.get("train_attn", True)), *(_MLP * lora.get("train_mlp", True)))
    if not isinstance(rank, int) or not 1 <= rank <= 4096:
        raise ServiceError(f"lora_config.rank={rank!r}: give 1 to 4096")
    if not isinstance(seed, int) or seed < 0:
        raise ServiceError(f"lora_config.seed={seed!r}: give a number from 0 on")
    if not targets:
        raise refused("adapters of the head alone", "set train_attn or train_mlp")
    return Shape(rank=rank, targets=",".join(targets))


def _prompt(given: Mapping[str, Any], vocab_size: int) -> list[int]:
    tokens: list[int] = []
    for chunk in given["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise refused(f"{chunk['type']} in prompts", "send chunks of tokens only")
        tokens += chunk["tokens"]
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ServiceError(
                f"the prompt has the token {token!r}; the model has ids below {vocab_size}"
            )
    return tokens


def _with_seed(params: SamplingParams, number: int) -> SamplingParams:
    if params.seed is None or not number:
        return params
    return dataclasses.replace(params, seed=(params.seed + number) % 2**64)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(math.floor(seconds), UTC).isoformat()
