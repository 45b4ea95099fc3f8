"""Writing a model as a safetensors checkpoint: packed in another format, or dequantized.

The folder's layout follows from the steps alone. Every tensor is read back from the staged folder,
dequantized and compared with the source before the folder gets its name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qtool import __version__
from qtool.artifacts.artifact import Artifact
from qtool.converting import resume
from qtool.converting.certificate import Rounded, Squares
from qtool.converting.codes import fitted, relative_error
from qtool.converting.fused import pieces
from qtool.converting.model import DTYPE_NAMES, Model
from qtool.converting.pieces import same
from qtool.converting.plain import plain
from qtool.converting.plan import Plan, Step
from qtool.errors import FormatError, UnsupportedError
from qtool.formats import FORMATS, Facts
from qtool.formats.facts import in_config
from qtool.formats.safetensors_file import (
    Layout,
    StreamWriter,
    TensorSpec,
    checksum,
    from_float32,
    plan_shards,
    to_float32,
)
from qtool.messages.progress import Progress
from qtool.planning.mlx import stacks
from qtool.workspaces.journal import Journal


@dataclass
class Written:
    """Tensors in a staged folder."""

    folder: Path
    size_bytes: int
    checksums: dict[str, int]
    rounded: list[Rounded] = field(default_factory=list)


def layout_of(model: Model, plan: Plan, max_shard_bytes: int) -> Layout:
    """Where all tensors go."""
    specs = [spec for step in plan.steps for spec in _specs(step, plan)]
    return plan_shards(specs, max_shard_bytes, stack_of=stacks(plan.format, model.config))


def write(
    model: Model,
    plan: Plan,
    layout: Layout,
    folder: Path,
    journal: Journal | None,
    progress: Progress,
) -> Written:
    """Tensors, config.json, and the source's tokenizer. journal: of what is written already."""
    config = _config(model, plan, folder)  # before the work: a format may refuse it
    steps = [(s.tensor.name, {spec.name for spec in _specs(s, plan)}) for s in plan.steps]
    with StreamWriter(folder, layout) as writer:
        lost = resume.finished(journal, writer, steps)
        resume.say(progress, len(lost), len(steps))
        for number in progress.blocks(len(steps), "tensor", first=len(lost)):
            lost.append(_add(plan.steps[number], plan, writer))
            resume.commit(journal, writer, steps[number], lost[-1])
        writer.close()
    rounded = [one for one in lost if one is not None]
    write_json(folder / "config.json", config)
    for name, content in model.side_files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Written(folder, layout.size, writer.checksums, rounded)


def _specs(step: Step, plan: Plan) -> list[TensorSpec]:
    if step.scheme is None:
        return [TensorSpec(step.tensor.name, step.dtype, step.tensor.shape)]
    found: list[TensorSpec] = FORMATS[plan.format].specs(
        step.tensor.module, step.scheme, step.tensor.shape, plan.options
    )
    return found


def _add(step: Step, plan: Plan, writer: StreamWriter) -> Rounded | None:
    """What is lost of it, as far as it is known."""
    tensor = step.tensor
    if step.scheme is not None:
        assert tensor.read is not None
        quant = fitted(step, tensor.read())
        packed = FORMATS[plan.format].pack(tensor.module, quant, plan.options)
        for name, array in packed.items():
            writer.add(name, array)
        return None
    sums = Squares()
    if tensor.parts:
        writer.add_parts(tensor.name, pieces(tensor, step.dtype, sums))
        return _rounded(step, sums)
    if tensor.read is None:
        assert tensor.raw is not None
        raw = tensor.raw()
        if step.dtype != tensor.dtype:  # widened
            values = to_float32(raw, tensor.dtype, tensor.shape)
            raw = from_float32(values, step.dtype, tensor.name)
        writer.add(tensor.name, raw)
        return None
    value = tensor.read()
    raw = plain(tensor, value, step.dtype, sums)
    writer.add(tensor.name, raw)
    return _rounded(step, sums)


def _rounded(step: Step, sums: Squares) -> Rounded | None:
    """What plain numbers of a dtype have lost."""
    if sums.same:
        return None
    dtype = DTYPE_NAMES[step.dtype]
    what = f"it is rounded to {dtype}"
    why = f"is {step.tensor.stored}, whose products {dtype} does not hold"
    return Rounded(step.tensor.name, what, why, sums.relative_error)


def _config(model: Model, plan: Plan, folder: Path) -> dict[str, Any]:
    """config.json; the files of the format beside it are written."""
    config = dict(model.config)
    quantized = {s.tensor.module: s.scheme for s in plan.steps if s.scheme is not None}
    if not quantized:
        return config
    facts = Facts(
        quantized=quantized,
        dense=[name.removesuffix(".weight") for name in plan.dense],
        version=__version__,
        act_order=plan.act_order,
        **_rounding(model.provenance),
    )
    module = FORMATS[plan.format]
    config |= in_config(module, facts, plan.options)
    for name, content in module.side_files(facts, plan.options).items():
        write_json(folder / name, content)
    return config


def _rounding(provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    """How GPTQ found the codes, where the artifact's recipe says so: the config tells it again."""
    recipe = (provenance or {}).get("recipe")
    if not isinstance(recipe, dict) or "gptq" not in str(recipe.get("method")):
        return {}
    options = recipe.get("gptq")
    kinds = {"damp_percent": float, "static_groups": bool, "mse": bool}
    found = options if isinstance(options, dict) else {}
    return {key: found[key] for key, kind in kinds.items() if isinstance(found.get(key), kind)}


def compare(steps: Sequence[Step], written: Written, progress: Progress) -> list[Rounded]:
    """Read everything back; FormatError where a number is not what it should be.

    The tensors whose numbers are not the source's, each with what was lost.
    """
    artifact = Artifact.open(written.folder)
    names = {step.tensor.name for step in steps}
    for name in names ^ artifact.entries.keys():
        what = "is missing" if name in names else "was not planned"
        raise FormatError(f"{written.folder}: tensor {name!r} {what}; this is an error of qtool")
    rounded = {one.name: one for one in written.rounded}
    for number in progress.blocks(len(steps), "comparison"):
        step = steps[number]
        tensor = step.tensor
        for name in artifact.entries[tensor.name].stored:
            info = artifact.checkpoint.tensors[name]
            if checksum(artifact.checkpoint.file_of(name), info) != written.checksums[name]:
                raise FormatError(f"{name}: reads back differently; the disk or memory is faulty")
        if step.scheme is None:
            continue
        assert tensor.read is not None
        back = artifact.read(tensor.name)
        assert not isinstance(back, np.ndarray)  # its entry has a scheme, or the layout is wrong
        value = tensor.read()
        if same(value, back):
            continue
        if step.lossy is None:
            raise FormatError(
                f"{tensor.name}: dequantizes to other numbers than the source; this is an error "
                "of qtool"
            )
        if not same(fitted(step, value), back):
            raise FormatError(f"{tensor.name}: reads back as other numbers than were packed")
        error = relative_error(value, back)
        rounded[tensor.name] = Rounded(tensor.name, step.lossy, step.why, error)
    return [rounded[step.tensor.name] for step in steps if step.tensor.name in rounded]


def check_floats(model: Model) -> None:
    """UnsupportedError for dense tensors that are no plain numbers."""
    for tensor in model.tensors:
        if tensor.read is None and tensor.dtype.startswith(("F8", "F6", "F4")):
            raise UnsupportedError(
                f"{model.path}: {tensor.name} is {tensor.dtype} without scales, which no other "
                "format holds"
            )


def write_json(path: Path, content: Any) -> None:
    """An indented JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
