from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.data import DataError, read_rows
from treadle.trainer.data.own_reader import load_reader

_CODE = """
class Rows:
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        for name in sorted(self.path.iterdir()):
            yield {"text": name.read_text()}

class Indexed:
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index >= 2:
            raise IndexError(index)
        return {"text": str(index)}

def broken(path):
    yield {"text": "fine"}
    raise KeyError("no such column")

def words(path):
    return ["a"]

def nothing(path):
    return 3

constant = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(_CODE)
    return str(file)


def test_the_rows_are_those_that_the_class_gives(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(name)
    rows = read_rows([folder], required=("text",), reader=load_reader(f"{code}:Rows"))
    assert [(row.columns["text"], row.place) for row in rows] == [
        ("a", f"{folder}, row 1"),
        ("b", f"{folder}, row 2"),
    ]
    indexed = read_rows([folder], required=("text",), reader=load_reader(f"{code}:Indexed"))
    assert [row.columns["text"] for row in indexed] == ["0", "1"]
    with pytest.raises(DataError, match="row 1: the column 'prompt' is missing"):
        read_rows([folder], required=("prompt",), limit=1, reader=load_reader(f"{code}:Rows"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "mine.py:broken cannot read .*: KeyError: 'no such column'"),
        ("words", "row 1 is 'a'; a row must be a mapping"),
        ("nothing", "it gives 3, which is not an iterable of rows"),
    ],
)
def test_what_a_class_does_wrong_is_said_with_its_name(
    code: str, tmp_path: Path, name: str, why: str
) -> None:
    with pytest.raises(DataError, match=why):
        read_rows([tmp_path], required=("text",), reader=load_reader(f"{code}:{name}"))


def test_a_class_that_does_not_load_is_refused(code: str) -> None:
    with pytest.raises(SetupError, match="which cannot be called"):
        load_reader(f"{code}:constant")
    with pytest.raises(SetupError, match="has no 'Absent'"):
        load_reader(f"{code}:Absent")


def test_a_data_set_class_of_verl_is_refused_with_what_does_the_same(tmp_path: Path) -> None:
    # As recipe/retool/retool.py begins: another package may be missing before verl is.
    file = tmp_path / "retool.py"
    file.write_text(
        "import a_package_that_is_not_here\n"
        "from verl.utils.dataset import RLHFDataset\n"
        "class CustomRLHFDataset(RLHFDataset):\n"
        "    pass\n"
    )
    with pytest.raises(SetupError, match=r"No module named 'a_package.*treadle data dapo_math"):
        load_reader(f"{file}:CustomRLHFDataset")
