"""Keeps judgements: the same question to the same judge is asked once.

Invariant: only the text of a judgement that has a verdict is kept, under a hash of everything that
decides it. A file serves several processes and later runs; a resumed run repeats its rewards.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from treadle.agent_loop import SetupError

__all__ = ["CacheError", "JudgementCache"]

_MAX_IN_MEMORY = 100_000


class CacheError(Exception):
    """The file could not be read or written; the message names it."""


class JudgementCache:
    """Judgements by key.

    Args:
        path: SQLite file; None keeps the newest 100,000 judgements in memory.

    Raises:
        SetupError: The file cannot be opened, or is not such a file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()  # callers use threads, and the connection is one
        try:
            self._database = sqlite3.connect(
                path or ":memory:", timeout=30.0, check_same_thread=False, isolation_level=None
            )
            if path is not None:
                self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, text TEXT NOT NULL)"
            )
        except sqlite3.Error as error:
            raise SetupError(f"cannot use the judge's cache {path}: {error}") from error

    def get(self, key: str) -> str | None:
        """Returns a judgement, or None.

        Raises:
            CacheError: The file cannot be read.
        """
        rows = self._execute("SELECT text FROM judgements WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def put(self, key: str, text: str, *, instead_of: str | None = None) -> str:
        """Keeps a judgement, and returns the one that is kept: the first of a key stays.

        Args:
            instead_of: A kept one that has no verdict, which goes.

        Raises:
            CacheError: The file cannot be written.
        """
        if instead_of is not None:
            self._execute("DELETE FROM judgements WHERE key = ? AND text = ?", key, instead_of)
        self._execute("INSERT OR IGNORE INTO judgements VALUES (?, ?)", key, text)
        if self._path is None:
            self._execute(
                "DELETE FROM judgements WHERE rowid <= (SELECT max(rowid) FROM judgements) - ?",
                _MAX_IN_MEMORY,
            )
        kept = self.get(key)
        return text if kept is None else kept

    def _execute(self, statement: str, *values: str | int) -> list[tuple[str, ...]]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise CacheError(f"the judge's cache {self._path or 'in memory'}: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._database.close()
