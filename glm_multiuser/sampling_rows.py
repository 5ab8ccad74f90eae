"""The arithmetic of `sampling.choose`: scores [rows, vocab] float32 in, token ids [rows] out.

    draw_plain     no top-k, no top-p
    draw_narrow    top-k of at most NARROW, with or without top-p: a few candidates per row
    draw_wide      everything else: the only one that needs an exponential for every token

The vocabulary is never sorted. Instead, a row is folded to a few columns, where column c covers the
tokens c, c + columns, c + 2 * columns ... of that row.

A row's result must be batch-invariant, bit for bit. So sums run along a row in a fixed order
(cumsum: np.sum pairs its terms by a width that depends on other rows), and padding weighs 0.

Draws visit tokens in an order that does not depend on scores. If rounding swaps two tokens that
nearly tie, as between devices, the answer then hardly ever changes; in sorted order it would.

`inverse_temperature` is [rows] float32. `counts` is top-k, [rows]; off: vocab.
`shares` is top-p, [rows]. `uniforms` are numbers in [0, 1), [rows], one per row.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np
from numpy.typing import NDArray

NARROW = 1024

# Tuned on 130,528 tokens: columns for the bound of top-k (must be more than NARROW), for the
# search in `pick_folded`, and for the intervals of `draw_plain`.
BOUND_COLUMNS = 2048
WALK_COLUMNS = 256
PLAIN_COLUMNS = 16384

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.intp]
Mask = NDArray[np.bool_]


def fold(scores: Floats, operation: np.ufunc, columns: int) -> Floats:
    """Reduces [rows, vocab] over columns to [rows, min(vocab, columns)], e.g. with np.maximum."""
    rows, vocab = scores.shape
    if vocab <= columns:
        return scores
    whole = vocab - vocab % columns
    folded: Floats = operation.reduce(scores[:, :whole].reshape(rows, -1, columns), axis=1)
    last = folded[:, : vocab - whole]
    operation(last, scores[:, whole:], out=last)
    return folded


def in_columns(
    scores: Floats, row: Ids, column: Ids, columns: int, padding: float = -np.inf
) -> Floats:
    """Returns the scores of row[i] in column[i]: [n, depth], padded beyond the end of the row."""
    vocab = scores.shape[1]
    ids = column[:, None] + np.arange(0, vocab, columns)
    found: Floats = scores[row[:, None], np.minimum(ids, vocab - 1)]
    found[ids >= vocab] = padding
    return found


def weigh(scores: Floats, best: Floats, inverse_temperature: Floats) -> Floats:
    """Returns exp((scores - best) * inverse_temperature), the softmax before normalisation.

    scores [rows, width], best [rows].
    """
    masses = scores - best[:, None]
    if np.any(inverse_temperature != 1.0):
        masses *= inverse_temperature[:, None]
    return np.exp(masses, out=masses)


def running_sums(masses: Floats) -> Doubles:
    sums: Doubles = np.cumsum(masses, axis=1, dtype=np.float64)
    return sums


def totals_of(masses: Floats) -> Doubles:
    """Returns the sums [rows], as a copy.

    NumPy assumes that a view of the last column extends over the memory after it. If the next
    function's output is there, NumPy uses its scalar loop, whose logarithms may differ from those
    of the vector loop by an ulp: the last bit would depend on the heap.
    """
    return running_sums(fold(masses, np.add, WALK_COLUMNS))[:, -1].copy()


def pick(masses: Floats, uniforms: Doubles) -> tuple[Ids, Doubles]:
    """Inverts the cumulative distribution of every row: positions [rows], and offsets in them.

    Given the position, the offset is again uniform in [0, 1), and can be used to pick within the
    position. A position without mass is never picked.
    """
    cumulative = running_sums(masses)
    totals = cumulative[:, -1]
    targets = np.minimum(uniforms * totals, np.nextafter(totals, 0.0))
    positions = np.count_nonzero(cumulative <= targets[:, None], axis=1)
    row = np.arange(len(positions))
    before = np.where(positions > 0, cumulative[row, positions - 1], 0.0)
    return positions, (targets - before) / masses[row, positions]


def pick_folded(masses: Floats, uniforms: Doubles) -> tuple[Ids, Doubles]:
    """`pick` for wide rows: first the column, then the position in it."""
    column, rest = pick(fold(masses, np.add, WALK_COLUMNS), uniforms)
    inside = in_columns(masses, np.arange(len(masses)), column, WALK_COLUMNS, padding=0.0)
    place, rest = pick(inside, rest)
    return column + WALK_COLUMNS * place, rest


def at_least_best(scores: Floats, counts: Ids) -> Mask:
    """Marks the counts[row] best scores of every row, and few others.

    The k-th best column maximum cannot exceed the k-th best score.
    counts is between 1 and min(vocab, NARROW).
    """
    maxima = fold(scores, np.maximum, BOUND_COLUMNS)
    ranks = maxima.shape[1] - counts
    bounds = np.partition(maxima, np.unique(ranks), axis=1)[np.arange(len(ranks)), ranks]
    # -inf cannot be drawn, and a row may have fewer than counts[row] other scores.
    marked: Mask = (scores >= bounds[:, None]) & (scores > -np.inf)
    return marked


def best_mask(scores: Floats, worst: Floats, counts: Ids) -> Mask:
    """Marks the counts[row] best of every row, given the worst of them; lower ids win ties."""
    above = scores > worst[:, None]
    ties = scores == worst[:, None]
    room = counts - np.count_nonzero(above, axis=1)
    marked: Mask = above | (ties & (np.cumsum(ties, axis=1) <= room[:, None]))
    return marked


def gather(scores: Floats, marked: Mask) -> tuple[Ids, Floats]:
    """Returns the marked tokens' ids, ascending, and scores, [rows, width], padded with 0 and -inf.

    width is the largest number of them in a row, and at least 1.
    """
    rows, vocab = scores.shape
    flat = np.flatnonzero(marked)
    row, token = np.divmod(flat, vocab)
    counts = np.bincount(row, minlength=rows)
    place = np.arange(flat.size) - (np.cumsum(counts) - counts)[row]
    ids = np.zeros((rows, max(1, int(counts.max()))), dtype=np.intp)
    candidates = np.full(ids.shape, -np.inf, dtype=np.float32)
    ids[row, place] = token
    candidates[row, place] = scores[row, token]
    return ids, candidates


def draw_among(
    ids: Ids,
    scores: Floats,
    counts: Ids,
    shares: Doubles,
    inverse_temperature: Floats,
    uniforms: Doubles,
    totals: Optional[Doubles] = None,
) -> Ids:
    """Reduces the candidates of `gather` to top-k, then to top-p, then draws.

    totals [rows] are the masses that `shares` refer to; None: the masses after top-k.
    """
    ordered = -np.sort(-scores, axis=1)
    masses = weigh(ordered, ordered[:, 0], inverse_temperature)
    masses[np.arange(masses.shape[1]) >= counts[:, None]] = 0.0
    cumulative = running_sums(masses)
    enough = shares * (cumulative[:, -1] if totals is None else totals)
    enough[shares >= 1.0] = np.inf
    reached = 1 + np.count_nonzero(cumulative < enough[:, None], axis=1)
    counts = np.minimum(np.minimum(counts, reached), scores.shape[1])
    row = np.arange(len(ids))
    kept = best_mask(scores, ordered[row, counts - 1], counts)
    positions, _ = pick(weigh(scores, ordered[:, 0], inverse_temperature) * kept, uniforms)
    drawn: Ids = ids[row, positions]
    return drawn


def draw_narrow(
    scores: Floats, counts: Ids, shares: Doubles, inverse_temperature: Floats, uniforms: Doubles
) -> Ids:
    """Top-k (Fan et al. 2018) of at most NARROW, then top-p, then one draw."""
    ids, candidates = gather(scores, at_least_best(scores, counts))
    return draw_among(ids, candidates, counts, shares, inverse_temperature, uniforms)


def draw_plain(
    scores: Floats, inverse_temperature: Floats, uniforms: Callable[[int, Ids], Doubles]
) -> Ids:
    """Draws a token from the whole softmax, with few exponentials.

    Every column gets an interval whose length is an upper bound of its mass, or, if that is large,
    its mass. A draw beyond the last token of its column is rejected and the row draws again, which
    keeps the distribution exact (rejection sampling; von Neumann 1951).
    uniforms(n, rows) are the numbers for attempt n of these rows.
    """
    vocab = scores.shape[1]
    maxima = fold(scores, np.maximum, PLAIN_COLUMNS)
    best = maxima.max(axis=1)
    depth = -(-vocab // PLAIN_COLUMNS)
    lengths = weigh(maxima, best, inverse_temperature) * np.float32(depth)
    if depth > 1:
        long = lengths > (totals_of(lengths) / 1024).astype(np.float32)[:, None]
        row, column = np.divmod(np.flatnonzero(long), PLAIN_COLUMNS)
        inside = in_columns(scores, row, column, PLAIN_COLUMNS)
        masses = weigh(inside, best[row], inverse_temperature[row])
        lengths[row, column] = running_sums(masses)[:, -1]
    drawn = np.zeros(len(scores), dtype=np.intp)
    waiting = np.arange(len(scores))
    attempt = 0
    while waiting.size:
        column, rest = pick_folded(lengths[waiting], uniforms(attempt, waiting))
        inside = in_columns(scores, waiting, column, PLAIN_COLUMNS)
        reached = running_sums(weigh(inside, best[waiting], inverse_temperature[waiting]))
        targets = rest * lengths[waiting, column]
        place = np.count_nonzero(reached <= targets[:, None], axis=1)
        drawn[waiting] = column + PLAIN_COLUMNS * place
        waiting = waiting[place == depth]
        attempt += 1
    return drawn


def draw_wide(
    scores: Floats, counts: Ids, shares: Doubles, inverse_temperature: Floats, uniforms: Doubles
) -> Ids:
    """Top-p (Holtzman et al. 2019), after a top-k that is off or large, then one draw."""
    vocab = scores.shape[1]
    drawn = np.zeros(len(scores), dtype=np.intp)
    best = scores.max(axis=1)
    masses = weigh(scores, best, inverse_temperature)
    totals = totals_of(masses)
    # A nucleus usually has few tokens, all above this floor. Their sum shows whether they suffice;
    # if not, the whole row is searched.
    floors = ((1.0 - shares) * totals / (4 * NARROW)).astype(np.float32)
    marked = masses >= floors[:, None]
    # Row by row: with an axis, this count takes a tenth of the function's time.
    marked[[np.count_nonzero(row) > NARROW for row in marked]] = False
    ids, candidates = gather(scores, marked)
    found = running_sums(weigh(candidates, best, inverse_temperature))[:, -1]
    few = (counts == vocab) & (found >= shares * totals)
    if np.any(few):
        by_row: Any = (ids, candidates, counts, shares, inverse_temperature, uniforms, totals)
        drawn[few] = draw_among(*(each[few] for each in by_row))
    many = np.flatnonzero(~few)
    for row in many:
        if counts[row] < vocab:
            rank = vocab - counts[row]
            worst = np.partition(scores[row], rank)[[rank]]
            masses[row] *= best_mask(scores[[row]], worst, counts[[row]])[0]
        if shares[row] < 1.0:
            masses[row] *= nucleus(masses[row], shares[row])
    if many.size:
        drawn[many], _ = pick_folded(masses[many], uniforms[many])
    return drawn


def nucleus(masses: Floats, share: float) -> Mask:
    """Marks the fewest largest of `masses` [vocab] that add up to `share` of their total.

    Non-negative floats sort as their bits do, so the upper halves of the bits are used as bins, and
    only the bin in which the sum is reached is sorted.
    """
    bins = masses.view(np.uint32) >> 16
    from_the_top: Doubles = np.bincount(bins, weights=masses)[::-1].cumsum()
    enough = share * from_the_top[-1]
    full = int(from_the_top.searchsorted(enough))
    border = from_the_top.size - 1 - full
    split = np.flatnonzero(bins == border)
    split = split[np.argsort(-masses[split], kind="stable")]
    missing = enough - (from_the_top[full - 1] if full else 0.0)
    reached = int(np.cumsum(masses[split], dtype=np.float64).searchsorted(missing))
    marked: Mask = bins > border
    marked[split[: reached + 1]] = True
    return marked


def log_probabilities(
    scores: Floats, tokens: Ids, counts: Ids
) -> tuple[Doubles, Ids, NDArray[Any]]:
    """Returns the log-softmax [rows] of `tokens` [rows], and ids and log-softmax of the best ones.

    The last two are [rows, width], best first, lower ids first among ties; the first counts[row]
    of each row are valid, for counts up to min(vocab, NARROW).
    """
    best = scores.max(axis=1)
    masses = weigh(scores, best, np.ones(len(best), dtype=np.float32))
    logarithms = best + np.log(totals_of(masses))
    ids, candidates = gather(scores, at_least_best(scores, np.maximum(counts, 1)))
    order = np.argsort(-candidates, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    candidates = np.take_along_axis(candidates, order, axis=1)
    chosen = scores[np.arange(len(best)), tokens] - logarithms
    return chosen, ids, candidates - logarithms[:, None]
