"""How the next token is chosen, for all rows at once.

    choose:  grammar -> bias -> penalise -> mask stop tokens -> min-p -> top-k -> top-p -> draw

The meaning of each step is that of Hugging Face's logits processors, and of vLLM's for those that
OpenAI has; the order is vLLM's (vllm/v1/sample/sampler.py). This runs on the host in numpy, on the
rows of logits that the engine hands over. See sampling_rows.py for the arithmetic.
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

# Beyond this, float32 scores that differ at all differ by more than exp can tell from nothing.
INVERSE_TEMPERATURE_MAX = 1e30
DRAWS_AT_ONCE = 64
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Choice:
    """The token chosen for a row, and log-probabilities if the request wanted them.

    They are the log-softmax of the logits as the model gave them, of the tokens that the grammar
    allows, before penalty, temperature, top-k and top-p, as in vLLM. `top` holds the best ones,
    best first.
    """

    token_id: int
    logprob: Optional[float]
    top: Optional[dict[int, float]]


class TokenMatcher(Protocol):
    """Where one answer is in its grammar."""

    complete: bool
    """Whether the answer ends here."""

    def accept(self, token_id: int) -> None:
        """Takes the next token in."""

    def allowed(self) -> Mask:
        """Which tokens may be next, [vocab_size].

        Raises:
            GenerationError: none.
        """


class RowSampler:
    """The sampling state of one request, and of no other.

    prompt_token_ids: what the repetition penalty knows before the first token.
    stop_token_ids: the model's own; min_tokens masks them, together with
        params.stop_token_ids, unless the grammar allows no other. With ignore_eos, leave
        end-of-sequence tokens out: they end nothing then, and may be drawn at any time.
    vocab_size: the width of the logits. Ids beyond it can never be drawn and are passed over.
    matcher: of params.grammar, and of no other request.
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
        """How often the answer has each of its tokens, where a penalty depends on it."""
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
        """Whether the next token takes more than `argmax`, which a graph can compute itself.

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
        """Whether the answer is all that its grammar allows."""
        return self.matcher is not None and self.matcher.complete

    def accept(self, token_id: int) -> None:
        """Record a token of the answer: the next `choose` is about the one after it."""
        self.generated += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self._penalised:
            self._seen = np.append(self._seen, token_id)
        if self._counted:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def change(self, scores: Floats) -> None:
        """Apply bias, penalties, mask and min-p to scores [vocab], in place."""
        scores[self._biased] += self._biases
        if self._penalised:
            seen = self._seen[scores[self._seen] > -np.inf]
            before = scores[seen].astype(np.float64)
            penalty = self.params.repetition_penalty
            after = np.where(before < 0, before * penalty, before / penalty)
            # Infinity would be for ever the best score, or none would be left.
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
        """A number in [0, 1) that depends on the seed, the tokens so far and `attempt` only.

        It is number `generated` of a Philox stream (Salmon et al. 2011) with the key
        (seed, attempt). Attempts after 0 are for the rejections in `draw_plain`.
        """
        block, place = divmod(self.generated, DRAWS_AT_ONCE)
        if block != self._draws_block:
            self._draws, self._draws_block = {}, block
        if attempt not in self._draws:
            # One count of Philox is four numbers.
            key, counter = self.seed + (attempt << 64), block * DRAWS_AT_ONCE // 4
            stream = np.random.Philox(key=key, counter=counter)
            self._draws[attempt] = np.random.Generator(stream).random(DRAWS_AT_ONCE)
        return float(self._draws[attempt][place])


def _ids_within(token_ids: Iterable[int], vocab_size: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], np.intp)


def choose(logits: NDArray[Any], samplers: Sequence[RowSampler]) -> list[Optional[Choice]]:
    """The next token of every row of logits [rows, vocab] float32, one sampler per row.

    None for a row whose logits are not all finite. A row's choice is the same, bit for bit,
    wherever it stands and whatever the other rows hold and want. `logits` are not changed, and
    samplers only move on with `accept`: asking again gives the same answer.
    Raises ValueError where the shape of the logits does not fit the samplers.
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
    """The logits of tokens that the grammars allow; the others are -inf."""
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
    """scores[rows] for ascending rows, without a copy where that is all of them."""
    return scores if len(rows) == len(scores) else scores[rows]


def _draw(scores: Floats, samplers: Sequence[RowSampler], usable: list[int]) -> dict[int, int]:
    """{row: token id}. Rows that want the same passes over the vocabulary share them."""
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
    """A token for each row, with log-probabilities of it and of so many best ones."""
    counts = np.array([min(limit, logits.shape[1]) for limit in limits])
    found = log_probabilities(logits, np.array(token_ids), counts)
    return [
        Choice(token_id, float(logprob), _possible(ids[:count], best[:count]))
        for token_id, count, logprob, ids, best in zip(token_ids, counts, *found)
    ]


def known_choices(
    logits: NDArray[Any], token_ids: Sequence[int], count: int
) -> Optional[list[Choice]]:
    """Tokens that are known, as if they had been chosen: those of a prompt.

    Args:
        logits: [rows, vocab] float32.
        token_ids: one for each row.
        count: log-probabilities of so many best ones, besides each token's.

    Returns:
        None where the logits are not all finite. A row's log-probabilities are those that `choose`
        returns for it, bit for bit, whatever the other rows are.
    """
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    if not np.isfinite(logits).all():
        return None
    with np.errstate(over="ignore", under="ignore"):
        return _with_logprobs(logits, token_ids, [count] * len(token_ids))


def _possible(ids: Ids, logprobs: NDArray[Any]) -> dict[int, float]:
    """Without tokens that the grammar does not allow."""
    possible = logprobs > -np.inf
    return dict(zip(ids[possible].tolist(), logprobs[possible].tolist()))
