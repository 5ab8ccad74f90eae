"""Samples the next token of all rows at once.

    choose:  grammar -> bias -> penalise -> mask stop tokens -> min-p -> top-k -> top-p -> draw

The steps are defined as in Hugging Face's logits processors, and as in vLLM for parameters of
OpenAI; the order is vLLM's (vllm/v1/sample/sampler.py). Runs on the host in numpy, on the engine's
rows of logits. See sampling_rows.py for the arithmetic.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.sampling_params import SamplingParams, invalid
from glm_multiuser.sampling_rows import (
    NARROW,
    Doubles,
    Floats,
    Ids,
    Mask,
    draw_narrow,
    draw_plain,
    draw_wide,
    log_probabilities,
)

# Beyond this, differences of float32 scores underflow in exp.
INVERSE_TEMPERATURE_MAX = 1e30
DRAWS_AT_ONCE = 64
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Choice:
    """The token sampled for a row, and log-probabilities if the request asks for them.

    They are the log-softmax of the model's logits over the tokens that the grammar allows, before
    penalties, temperature, top-k and top-p, as in vLLM. `top` holds the best ones, best first.
    """

    token_id: int
    logprob: Optional[float]
    top: Optional[dict[int, float]]


class TokenMatcher(Protocol):
    """The state of one answer in its grammar."""

    complete: bool
    """Whether the answer ends here."""

    def accept(self, token_id: int) -> None:
        """Advances by one token."""

    def allowed(self) -> Mask:
        """Returns the mask of allowed next tokens, [vocab_size].

        Raises:
            GenerationError: no token is allowed.
        """


class RowSampler:
    """The sampling state of one request.

    prompt_token_ids: initial tokens of the repetition penalty.
    stop_token_ids: of the model; min_tokens masks them, together with params.stop_token_ids, unless
        the grammar allows no other. With ignore_eos, omit end-of-sequence tokens: they end nothing
        then, and may be drawn at any time.
    vocab_size: the width of the logits. Ids beyond it are ignored, as they can never be drawn.
    matcher: of params.grammar, for this request only.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Iterable[int],
        stop_token_ids: Iterable[int],
        vocab_size: int,
        matcher: Optional[TokenMatcher] = None,
    ) -> None:
        if params.grammar is not None and matcher is None:
            raise invalid("grammar", f"is {params.grammar.kind}; here it must be None")
        self.params = params
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.generated = 0
        self._greedy = params.temperature == 0 and params.logprobs is None
        self._penalised = params.repetition_penalty != 1.0
        self._counted = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._counts: dict[int, int] = {}
        """Token counts of the answer, if a penalty depends on them."""
        biases = dict(params.logit_bias)
        if biases and max(biases) >= vocab_size:
            limit = f"this model's tokens are 0 to {vocab_size - 1}"
            raise invalid("logit_bias", f"has the token {max(biases)}; {limit}")
        self._biased = np.array(list(biases), np.intp)
        self._biases = np.array(list(biases.values()), np.float32)
        has_min_p = params.min_p > 0 and params.temperature > 0
        self._changes = self._penalised or self._counted or bool(biases) or has_min_p
        self._seen = _ids_within(prompt_token_ids if self._penalised else (), vocab_size)
        self._stops = _ids_within({*stop_token_ids, *params.stop_token_ids}, vocab_size)
        if params.min_tokens and self._stops.size == vocab_size:
            raise invalid(
                "min_tokens",
                f"is {params.min_tokens}; it must be 0 where all {vocab_size} tokens of the "
                "vocabulary are stop tokens",
            )
        self._draws: dict[int, Doubles] = {}
        self._draws_block = 0

    def needs_logits(self, argmax: int) -> bool:
        """Whether the next token depends on more than `argmax`, which graphs compute themselves.

        Raises:
            GenerationError: the grammar allows no token.
        """
        allowed = self.matcher is None or bool(self.matcher.allowed()[argmax])
        return not self._greedy or self.changes_scores or not allowed

    @property
    def changes_scores(self) -> bool:
        return self._changes or self._masks_stops

    @property
    def _masks_stops(self) -> bool:
        return self.generated < self.params.min_tokens and self._stops.size > 0

    @property
    def complete(self) -> bool:
        """Whether the answer is complete according to its grammar."""
        return self.matcher is not None and self.matcher.complete

    def accept(self, token_id: int) -> None:
        """Records a token of the answer; the next `choose` samples the one after it."""
        self.generated += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self._penalised:
            self._seen = np.append(self._seen, token_id)
        if self._counted:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def change(self, scores: Floats) -> None:
        """Applies bias, penalties, mask and min-p to scores [vocab], in place."""
        scores[self._biased] += self._biases
        if self._penalised:
            seen = self._seen[scores[self._seen] > -np.inf]
            before = scores[seen].astype(np.float64)
            penalty = self.params.repetition_penalty
            after = np.where(before < 0, before * penalty, before / penalty)
            # An infinite score would always win, or leave no token to draw.
            scores[seen] = np.minimum(np.maximum(after, -LARGEST), LARGEST)
        if self._counts:
            ids = np.array(list(self._counts), np.intp)
            counts = np.array(list(self._counts.values()), np.float64)
            penalties = counts * self.params.frequency_penalty + self.params.presence_penalty
            scores[ids] -= penalties.astype(np.float32)
        if self._masks_stops:
            stops = scores[self._stops]
            scores[self._stops] = -np.inf
            # A grammar may allow nothing but stop tokens.
            if self.matcher is not None and scores.max() == -np.inf:
                scores[self._stops] = stops
        if self.params.min_p > 0 and self.params.temperature > 0:
            share = self.params.temperature * np.log(self.params.min_p)
            scores[scores < np.float32(float(scores.max()) + share)] = -np.inf

    def uniform(self, attempt: int) -> float:
        """Returns a number in [0, 1) that depends only on seed, answer length and `attempt`.

        It is number `generated` of a Philox stream (Salmon et al. 2011) with the key
        (seed, attempt). Attempts after 0 are for the rejections in `draw_plain`.
        """
        block, place = divmod(self.generated, DRAWS_AT_ONCE)
        if block != self._draws_block:
            self._draws, self._draws_block = {}, block
        if attempt not in self._draws:
            # Philox yields four numbers per counter value.
            key, counter = self.seed + (attempt << 64), block * DRAWS_AT_ONCE // 4
            stream = np.random.Philox(key=key, counter=counter)
            self._draws[attempt] = np.random.Generator(stream).random(DRAWS_AT_ONCE)
        return float(self._draws[attempt][place])


