from types import SimpleNamespace

import pytest

from treadle.rollout_server.engines.vllm.startup import load_cpu_kernels


def test_kernels_that_vllm_could_not_load_are_refused_with_the_cause_and_the_fix() -> None:
    platform = SimpleNamespace(import_kernels=lambda: None)  # It logs why, and goes on.
    with pytest.raises(ValueError, match=r"with torch \d.*install both together: pip install"):
        load_cpu_kernels(platform)
