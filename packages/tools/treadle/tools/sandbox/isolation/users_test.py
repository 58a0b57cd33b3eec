from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.sandbox.isolation import users
from treadle.tools.sandbox.isolation.users import Users


def map_ids(patch: pytest.MonkeyPatch, folder: Path, user_map: str, group_map: str) -> None:
    maps = (folder / "uid_map", folder / "gid_map")
    for path, text in zip(maps, (user_map, group_map), strict=True):
        path.write_text(text)
    patch.setattr(users, "_MAPS", maps)


def test_each_is_taken_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    everything = "         0          0 4294967295\n"
    map_ids(monkeypatch, tmp_path, everything, everything)
    some = Users(3)
    taken = [some.take() for _ in range(3)]
    assert len(set(taken)) == 3
    assert min(taken) >= 65_536
    some.give_back(taken[1])
    assert some.take() == taken[1]


def test_a_container_has_those_it_maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    map_ids(monkeypatch, tmp_path, "0 1000 1\n1 100000 65536\n", "0 0 61190\n")
    some = Users(5)
    assert all(61_184 <= some.take() < 61_190 for _ in range(5))
    with pytest.raises(SetupError, match="needs 7 user ids that nobody has"):
        Users(7)
