"""Agents of other people's frameworks, each with the framework's default settings.

`python agent_programs.py NAME` solves the task on its standard input with the model at
`OPENAI_BASE_URL`, as `CommandAgent` starts a program, and posts the reward. It runs in an
environment that has the frameworks and nothing of Treadle.
"""

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


def openai_agents(question: str) -> str:
    """The Agents SDK of OpenAI: tools are strict."""
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    agent = Agent(name="calculator", model="policy", tools=[function_tool(multiply)])
    return str(Runner.run_sync(agent, question).final_output)


def openai_agents_responses(question: str) -> str:
    """The Agents SDK as it comes: it speaks the Responses API, here as a stream."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="calculator", model="policy", tools=[function_tool(multiply)])

    async def solve() -> str:
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(solve())


def anthropic(question: str) -> str:
    """Anthropic's client, with what coding agents send: a turn as a stream, and a plain one."""
    from anthropic import Anthropic

    client = Anthropic()
    cached: Any = {"type": "ephemeral"}
    tool: Any = {
        "name": "multiply",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "cache_control": cached,
    }
    ask: Any = {
        "model": "claude-sonnet-4-5",
        "max_tokens": 2048,
        "system": [{"type": "text", "text": "You calculate.", "cache_control": cached}],
        "tools": [tool],
        "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"},
    }
    messages: list[Any] = [{"role": "user", "content": question}]
    with client.messages.stream(messages=messages, **ask) as stream:
        first = stream.get_final_message()
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and first.usage.input_tokens > 0
    product = multiply(**call.input)
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(product)}
    messages.append({"role": "user", "content": [result]})
    counted = client.messages.count_tokens(
        model="claude-sonnet-4-5", system=ask["system"], tools=[tool], messages=messages
    )
    second = client.messages.create(messages=messages, **ask)
    assert second.usage.input_tokens > first.usage.input_tokens and counted.input_tokens > 0
    return str(second.content[0].text)


def pydantic_ai(question: str) -> str:
    """Pydantic AI with a typed output: tools are strict and a choice is required."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    class Answer(BaseModel):
        number: int

    agent = Agent(OpenAIChatModel("policy"), output_type=Answer, tools=[multiply])
    return str(agent.run_sync(question).output.number)


def smolagents(question: str) -> str:
    """Hugging Face's smolagents: a choice is required."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"])
    agent = ToolCallingAgent(tools=[tool(multiply)], model=model, verbosity_level=0)
    return str(agent.run(question))


def litellm(question: str) -> str:
    """LiteLLM: the history has keys that it added."""
    from litellm import completion

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": schema}}]
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer = completion("openai/policy", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = multiply(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def langchain(question: str) -> str:
    """LangChain's OpenAI model in LangGraph's agent."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="policy"), [tool(multiply)])
    found = agent.invoke({"messages": [("user", question)]})
    return str(found["messages"][-1].content)


def autogen(question: str) -> str:
    """Microsoft's AutoGen: users have names."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def run() -> str:
        client = OpenAIChatCompletionClient(
            model="policy",
            model_info={
                "family": "unknown",
                "function_calling": True,
                "json_output": True,
                "structured_output": True,
                "vision": False,
            },
        )
        agent = AssistantAgent(
            "calculator", model_client=client, tools=[multiply], reflect_on_tool_use=True
        )
        result = await agent.run(task=question)
        return str(getattr(result.messages[-1], "content", ""))

    return asyncio.run(run())


AGENTS: dict[str, Callable[[str], str]] = {
    agent.__name__: agent
    for agent in (
        *(anthropic, autogen, langchain, litellm, openai_agents, openai_agents_responses),
        *(pydantic_ai, smolagents),
    )
}


def main() -> None:
    """Solves the task, and posts whether the answer is right."""
    task = json.load(sys.stdin)
    answer = AGENTS[sys.argv[1]](task["messages"][0]["content"])
    body = json.dumps({"reward": float("42" in answer)}).encode()
    request = urllib.request.Request(os.environ["TREADLE_REWARD_URL"], body)
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    urllib.request.urlopen(request).close()


if __name__ == "__main__":
    main()
