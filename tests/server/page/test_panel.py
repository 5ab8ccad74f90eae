"""The live panel: slots, the queue and other users."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable

import pytest
from playwright.sync_api import expect

from tests.server.held_steps import held_steps
from tests.server.page.real_server import FEW, LONG_QUESTION, SECOND, asked
from tests.server.page.visit import Visit, eventually, status_of
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


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
    long = {**loading, "model": "a-model-with-a-long-name", "what": "prefill of prompts"}
    visit.page.route("**/status", status_of(state="starting", loading=long, models=models))
    expect(panel.get_by_text("a-model-with-a-long-name: prefill of prompts")).to_be_visible()
    lines = panel.get_by_text("3 / 12").evaluate(
        """(node) => {
          const range = document.createRange();
          range.selectNodeContents(node);
          return range.getClientRects().length;
        }"""
    )
    assert lines == 1
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
