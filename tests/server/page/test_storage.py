"""What the web page keeps in the browser: beside other tabs, without room, under other paths."""

from __future__ import annotations

import json
from typing import Any, Callable

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.in_process import in_process_server, mock_settings
from tests.server.page.scripts import ANSWERS_BY_HAND
from tests.server.page.visit import COMPLETIONS, Visit, answering, eventually, stream_of, visitors

pytestmark = pytest.mark.slow

SECOND = "Conversation 2"
KEY = "sk-0123456789abcdef"
BLOCK_STORAGE = """
for (const area of ["localStorage", "sessionStorage"]) {
  const get = () => { throw new DOMException("blocked", "SecurityError"); };
  Object.defineProperty(window, area, { get });
}
"""
FILL_STORAGE = """
() => {
  for (let size = 2 ** 22; size >= 1; size /= 2) {
    try {
      for (let part = 0; ; part += 1) localStorage[`${size} ${part}`] = "x".repeat(size);
    } catch {}
  }
}
"""


@pytest.fixture
def visit(visitor: Callable[..., Visit]) -> Visit:
    """Answers are written by `write`."""
    visit = visitor(open_page=False)
    visit.context.add_init_script(f"{{{ANSWERS_BY_HAND}}}")
    visit.open()
    return visit


def write(page: Page, *texts: str, number: int = 0, end: bool = False) -> None:
    """Writes the answer to the question of this number as far as this."""
    page.wait_for_function("(number) => answers.length > number", arg=number)
    page.evaluate(
        """([number, texts, end]) => {
          for (const text of texts) answers[number].write(text);
          if (end) answers[number].end();
        }""",
        [number, texts, end],
    )


CLOSE_WITHOUT_FORGETTING = """() => {
    const order = Object.keys(localStorage).find((key) => key.endsWith(".conversations"));
    const [old] = JSON.parse(localStorage.getItem(order));
    const keyOf = (id) => order.replace(/conversations$/, `conversation.${id}`);
    const closed = JSON.parse(localStorage.getItem(keyOf(old)));
    localStorage.setItem(keyOf("new"), JSON.stringify({ ...closed, rounds: [] }));
    localStorage.setItem(order, JSON.stringify(["new"]));
}"""


def other_tab(visit: Visit) -> Page:
    page = visit.context.new_page()
    page.goto(visit.url)
    expect(page.locator(".pane")).to_have_count(2)
    return page


def save_settings(page: Page, change: Callable[[Any], Any]) -> None:
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog", name="Settings")
    change(dialog)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_be_hidden()


def test_a_conversation_that_is_closed_in_mid_stream_leaves_nothing(
    visitor: Callable[..., Visit],
) -> None:
    visit = visitor(open_page=False)
    visit.context.add_init_script(f"{{{ANSWERS_BY_HAND}}}")
    visit.page.clock.install()
    visit.open()
    visit.ask("a secret question")
    write(visit.page, "a secret answer")
    visit.page.clock.run_for(1000)
    assert "secret" in json.dumps(visit.kept())
    visit.pane().get_by_role("button", name="Close").click()
    dialog = visit.page.get_by_role("alertdialog")
    dialog.get_by_role("button", name="Close").click()
    expect(visit.page.locator(".pane")).to_have_count(1)
    visit.page.clock.run_for(10_000)
    assert "secret" not in json.dumps(visit.kept())


# Other tabs


def test_another_tab_shows_that_an_answer_is_under_way(visit: Visit) -> None:
    other = other_tab(visit)
    mark, answer = other.locator(".mark"), other.locator(".markdown")
    visit.ask("hello")
    write(visit.page, "so far")
    expect(answer).to_have_text("so far")
    expect(mark).to_have_text("Being answered in another tab.")
    expect(other.get_by_role("button", name="Answer again")).to_have_count(0)
    write(visit.page, ", so good", end=True)
    expect(answer).to_have_text("so far, so good")
    expect(mark).to_be_hidden()
    visit.ask("again")
    write(visit.page, "half", number=1)
    expect(mark.nth(1)).to_have_text("Being answered in another tab.")
    visit.page.close()
    expect(mark.nth(1)).to_contain_text("Interrupted when the page was left.")


