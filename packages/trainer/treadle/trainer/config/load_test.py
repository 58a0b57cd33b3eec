from pathlib import Path

import pytest

from treadle.policy.config.weight_sync import FileTransportConfig, InlineTransportConfig
from treadle.trainer.config.describe import value_listing
from treadle.trainer.config.load import (
    ConfigError,
    MissingSettings,
    load_config,
    load_sft_config,
)
from treadle.trainer.demo import DEMO

_LEAST = ("model.path=/models/m", "data.train_files=/data/train.jsonl")


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_layers_win_in_order_and_every_leaf_knows_its_source(tmp_path: Path) -> None:
    first = _write(
        tmp_path / "a.yaml",
        "model: {path: m}\ndata: {train_files: [t.jsonl]}\nrollout: {top_k: 5, top_p: 0.5}\n",
    )
    second = _write(tmp_path / "b.yaml", "rollout: {top_k: 6}\n")
    loaded = load_config([first, second], ["rollout.temperature=0.7", "rollout.temperature=0.8"])
    rollout = loaded.config.rollout
    assert (rollout.top_p, rollout.top_k, rollout.temperature) == (0.5, 6, 0.8)
    assert loaded.sources["rollout.top_p"] == str(first)
    assert loaded.sources["rollout.top_k"] == str(second)
    assert loaded.sources["rollout.temperature"] == "rollout.temperature=0.8"
    assert loaded.sources["rollout.dtype"] == "default"


def test_another_kind_keeps_what_every_kind_has(tmp_path: Path) -> None:
    text = "schedule: {kind: sync, total_steps: 75}\nsync: {transport: {kind: inline}}\n"
    file = _write(tmp_path / "run.yaml", text + "launch: {kind: ray, cpus_per_process: 2}\n")
    given = ["schedule.kind=async", "sync.transport=file", "launch=local", *_LEAST]
    config = load_config([file], given).config
    assert (config.schedule.kind, config.schedule.total_steps) == ("async", 75)
    assert isinstance(config.sync.transport, FileTransportConfig)
    assert config.launch.kind == "local"  # which has no cpus_per_process


