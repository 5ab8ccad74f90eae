"""Keyboard, languages, contrast, themes and widths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.server.held_steps import held_steps
from tests.server.page.real_server import FEW, LONG_QUESTION, PYTHON, SECOND
from tests.server.page.scripts import LOW_CONTRAST, TEXTS
from tests.server.page.visit import (
    COMPLETIONS,
    NARROW,
    Visit,
    answering,
    refusing,
    status_of,
    stream_of,
)
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


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


def test_what_is_not_shown_is_translated_too(visit: Visit) -> None:
    page = visit.page
    page.route(COMPLETIONS, answering(stream_of(["yes"])))
    visit.ask("hello")
    visit.wait_for_answer()
    edit = page.locator(".asked button")

    def choose_language(name: str) -> None:
        page.locator("#open-settings").click()
        page.locator("[name=language]").select_option(name)
        page.locator("#settings [type=submit]").click()

    choose_language("zh")
    edit.click()
    expect(page.locator(".question-editor [type=submit]")).to_have_text("发送")
    choose_language("en")
    page.route("**/status", status_of(models=[]))
    page.get_by_role("button", name="Cancel").click()
    expect(edit).to_have_accessible_name("Edit the question")
    choose_language("zh")
    expect(page.locator(".slots")).to_have_text("没有加载模型。")
    page.unroute("**/status")
    expect(page.locator(".slot").first).to_be_visible()
    choose_language("en")
    page.route("**/status", status_of(models=[]))
    expect(page.locator(".slots")).to_have_text("No model is loaded.")


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