def test_a_new_tab_shows_that_an_answer_is_under_way(visit: Visit) -> None:
    visit.ask("hello")
    eventually(lambda: "waiting" in json.dumps(visit.kept()), "it was not saved")
    other = other_tab(visit)
    mark = other.locator(".mark")
    expect(mark).to_have_text("Being answered in another tab.")
    write(visit.page, "yes", end=True)
    expect(other.locator(".markdown")).to_have_text("yes")
    expect(mark).to_be_hidden()


def test_what_another_tab_clears_in_mid_stream_does_not_come_back(visit: Visit) -> None:
    other = other_tab(visit)
    visit.ask("a secret question")
    write(visit.page, "a secret answer")
    expect(other.locator(".markdown")).to_have_text("a secret answer")
    other.get_by_role("button", name="Clear").first.click()
    other.get_by_role("alertdialog").get_by_role("button", name="Clear").click()
    expect(visit.pane().locator(".round")).to_have_count(0)
    expect(visit.pane().get_by_role("button", name="Send")).to_be_visible()
    assert "secret" not in json.dumps(visit.kept())


def test_what_another_tab_closes_in_mid_stream_leaves_nothing(
    visitor: Callable[..., Visit],
) -> None:
    visit = visitor(open_page=False)
    visit.context.add_init_script(f"{{{ANSWERS_BY_HAND}}}")
    visit.page.clock.install()
    visit.open()
    other = other_tab(visit)
    visit.ask("a secret question")
    write(visit.page, "a secret answer")
    visit.page.clock.run_for(1000)
    expect(other.locator(".markdown")).to_have_text("a secret answer")
    write(visit.page, ", and more")
    other.get_by_role("button", name="Close").first.click()
    other.get_by_role("alertdialog").get_by_role("button", name="Close").click()
    expect(visit.page.locator(".pane")).to_have_count(1)
    visit.page.clock.run_for(10_000)
    assert "secret" not in json.dumps(visit.kept())
    visit.page.reload()
    expect(visit.page.locator(".pane")).to_have_count(1)
    assert "secret" not in json.dumps(visit.kept())


def test_what_is_saved_while_another_tab_closes_it_leaves_nothing(visit: Visit) -> None:
    """This tab hears of it only after it has saved the conversation once more."""
    other = other_tab(visit)
    visit.ask("a secret question")
    write(visit.page, "a secret answer", end=True)
    expect(other.locator(".markdown")).to_have_text("a secret answer")
    other.evaluate(CLOSE_WITHOUT_FORGETTING)
    expect(visit.pane().locator(".round")).to_have_count(0)
    assert "secret" not in json.dumps(visit.kept())


def test_what_another_tab_changes_leaves_an_open_editor_alone(visit: Visit) -> None:
    visit.ask("one")
    write(visit.page, "answer", end=True)
    visit.wait_for_answer()
    other = other_tab(visit)
    other.get_by_role("button", name="Edit the question").click()
    other.get_by_role("textbox", name="Question").fill("still typing")
    visit.ask("two")
    write(visit.page, "answer", number=1, end=True)
    expect(other.locator(".question")).to_have_text(["two"])
    expect(other.get_by_role("textbox", name="Question")).to_have_value("still typing")


def test_a_name_that_stays_as_it_is_takes_no_title_away(visit: Visit) -> None:
    other = other_tab(visit)
    other.get_by_role("button", name="Rename").first.click()
    visit.ask("first question")
    expect(other.locator(".question")).to_have_text("first question")
    other.keyboard.press("Enter")
    expect(other.locator(".new-name")).to_have_count(0)
    expect(other.locator(".pane-name").first).to_have_text("first question")


def test_a_reload_before_a_new_answer_begins_leaves_the_old_one(visit: Visit) -> None:
    visit.ask("first")
    write(visit.page, "old answer", end=True)
    visit.wait_for_answer()
    visit.pane().get_by_role("button", name="Answer again").click()
    write(visit.page, number=1)
    visit.page.reload()
    expect(visit.answer()).to_have_text("old answer")
    expect(visit.pane().locator(".answer")).to_have_attribute("data-state", "done")
    visit.pane().get_by_role("button", name="Answer again").click()
    write(visit.page, "new")
    expect(visit.answer()).to_have_text("new")
    visit.page.reload()
    expect(visit.pane().get_by_text("Interrupted when the page was left.")).to_be_visible()
    expect(visit.answer()).to_have_text("new")


