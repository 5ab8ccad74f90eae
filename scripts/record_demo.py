"""Records `glm-multiuser demo` as docs/demo.gif, in slow motion.

    python scripts/record_demo.py

Needs Chromium, which draws the frames (`make browser`).
"""

from __future__ import annotations

import argparse
import copy
import html
import io
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.cells import cell_len
from rich.console import Console

from glm_multiuser.cli import demo, loading
from glm_multiuser.cli.chat_answers import ChatAnswer, start_chats, wall_seconds
from glm_multiuser.cli.panes import frame
from glm_multiuser.cli.questions import questions

TARGET = Path(__file__).resolve().parents[1] / "docs/demo.gif"
USERS, WIDTH, HEIGHT, PIXELS = 8, 112, 34, 1120
FRAMES, FRAME_MS, LAST_MS = 24, 200, 6000
BACKGROUND = "#292929"
LENGTH = re.compile(r'textLength="([\d.]+)"([^>]*)>([^<]*)<')


def terminal() -> Console:
    return Console(
        record=True,
        width=WIDTH,
        height=HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        highlight=False,
    )


def record() -> tuple[list[list[ChatAnswer]], Console]:
    """Returns snapshots of all answers, and the final terminal."""
    with loading.open_llm(loading.DEFAULT_CHECKPOINT, users=USERS, seq_length=256) as llm:
        params = loading.sampling_params(max_tokens=128, temperature=0.0)
        asked = [ChatAnswer(f"user {n}", text) for n, text in enumerate(questions(USERS), start=1)]
        seen = []
        threads = start_chats(llm, asked, params)
        while any(thread.is_alive() for thread in threads):
            seen.append(copy.deepcopy(asked))
            time.sleep(0.002)
        seen.append(copy.deepcopy(asked))
        alone = demo.ask_each_alone(llm, asked, params)
        console = terminal()
        console.print(frame(console, asked))
        demo.print_proof(console, asked, alone)
        demo.print_speed(console, llm, asked, alone)
        return seen, console


def evenly(seen: Sequence[list[ChatAnswer]]) -> list[list[ChatAnswer]]:
    """Selects frames at equal distances in tokens."""
    tokens = [sum(len(answer.token_ids) for answer in answers) for answers in seen]
    wanted = [tokens[-1] * number / FRAMES for number in range(1, FRAMES)]
    return [next(one for one, had in zip(seen, tokens) if had >= least) for least in wanted]


def picture(console: Console, title: str) -> str:
    """The terminal as SVG, with corrected widths: Rich counts wide characters as narrow."""

    def widened(found: re.Match[str]) -> str:
        text = html.unescape(found[3])
        length = float(found[1]) * cell_len(text) / max(len(text), 1)
        return f'textLength="{length:g}"{found[2]}>{found[3]}<'

    return LENGTH.sub(widened, console.export_svg(title=title))


def draw(consoles: Sequence[Console], title: str) -> list[Image.Image]:
    with sync_playwright() as playwright:
        path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page(viewport={"width": PIXELS, "height": PIXELS})
        images = []
        for console in consoles:
            style = f"<style>body {{ margin: 0 }} svg {{ width: {PIXELS}px }}</style>"
            page.set_content(style + picture(console, title))
            shot = page.locator("svg").screenshot()
            images.append(Image.open(io.BytesIO(shot)).convert("RGB"))
        browser.close()
    return images


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help must not record
    seen, last = record()
    consoles = []
    for answers in evenly(seen):
        consoles.append(terminal())
        consoles[-1].print(frame(consoles[-1], answers))
    slower = FRAMES * FRAME_MS / 1000 / wall_seconds(seen[-1])
    images = draw([*consoles, last], f"glm-multiuser demo, {slower:.0f} times slower than it ran")
    height = max(image.height for image in images)
    canvas = [Image.new("RGB", (PIXELS, height), BACKGROUND) for _ in images]
    for whole, image in zip(canvas, images):
        whole.paste(image, (0, 0))
    palette = canvas[-1].quantize(64)
    drawn = [image.quantize(64, palette=palette, dither=Image.Dither.NONE) for image in canvas]
    durations = [FRAME_MS] * len(consoles) + [LAST_MS]
    drawn[0].save(
        TARGET, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True
    )
    print(f"{TARGET}: {len(drawn)} frames, {TARGET.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
