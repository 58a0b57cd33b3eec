"""Tests of text that is safe to show."""

import logging
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.tracing.inert import InertFormatter, inert


@settings(max_examples=50)
@given(
    st.text(
        st.sampled_from("aé中\n\t\x00\x1b\x7f\x9b\u200b\u202e\u2028\ufeff\U000e0001"), max_size=20
    )
)
def test_inert_text_has_no_harmful_character_and_is_not_changed_again(text: str) -> None:
    shown = inert(text)
    assert not {c for c in shown if unicodedata.category(c)[0] in "CZ"} - {"\n", " "}
    assert inert(shown) == shown


def test_a_log_line_has_no_control_sequence_nor_has_its_traceback() -> None:
    try:
        raise ValueError("\x1b]52;c;cm0=\x07")
    except ValueError as error:
        given = (type(error), error, error.__traceback__)
        record = logging.LogRecord("a", logging.WARNING, "", 1, "%s", ("\x1b[2J",), given)
    line = InertFormatter("%(message)s").format(record)
    assert line.startswith("\\x1b[2J\nTraceback")
    assert line.endswith("ValueError: \\x1b]52;c;cm0=\\x07")
