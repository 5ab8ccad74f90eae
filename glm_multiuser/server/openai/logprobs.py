"""Log-probabilities, as chat and as completions write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

from glm_multiuser.answer import Logprob, Piece
from glm_multiuser.tokenizers import ChatTokenizer

LOWEST = -9999.0
"""For what has no probability at all: JSON knows no infinity. It is OpenAI's number."""


def chat_logprobs(
    tokenizer: Optional[ChatTokenizer], logprobs: Iterable[Logprob]
) -> dict[str, Any]:
    """The `logprobs` of a chat choice, whole or of one chunk.

    Args:
        tokenizer: whose tokens they are; None: tokens are shown by their number.
        logprobs: of the tokens, in their order.
    """
    content = [
        {
            **_chat_token(tokenizer, one.token_id, one.logprob),
            "top_logprobs": [_chat_token(tokenizer, *item) for item in one.top.items()],
        }
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Optional[ChatTokenizer], pieces: Sequence[Piece], offset: int, with_top: bool
) -> dict[str, Any]:
    """The `logprobs` of a completion choice, whole or of one chunk.

    The offset of a token is how much text was final before it came: where its own text begins, or
    that of earlier tokens which was held back until it came.

    Args:
        tokenizer: whose tokens they are; None: tokens are shown by their number.
        pieces: of the answer.
        offset: characters of the answer before the first of these pieces.
        with_top: whether likeliest tokens were asked for; the chosen one is always among them.
    """
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        for one in piece.logprobs or ():
            name = _unique_name(tokenizer, one.token_id)
            tokens.append(name)
            values.append(_finite(one.logprob))
            tops.append(_unique_names(tokenizer, {**one.top, one.token_id: one.logprob}))
            offsets.append(offset)
        offset += len(piece.text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def _chat_token(
    tokenizer: Optional[ChatTokenizer], token_id: int, logprob: float
) -> dict[str, Any]:
    if tokenizer is None:
        return {"token": _number_name(token_id), "logprob": _finite(logprob), "bytes": None}
    written = tokenizer.token_bytes(token_id)
    return {
        "token": written.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(written),
    }


def _unique_names(
    tokenizer: Optional[ChatTokenizer], logprobs: dict[int, float]
) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, logprob in logprobs.items():
        # Two ids can write the same text; the likelier one came first.
        named.setdefault(_unique_name(tokenizer, token_id), _finite(logprob))
    return named


def _unique_name(tokenizer: Optional[ChatTokenizer], token_id: int) -> str:
    """Parts of characters have names of their own here, because they are keys: bytes:\\xe4."""
    if tokenizer is None:
        return _number_name(token_id)
    written = tokenizer.token_bytes(token_id)
    try:
        return written.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _number_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
