"""What `choose` draws: against the usual definition, and each row on its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from glm_multiuser.sampling import Choice, RowSampler, choose, known_choices
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.sampling_rows import nucleus, totals_of
from tests.sampling.reference import assert_fits, distribution

# Every way through the arithmetic, and what they share.
MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 30},
    {"top_k": 59},
    {"top_k": 60},
    {"top_k": 1000},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 5, "top_p": 0.6},
    {"top_k": 30, "top_p": 0.9, "temperature": 0.8},
    {"top_p": 0.95, "temperature": 3.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "top_k": 10},
    {"repetition_penalty": 1.3, "top_p": 0.8, "min_tokens": 3},
    {"min_tokens": 1, "temperature": 0.9, "top_k": 40},
    {"repetition_penalty": 1.5, "temperature": 0.0, "min_tokens": 1},
]
VOCAB = 60
SEEN = [3, 3, 59, 0, 17]
STOPS = [2, 31]


class FixedSampler(RowSampler):
    """A sampler whose draw is given."""

    number = 0.0

    def uniform(self, attempt: int) -> float:
        return self.number


def some_logits(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def row_sampler(
    vocab: int = VOCAB, seen: Iterable[int] = (), stops: Iterable[int] = (), **wanted: Any
) -> RowSampler:
    return RowSampler(SamplingParams(**wanted), seen, stops, vocab)


def choose_one(logits: NDArray[Any], sampler: RowSampler) -> Optional[Choice]:
    return choose(logits[None], [sampler])[0]


def token_of(choice: Optional[Choice]) -> int:
    assert choice is not None
    return choice.token_id


def tokens_over_the_unit_interval(
    logits: NDArray[np.float32], steps: int = 2000, **wanted: Any
) -> NDArray[np.intp]:
    """The tokens for `steps` equal steps through [0, 1), for draws that need one number."""
    samplers = []
    for step in range(steps):
        sampler = FixedSampler(SamplingParams(**wanted), (), (), len(logits))
        sampler.number = (step + 0.5) / steps
        samplers.append(sampler)
    choices = choose(np.tile(logits, (steps, 1)), samplers)
    return np.array([token_of(choice) for choice in choices])


def candidates(logits: list[float], **wanted: Any) -> set[int]:
    row = np.array(logits, dtype=np.float32)
    return set(tokens_over_the_unit_interval(row, **wanted).tolist())


@pytest.mark.slow
@pytest.mark.usefixtures("widths")
class TestDistribution:
    @pytest.mark.parametrize("wanted", MIXES, ids=str)
    def test_is_the_usual_one(self, wanted: dict[str, Any]) -> None:
        logits = some_logits(1, VOCAB)
        rows = 2000
        samplers = [row_sampler(VOCAB, SEEN, STOPS, seed=row, **wanted) for row in range(rows)]
        choices = choose(np.tile(logits, (rows, 1)), samplers)
        drawn = np.array([token_of(choice) for choice in choices])
        held_back = STOPS if "min_tokens" in wanted else ()
        assert_fits(drawn, distribution(logits, samplers[0].params, SEEN, held_back))

    @pytest.mark.parametrize("top_k", [0, 5, 30])
    @pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
    def test_has_the_shares_to_the_last_step(self, top_k: int, top_p: float) -> None:
        logits = some_logits(2, VOCAB)
        steps = 2000
        wanted: dict[str, Any] = {"top_k": top_k, "top_p": top_p}
        drawn = tokens_over_the_unit_interval(logits, steps, **wanted)
        shares = np.bincount(drawn, minlength=VOCAB) / steps
        expected = distribution(logits, SamplingParams(**wanted))
        np.testing.assert_allclose(shares, expected, atol=1.5 / steps)

    def test_holds_along_the_draws_of_one_request(self) -> None:
        logits = some_logits(3, VOCAB)
        sampler = row_sampler(seed=4)
        drawn = []
        for _ in range(2000):
            drawn.append(token_of(choose_one(logits, sampler)))
            sampler.accept(drawn[-1])
        assert_fits(np.array(drawn), distribution(logits, sampler.params))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 1.5, 4.0])
@pytest.mark.parametrize(
    "wanted", [{}, {"top_p": 0.8}, {"top_k": 2000, "top_p": 0.9}, {"top_k": 300}], ids=str
)
def test_distribution_on_a_wide_vocabulary(spread: float, wanted: dict[str, Any]) -> None:
    logits = (some_logits(5, 20_011) * spread / 2).astype(np.float32)
    samplers = [row_sampler(len(logits), seed=row, **wanted) for row in range(100)]
    drawn = []
    for _ in range(10):
        for sampler, choice in zip(samplers, choose(np.tile(logits, (100, 1)), samplers)):
            drawn.append(token_of(choice))
            sampler.accept(drawn[-1])
    probabilities = distribution(logits, samplers[0].params)
    assert probabilities[drawn].min() > 0
    # So many tokens are too rare to count one by one: compare a hundred groups of similar ids,
    # and a hundred of similar scores.
    ranks = np.empty(len(logits), dtype=np.intp)
    ranks[np.argsort(-logits)] = np.arange(len(logits))
    by_score = np.minimum(ranks // 20, 99)
    by_id = np.arange(len(logits)) * 100 // len(logits)
    for group in (by_score, by_id):
        expected = np.bincount(group, weights=probabilities, minlength=100)
        assert_fits(group[drawn], expected.astype(np.float64))


@pytest.mark.usefixtures("widths")
class TestCandidates:
    @pytest.mark.parametrize(
        ("top_k", "expected"),
        [
            (1, {1}),
            (2, {1, 2}),
            (3, {1, 2, 4}),
            (4, {0, 1, 2, 4}),
            (5, {0, 1, 2, 4, 5}),
            (6, {0, 1, 2, 3, 4, 5}),
            (7, {0, 1, 2, 3, 4, 5}),
            (10**30, {0, 1, 2, 3, 4, 5}),
        ],
    )
    def test_top_k_prefers_the_lower_id_among_ties(self, top_k: int, expected: set[int]) -> None:
        assert candidates([1.0, 2.0, 2.0, 0.5, 2.0, 1.0], top_k=top_k) == expected

    @pytest.mark.parametrize(
        ("top_p", "expected"),
        [
            (5e-324, {2}),
            (0.39, {2}),
            (0.41, {2, 0}),
            (0.65, {2, 0, 3}),
            (0.9, {2, 0, 3, 4}),
            (0.97, {0, 1, 2, 3, 4}),
            (1.0, {0, 1, 2, 3, 4}),
        ],
    )
    def test_top_p_keeps_the_token_that_reaches_it(self, top_p: float, expected: set[int]) -> None:
        logits = np.log([0.2, 0.05, 0.4, 0.2, 0.15]).tolist()
        assert candidates(logits, top_p=top_p) == expected

    def test_top_p_prefers_the_lower_id_among_ties(self) -> None:
        assert candidates([0.0] * 8, top_p=0.5) == {0, 1, 2, 3}
        assert candidates([0.0] * 8, top_p=0.51) == {0, 1, 2, 3, 4}
        assert candidates([0.0] * 40, top_p=0.5) == set(range(20))

    def test_top_p_is_a_share_of_what_top_k_left(self) -> None:
        logits = np.log([0.1, 0.3, 0.2, 0.4]).tolist()
        assert candidates(logits, top_k=2, top_p=0.58) == {1, 3}
        assert candidates(logits, top_k=2, top_p=0.57) == {3}
        assert candidates([0.0] * 40, top_k=20, top_p=0.5) == set(range(10))

    def test_one_token_is_a_vocabulary(self) -> None:
        for wanted in ({}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}):
            assert candidates([3.0], **wanted) == {0}

    def test_a_masked_token_is_no_candidate_even_where_top_k_exceeds_the_rest(self) -> None:
        for wanted in ({}, {"top_k": 50}, {"top_k": 58}, {"top_p": 0.9999}):
            samplers = [
                row_sampler(VOCAB, stops=range(57), min_tokens=1, seed=seed, **wanted)
                for seed in range(200)
            ]
            drawn = {token_of(c) for c in choose(np.zeros((200, VOCAB)), samplers)}
            assert drawn == {57, 58, 59}

    def test_the_ends_of_the_unit_interval_hit_tokens_with_mass(self) -> None:
        logits = np.full((2, 40), -1e30, dtype=np.float32)
        logits[:, [7, 30]] = 0.0
        for wanted in ({}, {"top_p": 0.9}, {"top_k": 9}, {"top_k": 30}):
            first, last = (FixedSampler(SamplingParams(**wanted), (), (), 40) for _ in range(2))
            last.number = 1 - 2**-53
            assert {token_of(choice) for choice in choose(logits, [first, last])} == {7, 30}


@pytest.mark.parametrize("rows", [1, 2])
def test_sums_do_not_seem_to_reach_over_what_stands_behind_them(rows: int) -> None:
    """As a view they would: then the heap decides which loop NumPy takes for their logarithm."""
    totals = totals_of(np.ones((rows, 50), np.float32))
    assert totals.tolist() == [50.0] * rows
    assert totals.base is None


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["random", "tied", "flat", "peaked", "one"])
def test_nucleus_without_a_sort_is_the_one_with(kind: str, share: float) -> None:
    noise = np.random.default_rng(6).normal(size=5000)
    scores = {
        "random": noise,
        "tied": np.round(noise),
        "flat": np.zeros(5000),
        "peaked": noise * 20,
        "one": np.where(np.arange(5000) == 77, 0.0, -200.0),
    }[kind]
    masses = np.exp(scores - scores.max()).astype(np.float32)
    order = np.argsort(-masses, kind="stable")
    sums = np.cumsum(masses[order], dtype=np.float64)
    expected = np.sort(order[: int(sums.searchsorted(share * sums[-1])) + 1])
    found = np.flatnonzero(nucleus(masses, share))
    np.testing.assert_array_equal(found, expected)


class TestRows:
    def rows(
        self, wanted: list[dict[str, Any]], vocab: int, bad: Iterable[int], seed: int
    ) -> tuple[NDArray[np.float32], list[RowSampler]]:
        logits = some_logits(seed, len(wanted), vocab)
        for row in bad:
            logits[row, (seed + row) % vocab] = (np.nan, np.inf, -np.inf)[row % 3]
        seen, stops = [i % vocab for i in (1, 5, 5, 2)], [seed % (vocab - 1)]
        samplers = [
            row_sampler(vocab, seen, stops, **{"seed": seed + row, **each})
            for row, each in enumerate(wanted)
        ]
        return logits, samplers

    def assert_independent(
        self, logits: NDArray[np.float32], samplers: list[RowSampler], bad: set[int]
    ) -> None:
        together = choose(logits, samplers)
        assert {row for row, choice in enumerate(together) if choice is None} == bad
        assert together == [choose_one(*pair) for pair in zip(logits, samplers)]
        order = np.random.default_rng(len(logits)).permutation(len(logits))
        shuffled = choose(logits[order], [samplers[row] for row in order])
        assert shuffled == [together[row] for row in order]

    @pytest.mark.usefixtures("widths")
    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(
        wanted=st.lists(
            st.tuples(st.sampled_from(MIXES), st.sampled_from([None, 0, 3, 20])),
            min_size=1,
            max_size=9,
        ),
        vocab=st.integers(2, 400),
        bad=st.sets(st.integers(0, 8)),
        seed=st.integers(0, 2**31),
    )
    def test_know_nothing_of_each_other(
        self,
        wanted: list[tuple[dict[str, Any], Optional[int]]],
        vocab: int,
        bad: set[int],
        seed: int,
    ) -> None:
        bad = {row for row in bad if row < len(wanted)}
        mixes = [{**mix, "logprobs": logprobs} for mix, logprobs in wanted]
        logits, samplers = self.rows(mixes, vocab, bad, seed)
        self.assert_independent(logits, samplers, bad)

    @pytest.mark.parametrize("vocab", [8192, 130_528, 40_009])
    def test_know_nothing_of_each_other_on_wide_vocabularies(self, vocab: int) -> None:
        wanted: list[dict[str, Any]] = [
            {},
            {"temperature": 0.6, "logprobs": 5},
            {"temperature": 4.0},
            {"top_k": 50},
            {"top_k": 50, "top_p": 0.9},
            {"top_k": 900, "top_p": 0.9, "logprobs": 0},
            {"top_p": 0.5, "temperature": 0.5},
            {"top_p": 0.9, "temperature": 3.0},
            {"top_k": 3000},
            {"top_k": 2000, "top_p": 0.7, "repetition_penalty": 1.2},
            {"temperature": 0.0},
            {"temperature": 0.0, "logprobs": 20, "min_tokens": 1},
            {"repetition_penalty": 1.1},
        ]
        logits, samplers = self.rows(wanted, vocab, {2, 7}, vocab)
        self.assert_independent(logits, samplers, {2, 7})
        for row in (2, 7):
            logits[row] = some_logits(row, vocab)
        self.assert_independent(logits, samplers, set())

    @pytest.mark.parametrize("wanted", MIXES, ids=str)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_that_are_not_finite_give_none(self, wanted: dict[str, Any], value: float) -> None:
        logits = some_logits(7, 3, VOCAB)
        logits[1, 11] = value
        samplers = [row_sampler(seed=1, **wanted) for _ in range(3)]
        choices = choose(logits, samplers)
        assert choices[1] is None
        assert choices[0] is not None
        assert choices[2] is not None

    def test_may_be_none_at_all(self) -> None:
        assert choose(np.zeros((0, VOCAB), dtype=np.float32), []) == []

    def test_must_fit_the_samplers(self) -> None:
        for logits in (np.zeros(VOCAB), np.zeros((2, VOCAB)), np.zeros((1, VOCAB + 1))):
            with pytest.raises(ValueError, match=r"logits have shape .* 1 samplers .* \[60\]"):
                choose(logits, [row_sampler()])


class TestInput:
    def test_is_not_changed(self) -> None:
        logits = some_logits(8, len(MIXES), VOCAB)
        before = logits.copy()
        logits.flags.writeable = False
        samplers = [row_sampler(VOCAB, SEEN, STOPS, seed=1, **mix) for mix in MIXES]
        first = choose(logits, samplers)
        np.testing.assert_array_equal(logits, before)
        assert choose(logits, samplers) == first
        assert {sampler.generated for sampler in samplers} == {0}

    def test_may_be_of_any_layout_and_of_half_precision(self) -> None:
        logits = some_logits(9, VOCAB, 2).astype(np.float16)
        samplers = [row_sampler(seed=1), row_sampler(seed=2, top_p=0.9)]
        expected = choose(np.ascontiguousarray(logits.T).astype(np.float32), samplers)
        assert choose(logits.T, samplers) == expected

    def test_may_be_as_large_as_float32_goes(self) -> None:
        largest = float(np.finfo(np.float32).max)
        logits = np.full(VOCAB, -largest, dtype=np.float32)
        logits[5] = largest
        for mix in MIXES:
            sampler = row_sampler(VOCAB, range(VOCAB), seed=1, logprobs=2, **mix)
            choice = choose_one(logits, sampler)
            assert token_of(choice) == 5


class TestSeeds:
    def answer(self, seed: Optional[int], **wanted: Any) -> list[int]:
        sampler = row_sampler(seed=seed, **wanted)
        logits = some_logits(10, 150, VOCAB)
        tokens = []
        for row in logits:
            tokens.append(token_of(choose_one(row, sampler)))
            sampler.accept(tokens[-1])
        return tokens

    @pytest.mark.parametrize("wanted", [{}, {"top_k": 9}, {"top_p": 0.8}], ids=str)
    def test_reproduce_an_answer(self, wanted: dict[str, Any]) -> None:
        assert self.answer(7, **wanted) == self.answer(7, **wanted)
        assert self.answer(7, **wanted) != self.answer(8, **wanted)

    def test_are_drawn_once_for_a_request_without(self) -> None:
        first, second = row_sampler(), row_sampler()
        assert first.seed != second.seed
        assert row_sampler(seed=first.seed).uniform(0) == first.uniform(0)

    @pytest.mark.parametrize("attempt", [0, 3])
    def test_and_the_number_of_tokens_are_all_that_a_draw_depends_on(self, attempt: int) -> None:
        seed = 2**63 - 1
        stream = np.random.Generator(np.random.Philox(key=seed + (attempt << 64)))
        sampler = row_sampler(seed=seed)
        for number in stream.random(200):
            assert sampler.uniform(attempt) == number
            sampler.accept(1)

    def test_do_not_matter_for_greedy_rows(self) -> None:
        class Refuses(RowSampler):
            def uniform(self, attempt: int) -> float:
                raise AssertionError("a greedy row drew")

        logits = some_logits(11, VOCAB)
        sampler = Refuses(SamplingParams(temperature=0.0, top_p=0.5, logprobs=1), [], [], VOCAB)
        assert token_of(choose_one(logits, sampler)) == logits.argmax()


class TestGreedy:
    def test_takes_the_lowest_id_among_ties(self) -> None:
        logits = np.array([1.0, 4.0, 4.0, -2.0], dtype=np.float32)
        assert token_of(choose_one(logits, row_sampler(4, temperature=0.0))) == 1

    @pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 1e-6])
    def test_is_what_low_temperatures_come_to(self, temperature: float) -> None:
        logits = some_logits(12, VOCAB)
        for wanted in ({}, {"top_k": 5}, {"top_p": 0.9}):
            sampler = row_sampler(temperature=temperature, **wanted)
            assert token_of(choose_one(logits, sampler)) == logits.argmax()


class TestPenalty:
    def test_falls_on_prompt_and_answer_once_each(self) -> None:
        logits = np.array([2.0, 1.9, 1.0, -1.0], dtype=np.float32)
        sampler = row_sampler(4, [0, 0, 0], temperature=0.0, repetition_penalty=1.5)
        tokens = []
        for _ in range(3):
            tokens.append(token_of(choose_one(logits, sampler)))
            sampler.accept(tokens[-1])
        # 2.0 and 1.9 became 1.33 and 1.27: still more than 1.0.
        assert tokens == [1, 0, 0]

    def test_moves_negative_scores_further_down(self) -> None:
        logits = np.array([-1.0, -1.4, -3.0], dtype=np.float32)
        sampler = row_sampler(3, [0], temperature=0.0, repetition_penalty=1.5)
        assert token_of(choose_one(logits, sampler)) == 1

    @pytest.mark.parametrize("penalty", [5e-324, 1e-300, 100.0])
    def test_of_any_size_leaves_scores_finite(self, penalty: float) -> None:
        logits = np.array([0.0, 2.0, -1.0], dtype=np.float32)
        for wanted in ({}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 0.0}):
            sampler = row_sampler(3, [0, 1, 2], seed=1, repetition_penalty=penalty, **wanted)
            assert choose_one(logits, sampler) is not None

    def test_passes_over_ids_outside_the_vocabulary(self) -> None:
        sampler = row_sampler(3, [-1, 3, 10**30], [10**30], min_tokens=1, repetition_penalty=2.0)
        assert choose_one(np.zeros(3, dtype=np.float32), sampler) is not None


class TestMinTokens:
    def test_hold_stop_tokens_back_until_enough_were_generated(self) -> None:
        logits = np.array([0.0, 9.0, 8.0, 1.0], dtype=np.float32)
        sampler = row_sampler(
            4, stops=[1], stop_token_ids=(2,), min_tokens=2, temperature=0.0, max_tokens=3
        )
        tokens = []
        for _ in range(3):
            tokens.append(token_of(choose_one(logits, sampler)))
            sampler.accept(tokens[-1])
        assert tokens == [3, 3, 1]

    def test_do_not_concern_a_token_that_ends_nothing(self) -> None:
        # With ignore_eos the engine does not list the end of sequence, here token 1.
        logits = np.array([0.0, 9.0, 1.0], dtype=np.float32)
        sampler = row_sampler(3, stops=[], ignore_eos=True, min_tokens=2, temperature=0.0)
        assert token_of(choose_one(logits, sampler)) == 1


class TestLogprobs:
    def test_are_the_log_softmax_of_the_raw_logits(self) -> None:
        logits = some_logits(13, 20_011)
        exact = logits.astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        sampler = row_sampler(
            len(logits), range(500), [3], logprobs=4, temperature=0.5, top_k=3, seed=1,
            repetition_penalty=1.7, min_tokens=1,
        )  # fmt: skip
        choice = choose_one(logits, sampler)
        assert choice is not None
        assert choice.logprob == pytest.approx(exact[choice.token_id], abs=1e-6)
        assert choice.top is not None
        assert list(choice.top) == np.argsort(-exact)[:4].tolist()
        np.testing.assert_allclose(list(choice.top.values()), np.sort(exact)[::-1][:4], atol=1e-6)

    def test_come_best_first_and_lower_ids_first_among_ties(self) -> None:
        logits = np.array([1.0, 3.0, 1.0, 3.0, 1.0], dtype=np.float32)
        choice = choose_one(logits, row_sampler(5, logprobs=3))
        assert choice is not None
        assert choice.top is not None
        assert list(choice.top) == [1, 3, 0]

    def test_are_as_many_as_wanted_and_there(self) -> None:
        logits = some_logits(14, 4, 6)
        samplers = [row_sampler(6, logprobs=wanted) for wanted in (None, 0, 2, 20)]
        choices = choose(logits, samplers)
        assert [choice and choice.top and len(choice.top) for choice in choices] == [None, {}, 2, 6]
        assert [choice and choice.logprob is None for choice in choices] == [True] + [False] * 3

    @pytest.mark.parametrize("vocab", [6, 3_000, 20_011])
    def test_of_known_tokens_are_those_of_chosen_ones_to_the_last_bit(self, vocab: int) -> None:
        logits = some_logits(16, 9, vocab)
        samplers = [row_sampler(vocab, logprobs=3, temperature=0.0) for _ in logits]
        chosen = [choice for choice in choose(logits, samplers) if choice is not None]
        known = [choice.token_id for choice in chosen]
        assert known_choices(logits, known, 3) == chosen
        for row, choice in enumerate(chosen):
            assert known_choices(logits[[row]], [choice.token_id], 3) == [choice]

    @pytest.mark.parametrize("wanted", MIXES, ids=str)
    def test_do_not_change_the_choice(self, wanted: dict[str, Any]) -> None:
        logits = some_logits(15, VOCAB)
        plain = choose_one(logits, row_sampler(VOCAB, SEEN, STOPS, seed=5, **wanted))
        asked = choose_one(logits, row_sampler(VOCAB, SEEN, STOPS, seed=5, logprobs=5, **wanted))
        assert token_of(plain) == token_of(asked)
