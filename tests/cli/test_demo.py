"""`glm-multiuser demo`: the transcript, the panes, and the proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
from rich.console import Console

from glm_multiuser.cli import demo, panes
from glm_multiuser.cli.chat_answers import ChatAnswer, chat_together, start_chats
from glm_multiuser.cli.questions import KNOWN, questions
from tests.cli.fake import FakeLLM, Params, Stats
from tests.server.process import ROOT

CORPUS = ROOT / "examples" / "train_glm_tiny" / "corpus.jsonl"


def test_transcript_and_proof(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    result = run("demo", "--users", 3, "--checkpoint", checkpoint, "--max-tokens", 400)
    assert result.exit_code == 0, result.output
    for number, known in enumerate(KNOWN[:3], start=1):
        assert f"[user {number}] {known.question}\n{known.answer}\n" in result.stdout
    assert "3 of 3 answers are identical to the same user alone" in result.stdout
    for part in ("tok/s", "first token", "p50", "start-up", "0 compiled after ready"):
        assert part in result.stdout
    assert "\x1b" not in result.stdout
    assert [llm.closed for llm in fake_llm.opened] == [True]


def test_prompts_of_a_file(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Who are you?\n\n  What is 2 plus 2?\n", encoding="utf-8")
    result = run("demo", "--users", 3, "--checkpoint", checkpoint, "--prompts", file)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    asked = [line.split("] ")[1] for line in lines if line.startswith("[user ")]
    assert asked == ["Who are you?", "What is 2 plus 2?", "Who are you?"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n", "which has none"), (b"\xff\xfe\n", "is in UTF-16"), (None, "cannot read")],
)
def test_prompts_that_cannot_be_read_are_an_error_before_the_model_is_loaded(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    tmp_path: Path,
    content: Optional[bytes],
    message: str,
) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    result = run("demo", "--prompts", file)
    assert result.exit_code == 2
    assert message in result.stderr
    assert fake_llm.opened == []


def test_the_prompts_of_the_examples(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    file = ROOT / "examples" / "prompts.txt"
    result = run("demo", "--users", 8, "--checkpoint", checkpoint, "--prompts", file)
    assert result.exit_code == 0, result.output
    prompts = file.read_text(encoding="utf-8").splitlines()
    assert len(prompts) == len(set(prompts)) == 8
    assert all(f"] {prompt}\n" in result.stdout for prompt in prompts)


def test_an_answer_that_differs_is_told_and_ends_with_exit_code_1(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_llm, "wrong_for", ("user 2",))
    result = run("demo", "--users", 3, "--checkpoint", checkpoint, "--max-tokens", 400)
    assert result.exit_code == 1
    assert "2 of 3 answers are identical" in result.stdout
    tokens = -(-len(KNOWN[1].answer) // 4)
    assert f"user 2 differs: from token {tokens - 1} on" in " ".join(result.stdout.split())


def test_a_failed_answer_is_no_identical_answer(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "questions", lambda count: ["fail"] * count)
    result = run("demo", "--users", 2, "--checkpoint", checkpoint)
    assert result.exit_code == 1
    assert "0 of 2 answers are identical" in result.stdout
    assert "GenerationError: logits of this request are not finite" in result.stdout


def test_every_question_stands_in_the_corpus_with_its_answer() -> None:
    if not CORPUS.is_file():
        pytest.skip("the corpus of glm-tiny is not here")
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    first_rounds = {tuple(json.loads(line)["rounds"][0]) for line in lines}
    assert set(KNOWN) <= first_rounds
    assert len({known.question for known in KNOWN}) == len(KNOWN) == 16


def test_more_users_than_questions_begin_again() -> None:
    assert questions(18)[16:] == [KNOWN[0].question, KNOWN[1].question]


@pytest.mark.parametrize(
    ("count", "width", "height", "expected"),
    [
        (8, 120, 32, (2, 4)),
        (1, 120, 32, (1, 1)),
        (2, 120, 32, (1, 2)),
        (16, 200, 50, (4, 4)),
        (100, 80, 24, (3, 4)),
    ],
)
def test_grid_shape(count: int, width: int, height: int, expected: tuple[int, int]) -> None:
    assert panes.grid_shape(count, width, height) == expected


def frame(answers: list[ChatAnswer], width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(panes.frame(console, answers))
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 8, ["one two", "three"]),
        ("我是 GLM-Tiny，很小。", 8, ["我是", "GLM-Tiny", "，很小。"]),
        ("好好好，好", 6, ["好好", "好，好"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("first\n\n  third", 20, ["first", "", "  third"]),
        ("", 9, [""]),
        ("\x1b[2Jgone\x07", 9, ["[2Jgone"]),
    ],
)
def test_wrap(text: str, width: int, lines: list[str]) -> None:
    assert panes.wrap(text, width) == lines


def test_panes_show_question_answer_and_state(fake_llm: type[FakeLLM]) -> None:
    answers = [
        ChatAnswer(f"user {place}", text) for place, text in enumerate(questions(8), start=1)
    ]
    waiting = frame(answers, 120, 40)
    assert "\n".join(waiting).count("waiting") == 8
    chat_together(fake_llm(), answers, Params(max_tokens=400))  # type: ignore[arg-type]
    lines = frame(answers, 120, 40)
    text = "\n".join(lines)
    assert text.count("✓") == 8
    assert "你是谁" in text
    assert "eleven years." in text
    assert "8 of 8 users answered" in lines[-1]
    assert len(lines) <= 40 - 5


def test_a_long_answer_keeps_its_end_in_sight_and_a_small_window_says_what_is_missing() -> None:
    long = ChatAnswer("user 1", "question", text="word " * 500 + "END", finish_reason="stop")
    answers = [long, *(ChatAnswer(f"user {number}", "?") for number in range(2, 60))]
    lines = frame(answers, 80, 24)
    assert "END" in "\n".join(lines)
    assert "users not shown" in lines[-1]
    assert len(lines) <= 24


def test_a_terminal_gets_panes(fake_llm: type[FakeLLM]) -> None:
    answers = [ChatAnswer("user 1", KNOWN[0].question)]
    console = Console(width=100, height=30, force_terminal=True, color_system=None)
    threads = start_chats(fake_llm(), answers, Params(max_tokens=99))  # type: ignore[arg-type]
    with console.capture() as capture:
        panes.show(console, answers, threads)
    assert "user 1 ✓" in capture.get()
    assert answers[0].text == KNOWN[0].answer


def test_a_cut_answer_says_so() -> None:
    answer = ChatAnswer("user 1", "?", token_ids=[1], finish_reason="length")
    assert panes.status(answer).endswith(", cut at --max-tokens")


def test_compiles_after_ready_are_reported(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_llm, "final_stats", Stats(compiles_after_ready=3))
    result = run("demo", "--users", 1, "--checkpoint", checkpoint)
    assert "3 compiled after ready" in " ".join(result.stdout.split())
