"""The certificate that all processes of a run on several hosts share, as files of one directory.

It names `SERVER_NAME` instead of hosts: a process that has the key belongs to the run, on any host.
"""

from typing import Final

__all__ = ["CERTIFICATE", "KEY", "ROOTS", "SERVER_NAME"]

SERVER_NAME: Final = "run.treadle.internal"
CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"
"""The certificate's private key."""
ROOTS: Final = "roots.pem"
"""The certificate of the run's authority, which verifies the other one."""
