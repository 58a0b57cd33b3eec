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


_SPEECH = '''"""What a server says.

The user says what it does; `knows` is a name.
"""


def f():
    r"""Returns what
    the file tells."""
    text = "it knows nothing"


def g():
    """Asks the model; it asks for more."""
'''


def test_verbs_of_people_are_found_where_code_has_them() -> None:
    found = [each.split(" in ")[0] for each in findings("m.py", _SPEECH)]
    assert found == ["m.py:1: 'says'", "m.py:8: 'tells'", "m.py:14: 'asks'"]