def _ids_within(token_ids: Iterable[int], vocab_size: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], np.intp)


def choose(logits: NDArray[Any], samplers: Sequence[RowSampler]) -> list[Optional[Choice]]:
    """Samples the next token of every row of logits [rows, vocab] float32, one sampler per row.

    Returns None for a row with non-finite logits. A row's choice is the same, bit for bit, at any
    position and whatever the other rows are. Neither `logits` nor the samplers change, which only
    advance with `accept`, so repeated calls give the same result.
    Raises ValueError if the shape of the logits does not fit the samplers.
    """
    vocab_sizes = {sampler.vocab_size for sampler in samplers}
    if logits.ndim != 2 or len(logits) != len(samplers) or vocab_sizes - {logits.shape[1]}:
        raise ValueError(
            f"logits have shape {logits.shape}; there are {len(samplers)} samplers "
            f"for vocabularies of {sorted(vocab_sizes)} tokens"
        )
    with np.errstate(over="ignore", under="ignore"):
        logits = np.ascontiguousarray(logits, dtype=np.float32)
        usable = np.flatnonzero(np.isfinite(logits).all(axis=1)).tolist()
        logits = _allowed(logits, samplers, usable)
        tokens = _draw(_changed(logits, samplers, usable), samplers, usable)
        extras = _log_probabilities(logits, samplers, tokens)
    choices: list[Optional[Choice]] = [None] * len(samplers)
    for row, token in tokens.items():
        choices[row] = extras.get(row) or Choice(token, None, None)
    return choices


def _allowed(logits: Floats, samplers: Sequence[RowSampler], usable: list[int]) -> Floats:
    """Returns the logits with -inf for tokens that the grammars do not allow."""
    matchers = [(row, samplers[row].matcher) for row in usable]
    if not any(matcher for _, matcher in matchers):
        return logits
    logits = logits.copy()
    for row, matcher in matchers:
        if matcher is not None:
            np.copyto(logits[row], -np.inf, where=~matcher.allowed())
    return logits


