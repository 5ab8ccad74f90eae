"""instructor: answers as types, by a forced call, by a JSON object, and by a JSON schema.

python instructor_client.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Literal, Optional

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Day(BaseModel):
    mood: Literal["good", "bad"]
    stars: Literal[1, 2, 3]


class Note(BaseModel):
    """Any object is one."""

    note: Optional[str] = None


url, model = sys.argv[1:]
answers = []
for mode, kind in (
    (instructor.Mode.TOOLS, Day),
    (instructor.Mode.JSON, Note),
    (instructor.Mode.JSON_SCHEMA, Day),
):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How was it?"}],
        response_model=kind,
        max_retries=0,
    )
    answers.append(type(answer).__name__)
print(json.dumps(answers))
