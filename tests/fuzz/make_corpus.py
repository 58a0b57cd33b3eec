"""Writes the part of the corpus that is made of valid inputs; what once fell stays as it is.

`./pants run tests/fuzz/make_corpus.py`, after the contract, a format or a route has grown.
"""

import json
from array import array
from collections.abc import Iterator
from typing import Any

from fuzz.inputs import CORPUS, Input, Part, write_input
from fuzz.targets.router import REPLICAS
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from treadle.agent_loop.parsers.testing import SAMPLES
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import routing_service_pb2 as routing
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.services.testing import begin_request, push, want
from treadle.tinker.sdk import MESSAGES
from treadle.trainer.demo import DEMO

_G = "/treadle.rollout.v1.GenerationService/"
_S = "/treadle.rollout.v1.ServerService/"
_R = "/treadle.rollout.v1.RoutingService/"
_W = "/treadle.rollout.v1.WeightSyncService/"


def contract() -> Iterator[tuple[str, Input]]:
    """Each method, and whole updates."""

    def call(method: str, *messages: Message, token: str = "right") -> Input:
        return tuple(Part(f"{method} {token}", m.SerializeToString()) for m in messages)

    update = "u"
    begun = call(f"{_W}BeginUpdate", begin_request())
    pushed = call(f"{_W}PushWeights", *push())
    commit = call(
        f"{_W}CommitUpdate",
        sync.CommitUpdateRequest(update_id=update, in_flight=sync.IN_FLIGHT_POLICY_DRAIN),
    )
    abort = call(f"{_W}AbortUpdate", sync.AbortUpdateRequest(update_id=update))
    get = call(f"{_W}GetUpdate", sync.GetUpdateRequest(update_id=update))
    image = gen.PromptImage(
        data=b"\x89PNG\r\n\x1a\n", media_type="image/png", first_placeholder=1, num_placeholders=1
    )
    stops = gen.SamplingParams(
        max_tokens=4, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, stop_token_ids=[1, 9]
    )
    yield "generate", call(f"{_G}Generate", want(), want(batched=True, session_id="s"))
    yield "generate_images", call(f"{_G}Generate", want(images=[image]))
    yield "generate_sampling", call(f"{_G}Generate", want(sampling=stops, priority=3))
    minute = duration_pb2.Duration(seconds=60)
    both = [gen.NumberedRequest(number=n, request=want(), timeout=minute) for n in (1, 2)]
    many = gen.GenerateManyRequest(begin=both)
    yield "generate_many", call(f"{_G}GenerateMany", many, gen.GenerateManyRequest(cancel=[1]))
    info = srv.GetServerInfoRequest(client="treadle/0.1")
    yield "info", call(f"{_S}GetServerInfo", info)
    yield "without_token", call(f"{_S}GetServerInfo", info, token="none")
    kinds = [srv.MEMORY_KIND_WEIGHTS, srv.MEMORY_KIND_KV_CACHE]
    yield (
        "pause",
        (
            *call(f"{_S}Pause", srv.PauseRequest(in_flight=sync.IN_FLIGHT_POLICY_INTERRUPT)),
            *call(f"{_S}ReleaseMemory", srv.ReleaseMemoryRequest(kinds=kinds)),
            *call(f"{_S}RestoreMemory", srv.RestoreMemoryRequest(kinds=kinds)),
            *call(f"{_S}Resume", srv.ResumeRequest()),
        ),
    )
    yield "update", (*begun, *pushed, *get, *commit)
    yield "abort", (*begun, *get, *abort)
    in_place = sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_CONTINUE)
    yield (
        "in_place",
        (
            *call(f"{_W}BeginUpdate", begin_request(in_place=in_place)),
            *pushed,
            *commit,
        ),
    )
    delta = sync.DeltaEncoding(base_weight_version=1, encoded_bytes=[0, 16], crc32=[1, 2])
    yield (
        "delta",
        (
            *call(f"{_W}BeginUpdate", begin_request(keep_base=True)),
            *pushed,
            *commit,
            *call(f"{_W}BeginUpdate", begin_request(2, "v", delta=delta)),
        ),
    )
    files = sync.FileTransport(directory="a", crc32=[1, 2])
    yield "file", call(f"{_W}BeginUpdate", begin_request(inline=None, file=files))
    group = sync.CollectiveTransport(
        backend="gloo",
        rendezvous="127.0.0.1:1",
        group_name="g",
        world_size=2,
        first_rank=1,
        bucket_bytes=1 << 20,
        senders=[0, 0],
    )
    yield (
        "collective",
        call(f"{_W}BeginUpdate", begin_request(inline=None, collective=group, in_place=in_place)),
    )
    bucket = sync.Bucket(parts=[sync.BucketPart(tensor_index=0, length=128, start=4096)])
    yield (
        "buckets",
        (
            *call(
                f"{_W}BeginUpdate",
                begin_request(
                    inline=None,
                    shared_memory=sync.SharedMemoryTransport(),
                    lease=duration_pb2.Duration(seconds=5),
                ),
            ),
            *call(
                f"{_W}PushBuckets",
                sync.PushBucketsRequest(
                    header=sync.BucketsHeader(update_id=update, pid=1, fd=3, num_bytes=8192)
                ),
                sync.PushBucketsRequest(bucket=bucket),
                sync.PushBucketsRequest(bucket=sync.Bucket()),
            ),
        ),
    )
    health = health_pb2.HealthCheckRequest(service="treadle.rollout.v1.GenerationService")
    yield (
        "health",
        (
            *call("/grpc.health.v1.Health/Check", health, token="none"),
            *call("/grpc.health.v1.Health/Watch", health, token="none"),
        ),
    )
    listed = reflection_pb2.ServerReflectionRequest(list_services="*")
    symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="treadle.rollout.v1")
    reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    yield "reflection", call(reflect, listed, symbol)


