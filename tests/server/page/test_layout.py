"""How the web page shows texts: scrolling, writing directions, wide tables, narrow screens."""

from __future__ import annotations

import re
from typing import Callable

import pytest
from playwright.sync_api import Locator, expect

from tests.server.page.scripts import ANSWERS_BY_HAND, COUNT_LAYOUTS, MARKDOWN
from tests.server.page.visit import (
    COMPLETIONS,
    NARROW,
    Visit,
    answering,
    eventually,
    refusing,
    stream_of,
)

pytestmark = pytest.mark.slow

LINES = "".join(f"line {number}\n\n" for number in range(100))
TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
ARABIC = """مرحبا بالعالم!

- نقطة `code`

> اقتباس

| عمود | آخر |
| --- | --- |
| ١ | ٢ |

```python
x = "مرحبا"  # مرحبا
```

English!
"""


def answer(visit: Visit, text: str, question: str = "hello") -> None:
    """Gets this answer in the first conversation."""
    visit.page.route(COMPLETIONS, answering(stream_of([text])))
    visit.ask(question)
    visit.wait_for_answer()


def wait_for_end(log: Locator) -> None:
    """Returns when the end of a conversation is in sight."""
    eventually(
        lambda: bool(
            log.evaluate(
                """(node) => node.scrollTop > 0
                  && node.scrollHeight - node.scrollTop - node.clientHeight < 2"""
            )
        ),
        "the end of the conversation is not in sight",
    )


# Scrolling


def test_the_end_stays_in_sight_when_the_room_changes(visit: Visit) -> None:
    log = visit.pane().locator(".log")
    answer(visit, LINES)
    wait_for_end(log)
    visit.page.reload()
    wait_for_end(log)
    visit.field().fill("several\nlines\nof\ntext\n")
    wait_for_end(log)
    visit.page.set_viewport_size({"width": 900, "height": 500})
    wait_for_end(log)


def test_the_event_of_an_earlier_scroll_does_not_leave_the_end(visit: Visit) -> None:
    log = visit.pane().locator(".log")
    answer(visit, LINES)
    wait_for_end(log)
    # A frame lays out the new room before it dispatches the event, and tells observers last.
    away = log.evaluate(
        """(node) => {
          node.style.marginBlockEnd = "200px";
          node.dispatchEvent(new Event("scroll"));
          return node.scrollHeight - node.scrollTop - node.clientHeight;
        }"""
    )
    assert away > 100
    wait_for_end(log)


def test_an_empty_conversation_is_read_from_its_beginning(visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport={"width": 800, "height": 360})
    log = visit.pane().locator(".log")
    assert log.evaluate("(node) => node.scrollHeight > node.clientHeight")
    visit.field().fill("several\nlines\nof\ntext\n")
    visit.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(resolve))")
    expect(visit.pane().get_by_text("A conversation of its own")).to_be_in_viewport(ratio=1)


def test_who_has_scrolled_up_stays_there(visit: Visit) -> None:
    log = visit.pane().locator(".log")
    answer(visit, LINES)
    wait_for_end(log)
    log.evaluate("(node) => { node.scrollTop = 100; }")
    visit.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(resolve))")
    visit.field().fill("several\nlines\nof\ntext\n")
    visit.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(resolve))")
    assert log.evaluate("(node) => node.scrollTop") == 100


@pytest.fixture
def by_hand(visitor: Callable[..., Visit]) -> Visit:
    """Answers are written by the test."""
    visit = visitor(open_page=False)
    visit.context.add_init_script(f"{{{ANSWERS_BY_HAND}}}")
    visit.open()
    return visit


def test_a_question_does_not_lay_out_each_earlier_one(by_hand: Visit) -> None:
    page = by_hand.page
    rounds = [{"question": "?", "answer": "yes", "state": "done"}] * 50
    page.evaluate(
        """(rounds) => {
          const key = Object.keys(localStorage).find((name) => name.includes("conversation."));
          const kept = JSON.parse(localStorage.getItem(key));
          localStorage.setItem(key, JSON.stringify({ ...kept, rounds }));
        }""",
        rounds,
    )
    page.reload()
    pane = page.locator(".pane:has(.round)")
    expect(pane.locator(".round")).to_have_count(len(rounds))
    page.evaluate(COUNT_LAYOUTS)
    pane.locator(".composer textarea").fill("and now?")
    pane.locator(".composer textarea").press("Enter")
    page.wait_for_function("() => answers.length > 0")
    page.evaluate("() => { answers[0].write('yes'); answers[0].end(); }")
    pane.locator(".round:last-child [data-state=done]").wait_for()
    assert page.evaluate("() => layouts") < len(rounds)
    wait_for_end(pane.locator(".log"))


