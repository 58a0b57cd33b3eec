import contextlib
import ssl
import stat
from pathlib import Path

import pytest

from treadle.agent_loop.child_process import SERVER_NAME
from treadle.trainer.launch.run_tls import RunTls, run_tls, write_private


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Lets both sides shake hands in memory; raises what either of them finds wrong."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(3):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert [side.version() for side in sides] == ["TLSv1.3", "TLSv1.3"]


def test_only_processes_of_the_run_hear_each_other(tmp_path: Path) -> None:
    with run_tls(tmp_path / "one") as one, run_tls(tmp_path / "other") as other:
        _handshake(one.server_context(), one.client_context())
        with pytest.raises(ssl.SSLCertVerificationError):
            _handshake(other.server_context(), one.client_context())
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.load_verify_locations(one.roots)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE"):
            _handshake(one.server_context(), stranger)


def test_the_files_are_private_and_end_with_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    directory.mkdir()
    (directory / "key.pem").write_text("of a run that was killed")
    (directory / "key.pem").chmod(0o644)
    with run_tls(directory) as tls:
        assert sorted(tls.read()) == [tls.certificate, tls.key, tls.roots]
        assert {stat.S_IMODE(path.stat().st_mode) for path in tls.read()} == {0o600}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert b"PRIVATE" in tls.key.read_bytes()
        on_a_node = RunTls(tmp_path / "node")
        for path, content in tls.read().items():
            copy = on_a_node.directory / path.name
            write_private(copy, content)
            before = copy.stat().st_ino
            write_private(copy, content)
            assert copy.stat().st_ino == before  # a second process there leaves it alone
        _handshake(on_a_node.server_context(), tls.client_context())
    assert not directory.exists()
