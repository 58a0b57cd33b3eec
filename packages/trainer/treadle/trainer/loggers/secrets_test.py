from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.loggers.secrets import REMOVED, without_secrets

_SECRET = "s3cret"
_NAMES = ("token", "api_key", "HF_TOKEN", "apikey", "db-password", "client_secret")
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["text", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rollout", "max_tokens", "keys", "n"]), inner)
    ),
)


@given(_PLAIN, st.lists(st.sampled_from(["a", "b"]), max_size=3), st.sampled_from(_NAMES))
def test_a_secret_is_removed_wherever_it_is_and_nothing_else_changes(
    plain: Any, path: list[str], name: str
) -> None:
    assert without_secrets(plain) == plain
    tree: Any = {name: _SECRET, "also": [{name: [_SECRET]}], "plain": plain}
    for part in path:
        tree = {part: tree}
    found = without_secrets(tree)
    assert _SECRET not in repr(found)
    for part in reversed(path):
        found = found[part]
    assert found == {name: REMOVED, "also": [{name: REMOVED}], "plain": plain}


@pytest.mark.parametrize(
    "given",
    [
        {"password": 12345678},
        {"pin": {"api_key": 0}},
        {"credentials": {"user": "a", "pass": "b"}},
        {"login": {"pass": "b"}},
        {"secret": ["a", {"b": "c"}]},
        {"HF_TOKEN": True},
    ],
)
def test_whatever_stands_under_a_secret_name_is_removed(given: dict[str, Any]) -> None:
    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for each in value.values() for leaf in leaves(each)]
        return [value]

    assert leaves(without_secrets(given)) == [REMOVED]


def test_what_only_sounds_like_a_secret_stays() -> None:
    plain = {
        "pad_token": "<|endoftext|>",
        "tokenizer": {"eos_token": "</s>", "image_token": {"content": "<image>"}},
        "messages_key": "messages",
        "tools_key": "tools",
        "token": None,
        "api_key": "",
        "cost_per_token": 0.5,
        "text": "ask?token=what",
    }
    assert without_secrets(plain) == plain


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgres://me:s3cret@db.example:5432/runs", f"postgres://{REMOVED}@db.example:5432/runs"),
        ("http://me:s3@cr?et@db.example/a@b", f"http://{REMOVED}@db.example/a@b"),
        ("https://x.example/v1?token=abc", f"https://x.example/v1?token={REMOVED}"),
        (
            "see https://me@x/a?n=1&api_key=abc&page=2#access_token=abc now",
            f"see https://{REMOVED}@x/a?n=1&api_key={REMOVED}&page=2#access_token={REMOVED} now",
        ),
        ("s3://b/o?X-Amz-Signature=ab%2Fc&v=1", f"s3://b/o?X-Amz-Signature={REMOVED}&v=1"),
    ],
)
def test_an_address_keeps_all_but_its_secrets(address: str, shown: str) -> None:
    assert without_secrets([address]) == [shown]
