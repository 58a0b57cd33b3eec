import logging

import pytest

from treadle.rollout_server.engines.vllm_stock.versions import check_version


@pytest.mark.parametrize("version", ["0.27.1", "0.9.0+cpu", "dev"])
def test_a_release_that_is_too_old_is_refused_with_those_that_are_taken(version: str) -> None:
    wanted = rf"vLLM is {version.replace('+', '.')}, but .* needs 0\.28 or newer .*0\.28 to 0\.32"
    with pytest.raises(ValueError, match=wanted):
        check_version(version)


@pytest.mark.parametrize(
    ("version", "warns"),
    [("0.28.0", False), ("0.32.0+cpu", False), ("0.33.1", True), ("1.0", True)],
)
def test_a_release_that_is_not_tested_is_taken_with_a_warning(
    version: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version)
    assert bool(caplog.messages) == warns
