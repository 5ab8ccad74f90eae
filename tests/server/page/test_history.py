"""What the page keeps of conversations, and in which tabs they are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable

import pytest
from playwright.sync_api import expect

from tests.server.held_steps import held_steps
from tests.server.page.real_server import FEW, LONG_QUESTION, SECOND, SHORT_QUESTION, states
from tests.server.page.visit import COMPLETIONS, Visit, answering, eventually, stream_of
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


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
    expect(visit.page.get_by_text("no room for this history")).to_be_visible()


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
    expect(visit.page.get_by_text("no room for this history")).to_be_visible()


def test_a_page_that_comes_back_from_the_cache_is_loaded_again(visit: Visit) -> None:
    visit.page.evaluate("() => { window.isOld = true; }")
    with visit.page.expect_navigation():
        visit.page.evaluate(
            "() => dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))"
        )
    assert visit.page.evaluate("() => window.isOld") is None
