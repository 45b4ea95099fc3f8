"""Where finished tensors go: packed by the recipe's format and written into the planned place."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import __version__
from qtool.artifacts.stored_config import plain_config
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.structure import fused_layer, untied, without_float64
from qtool.formats import FORMATS
from qtool.formats.dtypes import written_dtype
from qtool.formats.facts import Facts, in_config
from qtool.formats.safetensors_file import (
    FLOAT_DTYPES,
    StreamWriter,
    from_float32,
    to_float32,
)
from qtool.planned import Planned
from qtool.planning import heads
from qtool.planning.fit import format_options
from qtool.planning.plan import Plan
from qtool.record import FILE_NAME
from qtool.runs.zeros import Zeros
from qtool.scheme import Dense, GroupQuant, Scheme
from qtool.streaming.finite import not_finite
from qtool.streaming.weights import is_view
from qtool.workspaces.staging import clear_beside

_READ_AT_ONCE = 1 << 22  # bytes


@dataclass(frozen=True)
class EngineRotations:
    """Sizes of what an engine rotates: inputs of linear modules, heads of attention modules."""

    inputs: Mapping[str, int]
    heads: Mapping[str, int]


class Sink:
    """Writes an artifact's tensors; safe to call from several threads for different tensors."""

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, folder: Path, zeros: Zeros | None = None
    ) -> None:
        """zeros: what is shown the source's bytes."""
        self.plan = plan
        self.zeros = zeros
        self.checkpoint = checkpoint
        self.folder = folder
        clear_beside(folder, {file.name for file in plan.layout.files})
        self.writer = StreamWriter(folder, plan.layout)
        self._format = FORMATS[plan.format]
        self._options = format_options(plan.recipe)
        self.pack_seconds: list[float] = []  # and of writing what was packed, by whichever thread

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.abandon()  # closes what a failure left open; nothing after close()

    def quantized(
        self, planned: Planned, quant: GroupQuant, input_scale: float | None = None
    ) -> None:
        """Pack and write one matrix, and the scale of its input where the format stores one."""
        module = planned.name.removesuffix(".weight")
        self.plain(self.packed(planned, quant))
        if input_scale is not None:
            name = f"{module}.{self._options.input_scale}"
            self.writer.add(name, np.array([input_scale], np.float32))

    def packed(self, planned: Planned, quant: GroupQuant) -> dict[str, NDArray[Any]]:
        """What the format stores of a matrix, or of some of its rows, by name."""
        module = planned.name.removesuffix(".weight")
        began = time.monotonic()
        found: dict[str, NDArray[Any]] = self._format.pack(module, quant, self._options)
        self.pack_seconds.append(time.monotonic() - began)
        return found

    def dense(self, planned: Planned, values: NDArray[np.float32] | None = None) -> None:
        """Write a tensor in its own dtype, F64 as F32: as the source has it, or new values."""
        if values is None:
            self.writer.add_parts(planned.name, self._parts(planned))
        else:
            dtype = written_dtype(planned.dtype)
            self.writer.add(planned.name, from_float32(values, dtype, planned.name))

    def _parts(self, planned: Planned) -> Iterator[NDArray[np.uint8]]:
        """The source's bytes of a tensor, each number looked at.

        Of a view all together: threads that take turns at parts would have it read anew for each,
        or rotated. But for what is outside of blocks, which is as long as a vocabulary.
        """
        name, size = planned.name, self.checkpoint.tensors[planned.name].nbytes
        width = size // max(1, math.prod(planned.shape))
        viewed = is_view(self.checkpoint)
        whole = size <= _READ_AT_ONCE or (viewed and planned.block is not None)
        step = max(1, size) if whole else _READ_AT_ONCE
        if viewed and not whole:  # it makes whole rows
            row = size // planned.shape[0]
            step = max(1, step // row) * row
        for start in range(0, size, step):
            stop = min(size, start + step)
            raw = self.checkpoint.raw(name) if whole else self.checkpoint.stretch(name, start, stop)
            if planned.dtype in FLOAT_DTYPES:
                values = to_float32(raw, planned.dtype, (raw.size // width,))
                check_values(values, start // width, planned, self.checkpoint)
                if written_dtype(planned.dtype) != planned.dtype:
                    raw = from_float32(values, written_dtype(planned.dtype), name)
            yield raw

    def plain(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Write planned tensors as they are: packed, or such as no tensor of the source becomes."""
        began = time.monotonic()
        for name, array in tensors.items():
            self.writer.add(name, array)
        self.pack_seconds.append(time.monotonic() - began)

    def checksums(self, block: int | None) -> dict[str, int]:
        """The CRC-32 of every tensor written for a block, or for what is outside of blocks."""
        planned = self.plan.by_block.get(block, ())
        names = (spec.name for tensor in planned for spec in tensor.outputs)
        return {name: self.writer.checksums[name] for name in names}

    def restore(self, block: int | None, checksums: Any) -> bool:
        """Take over a block that an earlier run wrote, if the files have all of it."""
        planned = self.plan.by_block.get(block, ())
        names = {spec.name for tensor in planned for spec in tensor.outputs}
        if not isinstance(checksums, dict) or checksums.keys() != names:
            return False
        return self.writer.restore(checksums)

    def forget(self, block: int | None) -> None:
        """Take back restore(): the block is going to be written again."""
        for name in self.checksums(block):
            del self.writer.checksums[name]

    def close(
        self, provenance: dict[str, Any], card: str, rotated: EngineRotations | None = None
    ) -> None:
        """Finish the tensor files and write everything beside them.

        rotated: what engines have to rotate.
        """
        self.writer.close()
        config = without_float64(plain_config(self.checkpoint.config))
        if heads.says_tied(config) and heads.has_own({t.name: t.action for t in self.plan.tensors}):
            config = untied(config)
        facts = artifact_facts(self.plan)
        if facts is not None:
            if rotated is not None:
                facts = replace(facts, rotated_inputs=rotated.inputs, rotated_heads=rotated.heads)
            config |= in_config(self._format, facts, self._options)
            for name, content in self._format.side_files(facts, self._options).items():
                _write_json(self.folder / name, content)
        if config:
            _write_json(self.folder / "config.json", config)
        for relative in self.checkpoint.side_files:
            target = self.folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((self.checkpoint.folder / relative).read_bytes())
        _write_json(self.folder / FILE_NAME, provenance)
        (self.folder / "README.md").write_text(card, encoding="utf-8")


def artifact_facts(plan: Plan) -> Facts | None:
    """What the format's config tells; None where nothing is quantized."""
    quantized = {
        t.name.removesuffix(".weight"): t.action
        for t in plan.tensors
        if isinstance(t.action, Scheme)
    }
    recipe = plan.recipe
    if not quantized and recipe.kv_cache is None:
        return None
    options = recipe.gptq
    return Facts(
        quantized=quantized,
        dense=_dense_linears(plan.tensors),
        version=__version__,
        static_groups=options.static_groups,
        damp_percent=options.damp_percent if recipe.rounding == "gptq" else None,
        act_order=recipe.reorders_groups,
        mse=recipe.rounding == "gptq" and options.mse,
        activations=None if recipe.activations is None else recipe.activations.model_dump(),
        outlier_threshold=recipe.llm_int8.threshold,
        kv_cache=None if recipe.kv_cache is None else recipe.kv_cache.model_dump(),
    )


_EMBEDS_PATCHES = re.compile(
    r"patch_embed[a-z]*\.weight$"
)  # of images: no table, but a linear layer


def _dense_linears(tensors: Sequence[Planned]) -> tuple[str, ...]:
    """Matrices that engines would take for linear layers, and that are not quantized.

    Experts fused in 3-D tensors go by the name of their layer, `...experts`, as engines ask for it.
    """
    matrices = [
        t.name.removesuffix(".weight")
        for t in tensors
        if isinstance(t.action, Dense)
        and t.name.endswith(".weight")
        and len(t.shape) == 2
        and (not t.action.reason.startswith("embedding") or _EMBEDS_PATCHES.search(t.name))
    ]
    stacks = (fused_layer(t.name) for t in tensors if t.fused)
    return (*matrices, *dict.fromkeys(stacks))


def check_values(
    values: NDArray[np.float32], start: int, planned: Planned, checkpoint: Checkpoint
) -> None:
    """SourceError naming the first NaN or infinity of values [n], which stand in the tensor from
    position `start` on."""
    finite = np.isfinite(values)
    if not finite.all():
        first = int(np.argmin(finite))
        index = [int(i) for i in np.unravel_index(start + first, planned.shape)]
        raise not_finite(checkpoint, planned.name, index, float(values[first]))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
