"""Query a running server with NVIDIA Triton's official client.

    glm-multiuser serve                      # in another terminal
    pip install 'tritonclient[http]'
    python examples/clients/triton_client.py --url 127.0.0.1:8000

Sends two rounds, the second with the history of the first, then three questions in one batch.
"""

from __future__ import annotations

import argparse
import sys
from typing import Optional

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException


def without_scheme(text: str) -> str:
    """The value of `--url`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a scheme; it must be HOST:PORT")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a running server with Triton's client.")
    parser.add_argument(
        "--url", type=without_scheme, default="127.0.0.1:8000", help="HOST:PORT of the server"
    )
    parser.add_argument("--model", default="glm-tiny")
    parser.add_argument("--api-key", help="if the server wants one")
    arguments = parser.parse_args()
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else None
    try:
        with InferenceServerClient(arguments.url) as client:
            talk(client, arguments.model, headers)
    except (InferenceServerException, OSError) as error:
        sys.exit(f"error: {error}")


def talk(client: InferenceServerClient, model: str, headers: Optional[dict[str, str]]) -> None:
    """Everything that this example shows."""
    if not client.is_server_ready():
        sys.exit("error: the server is not ready")
    metadata = client.get_model_metadata(model, headers=headers)
    if not client.is_model_ready(model, headers=headers):
        sys.exit(f"error: model {model!r} is not ready")
    print(f"{model} ({metadata['platform']})")
    for kind in ("inputs", "outputs"):
        for one in metadata[kind]:
            print(f"  {kind[:-1]:6} {one['name']:12} {one['datatype']} {one['shape']}")

    history = "[]"
    for question in ("你好", "你是谁"):
        (answer,), (history,) = ask(client, model, headers, [question], [history])
        print(f"\n> {question}\n{answer}")
    print(f"\nhistory: {history}")

    questions = ["Who are you?", "晚上睡不着应该怎么办", "hello"]
    answers, _ = ask(client, model, headers, questions, ["[]"] * len(questions))
    for question, answer in zip(questions, answers):
        print(f"\n> {question}\n{answer}")


def ask(
    client: InferenceServerClient,
    model: str,
    headers: Optional[dict[str, str]],
    prompts: list[str],
    histories: list[str],
) -> tuple[list[str], list[str]]:
    """Returns the answers and the updated histories, one per prompt."""
    texts = {
        "prompt": prompts,
        "history": histories,  # JSON: [["question", "answer"], ...]
        "temperature": ["0"] * len(prompts),  # "": the checkpoint's default
        "max_token": ["64"] * len(prompts),
    }
    inputs = []
    for name, values in texts.items():
        tensor = InferInput(name, [len(values), 1], "BYTES")
        tensor.set_data_from_numpy(np.array(values, np.object_).reshape(-1, 1))
        inputs.append(tensor)
    result = client.infer(model, inputs, headers=headers)
    return text_of(result.as_numpy("response")), text_of(result.as_numpy("history"))


def text_of(column: np.ndarray) -> list[str]:
    """The texts of an output of shape [N, 1]."""
    return [value.decode() for value in column[:, 0]]


if __name__ == "__main__":
    main()
