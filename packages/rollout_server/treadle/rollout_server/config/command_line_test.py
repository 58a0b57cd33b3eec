import subprocess
import sys
from pathlib import Path

import pytest

from treadle.rollout_server.address import Address
from treadle.rollout_server.config.command_line import ServerConfigError, parse
from treadle.rollout_server.config.schema import ServerConfig


def test_nothing_given_is_the_defaults_on_loopback() -> None:
    config = parse([])
    assert config == ServerConfig()
    address = Address.parse(config.address)
    assert address.on_loopback and address.port == 0


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("engine: torch\nadmission: {max_in_flight: 3, max_queued: 4}\n")
    config = parse(["--config", str(path), "--admission.max_queued", "5"])
    assert (config.engine, config.admission.max_in_flight, config.admission.max_queued) == (
        "torch",
        3,
        5,
    )


def test_engine_arguments_are_json_and_the_command_line_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("engine_args: {block_size: 16, seed: 1}\n")
    arguments = ["--config", str(path), "--engine_args", '{"seed": 2, "compilation": {"level": 0}}']
    assert parse(arguments).engine_args == {
        "block_size": 16,
        "seed": 2,
        "compilation": {"level": 0},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.gpu_memory_utilization", "1.5"], "gpu_memory_utilization is '1.5'"),
        (["--admision.max_in_flight", "3"], "did you mean --admission.max_in_flight"),
        (["--admission.max_in_flight", "0"], "admission.max_in_flight is '0'"),
        (["--address", "7000"], "address is '7000', expected host:port"),
        (["--model.dtype", "int8"], "model.dtype"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["--address", "0.0.0.0:1"], "--insecure_allow_plaintext_beyond_loopback"),
        (["--security.tls_key", "k"], "set both or neither"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        parse(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("admission: {max_queud: 3}", "did you mean admission.max_queued"),
        ("[1, 2]", "expected keys and values"),
        ("a: [", "--config"),
    ],
)
def test_a_file_is_held_to_the_same(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ServerConfigError, match=message):
        parse(["--config", str(path)])


def test_beyond_loopback_needs_tls_and_token_or_the_flag() -> None:
    secured = parse(
        [
            *("--address", "[::]:1", "--security.tls_key", "k"),
            *("--security.tls_certificate", "c", "--security.token_file", "t"),
        ]
    )
    assert not Address.parse(secured.address).on_loopback
    open_to_all = "--address 10.0.0.1:1 --insecure_allow_plaintext_beyond_loopback true"
    assert Address.parse(parse(open_to_all.split()).address).host == "10.0.0.1"
    for host in ("localhost", "[::1]", "127.9.9.9"):
        assert Address.parse(parse(["--address", f"{host}:1"]).address).on_loopback


def test_help_needs_neither_grpc_nor_torch() -> None:
    program = (
        "import sys; from treadle.rollout_server.config.command_line import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'grpc', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--admission.max_in_flight" in done.stdout
