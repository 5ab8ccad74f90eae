"""Log-probabilities of prompt tokens, chunk by chunk: logits are not kept beyond their step."""

from __future__ import annotations

from collections.abc import Mapping

from glm_multiuser.engine.runner import RowResults
from glm_multiuser.engine.step import PromptChunk
from glm_multiuser.errors import GenerationError
from glm_multiuser.sampling import known_choices


def score(
    results: RowResults, first: int, scored: Mapping[int, PromptChunk]
) -> dict[int, GenerationError]:
    """Appends the log-probabilities of prompt tokens in a step to their requests.

    Args:
        results: of the step.
        first: the first row of `scored`.
        scored: `Step.scored`; `computed_tokens` of its requests do not yet include this step.

    Returns:
        {slot: error} of requests whose logits are not finite.
    """
    failed = {}
    for slot, chunk in scored.items():
        request, rows = chunk.request, range(first, first + chunk.scored)
        first = rows.stop
        start = request.computed_tokens + 1
        following = request.prompt_token_ids[start : start + len(rows)]
        choices = None
        if all(results.finite[rows.start : rows.stop]):
            wanted = request.params.prompt_logprobs or 0
            choices = known_choices(results.logits(rows), following, wanted)
        if choices is None:
            failed[slot] = not_finite()
        else:
            request.prompt_logprobs += choices
    return failed


def not_finite() -> GenerationError:
    """The error of a request whose logits are not finite."""
    return GenerationError("the logits of this request are not finite")