def test_what_follows_a_deletion_of_the_data_is_kept(visit: Visit) -> None:
    visit.page.evaluate("() => localStorage.clear()")
    visit.ask("first")
    write(visit.page, "answer", end=True)
    visit.wait_for_answer()
    visit.page.reload()
    expect(visit.answer()).to_have_text("answer")


def test_another_tab_takes_over_the_settings(visit: Visit) -> None:
    other = other_tab(visit)

    def change(dialog: Any) -> None:
        dialog.get_by_label("API key", exact=True).fill(KEY)
        dialog.get_by_label("Remember the key").check()
        dialog.get_by_label("Theme").select_option("dark")

    save_settings(visit.page, change)
    expect(other.locator("html")).to_have_attribute("data-theme", "dark")
    save_settings(other, lambda dialog: dialog.get_by_label("Temperature").fill("0"))
    kept = visit.kept()
    assert kept["glm-multiuser.key"] == KEY
    assert kept["glm-multiuser.settings"] == {"theme": "dark", "temperature": 0}


def test_closing_what_another_tab_has_closed(visit: Visit) -> None:
    other = other_tab(visit)
    visit.ask("hello", SECOND)
    write(visit.page, "answer", end=True)
    visit.wait_for_answer(SECOND)
    visit.pane(SECOND).get_by_role("button", name="Close").click()
    other.locator(".pane").nth(1).get_by_role("button", name="Close").click()
    other.get_by_role("alertdialog").get_by_role("button", name="Close").click()
    expect(visit.page.locator(".pane")).to_have_count(1)
    visit.page.get_by_role("alertdialog").get_by_role("button", name="Close").click()
    expect(visit.page.locator(".pane")).to_have_count(1)


def test_an_order_that_goes_away_takes_no_conversation_with_it(visit: Visit) -> None:
    other = other_tab(visit)
    visit.page.evaluate("() => localStorage.removeItem('glm-multiuser.conversations')")
    # Events of the storage come in their order.
    save_settings(visit.page, lambda dialog: dialog.get_by_label("Theme").select_option("dark"))
    expect(other.locator("html")).to_have_attribute("data-theme", "dark")
    expect(other.locator(".pane")).to_have_count(2)


# Without room


def test_without_storage_the_live_panel_can_be_hidden(visitor: Callable[..., Visit]) -> None:
    visit = visitor(open_page=False)
    visit.context.add_init_script(BLOCK_STORAGE)
    visit.open()
    panel = visit.page.get_by_role("complementary", name="Live")
    visit.page.get_by_role("button", name="Live panel").click()
    expect(panel).to_be_hidden()
    visit.page.get_by_role("button", name="Live panel").click()
    expect(panel).to_be_visible()


def test_a_notice_that_was_dismissed_does_not_come_back(visitor: Callable[..., Visit]) -> None:
    visit = visitor()
    visit.page.evaluate(FILL_STORAGE)
    visit.page.route(COMPLETIONS, answering(stream_of(["yes"])))
    notice = visit.page.get_by_text("no room for this history")
    visit.ask("one")
    expect(notice).to_be_visible()
    visit.wait_for_answer()
    visit.page.get_by_role("button", name="Dismiss").click()
    visit.ask("two")
    visit.wait_for_answer()
    expect(notice).to_have_count(0)


# Behind a proxy


def test_servers_under_two_paths_share_nothing(browser: Browser) -> None:
    settings = mock_settings(root_path="/some/glm")
    with in_process_server(settings) as server, visitors(browser, server.url) as come:
        visit = come()
        visit.page.route(COMPLETIONS, answering(stream_of(["yes"])))
        visit.ask("of the first one")
        visit.wait_for_answer()

        def change(dialog: Any) -> None:
            dialog.get_by_label("API key", exact=True).fill(KEY)
            dialog.get_by_label("Remember the key").check()
            dialog.get_by_label("Theme").select_option("dark")

        save_settings(visit.page, change)
        with visit.page.expect_request("**/status") as asked:
            visit.page.goto(f"{server.url}/some/glm/")
        assert "authorization" not in asked.value.headers
        expect(visit.page.locator(".pane")).to_have_count(2)
        expect(visit.page.locator(".question")).to_have_count(0)
        expect(visit.page.locator("html")).not_to_have_attribute("data-theme", "dark")
