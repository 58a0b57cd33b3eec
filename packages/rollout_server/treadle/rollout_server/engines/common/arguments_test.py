import pytest

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engines.common.arguments import (
    ManagedArgument,
    merge_arguments,
    reject_unsupported,
)

OWN = {
    "dtype": ManagedArgument(value="float32", key="model.dtype"),
    "skip_tokenizer_init": ManagedArgument(value=True),
    "max_num_batched_tokens": ManagedArgument(value=None, key="model.max_num_batched_tokens"),
}
KNOWN = (*OWN, "block_size", "swap_space")


def merged(**given: object) -> dict[str, object]:
    return merge_arguments(OWN, given, known=KNOWN, argument_class="EngineArgs")


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
        ("dtype", "engine_args.dtype is set by this server: set model.dtype"),
        ("max_num_batched_tokens", "set model.max_num_batched_tokens"),
        ("skip_tokenizer_init", "leave it out, the adapter needs a fixed value"),
    ],
)
def test_what_cannot_be_given_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merged(**{name: 1})


def test_an_unsupported_key_is_refused_only_when_set() -> None:
    unsupported = {
        "model.data_parallel_size": "start one server per copy",
        "engine_args": "leave it out",
    }
    reject_unsupported(ServerConfig(), "torch", unsupported)
    config = ServerConfig(model=ServedModelConfig(data_parallel_size=2))
    with pytest.raises(ValueError, match=r"data_parallel_size is 2.*start one server per copy"):
        reject_unsupported(config, "torch", unsupported)
    with pytest.raises(ValueError, match="leave it out"):
        reject_unsupported(ServerConfig(engine_args={"a": 1}), "torch", unsupported)
