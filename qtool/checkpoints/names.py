"""Which part of which module parameter a checkpoint tensor is.

A checkpoint keeps each expert's matrices apart (`...experts.3.w1.weight`); transformers 5 keeps a
block's experts in one 3-D parameter (`...experts.gate_up_proj` [experts, 2 * inner, hidden]). The
way from the one to the other is transformers' own conversion mapping: renamings, and converters
made of operations on lists of tensors. Here those operations are carried out on names instead of
numbers, so that each checkpoint tensor comes out as an index into a parameter:

    parameter[index] is the checkpoint tensor, and a view: writing into it changes the block

The reverse, one tensor of which a model makes several parameters: qtool.streaming.joined_rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from qtool.checkpoints.conversions import Conversions
from qtool.checkpoints.fused_experts import DOWN, GATE_UP, PARTS, WHOLE, layout_of
from qtool.errors import RTN_CAN, SourceError, UnsupportedError
from qtool.formats.layer_names import experts_of

if TYPE_CHECKING:
    import torch

Index = tuple[int | slice, ...]


class HasShape(Protocol):
    """Whatever says a stored tensor's shape, such as a header entry."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Binding:
    """One checkpoint tensor is `parameter[index]`; an empty index is the whole parameter, for a
    transposed one seen with its last two dimensions swapped."""

    checkpoint_name: str
    parameter_name: str
    index: Index
    shape: tuple[int, ...]  # of the checkpoint tensor
    transposed: bool = False

    def view(self, parameter: "torch.Tensor") -> "torch.Tensor":
        """The checkpoint tensor's part of the parameter, sharing its memory."""
        part = parameter[self.index] if self.index else parameter
        return part.mT if self.transposed else part


@dataclass(frozen=True)
class Names:
    """The two vocabularies side by side."""

    of_parameter: Mapping[str, tuple[Binding, ...]]  # by parameter or persistent buffer name
    of_tensor: Mapping[str, Binding]  # by checkpoint name
    unknown: tuple[str, ...]  # checkpoint tensors that the model class has no place for
    refused: Mapping[str, str] = field(default_factory=dict)  # parameter -> why it is not bound

    def why_refused(self, parameter: str) -> str | None:
        """Why a parameter, or one like it in another place, is not bound, if it is for that."""
        alike = _stem(parameter)
        return next((why for name, why in self.refused.items() if _stem(name) == alike), None)


