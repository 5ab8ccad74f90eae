"""What answers may contain, among it attacks, and how their stream is taken apart."""

from __future__ import annotations

import itertools
import re

import pytest
from playwright.sync_api import expect

from tests.server.page.scripts import (
    CHARACTERS_READ,
    COPY_AND_GROW,
    CUT_EVERYWHERE,
    GROW,
    LEAVE_EARLY,
)
from tests.server.page.visit import COMPLETIONS, Visit, answering, refusing, stream_of
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def url(server: ServerProcess) -> str:
    return server.url


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


def test_a_long_line_is_not_read_anew_at_each_asterisk(visit: Visit) -> None:
    line = "a*b*c + 2*x " * 300
    assert visit.page.evaluate(CHARACTERS_READ, line) < 50 * len(line)


def test_only_what_changed_in_a_growing_answer_is_drawn_anew(visit: Visit) -> None:
    assert visit.page.evaluate(GROW) == [True, False, "second"]


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        (
            "<script>for (let i=0;i<n;i++)</script> end",
            "<script>for (let i=0;i<n;i++)</script> end",
        ),
        ("Use the <code> tag for a<b && c; more", "Use the <code> tag for a<b && c; more"),
        ("<kbd>a<b</kbd> end", "a<b end"),
        ("A <pre> block: x <!-- y", "A <pre> block: x <!-- y"),
        ("气温10~20度，湿度30~40度。", "气温10~20度，湿度30~40度。"),
        ("~~old~~ new", "old new"),
        ("[Alice]: Hello\n[Bob]: Hi", "[Alice]: Hello\n[Bob]: Hi"),
        ("[注意]: 重要", "[注意]: 重要"),
        ("see [1]\n\n[1]: https://example.com/", "see 1"),
        ("官网：\n\n[官网]: https://example.com/", "官网：\n\n[官网]: https://example.com/"),
        ("call handlers[i](event)，见[注](附录一)", "call handlers[i](event)，见[注](附录一)"),
        ("[a.json](./a.json) [b](https://example.com/)", "[a.json](./a.json) b"),
        ("| a |\n|---|\n| 1 | 2 | 3 |\n| x \\| y |", "a\t\t\n1\t2\t3\nx | y"),
        ("a | b\n-|-\n1 | 2 | 3", "a\tb\t\n1\t2\t3"),
        ("```pip install <name>\nx\n```", "pip install <name>\nCopy code\nx\n"),
    ],
)
def test_no_word_is_lost(visit: Visit, markdown: str, shown: str) -> None:
    visit.page.route(COMPLETIONS, answering(stream_of([markdown])))
    visit.ask("?")
    visit.wait_for_answer()
    assert [line.split() for line in visit.answer().inner_text().splitlines()] == [
        line.split() for line in shown.splitlines()
    ]
    assert visit.answer().locator(":is(script, .failure)").count() == 0


def test_a_picture_is_not_loaded_but_can_be_opened(visit: Visit) -> None:
    picture, badge = "![](https://example.com/a.png)", "![badge](https://example.com/b.png)"
    text = f"{picture} [{badge}](https://example.com/c) ![](data:image/png;base64,AA)"
    visit.page.route(COMPLETIONS, answering(stream_of([text])))
    visit.ask("?")
    visit.wait_for_answer()
    links = visit.answer().get_by_role("link")
    expect(links).to_have_text(["https://example.com/a.png", "badge"])
    for link, address in zip(links.all(), ("https://example.com/a.png", "https://example.com/c")):
        expect(link).to_have_attribute("href", address)
        expect(link).to_have_attribute("rel", "noopener noreferrer")
        expect(link).to_have_attribute("target", "_blank")
    expect(visit.answer().locator(".picture")).to_have_count(3)


