"""The policy backend on Megatron-core. The only package that imports `megatron`."""

import sys
from typing import Final

__all__ = ["VERSION", "VERSIONS"]

VERSIONS: Final = ("0.16.1", "0.19.2")
"""The versions of Megatron-core that the backend works with; their internals are not a stable
API."""
VERSION: Final = VERSIONS[0] if sys.version_info < (3, 12) else VERSIONS[1]
"""The version to install; every release from 0.17 on needs Python 3.12."""
