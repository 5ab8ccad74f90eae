"""In the child: text of MindFormers' own tokenizer, streamed without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindformers import ChatGLMTokenizer, GLMChatModel
from mindformers.models.glm.glm import IncrementalDetokenizer
from mindspore import Tensor

from tests.mindformers.worker_model import make_model


def streamed(folder: str, text: str, cut: int) -> dict[str, Any]:
    """The pieces in which a text comes, whole and after a number of tokens."""
    model = make_model(folder, seq_length=64)
    tokenizer = ChatGLMTokenizer(str(Path(folder) / "ice_text.model"))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return {
        "tokens": len(token_ids),
        "pieces": pieces_of(model, tokenizer, token_ids),
        "cut pieces": pieces_of(model, tokenizer, token_ids[:cut]),
        "random": [put_together(tokenizer, one) for one in random_answers(tokenizer.vocab_size)],
    }


def random_answers(vocab_size: int) -> list[list[int]]:
    """Token ids without sense: halves of characters, spaces, line ends, special tokens."""
    random = np.random.RandomState(0)
    answers: list[list[int]] = random.randint(4, vocab_size, (100, 25)).tolist()
    return answers


def put_together(tokenizer: ChatGLMTokenizer, token_ids: list[int]) -> tuple[str, str]:
    """The text of an answer as it grows, and decoded at once."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.put(token_id) for token_id in token_ids]
    return "".join(pieces) + detokenizer.end(), tokenizer.decode(token_ids)


def pieces_of(
    model: GLMChatModel, tokenizer: ChatGLMTokenizer, token_ids: Sequence[int]
) -> list[str]:
    """What `_stream_chat` makes of a model that answers with these tokens."""
    prompt = [model.config.gmask_token_id, model.config.bos_token_id]
    answer = iter(token_ids)

    def infer(*args: Any, **kwargs: Any) -> tuple[Tensor]:
        logits = np.zeros((len(prompt), model.config.vocab_size), np.float32)
        logits[:, next(answer)] = 1
        return (Tensor(logits),)

    model._incremental_infer = infer
    pieces = model._stream_chat(
        [prompt],
        top_k=1,
        top_p=1.0,
        repetition_penalty=1.0,
        max_length=len(prompt) + len(token_ids),
        eos_token_id=model.config.eos_token_id,
        tokenizer=tokenizer,
    )
    return list(pieces)