def parsers() -> Iterator[tuple[str, Input]]:
    """A turn of each family, as its template writes it."""
    for sample in SAMPLES:
        name = "".join(c if c.isalnum() else "_" for c in sample.models.lower())
        yield f"{sample.parser}_{name}", (Part(sample.parser, sample.text.encode()),)


def router() -> Iterator[tuple[str, Input]]:
    """Each method, and the life of a session and of a replica."""

    def call(name: str, message: Message, token: str = "right") -> Part:
        return Part(f"{_R}{name} {token}", message.SerializeToString())

    opened = routing.OpenSessionRequest(
        session_id="s",
        context_tokens=100,
        current_address=REPLICAS[0],
        avoid_addresses=[REPLICAS[1]],
    )
    replica = "10.0.0.3:4000"
    yield (
        "session",
        (
            call("OpenSession", opened),
            call("FinishSession", routing.FinishSessionRequest(session_id="s")),
        ),
    )
    yield (
        "sessions",
        (
            call("OpenSessions", routing.OpenSessionsRequest(sessions=[opened])),
            call("FinishSessions", routing.FinishSessionsRequest(session_ids=["s", "t"])),
        ),
    )
    yield (
        "replica",
        (
            call("RegisterReplica", routing.RegisterReplicaRequest(address=replica)),
            call("DrainReplica", routing.DrainReplicaRequest(address=replica)),
            call("RemoveReplica", routing.RemoveReplicaRequest(address=replica)),
        ),
    )
    yield "list", (call("ListReplicas", routing.ListReplicasRequest()),)
    yield "without_token", (call("OpenSession", opened, "none"),)


_IMAGE = "data:image/png;base64,iVBORw0KGgo="
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "2*3"}'},
}
_USER = {"role": "user", "content": "What is 2*3?"}


def endpoint() -> Iterator[tuple[str, Input]]:
    """Each route, and conversations."""

    def post(path: str, key: str, value: object) -> Part:
        return Part(f"POST /sessions{path} {key}", json.dumps(value).encode())

    def ask(*messages: object, **more: object) -> Part:
        return post("/{id}/v1/chat/completions", "session", {"messages": messages, **more})

    system = {"role": "system", "content": "Calculate."}
    answer = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "6"}
    parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": _IMAGE}}]
    yield "completion", (ask(system, _USER, model="m", max_tokens=8, seed=3, stop=["a"]),)
    yield (
        "stream",
        (ask(_USER, stream=True, stream_options={"include_usage": True}, logprobs=True),),
    )
    yield "tools", (ask(_USER, tools=[_TOOL], tool_choice="auto", n=1), ask(_USER, answer, result))
    yield "parts", (ask({"role": "user", "content": parts[:1]}),)
    yield "image", (ask({"role": "user", "content": parts}),)
    yield "neutral", (ask(_USER, temperature=1, top_p=1, logit_bias={}, metadata={"a": "b"}),)
    yield "models", (Part("GET /sessions/{id}/v1/models session", b""),)
    yield "open", (post("", "own", {"task_id": "row-0", "rollout_index": 3, "seed": 5}),)
    yield (
        "finish",
        (
            ask(_USER),
            post("/{id}/reward", "session", {"reward": 1.5}),
            post("/{id}/finish", "own", {"reward": 1.0}),
        ),
    )
    yield "delete", (Part("DELETE /sessions/{id} own", b""),)
    yield "wrong_key", (post("/{id}/v1/chat/completions", "wrong", {"messages": [_USER]}),)


def sandbox() -> Iterator[tuple[str, Input]]:
    """Programs, and the other routes."""

    def run(code: str, **more: object) -> Input:
        value = {"code": code, "language": "python", **more}
        return (Part("POST /run_code", json.dumps(value).encode()),)

    yield "print", run("print(6 * 7)", run_timeout=1, compile_timeout=1, memory_limit_MB=-1)
    yield "stdin", run("print(input())", stdin="a")
    yield "files", run("print(open('a').read())", files={"a": "YQ=="}, fetch_files=["a", "/b"])
    yield "fails", run("import sys; sys.exit(3)")
    yield "others", (Part("GET /v1/ping", b""), Part("GET /v1/stats", b""))


