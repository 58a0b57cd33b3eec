import check_names
import pytest
from check_names import findings, is_checked


def test_a_name_of_two_classes_is_found_at_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_names, "SHARED", {"Clock": "", "Tag": ""})
    modules = [
        ("b.py", "import x\n\n\nclass Plan(Base):\n    class Row: ...\n"),
        ("a.py", "class Plan:\n    pass\n\n\nclass Clock: ...\nclass _Row: ...\nclass Tag: ...\n"),
        ("c.py", "class Clock: ...\nclass Row: ...\nclass _Row: ...\n"),
    ]
    first, second, third = findings(modules)
    assert first == "a.py:1: Plan is also a class of b.py:4: give one of them another name"
    assert second == "b.py:4: Plan is also a class of a.py:1: give one of them another name"
    assert third.startswith("a.py:7: Tag is the only one now")


def test_tests_are_free() -> None:
    assert is_checked("packages/p/treadle/p/plan.py")
    for path in ("packages/p/plan_test.py", "packages/p/testing/plan.py", "build-support/plan.py"):
        assert not is_checked(path)
