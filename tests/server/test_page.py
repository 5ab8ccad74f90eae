"""The web page, in a real browser, against the real server.

What a model of four million parameters cannot be brought to say is put into the browser's network
instead: an answer that attacks, a server that is full, a stream that breaks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.conftest import ARGUMENTS
from tests.server.held_steps import held_steps, server_to_hold
from tests.server.page_scripts import CUT_EVERYWHERE, GROW, LEAVE_EARLY, LOW_CONTRAST, TEXTS
from tests.server.page_visit import (
    COMPLETIONS,
    NARROW,
    PATIENCE_MS,
    Visit,
    answering,
    eventually,
    refusing,
    status_of,
    stream_of,
    visitors,
)
from tests.server.process import ServerProcess

LONG_QUESTION = "What happens to my request, step by step?"
OTHER_QUESTION = "为什么每个用户要有自己的缓存？"
SHORT_QUESTION = "What is your name?"
SECOND = "Conversation 2"
FEW = 12
"""Steps that make some text, and not yet an answer."""

PYTHON = '\n```python\n@cache\ndef f(x: int) -> str:  # why\n    return "a" * 3\n```'

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def server(steps: Path) -> Iterator[ServerProcess]:
    with server_to_hold(steps, *ARGUMENTS) as process:
        yield process


@pytest.fixture
def visitor(browser: Browser, server: ServerProcess) -> Iterator[Callable[..., Visit]]:
    with visitors(browser, server.url) as come:
        yield come


@pytest.fixture
def visit(visitor: Callable[..., Visit]) -> Visit:
    return visitor()


def ask_without_page(server: ServerProcess, question: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def status(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/status", timeout=60).json())


def states(server: ServerProcess) -> list[str]:
    return [slot["state"] for slot in status(server)["slots"]]


def asked(server: ServerProcess) -> int:
    """How many questions have not got their answer yet."""
    found = status(server)
    busy = [slot for slot in found["slots"] if slot["state"] in ("prefill", "decode")]
    return len(busy) + int(found["queue"]["waiting"])


def cancelled(server: ServerProcess) -> list[Any]:
    """The requests whose clients went away."""
    return [one for one in server.events("generation ended") if one["outcome"] == "cancelled"]


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
    expect(visit.pane().get_by_text("Ended at the limit of tokens.")).to_be_visible()
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


# The history


def test_a_reload_restores_the_conversations(visit: Visit) -> None:
    visit.ask(SHORT_QUESTION)
    answer = visit.wait_for_answer()
    visit.page.get_by_role("button", name="New conversation").click()
    visit.pane(SECOND).get_by_role("button", name="Close").click()
    visit.pane("Conversation 3").get_by_role("button", name="Rename").click()
    visit.page.get_by_role("textbox", name="New name").fill("灯塔")
    visit.page.keyboard.press("Enter")
    visit.page.reload()
    expect(visit.pane().locator(".question")).to_have_text(SHORT_QUESTION)
    expect(visit.answer()).to_have_text(answer)
    expect(visit.page.locator(".pane-name")).to_have_text([SHORT_QUESTION, "灯塔"])
    visit.ask("Who are you?")
    visit.wait_for_answer()
    first, second = visit.bodies()
    assert second["messages"][:2] == [
        *first["messages"],
        {"role": "assistant", "content": answer},
    ]
    asked = [one for one in visit.requests if one.method == "POST"]
    assert asked[0].headers["x-session-id"] == asked[1].headers["x-session-id"]


def test_a_reload_in_mid_stream_leaves_an_interrupted_answer(
    visit: Visit, server: ServerProcess, steps: Path
) -> None:
    with held_steps(steps) as let:
        visit.ask(LONG_QUESTION)
        let(FEW)
        seen = visit.wait_for_first_text()
        visit.page.reload()
        expect(visit.pane().get_by_text("Interrupted when the page was left.")).to_be_visible()
    assert visit.answer().inner_text().startswith(seen)
    eventually(lambda: "decode" not in states(server), "the slot still decodes")
    visit.ask(SHORT_QUESTION)
    visit.wait_for_answer()
    assert visit.bodies()[-1]["messages"] == [{"role": "user", "content": SHORT_QUESTION}]


def test_clear_and_close_ask_first_and_then_forget(visit: Visit) -> None:
    visit.page.route(COMPLETIONS, answering(stream_of(["secret"])))
    visit.ask("one")
    visit.wait_for_answer()
    visit.pane().get_by_role("button", name="Clear").click()
    dialog = visit.page.get_by_role("alertdialog")
    dialog.get_by_role("button", name="Cancel").click()
    expect(visit.answer()).to_have_text("secret")
    visit.pane().get_by_role("button", name="Clear").click()
    dialog.get_by_role("button", name="Clear").click()
    expect(visit.pane().locator(".round")).to_have_count(0)
    expect(visit.field()).to_be_focused()
    visit.ask("two")
    visit.wait_for_answer()
    visit.pane().get_by_role("button", name="Close").click()
    dialog.get_by_role("button", name="Close").click()
    expect(visit.pane()).to_have_count(0)
    assert "secret" not in json.dumps(visit.kept())
    visit.pane(SECOND).get_by_role("button", name="Close").click()
    expect(visit.page.locator(".pane")).to_have_count(1)


def test_two_tabs_of_a_browser_show_the_same_conversations(visit: Visit) -> None:
    other = visit.context.new_page()
    other.goto(visit.url)
    visit.page.route(COMPLETIONS, answering(stream_of(["for both"])))
    visit.ask("hello")
    expect(other.locator(".markdown")).to_have_text("for both")
    other.get_by_role("button", name="New conversation").click()
    expect(visit.pane("Conversation 3")).to_be_visible()
    other.locator(".pane").nth(1).get_by_role("button", name="Close").click()
    expect(visit.pane(SECOND)).to_have_count(0)


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", "null", '{"number": 1, "name": "x", "rounds": [{"question": 5}]}'],
)
def test_a_damaged_history_is_left_out_and_the_rest_is_there(visit: Visit, damage: str) -> None:
    visit.page.route(COMPLETIONS, answering(stream_of(["whole"])))
    visit.ask("kept", SECOND)
    visit.wait_for_answer(SECOND)
    visit.page.evaluate(
        """(damage) => {
          const [first] = JSON.parse(localStorage["glm-multiuser.conversations"]);
          localStorage[`glm-multiuser.conversation.${first}`] = damage;
          localStorage["glm-multiuser.settings"] = damage;
        }""",
        damage,
    )
    visit.page.reload()
    expect(visit.page.get_by_text("could not be read and was left out")).to_be_visible()
    expect(visit.page.locator(".pane-name")).to_have_text(["kept"])
    expect(visit.answer(SECOND)).to_have_text("whole")
    visit.page.get_by_role("button", name="Dismiss").click()
    visit.page.reload()
    expect(visit.pane(SECOND)).to_be_visible()
    expect(visit.page.get_by_text("could not be read")).to_have_count(0)


def test_a_full_storage_is_told_and_the_conversation_goes_on(visit: Visit) -> None:
    visit.page.evaluate(
        """() => {
          for (let size = 2 ** 22; size >= 1; size /= 2) {
            try {
              for (let part = 0; ; part += 1) localStorage[`${size} ${part}`] = "x".repeat(size);
            } catch {}
          }
        }"""
    )
    visit.page.route(COMPLETIONS, answering(stream_of(["still here"])))
    visit.ask("hello")
    assert visit.wait_for_answer() == "still here"
    expect(visit.page.get_by_text("no room to keep this history")).to_be_visible()


def test_without_storage_the_page_still_works(visitor: Callable[..., Visit]) -> None:
    visit = visitor(open_page=False)
    visit.context.add_init_script(
        """for (const area of ["localStorage", "sessionStorage"]) {
          const get = () => { throw new DOMException("blocked", "SecurityError"); };
          Object.defineProperty(window, area, { get });
        }"""
    )
    visit.open()
    visit.page.route(COMPLETIONS, answering(stream_of(["still here"])))
    visit.ask("hello")
    assert visit.wait_for_answer() == "still here"
    expect(visit.page.get_by_text("no room to keep this history")).to_be_visible()


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
        (503, "not_ready", "The server does not take questions right now."),
        (400, "context_length_exceeded", "This conversation is too long for the model."),
        (400, "invalid_value", "The server rejected this question."),
        (429, "user_busy", "Too many of your questions are under way."),
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


# The stream, taken apart


def test_events_are_found_wherever_the_stream_is_cut(visit: Visit) -> None:
    stream = (
        ": ping - 2026\r\n\r\n"
        'data: {"你": "好👋"}\r\n\r\n'
        ":ping\n\n"
        "event: message\nid: 7\ndata:no space\ndata:  two lines\n\n"
        "data: two more\r\ndata: lines\r\n\r\n"
        "retry: 10\rdata: lone returns\r\r"
        "data\n\n"
        "data: [DONE]\n\ndata: never finished"
    ).encode()
    expected = [
        '{"你": "好👋"}',
        "no space\n two lines",
        "two more\nlines",
        "lone returns",
        "",
        "[DONE]",
    ]
    length = len(stream)
    cuts = [[at, length] for at in range(length + 1)]
    cuts += [[*pair, length] for pair in itertools.combinations(range(8, 48), 2)]
    cuts.append(list(range(1, length + 1)))
    results = visit.page.evaluate(CUT_EVERYWHERE, {"bytes": list(stream), "cuts": cuts})
    assert [cut for cut, found in zip(cuts, results) if found != expected] == []


def test_leaving_a_stream_early_closes_it(visit: Visit) -> None:
    assert visit.page.evaluate(LEAVE_EARLY) == ["1", True]


# What an answer may contain


def test_markdown_is_shown_as_such(visit: Visit) -> None:
    markdown = (
        "# Title\n\n**bold** [link](https://example.com/a?b=1&c) `code`\n\n"
        "| a | b |\n| - | -: |\n| 1 | 2 |\n\n3. three\n\n```python\nx < 1\n```\n\n"
        "- [x] done\n\nH<sub>2</sub>O"
    )
    visit.page.route(COMPLETIONS, answering(stream_of(re.findall(r"..?", markdown, re.S))))
    visit.ask("**not bold** <i>here</i>")
    visit.wait_for_answer()
    answer = visit.answer()
    for tag, text in {
        "h4": "Title",
        "strong": "bold",
        "p code": "code",
        "td >> nth=1": "2",
        "ol[start='3'] li": "three",
        "pre code": "x < 1\n",
        "sub": "2",
    }.items():
        assert answer.locator(tag).text_content() == text
    link = answer.get_by_role("link", name="link")
    assert link.get_attribute("href") == "https://example.com/a?b=1&c"
    assert link.get_attribute("target") == "_blank"
    assert link.get_attribute("rel") == "noopener noreferrer"
    expect(visit.pane().locator(".question")).to_have_text("**not bold** <i>here</i>")
    expect(visit.pane().locator(".question *")).to_have_count(0)


ATTACKS = (
    "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>",
    "text <img src='https://evil.example/a.png' onerror='window.pwned=1'> text",
    "![a picture](https://evil.example/b.png)",
    "[click](javascript:window.pwned=1) <a href='javascript:window.pwned=1'>click</a>",
    "[click](data:text/html,<script>window.pwned=1</script>)",
    "<svg onload=window.pwned=1><style>@import 'https://evil.example/c.css'</style></svg>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe><form action=/x><input name=a>",
    "<div id=settings class=failure style='position:fixed;inset:0'>over everything</div>",
    "<math><mtext><table><mglyph><style><!--</style>"
    "<img title='--&gt;&lt;img src=1 onerror=window.pwned=1&gt;'>",
    '```"><img src=x onerror=window.pwned=1>\ncode\n```',
    "[a](https://example.com/'onmouseover='window.pwned=1 \"t' onmouseover='window.pwned=1\")",
)


def test_an_answer_that_attacks_is_only_text(visit: Visit) -> None:
    visit.page.route(COMPLETIONS, answering(stream_of("\n\n".join(ATTACKS))))
    visit.ask("attack")
    visit.wait_for_answer()
    answer = visit.answer()
    expect(answer).to_contain_text("<script>window.pwned=1</script><img src=x onerror=")
    expect(answer).to_contain_text("a picture")
    for tag in ("script", "img", "svg", "style", "iframe", "form", "input", "math", "[id]"):
        expect(answer.locator(tag)).to_have_count(0)
    attributes = answer.evaluate(
        """(node) => [...node.querySelectorAll("*")]
          .filter((one) => !one.matches(".copy-code"))
          .flatMap((one) => one.getAttributeNames())"""
    )
    assert set(attributes) <= {"href", "target", "rel", "class", "title", "tabindex", "dir"}
    for link in answer.locator("a[href]").all():
        assert re.match("https://(example.com|evil.example)/", str(link.get_attribute("href")))
        link.hover()
    assert visit.page.evaluate("() => window.pwned") is None


def test_absurd_nesting_is_shown_as_it_is(visit: Visit) -> None:
    visit.page.route(COMPLETIONS, answering(stream_of([">" * 20_000 + " deep"])))
    visit.ask("nest")
    expect(visit.answer()).to_contain_text("deep")
    visit.wait_for_answer()


def test_only_what_changed_in_a_growing_answer_is_drawn_anew(visit: Visit) -> None:
    assert visit.page.evaluate(GROW) == [True, False, "second"]


def test_an_answer_is_announced_once_and_not_token_by_token(visit: Visit) -> None:
    visit.page.evaluate(
        """() => {
          window.said = [];
          for (const node of document.querySelectorAll(".pane [role=status]")) {
            const hear = () => window.said.push(node.textContent);
            new MutationObserver(hear).observe(node, { childList: true });
          }
        }"""
    )
    visit.page.route(COMPLETIONS, answering(stream_of(["one ", "two ", "three"])))
    visit.ask("count")
    visit.wait_for_answer()
    assert visit.page.evaluate("() => window.said") == [
        "Conversation 1 is answering",
        "Conversation 1 answered: one two three",
    ]
    assert visit.pane().get_by_role("log").get_attribute("aria-live") == "off"


# The live panel


def test_the_panel_shows_whose_slots_are_busy(
    visit: Visit, server: ServerProcess, steps: Path
) -> None:
    panel = visit.page.get_by_role("complementary", name="Live")
    with held_steps(steps) as let:
        visit.ask_both(LONG_QUESTION, LONG_QUESTION)
        eventually(lambda: asked(server) == 2, "both questions are there")
        let(FEW)
        rows = panel.get_by_role("listitem").filter(has_text=LONG_QUESTION)
        expect(rows.filter(has_text="decode")).to_have_count(2)
    visit.wait_for_answer()
    visit.wait_for_answer(SECOND)
    expect(panel.get_by_text("decode", exact=True)).to_have_count(0)
    chart = panel.get_by_role("img", name=re.compile(r"at most [1-9]\d*"))
    expect(chart).to_be_visible()


def test_the_panel_shows_the_start_and_the_other_users(visit: Visit) -> None:
    panel = visit.page.get_by_role("complementary", name="Live")
    loading = {"model": "big", "done": 3, "total": 12, "what": "prefill 128"}
    models = [{"name": "big", "state": "loading", "users": 2, "seq_length": 100}]
    visit.page.route("**/status", status_of(state="starting", loading=loading, models=models))
    expect(visit.page.get_by_text("Starting", exact=True)).to_be_visible()
    expect(panel.get_by_role("progressbar")).to_have_attribute("value", "3")
    expect(panel.get_by_text("big: prefill 128")).to_be_visible()
    expect(panel.get_by_text("3 / 12")).to_be_visible()
    busy = {"model": "big", "prompt_tokens": 20, "generated_tokens": 30, "user": None}
    slots = [
        {**busy, "slot": 0, "state": "decode", "yours": False},
        {**busy, "slot": 1, "state": "prefill", "yours": True, "user": "another tab"},
    ]
    visit.page.route("**/status", status_of(slots=slots))
    expect(panel.get_by_role("progressbar")).to_have_count(0)
    rows = panel.get_by_role("listitem")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("someone else")
    expect(rows.nth(0)).to_contain_text("20 + 30")
    expect(rows.nth(1)).to_contain_text("another session")
    expect(panel.get_by_text("3 of 64")).to_be_visible()
    expect(panel.get_by_text("1,234,567")).to_be_visible()
    expect(panel.get_by_text("96 of 8,400 MB")).to_be_visible()
    expect(panel.get_by_text("3 in memory, 1,500 on disk, 7 restored")).to_be_visible()
    for state, text in {"draining": "Finishing", "failed": "Failed"}.items():
        visit.page.route("**/status", status_of(state=state))
        expect(visit.page.get_by_text(text, exact=True)).to_be_visible()


def test_the_panel_asks_each_second_but_not_in_a_hidden_tab(visitor: Callable[..., Visit]) -> None:
    visit = visitor(open_page=False)
    visit.page.clock.install()
    visit.open()

    def polls() -> int:
        return sum(one.url.endswith("/status") for one in visit.requests)

    def turn(hidden: str) -> None:
        visit.page.evaluate(
            f"""() => {{
              Object.defineProperty(document, "hidden", {{ configurable: true, value: {hidden} }});
              document.dispatchEvent(new Event("visibilitychange"));
            }}"""
        )

    expect(visit.page.get_by_text("Ready", exact=True)).to_be_visible()
    for _ in range(3):
        with visit.page.expect_response("**/status") as answered:
            visit.page.clock.run_for(1000)
        answered.value.finished()
    turn("true")
    before = polls()
    visit.page.clock.run_for(30_000)
    assert polls() == before
    with visit.page.expect_response("**/status"):
        turn("false")


def test_the_panel_can_be_hidden_and_stays_hidden(visit: Visit) -> None:
    panel = visit.page.get_by_role("complementary", name="Live")
    button = visit.page.get_by_role("button", name="Live panel")
    expect(panel).to_be_visible()
    button.click()
    expect(panel).to_be_hidden()
    expect(button).to_have_attribute("aria-expanded", "false")
    visit.page.reload()
    expect(visit.pane()).to_be_visible()
    expect(panel).to_be_hidden()


# Looks, languages and keys


def test_everything_can_be_done_with_the_keyboard(visit: Visit, steps: Path) -> None:
    page = visit.page
    while walk(page)[0]:  # from the composer, where the focus starts, to the end of the page
        pass
    stops = list(iter(lambda: walk(page), ("", False)))
    names = [name for name, _ in stops]
    for name in ("New conversation", "Live panel", "Settings", "Live"):
        assert names.count(name) == 1
    for name in ("Rename", "Clear", "Close", "Messages", "Who are you?", "Message", "Send"):
        assert names.count(name) == 2
    assert [name for name, outlined in stops if not outlined] == []
    page.get_by_role("button", name="New conversation").focus()
    while walk(page)[0] != "Message":
        pass
    page.keyboard.type(LONG_QUESTION)
    with held_steps(steps) as let:
        page.keyboard.press("Enter")
        let(FEW)
        visit.wait_for_first_text()
        page.keyboard.press("Escape")
        expect(visit.pane().get_by_text("Stopped.")).to_be_visible()
    expect(visit.field()).to_be_focused()
    page.keyboard.press("Tab")
    expect(visit.pane().get_by_role("button", name="Send")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
    expect(visit.pane().get_by_role("button", name="Copy the answer")).to_be_focused()
    visit.pane().get_by_role("button", name="Rename").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("mine")
    page.keyboard.press("Escape")
    expect(visit.pane()).to_be_visible()
    page.keyboard.press("Enter")
    page.keyboard.type("mine")
    page.keyboard.press("Enter")
    expect(visit.pane("mine")).to_be_visible()
    settings = page.get_by_role("button", name="Settings")
    settings.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(settings).to_be_focused()


def walk(page: Page) -> tuple[str, bool]:
    """Presses Tab; the name of what has the focus now, and whether one can see that it has.

    No name, and nothing to see, after the last one.
    """
    page.keyboard.press("Tab")
    name, outlined = page.evaluate(
        """() => {
          const node = document.activeElement;
          if (node === document.body) return ["", false];
          const ring = node.closest(".composer textarea") ? node.parentElement : node;
          if (node.id === "live") return ["Live", getComputedStyle(ring).outlineStyle === "solid"];
          const name = node.ariaLabel ?? node.labels?.[0]?.textContent ?? node.textContent;
          return [name, getComputedStyle(ring).outlineStyle === "solid"];
        }"""
    )
    return str(name), bool(outlined)


def test_chinese_and_english(visitor: Callable[..., Visit]) -> None:
    visit = visitor(locale="zh-CN")
    page = visit.page
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    expect(visit.pane("对话 1")).to_be_visible()
    expect(page.get_by_role("textbox", name="消息").first).to_have_attribute(
        "placeholder", "问点什么……"
    )
    page.get_by_role("button", name="设置").click()
    page.get_by_label("语言").select_option("en")
    page.get_by_role("button", name="保存").click()
    expect(visit.pane()).to_be_visible()
    expect(page.get_by_text("Ready", exact=True)).to_be_visible()
    page.reload()
    expect(page.locator("html")).to_have_attribute("lang", "en")
    expect(visit.pane()).to_be_visible()
    assert not re.search("[一-鿿]", page.locator("body").inner_text())
    english, chinese = page.evaluate(TEXTS)
    assert english == chinese
    missing = page.locator("text=/undefined|\\[object/")
    expect(missing).to_have_count(0)


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(
    visitor: Callable[..., Visit], scheme: str, locale: str
) -> None:
    visit = visitor(color_scheme=scheme, locale=locale, reduced_motion="reduce")
    page = visit.page
    visit.refused = {429}
    for place, answer in enumerate(
        (
            answering(stream_of(["> quote\n\n`code` [link](https://example.com)", PYTHON])),
            refusing(429, "queue_full", "why"),
            answering(stream_of(["long"], end="length")),
        )
    ):
        page.locator("#add").click()
        page.route(COMPLETIONS, answer)
        pane = page.locator(".pane").nth(place)
        pane.locator("textarea").fill("hello")
        pane.locator("textarea").press("Enter")
        expect(pane.locator("[data-state=done], .failure")).to_have_count(1)
    slot = {"model": "big", "user": None, "yours": False, "prompt_tokens": 1, "generated_tokens": 2}
    slots = [
        {**slot, "slot": number, "state": state}
        for number, state in enumerate(("free", "prefill", "decode", "idle"))
    ]
    page.route("**/status", status_of(slots=slots))
    expect(page.locator(".slot")).to_have_count(4)
    page.locator("#open-settings").click()
    seen, low = page.evaluate(LOW_CONTRAST)
    assert seen > 60
    assert low == []


def background(page: Page) -> str:
    return str(page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor"))


def test_dark_and_light(visitor: Callable[..., Visit]) -> None:
    light, dark = (background(visitor(color_scheme=one).page) for one in ("light", "dark"))
    assert light != dark
    visit = visitor(color_scheme="light")
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.get_by_label("Theme").select_option("dark")
    visit.page.get_by_role("button", name="Save").click()
    assert background(visit.page) == dark
    # Also before the page's own modules have run: a white flash hurts in a dark room.
    visit.page.route("**/main.js", lambda route: route.fulfill(content_type="text/javascript"))
    visit.page.reload()
    assert background(visit.page) == dark


def test_narrow_shows_one_at_a_time_with_tabs(visitor: Callable[..., Visit], steps: Path) -> None:
    visit = visitor(viewport=NARROW, has_touch=True)
    page = visit.page
    tabs = page.get_by_role("tab")
    expect(tabs).to_have_text([re.compile("Conversation 1"), re.compile("Conversation 2"), "Live"])
    page.get_by_role("textbox", name="Message").fill(LONG_QUESTION)
    with held_steps(steps):
        page.keyboard.press("Enter")
        tabs.nth(1).tap()
        # The first one goes on behind the tab, which says so.
        expect(tabs.nth(0)).to_have_accessible_name(f"{LONG_QUESTION} answering")
    expect(page.get_by_role("tabpanel")).to_have_count(1)
    expect(page.get_by_role("tabpanel", name=SECOND)).to_be_visible()
    tabs.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="Live")).to_be_visible()
    expect(page.get_by_text("Compiles after ready")).to_be_in_viewport()
    page.keyboard.press("ArrowRight")
    panel = page.get_by_role("tabpanel", name="Conversation 1")
    expect(panel).to_be_visible()
    panel.locator("[data-state=done]").wait_for()
    expect(tabs.nth(0)).to_have_accessible_name(LONG_QUESTION)
    page.reload()
    expect(page.get_by_role("tabpanel", name="Conversation 1")).to_be_visible()
    for _ in range(3):
        page.get_by_role("button", name="New conversation").tap()
    expect(page.get_by_role("tabpanel", name="Conversation 5")).to_be_visible()
    expect(page.get_by_role("tab", name="Live")).to_be_in_viewport(ratio=1)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "count", "columns"), [(1440, 2, 2), (1440, 4, 2), (900, 2, 1)])
def test_wide_shows_conversations_side_by_side(
    visitor: Callable[..., Visit], width: int, count: int, columns: int
) -> None:
    visit = visitor(viewport={"width": width, "height": 900})
    for _ in range(count - 2):
        visit.page.get_by_role("button", name="New conversation").click()
    expect(visit.page.locator(".pane")).to_have_count(count)
    boxes = [pane.bounding_box() for pane in visit.page.locator(".pane").all()]
    lefts = {round(box["x"]) for box in boxes if box}
    assert len(lefts) == columns
    expect(visit.page.get_by_role("tab")).to_have_count(0)
