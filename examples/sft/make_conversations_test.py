import json
from pathlib import Path

import pytest
from sft.make_conversations import main

from treadle.trainer.config.load import load_sft_config
from treadle.trainer.sft.conversations import read_conversations

_CONFIG = Path(__file__).parent / "config.yaml"


def test_the_conversations_are_read_with_the_configuration_of_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path)]) == 0
    assert "192 conversations" in capsys.readouterr().out
    data = load_sft_config([_CONFIG], []).config.data
    assert [file.name for file in data.train_files] == ["train.jsonl"]
    read = read_conversations([tmp_path / "train.jsonl"], data, split="train")
    assert not read.notes
    first = read.conversations[0].demonstration
    assert [message.role for message in first.messages] == [
        *("system", "user", "assistant", "tool", "assistant"),
    ]
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    asked = row["messages"][1]["content"]
    assert asked == "What is 74 + 53?"
    assert dict(first.messages[2].tool_calls[0].arguments) == {"expression": "74+53"}
    assert first.messages[4].content == "#### 127"
    assert [tool.name for tool in first.tools] == ["calculator"]
