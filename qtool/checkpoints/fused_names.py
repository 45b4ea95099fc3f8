"""The tensors that a model class's checkpoints have of experts that an artifact has one by one.

    ...experts.3.gate_proj.weight, up_proj     [inner, hidden]
        -> ...experts.gate_up_proj             [experts, 2 * inner, hidden], or the transpose
    ...experts.3.down_proj.weight              [hidden, inner]
        -> ...experts.down_proj                [experts, hidden, inner], or the transpose

The way back from fused_experts.py. Which classes know fused experts only, what their checkpoints
call them and how they lie is asked of transformers' own conversion mapping, not of a table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qtool.checkpoints.conversions import Conversions, Held
from qtool.checkpoints.fused_experts import DOWN, GATE_UP, PARTS, layout_of, tensors_of
from qtool.formats.layer_names import experts_of

_MATRICES = tuple(part for parts in PARTS.values() for part in parts)


@dataclass(frozen=True)
class FusedTensor:
    """A tensor of all experts of a layer."""

    name: str  # in checkpoints of the class
    shape: tuple[int, ...]
    transposed: bool  # [experts, in, out]
    parts: tuple[tuple[str, ...], ...]  # of each expert: the matrices in it, one after another

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape [out, in] of each part."""
        rows, columns = self.shape[:0:-1] if self.transposed else self.shape[1:]
        return rows // len(self.parts[0]), columns


def layer_of(name: str) -> str | None:
    """The layer `...experts` of one of an expert's matrices, by the names that qtool gives them."""
    found = experts_of(name)
    if found is None:
        return None
    layer, expert = found
    return layer if name[len(layer) :] in {f".{expert}.{m}.weight" for m in _MATRICES} else None


def fused_tensors(model: Any, names: Iterable[str], within: str = "") -> list[FusedTensor]:
    """Of an expert's matrices those tensors that `model`, a transformers PreTrainedModel on any
    device, has to be given instead; none for layers that it takes apart, or does not know.

    within: what names of its tensors begin with, where it is a part of the checkpoint's model.
    """
    layers: dict[str, dict[str, str]] = {}  # of each one expert's matrices, by their last names
    for name in names:
        if (layer := layer_of(name)) is not None:
            layers.setdefault(layer, {}).setdefault(name.split(".")[-2], name)
    conversions, state = Conversions.of(model, within), model.state_dict()
    found: list[FusedTensor] = []
    for layer, matrices in layers.items():
        if not any(conversions.target(name, state)[0] in state for name in matrices.values()):
            found += _of_layer(layer, conversions, state)
    return found


def _of_layer(
    layer: str, conversions: Conversions, state: dict[str, Any]
) -> tuple[FusedTensor, ...]:
    """The two tensors; none where the class has no such parameters."""
    held = [conversions.held(f"{layer}.{kind}", state) for kind in (GATE_UP, DOWN)]
    there = [one for one in held if one is not None]
    shapes = [tuple(state[one.parameter].shape) for one in there]
    layout = layout_of(*shapes) if len(shapes) == 2 else None
    if layout is None:
        return ()
    if not all(_last_two(transpose) for one in there for transpose in one.transposes):
        return ()
    transposed = [_transposed(one, shapes) for one in there]
    found = []
    for kind, one, shape, transpose in zip((GATE_UP, DOWN), there, shapes, transposed, strict=True):
        experts = range(shape[0])
        found.append(
            FusedTensor(
                _name(layer, kind, one.parameter, conversions, state),
                (shape[0], *shape[:0:-1]) if transpose else shape,
                (layout == "transposed") != transpose,
                tuple(tuple(f"{layer}.{e}.{p}.weight" for p in PARTS[kind]) for e in experts),
            )
        )
    return tuple(found)


def _transposed(held: Held, shapes: list[tuple[int, ...]]) -> bool:
    """Whether checkpoints have the transpose of the parameter. shapes: of the layer's parameters.

    A class that looks at shapes takes a square one as it is, so then the layer has none transposed.
    """
    square = any(rows == columns for _, rows, columns in shapes)
    transposes = [
        transpose for transpose in held.transposes if not (transpose.check_dims and square)
    ]
    return len(transposes) % 2 == 1


def _last_two(transpose: Any) -> bool:
    """Whether an operation swaps the last two axes of three."""
    return {transpose.dim0 % 3, transpose.dim1 % 3} == {1, 2}


def _name(
    layer: str, kind: str, parameter: str, conversions: Conversions, state: dict[str, Any]
) -> str:
    """What checkpoints of the class call a parameter: the first name that it renames to it."""
    for name in tensors_of(layer, kind):
        held = conversions.held(name, state)
        if held is not None and held.parameter == parameter:
            return name
    return f"{layer}.{kind}"
