"""The checked-in stubs equal what grpcio-tools generates from the .proto files."""

from pathlib import Path

from gen_contract import generate

PROTO = Path("proto")


def test_checked_in_stubs_are_current(tmp_path: Path) -> None:
    expected = {
        p.relative_to(tmp_path).as_posix(): p.read_text() for p in generate(PROTO, tmp_path)
    }
    stubs = [p for p in PROTO.rglob("*_pb2*.py*") if p.suffix in (".py", ".pyi")]
    present = {p.relative_to(PROTO).as_posix(): p.read_text() for p in stubs}
    assert present == expected, "regenerate with: ./pants run build-support/gen_contract.py"
