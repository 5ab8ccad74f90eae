"""LiteLLM as its documentation shows it: a tool, its result, and a second turn as a stream.

python litellm_client.py URL MODEL QUESTION SECOND_QUESTION
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time of day in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]

url, model, question, second_question = sys.argv[1:]
settings: dict[str, Any] = {
    "model": f"openai/{model}",
    "api_base": f"{url}/v1",
    "api_key": "none",
    "tools": TOOLS,
}
messages: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": question},
]
answer = litellm.completion(messages=messages, **settings).choices[0].message
messages.append(answer)
for call in answer.tool_calls:
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name}
    messages.append({**result, "content": "08:30"})
answer = litellm.completion(messages=messages, **settings).choices[0].message
messages += [answer, {"role": "user", "content": second_question}]
stream = litellm.completion(messages=messages, stream=True, **settings)
second = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
print(json.dumps([answer.content, second]))
