"""Rotations: R1 of the residual stream, R2 of the heads' values, which the weights absorb.

    R1    every x of the stream becomes x R: no channel of it stands out, and columns of the
          matrices that read it are alike; gains of the norms go into their readers first
    R2    every head's values v become v S, which the matrix after attention undoes

Both are told by structure (`qtool.transforms.residual`) and proved by numbers: a few tokens pass
through the network, each block once as it was and once as the view has it in float32, given x and
x R. What the block adds to the stream must be the same, rotated. What cannot be proved is left out
for the whole network, and the reason is told. Those that engines take part in, R3 and R4, are found
in `qtool.transforms.online`.

Source: Ashkboos et al., QuaRot, 2024, sections 3 and 4; Liu et al., SpinQuant, 2024, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from qtool.calibrating.sites import BlockSites, Tracer
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.online import Online
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import Call, LoadedBlock, Stream
from qtool.transforms import rotation as rotations
from qtool.transforms.fold import restored
from qtool.transforms.proof import check_rows, off, prove, rotate_states
from qtool.transforms.residual import (
    HANDS_ON,
    BlockRoles,
    NotRotatableError,
    OuterRoles,
    Values,
    block_roles,
    outer_roles,
    value_candidates,
)
from qtool.transforms.rotated import Rotated, change_all
from qtool.transforms.rotation import Rotation
from qtool.transforms.rotations import PROBE, Rotations, changes_of

_HEAD_ROWS = 256  # of the head, that are compared
_FAR = 1024.0  # a power of two changes no bit of what is linear


@dataclass
class _Search:
    """One try to rotate the network."""

    view: Rotated
    exact: Rotated  # the view in float32
    options: RotateOptions
    tracer: Tracer = field(default_factory=Tracer)
    chosen: dict[tuple[tuple[str, tuple[int, ...]], ...], int | None] = field(default_factory=dict)


def prepare(view: Rotated, options: RotateOptions, say: Callable[[str], None]) -> Rotations:
    """Rotate the view by what the recipe asks for and the proof allows."""
    torch.set_num_threads(1)  # as Workers does: sums that decide must not depend on it
    view.online.become(Online())
    found = _absorbed(view, options, say)
    if not options.online:
        return found
    from qtool.transforms.online import add

    return add(view, found, options, say)


def _absorbed(view: Rotated, options: RotateOptions, say: Callable[[str], None]) -> Rotations:
    """R1 and R2."""
    left_out: list[str] = []
    r1 = options.r1
    if r1 and view.refused is not None:
        left_out.append(f"the residual stream is not rotated: {view.refused}")
        r1 = False
    original = Skeleton.open(view.original)
    if r1:
        try:
            return _rotate(view, options, original, True, options.r2, left_out)
        except NotRotatableError as why:
            left_out.append(
                f"the residual stream is not rotated: {why}"
                + ("; the head stays untied" if view.head is not None else "")
            )
            say(f"note: {left_out[-1]}")
    if options.r2:
        try:
            return _rotate(view, options, original, False, True, left_out)
        except NotRotatableError as why:
            left_out.append(f"the values of attention are not rotated: {why}")
    view.changes.clear()
    return Rotations(None, {}, {}, None, tuple(left_out))


def _rotate(
    view: Rotated,
    options: RotateOptions,
    original: Skeleton,
    r1: bool,
    r2: bool,
    left_out: list[str],
) -> Rotations:
    """Rotate and prove block by block; NotRotatableError where the proof fails."""
    view.changes.clear()
    search = _Search(view, view.as_float32(), options)
    tokens = _probe(original)
    stream = original.embed(tokens)
    if not stream.layout.plain:
        raise NotRotatableError(HANDS_ON)
    width = stream.hidden[0].shape[-1]
    outer, rotation = None, None
    if r1:
        if original.unknown:
            raise NotRotatableError(
                f"{original.unknown[0]} is unknown to the model class, and may read the stream"
            )
        head = _head(view)
        shape = view.tensors[head].shape if head is not None else ()
        outer = outer_roles(original, width, head, shape)
        rotation = rotations.make(_start(options), width, (options.seed, 0))
    blocks: dict[int, BlockRoles] = {}
    r2s: dict[int, Rotation] = {}
    skeleton = Skeleton.open(search.exact)
    for index in range(original.count):
        block = original.block(index)
        found = search.tracer.sites(block, stream)
        roles = block_roles(block, found, width) if rotation is not None else BlockRoles({}, (), ())
        if index == 0 and rotation is not None and any(norm.centers for norm in roles.norms):
            rotation = rotations.fixing_ones(rotation)
        values = _values(search, block, found, stream, skeleton) if r2 else None
        roles = BlockRoles(roles.readers, roles.norms, roles.writers, values)
        if values is not None:
            seed = (options.seed, 1, index)
            r2s[index] = rotations.make(_start(options), values.size, seed)
        blocks[index] = roles
        partial = Rotations(rotation, r2s, {index: roles}, None)
        change_all(view, changes_of(partial))
        prove(block, stream, rotation, skeleton)
    if not r2s and r2:
        left_out.append(
            "the values of attention are not rotated: no matrix was found to make them head by head"
        )
        if rotation is None:
            raise NotRotatableError("nothing was found to make them head by head")
    elif len(r2s) < len(blocks) and r2:
        left_out.append(f"in {len(blocks) - len(r2s)} blocks no values were found to rotate")
    result = Rotations(rotation, r2s, blocks, outer, tuple(left_out))
    if outer is not None and rotation is not None:
        change_all(view, [outer.changes(rotation)])
        _prove_outer(view, search.exact, outer, rotation, original, skeleton, tokens, stream)
    return result


def prove_whole(view: Rotated, found: Rotations) -> None:
    """NotRotatableError where the network is another one with other matrices in place of those
    that were proved, or does not fit its dtype. The view shows them."""
    found.apply(view)
    exact = view.as_float32()
    original, skeleton = Skeleton.open(view.original), Skeleton.open(exact)
    tokens = _probe(original)
    stream = original.embed(tokens)
    for index in range(original.count):
        prove(original.block(index), stream, found.r1, skeleton)
    if found.outer is not None and found.r1 is not None:
        _prove_outer(view, exact, found.outer, found.r1, original, skeleton, tokens, stream)


def _probe(original: Skeleton) -> NDArray[np.int64]:
    vocabulary = int(original.model.get_input_embeddings().num_embeddings)
    return np.random.default_rng(0).integers(0, vocabulary, PROBE, dtype=np.int64)


def _start(options: RotateOptions) -> str:
    return "random" if options.kind == "random" else "hadamard"


def _head(view: Rotated) -> str | None:
    """The tensor that is the output head."""
    from qtool.checkpoints.roles import outside_reason

    names = [name for name in view.tensors if outside_reason(name) == "output head"]
    return names[0] if len(names) == 1 else None


def _values(
    search: _Search, block: LoadedBlock, found: BlockSites, stream: Stream, skeleton: Skeleton
) -> Values | None:
    """What makes a block's values: of its structure's candidates the first that is proved."""
    key = block.structure
    candidates = value_candidates(block, found)
    if key in search.chosen:
        wanted = search.chosen[key]
        return next((v for n, v in enumerate(candidates) if n == wanted), None)
    hidden, call = stream.hidden[0], stream.calls[block.index][0]
    expected = block.run(hidden, call)
    for number, values in enumerate(candidates):
        if not off(_grown(block, values, hidden, call), expected, expected - hidden) <= 1:
            continue
        before = dict(search.view.changes)
        trial = rotations.make(_start(search.options), values.size, (search.options.seed, 1))
        change_all(search.view, [values.changes(trial)])
        output = skeleton.block(block.index).run(hidden, call)
        search.view.changes.clear()
        search.view.changes.update(before)
        if off(output, expected, expected - hidden) <= 1:
            search.chosen[key] = number
            return values
    search.chosen[key] = None
    return None


def _grown(block: LoadedBlock, values: Values, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """What the block gives where values are far larger, and their reader compensates for it: the
    same, unless a clamp lies between that has nothing to do on the probe. A rotated head may have
    all of its length in one channel."""
    own = [row for start in values.starts for row in range(start, start + values.size)]
    changed = [(values.producer, own)]
    if values.bias is not None:
        changed.append((values.bias, [values.bias_offset + row for row in own]))
    with restored(block, (*(name for name, _ in changed), values.reader)):
        for name, rows in changed:
            block.weights[name][rows] *= _FAR
        block.weights[values.reader].div_(_FAR)
        return block.run(hidden, call)


def _prove_outer(
    view: Rotated,
    exact: Rotated,
    outer: OuterRoles,
    rotation: Rotation,
    original: Skeleton,
    skeleton: Skeleton,
    tokens: Any,
    stream: Stream,
) -> None:
    """Embedding, last norm and some rows of the head, in the same way."""
    before, after = original.embed(tokens).hidden[0], skeleton.embed(tokens).hidden[0]
    if not off(after, rotate_states(before, rotation), before) <= 1:
        raise NotRotatableError("what enters the blocks is not the rotated embedding")
    for name in (*outer.embeddings, outer.head):
        check_rows(exact, name)
    rows = min(_HEAD_ROWS, view.tensors[outer.head].shape[0])
    role = outer.norm
    gain = view.gain(role.norm)
    if role.bias is not None and not (gain != 0).all():
        raise NotRotatableError(
            f"{role.norm.weight} has gains of zero, by which its bias cannot be divided"
        )

    def logits(weights: Any, hidden: torch.Tensor) -> torch.Tensor:
        module = outer.module
        kept = dict(module._parameters)
        try:
            for attribute, name in (("weight", role.norm.weight), ("bias", role.bias)):
                if name is not None:
                    value = torch.from_numpy(weights.float32(name))
                    module._parameters[attribute] = torch.nn.Parameter(value, requires_grad=False)
            with torch.no_grad():
                normal = module(hidden)
        finally:
            module._parameters.update(kept)
        return F.linear(normal, torch.from_numpy(_rows(weights, outer.head, rows)))

    last = stream.hidden[0]
    unchanged = _Unchanged(view)
    expected = logits(unchanged, last)
    if not off(logits(exact, rotate_states(last, rotation)), expected, expected) <= 1:
        raise NotRotatableError("the head gives other logits once rotated")


@dataclass(frozen=True)
class _Unchanged:
    """The source's numbers under the view's names."""

    view: Rotated

    def float32(self, name: str) -> Any:
        """See Checkpoint."""
        return self.view.original.float32(name)

    def rows(self, name: str, count: int) -> Any:
        """The first rows of a matrix."""
        return self.view.unchanged_rows(name, 0, count)


def _rows(weights: Any, name: str, count: int) -> Any:
    if isinstance(weights, _Unchanged):
        return weights.rows(name, count)
    info = weights.tensors[name]
    return weights.part(name, 0, count).view(np.float32).reshape(count, *info.shape[1:])