def run_directory() -> Iterator[tuple[str, Input]]:
    """Each small file of a run, and two missing ones."""
    from fuzz.targets.run_directory import run_files

    for part in run_files():
        yield part.head.replace("/", "_").replace(".", "_"), (part,)
    yield "without_latest", (Part("without checkpoints/latest", b""),)
    yield "without_config", (Part("without config.json", b""),)


def config() -> Iterator[tuple[str, Input]]:
    """The demo's file, arguments, and verl's names."""
    demo = DEMO.read_bytes()
    yield "demo", (Part("file", demo),)
    arguments = ("model.path=demo:calculator", "schedule.total_steps=3", "data.train_files=[a,b]")
    yield "arguments", tuple(Part("argument", text.encode()) for text in arguments)
    yield "file_and_argument", (Part("file", demo), Part("argument", b"algorithm.kl_coef=0.1"))
    verl = b"data:\n  train_batch_size: 8\nactor_rollout_ref:\n  rollout:\n    n: 4\n"
    yield "verl", (Part("file", verl), Part("argument", b"trainer.total_epochs=1"))


def service() -> Iterator[tuple[str, Input]]:
    """A request of each kind that has a body, and the life of a model."""

    def post(path: str, value: object, key: str = "own") -> Part:
        return Part(f"POST /{path} {key}", json.dumps(value).encode())

    def get(path: str) -> Part:
        return Part(f"GET /{path} own", b"")

    own = {"model_id": "MODEL", "seq_id": 1}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    params = {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": ["a"]}
    sample = {"sampling_session_id": "SAMPLER", "seq_id": 1, "num_samples": 2}
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    create = {"session_id": "SESSION", "model_seq_id": 1, "base_model": "demo:calculator"}
    info = {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"}
    yield "session", (post("create_session", info), post("session_heartbeat", create))
    yield "finish", (Part("POST /sessions/SESSION/finish own", b""), get("sessions/SESSION"))
    yield "create", (post("create_model", create), post("get_info", own))
    yield "step", (post("optim_step", {**own, "adam_params": adam}),)
    yield "save", (post("save_weights", {**own, "path": "a", "ttl_seconds": 60}),)
    yield (
        "sampler",
        (post("save_weights_for_sampler", {**own, "sampling_session_seq_id": 2}),),
    )
    path = "tinker://MODEL/weights/a"
    yield "load", (post("load_weights", {**own, "path": path, "optimizer": True}),)
    yield "info", (post("weights_info", {"tinker_path": path}), get("samplers/SAMPLER"))
    yield "copy", (post("copy_weights", {"source_path": path, "model_seq_id": 3}),)
    yield "sample", (post("asample", {**sample, "prompt": prompt, "sampling_params": params}),)
    yield "cancel", (post("cancel_future", {"request_id": "SAMPLER:1"}),)
    yield "lists", (get("checkpoints?limit=2&offset=0"), get("training_runs/MODEL"))
    yield "unload", (post("unload_model", own), post("optim_step", own))
    yield "wrong_key", (post("create_session", info, "wrong"),)


def passes() -> Iterator[tuple[str, Input]]:
    """A pass with dense inputs, and one with sparse ones."""

    def numbers(kind: str, *values: float) -> bytes:
        return array(kind, values).tobytes()

    for loss in ("cross_entropy", "ppo", "gspo"):
        message: Any = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn=loss)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = numbers("i", 3, 4)
        names = ("weights",) if loss == "cross_entropy" else ("advantages", "logprobs")
        for name in ("target_tokens", *names):
            kind = "q" if name == "target_tokens" else "f"
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dtype = 2 if kind == "q" else 1
            if loss == "ppo":
                tensor.shape.extend((2, 1))
                tensor.sparse_csr.values = numbers(kind, 4, 5)
                tensor.sparse_csr.crow_indices = numbers("q", 0, 1, 2)
                tensor.sparse_csr.col_indices = numbers("q", 0, 0)
            else:
                tensor.shape.append(2)
                tensor.dense = numbers(kind, 4, 5)
        if loss == "ppo":
            message.loss_fn_config.add(key="clip_low_threshold", value=0.5)
        yield loss, (Part("pass", message.SerializeToString()),)


MAKERS = {
    "contract": contract,
    "router": router,
    "parsers": parsers,
    "endpoint": endpoint,
    "sandbox": sandbox,
    "run_directory": run_directory,
    "config": config,
    "service": service,
    "passes": passes,
}


def main() -> None:
    """Writes the files."""
    for target, make in MAKERS.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, parts in make():
            (CORPUS / target / f"{name}.jsonl").write_text(write_input(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
