"""`glm-multiuser generate`: lines in, lines of JSON out."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser import CausalConfig, MultiUserLLM
from glm_multiuser.cli import generate, loading
from glm_multiuser.cli.commands import app
from glm_multiuser.cli.generate_input import read_jobs
from glm_multiuser.errors import QueueFullError
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.structured.grammar import Grammar
from tests.cli.conftest import separate_streams
from tests.cli.fake import FakeLLM, Handle, Params


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n")[:-1]]


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
    asked: list[Any] = fake_llm.opened[0].asked
    assert asked == [("and now?", "eve", [["a", "b"], ["c", "d"]])]


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

    def remember(self: FakeLLM, prompt: str, *, params: Params, **settings: Any) -> Handle:
        seen.append(params)
        return submit(self, prompt, params=params, **settings)

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

        def submit(self, prompt: Any, **options: Any) -> Handle:
            if self.under_way == 3:
                raise QueueFullError("3 requests are waiting; the limit is 3")
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            llm = self
            handle = super().submit(prompt, **options)

            class Counting(Handle):
                def result(self, timeout: Any = None) -> Any:
                    llm.under_way -= 1
                    return super().result(timeout)

            return Counting(handle.pieces, handle.prompt_tokens)

    llm = Narrow()
    params: Any = Params(max_tokens=9)
    jobs = list(read_jobs([f"prompt {index}" for index in range(50)], params))
    got = list(generate.answer_all(llm, jobs, users=8))  # type: ignore[arg-type]
    assert [row["index"] for row in got] == list(range(50))
    assert all("text" in row for row in got)
    assert llm.most == 3


def test_a_file_that_is_not_there(run: Callable[..., Any], fake_llm: type[FakeLLM]) -> None:
    result = run("generate", "no-such-file.txt")
    assert result.exit_code == 2
    assert "cannot read no-such-file.txt" in result.stderr


SEPARATOR = "\u2028"


@pytest.mark.parametrize("source", ["file", "stdin"])
@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (f"a{SEPARATOR}b\nc".encode(), [f"a{SEPARATOR}b", "c"]),
        (b"\xef\xbb\xbfa\r\nb\r\n", ["a", "b"]),
        ("a\x0bb\x85c\x1cd\n你好\n".encode(), ["a\x0bb\x85c\x1cd", "你好"]),
    ],
)
def test_files_and_stdin_are_read_alike(
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    tmp_path: Path,
    source: str,
    content: bytes,
    prompts: list[str],
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    words = ["generate", "-" if source == "stdin" else str(file), "--checkpoint", str(checkpoint)]
    result = separate_streams().invoke(app, words, input=content if source == "stdin" else None)
    assert result.exit_code == 0, result.output
    assert [row["prompt"] for row in rows(result.stdout)] == prompts


@pytest.mark.parametrize("source", ["file", "stdin"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b"\xef\xbb\xbf \n\n", "has no prompts"),
        (b"good\nPK\x03\x04\x00\x00", "is binary; prompts must be text"),
        ("good\n".encode("utf-16"), "is in UTF-16; prompts must be in UTF-8"),
        ("good\n天".encode("gb18030"), "is not in UTF-8: invalid continuation byte in line 2"),
    ],
)
def test_input_that_is_none(
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    tmp_path: Path,
    source: str,
    content: bytes,
    message: str,
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    words = ["generate", "-" if source == "stdin" else str(file), "--checkpoint", str(checkpoint)]
    result = separate_streams().invoke(app, words, input=content if source == "stdin" else None)
    assert result.exit_code == 2
    name = "stdin" if source == "stdin" else str(file)
    assert result.stderr == f"error: {name} {message}\n"
    assert fake_llm.opened == []


def test_parameters_of_a_line(glm_tiny: Path) -> None:
    options = SamplingParams(max_tokens=7, temperature=0.5)
    values: dict[str, Any] = {
        "max_tokens": 3,
        "min_tokens": 1,
        "temperature": 0.7,
        "top_k": 4,
        "top_p": 0.5,
        "repetition_penalty": 1.5,
        "seed": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "cache_prompt": False,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {5: 2.0},
    }
    assert {*values, "grammar"} == {field.name for field in fields(SamplingParams)}
    schema = {"type": "object"}
    line = json.dumps({"prompt": "?", "json_schema": schema, **values})
    lines = [line, "plain", '{"prompt": "!", "seed": 1}']
    first, second, third = read_jobs(lines, options)
    assert first.params == SamplingParams(**values, grammar=Grammar.json_schema(schema))
    assert second.params == options
    assert third.params == replace(options, seed=1)


@pytest.mark.parametrize("token", ["1" * 5000, "1" * 10, "\u0663", "x", "-1"])
def test_what_is_no_token_is_the_error_of_its_line(token: str) -> None:
    lines = [json.dumps({"prompt": "a", "logit_bias": {token: 1}}), "b"]
    first, second = read_jobs(lines, SamplingParams())
    assert str(first.error).startswith("logit_bias")
    assert second.error is None


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_rows_have_no_numbers_that_json_lacks(number: str) -> None:
    line = f'{{"prompt": [1, {number}]}}'
    (job,) = read_jobs([line], SamplingParams())
    assert "it begins with { and is not JSON" in str(job.error)
    assert job.prompt == line


def test_log_probabilities_of_prompt_and_answer_are_in_the_row() -> None:
    shape = CausalConfig("qwen2", 64, 32, 1, 2, 1, 16, 32, 64, (1,), 16)
    params = {"max_tokens": 2, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 2}
    line = json.dumps({"prompt": [5, 6, 7], **params})
    with MultiUserLLM.from_config(shape, users=1, seq_length=32) as llm:
        (row,) = generate.answer_all(llm, list(read_jobs([line], SamplingParams())), users=1)
    row = json.loads(json.dumps(row))
    first, *others = row["prompt_logprobs"]
    assert first is None
    assert [one["token_id"] for one in others] == [6, 7]
    assert [len(one["top"]) for one in others] == [2, 2]
    assert [one["token_id"] for one in row["logprobs"]] == row["token_ids"]


def test_wrong_parameters_are_named_with_their_line(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    lines = ["", '{"prompt": "a", "temprature": 1}', "ok", '{"prompt": "a", "temperature": -1}']
    result = run("generate", "--checkpoint", checkpoint, stdin="\n".join(lines))
    assert result.exit_code == 1
    first, second, third = rows(result.stdout)
    assert first["error"].startswith("InvalidParameterError: line 2: temprature is no field; those")
    assert "max_tokens" in first["error"]
    assert second["text"] == "ko"
    assert third["error"] == "InvalidParameterError: line 4: temperature is -1"


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("rest", ["", '{"index": 9, "pro', "\x00"])
def test_resume_gives_the_rows_of_one_run(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    tmp_path: Path,
    kept: int,
    rest: str,
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text('ab\n{"prompt": 3}\ncd\n{"prompt": [4]}\n', encoding="utf-8")
    words = ("generate", prompts, "--out", out, "--checkpoint", checkpoint, "--max-tokens", 2)
    assert run(*words).exit_code == 1
    whole = out.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:kept]) + rest, encoding="utf-8")
    asked = len(fake_llm.opened[0].asked)
    result = run(*words, "--resume")
    assert result.exit_code == 1
    assert "1 of 4 prompts failed" in result.stderr
    assert out.read_text(encoding="utf-8") == whole
    assert asked == 3
    assert len(fake_llm.opened[1].asked) == {0: 3, 1: 2, 3: 1}[kept]


@pytest.mark.parametrize(
    "content",
    [
        '{"index": 0, "prompt": "other"}\n',
        '{"index": 1, "prompt": "ab"}\n',
        "text\n",
        '{"index": 0, "prompt": "ab"}\n{"index": 1, "prompt": "ab"}\n',
    ],
)
def test_resume_with_another_file(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    tmp_path: Path,
    content: str,
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content, encoding="utf-8")
    words = ("generate", "--out", out, "--checkpoint", checkpoint, "--resume")
    result = run(*words, stdin="ab\n")
    assert result.exit_code == 2
    assert "--resume goes on with the output for the same prompts" in result.stderr
    assert out.read_text(encoding="utf-8") == content
    assert fake_llm.opened == []


def test_resume_needs_a_file(run: Callable[..., Any], fake_llm: type[FakeLLM]) -> None:
    result = run("generate", "--resume", stdin="a\n")
    assert result.exit_code == 2
    assert "--resume needs --out" in result.stderr


def test_an_output_file_is_kept_until_there_is_another(
    run: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    words = ("generate", "--out", out, "--checkpoint", checkpoint, "--seq-length", 1 << 20)
    assert run(*words, stdin="a\n").exit_code == 2
    assert out.read_text() == "precious\n"


def test_there_is_no_output_file_before_the_first_row(
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """Ctrl-C while the model loads leaves none."""
    out = tmp_path / "out.jsonl"
    open_llm = loading.open_llm

    def loads(*args: Any, **settings: Any) -> Any:
        assert not out.exists()
        return open_llm(*args, **settings)

    monkeypatch.setattr(loading, "open_llm", loads)
    result = run("generate", "--out", out, "--checkpoint", checkpoint, stdin="a\n")
    assert result.exit_code == 0, result.output
    assert len(rows(out.read_text(encoding="utf-8"))) == 1


def test_a_link_to_the_output_file_stays(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, tmp_path: Path
) -> None:
    out, link = tmp_path / "out.jsonl", tmp_path / "link"
    link.symlink_to(out)
    assert run("generate", "--out", link, "--checkpoint", checkpoint, stdin="a\n").exit_code == 0
    assert len(rows(out.read_text(encoding="utf-8"))) == 1
    assert link.is_symlink()


def test_half_of_a_character_is_written_as_json_can(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    line = '{"prompt": "a\\ud800"}'
    assert run("generate", "--out", out, "--checkpoint", checkpoint, stdin=line).exit_code == 0
    assert rows(out.read_text(encoding="utf-8"))[0]["prompt"] == "a\ud800"
