"""The web page in a real browser, watched for what must never happen on it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Optional
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    Response,
    Route,
    expect,
)

from tests.server.process import ROOT

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE = {"width": 1440, "height": 900}
NARROW = {"width": 390, "height": 844}
PATIENCE_MS = 60_000
COMPLETIONS = "**/v1/chat/completions"

expect.set_options(timeout=PATIENCE_MS)

REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  console.error(`violates ${event.violatedDirective}: ${event.blockedURI}`);
});
"""


COPIED_FOR = re.search(
    r"COPIED_FOR = (\d+);",
    (ROOT / "glm_multiuser/server/static/js/copy_button.js").read_text(encoding="utf-8"),
)
assert COPIED_FOR
KEEP_COPIED = f"""
const later = window.setTimeout;
window.setTimeout = (work, delay, ...more) =>
  delay === {COPIED_FOR[1]} ? 0 : later(work, delay, ...more);
"""
"""A button that says "Copied" says it until a busy test has seen it."""


class Visit:
    """A visitor with a browser of their own: storage, language and colours are theirs alone.

    Args:
        browser: any.
        url: of the server.
        options: of the browser context; wide, light and English if they say nothing else.

    Attributes:
        page: the open page.
        refused: HTTP statuses that this test provokes; any other error status is a failure.
        lost: whether this test cuts connections.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        defaults: dict[str, Any] = {"viewport": WIDE, "locale": "en-US", "color_scheme": "light"}
        self.context = browser.new_context(**{**defaults, **options})
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.add_init_script(REPORT_VIOLATIONS)
        self.context.add_init_script(f"{{{KEEP_COPIED}}}")
        self.context.on("page", self._watch)
        self.refused: set[int] = set()
        self.lost = False
        self.requests: list[Request] = []
        self._responses: list[Response] = []
        self._errors: list[str] = []
        self.page = self.context.new_page()

    def open(self) -> None:
        """Goes to the page and waits until it is put together."""
        self.page.goto(self.url)
        self.page.locator(".pane, .live").first.wait_for(state="attached")

    def end(self) -> None:
        """Closes the browser's window, and fails if anything happened that must not."""
        self.context.close()
        host = urlsplit(self.url).netloc
        elsewhere = [one.url for one in self.requests if urlsplit(one.url).netloc != host]
        assert elsewhere == [], "a request left the server that the page came from"
        statuses = {one.status for one in self._responses if one.status >= 400}
        assert statuses <= self.refused
        assert self._errors == []

    def pane(self, name: str = "Conversation 1") -> Locator:
        """A conversation by its number, or by its title."""
        label = re.compile(f"^{re.escape(name)}(: .*)?$|: {re.escape(name)}$")
        return self.page.get_by_role("region", name=label)

    def field(self, name: str = "Conversation 1") -> Locator:
        return self.pane(name).get_by_role("textbox", name="Message")

    def ask(self, question: str, name: str = "Conversation 1") -> None:
        self.field(name).fill(question)
        self.field(name).press("Enter")

    def ask_both(self, first: str, second: str) -> None:
        """Asks in two conversations at nearly the same time."""
        fields = [self.field("Conversation 1"), self.field("Conversation 2")]
        for field, question in zip(fields, (first, second)):
            field.fill(question)
        for field in fields:
            field.press("Enter")

    def answer(self, name: str = "Conversation 1") -> Locator:
        """The text of the last answer."""
        return self.pane(name).locator(".markdown").last

    def failure(self, name: str = "Conversation 1") -> Locator:
        """The sentence that says what went wrong with the last answer."""
        return self.pane(name).locator(".round:last-child .failure-title")

    def wait_for_answer(self, name: str = "Conversation 1") -> str:
        """The last answer when it is done."""
        self.pane(name).locator(".round:last-child [data-state=done]").wait_for()
        return self.answer(name).inner_text()

    def wait_for_first_text(self, name: str = "Conversation 1") -> str:
        """What there is of the last answer while the rest is still coming."""
        self.pane(name).locator("[data-state=streaming] .markdown p").first.wait_for()
        return self.answer(name).inner_text()

    def set(self, fields: dict[str, str]) -> None:
        """Fills in the settings, by the labels of their fields, and saves them."""
        self.page.get_by_role("button", name="Settings").click()
        dialog = self.page.get_by_role("dialog", name="Settings")
        for label, value in fields.items():
            dialog.get_by_label(label, exact=True).fill(value)
        dialog.get_by_role("button", name="Save").click()
        dialog.wait_for(state="hidden")

    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of all requests for answers so far."""
        asked = [one for one in self.requests if one.url.endswith("/v1/chat/completions")]
        return [one.post_data_json or {} for one in asked]

    def kept(self) -> dict[str, Any]:
        """What the browser keeps for this page between visits."""
        found = self.page.evaluate("() => ({...localStorage})")
        return {name: json.loads(value) for name, value in found.items()}

    def _watch(self, page: Page) -> None:
        page.on("request", lambda request: self.requests.append(request))
        page.on("response", lambda response: self._responses.append(response))
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        # The browser says this about every error status and every cut connection; the statuses
        # are compared on their own.
        expected = ["status of"] + ["net::ERR_"] * self.lost
        if message.type not in ("error", "warning"):
            return
        if not any(part in message.text for part in expected):
            self._errors.append(message.text)


@contextmanager
def visitors(browser: Browser, url: str) -> Iterator[Callable[..., Visit]]:
    """Makes visitors; whatever they did, the page sent nothing elsewhere and logged no error."""
    visits: list[Visit] = []

    def come(*, open_page: bool = True, **options: Any) -> Visit:
        visits.append(Visit(browser, url, **options))
        if open_page:
            visits[-1].open()
        return visits[-1]

    yield come
    for visit in visits:
        visit.end()


def stream_of(
    texts: Iterable[str], *, calls: Sequence[tuple[str, str]] = (), end: str = "stop"
) -> str:
    """The body of a streamed answer in these pieces, as the server writes it.

    Args:
        texts: of the answer.
        calls: of tools, each a name and arguments.
        end: why it ended.
    """
    deltas: list[dict[str, Any]] = [{"content": text} for text in texts]
    for place, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        call = {"index": place, "id": f"call_{place}", "type": "function", "function": function}
        deltas.append({"tool_calls": [call]})
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": end})
    chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(choices)}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answering(body: str) -> Callable[[Route], None]:
    """For `page.route`: a server whose answer is this stream."""
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def refusing(
    status: int, code: str, message: str, headers: Optional[dict[str, str]] = None
) -> Callable[[Route], None]:
    """For `page.route`: a server that refuses, in the shape of OpenAI's errors."""
    error = {"message": message, "type": "error", "param": None, "code": code}
    return lambda route: route.fulfill(status=status, headers=headers, json={"error": error})


def status_of(**changes: Any) -> Callable[[Route], None]:
    """For `page.route`: a server in this state, otherwise ready and idle."""
    status: dict[str, Any] = {
        "state": "ready",
        "loading": None,
        "models": [{"name": "big", "state": "ready", "users": 2, "seq_length": 100}],
        "slots": [],
        "queue": {"waiting": 3, "limit": 64},
        "cache_bytes": {"reserved": 8_400_000_000, "resident": 96_300_000},
        "sessions": {"in_memory": 3, "on_disk": 1500, "restored": 7},
        "tokens_per_second": {"now": 12.4, "last_minute": [0.0, 88.0, 12.4]},
        "totals": {"requests": 1234567, "tokens_generated": 0, "compiles_after_ready": 0},
    }
    return lambda route: route.fulfill(json={**status, **changes})


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Asks again and again, without a pause: each question is a request to the server."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, what
