"""Every command of the seeds, run through bash with `--dry-run`: its plan and its notes.

`commands/` holds what stands in their text, word for word; the scripts that they only name are in
examples/from_verl. One thing is replaced, verl's program: `python3 -m verl.trainer.main_ppo` by
`treadle`. The machine of the tests has no GPU, so the plans are those for a machine with eight.
"""

from seeds.project import COMMANDS, Project

_VERL = "python3 -m verl.trainer.main_ppo"
_EIGHT = "8: launch.nodes=1 x launch.gpus_per_node=8, policy and servers on the same, in turn"
_RANKS = "8 processes (tensor 1 x pipeline 1 x context 1 x data 8), 1 threads each, bfloat16"
_FOUR_SERVERS = "GPUs 0 to 7  policy-0 to policy-7; rollout-0 to rollout-3 on 2 GPUs each  "
_PACKED = "micro-batches are packed by tokens: policy.micro_batch_tokens"
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable={} has no effect: each row's agent_name "
_MULTI_TURN += "chooses its loop"
_GSM8K = "examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh"


def _packed(*keys: str) -> list[str]:
    return [f"actor_rollout_ref.{key} has no effect: {_PACKED}" for key in keys]


def test_the_dapo_command_of_54_arguments(project: Project) -> None:
    text = (COMMANDS / "dapo.sh").read_text(encoding="utf-8")
    assert text.count(_VERL) == 1
    arguments = ["--dry-run", f"rollout.server_command=[{project.server}]"]
    answer = project.bash(text.replace(_VERL, "treadle"), *arguments)
    assert answer.status == 0, answer.said
    plan = answer.plan
    assert plan["architecture"] == "qwen3, 4.02 billion parameters, context of 262144 tokens"
    assert plan["data sources"] == "aime_2024 (30 validation rows), math_dapo (64 training rows)"
    assert plan["reward"].endswith("recipe/retool/retool.py:compute_score, for all rows")
    assert plan["tools"] == "code_interpreter (64 training, 30 validation rows)"
    assert plan["a step"] == (
        "32 prompts x 8 samples = 256 trajectories of at most 7048 tokens (2048 + 5000)"
    )
    assert plan["updates a step"].startswith("4 of 64 trajectories")
    assert plan["GPUs"] == _EIGHT
    assert plan["node 0"].startswith(_FOUR_SERVERS)
    assert plan["node 0"].endswith(" GB to train, then 0.85 of the GPU to sample")
    assert plan["a server"] == (
        "per GPU 4.02 GB of weights, and 33.3 GB of KV cache for 64 completions of 7048 tokens; "
        "the engine takes 0.85 of the GPU (rollout.gpu_memory_utilization)"
    )
    assert plan["found"].startswith("none on this machine")
    assert plan["policy"] == _RANKS
    assert plan["policy memory"].startswith("parameters, optimizer, reference in host memory")
    assert plan["rollout servers"] == "4 x sglang, 64 completions at a time each, bfloat16"
    assert plan["server memory"].endswith("weights back, update, then the KV cache")
    assert plan["launcher"] == "local"
    assert plan["validation"].startswith("30 rows x 1 at temperature 1, before training, every 20")
    assert plan["loggers"] == "console, jsonl, wandb"
    assert answer.notes == [
        *_packed(
            "actor.ppo_micro_batch_size_per_gpu=4", "rollout.log_prob_micro_batch_size_per_gpu=4"
        ),
        _MULTI_TURN.format(True),
    ]


def _with_lines(file: str, option: str) -> str:
    """Returns the GSM8K command with lines of the seeds at its end; here they come by `$@`."""
    given = (COMMANDS / file).read_text(encoding="utf-8")
    return f'lines=(\n{given})\nbash {_GSM8K} "${{lines[@]}}" {option}\n'


def test_the_other_spelling_of_the_lines_that_trace(project: Project) -> None:
    answer = project.bash(_with_lines("weave_trace_lines.sh", "--print-config"))
    assert answer.status == 0, answer.said
    shown = dict(line.partition(" = ")[::2] for line in answer.said.splitlines())
    assert shown["tracing.backends"].startswith("[weave]")
    assert shown["tracing.token2text"].startswith("true")


def test_gsm8k_with_a_tool_and_the_lines_that_trace_it(project: Project) -> None:
    answer = project.bash(_with_lines("agent_loop_lines.sh", "--dry-run"))
    assert answer.status == 0, answer.said
    plan = answer.plan
    assert plan["architecture"] == "qwen2, 3.09 billion parameters, context of 32768 tokens"
    assert plan["agent loops"] == "tool_agent (1024 training, 8 validation rows)"
    assert plan["tools"] == "calc_gsm8k_reward (1024 training, 8 validation rows)"
    assert plan["steps"] == "60 (15 epochs)"
    assert plan["a step"].startswith("256 prompts x 16 samples = 4096 trajectories")
    assert plan["GPUs"] == _EIGHT
    assert plan["node 0"].startswith(_FOUR_SERVERS)
    assert plan["rollout servers"] == "4 x sglang, 1024 completions at a time each, bfloat16"
    assert plan["loggers"] == "console, jsonl, wandb"
    assert set(answer.notes) == {
        *_packed(
            "actor.ppo_micro_batch_size_per_gpu=32",
            "rollout.log_prob_micro_batch_size_per_gpu=32",
            "ref.log_prob_micro_batch_size_per_gpu=32",
        ),
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes=512 has no effect: see "
        "sync.transport.bucket_bytes",
        # Of the file that --config-name names, and of the line.
        _MULTI_TURN.format(True),
    }