@dataclass(frozen=True)
class _Tile:
    """A tensor being put together: its shape, and where in it each checkpoint tensor lies."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Index], ...]


def bind(
    model: Any,
    tensors: Mapping[str, HasShape],
    joined: Mapping[str, str] | None = None,
    within: str = "",
) -> Names:
    """Bind every checkpoint tensor that the model class has a place for.

    `model` is a transformers PreTrainedModel, on the meta device or not. A tensor whose shape is
    not the model's raises SourceError. What is converted otherwise than by a view is left unbound:
    of a model that also sees it may be a part that text does not need. joined: the parameters that
    some tensors are already known to be. within: what the names of the model's tensors begin with,
    where it is a part of the checkpoint's.
    """
    from transformers.core_model_loading import dot_natural_key

    state = model.state_dict()
    conversions = Conversions.of(model, within)
    joined = joined or {}

    plain: dict[str, str] = {}
    gathered: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unknown: list[str] = []
    # Natural order, because a tensor's place in a list is its expert's number.
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = conversions.target(name, state)
        own = name.startswith(within)
        if name in joined or (own and target not in state and name in state):
            target, pattern = joined.get(name, name), None
        if not own or target not in state:
            unknown.append(name)
        elif pattern is None:
            if target in plain:
                unknown.append(name)
            else:
                plain[target] = name
        else:
            converter = conversions.by_pattern[pattern]
            _, sources = gathered.setdefault(target, (converter, {}))
            sources.setdefault(pattern, []).append(name)

    of_parameter: dict[str, tuple[Binding, ...]] = {}
    refused: dict[str, str] = {}
    for target, name in plain.items():
        shape = tuple(tensors[name].shape)
        _check_shape(model, target, tuple(state[target].shape), shape, f"tensor {name!r}")
        of_parameter[target] = (Binding(name, target, (), shape),)
    for target, (converter, sources) in gathered.items():
        if transposed := _transposed(
            target, converter, sources, tensors, tuple(state[target].shape)
        ):
            of_parameter[target] = (transposed,)
            continue
        try:
            tile = _convert(model, target, converter, sources, tensors)
        except UnsupportedError as error:
            refused[target] = str(error)
            continue
        first = tile.pieces[0][0]
        _check_shape(
            model, target, tuple(state[target].shape), tile.shape, f"{first!r} and its companions"
        )
        of_parameter[target] = tuple(
            Binding(name, target, index, tuple(tensors[name].shape)) for name, index in tile.pieces
        )

    # Classes that know fused experts only, given the same apart: see fused_experts.py.
    def fused(name: str) -> str | None:
        held = conversions.held(name, state)
        return None if held is None else held.parameter

    of_parameter |= _experts(unknown, fused, state, tensors)
    of_tensor = {piece.checkpoint_name: piece for group in of_parameter.values() for piece in group}
    left = tuple(name for name in unknown if name not in of_tensor)
    return Names(of_parameter, of_tensor, left, refused)


def _stem(parameter: str) -> str:
    """What comes before the first number of a name."""
    return "".join(takewhile(lambda letter: not letter.isdecimal(), parameter))


def _experts(
    names: Sequence[str],
    target_of: Callable[[str], str | None],
    state: Mapping[str, HasShape],
    tensors: Mapping[str, HasShape],
) -> dict[str, tuple[Binding, ...]]:
    """The matrices of single experts as parts of the parameters that hold all of them, by these.

    target_of: the parameter that a checkpoint's fused tensor is, or the transpose of which.
    """
    of_parameter: dict[str, tuple[Binding, ...]] = {}
    for layer in dict.fromkeys(found[0] for name in names if (found := experts_of(name))):
        targets = {kind: target_of(f"{layer}.{kind}") for kind in (GATE_UP, DOWN)}
        shapes = {t: tuple(state[t].shape) for t in targets.values() if t is not None}
        layout = layout_of(*shapes.values()) if len(shapes) == 2 else None
        if layout is None:
            continue
        parts = WHOLE if f"{layer}.0.{GATE_UP}.weight" in tensors else PARTS
        for kind, target in zip(targets, shapes, strict=True):
            transposed = layout == "transposed"
            of_parameter[target] = tuple(
                _expert(f"{layer}.{expert}.{part}.weight", target, index, transposed, tensors)
                for expert, part, index in _slices(shapes[target], parts[kind], transposed)
            )
    return of_parameter


def _slices(
    shape: tuple[int, ...], parts: Sequence[str], transposed: bool
) -> Iterator[tuple[int, str, Index]]:
    """Every expert's parts in a parameter [experts, out, in], or transposed [experts, in, out]."""
    experts, rows, columns = shape
    rows, columns = (columns, rows) if transposed else (rows, columns)
    rows //= len(parts)
    for expert in range(experts):
        for number, part in enumerate(parts):
            outputs, inputs = slice(number * rows, (number + 1) * rows), slice(0, columns)
            yield (
                expert,
                part,
                (expert, inputs, outputs) if transposed else (expert, outputs, inputs),
            )


def _expert(
    name: str, target: str, index: Index, transposed: bool, tensors: Mapping[str, HasShape]
) -> Binding:
    """One matrix of an expert. SourceError where it is missing or of another size."""
    if name not in tensors:
        raise SourceError(
            f"the checkpoint has no tensor {name!r}, which is a part of {target!r}; it is "
            "incomplete: fetch it again"
        )
    sizes = [one.stop - one.start for one in index if isinstance(one, slice)]
    expected = (sizes[1], sizes[0]) if transposed else (sizes[0], sizes[1])
    shape = tuple(tensors[name].shape)
    if shape != expected:
        raise SourceError(
            f"tensor {name!r}: shape {list(shape)}, but with this config.json {target!r} has "
            f"experts of {list(expected)}; config and weights are of different models"
        )
    return Binding(name, target, index, shape, transposed)


