"""`SamplingParams`: the parameters of a request, with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from glm_multiuser.errors import InvalidParameterError, shown
from glm_multiuser.structured.grammar import Grammar

TEMPERATURE_MAX = 100.0
REPETITION_PENALTY_MAX = 100.0
PENALTY_MAX = 2.0
LOGIT_BIAS_MAX = 100.0
LOGIT_BIASES_MAX = 1024
SEED_MAX = 2**63 - 1
STOP_MAX = 16
STOP_LENGTH_MAX = 256
LOGPROBS_MAX = 20


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions. Values out of range raise InvalidParameterError.

    max_tokens: at least 1; None: limited by the sequence length.
    min_tokens: number of tokens before which end and stop tokens cannot be sampled, and stop
        strings do not end the answer.
    temperature: 0: greedy; up to TEMPERATURE_MAX.
    top_k: number of most likely tokens to sample from (Fan et al. 2018); 0: off.
    top_p: cumulative probability of the tokens to sample from (Holtzman et al. 2019); 1: off.
    min_p: minimum probability relative to the most likely token (Nguyen et al. 2024); 0: off.
    repetition_penalty: for tokens of the prompt and the answer (Keskar et al. 2019); 1: off.
    presence_penalty: subtracted from the logits of tokens in the answer; up to PENALTY_MAX.
    frequency_penalty: the same, times the token's count. Both as in OpenAI's API reference:
        logit -= count * frequency_penalty + (count > 0) * presence_penalty.
    logit_bias: {token id: bias added to its logit}, from -LOGIT_BIAS_MAX to LOGIT_BIAS_MAX, of up
        to LOGIT_BIASES_MAX tokens; stored as a tuple of pairs.
    seed: 0 to SEED_MAX. The same seed gives the same answer. None: a random one per request.
    stop: stop strings: one, or up to STOP_MAX, of up to STOP_LENGTH_MAX characters.
    stop_token_ids: tokens that end the answer besides the end-of-sequence tokens of the model.
    ignore_eos: end-of-sequence tokens do not end the answer; they can still be sampled.
    logprobs: number of most likely tokens, up to LOGPROBS_MAX, whose log-probabilities are returned
        with each token's own; None: off.
    prompt_logprobs: the same for prompt tokens, each given those before it; the first one has none.
        Disables the prefix cache for the prompt. Causal models only.
    grammar: that the answer must match; see `Grammar`. None: off.
    cache_prompt: skips the part of the prompt in the user's prefix cache (causal models); False
        computes all of it.
    """

    max_tokens: Optional[int] = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Union[Mapping[int, float], tuple[tuple[int, float], ...]] = ()
    seed: Optional[int] = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Optional[int] = None
    grammar: Optional[Grammar] = None
    cache_prompt: bool = True
    prompt_logprobs: Optional[int] = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(
                "min_tokens",
                f"is {self.min_tokens}; it must be at most max_tokens, which is {self.max_tokens}",
            )
        _check_number("temperature", self.temperature, TEMPERATURE_MAX, zero=True)
        _check_integer("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 1.0)
        _check_number("min_p", self.min_p, 1.0, zero=True)
        _check_number("repetition_penalty", self.repetition_penalty, REPETITION_PENALTY_MAX)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_between(name, getattr(self, name), PENALTY_MAX)
        self._check_logit_bias()
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, SEED_MAX)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        if len(stop) > STOP_MAX:
            raise invalid("stop", f"has {len(stop)} texts; it may have at most {STOP_MAX}")
        for place, text in enumerate(stop):
            if not isinstance(text, str) or not 1 <= len(text) <= STOP_LENGTH_MAX:
                limit = f"it must be a text of 1 to {STOP_LENGTH_MAX} characters"
                raise invalid("stop", f"is {shown(text)}; {limit}", place)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for place, token_id in enumerate(self.stop_token_ids):
            _check_integer("stop_token_ids", token_id, 0, place=place)
        for name in ("ignore_eos", "cache_prompt"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, f"is {shown(getattr(self, name))}; it must be True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, LOGPROBS_MAX)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise invalid("grammar", f"is {shown(self.grammar)}; it must be a Grammar")

    @property
    def reuses_prompt(self) -> bool:
        """Whether the request may use the prefix cache."""
        return self.cache_prompt and self.prompt_logprobs is None

    def _check_logit_bias(self) -> None:
        given = self.logit_bias
        if not isinstance(given, (Mapping, tuple)):
            raise invalid("logit_bias", f"is {shown(given)}; it must be a mapping")
        pairs = tuple(given.items() if isinstance(given, Mapping) else given)
        if len(pairs) > LOGIT_BIASES_MAX:
            limit = f"it may have at most {LOGIT_BIASES_MAX}"
            raise invalid("logit_bias", f"has {len(pairs)} tokens; {limit}")
        for place, pair in enumerate(pairs):
            if not isinstance(pair, tuple) or len(pair) != 2:
                limit = "it must be a tuple of a token id and a number"
                raise invalid("logit_bias", f"is {shown(pair)}; {limit}", place)
            _check_integer("logit_bias", pair[0], 0)
            _check_between("logit_bias", pair[1], LOGIT_BIAS_MAX)
        object.__setattr__(self, "logit_bias", pairs)


def biases_by_id(biases: Mapping[Any, Any]) -> dict[Any, Any]:
    """Converts the keys of `logit_bias` in JSON to ints. Invalid ids stay strings, to be rejected
    later: Python parses at most 4,300 digits, and no vocabulary has ids of ten."""

    def is_id(one: Any) -> bool:
        return isinstance(one, str) and one.isascii() and one.isdecimal() and len(one) < 10

    return {int(one) if is_id(one) else one: bias for one, bias in biases.items()}


def invalid(field: str, problem: str, place: Optional[int] = None) -> InvalidParameterError:
    """Returns the error for a field, or for its entry at `place`."""
    name = field if place is None else f"{field}[{place}]"
    return InvalidParameterError(f"{name} {problem}", field)


def _check_integer(
    field: str, value: object, low: int, high: Optional[int] = None, place: Optional[int] = None
) -> None:
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(field, f"is {shown(value)}; it must be an integer, {limit}", place)
    if value < low or (high is not None and value > high):
        raise invalid(field, f"is {shown(value)}; it must be {limit}", place)


def _check_number(field: str, value: object, high: float, zero: bool = False) -> None:
    limit = f"{'at least' if zero else 'more than'} 0 and at most {high:g}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise invalid(field, f"is {shown(value)}; it must be a number, {limit}")
    # NaN fails every comparison, and so is rejected.
    if not (0 <= value <= high and (zero or value > 0)):
        raise invalid(field, f"is {shown(value)}; it must be {limit}")


def _check_between(field: str, value: object, limit: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= limit:
        must = f"it must be a number between {-limit:g} and {limit:g}"
        raise invalid(field, f"is {shown(value)}; {must}")


def _as_tuple(field: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise invalid(field, f"is {shown(value)}; it must be a list or a tuple")
    return tuple(value)
