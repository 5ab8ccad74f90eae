"""The prompt in front of a completion, for `echo`."""

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
    """The prompts to be answered.

    Where their tokens get log-probabilities, a text is its own tokens alone: what the form of the
    chat adds to it would be no part of what is echoed.

    Raises:
        APIError, InvalidParameterError: no such model, or a text that it cannot read.
    """
    if not body.scores_prompts:
        return body.prompt
    model = service_of(request).models.get(body.model)
    return [
        await text_token_ids(model, prompt, "prompt") if isinstance(prompt, str) else prompt
        for prompt in body.prompt
    ]


@dataclass(frozen=True)
class Echoed:
    """What a choice begins with."""

    text: str
    logprobs: Optional[dict[str, Any]]


def echoed(
    group: GenerationGroup,
    body: CompletionRequest,
    prompt: Prompt,
    logprobs: Optional[PromptLogprobs],
) -> Echoed:
    """The prompt in front of its answer; "" where it is not wanted.

    Args:
        group: of the answers.
        body: what was asked for.
        prompt: of this answer.
        logprobs: of its tokens, where they are wanted.
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
    """What each token makes final of the prompt's text; "" without a tokenizer."""
    if group.tokenizer is None:
        return [""] * len(token_ids)
    detokenizer = group.tokenizer.detokenizer()
    texts = [detokenizer.push([token_id]) for token_id in token_ids]
    texts[-1] += detokenizer.flush()
    return texts
