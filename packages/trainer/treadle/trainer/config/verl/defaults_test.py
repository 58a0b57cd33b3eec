import json
from fnmatch import fnmatchcase

import pytest

from treadle.trainer.config import verl_keys, verl_table
from treadle.trainer.config.keys import all_leaves
from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.config.verl.defaults import has_default, verl_defaults
from treadle.trainer.config.verl.defaults import verl_keys as keys_of_verl
from treadle.trainer.config.verl.reasons import reason
from treadle.trainer.config.verl_table import NOTED_PATTERNS

_MAPPED = {*verl_keys.known_keys(), *all_leaves()}
_UNUSED = [
    key
    for key in keys_of_verl()
    if key not in _MAPPED and not any(fnmatchcase(key, each) for each, _ in NOTED_PATTERNS)
]

# Not accepted though it is verl's default, and why.
_EXCEPTIONS = {
    "actor_rollout_ref.actor.ppo_mini_batch_size",  # 256 of verl's 1024 rows a step; ours are 16
    "actor_rollout_ref.rollout.name",  # verl has none
    "actor_rollout_ref.actor.optim.lr_scheduler_type",  # VeOmni's, without an end
}


def _argument(key: str, value: object) -> str:
    return f"{key}={value!r}" if isinstance(value, str) else f"{key}={json.dumps(value)}"


def _load(*arguments: str) -> tuple[str, ...]:
    return load_config([], ["model.path=/m", "data.train_files=/t.jsonl", *arguments]).notes


def test_every_key_of_verl_is_accepted_at_its_default_and_says_nothing() -> None:
    refused = set()
    for key in keys_of_verl():
        for default in verl_defaults()[key]:
            try:
                assert _load(_argument(key, default)) == ()
            except ConfigError:
                refused.add(key)
    assert refused <= _EXCEPTIONS


def test_all_defaults_of_verl_at_once() -> None:
    """What a file of verl's whole configuration says, where a run has its own."""
    own = ["rollout.name=torch", "algorithm.advantage=grpo"]
    given = [
        _argument(key, defaults[0])
        for key, defaults in verl_defaults().items()
        if key not in _EXCEPTIONS
    ]
    assert _load(*given, *own) == ()


def test_what_is_not_available_is_refused_with_a_reason() -> None:
    for key in _UNUSED:
        why = reason(key)
        assert why is not None
        with pytest.raises(ConfigError) as raised:
            _load(f"{key}=elsewhere")
        assert str(raised.value) == f"{key}=elsewhere is not available: {why}"


def test_all_refusals_are_one_list() -> None:
    refused = [
        "trainer.v1.trainer_mode=colocate_async",
        "data.audio_key=x",
        "skip.rollout.enable=1",
    ]
    with pytest.raises(ConfigError) as raised:
        _load(*refused, "actor_rollout_ref.rollout.ignore_eos=True", "trainer.total_epoch=3")
    said = str(raised.value).splitlines()
    assert said[0] == "5 problems"
    for line, start in zip(
        said[1:],
        [*refused, "actor_rollout_ref.rollout.ignore_eos=True", "unknown key"],
        strict=True,
    ):
        assert start in line


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        (["actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.rollout_n=5"], True),
        (["actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.rollout_n=1"], False),
        (["actor_rollout_ref.actor.rollout_n=1"], True),
        (["actor_rollout_ref.actor.rollout_n=${oc.select:actor_rollout_ref.rollout.n,1}"], True),
        (["actor_rollout_ref.actor.rollout_n=${actor_rollout_ref.rollout.n}"], True),
        (["critic.enable=null"], True),
        (["critic.enable=0"], False),
        (["actor_rollout_ref.model.override_config={}"], True),
        (["+actor_rollout_ref.model.override_config.vocab_size=9"], False),
    ],
)
def test_a_default_may_follow_another_key(arguments: list[str], accepted: bool) -> None:
    if accepted:
        assert _load(*arguments) == ()
    else:
        with pytest.raises(ConfigError, match="is not available: "):
            _load(*arguments)


def test_a_key_that_verl_does_not_have_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown key critic\.optim\.lrr; did you mean critic"):
        _load("critic.optim.lrr=1")


def test_a_recorded_default_is_one_value_or_one_per_engine() -> None:
    assert verl_defaults()["trainer.total_epochs"] == [30]
    assert has_default("actor_rollout_ref.actor.optim.optimizer", "AdamW", {})
    assert has_default("actor_rollout_ref.actor.optim.optimizer", "adam", {})
    assert not has_default("actor_rollout_ref.actor.optim.optimizer", "sgd", {})


def test_rows_of_the_table_that_no_verl_reads_are_of_older_releases() -> None:
    older = set(verl_table.RENAMED) | set(verl_table.IMPLIED) | set(verl_table.NOTED)
    assert {key.partition(".")[0] for key in older - set(keys_of_verl())} <= {
        *("actor_rollout_ref", "algorithm", "ray_init", "reward", "reward_model", "trainer"),
    }
