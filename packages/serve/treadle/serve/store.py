"""The durable state of the service: a database, and directories with states of the policy.

Invariant: a state is written whole before a row names it, and removed when no row does. Training
requests are stored before a client receives their acceptance, in order, and kept until a state
includes their effect; their answers are stored before the client receives them.

The database is SQLite's; each method is one transaction.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from treadle.serve.errors import ServiceError, unknown

__all__ = ["Change", "Store", "StoredAnswer", "expiry"]

Change: TypeAlias = tuple[Any, ...]
"""A statement, and its values."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, created REAL, seen REAL, finished INTEGER DEFAULT 0, info TEXT);
CREATE TABLE IF NOT EXISTS contents (
  id TEXT PRIMARY KEY, shape TEXT, initial INTEGER DEFAULT 0, seed INTEGER);
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, session TEXT, shape TEXT, content TEXT, applied INTEGER DEFAULT 0,
  used REAL, alive INTEGER DEFAULT 1, metadata TEXT);
CREATE TABLE IF NOT EXISTS requests (
  id TEXT PRIMARY KEY, model TEXT, seq INTEGER, kind TEXT, body BLOB, answer BLOB, type TEXT);
CREATE INDEX IF NOT EXISTS by_model ON requests (model, seq);
CREATE TABLE IF NOT EXISTS checkpoints (
  path TEXT PRIMARY KEY, model TEXT, kind TEXT, name TEXT, content TEXT, created REAL,
  expires REAL, metadata TEXT, size INTEGER);
CREATE TABLE IF NOT EXISTS samplers (
  id TEXT PRIMARY KEY, session TEXT, model TEXT, path TEXT, content TEXT, created REAL);
"""
_KEPT_ANSWERS: Final = 512
"""Answers of a model that are kept after their effect is in a state."""
_KEPT_SAMPLERS: Final = 16
"""Sampling sessions of a model without a name that are kept, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """The answer to a request, as it is sent.

    Attributes:
        type: Content type of the body.
    """

    body: bytes
    type: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StoredAnswer:
        """Returns an answer in JSON."""
        return cls(body=json.dumps(values).encode(), type="application/json")

    @classmethod
    def failed(cls, error: BaseException) -> StoredAnswer:
        """Returns the answer to a request that failed; but for a `ServiceError`, by a defect."""
        if not isinstance(error, ServiceError):
            error = ServiceError(f"{type(error).__name__}: {error}", category="server")
        return cls.of({"error": str(error), "category": error.category})


def expiry(given: Mapping[str, Any]) -> float | None:
    """Returns when what a request names expires; None: never."""
    return None if (ttl := given.get("ttl_seconds")) is None else time.time() + ttl


