import json
from pathlib import Path

import pytest
from gsm8k_tool_agent.preprocess import INSTRUCTION, file_of, main, read_rows, solution_of

from treadle.trainer.data import DataError

QUESTION = "Natalia sold clips to 48 friends in April and 48,000 in May. How many is that?"
ANSWER = "48+48000 = <<48+48000=48048>>48048 clips.\n#### 48,048"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "gsm8k"
    directory.mkdir()
    line = json.dumps({"question": QUESTION, "answer": ANSWER}) + "\n"
    (directory / "train.jsonl").write_text(line * 3)
    (directory / "test.jsonl").write_text(line)
    return directory


def test_a_row_has_the_columns_of_verls_script(source: Path) -> None:
    row = list(read_rows(source / "train.jsonl", split="train"))[2]
    assert list(row) == [
        "data_source",
        "agent_name",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
    ]
    assert row["data_source"] == "openai/gsm8k"
    assert row["agent_name"] == "tool_agent"
    assert row["ability"] == "math"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "48048"}
    asked = f"{QUESTION} Let's think step by step and output the final answer after `####`."
    assert row["prompt"] == [
        {
            "role": "system",
            "content": "You are a math expert. You are given a question and you need to solve it "
            "step by step. Reasoning step by step before any tool call. You should use the "
            "`calc_gsm8k_reward` tool after step by step solving the question, before generate "
            "final answer at least once and refine your answer if necessary. Put your final "
            "answer in the format of `#### <answer>`.",
        },
        {"role": "user", "content": asked},
    ]
    assert row["extra_info"] == {
        "split": "train",
        "index": 2,
        "answer": ANSWER,
        "question": QUESTION,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "48048"}}},
        "interaction_kwargs": {"query": asked, "ground_truth": "48048"},
    }
    assert asked.endswith(INSTRUCTION)


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_what_is_written_is_what_the_trainer_reads(
    source: Path, tmp_path: Path, file_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from treadle.trainer.data import read_rows as read_training_rows

    out = tmp_path / "data"
    assert main(["--source", str(source), "--output", str(out), "--format", file_format]) == 0
    rows = read_training_rows([out / f"train.{file_format}", out / f"test.{file_format}"])
    assert len(rows) == 4
    (expected,) = read_rows(source / "test.jsonl", split="test")
    assert rows[3].columns == expected
    assert f"train.{file_format}: 3 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", r"train\.jsonl, line 1: not a JSON object"),
        ('{"question": "a"}', "line 1: the column 'answer' is missing"),
        ('{"question": "a", "answer": "42"}', "the answer has no '#### '"),
    ],
)
def test_what_is_not_gsm8k_is_named(
    source: Path, tmp_path: Path, line: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "train.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=why):
        list(read_rows(source / "train.jsonl", split="train"))
    assert main(["--source", str(source), "--output", str(tmp_path / "data")]) == 2
    assert "error:" in capsys.readouterr().err


def test_the_solution_is_the_last_number_without_separators() -> None:
    assert solution_of("#### 1\n#### -1,234,567 ") == "-1234567"
    assert solution_of("none") is None


def test_files_of_the_hub_give_the_same_rows(source: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    directory = tmp_path / "main"
    directory.mkdir()
    for split, count in (("train", 3), ("test", 1)):
        table = pyarrow.Table.from_pylist([{"question": QUESTION, "answer": ANSWER}] * count)
        parquet.write_table(table, directory / f"{split}-00000-of-00001.parquet")
    for directory_of_source in (source, directory):
        out = tmp_path / f"{directory_of_source.name}-rows"
        options = ["--output", str(out), "--format", "jsonl"]
        assert main(["--source", str(directory_of_source), *options]) == 0
    for split in ("train", "test"):
        ours, theirs = (tmp_path / f"{name}-rows" / f"{split}.jsonl" for name in ("gsm8k", "main"))
        assert ours.read_text() == theirs.read_text()


def test_a_source_must_be_of_one_spelling(source: Path) -> None:
    (source / "test-00000-of-00001.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"must hold one file test\*\.jsonl or .*test\.jsonl$"):
        file_of("test", source)
    with pytest.raises(DataError, match="has: none"):
        file_of("train", source / "none")


def test_where_the_hub_is_out_of_reach_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["--output", str(tmp_path / "data")]) == 2
    said = capsys.readouterr().err
    assert (
        "run `hf download openai/gsm8k --repo-type dataset --include 'main/train-*.parquet'" in said
    )
    assert not (tmp_path / "data").exists()


def test_damaged_rows_are_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": None, "answer": "#### 1"}, {"question": "1?", "answer": None}]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(text, encoding="utf-8")
    assert main(["--source", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "line 1: the column 'question' is null" in said
    assert "line 2: the column 'answer' is null" in said
