"""An assistant of AutoGen with a tool, whose result it reflects on: two turns.

python autogen_client.py URL MODEL QUESTION SECOND_QUESTION
"""

from __future__ import annotations

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def get_time(city: str) -> str:
    """The time of day in a city."""
    return "08:30"


async def main(url: str, model: str, *questions: str) -> None:
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": ModelFamily.UNKNOWN,
        },
    )
    agent = AssistantAgent(
        "clock",
        model_client=client,
        tools=[get_time],
        system_message="Be brief.",
        reflect_on_tool_use=True,
    )
    answers = []
    for question in questions:
        result = await agent.run(task=question)
        answers.append(result.messages[-1].to_text())
    await client.close()
    print(json.dumps(answers))


asyncio.run(main(*sys.argv[1:]))
