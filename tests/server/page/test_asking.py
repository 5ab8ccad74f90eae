"""Asking and answering on the page, and what goes wrong at that.

What a model of four million parameters cannot be brought to say is put into the browser's network
instead: a server that is full, a stream that breaks.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Callable

import pytest
from playwright.sync_api import Route, expect

from tests.server.held_steps import held_steps
from tests.server.page.real_server import (
    FEW,
    LONG_QUESTION,
    OTHER_QUESTION,
    SECOND,
    SHORT_QUESTION,
    ask_without_page,
    asked,
    cancelled,
    content,
    states,
    status,
)
from tests.server.page.visit import COMPLETIONS, Visit, answering, eventually, refusing, stream_of
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


# Asking and answering


def test_two_conversations_stream_at_once_and_get_the_answers_of_each_alone(
    visit: Visit, server: ServerProcess, steps: Path
) -> None:
    visit.set({"Temperature": "0"})
    with held_steps(steps) as let:
        visit.ask_both(LONG_QUESTION, OTHER_QUESTION)
        eventually(lambda: asked(server) == 2, "both questions are there")
        let(FEW)
        visit.wait_for_first_text()
        visit.wait_for_first_text(SECOND)
    for name, question in (("Conversation 1", LONG_QUESTION), (SECOND, OTHER_QUESTION)):
        assert visit.wait_for_answer(name) == content(ask_without_page(server, question))
    users = [
        one.headers["x-session-id"]
        for one in visit.requests
        if one.url.endswith("/v1/chat/completions")
    ]
    assert len(set(users)) == 2


def test_the_whole_conversation_is_sent_and_only_what_is_set(visit: Visit) -> None:
    visit.ask(SHORT_QUESTION)
    answer = visit.wait_for_answer()
    visit.set({"Temperature": "0", "Seed": "7", "Max tokens": "5", "System prompt": "Be brief."})
    visit.ask("Who are you?")
    expect(visit.pane().get_by_text("Ended at the token limit.")).to_be_visible()
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    first = {"role": "user", "content": SHORT_QUESTION}
    assert visit.bodies() == [
        {"messages": [first], **streaming},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                first,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "Who are you?"},
            ],
            "temperature": 0,
            "seed": 7,
            "max_tokens": 5,
            **streaming,
        },
    ]
    visit.page.reload()
    visit.set({"Temperature": "", "Seed": "", "Max tokens": "", "System prompt": ""})
    visit.ask("Who are you?", SECOND)
    visit.wait_for_answer(SECOND)
    assert visit.bodies()[-1] == {
        "messages": [{"role": "user", "content": "Who are you?"}],
        **streaming,
    }


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_answer_here_and_on_the_server(
    visit: Visit, server: ServerProcess, steps: Path, how: str
) -> None:
    whole = ask_without_page(server, LONG_QUESTION)
    before = status(server)["totals"]["tokens_generated"]
    ended = len(cancelled(server))
    with held_steps(steps) as let:
        visit.ask(LONG_QUESTION)
        let(FEW)
        visit.wait_for_first_text()
        if how == "button":
            visit.pane().get_by_role("button", name="Stop").click()
        else:
            visit.field().press("Escape")
        expect(visit.pane().get_by_text("Stopped.")).to_be_visible()
        eventually(lambda: len(cancelled(server)) > ended, "no cancellation reached the server")
    stopped = visit.answer().inner_text()
    assert stopped
    assert content(whole).startswith(stopped)
    assert len(stopped) < len(content(whole))
    eventually(lambda: "decode" not in states(server), "the slot still decodes")
    made = status(server)["totals"]["tokens_generated"] - before
    assert made < whole["usage"]["completion_tokens"]
    assert visit.answer().inner_text() == stopped
    visit.ask(SHORT_QUESTION)
    visit.wait_for_answer()
    # Half an answer is no history.
    assert visit.bodies()[-1]["messages"] == [{"role": "user", "content": SHORT_QUESTION}]


def test_answer_again_takes_the_place_of_the_last_answer(visit: Visit) -> None:
    visit.ask(SHORT_QUESTION)
    first = visit.wait_for_answer()
    visit.page.route(COMPLETIONS, answering(stream_of(["another", " one"])))
    visit.pane().get_by_role("button", name="Answer again").click()
    expect(visit.answer()).to_have_text("another one")
    assert first != "another one"
    expect(visit.pane().locator(".question")).to_have_count(1)
    assert visit.bodies()[0] == visit.bodies()[1]


def test_an_answer_stays_where_there_is_no_new_one(visit: Visit) -> None:
    visit.ask(SHORT_QUESTION)
    first = visit.wait_for_answer()
    visit.refused = {429}
    visit.page.route(COMPLETIONS, refusing(429, "queue_full", "full"))
    visit.pane().get_by_role("button", name="Answer again").click()
    expect(visit.page.get_by_text("There is no new answer, so the old one stays.")).to_be_visible()
    expect(visit.answer()).to_have_text(first)
    expect(visit.pane().locator(".failure")).to_have_count(0)
    held: list[Route] = []
    visit.page.unroute(COMPLETIONS)
    visit.page.route(COMPLETIONS, lambda route: held.append(route))
    visit.pane().get_by_role("button", name="Answer again").click()
    visit.pane().get_by_role("button", name="Stop").click()
    expect(visit.answer()).to_have_text(first)
    visit.page.reload()
    expect(visit.answer()).to_have_text(first)


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_copying_an_answer(visitor: Callable[..., Visit], has_clipboard: bool) -> None:
    visit = visitor(open_page=False, permissions=["clipboard-read", "clipboard-write"])
    if not has_clipboard:  # as over plain http from another machine
        visit.context.add_init_script(
            "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
        )
    visit.open()
    markdown = "**bold**\n\n- 你好"
    visit.page.route(COMPLETIONS, answering(stream_of([markdown])))
    visit.ask("copy me")
    visit.wait_for_answer()
    visit.pane().get_by_role("button", name="Copy the answer").click()
    expect(visit.pane().get_by_role("button", name="Copied")).to_be_visible()
    visit.field().focus()
    visit.page.keyboard.press("Control+v")
    expect(visit.field()).to_have_value(markdown)


def test_enter_that_chooses_a_word_in_an_input_method_sends_nothing(visit: Visit) -> None:
    visit.field().fill("nihao")
    visit.field().dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    visit.field().press("Shift+Enter")
    expect(visit.field()).to_have_value("nihao\n")
    expect(visit.pane().locator(".question")).to_have_count(0)
    visit.field().press("Enter")
    expect(visit.pane().locator(".question")).to_have_text("nihao")
    visit.wait_for_answer()


def test_a_sixth_answer_waits_while_the_browser_has_no_connection_left(visit: Visit) -> None:
    held: list[Route] = []
    visit.page.route(COMPLETIONS, lambda route: held.append(route))
    for _ in range(4):
        visit.page.get_by_role("button", name="New conversation").click()
    names = [f"Conversation {number}" for number in range(1, 7)]
    for name in names:
        visit.ask("hello", name)
    expect(visit.pane(names[5]).get_by_text("Waiting for one of your other")).to_be_visible()
    with visit.page.expect_response("**/status"):
        pass  # the live panel still gets through
    assert len(held) == 5
    held[0].fulfill(content_type="text/event-stream", body=stream_of(["done"]))
    expect(visit.pane(names[5]).get_by_text("Waiting for the first word")).to_be_visible()
    for route in itertools.islice(held, 1, None):
        route.fulfill(content_type="text/event-stream", body=stream_of(["done"]))
    for name in names:
        assert visit.wait_for_answer(name) == "done"


# When something goes wrong


def test_a_full_server_is_told_with_the_time_and_asked_again(visit: Visit) -> None:
    visit.refused = {429}
    message = "8 requests wait; max_queue is 8"
    visit.page.route(COMPLETIONS, refusing(429, "queue_full", message, {"Retry-After": "7000"}))
    visit.ask(SHORT_QUESTION)
    counting = re.compile(r"The server is full\. Try again in (\d+) s\.")
    expect(visit.failure()).to_have_text(counting)
    first = counting.match(visit.failure().inner_text())
    assert first is not None
    assert 6900 < int(first[1]) <= 7000
    expect(visit.pane().locator(".failure-detail")).to_have_text(message)
    expect(visit.failure()).not_to_have_text(first[0])  # it counts down
    expect(visit.failure()).to_have_text(counting)
    visit.page.unroute(COMPLETIONS)
    visit.pane().get_by_role("button", name="Try again").click()
    visit.wait_for_answer()
    expect(visit.pane().locator(".failure")).to_have_count(0)


@pytest.mark.parametrize(
    ("status", "code", "title"),
    [
        (503, "not_ready", "The server is not accepting questions right now."),
        (400, "context_length_exceeded", "This conversation is too long for the model."),
        (400, "invalid_value", "The server rejected this question."),
        (429, "user_busy", "Too many of your questions are running."),
        (500, "internal_error", "Something went wrong."),
    ],
)
def test_refusals_have_a_title_and_the_server_s_words(
    visit: Visit, status: int, code: str, title: str
) -> None:
    visit.refused = {status}
    visit.page.route(COMPLETIONS, refusing(status, code, "<b>why</b> it is so"))
    visit.ask("hello")
    expect(visit.failure()).to_contain_text(title)
    expect(visit.pane().locator(".failure-detail")).to_have_text("<b>why</b> it is so")
    visit.page.reload()
    expect(visit.failure()).to_contain_text(title)


def test_a_prompt_that_is_really_too_long(visit: Visit) -> None:
    visit.refused = {400}
    visit.ask("long " * 2000)
    expect(visit.failure()).to_contain_text("This conversation is too long")
    expect(visit.pane().locator(".failure-detail")).to_contain_text(re.compile(r"\d+ tokens"))


def test_a_missing_key_leads_to_the_settings_and_the_key_is_sent(visit: Visit) -> None:
    visit.refused = {401}
    visit.page.route(COMPLETIONS, refusing(401, "missing_api_key", "an API key is needed"))
    visit.ask("hello")
    visit.pane().get_by_role("button", name="Open settings").click()
    dialog = visit.page.get_by_role("dialog", name="Settings")
    dialog.get_by_label("API key", exact=True).fill("sk-0123456789abcdef")
    dialog.get_by_role("button", name="Save").click()
    visit.page.route(COMPLETIONS, answering(stream_of(["welcome"])))
    with visit.page.expect_request(COMPLETIONS) as sent:
        visit.pane().get_by_role("button", name="Try again").click()
    assert sent.value.headers["authorization"] == "Bearer sk-0123456789abcdef"
    assert visit.wait_for_answer() == "welcome"
    assert "sk-0123456789abcdef" not in json.dumps(visit.kept())
    with visit.page.expect_request("**/status") as polled:
        visit.page.reload()
    assert polled.value.headers["authorization"] == "Bearer sk-0123456789abcdef"
    visit.page.get_by_role("button", name="Settings").click()
    dialog.get_by_label("Remember the key").check()
    dialog.get_by_role("button", name="Save").click()
    assert visit.kept()["glm-multiuser.key"] == "sk-0123456789abcdef"


def test_an_error_in_mid_stream_leaves_the_text_before_it(visit: Visit) -> None:
    error = {"error": {"message": "the device failed", "type": "server_error", "code": "x"}}
    begin = stream_of(["so", " far"]).split("data: [DONE]")[0].rsplit("data: ", 2)[0]
    visit.page.route(COMPLETIONS, answering(f"{begin}data: {json.dumps(error)}\n\n"))
    visit.ask("hello")
    expect(visit.failure()).to_have_text("The answer ended with an error.")
    expect(visit.pane().locator(".failure-detail")).to_have_text("the device failed")
    expect(visit.answer()).to_have_text("so far")


def test_a_connection_that_ends_in_mid_stream(visit: Visit) -> None:
    body = stream_of(["half", " of"]).rsplit("data: ", 3)[0]
    visit.page.route(COMPLETIONS, answering(body))
    visit.ask("hello")
    expect(visit.failure()).to_have_text("The connection was lost in the middle of the answer.")
    expect(visit.answer()).to_have_text("half of")
    expect(visit.field()).to_be_editable()


def test_a_server_that_is_gone(visit: Visit) -> None:
    visit.lost = True
    expect(visit.page.get_by_text("Ready", exact=True)).to_be_visible()
    for path in (COMPLETIONS, "**/status", "**/v1/models"):
        visit.page.route(path, lambda route: route.abort("connectionrefused"))
    visit.ask("hello")
    expect(visit.failure()).to_have_text("The server cannot be reached.")
    expect(visit.page.get_by_text("No connection", exact=True)).to_be_visible()
    visit.page.get_by_role("button", name="Settings").click()
    dialog = visit.page.get_by_role("dialog", name="Settings")
    expect(dialog.get_by_text("The server cannot be reached.")).to_be_visible()
    visit.page.keyboard.press("Escape")
    for path in (COMPLETIONS, "**/status", "**/v1/models"):
        visit.page.unroute(path)
    expect(visit.page.get_by_text("Ready", exact=True)).to_be_visible()
