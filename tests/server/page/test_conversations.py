"""Conversations of the web page: titles, models, editing, code, calls of tools, accessibility."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.server.in_process import MODEL
from tests.server.openai_reading import OTHER
from tests.server.page.visit import (
    COMPLETIONS,
    NARROW,
    WIDE,
    Visit,
    answering,
    refusing,
    status_of,
    stream_of,
)

pytestmark = pytest.mark.slow

AXE = Path(__file__).resolve().parents[3] / ".browser/node_modules/axe-core/axe.min.js"
SECOND = "Conversation 2"
CODE = """Two ways:

```python
def f(x: int) -> str:
    return "<b>" * x  # why
```

```
plain <i>text</i>
```

- in a list

  ```js
  const a = 1;
  ```
"""


def answer_with(page: Page, text: str = "", **options: Any) -> None:
    """From now on every answer is this one."""
    page.unroute(COMPLETIONS)
    page.route(COMPLETIONS, answering(stream_of([text] if text else [], **options)))


# Title and model


def test_the_first_question_is_the_title(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    name = visit.pane().locator(".pane-name")
    expect(name).to_have_text("Conversation 1")
    visit.ask("Why is\n  the sky blue?")
    visit.wait_for_answer()
    expect(name).to_have_text("Why is the sky blue?")
    expect(visit.page.locator(".tab-name").first).to_have_text("Why is the sky blue?")
    visit.ask("And the sea?")
    visit.wait_for_answer()
    expect(name).to_have_text("Why is the sky blue?")
    visit.ask("字" * 200, SECOND)
    expect(visit.pane(SECOND).locator(".pane-name")).to_have_text("字" * 59 + "…")
    visit.page.reload()
    expect(name).to_have_text("Why is the sky blue?")


def test_a_name_is_kept_until_it_is_taken_away(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    visit.ask("first question")
    visit.wait_for_answer()
    for typed, shown in (("mine", "mine"), ("", "first question")):
        visit.pane().get_by_role("button", name="Rename").click()
        field = visit.page.get_by_role("textbox", name="New name")
        field.fill(typed)
        field.press("Enter")
        expect(visit.pane().locator(".pane-name")).to_have_text(shown)
    visit.pane().get_by_role("button", name="Clear").click()
    dialog = visit.page.get_by_role("alertdialog", name="Clear “first question”?")
    dialog.get_by_role("button", name="Clear").click()
    expect(visit.pane().locator(".pane-name")).to_have_text("Conversation 1")


def test_each_conversation_has_a_model_of_its_own(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    choice = visit.pane().get_by_role("combobox", name="Model of this conversation")
    expect(choice.locator("option")).to_have_text([f"{MODEL} (default)", OTHER])
    choice.select_option(OTHER)
    visit.page.reload()
    expect(choice).to_have_value(OTHER)
    for name in ("Conversation 1", SECOND):
        visit.ask("hello", name)
        visit.wait_for_answer(name)
    assert [body.get("model") for body in visit.bodies()] == [OTHER, None]
    choice.select_option(label=f"{MODEL} (default)")
    visit.ask("hello")
    visit.wait_for_answer()
    assert "model" not in visit.bodies()[-1]


def test_the_model_of_the_settings_is_the_default(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    visit.page.get_by_role("button", name="Settings").click()
    dialog = visit.page.get_by_role("dialog", name="Settings")
    dialog.get_by_label("Default model").select_option(OTHER)
    dialog.get_by_role("button", name="Save").click()
    choice = visit.pane().get_by_role("combobox", name="Model of this conversation")
    expect(choice.locator("option")).to_have_text([f"{OTHER} (default)", MODEL])
    visit.ask("hello")
    visit.wait_for_answer()
    choice.select_option(MODEL)
    visit.ask("hello")
    visit.wait_for_answer()
    assert [body["model"] for body in visit.bodies()] == [OTHER, MODEL]


def test_a_model_that_is_gone_stays_chosen_and_says_so(visit: Visit) -> None:
    choice = visit.pane().get_by_role("combobox", name="Model of this conversation")
    choice.select_option(OTHER)
    visit.page.route("**/status", status_of())
    expect(choice.locator("option")).to_have_text(["big (default)", f"{OTHER} (not available now)"])
    expect(choice).to_have_value(OTHER)
    # Where there is nothing to choose, the name is all there is.
    expect(visit.pane(SECOND).get_by_text("big", exact=True)).to_be_visible()
    expect(visit.pane(SECOND).get_by_role("combobox")).to_have_count(0)


def test_another_tab_renames_during_an_answer(visit: Visit) -> None:
    held: list[Route] = []
    visit.page.route(COMPLETIONS, lambda route: held.append(route))
    other = visit.context.new_page()
    other.goto(visit.url)
    visit.ask("one")
    pane = other.locator(".pane").first
    expect(pane.locator(".pane-name")).to_have_text("one")
    pane.get_by_role("button", name="Rename").click()
    other.get_by_role("textbox", name="New name").fill("灯塔")
    other.keyboard.press("Enter")
    pane.get_by_role("combobox").select_option(OTHER)
    expect(visit.page.locator(".pane-name").first).to_have_text("灯塔")
    expect(visit.page.locator(".pane").first.get_by_role("combobox")).to_have_value(OTHER)
    held[0].fulfill(content_type="text/event-stream", body=stream_of(["done"]))
    expect(pane.locator(".markdown")).to_have_text("done")
    for page in (visit.page, other):
        page.reload()
        expect(page.locator(".pane-name").first).to_have_text("灯塔")


def test_another_tab_of_the_browser_shows_the_same(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    other = visit.context.new_page()
    other.goto(visit.url)
    visit.ask("one")
    visit.wait_for_answer()
    visit.pane().get_by_role("combobox").select_option(OTHER)
    pane = other.locator(".pane").first
    expect(pane.locator(".pane-name")).to_have_text("one")
    expect(pane.get_by_role("combobox")).to_have_value(OTHER)
    visit.ask("two")
    visit.wait_for_answer()
    expect(pane.locator(".question")).to_have_text(["one", "two"])
    for page in (visit.page, other):
        page.reload()
        expect(page.locator(".pane").first.locator(".question")).to_have_text(["one", "two"])


# Editing


def test_a_question_is_edited_and_the_conversation_continues_from_there(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    for question in ("one", "two", "three"):
        visit.ask(question)
        visit.wait_for_answer()
    pane = visit.pane()
    pane.get_by_role("button", name="Edit the question").nth(1).click()
    field = pane.get_by_role("textbox", name="Question")
    expect(field).to_be_focused()
    expect(field).to_have_value("two")
    field.fill("new")
    field.press("Escape")
    expect(pane.locator(".question")).to_have_text(["one", "two", "three"])
    expect(pane.get_by_role("button", name="Edit the question").nth(1)).to_be_focused()
    visit.page.keyboard.press("Enter")
    answer_with(visit.page, "no")
    field.fill("new")
    field.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(field).to_be_visible()
    field.press("Enter")
    expect(pane.locator(".question")).to_have_text(["one", "new"])
    assert visit.wait_for_answer() == "no"
    assert visit.bodies()[-1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "new"},
    ]
    visit.page.reload()
    expect(pane.locator(".question")).to_have_text(["one", "new"])
    pane.get_by_role("button", name="Edit the question").first.click()
    pane.get_by_role("textbox", name="Question").fill("other")
    pane.locator(".question-editor").get_by_role("button", name="Send").click()
    expect(pane.locator(".question")).to_have_text(["other"])
    expect(pane.locator(".pane-name")).to_have_text("other")


def test_a_keyboard_leaves_the_editor_in_sight(visitor: Callable[..., Visit]) -> None:
    page = visitor(viewport=NARROW).page
    answer_with(page, "word " * 160)
    page.get_by_role("textbox", name="Message").fill("one")
    page.keyboard.press("Enter")
    page.locator("[data-state=done]").wait_for()
    page.get_by_role("button", name="Edit the question").click()
    field = page.get_by_role("textbox", name="Question")
    expect(field).to_be_in_viewport()
    page.set_viewport_size({"width": NARROW["width"], "height": 544})
    # What the new size starts runs before the second frame.
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    expect(field).to_be_in_viewport(timeout=5000)
    expect(field).to_be_focused()


def test_nothing_is_edited_during_an_answer(visit: Visit) -> None:
    answer_with(visit.page, "yes")
    visit.ask("one")
    visit.wait_for_answer()
    held: list[Route] = []
    visit.page.unroute(COMPLETIONS)
    visit.page.route(COMPLETIONS, lambda route: held.append(route))
    pane = visit.pane()
    pane.get_by_role("button", name="Edit the question").click()
    visit.ask("two")
    expect(pane.get_by_role("button", name="Stop")).to_be_visible()
    expect(pane.get_by_role("button", name="Edit the question")).to_have_count(0)
    field = pane.get_by_role("textbox", name="Question")
    field.fill("changed")
    field.press("Enter")
    expect(field).to_have_value("changed")
    expect(pane.locator(".question-editor [type=submit]")).to_be_disabled()
    held[0].fulfill(content_type="text/event-stream", body=stream_of(["done"]))
    visit.wait_for_answer()
    answer_with(visit.page, "edited")
    field.press("Enter")
    expect(pane.locator(".question")).to_have_text(["changed"])
    assert visit.wait_for_answer() == "edited"


# Code and calls of tools


def test_code_is_highlighted_and_copied_block_by_block(visitor: Callable[..., Visit]) -> None:
    visit = visitor(permissions=["clipboard-read", "clipboard-write"])
    answer_with(visit.page, CODE)
    visit.ask("code")
    visit.wait_for_answer()
    blocks = visit.answer().locator(".code")
    expect(blocks.locator("pre")).to_have_text(
        [
            'def f(x: int) -> str:\n    return "<b>" * x  # why\n',
            "plain <i>text</i>\n",
            "const a = 1;\n",
        ]
    )
    expect(blocks.locator(".code-bar span")).to_have_text(["python", "", "js"])
    colours = [
        visit.page.evaluate("(node) => getComputedStyle(node).color", node.element_handle())
        for node in (
            blocks.nth(0).locator("pre"),
            blocks.nth(0).get_by_text("def", exact=True),
            blocks.nth(0).get_by_text('"<b>"', exact=True),
            blocks.nth(0).get_by_text("# why", exact=True),
        )
    ]
    assert len(set(colours)) == 4
    expect(blocks.nth(1).locator("pre code *")).to_have_count(0)
    expect(blocks.nth(2).get_by_text("const", exact=True)).to_have_class("hljs-keyword")
    for place, text in enumerate(blocks.locator("pre").all_text_contents()):
        blocks.nth(place).get_by_role("button", name="Copy code").click()
        expect(blocks.nth(place).get_by_role("button", name="Copied")).to_be_visible()
        assert visit.page.evaluate("() => navigator.clipboard.readText()") == text[:-1]


def test_a_call_of_a_tool_is_shown_as_one(visitor: Callable[..., Visit]) -> None:
    visit = visitor(permissions=["clipboard-read", "clipboard-write"])
    long = '{"id": 12345678901234567890}'
    calls = [("get_weather", '{"city": "北京", "days": 2}'), ("run", "``` <b>"), ("find", long)]
    answer_with(visit.page, calls=calls, end="tool_calls")
    visit.ask("weather?")
    visit.wait_for_answer()
    for _ in range(2):
        blocks = visit.pane().locator(".call")
        expect(blocks.locator(".call-name")).to_have_text(
            ["Tool callget_weather", "Tool callrun", "Tool callfind"]
        )
        expect(blocks.locator("pre")).to_have_text(
            [
                '{\n  "city": "北京",\n  "days": 2\n}\n',
                "``` <b>\n",
                '{\n  "id": 12345678901234567890\n}\n',
            ]
        )
        expect(visit.pane().get_by_text("This page runs no tools.")).to_be_visible()
        visit.page.reload()
    visit.pane().get_by_role("button", name="Copy the answer").click()
    expect(visit.pane().get_by_role("button", name="Copied")).to_be_visible()
    copied = visit.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == "\n".join(f"{name}({arguments})" for name, arguments in calls)
    answer_with(visit.page, "sunny")
    visit.ask("and now?")
    visit.wait_for_answer()
    assert visit.bodies()[-1]["messages"] == [{"role": "user", "content": "and now?"}]


def test_a_call_may_come_in_pieces_behind_a_text(visit: Visit) -> None:
    pieces = [
        {"index": 0, "id": "a", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": "1}"}},
    ]
    whole = stream_of(["I will add."], calls=[("x", "y")], end="tool_calls")
    begin, rest = whole.split('data: {"choices": [{"index": 0, "delta": {"tool_calls"')
    end = rest.split("\n\n", 1)[1]
    deltas = [{"choices": [{"index": 0, "delta": {"tool_calls": [one]}}]} for one in pieces]
    events = "".join(f"data: {json.dumps(delta)}\n\n" for delta in deltas)
    visit.page.route(COMPLETIONS, answering(begin + events + end))
    visit.ask("1?")
    visit.wait_for_answer()
    expect(visit.pane().locator(".answer > .markdown")).to_have_text("I will add.")
    expect(visit.pane().locator(".call-name code")).to_have_text(["add"])
    expect(visit.pane().locator(".call pre")).to_have_text('{\n  "a": 1\n}\n')


def test_a_json_answer_is_shown_as_one_that_folds(visit: Visit) -> None:
    answer_with(
        visit.page, '{"b": [1.50, "<b>x\\"</b>"],"2":{ },"1":1234567890123456789,"1":[1e400]}'
    )
    visit.ask("json?")
    visit.wait_for_answer()
    block = visit.pane().locator("details.call")
    expect(block.locator("summary")).to_have_text("JSON")
    expect(block.locator("pre")).to_have_text(
        '{\n  "b": [\n    1.50,\n    "<b>x\\"</b>"\n  ],\n  "2": {},\n'
        '  "1": 1234567890123456789,\n  "1": [\n    1e400\n  ]\n}\n'
    )
    block.locator("summary").click()
    expect(block.locator("pre")).to_be_hidden()
    answer_with(visit.page, '[{"b": "</code><img src=x onerror=alert(1)>,\\u4f60"}]')
    visit.ask("list?")
    visit.wait_for_answer()
    expect(block.nth(1).locator("pre")).to_have_text(
        '[\n  {\n    "b": "</code><img src=x onerror=alert(1)>,你"\n  }\n]\n'
    )
    answer_with(visit.page, '{"not": json}')
    visit.ask("text?")
    visit.wait_for_answer()
    expect(block).to_have_count(2)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_answer_says_that_it_is_empty(visit: Visit, text: str) -> None:
    answer_with(visit.page, text)
    visit.ask("hello")
    expect(visit.pane().get_by_text("The answer is empty.")).to_be_visible()
    visit.ask("again")
    expect(visit.pane().get_by_text("The answer is empty.")).to_have_count(2)
    assert visit.bodies()[-1]["messages"] == [{"role": "user", "content": "again"}]


# Keys and accessibility


def test_the_focus_starts_in_the_composer(visit: Visit) -> None:
    expect(visit.field()).to_be_focused()
    visit.field(SECOND).focus()
    visit.page.reload()
    expect(visit.field(SECOND)).to_be_focused()
    visit.page.get_by_role("button", name="New conversation").click()
    expect(visit.field("Conversation 3")).to_be_focused()


def test_the_live_panel_is_scrolled_with_the_keyboard(visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport={"width": 1440, "height": 300})
    panel = visit.page.get_by_role("group", name="Live")
    last = visit.page.get_by_text("Compiles after ready")
    # From then on it keeps its height.
    expect(panel.locator('[data-part="compiles"]')).to_have_text("0")
    expect(last).not_to_be_in_viewport()
    visit.pane(SECOND).get_by_role("button", name="Send").focus()
    visit.page.keyboard.press("Tab")
    expect(panel).to_be_focused()
    visit.page.keyboard.press("End")
    expect(last).to_be_in_viewport()


def test_axe_finds_nothing_before_the_first_status(visitor: Callable[..., Visit]) -> None:
    if not AXE.exists():
        pytest.skip(f"{AXE} is not there; `make browser` fetches it where there is npm")
    visit = visitor(open_page=False)
    visit.page.route("**/status", lambda _: None)  # never answered
    visit.open()
    visit.page.evaluate(AXE.read_text(encoding="utf-8"))
    assert violations(visit.page) == []


def violations(page: Page) -> list[Any]:
    """What axe finds: the rule and the places."""
    return list(
        page.evaluate(
            """async () => {
              const { violations } = await axe.run();
              return violations.map((one) => [one.id, one.nodes.map((node) => node.html)]);
            }"""
        )
    )


@pytest.mark.parametrize(
    ("viewport", "scheme", "locale"),
    [(WIDE, "light", "en-US"), (WIDE, "dark", "zh-CN"), (NARROW, "dark", "en-US")],
)
def test_axe_finds_nothing(
    visitor: Callable[..., Visit], viewport: dict[str, int], scheme: str, locale: str
) -> None:
    if not AXE.exists():
        pytest.skip(f"{AXE} is not there; `make browser` fetches it where there is npm")
    visit = visitor(viewport=viewport, color_scheme=scheme, locale=locale, reduced_motion="reduce")
    page = visit.page
    visit.refused = {429}
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = {"empty": violations(page)}
    pane = page.locator(".pane").first
    for name, answer in {
        "code": answering(stream_of([f"# Title\n\n> quote\n\n{CODE}\n\n| a |\n| - |\n| `b` |"])),
        "call": answering(stream_of([], calls=[("run", '{"a": [1, true]}')], end="tool_calls")),
        "full": refusing(429, "queue_full", "why"),
    }.items():
        page.unroute(COMPLETIONS)
        page.route(COMPLETIONS, answer)
        pane.locator(".composer textarea").fill("question")
        pane.locator(".composer textarea").press("Enter")
        expect(pane.locator(".round").last.locator("[data-state=done], .failure")).to_have_count(1)
        found[name] = violations(page)
    pane.locator(".asked button").first.click()
    pane.locator(".pane-header button").first.click()
    found["editing"] = violations(page)
    page.keyboard.press("Escape")
    if viewport == NARROW:
        page.get_by_role("tab", name=re.compile("Live|实况")).click()
        found["live"] = violations(page)
    page.locator("#open-settings").click()
    found["settings"] = violations(page)
    assert found == {name: [] for name in found}
