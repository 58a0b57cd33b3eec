from check_docstrings import findings

_MODULE = '''
def f(a, b, c, d):
    """Returns something.

    Args:
        a: Of the run.
        b: Those that were found when the run began.
        c: Maximum time in seconds
            for all of them.

    Raises:
        ValueError: No.
    """


class C:
    """A class.

    Attributes:
        d: A name.
    """

    key: str
'''


def test_entries_that_say_nothing_are_found() -> None:
    found = list(findings("m.py", _MODULE))
    assert [each.split(":")[1] for each in found] == ["6", "7", "20"]
    assert "'Of the run.' has fewer than 5 words" in found[0]
    assert "'Those that were found when the run began.' begins without a noun" in found[1]
