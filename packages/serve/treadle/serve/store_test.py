"""A state lives as long as something names it, and a model's request as long as it may be asked."""

import sqlite3
import time
import uuid
from pathlib import Path

import pytest

from treadle.serve.store import Store, StoredAnswer


def made(store: Store) -> str:
    """Writes a state as ranks do, which no row names yet."""
    directory = store.states / uuid.uuid4().hex
    directory.mkdir()
    (directory / "weights").write_bytes(b"12345")
    return directory.name


def model(store: Store, name: str = "m") -> None:
    store.write(
        (
            "INSERT INTO models (id, shape, applied, used, metadata) VALUES (?, 's', -1, 0, '')",
            name,
        )
    )


def states(store: Store) -> set[str]:
    store.sweep()
    return {path.name for path in store.states.iterdir()}


def test_a_state_is_removed_when_nothing_names_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model(store)
    first, second = made(store), made(store)
    store.write(*store.moved("m", 1, first))
    assert store.size(first) == 5
    checkpoint = "INSERT INTO checkpoints VALUES ('p', 'm', 'weights', 'n', ?, 0, ?, '', 5)"
    store.write((checkpoint, first, time.time() + 100), *store.moved("m", 2, second))
    assert states(store) == {first, second}
    store.write(("UPDATE checkpoints SET expires = ?", time.time() - 1))
    assert states(store) == {second}
    store.write(("UPDATE models SET alive = 0",))
    assert states(store) == set()
    store.close()


def test_a_state_that_was_not_finished_is_removed_at_the_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made(store)
    store.close()
    again = Store(tmp_path)
    assert list(again.states.iterdir()) == []
    again.close()


def test_the_newest_samplers_without_a_name_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(20):
        store.write(
            ("INSERT INTO samplers VALUES (?, 's', 'm', NULL, NULL, ?)", str(number), number)
        )
    store.write(("INSERT INTO samplers VALUES ('named', 's', NULL, 'p', NULL, 0)",))
    store.sweep()
    kept = {row["id"] for row in store.rows("SELECT id FROM samplers")}
    assert kept == {"named", *map(str, range(4, 20))}
    store.close()


def test_an_answer_comes_with_what_it_changes_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model(store)
    store.accept("m:1", "m", 1, "optim_step", b"{}")
    answer = StoredAnswer.of({"metrics": {}})
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        store.answered("m:1", answer, ("UPDATE missing SET x = 1",))
    assert store.answer_of("m:1") is None
    store.answered("m:1", answer, *store.moved("m", 1, made(store)))
    assert store.answer_of("m:1") == answer
    store.close()