def test_who_scrolls_up_slowly_during_an_answer_gets_away_from_its_end(by_hand: Visit) -> None:
    page, log = by_hand.page, by_hand.pane().locator(".log")
    by_hand.ask("hello")
    page.wait_for_function("() => answers.length > 0")
    page.evaluate("(text) => answers[0].write(text)", LINES)
    wait_for_end(log)
    end = log.evaluate("(node) => node.scrollTop")
    log.hover()

    def scrolls_up() -> bool:
        # A wheel that turns before the browser has drawn the new text moves nothing.
        page.mouse.wheel(0, -10)
        page.evaluate(TWO_FRAMES)
        return bool(log.evaluate("(node) => node.scrollTop") < end)

    eventually(scrolls_up, "it did not scroll")
    page.evaluate("(text) => { answers[0].write(text); answers[0].end(); }", LINES)
    by_hand.wait_for_answer()
    assert log.evaluate("(node) => node.scrollTop") < end
    page.mouse.wheel(0, 100_000)
    wait_for_end(log)


def test_answers_that_are_slow_to_draw_take_turns(visitor: Callable[..., Visit]) -> None:
    visit = visitor(open_page=False)
    page = visit.page
    visit.context.add_init_script(f"{{{ANSWERS_BY_HAND}}}")
    page.clock.install()
    visit.open()
    visit.ask_both("one", "two")
    page.wait_for_function("() => answers.length > 1")
    page.clock.pause_at(page.evaluate("() => Date.now() / 1000 + 10"))
    page.evaluate(
        """() => {
          const now = performance.now.bind(performance);
          let spent = 0;
          performance.now = () => now() + (spent += 100);
          for (const answer of answers) answer.write("text");
        }"""
    )
    expect(page.locator("[data-state=streaming]")).to_have_count(2)
    page.clock.run_for(20)
    assert page.locator(".markdown p").all_text_contents() == ["text"]
    page.clock.run_for(1000)
    assert page.locator(".markdown p").all_text_contents() == ["text", "text"]
    page.evaluate("() => { for (const answer of answers) answer.end(); }")


def test_a_double_click_on_send_does_not_stop_the_answer(by_hand: Visit) -> None:
    by_hand.field().fill("hello")
    by_hand.pane().get_by_role("button", name="Send").dblclick()
    by_hand.page.evaluate("() => { answers[0].write('yes'); answers[0].end(); }")
    assert by_hand.wait_for_answer() == "yes"


def test_an_answer_that_grew_behind_a_tab_shows_its_end(visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport=NARROW, open_page=False)
    visit.context.add_init_script(f"{{{ANSWERS_BY_HAND}}}")
    visit.open()
    page = visit.page
    page.get_by_role("textbox", name="Message").fill("hello")
    page.keyboard.press("Enter")
    page.wait_for_function("() => answers.length > 0")
    log = page.locator(".log").first
    page.evaluate("(text) => answers[0].write(text)", LINES)
    wait_for_end(log)
    page.get_by_role("tab", name="Conversation 2").click()
    page.evaluate("(text) => { answers[0].write(text); answers[0].end(); }", f"{LINES}the end")
    page.locator("[data-state=done]").wait_for(state="attached")
    page.get_by_role("tab", name="hello").click()
    wait_for_end(log)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        ("```\n" + "wide " * 200 + "\n", "more\n"),
        ("| " + "wide | " * 99 + "\n|" + "-|" * 99 + "\n", "| a |\n"),
    ],
    ids=["code", "table"],
)
def test_who_has_scrolled_a_wide_block_that_grows_stays_there(
    by_hand: Visit, begin: str, more: str
) -> None:
    by_hand.ask("wide?")
    by_hand.page.wait_for_function("() => answers.length > 0")
    by_hand.page.evaluate("(text) => answers[0].write(text)", begin)
    frame = by_hand.answer().locator(".scroll")
    frame.evaluate("(node) => { node.scrollLeft = 50; }")
    by_hand.page.evaluate("(text) => answers[0].write(text)", more)
    expect(frame).to_contain_text(more.strip("| \n"))
    assert frame.evaluate("(node) => node.scrollLeft") == 50


# Writing


def direction(node: Locator) -> str:
    return str(node.evaluate("(node) => getComputedStyle(node).direction"))


def test_what_is_written_from_right_to_left_is_shown_so(visit: Visit) -> None:
    answer(visit, ARABIC, question="كيف الحال؟")
    blocks = visit.answer()
    for selector in (".question", ".pane-name"):
        assert direction(visit.pane().locator(selector)) == "rtl"
    for selector in ("p >> nth=0", "ul", "blockquote", "table"):
        assert direction(blocks.locator(selector)) == "rtl"
    for selector in ("pre", "li code", "p >> nth=-1"):
        assert direction(blocks.locator(selector)) == "ltr"
    visit.field().fill("مرحبا")
    assert direction(visit.field()) == "rtl"


def test_each_line_of_a_question_has_its_own_direction(visit: Visit) -> None:
    answer(visit, "yes", question="كيف الحال؟\nfine")
    first, second, field = (
        visit.pane()
        .locator(".question")
        .evaluate(
            """(node) => {
              const range = document.createRange();
              range.selectNodeContents(node);
              const lines = [...range.getClientRects()].filter(({ width }) => width > 1);
              const field = node.getBoundingClientRect();
              return [...lines, field].map(({ left, right }) => ({ left, right }));
            }"""
        )
    )
    padding = field["right"] - first["right"]
    assert second["left"] - field["left"] == pytest.approx(padding, abs=1)


