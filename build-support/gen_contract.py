"""Regenerates the checked-in gRPC stubs from the .proto files.

`./pants run build-support/gen_contract.py` writes them into proto/, from the root of the
repository. The drift test calls `generate` into a scratch folder and compares.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path("proto")


def generate(proto_root: Path, out: Path) -> list[Path]:
    """Compiles every .proto below `proto_root` into `out` and returns the files made, sorted.

    Raises:
        SystemExit: There is no .proto file, or protoc rejects one and has printed why.
    """
    protos = sorted(p.relative_to(proto_root).as_posix() for p in proto_root.rglob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto file below {proto_root.absolute()}")
    out.mkdir(parents=True, exist_ok=True)
    code = protoc.main(
        [
            "protoc",
            f"-I{proto_root}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *protos,
        ]
    )
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")
    return sorted(p for p in out.rglob("*_pb2*.py*") if p.suffix in (".py", ".pyi"))


def main() -> None:
    """Writes the stubs beside their .proto files."""
    for path in generate(PROTO_ROOT, PROTO_ROOT):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
