"""langchain-openai: `with_structured_output` by all of its methods.

python langchain_structured_client.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Literal, Optional

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr


class Day(BaseModel):
    mood: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


class Note(BaseModel):
    """Any object is one."""

    note: Optional[str] = None


url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr("none"), model=model)
answers = []
for method, kind in (("function_calling", Day), ("json_mode", Note), ("json_schema", Day)):
    answer = chat.with_structured_output(kind, method=method).invoke("How was it? In JSON.")
    answers.append(type(answer).__name__)
print(json.dumps(answers))
