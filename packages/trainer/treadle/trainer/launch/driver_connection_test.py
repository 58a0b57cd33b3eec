import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

from treadle.policy.rank import driver_connection
from treadle.policy.rank.driver_connection import accept_driver, connect_to_rank
from treadle.policy.rank.run_tls import RunTls
from treadle.trainer.launch.run_tls import run_tls

_KEY = b"k" * 32


class _Rank:
    """Accepts its driver on a thread, as the rank's process does."""

    def __init__(self, tls: RunTls | None = None) -> None:
        self._tls = tls
        self.listener = Listener(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self.listener.address[1]))
        self.heard: list[object] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self.listener, accept_driver(self.listener, _KEY, self._tls) as connection:
            self.heard.append(connection.recv())

    def greet(self) -> None:
        with connect_to_rank(
            *self.address, _KEY, deadline_s=60, given_up=threading.Event(), tls=self._tls
        ) as driver:
            driver.send("hello")
            self._thread.join(10)
        assert self.heard == ["hello"]


def test_the_driver_is_served_though_strangers_hold_connections() -> None:
    rank = _Rank()
    silent = [socket.create_connection(rank.address) for _ in range(5)]
    talking = socket.create_connection(rank.address)
    talking.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(AuthenticationError):
        Client(rank.address, authkey=b"another")
    rank.greet()
    for stranger in (*silent, talking):
        stranger.close()


def test_callers_beyond_the_bound_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_connection, "_MAX_CALLERS", 1)
    rank = _Rank()
    with socket.create_connection(rank.address) as silent:
        assert silent.recv(4)  # its challenge: it has the place
        with socket.create_connection(rank.address) as late:
            late.settimeout(60)
            assert late.recv(4) == b""
    rank.greet()


def test_between_hosts_both_sides_show_a_certificate_of_the_run(tmp_path: Path) -> None:
    with run_tls(tmp_path / "run") as tls, run_tls(tmp_path / "another") as another:
        rank = _Rank(tls)
        with socket.create_connection(rank.address):  # says nothing, and delays nobody
            with socket.create_connection(rank.address) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(AuthenticationError, match="certificate verify failed"):
                connect_to_rank(
                    *rank.address, _KEY, deadline_s=60, given_up=threading.Event(), tls=another
                )
            rank.greet()