def test_paths_in_a_file_are_relative_to_it_and_in_arguments_to_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    file = _write(
        tmp_path / "configs" / "a.yaml", "model: {path: m}\ndata: {train_files: x.jsonl}\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = load_config([file], ["run.dir=out", "agent.tool_catalogue=configs/../tools.yaml"])
    assert loaded.config.model.path == tmp_path / "configs" / "m"
    assert loaded.config.data.train_files == (tmp_path / "configs" / "x.jsonl",)
    assert loaded.config.run.dir == tmp_path / "out"
    assert loaded.config.agent.tool_catalogue == tmp_path.resolve() / "tools.yaml"


def test_an_environment_keeps_its_name_and_its_code_has_a_place(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "data: {train_files: ['textarena:KuhnPoker-v0', 'gymnasium:mine.py:Guess', guess.yaml]}\n"
        "model: {path: m}\n"
    )
    assert load_config([file], []).config.data.train_files == (
        Path("textarena:KuhnPoker-v0"),
        Path(f"gymnasium:{tmp_path}/mine.py:Guess"),
        tmp_path / "guess.yaml",
    )


def test_the_default_file_counts_until_a_model_or_a_file_is_named(tmp_path: Path) -> None:
    default = _write(
        tmp_path / "d.yaml",
        "model: {path: m}\ndata: {train_files: x.jsonl, prompts_per_step: 3}\n",
    )
    assert load_config([], [], default_file=default).config.data.prompts_per_step == 3
    own = load_config([], _LEAST, default_file=default)
    assert own.config.data.prompts_per_step == 16


_OF_300 = "actor_rollout_ref.rollout.prompt_length=${data.max_prompt_length}"
_DIR = "trainer.default_local_dir=ck/${trainer.project_name}/${run.name}"


def test_a_reference_has_the_last_value_of_its_key_wherever_it_stands(tmp_path: Path) -> None:
    for arguments in (
        (_OF_300, "data.max_prompt_length=300"),
        ("data.max_prompt_length=300", _OF_300),
        ("data.max_prompt_length=7", _OF_300, "data.max_prompt_length=300"),
    ):
        assert load_config([], [*_LEAST, *arguments]).config.rollout.prompt_length == 300
    file = _write(
        tmp_path / "a.yaml",
        "trainer: {experiment_name: e, logger: ['${oc.env:NO_SUCH,jsonl}']}\n"
        "data: {max_prompt_length: 3, train_files: ['${trainer.experiment_name}/t.jsonl']}\n"
        "actor_rollout_ref: {rollout: {prompt_length: '${data.max_prompt_length}'}}\n",
    )
    loaded = load_config([file], [_LEAST[0], _DIR, "run.project=p", "data.max_prompt_length=300"])
    assert loaded.config.rollout.prompt_length == 300
    assert loaded.config.run.dir == Path.cwd() / "ck/p/e"
    assert loaded.config.run.loggers == ("jsonl",)
    assert loaded.config.data.train_files == (tmp_path / "e/t.jsonl",)
    assert loaded.sources["run.dir"] == _DIR


def test_what_refers_to_nothing_is_refused_unless_it_is_replaced() -> None:
    for wrong, why in (
        ("run.name=${no.such}", "there is no key no.such"),
        ("run.name=${now:%Y}", "is not available: only"),
        ("data.train_files=[${oc.env:NO_SUCH,a}]", "is not closed; in a list, quote"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_config([], [*_LEAST, wrong])
        with pytest.raises(ConfigError, match=why):
            load_sft_config([], [*_LEAST, wrong])
    assert load_config([], [*_LEAST, "run.name=${no.such}", "run.name=e"]).config.run.name == "e"
    named = load_sft_config([], [*_LEAST, "trainer.project_name=p", "run.name=${run.project}-1"])
    assert named.config.run.name == "p-1"


def test_plus_sets_an_existing_key_and_creates_none() -> None:
    assert load_config([], [*_LEAST, "+run.seed=3"]).config.run.seed == 3
    with pytest.raises(ConfigError, match=r"unknown key run\.sede; did you mean run\.seed"):
        load_config([], [*_LEAST, "+run.sede=3"])


def test_lists_are_replaced_and_one_value_needs_no_brackets() -> None:
    config = load_config([], [*_LEAST, "data.train_files=[/a.jsonl,/b.jsonl]"]).config
    assert config.data.train_files == (Path("/a.jsonl"), Path("/b.jsonl"))


def test_numbers_stay_text_where_text_is_wanted() -> None:
    assert load_config([], [*_LEAST, "run.name=007"]).config.run.name == "007"


def test_a_variant_is_chosen_by_its_name_alone_and_starts_afresh(tmp_path: Path) -> None:
    file = _write(
        tmp_path / "a.yaml",
        "model: {path: m}\ndata: {train_files: x}\nsync: {transport: {chunk_bytes: 5000}}\n",
    )
    assert load_config([file], []).config.sync.transport == InlineTransportConfig(chunk_bytes=5000)
    config = load_config([file], ["sync.transport=file"]).config
    assert config.sync.transport == FileTransportConfig()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("rollout.temprature=1", "did you mean rollout.temperature"),
        ("actor_rollout_ref.rolout.n=1", "did you mean actor_rollout_ref.rollout.n"),
        ("rollout.temperature=0", "rollout.temperature=0: must be > 0"),
        ("data.prompts_per_step=True", "not a truth value"),
        ("data.prompts_per_step=x", "data.prompts_per_step=x: must be an integer"),
        ("rollout=3", "rollout is a section"),
        ("sync.transport=nccl", "not one of inline, file"),
        ("launch.cpus_per_process=2", "belongs to kind ray only"),
        ("schedule.val_every=3", "data.val_files is empty"),
        ("policy.parallel.sequence=true", "needs tensor above 1"),
        ("data.train_files=[a", "missing ']'"),
        ("rollout.temperature", "is not key=value"),
    ],
)
def test_a_bad_argument_is_named_with_cause_and_value(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*_LEAST, argument])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: m}\nmodel: {path: n}\n", r"a\.yaml, line 2: the key 'model' appears twice"),
        ("[1, 2]\n", "expected a mapping"),
        ("a: [\n", "is not YAML"),
        ("rollout: {temprature: 1}\n", r"unknown key rollout.temprature \(in .*a.yaml\)"),
        ("rollout: {top_p: 2}\n", r"rollout.top_p=2 \(in .*a.yaml\)"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([_write(tmp_path / "a.yaml", text)], _LEAST)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config([tmp_path / "nowhere.yaml"], [])


def test_required_keys_are_listed() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [])
    assert "data.train_files is required" in str(error.value)
    assert "model.path is required" in str(error.value)
    assert isinstance(error.value, MissingSettings)
    assert sorted(error.value.keys) == ["data.train_files", "model.path"]
    with pytest.raises(ConfigError) as wrong:
        load_config([], ["schedule.total_steps=-1"])
    assert not isinstance(wrong.value, MissingSettings)


def test_a_resolved_configuration_reproduces_itself(tmp_path: Path) -> None:
    config = load_config([], [*_LEAST, "sync.transport=file", "rollout.top_k=3"]).config
    saved = _write(tmp_path / "config.json", config.model_dump_json())
    assert load_config([saved], []).config == config


