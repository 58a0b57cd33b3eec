"""Arguments of the endpoint as a process; tests/e2e starts it."""

from pathlib import Path

import pytest

from treadle.agent_loop.proxy.__main__ import main

NEEDED = ("--replicas", "127.0.0.1:1", "--tokenizer", "/no/such/directory")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said of wrong arguments."""
    with pytest.raises(SystemExit) as ended:
        main([*NEEDED, *map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu7", ""])
def test_plain_text_beyond_loopback_is_refused(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    said = refusal(capsys, "--host", host)
    assert "is reachable from other machines" in said
    assert "--insecure-allow-plaintext-beyond-loopback" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("--host", "::1"),
        ("--host", "0.0.0.0", "--insecure-allow-plaintext-beyond-loopback"),
        ("--host", "0.0.0.0", "--tls-certificate", "c", "--tls-key", "k"),
    ],
)
def test_loopback_tls_and_a_word_of_the_user_are_accepted(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main([*NEEDED, *arguments]) == 1
    assert "holds no tokenizer.json" in capsys.readouterr().err  # What comes after the arguments.


def test_secrets_that_cannot_be_used_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert "give both or neither" in refusal(capsys, "--tls-key", empty)
    assert f"{empty} is empty" in refusal(capsys, "--replica-token-file", empty)
    assert "No such file" in refusal(capsys, "--replica-token-file", tmp_path / "none")
    assert "is for --replica-tls" in refusal(capsys, "--replica-certificates", empty)
