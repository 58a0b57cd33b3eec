import json
from pathlib import Path

from gsm8k_tool_agent.preprocess import main

from treadle.trainer.data import read_rows


def test_the_script_writes_what_the_configuration_reads(tmp_path: Path) -> None:
    for split in ("train", "test"):
        row = {"question": "1 + 1?", "answer": "#### 2"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["--from", str(tmp_path), "--output", str(tmp_path / "data")]) == 0
    rows = read_rows([tmp_path / "data" / "train.parquet", tmp_path / "data" / "test.parquet"])
    assert [row.columns["data_source"] for row in rows] == ["openai/gsm8k"] * 2
