"""SmoothAttention: channels of keys that are large get smaller, those of the queries larger.

    s_i = max|k_i|^a                  over all tokens, of each channel i of each head of keys
    q k' = (q s) (k / s)'             s goes into the rows of the query and key matrices

A cache of 4 bits then has a scale that suits all channels. Rotary embedding turns pairs of channels
into each other, so that both of a pair get the larger s and the turning commutes with it: pairs
are (i, i + d/2), or neighbours, of the first d channels of a head, where d may be less than all.
Queries that share a head of keys share its scales. Scales are powers of two where a bias or a
matrix is written in 16 bits.

Nothing is known of the model's code. Keys are seen where attention is computed, in one call of
scaled_dot_product_attention. Which rows of which matrix make them is found by doubling those of
a head: then its keys are twice as large. Which channels have to share is proposed and
proved as folds are (`qtool.transforms.fold`): random scales must change nothing, and
must change the output where only keys have them. Norms of queries and keys undo any scale of the
matrix before, and have weights that all heads share: such blocks are left out, and a note says so.
Where engines rotate queries and keys (R3) both are looked at unrotated: those are the channels that
the matrices make, and a rotation spreads what outliers are left.

Source: Lin et al., QServe, 2024, section 4.2.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from qtool.calibrating.sites import BlockSites
from qtool.calibrating.stats import SiteStats
from qtool.checkpoints.scaled import Factor
from qtool.streaming.stream import Call, LoadedBlock, Stream
from qtool.streaming.torch_calls import TorchCalls
from qtool.transforms.fold import (
    Scaled,
    Shown,
    far_scales,
    parameter_of,
    restored,
    same,
    shown,
    undone,
)
from qtool.transforms.places import head_places
from qtool.transforms.proved import (
    Applied,
    Floats,
    Subject,
    Workers,
    narrow,
    overflows,
    powers_of_two,
)

_LEAST = 1e-3  # of the largest channel of a head, for channels that are nearly silent
_16_BITS = ("F16", "BF16")
_NORMS = "keys are not linear in one matrix (norms of queries and keys undo any scale)"


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix that make one side of attention, head by head, and their biases."""

    name: str  # checkpoint name of the matrix
    bias: str | None
    index: NDArray[np.int64]  # [heads * channels], rows of the matrix
    bias_offset: int  # of the matrix' first row in the bias


@dataclass(frozen=True)
class Pair:
    """Queries and keys of one attention, and the channels that have to share a scale."""

    queries: Rows
    keys: Rows
    heads: int  # of keys
    head_dim: int
    shared: NDArray[np.int64]  # [head_dim], one number for channels that share


class _ReachedError(Exception):
    """Ends a forward pass of which nothing more is needed."""


