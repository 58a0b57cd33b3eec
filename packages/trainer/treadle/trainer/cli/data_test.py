import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from treadle.tools import rewards
from treadle.tools.code_interpreter import SPEC
from treadle.trainer.config.sft import SftDataConfig
from treadle.trainer.data import read_rows
from treadle.trainer.main import main
from treadle.trainer.prepare.gsm8k import solution_of
from treadle.trainer.sft.conversations import read_conversations

QUESTION = "Natalia sold clips to 48 friends in April and 48,000 in May. How many is that?"
ANSWER = "48+48000 = <<48+48000=48048>>48048 clips.\n#### 48,048"
BOXED = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"


def _jsonl(path: Path, *rows: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _parquet(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def _data(name: str, source: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    """Runs the command; returns the columns of all written rows, files by name."""
    assert main(["data", name, "--from", str(source), "--output", str(out), *options]) == 0
    files = sorted(out.iterdir())
    required = ("messages",) if name == "retool_sft" else ("data_source", "prompt", "reward_model")
    return [dict(row.columns) for row in read_rows(files, required=required)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    row = {"question": QUESTION, "answer": ANSWER}
    _jsonl(tmp_path / "gsm8k" / "train.jsonl", row, row, row)
    _jsonl(tmp_path / "gsm8k" / "test.jsonl", row)
    return tmp_path / "gsm8k"


def test_a_row_of_gsm8k_has_the_columns_of_verls_script(source: Path, tmp_path: Path) -> None:
    row = _data("gsm8k", source, tmp_path / "out", "--format=jsonl")[3]
    asked = f"{QUESTION} Let's think step by step and output the final answer after `####`."
    assert row == {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {
                "role": "system",
                "content": "You are a math expert. You are given a question and you need to solve "
                "it step by step. Reasoning step by step before any tool call. You should use the "
                "`calc_gsm8k_reward` tool after step by step solving the question, before generate "
                "final answer at least once and refine your answer if necessary. Put your final "
                "answer in the format of `#### <answer>`.",
            },
            {"role": "user", "content": asked},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "48048"},
        "extra_info": {
            "split": "train",
            "index": 2,
            "answer": ANSWER,
            "question": QUESTION,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "48048"}}},
            "interaction_kwargs": {"query": asked, "ground_truth": "48048"},
        },
    }
    assert solution_of("#### 1\n#### -1,234,567 ") == "-1234567"
    assert solution_of("none") is None


def test_a_clone_its_folder_and_plain_files_give_the_same_rows(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": QUESTION, "answer": ANSWER}
    clone = tmp_path / "clone"
    _parquet(clone / "main" / "train-00000-of-00002.parquet", row, row)
    _parquet(clone / "main" / "train-00001-of-00002.parquet", row)
    _parquet(clone / "main" / "test-00000-of-00001.parquet", row)
    _parquet(clone / "socratic" / "test-00000-of-00001.parquet", row)
    plain = _data("gsm8k", source, tmp_path / "plain")
    assert _data("gsm8k", clone, tmp_path / "one") == plain
    assert _data("gsm8k", clone / "main", tmp_path / "two", "--format=jsonl") == plain
    assert len(_data("gsm8k", source, tmp_path / "few", "--limit=2")) == 3
    assert f"{tmp_path}/few/train.parquet: 2 rows" in capsys.readouterr().out


def test_geometry_keeps_its_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = {"bytes": b"\x89PNG", "path": None}
    row = {"images": [image], "problem": "<image>Find x.", "answer": r"2\sqrt{3}"}
    for split in ("train", "validation", "test"):
        _parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet", row)
    made, _ = _data("geo3k", tmp_path / "hub", tmp_path / "out")
    assert made == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [
            {
                "role": "user",
                "content": "<image>Find x. You FIRST think about the reasoning process as an "
                "internal monologue and then provide the final answer. The reasoning process MUST "
                "BE enclosed within <think> </think> tags. The final answer MUST BE put in "
                r"\boxed{}.",
            }
        ],
        "images": [image],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"2\sqrt{3}"},
        "extra_info": {
            "split": "test",
            "index": 0,
            "answer": r"2\sqrt{3}",
            "question": "<image>Find x.",
        },
    }
    command = ["data", "geo3k", "--from", str(tmp_path / "hub"), "--format=jsonl"]
    assert main([*command, "--output", str(tmp_path / "text")]) == 2
    assert "bytes, which JSON has not: write it with --format parquet" in capsys.readouterr().err
    assert not list((tmp_path / "text").iterdir())


def test_dapo_math_has_each_question_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"What is {n} + 1?", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{n}"},
        }
        for n in (1, 2, 1, 2, 1)
    ]
    _parquet(tmp_path / "hub" / "data" / "dapo-math-17k.parquet", *rows)
    made = _data("dapo_math", tmp_path / "hub", tmp_path / "out")
    assert made == [
        {
            **row,
            "prompt": [{"content": f"What is {n} + 1?{BOXED}", "role": "user"}],
            "agent_name": "tool_agent",
        }
        for n, row in enumerate(rows[:2], start=1)
    ]
    assert "train.parquet: 2 rows; 3 repeated ones left out" in capsys.readouterr().out


