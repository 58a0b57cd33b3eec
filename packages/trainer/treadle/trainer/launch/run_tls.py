"""The certificates of a run on several hosts.

The driver makes an authority for each attempt of a run, and with it one certificate for all of its
processes, as servers and as clients. A process that has the key belongs to the run, on any host:
the certificate names `SERVER_NAME` instead of hosts, which are not known before Ray has placed a
process.

Invariants: the authority's key is never written, so nothing else can be certified. The other files
can be read by the present user only, on each node, and are gone when the run ends; nothing trusts
them afterwards.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop.run_certificate import CERTIFICATE, KEY, ROOTS, SERVER_NAME

__all__ = ["RunTls", "run_tls", "write_private"]


@dataclass(frozen=True, slots=True)
class RunTls:
    """The files of a run's certificates; picklable.

    Attributes:
        directory: Absolute; the same path on every node.
    """

    directory: Path

    @property
    def certificate(self) -> Path:
        """PEM file of the certificate of every process."""
        return self.directory / CERTIFICATE

    @property
    def key(self) -> Path:
        """PEM file of its private key."""
        return self.directory / KEY

    @property
    def roots(self) -> Path:
        """PEM file of the authority's certificate."""
        return self.directory / ROOTS

    def read(self) -> Mapping[Path, bytes]:
        """Returns the content of each file of the directory, by its path."""
        return {path: path.read_bytes() for path in sorted(self.directory.glob("[!.]*"))}


@contextmanager
def run_tls(directory: Path) -> Iterator[RunTls]:
    """Makes the certificates of a run; afterwards the directory is gone.

    Args:
        directory: Where the files go. What a killed run left there is replaced.
    """
    # Its library belongs to the extra `ray`: runs on one machine do without.
    from treadle.trainer.launch.certificates import make_certificates

    made = RunTls(directory.absolute())
    _remove(made.directory)
    contents = make_certificates(SERVER_NAME)
    try:
        for path, content in zip((made.roots, made.certificate, made.key), contents, strict=True):
            write_private(path, content)
        yield made
    finally:
        _remove(made.directory)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only the present user can read, unless it holds the content already.

    It appears complete. Its directory is made, likewise private, if it is missing.
    """
    with suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The directory may be one for all nodes.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)


def _remove(directory: Path) -> None:
    if directory.is_dir():
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