def _changed(logits: Floats, samplers: Sequence[RowSampler], usable: list[int]) -> Floats:
    changing = [row for row in usable if samplers[row].changes_scores]
    if not changing:
        return logits
    scores = logits.copy()
    for row in changing:
        samplers[row].change(scores[row])
    return scores


def _rows(scores: Floats, rows: Sequence[int]) -> Floats:
    """scores[rows] for ascending rows, without a copy if these are all rows."""
    return scores if len(rows) == len(scores) else scores[rows]


def _draw(scores: Floats, samplers: Sequence[RowSampler], usable: list[int]) -> dict[int, int]:
    """Returns {row: token id}. Rows of the same kind share their passes over the vocabulary."""
    groups: dict[str, list[int]] = {}
    for row in usable:
        groups.setdefault(_kind(samplers[row]), []).append(row)
    tokens: dict[int, int] = {}
    for kind, rows in groups.items():
        drawn = _draw_group(kind, _rows(scores, rows), [samplers[row] for row in rows])
        tokens.update(zip(rows, drawn.tolist()))
    return tokens


def _kind(sampler: RowSampler) -> str:
    params = sampler.params
    if params.temperature == 0:
        return "greedy"
    if 0 < params.top_k < sampler.vocab_size:
        return "narrow" if params.top_k <= NARROW else "wide"
    return "plain" if params.top_p == 1 else "wide"


def _draw_group(kind: str, scores: Floats, samplers: Sequence[RowSampler]) -> Ids:
    if kind == "greedy":
        best: Ids = scores.argmax(axis=1)
        return best

    def uniforms(attempt: int, rows: Ids) -> Doubles:
        return np.array([samplers[row].uniform(attempt) for row in rows])

    wanted = [sampler.params for sampler in samplers]
    inverses = [min(1.0 / params.temperature, INVERSE_TEMPERATURE_MAX) for params in wanted]
    inverse_temperature = np.array(inverses, dtype=np.float32)
    if kind == "plain":
        return draw_plain(scores, inverse_temperature, uniforms)
    vocab = scores.shape[1]
    counts = np.array([min(params.top_k or vocab, vocab) for params in wanted])
    shares = np.array([params.top_p for params in wanted], dtype=np.float64)
    draw = draw_narrow if kind == "narrow" else draw_wide
    return draw(scores, counts, shares, inverse_temperature, uniforms(0, np.arange(len(samplers))))


def _log_probabilities(
    logits: Floats, samplers: Sequence[RowSampler], tokens: dict[int, int]
) -> dict[int, Choice]:
    wanted = {row: samplers[row].params.logprobs for row in sorted(tokens)}
    limits = {row: limit for row, limit in wanted.items() if limit is not None}
    if not limits:
        return {}
    rows = list(limits)
    chosen = [tokens[row] for row in rows]
    return dict(zip(rows, _with_logprobs(_rows(logits, rows), chosen, list(limits.values()))))


def _with_logprobs(logits: Floats, token_ids: Sequence[int], limits: Sequence[int]) -> list[Choice]:
    """Adds log-probabilities to each row's token: its own, and those of the `limits` best ones."""
    counts = np.array([min(limit, logits.shape[1]) for limit in limits])
    found = log_probabilities(logits, np.array(token_ids), counts)
    return [
        Choice(token_id, float(logprob), _possible(ids[:count], best[:count]))
        for token_id, count, logprob, ids, best in zip(token_ids, counts, *found)
    ]


def known_choices(
    logits: NDArray[Any], token_ids: Sequence[int], count: int
) -> Optional[list[Choice]]:
    """Returns given tokens, such as a prompt's, with their log-probabilities.

    Args:
        logits: [rows, vocab] float32.
        token_ids: one per row.
        count: number of best tokens whose log-probabilities are returned besides each token's.

    Returns:
        None if any logit is not finite. A row's log-probabilities are those that `choose` returns
        for it, bit for bit, whatever the other rows are.
    """
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    if not np.isfinite(logits).all():
        return None
    with np.errstate(over="ignore", under="ignore"):
        return _with_logprobs(logits, token_ids, [count] * len(token_ids))


def _possible(ids: Ids, logprobs: NDArray[Any]) -> dict[int, float]:
    """Omits tokens that the grammar does not allow."""
    possible = logprobs > -np.inf
    return dict(zip(ids[possible].tolist(), logprobs[possible].tolist()))
