import json
from pathlib import Path

import pytest

from treadle.conformance.client.checkpoint import read_checkpoint
from treadle.conformance.main import main, parser
from treadle.conformance.settings import Unusable, resolve, skipped_parts, write_rotated
from treadle.rollout.v1 import server_service_pb2 as srv


def write_checkpoint(directory: Path) -> Path:
    directory.mkdir()
    header = json.dumps(
        {
            "matrix": {"dtype": "F32", "shape": [3, 1], "data_offsets": [0, 12]},
            "vector": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
        }
    ).encode()
    data = b"aaaabbbbccccddddeeee"
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


def test_the_second_set_of_weights_has_its_rows_rotated(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "first")
    (source / "model.safetensors").chmod(0o400)
    second = read_checkpoint(write_rotated(source, tmp_path / "second"))
    assert [bytes(tensor.data) for tensor in second] == [b"bbbbccccaaaa", b"ddddeeee"]
    first = read_checkpoint(source)
    assert [bytes(tensor.data) for tensor in first] == [b"aaaabbbbcccc", b"ddddeeee"]
    assert [tensor.spec for tensor in first] == [tensor.spec for tensor in second]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "/nowhere has no \\*.safetensors"),
        (["--files", "/nowhere"], "--files /nowhere is not a directory"),
        (["--ca", "/nowhere/ca.pem"], "--ca /nowhere/ca.pem: No such file"),
        (["--token-file", "/nowhere/token"], "--token-file /nowhere/token: No such file"),
        (
            ["--json", "/nowhere/x.json"],
            "--json /nowhere/x.json: directory /nowhere does not exist",
        ),
    ],
)
def test_a_path_that_is_of_no_use_is_named(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    options = parser().parse_args(["--address", "127.0.0.1:1", *arguments])
    with pytest.raises(Unusable, match=message):
        resolve(options, tmp_path / "rotated")


def test_why_a_part_does_not_run_is_told(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "weights")
    options = parser().parse_args(["--address", "127.0.0.1:1", "--weights", str(weights)])
    settings = resolve(options, tmp_path / "rotated")
    assert skipped_parts(settings, srv.GetServerInfoResponse()) == {
        "model": "needs the model that the server serves: set --model",
        "group": "the server joins no collective groups",
    }
    assert settings.target.checkpoints == (weights, tmp_path / "rotated")


def test_help_is_there_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "--token-file" in capsys.readouterr().out