def _transposed(
    target: str,
    converter: Any,
    sources: Mapping[str, list[str]],
    tensors: Mapping[str, HasShape],
    expected: tuple[int, ...],
) -> Binding | None:
    """One tensor of which the parameter is the transpose, in its last two dimensions."""
    from transformers.core_model_loading import Transpose

    names = [name for group in sources.values() for name in group]
    if len(names) != 1 or [type(one) for one in converter.operations] != [Transpose]:
        return None
    (name,), (operation,) = names, converter.operations
    shape, rank = tuple(tensors[name].shape), len(expected)
    if {operation.dim0 % rank, operation.dim1 % rank} != {rank - 2, rank - 1}:
        return None
    if operation.check_dims and shape == expected:  # transformers takes it as it is
        return Binding(name, target, (), shape)
    if shape != (*expected[:-2], expected[-1], expected[-2]):
        return None
    return Binding(name, target, (), shape, transposed=True)


def _check_shape(
    model: Any, target: str, expected: tuple[int, ...], found: tuple[int, ...], what: str
) -> None:
    if found != expected:
        raise SourceError(
            f"{what}: shape {list(found)}, but with this config.json {type(model).__name__} "
            f"expects {list(expected)} for {target!r}; config and weights are of different models"
        )


def _convert(
    model: Any,
    target: str,
    converter: Any,
    sources: Mapping[str, list[str]],
    tensors: Mapping[str, HasShape],
) -> _Tile:
    """Carry out a converter's operations on tiles; the one tile that results is the parameter."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    lists: dict[str, list[_Tile]] = {}
    for pattern in converter.source_patterns:
        if pattern not in sources:
            example = next(iter(sources.values()))[0]
            raise SourceError(
                f"{target!r} is made of {converter.source_patterns}, but next to {example!r} the "
                f"checkpoint has no tensor like {pattern!r}"
            )
        lists[pattern] = [_whole(name, tensors[name].shape) for name in sources[pattern]]
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist):
            lists = {key: [_stack(tiles, operation.dim)] for key, tiles in lists.items()}
        elif isinstance(operation, Concatenate):
            joined = [tile for tiles in lists.values() for tile in tiles]
            lists = {target: [_concatenate(joined, operation.dim)]}
        else:
            example = next(iter(sources.values()))[0]
            raise UnsupportedError(
                f"{type(model).__name__} keeps {example!r} through the conversion "
                f"{type(operation).__name__}, which is not a view of {target!r}; {RTN_CAN}"
            )
    tiles = [tile for group in lists.values() for tile in group]
    if len(tiles) != 1:
        raise UnsupportedError(
            f"{type(model).__name__} turns {converter.source_patterns} into several parameters; "
            f"{RTN_CAN}"
        )
    return tiles[0]


def _whole(name: str, shape: tuple[int, ...]) -> _Tile:
    return _Tile(tuple(shape), ((name, tuple(slice(0, size) for size in shape)),))


def _stack(tiles: list[_Tile], dim: int) -> _Tile:
    """torch.stack: a new dimension, in which each tile has a number."""
    _check_equal(tiles, lambda tile: tile.shape)
    shape = tiles[0].shape
    pieces = tuple(
        (name, (*index[:dim], number, *index[dim:]))
        for number, tile in enumerate(tiles)
        for name, index in tile.pieces
    )
    return _Tile((*shape[:dim], len(tiles), *shape[dim:]), pieces)


def _concatenate(tiles: list[_Tile], dim: int) -> _Tile:
    """torch.cat: each tile moves by the sizes of those before it."""
    _check_equal(tiles, lambda tile: (*tile.shape[:dim], *tile.shape[dim + 1 :]))
    pieces: list[tuple[str, Index]] = []
    offset = 0
    for tile in tiles:
        for name, index in tile.pieces:
            pieces.append((name, (*index[:dim], _moved(index[dim], offset), *index[dim + 1 :])))
        offset += tile.shape[dim]
    shape = tiles[0].shape
    return _Tile((*shape[:dim], offset, *shape[dim + 1 :]), tuple(pieces))


def _moved(index: int | slice, offset: int) -> int | slice:
    if isinstance(index, int):
        return index + offset
    return slice(index.start + offset, index.stop + offset)


def _check_equal(tiles: list[_Tile], key: Any) -> None:
    for tile in tiles[1:]:
        if key(tile) != key(tiles[0]):
            raise SourceError(
                f"tensor {tile.pieces[0][0]!r}: shape {list(tile.shape)} does not go with "
                f"{tiles[0].pieces[0][0]!r} of shape {list(tiles[0].shape)}"
            )
