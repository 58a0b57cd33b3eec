import pytest

from treadle.rollout_server.config.schema import ModelConfig, ServerConfig
from treadle.rollout_server.engines.common.arguments import (
    OwnArgument,
    merged_arguments,
    refuse_unhonoured,
)

OWN = {
    "dtype": OwnArgument(value="float32", key="model.dtype"),
    "skip_tokenizer_init": OwnArgument(value=True),
    "max_num_batched_tokens": OwnArgument(value=None, key="model.max_num_batched_tokens"),
}
KNOWN = (*OWN, "block_size", "swap_space")


def merged(**given: object) -> dict[str, object]:
    return merged_arguments(OWN, given, known=KNOWN, argument_class="EngineArgs")


def test_the_users_arguments_join_ours() -> None:
    assert merged(block_size=16) == {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 16,
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blok_size", "engine_args.blok_size is not an argument of EngineArgs; did you mean block"),
        ("zzz", "engine_args.zzz is not an argument of EngineArgs$"),
        ("dtype", "engine_args.dtype is decided by this server: set model.dtype"),
        ("max_num_batched_tokens", "set model.max_num_batched_tokens"),
        ("skip_tokenizer_init", "leave it out, the adapter needs it"),
    ],
)
def test_what_cannot_be_given_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merged(**{name: 1})


def test_a_key_that_cannot_be_honoured_is_refused_only_when_set() -> None:
    unhonoured = {
        "model.data_parallel_size": "start one server per copy",
        "engine_args": "leave it out",
    }
    refuse_unhonoured(ServerConfig(), "torch", unhonoured)
    config = ServerConfig(model=ModelConfig(data_parallel_size=2))
    with pytest.raises(ValueError, match=r"data_parallel_size is 2.*start one server per copy"):
        refuse_unhonoured(config, "torch", unhonoured)
    with pytest.raises(ValueError, match="leave it out"):
        refuse_unhonoured(ServerConfig(engine_args={"a": 1}), "torch", unhonoured)
