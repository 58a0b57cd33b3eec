"""Fakes for tests: strict, deterministic, and held to the contract suite of the real generators.

This folder needs the standard library only. `generator_contract` is the suite for generators.
"""

from treadle.agent_loop.testing.byte_renderer import ByteRenderer
from treadle.agent_loop.testing.echo import EchoGenerator
from treadle.agent_loop.testing.fake_clock import FakeClock
from treadle.agent_loop.testing.scripted import Request, ScriptedGenerator, reply
from treadle.agent_loop.testing.scripted_interaction import ScriptedInteraction
from treadle.agent_loop.testing.scripted_tool import ScriptedTool

__all__ = [
    "ByteRenderer",
    "EchoGenerator",
    "FakeClock",
    "Request",
    "ScriptedGenerator",
    "ScriptedInteraction",
    "ScriptedTool",
    "reply",
]
