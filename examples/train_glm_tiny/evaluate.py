"""Evaluates glm-tiny on every question of its corpus with concurrent users.

Dialogues continue with the model's own answers. A correct answer matches word for word.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm_multiuser import MultiUserLLM, SamplingParams

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "ckpt" / "glm-tiny"

Round = tuple[str, str, str]
"""Question, learned answer, given answer."""


def hold_dialogue(llm: MultiUserLLM, rounds: list[list[str]], user: str) -> list[Round]:
    """Asks the questions of one dialogue in order."""
    params = SamplingParams(temperature=0.0, max_tokens=160)
    history: list[tuple[str, str]] = []
    told: list[Round] = []
    for question, expected in rounds:
        answer, _ = llm.chat(question, history=history, user=user, params=params)
        history.append((question, answer))
        told.append((question, expected, answer))
    return told


def evaluate(folder: Path, corpus: Path, users: int) -> tuple[int, int, int, int]:
    """Returns correct answers, all answers, fully correct dialogues, all dialogues."""
    dialogues = [json.loads(line)["rounds"] for line in corpus.read_text("utf-8").splitlines()]
    llm = MultiUserLLM.from_pretrained(folder, users=users)
    with llm, ThreadPoolExecutor(users) as pool:
        jobs = [
            pool.submit(hold_dialogue, llm, rounds, f"dialogue {number}")
            for number, rounds in enumerate(dialogues)
        ]
        told = [job.result() for job in jobs]
    answers = [one for dialogue in told for one in dialogue]
    for question, expected, answer in answers:
        if answer != expected:
            print(f"asked    {question!r}\nlearned  {expected!r}\nanswered {answer!r}\n")
    longer = [dialogue for dialogue in told if len(dialogue) > 1]
    return (
        sum(answer == expected for _, expected, answer in answers),
        len(answers),
        sum(all(answer == expected for _, expected, answer in one) for one in longer),
        len(longer),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus.jsonl")
    parser.add_argument("--users", type=int, default=8)
    arguments = parser.parse_args()
    began = time.perf_counter()
    right, asked, finished, dialogues = evaluate(
        arguments.folder, arguments.corpus, arguments.users
    )
    print(
        f"{right} of {asked} answers word for word, {finished} of {dialogues} dialogues right "
        f"to the end, {arguments.users} users at once, {time.perf_counter() - began:.0f} s"
    )
    sys.exit(right < 0.95 * asked)


if __name__ == "__main__":
    main()
