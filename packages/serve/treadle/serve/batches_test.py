"""What the SDK sends becomes sequences of the contract, or is refused with its place."""

from typing import Any

import numpy as np
import pytest

from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.settings import from_json
from treadle.serve.batches import LOSSES, PolicyPass, make_batch
from treadle.serve.errors import ServiceError
from treadle.serve.wire import encode_output, read_passes
from treadle.tinker.sdk import MESSAGES

TOKENS = [3, 4, 5, 6]


def request(loss: str = "cross_entropy", *, settings: Any = (), **changes: Any) -> Any:
    """Returns a request of one datum; an input that is None is left out."""
    message: Any = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn=loss)
    datum = message.data.add()
    for part in (TOKENS[:1], TOKENS[1:]):  # in two chunks
        datum.model_input.add().encoded_text.tokens = np.asarray(part, "<i4").tobytes()
    inputs: dict[str, Any] = {"target_tokens": [4, 5, 6, 7]}
    if loss == "cross_entropy":
        inputs["weights"] = [0.0, 1.0, -2.0, 1.0]
    else:
        inputs |= {"advantages": [0.0, 1.0, -2.0, 1.0], "logprobs": [0.0, -1.0, -2.0, -3.0]}
    for name, values in (inputs | changes).items():
        if values is None:
            continue
        tensor = datum.loss_fn_inputs.add(key=name).value
        tensor.dtype = 2 if name == "target_tokens" else 1
        array = np.asarray(values, "<i8" if name == "target_tokens" else "<f4")
        tensor.dense = array.tobytes()
        tensor.shape.extend(array.shape)
    for name, value in settings:
        message.loss_fn_config_v2.add(key=name).value.number = value
    return message


def batch_of(message: Any) -> PolicyPass:
    passes = read_passes(message.SerializeToString())
    return make_batch(passes, vocab_size=16, context_length=8)


def test_a_datum_is_the_sequence_of_its_tokens_and_its_last_target() -> None:
    (sequence,) = batch_of(request("ppo")).sequences
    assert list(sequence.ids) == [3, 4, 5, 6, 7]
    assert list(sequence.loss_mask) == [False, True, True, True, True]
    assert sequence.at_loss_tokens("advantages").tolist() == [0.0, 1.0, -2.0, 1.0]
    assert sequence.at_loss_tokens("rollout_logprobs").tolist() == [0.0, -1.0, -2.0, -3.0]
    assert batch_of(request()).sequences[0].rollout_logprobs is None


def test_values_come_back_to_their_positions() -> None:
    batch = batch_of(request("gspo"))  # of tokens with an advantage only
    assert batch.sequences[0].num_loss_tokens == 3
    (values,) = batch.of_positions(np.asarray([-1.0, -2.0, -3.0], np.float32))
    assert values.tolist() == [0.0, -1.0, -2.0, -3.0]
    output: Any = MESSAGES["ForwardBackwardOutput"].FromString(
        encode_output({"loss:sum": 2.5}, {"logprobs": [values, values[:1]]})
    )
    (record,) = output.loss_fn_outputs
    field = record.fields[0].value
    assert (record.num_datums, output.metrics[0].key) == (2, "loss:sum")
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 16, 20]


def test_the_ratio_of_a_sequence_is_over_its_mask() -> None:
    batch = batch_of(request("gspo", sequence_ratio_mask=[1.0, 1.0, 1.0, 1.0]))
    assert batch.sequences[0].num_loss_tokens == 4
    with pytest.raises(ServiceError, match="where its sequence_ratio_mask is 0"):
        batch_of(request("gspo", sequence_ratio_mask=[1.0, 1.0, 0.0, 1.0]))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_settings_of_a_loss_are_the_policys(loss: str) -> None:
    names = list(LOSSES[loss].settings)
    batch = batch_of(request(loss, settings=[(name, 1.5) for name in names]))
    algorithm = from_json(AlgorithmConfig, batch.algorithm)
    assert algorithm.loss_aggregation == "token-sum"
    assert set(algorithm.loss_args.values()) == ({1.5} if names else set())
    with pytest.raises(ServiceError, match=f"loss '{loss}' has no setting 'clip'"):
        batch_of(request(loss, settings=[("clip", 1.0)]))


def test_a_target_that_nothing_reads_may_be_any() -> None:
    (sequence,) = batch_of(request(target_tokens=[0, 5, 6, 7])).sequences
    assert list(sequence.ids) == [3, 4, 5, 6, 7]
    assert list(sequence.loss_mask) == [False, False, True, True, True]
    padded = request(target_tokens=[4, 5, 6, -100], weights=[1.0, 1.0, 1.0, 0.0])
    assert list(batch_of(padded).sequences[0].loss_mask) == [False, True, True, True, False]


def test_a_sparse_vector_is_a_dense_one() -> None:
    message = request(weights=None)
    tensor = message.data[0].loss_fn_inputs.add(key="weights").value
    tensor.dtype = 1
    tensor.shape.extend([4, 1])
    tensor.sparse_csr.values = np.asarray([2.0, 3.0], "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray([0, 0, 1, 1, 2], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray([0, 0], "<i8").tobytes()
    assert batch_of(message).factors[0].tolist() == [0.0, 2.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request("custom"), "the SDK runs them in the client"),
        (request("nothing"), "use one of cross_entropy, importance_sampling, ppo"),
        (request("ppo", logprobs=None), "datum 0 has no logprobs, which loss 'ppo' reads"),
        (request("ppo", other=[0.0] * 4), "input 'other' of loss 'ppo'"),
        (request(target_tokens=[4, 6, 6, 7]), r"datum 0, position 1: 6, and the next token is 5"),
        (request(target_tokens=[[4], [5], [6], [7]]), "2 dimensions of target_tokens"),
        (request(target_tokens=[4, 5, 6, 16]), "the token 16; the model has ids below 16"),
        (request(weights=[1.0]), "4 input tokens and 1 of weights"),
        (request(weights=[np.nan] * 4), "weights that are not finite"),
    ],
)
def test_what_cannot_be_trained_is_named(message: Any, words: str) -> None:
    with pytest.raises(ServiceError, match=words):
        batch_of(message)


def test_a_forward_pass_is_of_cross_entropy() -> None:
    message = request("ppo")
    message.forward_only = True
    with pytest.raises(ServiceError, match="use cross_entropy, whose outputs are the log-prob"):
        batch_of(message)