def test_a_table_grows_by_its_entries(tmp_path: Path) -> None:
    file = _write(
        tmp_path / "a.yaml",
        "agent: {loops: {mine: 'm:A', yours: 'm:B'}, template_kwargs: {deep: {a: [1]}}}\n",
    )
    arguments = [*_LEAST, "agent.loops.mine=n:C", "+agent.template_kwargs.enable_thinking=False"]
    loaded = load_config([file], arguments)
    assert loaded.config.agent.loops == {"mine": "n:C", "yours": "m:B"}
    assert loaded.config.agent.template_kwargs == {"deep": {"a": [1]}, "enable_thinking": False}
    assert loaded.sources["agent.loops.mine"] == "agent.loops.mine=n:C"
    assert loaded.sources["agent.loops.yours"] == str(file)
    saved = _write(tmp_path / "saved.yaml", loaded.config.model_dump_json())
    assert load_config([saved], []).config == loaded.config


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("agent.loops=m:A", r"agent.loops='m:A' .*set its entries, as in agent\.loops\.NAME=VALUE"),
        (
            "agent.loops.mine=m.A",
            r"mine is 'm\.A'; it must be package\.module:Class",
        ),
        ("agent.loops.mine.deeper=m:A", "unknown key agent.loops.mine.deeper"),
        (
            "agent.parser=hermse",
            "agent.parser=hermse: unknown parser; known are: cohere_command3,",
        ),
    ],
)
def test_what_a_table_cannot_hold_is_refused(argument: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config([], [*_LEAST, argument])


def test_an_entry_of_a_table_may_be_a_mapping_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("rollout: {engine_args: {compilation_config: {level: 0}, block_size: 16}}")
    loaded = load_config([file], ["model.path=/m", "data.train_files=/t.jsonl"])
    assert loaded.config.rollout.engine_args == {
        "compilation_config": {"level": 0},
        "block_size": 16,
    }
    assert "rollout.engine_args.compilation_config = {level: 0}" in value_listing(loaded)


@pytest.mark.parametrize("cut", ["top_p=0.7", "top_k=20", "min_p=0.05", "temperature=0.5"])
def test_a_served_reference_takes_the_whole_distribution(cut: str) -> None:
    cut = f"rollout.{cut}"
    served = ["algorithm.reference_addresses=[h:1]", "algorithm.kl_coef=0.1"]
    with pytest.raises(ConfigError, match=f"{cut} and algorithm.reference_addresses"):
        load_config([], [*_LEAST, cut, *served])
    weighted = ["algorithm.correction.weights=token", "algorithm.old_logprobs=rollout"]
    assert load_config([], [*_LEAST, cut, weighted[0]]).config
    assert load_config([], [*_LEAST, cut, weighted[1]]).config
    assert load_config([], [*_LEAST, *served]).config


def test_fine_tuning_replays_no_routing() -> None:
    with pytest.raises(ConfigError, match="fine-tuning has no engine: set it to false"):
        load_sft_config(
            [], ["model.path=/m", "data.train_files=/t.jsonl", "policy.moe.routing_replay=true"]
        )


def test_memory_that_is_released_keeps_no_completions() -> None:
    paths = ["model.path=/m", "data.train_files=/t.jsonl"]
    with pytest.raises(ConfigError, match=r"in_flight=continue keeps completions in it: set"):
        load_config([], [*paths, "rollout.release_memory=true", "sync.in_flight=continue"])
    with pytest.raises(ConfigError, match=r"set rollout\.release_memory=true"):
        load_config([], [*paths, "rollout.multi_stage_wake_up=true"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_files=[]", "data.train_files=[]: needs at least 1"),
        ("schedule.kind=asink", "schedule.kind=asink: must be 'sync', 'overlap', 'stream' or"),
        ("schedule.surplus=1", "surplus=1.0 is read by kind=stream, and kind=sync"),
        ("rollout.samples_per_prompt=0", "rollout.samples_per_prompt=0: must be >= 1"),
        ("rollout.samples_per_prompt=x", "rollout.samples_per_prompt=x: must be an integer"),
        ("schedule.val_every=0", "schedule.val_every=0: must be >= 1, or null"),
        ("rollout.top_p=high", "rollout.top_p=high: must be a number"),
        ("rolout.num_replicas=2", "did you mean rollout.num_replicas?"),
        (
            "critic.optim.lr=1",
            "critic={'optimizer': {'lr': 1.0}} sets up a critic, and algorithm.adv",
        ),
        (
            "algorithm.lam=0.9",
            "lam=0.9 weights the differences of advantage=gae, and advantage=grpo",
        ),
        ("reward_model.enable=true", "a language model that judges is reward.name=rubric.yaml"),
        ("defaults=x", "repeat --config"),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config([DEMO], [override])
    assert said in str(raised.value)
    assert "Input should" not in str(raised.value)


def test_a_value_that_is_replaced_later_is_not_checked(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    file = tmp_path / "c.yaml"
    file.write_text("actor_rollout_ref: {actor: {ppo_mini_batch_size: 3}}\n")
    for files, overrides in (([DEMO], [f"{key}=3", f"{key}=4"]), ([DEMO, file], [f"{key}=4"])):
        loaded = load_config(files, overrides)
        assert loaded.config.algorithm.mini_batches == 4
    with pytest.raises(ConfigError, match="3 prompts per update do not divide the step's 16"):
        load_config([DEMO, file], [])


def test_code_named_in_a_file_is_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "reward: {name: my_reward.py:score}\n"
        "agent: {loops: {mine: my_loop.py:Mine, other: package.loops:Other}}\n"
    )
    config = load_config([DEMO, file], ["agent.loops.here=here.py:Here"]).config
    assert config.reward.name == f"{tmp_path}/my_reward.py:score"
    assert config.agent.loops == {
        "mine": f"{tmp_path}/my_loop.py:Mine",
        "other": "package.loops:Other",
        "here": f"{Path.cwd()}/here.py:Here",
    }


def test_every_mistake_of_every_layer_is_said_at_once(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "rollout:\n  temprature: 1\n  top_p: 2\n")
    with pytest.raises(ConfigError) as raised:
        load_config(
            [file, tmp_path / "none.yaml"],
            ["nothing", "critic.ppo_mini_batch_size=7", "data.shuffle=3", "data.trainfiles=x"],
        )
    said = str(raised.value).splitlines()
    assert said[0] == "7 problems"
    for number, text in enumerate(
        (
            "'nothing' is not key=value",
            "none.yaml: No such file",
            "critic.ppo_mini_batch_size=7 is not available: its mini-batches",
            "unknown key rollout.temprature (in ",
            "unknown key data.trainfiles; did you mean data.train_files?",
            "data.shuffle=3: must be true or false",
            "rollout.top_p=2 (in ",
        ),
        start=1,
    ):
        assert said[number].startswith(f"{number:>3}. ")
        assert text in said[number]


def test_a_preset_is_right_below_the_layer_that_names_it(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "algorithm: {clip_low: 0.1, clip_high: 0.3}\n")
    loaded = load_config([DEMO, file], ["preset=dapo", "reward.overlong_penalty=0.5"])
    config = loaded.config
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.dynamic_sampling == "accuracy"
    assert config.reward.overlong_penalty == 0.5
    assert config.overlong_buffer == config.rollout.response_length // 5
    assert loaded.sources["algorithm.clip_high"] == "preset=dapo"
    named = _write(tmp_path / "b.yaml", "preset: dapo\nalgorithm: {clip_high: 0.4}\n")
    assert load_config([DEMO, named], []).config.algorithm.clip_high == 0.4
    with pytest.raises(
        ConfigError, match="preset=dap0: there is no such preset; there are: dapo, gspo"
    ):
        load_config([DEMO], ["preset=dap0"])


def test_the_preset_of_gspo_is_the_paper_s() -> None:
    algorithm = load_config([DEMO], ["preset=gspo"]).config.algorithm
    assert (algorithm.loss, algorithm.advantage) == ("gspo", "grpo")
    assert (algorithm.clip_low, algorithm.clip_high) == (3e-4, 4e-4)
    assert (algorithm.loss_aggregation, algorithm.mini_batches) == ("seq-mean-token-mean", 4)


def test_rows_that_a_reader_gives_one_after_another_do_not_stream() -> None:
    least = ["model.path=/m", "data.train_files=/t.jsonl", "data.streaming=true"]
    assert load_config([], least).config.data.streaming
    with pytest.raises(ConfigError, match=r"reader=m:Rows gives them one after another"):
        load_config([], [*least, "data.reader=m:Rows"])


def test_the_name_of_a_weight_may_have_dots(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("data: {train_files: [v1.5.jsonl], weights: {v1.5: 2}}\nmodel: {path: m}\n")
    loaded = load_config([file], ["data.weights.train.v2=1", "reward.weights.a.b=0.5"])
    assert loaded.config.data.weights == {"v1.5": 2.0, "train.v2": 1.0}
    assert loaded.config.reward.weights == {"a.b": 0.5}
    with pytest.raises(ConfigError, match=r"unknown key agent\.loops\.a\.b"):
        load_config([file], ["agent.loops.a.b=m:C"])
