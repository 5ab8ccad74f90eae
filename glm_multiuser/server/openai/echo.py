"""Implements `echo`: the prompt at the start of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from starlette.requests import Request

from glm_multiuser.answer import PromptLogprobs
from glm_multiuser.server.openai.fields import Prompt
from glm_multiuser.server.openai.generation_group import GenerationGroup
from glm_multiuser.server.openai.logprobs import echoed_logprobs
from glm_multiuser.server.openai.requests import CompletionRequest
from glm_multiuser.server.openai.tokenize import text_token_ids
from glm_multiuser.server.request_context import service_of


async def read_prompts(request: Request, body: CompletionRequest) -> list[Prompt]:
    """Returns the prompts to answer.

    If prompt tokens get log-probabilities, text is tokenized without the chat format, whose tokens
    would not be part of the echoed text.

    Raises:
        APIError, InvalidParameterError: an unknown model, or text that it cannot encode.
    """
    if not body.scores_prompts:
        return body.prompt
    model = service_of(request).models.get(body.model)
    return [
        await text_token_ids(model, prompt) if isinstance(prompt, str) else prompt
        for prompt in body.prompt
    ]


@dataclass(frozen=True)
class Echoed:
    """The start of a choice."""

    text: str
    logprobs: Optional[dict[str, Any]]


def echoed(
    group: GenerationGroup,
    body: CompletionRequest,
    prompt: Prompt,
    logprobs: Optional[PromptLogprobs],
) -> Echoed:
    """Returns the echoed prompt; "" without `echo`.

    Args:
        group: of the answers.
        body: of the request.
        prompt: of this answer.
        logprobs: of the prompt tokens, if requested.
    """
    if not body.echo:
        return Echoed("", None)
    if isinstance(prompt, str):
        return Echoed(prompt, None)
    texts = _texts(group, prompt)
    text = "".join(texts)
    if logprobs is None:
        return Echoed(text, None)
    with_top = bool(body.logprobs)
    return Echoed(text, echoed_logprobs(group.tokens(), prompt, texts, logprobs, with_top))


def _texts(group: GenerationGroup, token_ids: Sequence[int]) -> list[str]:
    """Returns the text that each token of the prompt completes; "" without a tokenizer."""
    if group.tokenizer is None:
        return [""] * len(token_ids)
    detokenizer = group.tokenizer.detokenizer()
    texts = [detokenizer.push([token_id]) for token_id in token_ids]
    texts[-1] += detokenizer.flush()
    return texts
