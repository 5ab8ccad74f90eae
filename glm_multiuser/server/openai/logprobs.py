"""Formats log-probabilities for chat and for completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

from glm_multiuser.answer import Logprob, Piece, PromptLogprobs
from glm_multiuser.tokenizers import AnswerTokens

LOWEST = -9999.0
"""OpenAI's stand-in for a probability of 0, because JSON has no infinity."""


def chat_logprobs(tokens: Optional[AnswerTokens], logprobs: Iterable[Logprob]) -> dict[str, Any]:
    """Returns the `logprobs` of a chat choice, complete or of one chunk.

    Args:
        tokens: decoder of this answer, after all earlier tokens; None shows token ids.
        logprobs: of the tokens, in order.
    """
    content = []
    for one in logprobs:
        shown = _chat_token(tokens, one.token_id, one.logprob)
        best = [_chat_token(tokens, *item) for item in one.top.items()]
        content.append({**shown, "top_logprobs": best})
        if tokens is not None:
            tokens.add(one.token_id)
    return {"content": content, "refusal": None}


def completion_logprobs(
    answer: Optional[AnswerTokens], pieces: Sequence[Piece], offset: int, with_top: bool
) -> dict[str, Any]:
    """Returns the `logprobs` of a completion choice, complete or of one chunk.

    The offset of a token is the length of the text that was final before it: the start of its own
    text, or of earlier tokens' text that was held back until it arrived.

    Args:
        answer: its decoder, after all earlier tokens; None shows token ids.
        pieces: of the answer.
        offset: characters of the answer before these pieces.
        with_top: whether to return the most likely tokens, always including the chosen one.
    """
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        for one in piece.logprobs or ():
            tokens.append(_unique_name(answer, one.token_id))
            values.append(_finite(one.logprob))
            tops.append(_unique_names(answer, {**one.top, one.token_id: one.logprob}))
            offsets.append(offset)
            if answer is not None:
                answer.add(one.token_id)
        offset += len(piece.text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def echoed_logprobs(
    tokens: Optional[AnswerTokens],
    token_ids: Sequence[int],
    texts: Sequence[str],
    logprobs: PromptLogprobs,
    with_top: bool,
) -> dict[str, Any]:
    """Returns the `logprobs` of an echoed prompt, with null for its first token.

    Args:
        tokens: decoder before the first token; None shows token ids.
        token_ids: of the prompt.
        texts: the text that each token completes.
        logprobs: one per token.
        with_top: as in `completion_logprobs`.
    """
    pieces = [
        Piece(text, (token_id,), None, (one or Logprob(token_id, 0.0, {}),))
        for token_id, text, one in zip(token_ids, texts, logprobs)
    ]
    written = completion_logprobs(tokens, pieces, 0, with_top)
    for name in ("token_logprobs", "top_logprobs"):
        if written[name] is not None:
            written[name][0] = None
    return written


def joined(first: Optional[dict[str, Any]], second: dict[str, Any]) -> dict[str, Any]:
    """Concatenates the `logprobs` of the two parts of a completion."""
    if first is None:
        return second
    return {name: known and [*known, *second[name]] for name, known in first.items()}


def _chat_token(tokens: Optional[AnswerTokens], token_id: int, logprob: float) -> dict[str, Any]:
    if tokens is None:
        return {"token": _number_name(token_id), "logprob": _finite(logprob), "bytes": None}
    written = tokens.shown(token_id)
    return {
        "token": written.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(written),
    }


def _unique_names(tokens: Optional[AnswerTokens], logprobs: dict[int, float]) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, logprob in logprobs.items():
        # Two ids can have the same text; the likelier one comes first.
        named.setdefault(_unique_name(tokens, token_id), _finite(logprob))
    return named


def _unique_name(tokens: Optional[AnswerTokens], token_id: int) -> str:
    """Returns a key for the token; partial characters get distinct ones, such as bytes:\\xe4."""
    if tokens is None:
        return _number_name(token_id)
    written = tokens.shown(token_id)
    try:
        return written.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _number_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
