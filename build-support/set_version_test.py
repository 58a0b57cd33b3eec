import datetime

import pytest
import set_version

TODAY = datetime.date(2026, 11, 23)
PYPROJECT = """\
[project]
version = "0.1.0"
dependencies = ["grpcio>=1.76", "treadle-agent-loop[hf]~=0.1.0", "treadle-proto~=0.1.0"]
"""


def test_a_package_and_its_siblings_get_one_version() -> None:
    assert set_version.with_version(PYPROJECT, "0.2.0.dev0") == (
        '[project]\nversion = "0.2.0.dev0"\n'
        'dependencies = ["grpcio>=1.76", "treadle-agent-loop[hf]~=0.2.0.dev0", '
        '"treadle-proto~=0.2.0.dev0"]\n'
    )


def test_a_release_dates_what_was_unreleased_and_the_next_version_opens_it_again() -> None:
    before = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0 (2026-01-01)\n"
    released = set_version.with_heading(before, "0.2.0", TODAY)
    assert released == before.replace("## Unreleased", "## 0.2.0 (2026-11-23)")
    after = set_version.with_heading(released, "0.3.0.dev0", TODAY)
    assert after == released.replace("## 0.2.0", "## Unreleased\n\n## 0.2.0")
    assert set_version.with_heading(after, "0.3.0.dev1", TODAY) == after


def test_a_release_without_a_changelog_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no section '## Unreleased' to release as 0\.2\.0"):
        set_version.with_heading("# Changelog\n\n## 0.1.0 (2026-01-01)\n", "0.2.0", TODAY)
