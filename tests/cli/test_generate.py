"""`glm-multiuser generate`: lines in, lines of JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli import generate
from glm_multiuser.errors import QueueFullError
from tests.cli.fake import FakeLLM, Handle, Params


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_plain_lines(run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path) -> None:
    result = run("generate", "-", "--checkpoint", checkpoint, stdin="abc\n\n  \nxy z\n")
    assert result.exit_code == 0, result.output
    assert rows(result.stdout) == [
        {
            "index": 0,
            "prompt": "abc",
            "text": "cba",
            "token_ids": [99, 98, 97],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "completion_tokens": 3},
        },
        {
            "index": 1,
            "prompt": "xy z",
            "text": "z yx",
            "token_ids": [122, 32, 121, 120],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 4, "completion_tokens": 4},
        },
    ]


def test_json_lines_and_a_file(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, tmp_path: Path
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": "ab", "user": 7}, {"prompt": [5, 6, 7]}]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = run(
        "generate", prompts, "--out", answers, "--checkpoint", checkpoint, "--max-tokens", 2
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    first, second = rows(answers.read_text(encoding="utf-8"))
    assert (first["text"], first["prompt"]) == ("ba", "ab")
    assert (second["token_ids"], second["prompt"]) == ([8, 9], [5, 6, 7])


def test_history_and_user_reach_the_engine(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    line = {"prompt": "and now?", "history": [["a", "b"], ["c", "d"]], "user": "eve"}
    assert run("generate", "--checkpoint", checkpoint, stdin=json.dumps(line)).exit_code == 0
    assert fake_llm.opened[0].asked == [("and now?", "eve", [["a", "b"], ["c", "d"]])]


def test_a_failed_prompt_does_not_end_the_others(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    lines = ["ok", "x" * 500, '{"prompt": 3}', '{"question": "?"}', "{broken", "also ok"]
    result = run("generate", "--checkpoint", checkpoint, stdin="\n".join(lines))
    assert result.exit_code == 1
    got = rows(result.stdout)
    assert [row["index"] for row in got] == list(range(6))
    assert [("text" in row, "error" in row) for row in got] == [
        (True, False),
        *[(False, True)] * 4,
        (True, False),
    ]
    assert "the limit is 400" in got[1]["error"]
    assert "prompt is None" in got[3]["error"]
    assert "not JSON" in got[4]["error"]
    assert "4 of 6 prompts failed" in result.stderr


def test_sampling_options_reach_the_engine(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Params] = []
    submit = fake_llm.submit

    def remember(self: FakeLLM, prompt: str, params: Params, **settings: Any) -> Handle:
        seen.append(params)
        return submit(self, prompt, params, **settings)

    monkeypatch.setattr(fake_llm, "submit", remember)
    words = [
        "--temperature",
        "0.7",
        "--top-k",
        "5",
        "--top-p",
        "0.9",
        "--seed",
        "11",
        "--max-tokens",
        "4",
    ]
    assert run("generate", "--checkpoint", checkpoint, *words, stdin="a\n").exit_code == 0
    assert seen == [Params(max_tokens=4, temperature=0.7, top_k=5, top_p=0.9, seed=11)]


def test_many_more_prompts_than_the_queue_holds() -> None:
    class Narrow(FakeLLM):
        under_way = 0
        most = 0

        def submit(self, prompt: Any, params: Any, **options: Any) -> Handle:
            if self.under_way == 3:
                raise QueueFullError("3 requests are waiting; the limit is 3")
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            llm = self
            handle = super().submit(prompt, params, **options)

            class Counting(Handle):
                def result(self, timeout: Any = None) -> Any:
                    llm.under_way -= 1
                    return super().result(timeout)

            return Counting(handle.pieces, handle.prompt_tokens)

    llm = Narrow()
    jobs = [generate.Job(index, f"prompt {index}") for index in range(50)]
    got = list(generate.answer_all(llm, jobs, Params(max_tokens=9), users=8))  # type: ignore[arg-type]
    assert [row["index"] for row in got] == list(range(50))
    assert all("text" in row for row in got)
    assert llm.most == 3


def test_a_file_that_is_not_there(run: Callable[..., Any], fake_llm: type[FakeLLM]) -> None:
    result = run("generate", "no-such-file.txt")
    assert result.exit_code == 2
    assert "cannot read no-such-file.txt" in result.stderr
