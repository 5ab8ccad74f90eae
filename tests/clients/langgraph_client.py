"""A named agent of LangGraph, with a tool and a memory: two turns.

python langgraph_client.py URL MODEL QUESTION SECOND_QUESTION
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.prebuilt import create_react_agent
from pydantic import SecretStr


def get_time(city: str) -> str:
    """The time of day in a city."""
    return "08:30"


url, model, question, second_question = sys.argv[1:]
agent = create_react_agent(
    ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr("none"), model=model),
    [get_time],
    prompt="Be brief.",
    name="clock",
    checkpointer=MemorySaver(),
)
thread: Any = {"configurable": {"thread_id": "1"}}
answers = []
for asked in (question, second_question):
    state = agent.invoke({"messages": [("user", asked)]}, thread)
    answers.append(state["messages"][-1].text)
print(json.dumps(answers))
