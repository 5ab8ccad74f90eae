"""Messages in any order, prefilled answers, and texts of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.echoing import EchoTokenizer, call, echo_llm, message
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import CHAT, COMPLETIONS, Answer, ask_both_ways, question

TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
USER = {"role": "user", "content": message("hello")}
SYSTEM = {"role": "system", "content": message("be brief")}
ASSISTANT = {"role": "assistant", "content": message("hi")}


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model that says the last message."""
    with in_process_server(mock_settings(users=2, max_queue=64), echo_llm) as server:
        yield server


def text_of(answer: Answer) -> str:
    return answer.choices[0].text


def written(answer: Answer) -> str:
    """The texts of the tokens, joined, whose bytes are the same."""
    entries = answer.choices[0].logprobs["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    for entry in entries:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]  # the model is sure of it
    return joined.decode()


@pytest.mark.parametrize(
    "messages",
    [
        [USER, USER],
        [SYSTEM, SYSTEM, USER],
        [USER, SYSTEM, USER],
        [USER, ASSISTANT, SYSTEM],
        [ASSISTANT, USER],
        [USER, ASSISTANT],
        [SYSTEM],
    ],
)
def test_any_order(echo: InProcessServer, messages: list[dict[str, str]]) -> None:
    answer = ask_both_ways(echo.url, CHAT, messages=messages, logprobs=True, top_logprobs=1)
    assert text_of(answer) == messages[-1]["content"].strip()
    assert written(answer) == text_of(answer)


@pytest.mark.parametrize("beside", [{}, {"add_generation_prompt": False}])
@pytest.mark.parametrize("begun", [" and then 你好", "\n\nx", "get_time\n", "x"])
def test_an_answer_whose_beginning_is_given(
    echo: InProcessServer, beside: dict[str, Any], begun: str
) -> None:
    """What follows it has no header, so the model's words are its content from the first on."""
    messages = [*question("a"), {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True, **beside}
    answer = ask_both_ways(echo.url, CHAT, logprobs=True, top_logprobs=1, **body)
    assert (text_of(answer), written(answer)) == (begun, begun)
    assert text_of(ask_both_ways(echo.url, CHAT, messages=messages)) == begun.lstrip()


def test_a_call_after_the_beginning_of_an_answer(echo: InProcessServer) -> None:
    begun = "wait<|assistant|>" + call("get_time", city="x")
    messages = [*question("a"), {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True, "tools": TOOLS}
    choice = ask_both_ways(echo.url, CHAT, **body).choices[0]
    assert (choice.text, choice.tool_calls) == ("wait", [("get_time", '{"city": "x"}')])


def test_tokens_of_completions_join_to_the_text(echo: InProcessServer) -> None:
    """Token ids are answered with the model's own words, texts with their content."""
    says = message("hello")
    ids = EchoTokenizer().encode_messages(question(says))
    for prompt, text in ((says, "hello"), (ids, says)):
        choice = ask_both_ways(echo.url, COMPLETIONS, prompt=prompt, logprobs=0).choices[0]
        assert ("".join(choice.logprobs["tokens"]), choice.text) == (text, text)
