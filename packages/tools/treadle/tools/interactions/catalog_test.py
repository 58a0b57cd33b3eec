from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tools.interactions import Gsm8kInteraction, load_interactions

VERL = """
interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""


def test_verls_own_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "interactions.yaml"
    file.write_text(VERL)
    interactions = load_interactions(file)
    assert list(interactions) == ["gsm8k"]
    assert isinstance(interactions["gsm8k"], Gsm8kInteraction)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (VERL.replace("interaction:", "interactions:"), "unknown key 'interactions', did you mean"),
        ("interaction: []", "must be a list with at least one interaction"),
        (VERL.replace("    config: {}", "    extra: 1"), r"interaction\[0\]: unknown key 'extra'"),
        (VERL.replace("config: {}", "config: {mode: x}"), r"interaction\[0\]: mode is 'x'"),
        (VERL + VERL.partition("interaction:")[2], "there already is an interaction 'gsm8k'"),
        (
            VERL.replace("gsm8k_interaction", "weather_interaction"),
            r"is an interaction of verl that does not exist here; of verl's interactions there are",
        ),
        (
            VERL.replace(
                "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "pathlib.PurePath"
            ),
            "keyword argument|takes no|unexpected",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, content: str, text: str
) -> None:
    file = tmp_path / "interactions.yaml"
    file.write_text(content)
    with pytest.raises(SetupError, match=text) as raised:
        load_interactions(file)
    assert str(file) in str(raised.value)