def test_gsm8k_with_traces_in_mlflow(project: Project) -> None:
    data = project.bash("python examples/data_preprocess/gsm8k_tool_agent_loop.py --limit 256")
    assert data.status == 0, data.said
    script = "examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh"
    answer = project.bash(f"bash {script} --dry-run")
    assert answer.status == 0, answer.said
    assert answer.plan["steps"] == "2 (2 epochs)"
    assert answer.plan["loggers"] == "console, jsonl, mlflow"
    assert answer.plan["node 0"].startswith(_FOUR_SERVERS)
    assert set(answer.notes) == {
        _MULTI_TURN.format(True),
        *_packed(
            "actor.ppo_micro_batch_size_per_gpu=32",
            "rollout.log_prob_micro_batch_size_per_gpu=32",
            "ref.log_prob_micro_batch_size_per_gpu=32",
        ),
    }


def test_gsm8k_in_a_single_turn_with_sequence_balancing(project: Project) -> None:
    data = project.bash("python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k")
    assert data.status == 0, data.said
    answer = project.bash("bash examples/grpo_trainer/run_qwen2-7b_seq_balance.sh --dry-run")
    assert answer.status == 0, answer.said
    plan = answer.plan
    assert plan["architecture"] == "qwen2, 7.62 billion parameters, context of 32768 tokens"
    assert plan["agent loops"] == "single_turn_agent (1024 training, 8 validation rows)"
    assert plan["tools"] == "none"
    assert plan["updates a step"] == (
        "4 of 1280 trajectories, in micro-batches of 24000 tokens per rank"
    )
    assert plan["rollout servers"] == "4 x sglang, 1024 completions at a time each, bfloat16"
    assert answer.notes == []


def test_geometry_with_drawings(project: Project) -> None:
    data = project.bash("python examples/data_preprocess/geo3k.py --local_dir ~/data/geo3k")
    assert data.status == 0, data.said
    answer = project.bash("bash examples/grpo_trainer/run_qwen2_5_vl-7b-sglang.sh --dry-run")
    assert answer.status == 0, answer.said
    plan = answer.plan
    assert plan["architecture"].startswith("qwen2_5_vl, ")
    assert plan["reward"] == "geometry3k for hiyouga/geometry3k"
    assert plan["a step"].startswith("512 prompts x 5 samples = 2560 trajectories")
    assert plan["updates a step"].startswith("4 of 640 trajectories")
    assert plan["rollout servers"] == "8 x sglang, 320 completions at a time each, bfloat16"
    assert set(answer.notes) == {
        *_packed(
            "actor.ppo_micro_batch_size_per_gpu=10",
            "rollout.log_prob_micro_batch_size_per_gpu=20",
            "ref.log_prob_micro_batch_size_per_gpu=20",
        ),
        "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True has no "
        "effect: rollout.name is another engine",
        "actor_rollout_ref.rollout.enable_chunked_prefill=False has no effect: the server decides "
        "for its engine",
    }


def test_fine_tuning_on_retools_demonstrations(project: Project) -> None:
    prepared = project.bash(
        "hf download JoeYing/ReTool-SFT --repo-type dataset --local-dir ./ReTool-SFT\n"
        "python3 recipe/retool/retool_sft_preprocess.py\n"
    )
    assert prepared.status == 0, prepared.said
    script = "MODEL_PATH=Qwen/Qwen2.5-32B-Instruct bash recipe/retool/run_qwen2-32b_sft.sh"
    answer = project.bash(f"{script} --dry-run")
    assert answer.status == 0, answer.said
    plan = answer.plan
    assert plan["training data"].startswith("32 conversations")
    assert plan["steps"] == "6 of 32 conversations (1 an epoch)"
    assert plan["policy"].startswith("16 processes (tensor 2 x pipeline 1 x context 4 x data 2)")
    assert plan["GPUs"] == "16: launch.nodes=2 x launch.gpus_per_node=8"
    assert plan["nodes 0 to 1"] == "GPUs 0 to 7  policy-0 to policy-15"
    assert plan["launcher"] == "ray"
    assert answer.notes == [
        "data.multiturn.enable=True has no effect: a row is a conversation of any number of turns",
        f"data.micro_batch_size_per_gpu=4 has no effect: {_PACKED}",
        "model.strategy=fsdp has no effect: the policy is Megatron's",
        "use_remove_padding=True has no effect: sequences are always packed",
    ]


def test_what_cannot_be_had_is_one_list(project: Project) -> None:
    answer = project.bash(
        f"bash {_GSM8K} --dry-run data.train_files=nowhere.parquet trainer.val_only=True "
        "actor_rollout_ref.rollout.over_sample_rate=0.1 actor_rollout_ref.model.lora_rnk=8"
    )
    assert answer.status == 2
    assert "error: 3 problems" in answer.said
    for number, said in enumerate(
        ("trainer.val_only=True is not", "rollout.over_sample_rate=0.1 is not", "lora_rnk"), 1
    ):
        assert any(
            line.strip().startswith(f"{number}. ") and said in line
            for line in answer.said.splitlines()
        )