class Store:
    """The database and the directories of a service."""

    def __init__(self, directory: Path) -> None:
        """Opens them; they are made if missing."""
        self.states = directory / "states"
        self.states.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(directory / "service.db", isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_SCHEMA)
        self.sweep()
        known = {row["id"] for row in self.rows("SELECT id FROM contents")}
        for state in self.states.iterdir():  # of a process that was killed while it wrote
            if state.name not in known:
                shutil.rmtree(state, ignore_errors=True)

    def close(self) -> None:
        """Closes the database."""
        self._db.close()

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Returns the rows of a query."""
        return self._db.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        """Returns the first row of a query, if there is one."""
        found: sqlite3.Row | None = self._db.execute(query, values).fetchone()
        return found

    def write(self, *statements: Change) -> None:
        """Executes statements in one transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement, *values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it
                self._db.execute("ROLLBACK")
            raise

    # --- states ------------------------------------------------------------------------------

    def size(self, content: str) -> int:
        """Returns the bytes of a state."""
        return sum(file.stat().st_size for file in (self.states / content).rglob("*"))

    def sweep(self) -> None:
        """Removes what has expired, and the states that nothing names."""
        self.write(
            ("DELETE FROM checkpoints WHERE expires IS NOT NULL AND expires < ?", time.time()),
            (
                "DELETE FROM samplers WHERE path IS NULL AND model IS NOT NULL AND (SELECT "
                "COUNT(*) FROM samplers AS newer WHERE newer.model = samplers.model AND "
                "newer.path IS NULL AND newer.created > samplers.created) >= ?",
                _KEPT_SAMPLERS,
            ),
        )
        unused = [
            row["id"]
            for row in self.rows(
                "SELECT id FROM contents WHERE NOT initial AND id NOT IN (SELECT content FROM "
                "models WHERE alive AND content IS NOT NULL UNION SELECT content FROM checkpoints "
                "WHERE content IS NOT NULL UNION SELECT content FROM samplers WHERE content IS "
                "NOT NULL)"
            )
        ]
        for content in unused:
            self.write(("DELETE FROM contents WHERE id = ?", content))
            shutil.rmtree(self.states / content, ignore_errors=True)

    # --- checkpoints -------------------------------------------------------------------------

    def checkpoint(self, path: str) -> sqlite3.Row:
        """Returns the row of a checkpoint that has not expired, with the `shape` of its state.

        Raises:
            ServiceError: There is no such checkpoint.
        """
        row = self.row(
            "SELECT checkpoints.*, shape FROM checkpoints JOIN contents ON contents.id = content "
            "WHERE path = ? AND (expires IS NULL OR expires > ?)",
            *(path, time.time()),
        )
        if row is None:
            raise unknown("checkpoint", path, "see `tinker checkpoint list`, or save it first")
        return row

    def named(
        self, model: str, kind: str, name: str, content: str, *about: Any
    ) -> tuple[str, Change]:
        """Returns the path by which a state becomes a checkpoint, and the statement that does it.

        Args:
            about: When it expires, its metadata in JSON, and its bytes.
        """
        path = f"tinker://{model}/{kind}/{name}"
        statement = "INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        statement += " ON CONFLICT DO NOTHING"
        return path, (statement, path, model, kind, name, content, time.time(), *about)

    def new_sampler(
        self, session: str, number: object, content: str | None, *, model: Any, path: Any
    ) -> tuple[str, Change]:
        """Returns the name of a sampling session, and the statement that makes it.

        Args:
            model: Whose weights it has, if they have no name.
            path: The checkpoint that it has the weights of, if it is one.
        """
        sampler = f"{session}:sample:{number}"
        statement = "INSERT INTO samplers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        return sampler, (statement, sampler, session, model, path, content, time.time())

    def export_directory(self, model: str, name: str) -> Path:
        """Returns where a model is exported to."""
        return self.states.parent / "exports" / model.replace(":", "-") / name

    # --- requests to train -------------------------------------------------------------------

    def accept(
        self, request: str, model: str, seq: int, kind: str, body: bytes, *before: Change
    ) -> None:
        """Stores a request, before the client receives its acceptance.

        Args:
            before: Statements that run earlier in the same transaction.
        """
        self.write(
            *before,
            (
                "INSERT INTO requests (id, model, seq, kind, body) VALUES (?, ?, ?, ?, ?)",
                *(request, model, seq, kind, body),
            ),
            ("UPDATE models SET used = ? WHERE id = ?", time.time(), model),
        )

    def answer_of(self, request: str) -> StoredAnswer | None:
        """Returns the answer to a request, if there is one."""
        row = self.row("SELECT answer, type FROM requests WHERE id = ?", request)
        if row is None or row["type"] is None:
            return None
        return StoredAnswer(body=row["answer"], type=row["type"])

    def answered(self, request: str, answer: StoredAnswer, *more: Change) -> None:
        """Stores an answer and the request's other changes in one transaction."""
        self.write(
            (
                "UPDATE requests SET answer = ?, type = ? WHERE id = ?",
                *(answer.body, answer.type, request),
            ),
            *more,
        )

    def unloaded(self, model: str) -> Sequence[Change]:
        """Returns the statements that free a model and what waits for it."""
        return (
            ("UPDATE models SET alive = 0 WHERE id = ?", model),
            ("UPDATE requests SET body = NULL WHERE model = ?", model),
        )

    def moved(self, model: str, seq: int, content: str) -> Sequence[Change]:
        """Returns the statements that record a model's new state after its request `seq`."""
        return (
            (
                "INSERT INTO contents (id, shape) SELECT ?, shape FROM models WHERE id = ? ON "
                "CONFLICT DO NOTHING",
                *(content, model),
            ),
            ("UPDATE models SET content = ?, applied = ? WHERE id = ?", content, seq, model),
            ("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", model, seq),
            ("DELETE FROM requests WHERE model = ? AND seq < ?", model, seq - _KEPT_ANSWERS),
        )