class _Watch(TorchCalls):
    """Hears of queries and keys, each [samples, heads, tokens, channels], where they meet."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ends = ends

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention and len(args) >= 2:
            self.seen.append((args[0], args[1]))
            if self._ends:
                raise _ReachedError
        return func(*args, **kwargs)


def apply(subject: Subject, stats: Mapping[str, SiteStats]) -> Applied:
    """Scale the keys of a block, in place. No input of a matrix changes, hence no statistics."""
    block, plan = subject.block, subject.plan
    block = replace(block, online=block.online.without_heads())
    pair = find_pair(block, subject.found, subject.stream)
    if isinstance(pair, str):
        return Applied(dict(stats), frozenset(), (f"keys not scaled: {pair}",))
    largest = largest_keys(block, subject.stream, pair, subject.workers)
    scale = scales(largest, pair.shared, subject.recipe.smooth_attention.alpha)
    sides = (pair.queries, pair.keys)
    matrices = [side.name for side in sides if plan.by_name[side.name].scheme is None]
    biases = [side.bias for side in sides if side.bias is not None]
    dense = {*matrices, *biases}
    if subject.powers or any(plan.by_name[name].dtype in _16_BITS for name in dense):
        scale = powers_of_two(scale)
    for side, factor in _factors(pair, scale):
        for name, largest_of in _sizes(block, side):
            if narrow(plan, name) and overflows(largest_of, factor.numpy()):
                note = f"keys not scaled: {name} could not hold the scales in float16"
                return Applied(dict(stats), frozenset(), (note,))
    if (scale == 1).all():
        return Applied(dict(stats), frozenset(), ("keys not scaled: every scale is 1",))
    fold(block, pair, scale)
    factors = tuple(factor for side, by in _factors(pair, scale) for factor in _of(block, side, by))
    return Applied(dict(stats), frozenset(dense), (_note(pair, block.prefix),), factors)


def _note(pair: Pair, prefix: str) -> str:
    """What was scaled: heads, channels that share a scale, and where the scales went."""
    pairs = pair.head_dim - int(pair.shared.max()) - 1
    single = pair.head_dim - 2 * pairs
    counts = ((pairs, "pairs of channels"), (single, "single channels"))
    scaled = " and ".join(f"{count} {what}" for count, what in counts if count)
    names = dict.fromkeys(side.name.removeprefix(prefix) for side in (pair.keys, pair.queries))
    return f"keys scaled: {scaled} in each of {pair.heads} heads, in {' and '.join(names)}"


def scales(largest: Floats, shared: NDArray[np.int64], alpha: float) -> Floats:
    """max|k|^a, [heads, channels], the larger of those that share; silent channels keep 1."""
    tops = np.zeros((len(largest), int(shared.max()) + 1), np.float32)
    for channel, number in enumerate(shared):
        np.maximum(tops[:, number], largest[:, channel], out=tops[:, number])
    level = tops[:, shared]
    floor = np.maximum(level, _LEAST * level.max(1, keepdims=True))
    return np.where(level > 0, np.maximum(floor, 1e-30) ** alpha, 1).astype(np.float32)


def fold(block: LoadedBlock, pair: Pair, scale: Floats) -> None:
    """Multiply queries by scale [heads of keys, channels], and divide keys by it."""
    for side, factor in _factors(pair, scale):
        _multiply(block, side, factor)


def _factors(pair: Pair, scale: Floats) -> tuple[tuple[Rows, torch.Tensor], ...]:
    """What rows of queries, and of keys, are multiplied by."""
    keys = torch.from_numpy(scale.reshape(-1))
    repeats = len(pair.queries.index) // len(pair.keys.index)
    queries = torch.from_numpy(np.repeat(scale, repeats, axis=0).reshape(-1))
    return (pair.queries, queries), (pair.keys, 1 / keys)


def _of(block: LoadedBlock, side: Rows, by: torch.Tensor) -> Iterator[Factor]:
    """The same by tensor, of all its rows."""
    rows = torch.from_numpy(side.index)
    for name, offset in ((side.name, 0), (side.bias, side.bias_offset)):
        if name is not None:
            whole = torch.ones(len(block.weights[name]))
            whole[rows + offset] = by
            yield Factor(name, whole.numpy(), False)


def _sizes(block: LoadedBlock, side: Rows) -> Iterator[tuple[str, torch.Tensor]]:
    """The largest of each row, of the matrix and of its bias."""
    rows = torch.from_numpy(side.index)
    yield side.name, block.weights[side.name][rows].abs().amax(1)
    if side.bias is not None:
        yield side.bias, block.weights[side.bias][rows + side.bias_offset].abs()


def find_pair(block: LoadedBlock, found: BlockSites, stream: Stream) -> Pair | str:
    """The matrices that make queries and keys; or why no scales can be put into them."""
    hidden, call = stream.probe(block.index)
    with _Watch() as watch:
        expected = shown(block, hidden, call)
    if len(watch.seen) != 1:
        return f"attention of this model is {len(watch.seen)} calls of torch's function, not one"
    queries, keys = watch.seen[0]
    head_dim = keys.shape[-1]
    if queries.shape[-1] != head_dim:
        return "queries and keys are not equally wide"
    sides: list[tuple[Rows, int]] = []
    for place, heads in ((1, keys.shape[1]), (0, queries.shape[1])):
        before = watch.seen[0][place]
        side = next(
            (
                (rows, count)
                for rows, count in _proposals(found, heads, head_dim)
                if _makes(block, rows, place, before, count, hidden, call)
            ),
            None,
        )
        if side is None:
            return _NORMS
        sides.append(side)
    (key_rows, heads), (query_rows, query_heads) = sides
    if query_heads % heads:
        return f"{query_heads} heads of queries do not share {heads} of keys evenly"
    for shared in sharings(head_dim):
        pair = Pair(query_rows, key_rows, heads, head_dim, shared)
        if _proved(block, pair, hidden, call, expected):
            return pair
    return "no pairs of channels were found that rotary embedding turns into each other"


def sharings(head_dim: int) -> Iterator[NDArray[np.int64]]:
    """Which channels of a head may have to share: none, or pairs of those that are rotated."""
    channel = np.arange(head_dim)
    yield channel
    parts = (n for n in range(2, head_dim + 1, 2) if head_dim % n == 0 or 8 * n % head_dim == 0)
    for count in sorted(parts, reverse=True):
        for pair in (channel % (count // 2), channel // 2):
            yield np.unique(np.where(channel < count, pair, channel), return_inverse=True)[1]


def largest_keys(block: LoadedBlock, stream: Stream, pair: Pair, workers: Workers) -> Floats:
    """max|k| over all tokens of the stream, [heads, channels]; as attention sees them."""

    def measure(number: int) -> Floats:
        with _Watch(ends=True) as watch, suppress(_ReachedError), torch.no_grad():
            block.run(stream.hidden[number], stream.calls[block.index][number])
        keys = watch.seen[0][1]
        step = keys.shape[1] // pair.heads  # where the model repeats them for all queries
        return np.asarray(keys[:, ::step].abs().amax((0, 2)).numpy())

    largest: Floats = np.maximum.reduce(workers.map(measure, range(len(stream.hidden))))
    return largest


def _proposals(found: BlockSites, heads: int, head_dim: int) -> Iterator[tuple[Rows, int]]:
    """Rows that may make `heads` heads, or fewer that are repeated, with their number of heads."""
    for linear in found.linears:
        for reader in linear.readers:
            rows, rest = divmod(reader.rows[1] - reader.rows[0], head_dim)
            if rest or linear.matrix.expert is not None:
                continue
            for index in head_places(rows, heads):
                channels = index[:, None] * head_dim + np.arange(head_dim)
                own = channels.reshape(-1) + reader.first
                side = Rows(reader.name, linear.bias, own, reader.rows[0])
                yield side, len(index)


def _makes(
    block: LoadedBlock,
    rows: Rows,
    place: int,
    before: torch.Tensor,
    heads: int,
    hidden: torch.Tensor,
    call: Call,
) -> bool:
    """Whether each head of these rows makes the head of its number, and no other."""
    factor = torch.linspace(1.5, 2.5, heads)
    with restored(block, _tensors(rows)):
        _multiply(block, rows, factor.repeat_interleave(len(rows.index) // heads))
        with _Watch(ends=True) as watch, suppress(_ReachedError):
            block.run(hidden, call)
    after = watch.seen[0][place]
    wanted = before * factor.repeat_interleave(before.shape[1] // heads)[:, None, None]
    off = float((after - wanted).abs().max())
    return off <= 1e-4 * float(wanted.abs().max())


def _proved(
    block: LoadedBlock, pair: Pair, hidden: torch.Tensor, call: Call, expected: Shown
) -> bool:
    """Whether the block computes the same with random scales folded in. Undone after."""
    random = np.random.default_rng(0)
    drawn = np.exp2(random.uniform(-1, 1, (pair.heads, pair.head_dim)))
    scale = drawn[:, pair.shared].astype(np.float32)
    with restored(block, _tensors(pair.keys, pair.queries)):
        fold(block, pair, scale)
        paired = shown(block, hidden, call)
    with restored(block, _tensors(pair.keys)):
        _multiply(block, pair.keys, torch.from_numpy(1 / scale.reshape(-1)))
        unpaired = shown(block, hidden, call)
    sides = (pair.keys, pair.queries)
    scaled = [Scaled(parameter_of(block, side.name), side.index) for side in sides]
    if undone(unpaired, paired, expected, scaled) is not True:
        return False
    with restored(block, _tensors(pair.keys, pair.queries)):
        far = far_scales(pair.heads * pair.head_dim).reshape(pair.heads, pair.head_dim)
        fold(block, pair, far[:, pair.shared])
        return same(shown(block, hidden, call), expected, scaled)


def _multiply(block: LoadedBlock, side: Rows, factor: torch.Tensor) -> None:
    rows = torch.from_numpy(side.index)
    block.weights[side.name][rows] *= factor[:, None]
    if side.bias is not None:
        block.weights[side.bias][rows + side.bias_offset] *= factor


def _tensors(*sides: Rows) -> list[str]:
    names = [name for side in sides for name in (side.name, side.bias) if name is not None]
    return list(dict.fromkeys(names))
