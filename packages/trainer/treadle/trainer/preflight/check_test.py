"""Each mistake that a run could make is found before it starts, here with the demo's files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import SetupError
from treadle.agent_loop.proxy import AgentConstraints, ProxyAgentLoop
from treadle.trainer.checkpoint.run_directory import new_run_dir
from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.data import DataError
from treadle.trainer.demo import DEMO
from treadle.trainer.main import main
from treadle.trainer.own_code import NOTHING, collect
from treadle.trainer.preflight import CheckedRun, check_run
from treadle.trainer.preflight.model_checks import with_backend
from treadle.trainer.preflight.process_checks import check_addresses, check_network
from treadle.trainer.problems import SeveralProblems

_FEW = ("data.prompts_per_step=2", "data.max_val_rows=2")


def _check(*overrides: str, rows: Path | None = None) -> CheckedRun:
    files = () if rows is None else (f"data.train_files={rows}",)
    config = load_config([DEMO], [*_FEW, *files, *overrides]).config
    return check_run(config, new_run_dir("never_made"))


def test_what_is_missing_hides_no_other_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--dry-run", "model.path=/nowhere", "reward.name=nope", "run.loggers=[]"])
    assert status == 2
    said = capsys.readouterr().err
    assert "3 problems" in said
    assert "data.train_files is required" in said
    assert "model.path=/nowhere does not exist" in said
    assert "there is no reward 'nope'" in said
    assert "none" not in said  # what stands in for the files


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return _write_rows(tmp_path / "rows.jsonl")


def _write_rows(path: Path, **changes: Mapping[int, object]) -> Path:
    """Writes four rows of the demo; `changes` gives columns of some of them, by line."""
    lines = (DEMO.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    made = [json.loads(line) for line in lines]
    for column, by_line in changes.items():
        for line, value in by_line.items():
            made[line - 1][column] = value
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made), encoding="utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO.parent / "model", tmp_path / "model"))


def _change_json(file: Path, **changes: Any) -> None:
    value = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(value), encoding="utf-8")


def test_the_plan_names_model_rows_loops_tools_and_reward(rows: Path) -> None:
    _write_rows(rows, agent_name={2: "single_turn_agent"})
    run = _check("model.path=demo:calculator", rows=rows)
    lines = dict(run.plan.rows())
    assert lines["model"] == "demo:calculator"
    assert lines["architecture"] == "qwen2, 919680 parameters, context of 1024 tokens"
    assert lines["data sources"] == "treadle/calculator (4 training, 2 validation rows)"
    assert lines["reward"] == "gsm8k for treadle/calculator"
    assert lines["agent loops"] == (
        "single_turn_agent (1 training rows), tool_agent (3 training, 2 validation rows)"
    )
    assert lines["tools"] == "calculator (3 training, 2 validation rows)"
    assert lines["prompt lengths"].endswith("of at most 256")
    assert lines["policy backend"] == "megatron: the first choice for 'qwen2'"
    assert len(run.inputs.train) == 4


def test_the_model_decides_the_backend_that_is_not_set(model: Path) -> None:
    _change_json(model / "config.json", model_type="qwen3_next")
    asked = load_config([DEMO], [f"model.path={model}"]).config
    config, why = with_backend(asked)
    assert config.policy.backend == "fsdp"
    assert why == "Megatron-core does not compute model type 'qwen3_next'"
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    _change_json(model / "config.json", model_type="qwen2", quantization_config=method)
    config, why = with_backend(asked)
    assert config.policy.backend == "fsdp"
    assert why == "weights in fp8 are not read for Megatron-core"
    set_ = load_config([DEMO], [f"model.path={model}", "policy.backend=megatron"]).config
    assert with_backend(set_) == (set_, "as set")


def test_what_a_stock_vllm_lacks_is_refused_before_its_servers_start(rows: Path) -> None:
    _write_rows(rows, agent_name={2: "enforcing"})
    lacking = ("rollout.name=vllm_stock", "rollout.top_p=0.9", "rollout.max_draft_tokens=4")
    config = load_config([DEMO], [*_FEW, f"data.train_files={rows}", *lacking]).config
    loop = ProxyAgentLoop(["true"], constraints=AgentConstraints.ENFORCE)
    own = collect(config, reward=None, tools=(), loops={"enforcing": loop}, on_step=None)
    with pytest.raises(SeveralProblems) as raised:
        check_run(config, new_run_dir("never_made"), own)
    settings, rows_need, command, training = map(str, raised.value.errors)
    assert "vllm_stock does not have rollout.max_draft_tokens=4" in settings
    assert "what this run needs: agent loops have constraints" in rows_need
    assert "this interpreter has no vllm" in command
    assert "rollout.top_p=0.9 needs the tokens that it keeps" in training


def test_the_plan_counts_trained_and_frozen_parameters(rows: Path) -> None:
    adapted = ("policy.lora.rank=8", "policy.lora.targets=[q_proj,down_proj]")
    lines = dict(_check(*adapted, rows=rows).plan.rows())
    sizes = json.loads((DEMO.parent / "model" / "config.json").read_text(encoding="utf-8"))
    hidden, feed_forward = sizes["hidden_size"], sizes["intermediate_size"]
    trained = sizes["num_hidden_layers"] * 8 * ((hidden + hidden) + (feed_forward + hidden))
    assert lines["adapter"] == (
        f"rank 8, alpha 16 on q_proj, down_proj: {trained} parameters are trained, "
        "919680 are frozen"
    )


def test_own_objects_are_in_the_plan(rows: Path) -> None:
    config = load_config([DEMO], [*_FEW, f"data.train_files={rows}"]).config

    def score(trajectory: object) -> float:
        return 1.0

    own = collect(config, reward=score, tools=(), loops={}, on_step=None)
    plan = check_run(config, new_run_dir("never_made"), own).plan
    assert dict(plan.rows())["reward"] == "the function given to train, for all rows"
    assert own is not NOTHING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' is not supported.*llama, mistral, qwen2"),
        ({"model_type": "no_such_type"}, "model type 'no_such_type' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"vocab_size": 1000}, "knows 1024 ids, and the model's config.json has vocab_size=1000"),
        ({"max_position_embeddings": 300}, "are 352 tokens, and the model in .* context of 300"),
        ({"num_attention_heads": "four"}, "config.json cannot be used: "),
    ],
)
def test_a_model_that_cannot_be_trained(
    changes: dict[str, object], message: str, model: Path, rows: Path
) -> None:
    _change_json(model / "config.json", **changes)
    with pytest.raises(SetupError, match=message) as raised:
        _check(f"model.path={model}", rows=rows)
    assert not isinstance(raised.value, SeveralProblems)


def test_what_a_backend_cannot_do_is_refused_by_name(rows: Path, model: Path) -> None:
    cannot = {
        "policy.parallel.data=2": "policy.parallel.data=1",
        "policy.dtype=bfloat16": "policy.dtype=float32",
        "policy.optimizer.name=muon": "policy.optimizer.name=adamw",
        "policy.lora.rank=4": "policy.lora.rank=0",
        "policy.offload.parameters=true": "policy.offload={}",
        "policy.recompute=full": "policy.recompute=none",
        "policy.share_prefixes=always": "policy.share_prefixes=auto",
        "algorithm.advantage=gae": "algorithm.advantage=grpo",
    }
    with pytest.raises(SeveralProblems) as raised:
        _check("policy.backend=fake", *cannot, rows=rows)
    said = [str(error) for error in raised.value.errors]
    assert len(said) == len(cannot)
    for line, fix in zip(said, cannot.values(), strict=True):
        assert line.startswith("policy.backend=fake has no ")
        other = "fsdp" if "optimizer" in fix else "megatron"
        assert line.endswith(f": set {fix}, or policy.backend={other}")
    fix = "set policy.parallel.pipeline=1, or policy.backend=megatron"
    with pytest.raises(SetupError, match=f"policy.backend=fsdp has no .*pipeline=2: {fix}"):
        _check("policy.backend=fsdp", "policy.parallel.pipeline=2", rows=rows)
    lines = dict(_check("policy.backend=fsdp", rows=rows).plan.rows())
    assert lines["architecture"] == "qwen2, 919680 parameters, context of 1024 tokens"
    lines = dict(_check("policy.backend=fake", rows=rows).plan.rows())
    assert lines["architecture"] == "qwen2, 131200 parameters, context of 1024 tokens"
    _change_json(model / "config.json", model_type="phi3")
    with pytest.raises(SetupError, match=r"'phi3' is not supported by the fake backend; .*llama"):
        _check("policy.backend=fake", f"model.path={model}", rows=rows)


def test_servers_that_hold_a_quantised_model_as_stored_are_refused(rows: Path, model: Path) -> None:
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    _change_json(model / "config.json", quantization_config=method)
    with pytest.raises(SetupError, match=r"rollout.name=vllm serves .*\(fp8\); set rollout.name"):
        _check("policy.backend=fsdp", f"model.path={model}", "rollout.name=vllm", rows=rows)


def test_routing_is_replayed_by_models_with_experts_only(rows: Path) -> None:
    says = (
        "routing_replay=true needs a model with experts, but qwen2 has none here: set it to false"
    )
    with pytest.raises(SetupError, match=says):
        _check("policy.moe.routing_replay=true", rows=rows)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", r"config\.json cannot be read: "),
        ("model.safetensors", None, r"holds neither model\.safetensors nor"),
        ("tokenizer.json", None, r"holds no tokenizer\.json"),
        ("tokenizer.json", '{"version": 1}', r"the tokenizer in .* does not load: "),
        ("chat_template.jinja", None, "the tokenizer has no chat template"),
        (
            "chat_template.jinja",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            r"the chat template does not show tools to the model: \['calculator'\]",
        ),
    ],
)
def test_a_damaged_model_directory(
    file: str, content: str | None, message: str, model: Path, rows: Path
) -> None:
    (model / file).unlink()
    if content is not None:
        (model / file).write_text(content, encoding="utf-8")
    with pytest.raises(SetupError, match=message) as raised:
        _check(f"model.path={model}", rows=rows)
    assert not isinstance(raised.value, SeveralProblems)


def test_a_shard_that_its_index_names_is_missing(model: Path, rows: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(SetupError, match=r"holds no model-2\.safetensors, which"):
        _check(f"model.path={model}", rows=rows)


def test_prompts_that_are_too_long(rows: Path) -> None:
    long = [{"role": "user", "content": "What is 1 + 1? " * 40}]
    _write_rows(rows, prompt={2: long, 4: long})
    with pytest.raises(DataError, match=r"2 of 4 train prompts are longer than 256.*line 2 \("):
        _check(rows=rows)
    run = _check("data.overlong_prompts=drop", rows=rows)
    assert len(run.inputs.train) == 2
    with pytest.raises(DataError, match=r"exceeds the 2 training rows that are left: left out: 2"):
        _check("data.overlong_prompts=drop", "data.prompts_per_step=3", rows=rows)


def test_everything_is_said_at_once_and_a_run_says_the_same(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "data.prompts_per_step=3",
        f"data.train_files={rows}",
        f"run.dir={tmp_path / 'run'}",
        "reward.name=my_rewrd.py:score",
        "policy.parallel.tensor=3",
        "policy.parallel.pipeline=3",
        "rollout.response_length=2000",
        "rollout.server_command=[no-such-server]",
        "agent.loops.mine=mine.py:Loop",
        f"data.val_files={tmp_path / 'none.jsonl'}",
    ]
    assert main(["--dry-run", *arguments]) == 2
    dry = capsys.readouterr().err
    assert main(arguments) == 2
    assert capsys.readouterr().err == dry
    assert not (tmp_path / "run").exists()
    for number, said in enumerate(
        (
            "none.jsonl does not exist",
            f"agent.loops.mine={Path.cwd() / 'mine.py'}:Loop: the agent loop file",
            "the reward file",
            "rollout.prompt_length=256 + rollout.response_length=2000 are 2256 tokens",
            "policy.parallel.tensor=3 does not divide the model's 4 attention heads",
            "policy.parallel.pipeline=3 does not divide the model's 4 layers",
            "rollout.server_command=['no-such-server']: there is no program",
        ),
        start=1,
    ):
        assert f"{number:>3}. " in dry
        assert said in dry
    assert dry.startswith("error: 7 problems\n")


def test_what_is_wrong_with_rows_is_said_once_for_all_of_them(rows: Path) -> None:
    _write_rows(
        rows,
        agent_name={3: "tool_agnt"},
        images={1: ["a.png"], 2: ["b.png"], 3: ["c.png"]},
        reward_model={2: {"ground_truth": 4.5}, 3: {"ground_truth": 5.5}},
    )
    with pytest.raises(SeveralProblems) as raised:
        _check(rows=rows)
    pictures, loop, truth = map(str, raised.value.errors)
    assert "rows.jsonl, line 1: the column 'images' holds 1 of them" in pictures
    assert pictures.endswith("(and 1 more train rows)")
    assert "rows.jsonl, line 3: agent loop 'tool_agnt' is not registered" in loop
    assert (
        "line 2: reward_model.ground_truth must be a string or an integer, got a value of type "
        "float: write it as text, for the reward gsm8k (and 1 more train rows)"
    ) in truth


def test_a_row_without_the_truth_that_a_rubric_asks_about_is_refused(
    rows: Path, tmp_path: Path
) -> None:
    _write_rows(rows, reward_model={3: {}})
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text(
        "model: {base_url: 'http://127.0.0.1:1/v1', name: m}\n"
        "criteria:\n"
        "  - name: right\n"
        "    question: 'Is {answer} the same as {ground_truth}?'\n"
        "    verdicts: {'yes': 1, 'no': 0}\n"
    )
    with pytest.raises(DataError, match=r"line 3: .*the row has no reward_model.ground_truth"):
        _check(f"reward.name={rubric}", rows=rows)


def test_many_different_mistakes_in_rows_are_counted(rows: Path) -> None:
    _write_rows(
        rows,
        images={n: ["a.png"] * n for n in (1, 2, 3, 4)},
        videos={n: ["a.mp4"] * n for n in (1, 2, 3, 4)},
    )
    with pytest.raises(SeveralProblems) as raised:
        _check(rows=rows)
    assert len(raised.value.errors) == 6
    assert str(raised.value.errors[-1]) == "train rows have 3 more problems"


def test_tools_that_do_not_load_and_the_loops_that_rows_name(tmp_path: Path, rows: Path) -> None:
    _write_rows(rows, agent_name={3: "tool_agnt"})
    (tmp_path / "broken.py").write_text("import json\nnothing\n", encoding="utf-8")
    tools = tmp_path / "tools.yaml"
    tools.write_text(
        "tools: [{function: 'none.py:tool'}, {function: 'broken.py:tool'}]\n", encoding="utf-8"
    )
    with pytest.raises(SeveralProblems) as raised:
        _check(f"agent.tool_catalogue={tools}", rows=rows)
    catalogue, loop = map(str, raised.value.errors)
    assert "tools[0].function: the tool file" in catalogue.splitlines()[0]
    assert "tools[1].function: cannot load the tool from" in catalogue.splitlines()[1]
    assert "NameError: name 'nothing' is not defined (" in catalogue
    assert "broken.py:2, in <module>)" in catalogue
    assert "line 3: agent loop 'tool_agnt' is not registered" in loop


def test_a_directory_of_another_run(tmp_path: Path, rows: Path) -> None:
    config = load_config([DEMO], [*_FEW, "run.seed=7"]).config
    (tmp_path / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    config = load_config([DEMO], [*_FEW]).config
    with pytest.raises(RuntimeError, match=r"holds another run: run\.seed was 7 and is 0"):
        check_run(config, tmp_path)
    with pytest.raises(RuntimeError, match=r"rows\.jsonl is not a directory"):
        check_run(config, rows / "run")


def test_settings_that_the_blocks_of_the_model_do_not_have(model: Path, rows: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "phi3", "sliding_window": 64, "pad_token_id": 0}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = [f"model.path={model}", "policy.share_prefixes=always"]
    settings += ["policy.lora.rank=4", "policy.lora.targets=[q_proj, o_proj]"]
    with pytest.raises(SeveralProblems) as raised:
        _check(*settings, rows=rows)
    said = str(raised.value)
    assert "policy.share_prefixes=always: phi3 has layers with a sliding window" in said
    assert "policy.lora.targets has q_proj: files of phi3 have q_proj, k_proj, v_proj in" in said


def test_the_engines_share_of_the_model(rows: Path) -> None:
    with pytest.raises(SetupError, match=r"tensor_model_parallel_size=3 does not divide .* 4 att"):
        _check("rollout.tensor_model_parallel_size=3", rows=rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["algorithm.advantage=remax"],
            r"=accuracy leaves out .* algorithm\.advantage=remax learns",
        ),
        (["algorithm.advantage=reinforce_plus_plus"], r"advantage=reinforce_plus_plus learns"),
        (["rollout.samples_per_prompt=1"], r"rollout\.samples_per_prompt=1: set at least 2, or "),
    ],
)
def test_dynamic_sampling_without_anything_to_compare(
    settings: list[str], message: str, rows: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _check("preset=dapo", *settings, rows=rows)


def test_a_server_command_that_does_not_know_a_setting(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"the server of `echo --help` does not know --engine"):
        _check("rollout.server_command=[echo]", rows=rows)


def test_a_reference_that_cannot_score_the_policy(model: Path, rows: Path) -> None:
    kl = "algorithm.kl_coef=0.1"
    assert _check(kl, f"algorithm.reference_path={model}", rows=rows)
    with pytest.raises(ConfigError, match=r"is read by nothing: set kl_coef or reward_kl.coef"):
        _check(f"algorithm.reference_path={model}", rows=rows)
    with pytest.raises(SetupError, match=r"algorithm\.reference_path=/nowhere does not exist"):
        _check(kl, "algorithm.reference_path=/nowhere", rows=rows)
    _change_json(model / "config.json", vocab_size=1000)
    with pytest.raises(SetupError, match=r"knows 1024 ids, and .* has vocab_size=1000"):
        _check(kl, f"algorithm.reference_path={model}", rows=rows)
    _change_json(model / "config.json", vocab_size=1024, hidden_act="gelu")
    with pytest.raises(SetupError, match="hidden_act='gelu' is not supported"):
        _check(kl, f"algorithm.reference_path={model}", rows=rows)
    _change_json(model / "config.json", hidden_act="silu")
    text = (model / "tokenizer.json").read_text(encoding="utf-8")
    file = json.loads(text)
    vocab = file["model"]["vocab"]
    first, second = [t for t in vocab if len(t) == 1][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (model / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    with pytest.raises(SetupError, match="gives 2 tokens other ids than that of the policy"):
        _check(kl, f"algorithm.reference_path={model}", rows=rows)


def test_shared_memory_is_refused_for_servers_on_other_hosts() -> None:
    settings = ["model.path=/m", "data.train_files=/t.jsonl", "sync.transport=shared_memory"]
    near = load_config([], [*settings, "rollout.addresses=[127.0.0.1:8000]"]).config
    assert near.rollout.num_replicas == 0
    check_addresses(near)
    far = load_config([], [*settings, "rollout.addresses=[127.0.0.1:8000,10.0.0.7:8000]"]).config
    with pytest.raises(ConfigError, match=r"rollout.addresses has 10.0.0.7:8000: set sync.tran"):
        check_addresses(far)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["sync.transport=collective"], "NCCL and gloo do not encrypt the weights between hosts"),
        (
            ["rollout.addresses=[10.0.0.7:8000]", "agent.num_workers=1"],
            "are not those of rollout.addresses=",
        ),
    ],
)
def test_nothing_travels_in_plain_text_between_hosts_unasked(
    settings: list[str], says: str
) -> None:
    given = ["model.path=/m", "data.train_files=/t.jsonl", "launch=ray", *settings]
    check_network(load_config([], given).config)  # on this machine alone
    cluster = [*given, "launch.address=auto"]
    with pytest.raises(ConfigError, match=says):
        check_network(load_config([], cluster).config)
    trusted = "launch.allow_plaintext_on_network=true"
    check_network(load_config([], [*cluster, trusted]).config)
    if "sync.transport=collective" in settings:
        weights_only = "sync.transport.allow_plaintext=true"
        check_network(load_config([], [*cluster, weights_only]).config)
