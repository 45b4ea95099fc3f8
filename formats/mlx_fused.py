"""Experts that checkpoints have in one tensor for all, and for gate and up together, and mlx-lm in
three stacks: gpt-oss and Llama 4.

    mlx-lm        ...experts.gate_proj, up_proj, down_proj   codes [experts, out, words], scales ...
                                                             and of gpt-oss .bias [experts, out]
    checkpoints   ...experts.gate_up_proj   [experts, in, 2 * out]   gpt-oss: interleaved
                  ...experts.down_proj      [experts, in, out]
                  ...experts.gate_up_proj_bias      [experts, 2 * out], and down_proj_bias

`apart` names an expert's parts ...experts.E.gate_proj.weight and so on; a Whole is made of them.

Source: mlx-lm 0.32.2 (sanitize() of models/gpt_oss.py and llama4.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qtool.errors import FormatError
from qtool.formats.safetensors_header import TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np

# By model_type: whether gate and up are interleaved.
INTERLEAVED = {"gpt_oss": True, "llama4": False}
_STACK = re.compile(
    r"(.+\.experts)\.((?:gate|up|down)_proj)\.(weight|scales|biases|bias|global_scale)"
)
_PART = re.compile(r"(.+\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.(weight|bias)")


@dataclass(frozen=True)
class Whole:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]  # of each expert: gate and up, or down
    interleaved: bool

    def expert(
        self, number: int, read: Callable[[str], NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        """One expert's numbers, float32 of shape[1:]; read gives a part's."""
        found = [read(name) for name in self.parts[number]]
        if self.interleaved:
            rows = np.stack(found, axis=1).reshape(-1, *found[0].shape[1:])
        else:
            rows = np.concatenate(found)
        return np.ascontiguousarray(rows.T)


def part_of(name: str, tensors: Mapping[str, TensorInfo], kind: str) -> tuple[str, str] | None:
    """What stands before and behind an expert's number in the names of a stack's parts; None of
    anything but a stack with codes."""
    found = _STACK.fullmatch(name) if kind in INTERLEAVED else None
    if found is None or f"{found[1]}.{found[2]}.scales" not in tensors:
        return None
    return f"{found[1]}.", f".{found[2]}.{found[3]}"


def wholes(shapes: Mapping[str, tuple[int, ...]], kind: str) -> dict[str, Whole]:
    """The checkpoint's tensors by name, of the parts that are there; FormatError where some of one
    are missing. shapes: of every matrix and tensor by its name."""
    by_whole: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in shapes if kind in INTERLEAVED else ():
        if found := _PART.fullmatch(name):
            down = found[3] == "down_proj"
            whole = f"{found[1]}.{'down_proj' if down else 'gate_up_proj'}"
            whole += "_bias" if found[4] == "bias" else ""
            by_whole[whole][int(found[2])][found[3]] = name
    out = {}
    for whole, experts in by_whole.items():
        wanted = ("gate_proj", "up_proj") if "gate_up" in whole else ("down_proj",)
        parts = tuple(tuple(one.get(n, "") for n in wanted) for _, one in sorted(experts.items()))
        kinds = {shapes.get(name) for names in parts for name in names}
        if len(kinds) != 1 or None in kinds:
            raise FormatError(f"{whole}: its experts' gate and up are not there alike in all")
        rows, *columns = next(shape for shape in kinds if shape is not None)
        shape = (len(parts), *columns, rows * len(wanted))
        out[whole] = Whole(shape, parts, INTERLEAVED[kind])
    return out
