"""Asks `treadle serve` by the official SDK: every call that its cookbook makes, and the others.

Prints a line per check, and at the end the paths that the SDK has, as JSON.
"""

import importlib.metadata
import json
import math
import re
import sys
from pathlib import Path

import tinker  # pants: no-infer-dep
from tinker import types  # pants: no-infer-dep

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPT = types.ModelInput.from_ints(TOKENS)
MODEL = "demo:calculator"
ADAM = types.AdamParams(learning_rate=1e-3)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def datum(**inputs):
    tensors = {"target_tokens": TOKENS[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=tensors)


def made(client):
    """Returns a client; the SDK 0.38 gives a future of it."""
    return client.result() if hasattr(client, "result") else client


def refusal(make):
    """Returns the text of the error that a call ends with."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def close(one, other, tolerance=1e-4):
    return all(math.isclose(a, b, abs_tol=tolerance) for a, b in zip(one, other, strict=True))


service = tinker.ServiceClient(user_metadata={"from": "test"})
rest = service.create_rest_client()
training = made(
    service.create_lora_training_client(MODEL, rank=4, seed=3, user_metadata={"a": "b"})
)
info = training.get_info()
assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, MODEL), info
assert len(training.get_tokenizer()) > 1000
assert MODEL in [m.model_name for m in service.get_server_capabilities().supported_models]
say("a model is created")

weighted = datum(weights=[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
before = training.forward([weighted], "cross_entropy").result()
logprobs = before.loss_fn_outputs[0]["logprobs"].data
assert math.isclose(before.metrics["loss:sum"], -sum(logprobs[1:]), rel_tol=1e-5)
assert len(before.loss_fn_outputs[0]["elementwise_loss"].data) == 7
passed = training.forward_backward([weighted, weighted], "cross_entropy")
stepped = training.optim_step(ADAM)
assert math.isclose(passed.result().metrics["loss:sum"], 2 * before.metrics["loss:sum"])
assert stepped.result().metrics["optim/step"] == 1.0
advantages = [0.0, 1.0, -1.0, 0.5, 1.0, 1.0, 2.0]
now = training.forward([weighted], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
old = [float(value) for value in now]
sums = {
    "importance_sampling": -sum(advantages),
    "ppo": -sum(advantages),
    "cispo": -sum(a * p for a, p in zip(advantages, now, strict=True)),
    "dro": -sum(a * p for a, p in zip(advantages, now, strict=True)),
    "gspo": -sum(advantages),
}
for loss, wanted in sums.items():
    sampled = datum(logprobs=old, advantages=advantages)
    found = training.forward_backward([sampled], loss).result()
    assert math.isclose(found.metrics["loss:sum"], wanted, rel_tol=1e-4), (loss, found.metrics)
training.optim_step(ADAM).result()
say("losses are their formulas")

try:
    import torch
except ImportError:
    torch = None
if torch is not None:

    def squares(data, values):
        total = sum((each**2).sum() for each in values)
        return total, {"own:sum": float(total)}

    own = training.forward_backward_custom([weighted], squares)
    stepped = training.optim_step(ADAM)
    metrics = own.result().metrics
    assert metrics["own:sum"] == metrics["loss:sum"] and "surrogate_loss:sum" in metrics, metrics
    stepped.result()
    say("a loss runs in the client")

sampler = training.save_weights_and_get_sampling_client()
params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=7)
found = sampler.sample(PROMPT, 3, params, include_prompt_logprobs=True).result()
assert len({tuple(each.tokens) for each in found.sequences}) > 1
assert all(len(each.tokens) == len(each.logprobs) <= 5 for each in found.sequences)
assert {each.stop_reason for each in found.sequences} <= {"stop", "length"}
after = training.forward([weighted], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
assert found.prompt_logprobs[0] is None and close(found.prompt_logprobs[1:], after)
assert close(sampler.compute_logprobs(PROMPT).result()[1:], after)
base = service.create_sampling_client(base_model=MODEL)
assert close(base.compute_logprobs(PROMPT).result()[1:], logprobs)
first = found.sequences[0].tokens[0]
stopping = types.SamplingParams(max_tokens=5, temperature=1.0, seed=7, stop=[int(first)])
stopped = sampler.sample(PROMPT, 1, stopping).result().sequences[0]
assert (stopped.tokens, stopped.stop_reason) == ([first], "stop"), stopped
say("samples are of their weights")

state = training.save_state("one", user_metadata={"k": "v"}).result().path
assert "exists" in refusal(lambda: training.save_state("one").result())
training.save_state("one", overwrite=True).result()
weights = training.save_weights_for_sampler("two", ttl_seconds=3600).result().path
named = service.create_sampling_client(model_path=weights)
assert close(named.compute_logprobs(PROMPT).result()[1:], after)
resumed = made(service.create_training_client_from_state_with_optimizer(state))
fresh = made(service.create_training_client_from_state(state))
steps = []
for client in (training, resumed, fresh):
    client.forward_backward([weighted], "cross_entropy")
    steps.append(client.optim_step(ADAM).result().metrics["optim/step"])
assert steps[0] == steps[1] > steps[2] == 1.0, steps
lasts = [
    client.forward([weighted], "cross_entropy").result().metrics["loss:sum"]
    for client in (training, resumed, fresh)
]
assert lasts[0] == lasts[1] != lasts[2], lasts
say("states are loaded with the optimizer and without")

run = training.model_id
paths = {each.tinker_path: each for each in rest.list_checkpoints(run).result().checkpoints}
assert paths.keys() == {state, weights} and paths[weights].expires_at is not None
assert {state, weights} <= {
    each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints
}
assert run in {each.training_run_id for each in rest.list_training_runs().result().training_runs}
assert rest.get_training_run(run).result().last_checkpoint.tinker_path == state
assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
copied = rest.copy_weights(state, destination_project_id="own").result()
assert copied != state
external = training.save_weights_external("export").result().path
assert external.endswith("/external_weights/export")
rest.delete_checkpoint_from_tinker_path(weights).result()
assert "no checkpoint" in refusal(lambda: made(service.create_sampling_client(model_path=weights)))
assert close(named.compute_logprobs(PROMPT).result()[1:], after)  # what was made of it goes on
again = made(service.create_training_client_from_state(copied))
assert again.get_info().lora_rank == 4
session = rest.get_session(run.partition(":")[0]).result()
assert run in session.training_run_ids
assert rest.get_sampler(session.sampler_ids[0]).result().base_model == MODEL
say("checkpoints are listed, copied, exported and deleted")

wrong = datum(weights=[1.0] * 7)
assert "RequestFailedError" in refusal(
    lambda: training.forward_backward([wrong], "custom").result()
)
text = refusal(lambda: rest.publish_checkpoint_from_tinker_path(state).result())
assert "no public checkpoints" in text, text
text = refusal(lambda: sampler.sample(PROMPT, 1, params, topk_prompt_logprobs=2).result())
assert "topk_prompt_logprobs" in text, text
text = refusal(lambda: made(service.create_lora_training_client("other/model", rank=4)))
assert "not other/model" in text, text
say("what is not there is refused by its name")

sources = Path(tinker.__file__).parent.rglob("*.py")
found = {path for file in sources for path in re.findall(r'"/api/v1(/[^"\s]+)"', file.read_text())}
say(json.dumps([importlib.metadata.version("tinker"), sorted(found)]))
