import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from treadle.policy.rank.run_tls import RunTls
from treadle.policy.rank.tls_connection import TlsConnection, accepted, connected
from treadle.trainer.launch.process import child_python_path
from treadle.trainer.launch.run_tls import run_tls

_LARGE = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunTls]:
    with run_tls(tmp_path_factory.mktemp("run") / "tls") as made:
        yield made


def _pair(tls: RunTls) -> tuple[TlsConnection, TlsConnection]:
    """Returns the two ends of a connection."""
    found: list[TlsConnection] = []
    with Listener(("127.0.0.1", 0)) as listener:
        accept = threading.Thread(
            target=lambda: found.append(accepted(listener.accept(), tls.server_context()))
        )
        accept.start()
        client = connected("127.0.0.1", int(listener.address[1]), tls)
        accept.join()
    return client, found[0]


def test_large_messages_pass_each_other(tls: RunTls) -> None:
    client, server = _pair(tls)
    with client, server:
        senders = [
            threading.Thread(target=side.send_bytes, args=(_LARGE,)) for side in (client, server)
        ]
        for sender in senders:
            sender.start()  # more than both sides hold: each is read while the other one writes
        assert client.recv_bytes() == _LARGE
        assert server.recv_bytes() == _LARGE
        for sender in senders:
            sender.join()
        client.send({"small": 1})
        assert server.poll(60)
        assert server.recv() == {"small": 1}


def test_what_was_said_last_arrives_before_the_end(tls: RunTls) -> None:
    client, server = _pair(tls)
    said = threading.Thread(target=client.send_bytes, args=(_LARGE,))
    said.start()
    assert server.recv_bytes() == _LARGE
    said.join()
    client.send("the last")
    client.close()
    assert client.sent(60)
    assert server.recv() == "the last"
    with pytest.raises(EOFError):
        server.recv()
    server.close()


def test_a_process_that_dies_ends_the_connection(tls: RunTls) -> None:
    program = (
        "import signal, sys; from multiprocessing.connection import Listener; from pathlib import"
        " Path; from treadle.policy.rank.run_tls import RunTls; from"
        " treadle.policy.rank.tls_connection import accepted\n"
        "listener = Listener(('127.0.0.1', 0)); print(listener.address[1], flush=True)\n"
        "connection = accepted(listener.accept(), RunTls(Path(sys.argv[1])).server_context())\n"
        "connection.send('here'); signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tls.directory)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": child_python_path()},
    ) as child:
        assert child.stdout is not None
        with connected("127.0.0.1", int(child.stdout.readline()), tls) as connection:
            assert connection.recv() == "here"
            child.kill()
            with pytest.raises(EOFError):
                connection.recv()


def test_a_caller_without_a_certificate_of_the_run_is_refused(tls: RunTls, tmp_path: Path) -> None:
    with run_tls(tmp_path / "other") as other, Listener(("127.0.0.1", 0)) as listener:
        address = ("127.0.0.1", int(listener.address[1]))
        for context in (other.client_context(), None):

            def call(context: ssl.SSLContext | None = context) -> None:
                with socket.create_connection(address, timeout=60) as plain:
                    if context is None:
                        plain.sendall(b"\0\0\0\4who?")
                    else:
                        context.check_hostname = False
                        context.verify_mode = ssl.CERT_NONE
                        context.wrap_socket(plain).close()

            caller = threading.Thread(target=call)
            caller.start()
            with pytest.raises(ssl.SSLError):
                accepted(listener.accept(), tls.server_context())
            caller.join()
