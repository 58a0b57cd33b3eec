"""The files of a run's certificates, and the contexts of TLS that use them.

The certificate names `SERVER_NAME` instead of hosts: a process that has the key belongs to the run,
on any host.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SERVER_NAME", "RunTls"]

SERVER_NAME = "run.treadle.internal"
"""The name in the certificate of every process of a run."""


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
        return self.directory / "certificate.pem"

    @property
    def key(self) -> Path:
        """PEM file of its private key."""
        return self.directory / "key.pem"

    @property
    def roots(self) -> Path:
        """PEM file of the authority's certificate."""
        return self.directory / "roots.pem"

    def read(self) -> Mapping[Path, bytes]:
        """Returns the content of each file of the directory, by its path."""
        return {path: path.read_bytes() for path in sorted(self.directory.glob("[!.]*"))}

    def server_context(self) -> ssl.SSLContext:
        """Returns how a process of the run accepts connections: from the run's processes only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._with_files(context)

    def client_context(self) -> ssl.SSLContext:
        """Returns how a process of the run connects to another one, under `SERVER_NAME`."""
        return self._with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _with_files(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.roots)
        return context
