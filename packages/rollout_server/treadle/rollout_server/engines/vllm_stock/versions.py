"""The releases of vLLM that the engine ``vllm_stock`` takes.

Invariant: pure, and does not import vLLM.
"""

import logging
import re

from treadle.rollout_server.engines.vllm.startup import INSTALL

NAME = "vllm_stock"
OLDEST = (0, 28)
"""The first release with the calls that `engine.py` makes."""
TESTED = ((0, 28), (0, 32))
"""The first and the last release for which the conformance kit was run."""
_log = logging.getLogger(__name__)


def check_version(version: str) -> None:
    """Checks a release of vLLM; logs a warning for one that is newer than those tested.

    Raises:
        ValueError: It is older than 0.28, or its version is not a number.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = (".".join(map(str, release)) for release in TESTED)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < OLDEST:
        raise ValueError(
            f"vLLM is {version}, but engine {NAME!r} needs {'.'.join(map(str, OLDEST))} or newer "
            f"(tested with {first} to {last}): {INSTALL}"
        )
    if release > TESTED[1]:
        _log.warning("vLLM is %s; engine %r is tested with %s to %s", version, NAME, first, last)
