import subprocess
import sys
from typing import Any

import pytest

from treadle.policy.client.types import TrainSequence

GOOD: dict[str, Any] = {
    "ids": (1, 2, 3),
    "loss_mask": (False, False, True),
    "advantages": (0.0, 0.0, 1.0),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": (1,), "loss_mask": (False,), "advantages": (0.0,)}, "at least 2 ids, got 1"),
        ({"advantages": (1.0,)}, "advantages has 1 entries for 3 ids"),
        ({"returns": (0.0,)}, "returns has 1 entries for 3 ids"),
        ({"old_logprobs": (0.0,) * 4}, "old_logprobs has 4 entries for 3 ids"),
        ({"loss_mask": (True, True, True)}, "first token has no log-probability"),
    ],
)
def test_a_sequence_that_is_not_aligned_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSequence(**(GOOD | change))


def test_the_driver_needs_no_torch() -> None:
    modules = (
        *("backend", "client.batch", "client.group", "client.types", "weight_sync.publisher"),
        *("config.policy", "config.algorithm", "algorithms.advantages"),
    )
    imports = ";".join(f"import treadle.policy.{m}" for m in modules)
    code = f"import sys; sys.path[:] = {sys.path!r}; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
