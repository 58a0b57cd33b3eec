from pathlib import Path

import pytest
from check_vocabulary import PAGE, Vocabulary, main

TABLE = """
| `kept` | in another table |

## Words we do not use

| not | but |
|---|---|
| `chair` | stool |
| `night-stand`, `Couch` | table |
"""


def found(text: str, path: str = "a.py") -> list[str]:
    return [finding.partition("': ")[0] for finding in Vocabulary(TABLE).findings(path, text)]


@pytest.mark.parametrize(
    "word",
    [
        *("chair", "Chair", "chairs", "_chair", "my_chair_2", "ArmChair", "armChairs", "a-chair"),
        *("night-stand", "night_stand", "nightstand", "NightStand", "night_stands"),
        *("Couch", "a Couch."),
    ],
)
def test_a_word_is_found(word: str) -> None:
    assert len(found(word)) == 1


@pytest.mark.parametrize(
    "text", ["chairman", "armchair", "Chairman", "night stand", "couch", "Couches", "kept"]
)
def test_other_words_are_not(text: str) -> None:
    assert found(text) == []


def test_a_finding_names_file_line_and_remedy() -> None:
    assert list(Vocabulary(TABLE).findings("b/c.md", "one\ntwo chairs\n")) == [
        f"b/c.md:2: 'chairs': say stool ({PAGE})"
    ]


@pytest.mark.parametrize("path", [PAGE, "packages/a/CHANGELOG.md"])
def test_the_page_and_changelogs_may_use_the_words(path: str) -> None:
    assert found("chair", path) == []


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has no table"):
        Vocabulary(TABLE.partition("##")[0])


def test_the_command_tells_by_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PAGE).parent.mkdir()
    (tmp_path / PAGE).write_text(TABLE)
    (tmp_path / "good.py").write_text("stool\n")
    (tmp_path / "bad.py").write_text("chair\n")
    monkeypatch.chdir(tmp_path)
    assert (main(["good.py"]), main(["good.py", "bad.py"])) == (0, 1)
    assert capsys.readouterr().out.splitlines()[-1].startswith("bad.py:1: 'chair'")