def test_a_row_of_gsm8k_for_a_single_turn_has_no_tool(source: Path, tmp_path: Path) -> None:
    row = _data("gsm8k_single_turn", source, tmp_path / "out", "--format=jsonl")[3]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    (message,) = row["prompt"]
    assert message["content"].endswith('output the final answer after "####".')
    assert row["reward_model"]["ground_truth"] == "48048"


@pytest.mark.parametrize(
    ("problem", "answer"),
    [("Problem", "Answer"), ("problem", "answer"), ("question", "answer"), ("input", "output")],
)
def test_aime_is_read_under_each_of_its_spellings(
    tmp_path: Path, problem: str, answer: str
) -> None:
    published = {"ID": "2024-I-1", problem: "How many?", answer: 25, "Solution": "..."}
    _parquet(tmp_path / "hub" / "aime_2024_problems.parquet", published)
    (row,) = _data("aime", tmp_path / "hub", tmp_path / "out")
    assert (tmp_path / "out" / "aime_2024.parquet").is_file()
    assert row["data_source"] == "aime_2024"
    assert row["agent_name"] == "tool_agent"
    assert row["prompt"] == [{"role": "user", "content": f"How many?{BOXED}"}]
    assert row["reward_model"]["ground_truth"] == "25"
    rewards.check_data_sources([row["data_source"]])


_RETOOL = """First I compute it.
<code>
```python
print(6 * 7)
```
</code>
<interpreter>
42
</interpreter>
Then I check.
<code>print(1)</code><interpreter>1</interpreter>
It is
<answer>
\\boxed{42}
</answer>
"""


def test_a_demonstration_of_retool_becomes_calls_and_results(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Old text. *user question:*\n<answer>6 * 7?</answer>\n"},
        {"role": "assistant", "content": _RETOOL},
    ]
    _parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", {"messages": messages})
    (row,) = _data("retool_sft", tmp_path / "hub", tmp_path / "out")
    assert [message["role"] for message in row["messages"]] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    # What `treadle sft` reads of it.
    found = read_conversations(
        [tmp_path / "out" / "train.parquet"],
        SftDataConfig(train_files=(tmp_path / "unused",)),
        split="train",
    )
    demonstration = found.conversations[0].demonstration
    said = [
        (message.role, message.content, [dict(call.arguments) for call in message.tool_calls])
        for message in demonstration.messages
    ]
    assert said == [
        ("user", "6 * 7?", []),
        ("assistant", "First I compute it.", [{"code": "print(6 * 7)"}]),
        ("tool", "42", []),
        ("assistant", "Then I check.", [{"code": "print(1)"}]),
        ("tool", "1", []),
        ("assistant", "It is\n\n\\boxed{42}", []),
    ]
    assert demonstration.tools == (SPEC,)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("<code>1</code> and <interpreter>1</interpreter><answer>1</answer>", "text between"),
        ("<code>1</code>", "there is no <interpreter> with its end"),
        ("no end", "there is no <answer> with its end"),
        ("<answer>1</answer> more", "text after </answer>: ' more'"),
    ],
)
def test_a_demonstration_of_another_form_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, why: str
) -> None:
    asked = {"role": "user", "content": "*user question:* 1?"}
    row = {"messages": [asked, {"role": "assistant", "content": content}]}
    _jsonl(tmp_path / "train.jsonl", row)
    command = ["data", "retool_sft", "--from", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "train.jsonl, line 1: " in said
    assert why in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["not json"], "train.jsonl, line 1: not a JSON object"),
        (['{"question": "a"}'], "line 1: the column 'answer' is missing"),
        (['{"question": "a", "answer": "42"}'], "the answer has no '#### '"),
        (['{"question": null, "answer": "#### 1"}', '{"question": "1?"}'], "2 problems"),
    ],
)
def test_what_is_not_gsm8k_is_named(
    source: Path,
    tmp_path: Path,
    lines: Sequence[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source / "train.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["data", "gsm8k", "--from", str(source), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert why in said


@pytest.mark.parametrize(
    ("name", "kept", "why"),
    [
        ("gsm8k", ("a.txt",), "must hold main/train-*.parquet, or one file train*.parquet or"),
        ("gsm8k", ("train.jsonl", "train-x.parquet"), "it has: train-x.parquet, train.jsonl"),
        ("aime", ("train.jsonl",), "holds none of aime_2024*, aime_2025*"),
    ],
)
def test_a_copy_must_hold_what_was_published_in_one_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kept: Sequence[str], why: str
) -> None:
    for file in kept:
        (tmp_path / file).write_text("{}\n")
    assert main(["data", name, "--from", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert why in capsys.readouterr().err


def test_where_the_hub_is_out_of_reach_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["data", "gsm8k", "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "run `hf download openai/gsm8k --repo-type dataset --include 'main/train-" in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "gsm9k", "--output", "out"])
    assert "gsm8k" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    assert "dapo_math         DAPO-Math-17k" in capsys.readouterr().out
