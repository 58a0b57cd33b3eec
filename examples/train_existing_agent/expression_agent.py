"""An ordinary agent: OpenAI's client, a tool, a loop. It does not know about training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python expression_agent.py "Compute 3 @ 2 + 4."
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 4
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Apply an operator to two numbers.",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer"},
                    "operand": {"type": "string"},
                },
                "required": ["a", "b", "operand"],
                "type": "object",
            },
        },
    }
]


def calculate(a: int, b: int, operand: str) -> str:
    """Runs the tool."""
    match operand:
        case "+":
            return str(a + b)
        case "-":
            return str(a - b)
        case "*":
            return str(a * b)
        case "@":
            return str(3 * a - 2 * b)
    return f"Error: operand is {operand!r}; expected one of + - * @"


async def solve(client: AsyncOpenAI, messages: list[Any]) -> str:
    """Lets the model answer, with the tool at hand; returns its last words."""
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, tools=TOOLS
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            if call.type != "function":
                continue
            try:
                result = calculate(**json.loads(call.function.arguments))
            except TypeError as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def main(question: str) -> None:
    """Answers one question."""
    async with AsyncOpenAI() as client:
        sys.stdout.write(await solve(client, [{"role": "user", "content": question}]) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
