"""What rendering a turn's answer costs, as a conversation grows to 100 turns of tool calls.

Ours extends the transcript by what is new (`HfRenderer.extend` and `Transcript.observe`); the copy
of all ids, which the generator is given, is measured apart. The other renders and tokenises the
whole conversation with `apply_chat_template` at every turn, as agent loops do that keep messages.
The two take turns on the same conversations, and at every turn their ids are compared: where they
differ is drift, which must be 0. Printed are the median and the range over the rounds, in
microseconds of processor time for one turn (set TOKENIZERS_PARALLELISM=false, so that one thread
does all of it).

    ./pants run benchmarks/turn_rendering.py -- TOKENIZER [--rounds 5] [--out results.json]

TOKENIZER is a model directory, as that of Qwen2.5; without it, the demo's in this repository.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from treadle.agent_loop import (
    Completion,
    FinishReason,
    Message,
    TokenChunk,
    ToolCall,
    ToolSpec,
    Transcript,
)
from treadle.agent_loop.hf import HfRenderer

_DEMO = Path(__file__).parents[1] / "packages/trainer/treadle/trainer/demo/calculator/model"
_TURNS, _SHOWN = 100, (1, 10, 50, 100)
_TOOL = ToolSpec(
    name="search",
    description="Searches an encyclopedia.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
    },
)
_START = (
    Message(role="system", content="Answer with the tools' help."),
    Message(role="user", content="Which river is longer, the Elbe or the Rhine?"),
)


def _turn(index: int) -> tuple[str, Message]:
    """The text that the model writes, and the answer of the tool: about 200 tokens."""
    call = json.dumps({"name": "search", "arguments": {"query": f"river {index}"}})
    text = f"I look up river {index}.\n<tool_call>\n{call}\n</tool_call>"
    result = " ".join(f"Fact {index}.{i}: it flows {i * 7} km to the sea." for i in range(12))
    return text, Message(role="tool", content=result, tool_call_id="call_0", name="search")


def _said(index: int) -> Message:
    arguments = {"query": f"river {index}"}
    call = ToolCall(id="call_0", name="search", arguments=arguments)
    return Message(role="assistant", content=f"I look up river {index}.", tool_calls=(call,))


@dataclass(slots=True)
class Round:
    """Microseconds of each turn, turns whose ids differ, and the ids at the end."""

    ours_us: list[float] = field(default_factory=list)
    copy_us: list[float] = field(default_factory=list)
    whole_us: list[float] = field(default_factory=list)
    drift: int = 0
    tokens: int = 0


def one_round(renderer: HfRenderer, tokenizer: Any) -> Round:
    """One conversation, in both ways."""
    messages, took = list(_START), Round()
    transcript = Transcript(renderer.render(messages, tools=[_TOOL]).ids)
    for index in range(_TURNS):
        text, answer = _turn(index)
        ids = (*renderer.encode(text), renderer.stop_token_ids[0])
        chunk = TokenChunk(token_ids=ids, logprobs=(0.0,) * len(ids), weight_version=1)
        transcript.sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
        messages.append(_said(index))
        before = transcript.ids
        began = time.thread_time()
        new = renderer.extend(before, [answer], tools=[_TOOL], history=messages)
        transcript.observe(new.ids)
        took.ours_us.append((time.thread_time() - began) * 1e6)
        began = time.thread_time()
        ours = transcript.ids
        took.copy_us.append((time.thread_time() - began) * 1e6)
        messages.append(answer)
        dicts = renderer.template.dicts(messages)
        began = time.thread_time()
        whole = tokenizer.apply_chat_template(
            dicts, tools=[_TOOL.as_schema()], add_generation_prompt=True, return_dict=False
        )
        took.whole_us.append((time.thread_time() - began) * 1e6)
        took.drift += ours != tuple(whole)
    took.tokens = len(transcript)
    return took


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """All rounds, after one to warm up."""
    renderer = HfRenderer.from_directory(directory)
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    results = [one_round(renderer, tokenizer) for _ in range(rounds + 1)][1:]
    return {
        "tokens": results[0].tokens,
        "drift": sum(r.drift for r in results),
        "turns": {
            turn: {
                "ours_us": _spread([r.ours_us[turn - 1] for r in results]),
                "copy_us": _spread([r.copy_us[turn - 1] for r in results]),
                "whole_us": _spread([r.whole_us[turn - 1] for r in results]),
                "ratio": _spread([r.whole_us[turn - 1] / r.ours_us[turn - 1] for r in results]),
            }
            for turn in _SHOWN
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    """Prints the table; writes the numbers with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path, nargs="?", default=_DEMO)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.tokenizer, arguments.rounds)
    print(f"{result['tokens']} tokens after {_TURNS} turns; turns that drifted: {result['drift']}")
    print(f"{'turn':>4}{'ours, us':>24}{'copy, us':>20}{'whole, us':>28}{'ratio':>20}")
    for turn, row in result["turns"].items():
        cells = (f"{c['median']:.0f} ({c['least']:.0f} to {c['most']:.0f})" for c in row.values())
        ours, copy, whole, ratio = cells
        print(f"{turn:>4}{ours:>24}{copy:>20}{whole:>28}{ratio:>20}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
