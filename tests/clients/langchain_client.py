"""langchain-openai with `bind_tools`: a tool, its result, and a second turn as a stream.

python langchain_client.py URL MODEL QUESTION SECOND_QUESTION
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


@tool
def get_time(city: str) -> str:
    """The time of day in a city."""
    return "08:30"


url, model, question, second_question = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr("none"), model=model)
with_tools = chat.bind_tools([get_time])
messages: list[Any] = [SystemMessage("Be brief."), HumanMessage(question)]
answer = with_tools.invoke(messages)
messages.append(answer)
messages += [get_time.invoke(call) for call in answer.tool_calls]
answer = with_tools.invoke(messages)
messages += [answer, HumanMessage(second_question)]
second = "".join(str(chunk.text) for chunk in with_tools.stream(messages))
print(json.dumps([answer.text, second]))