@pytest.mark.parametrize(
    "formula",
    [
        r"\(x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}\)",
        r"\[ E_{1} = m_1 * c^2 * d_2 \\[2pt] \]",
        r"$$\begin{pmatrix} a & b \\ c & d \end{pmatrix}$$",
        "$a_1*b_2*c$",
        "$$\na\n- b\n$$",
    ],
)
def test_formulas_are_shown_as_they_are_written(visit: Visit, formula: str) -> None:
    line = formula.replace("\n", " ")
    markdown = f"**It is**\n{formula}\nin *LaTeX*, 而{line}是 $5, *not* $6 or `$x`."
    visit.page.route(COMPLETIONS, answering(stream_of([markdown])))
    visit.ask("?")
    visit.wait_for_answer()
    shown = f"It is\n{formula}\nin LaTeX, 而{line}是 $5, not $6 or $x."
    assert re.sub(r"\n+", "\n", visit.answer().inner_text()) == shown


def test_formulas_in_a_line_stay_in_their_paragraph(visit: Visit) -> None:
    text = "It is $$a*b*c$$\nor \\[d*e*f\\]\nin short."
    visit.page.route(COMPLETIONS, answering(stream_of([text])))
    visit.ask("?")
    visit.wait_for_answer()
    assert visit.answer().locator("p").all_inner_texts() == [text]


def test_short_chinese_cells_stay_on_one_line(visit: Visit) -> None:
    long = "适合长文档的处理，也适合翻译。" * 3
    table = f"|模型|参数量|说明|\n|-|-|-|\n|甲模型|三百二十亿|{long}|"
    visit.page.route(COMPLETIONS, answering(stream_of([table])))
    visit.ask("?")
    visit.wait_for_answer()
    visit.answer().evaluate("(node) => { node.style.width = '300px'; }")
    for name in ("参数量", "三百二十亿"):
        lines = (
            visit.answer()
            .get_by_text(name, exact=True)
            .evaluate(
                """(node) => {
              const range = document.createRange();
              range.selectNodeContents(node);
              return range.getClientRects().length;
            }"""
            )
        )
        assert lines == 1


def test_a_copied_block_stays_while_the_answer_grows(visit: Visit) -> None:
    assert visit.page.evaluate(COPY_AND_GROW) == ["BUTTON", "kept"]


HEAR = """
() => {
  window.said = [];
  for (const node of document.querySelectorAll(".pane [role=status]")) {
    const hear = () => window.said.push(node.textContent);
    new MutationObserver(hear).observe(node, { childList: true });
  }
}
"""


def test_an_answer_is_announced_once_and_not_token_by_token(visit: Visit) -> None:
    visit.page.evaluate(HEAR)
    visit.page.route(COMPLETIONS, answering(stream_of(["one ", "two ", "three"])))
    visit.ask("count")
    visit.wait_for_answer()
    assert visit.page.evaluate("() => window.said") == [
        "Conversation 1 is answering",
        "Conversation 1 answered: one two three",
    ]
    assert visit.pane().get_by_role("log").get_attribute("aria-live") == "off"


def test_an_answer_is_not_announced_again_in_another_language(visit: Visit) -> None:
    visit.ask("a")
    visit.wait_for_answer()
    visit.page.evaluate(HEAR)
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.get_by_label("Language").select_option("中文")
    visit.page.get_by_role("button", name="Save").click()
    expect(visit.page.locator("html")).to_have_attribute("lang", "zh-CN")
    assert visit.page.evaluate("() => window.said") == []


def test_an_old_answer_that_stays_is_not_announced_as_a_new_one(visit: Visit) -> None:
    visit.ask("a")
    visit.wait_for_answer()
    visit.page.evaluate(HEAR)
    visit.refused = {429}
    visit.page.route(COMPLETIONS, refusing(429, "queue_full", "why"))
    visit.pane().get_by_role("button", name="Answer again").click()
    expect(visit.page.get_by_text("There is no new answer, so the old one stays.")).to_be_visible()
    visit.page.unroute(COMPLETIONS)
    visit.page.route(COMPLETIONS, lambda route: None)
    visit.pane().get_by_role("button", name="Answer again").click()
    visit.pane().get_by_role("button", name="Stop").click()
    visit.pane().get_by_role("button", name="Answer again").wait_for()
    assert visit.page.evaluate("() => window.said") == [
        "Conversation 1 is answering",
        "Conversation 1: The server is full. why",
        "Conversation 1 is answering",
        "Conversation 1: stopped",
    ]
