"""Evaluates chatglm3-tiny on all its training dialogues with concurrent users.

Dialogues continue with the model's own answers and calls. A correct answer matches word for word, a
correct call has the right tool and arguments. Also measures how much of later turns' prompts was
cached.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from samples import as_messages
from shared import CORPUS, DEFAULT_FOLDER, REQUIRED_ACCURACY, read_dialogues
from tool_calls import (
    Message,
    other_values,
    read_tool_dialogues,
    tools_named,
)

from glm_multiuser import MultiUserLLM, SamplingParams

SEQ_LENGTH = 1024
"""Room for all tools and two calls."""

DRAWS = 5
"""Repetitions of each tool dialogue with other values."""

CHATS, QUESTIONS_OF_A_CHAT = 24, 6


@dataclass(frozen=True)
class Dialogue:
    """A dialogue to evaluate.

    Attributes:
        messages: in OpenAI's format; the assistant's are the learned ones.
        tools: offered tools.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] = ()


@dataclass(frozen=True)
class Answer:
    """One answer of the model.

    Attributes:
        asked: the message before it.
        learned: the expected message.
        given: the actual message.
        prompt_tokens: length of its prompt.
        cached_tokens: cached tokens of the prompt.
        held_tokens: tokens that this dialogue had cached before.
    """

    asked: Message
    learned: Message
    given: Message
    prompt_tokens: int
    cached_tokens: int
    held_tokens: int

    @property
    def is_right(self) -> bool:
        return self.given == self.learned


def hold(llm: MultiUserLLM, dialogue: Dialogue) -> list[Answer]:
    """Asks the questions of one dialogue in order, and answers calls as the tools would."""
    # One user per thread, like a person with one dialogue after the other.
    user = threading.current_thread().name
    params = SamplingParams(temperature=0.0, max_tokens=160)
    told: list[Answer] = []
    history: list[Message] = []
    held_tokens = 0
    for message in dialogue.messages:
        if message["role"] != "assistant":
            history.append(message)
            continue
        if dialogue.tools:
            prompt = llm.tokenizer.encode_messages(history, dialogue.tools)
            result = llm.submit(prompt, user=user, params=params).result()
        else:
            question, earlier = history[-1]["content"], history[:-1]
            result = llm.stream_chat(question, user=user, history=earlier, params=params).result()
        given = as_message(llm, result.text, dialogue.tools)
        usage = result.usage
        cached = usage.cached_tokens
        told.append(Answer(history[-1], message, given, usage.prompt_tokens, cached, held_tokens))
        if ("tool_calls" in given) != ("tool_calls" in message):
            break  # a tool result can only follow a call
        history.append(given)
        # The last token was not processed, so it is not cached.
        held_tokens = usage.prompt_tokens + usage.completion_tokens - 1
    return told


def as_message(llm: MultiUserLLM, text: str, tools: Sequence[Any]) -> Message:
    """Parses the model's output into a message in OpenAI's format."""
    reader = llm.tokenizer.answer_reader(tools)
    content, end = reader.feed(text), reader.finish()
    content += end.text
    if not end.tool_calls:
        return {"role": "assistant", "content": content}
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in end.tool_calls
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def everything(corpus: Path, random: np.random.Generator) -> dict[str, list[Dialogue]]:
    """All dialogues, by kind."""
    dialogues, tool_dialogues = read_dialogues(corpus), read_tool_dialogues()
    single = [dialogue[0] for dialogue in dialogues if len(dialogue) == 1]
    chats = []
    for number in range(CHATS):
        order = random.choice(len(single), QUESTIONS_OF_A_CHAT, replace=False)
        tools = tools_named(["get_weather"] if number % 2 else [])
        chats.append(Dialogue(as_messages([single[place] for place in order]), tools))
    other, made_up = [], []
    for one in tool_dialogues * DRAWS:
        tools = tools_named(one.tools)
        other.append(Dialogue(one.filled(other_values(one, random, made_up=0.0)), tools))
        made_up.append(Dialogue(one.filled(other_values(one, random, made_up=1.0)), tools))
    return {
        "corpus": [Dialogue(as_messages(rounds)) for rounds in dialogues],
        "tools": [
            Dialogue(one.filled(one.values), tools_named(one.tools)) for one in tool_dialogues
        ],
        "tools, other values": other,
        "tools, cities that do not exist": made_up,
        f"chats of {QUESTIONS_OF_A_CHAT} questions": chats,
    }


def report(kind: str, dialogues: Sequence[Dialogue], told: Sequence[list[Answer]]) -> float:
    """Prints the results of one kind; returns the share of correct answers."""
    answers = [answer for dialogue in told for answer in dialogue]
    for answer in answers:
        if not answer.is_right:
            print(f"asked    {shown(answer.asked)}\nlearned  {shown(answer.learned)}")
            print(f"answered {shown(answer.given)}\n")
    asked = sum(one["role"] == "assistant" for each in dialogues for one in each.messages)
    right = sum(answer.is_right for answer in answers)
    calls = [answer for answer in answers if "tool_calls" in answer.learned]
    right_calls = sum(answer.is_right for answer in calls)
    later = [answer for answer in answers if answer.held_tokens]
    whole = sum(answer.cached_tokens >= answer.held_tokens for answer in later)
    cached = sum(answer.cached_tokens for answer in later)
    prompts = sum(answer.prompt_tokens for answer in later)
    print(f"{kind}: {right} of {asked} answers right, of which {right_calls} of {len(calls)} calls")
    if later:
        print(
            f"    later turns: {cached} of {prompts} prompt tokens from the cache "
            f"({cached / prompts:.1%}); all that was there in {whole} of {len(later)} turns"
        )
    return right / asked


def shown(message: Message) -> str:
    return json.dumps(message.get("tool_calls") or message["content"], ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1000)
    arguments = parser.parse_args()
    began = time.perf_counter()
    kinds = everything(arguments.corpus, np.random.default_rng(arguments.seed))
    users = arguments.users
    llm = MultiUserLLM.from_pretrained(arguments.folder, users=users, seq_length=SEQ_LENGTH)
    shares = {}
    with llm, ThreadPoolExecutor(users) as pool:
        for kind, dialogues in kinds.items():
            answers = pool.map(lambda one: hold(llm, one), dialogues)
            told = list(track(answers, kind, len(dialogues), transient=True))
            shares[kind] = report(kind, dialogues, told)
    print(f"{users} users at once, {time.perf_counter() - began:.0f} s")
    sys.exit(min(shares["corpus"], shares["tools"]) < REQUIRED_ACCURACY)


if __name__ == "__main__":
    main()
