"""What a child prints reaches the terminal as text only."""

import asyncio
import sys

import pytest

from treadle.agent_loop.child_output import shown_output

_PRINTS = r"print('sm\xf8rbr\xf8d \x1b]0;PWN\x07\x1b[2J done')"


@pytest.mark.asyncio
async def test_the_output_of_a_child_is_shown_without_control_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found by an attacker: servers wrote to the terminal as they liked."""
    async with shown_output() as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-X", "utf8", "-c", _PRINTS, stdout=file, stderr=file
        )
        assert await process.wait() == 0
    shown = capsys.readouterr().err
    assert "sm\u00f8rbr\u00f8d \\x1b]0;PWN\\x07\\x1b[2J done\n" in shown
    assert "\x1b" not in shown