def test_enter_that_chooses_a_word_renames_nothing(visit: Visit) -> None:
    visit.pane().get_by_role("button", name="Rename").click()
    field = visit.page.get_by_role("textbox", name="New name")
    field.fill("ni")
    field.dispatch_event("keydown", {"key": "Enter", "keyCode": 229})  # as Safari says it
    field.fill("你")
    field.press("Enter")
    expect(visit.pane().locator(".pane-name")).to_have_text("你")


BESIDE_CJK = {
    "这是**“重要”**的": "这是<strong>“重要”</strong>的",
    "**注意：**请看": "<strong>注意：</strong>请看",
    "他说**好。**然后": "他说<strong>好。</strong>然后",
    "**Note:**中文": "<strong>Note:</strong>中文",
    "*中文*，**强调**。": "<em>中文</em>，<strong>强调</strong>。",
    "**`code`：**说明": "<strong><code>code</code>：</strong>说明",
    "日本語**「強調」**です": "日本語<strong>「強調」</strong>です",
    "**한국어(영어)**를": "<strong>한국어(영어)</strong>를",
    "_中文_文": "_中文_文",
    "2 * 3 * 4，5*6": "2 * 3 * 4，5*6",
    "a **b:** c**d:**e": "a <strong>b:</strong> c**d:**e",
}
"""As markdown-it 15.0.3 with markdown-it-cjk-friendly 3.0.0 has them."""


def test_emphasis_beside_chinese_japanese_and_korean(visit: Visit) -> None:
    found = visit.page.evaluate(MARKDOWN, list(BESIDE_CJK))
    assert dict(zip(BESIDE_CJK, found)) == BESIDE_CJK


def test_an_address_ends_where_chinese_goes_on(visit: Visit) -> None:
    answer(visit, "见https://example.com/a?b=1。然后（https://example.com/c）")
    links = visit.answer().get_by_role("link")
    expect(links).to_have_text(["https://example.com/a?b=1", "https://example.com/c"])
    addresses = links.evaluate_all("(nodes) => nodes.map((node) => node.href)")
    assert addresses == ["https://example.com/a?b=1", "https://example.com/c"]
    expect(visit.answer()).to_have_text(
        "见https://example.com/a?b=1。然后（https://example.com/c）"
    )


# Narrow


def test_every_button_fits_whatever_state_the_server_is_in(visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport={"width": 320, "height": 568})
    visit.refused = {401}
    visit.page.route("**/status", refusing(401, "missing_api_key", "why"))
    state = visit.page.get_by_text("API key needed", exact=True)
    for part in (state, *visit.page.locator(".bar button:visible").all()):
        expect(part).to_be_in_viewport(ratio=1)


def test_a_selected_tab_is_not_behind_the_last_one(visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport=NARROW)
    for _ in range(3):
        visit.page.get_by_role("button", name="New conversation").click()
    tabs = visit.page.get_by_role("tab")
    for place in (1, 3, 4):
        tabs.nth(place).focus()
        visit.page.keyboard.press("Enter")
        right = tabs.nth(place).evaluate("(node) => node.getBoundingClientRect().right")
        assert right <= tabs.last.evaluate("(node) => node.getBoundingClientRect().left") + 1


def test_a_wide_table_scrolls_and_its_words_stay_whole(visitor: Callable[..., Visit]) -> None:
    visit = visitor(viewport={"width": 360, "height": 740})
    names = ["temperature", "top_probability", "max_tokens", "presence_penalty", "seed"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (names, ["-"] * 5, ["0"] * 5))
    visit.page.route(COMPLETIONS, answering(stream_of([table])))
    visit.page.get_by_role("textbox", name="Message").fill("table")
    visit.page.keyboard.press("Enter")
    cells = visit.page.locator("th")
    expect(cells).to_have_text(names)
    lines = cells.evaluate_all(
        """(nodes) => nodes.map(
          (node) => Math.floor(node.clientHeight / parseFloat(getComputedStyle(node).lineHeight)),
        )"""
    )
    assert lines == [1] * 5
    frame = visit.page.locator(".markdown .scroll")
    assert frame.evaluate("(node) => node.scrollWidth > node.clientWidth")
    assert visit.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


# Refusals of a proxy


@pytest.mark.parametrize(
    ("status", "title"),
    [(502, "The server cannot be reached."), (413, "The server rejected this question.")],
)
def test_a_proxy_that_refuses_in_html(visit: Visit, status: int, title: str) -> None:
    visit.refused = {status}
    visit.page.route(
        COMPLETIONS, lambda route: route.fulfill(status=status, body="<h1>Refused</h1>")
    )
    visit.ask("hello")
    expect(visit.failure()).to_have_text(title)
    expect(visit.pane().locator(".failure-detail")).to_have_text(re.compile(f"^HTTP {status}$"))
