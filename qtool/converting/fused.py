"""Experts that an artifact has one by one, in one tensor, as checkpoints of its class have them.

A class that takes experts apart, or that transformers does not know, gets them as they are. A fused
tensor is never in memory: it is written expert by expert.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.fused_names import FusedTensor, fused_tensors, layer_of
from qtool.converting.certificate import Squares
from qtool.converting.model import Model, Tensor
from qtool.converting.plain import plain
from qtool.errors import FormatError, QtoolError
from qtool.formats.safetensors_file import FLOAT_DTYPES, as_array, from_float32, to_float32


def fused_of(model: Model) -> tuple[list[FusedTensor], str | None]:
    """The tensors that checkpoints of config.json's class have instead of an expert's matrices; and
    what stands against asking for them, a sentence.

    torch and transformers are imported only where there are such matrices.
    """
    names = [tensor.name for tensor in model.tensors if layer_of(tensor.name) is not None]
    if not names or model.checkpoint is None:
        return [], None
    from qtool.streaming.meta_model import meta_model
    from qtool.streaming.towers import part_with_text

    try:
        built = meta_model(model.checkpoint)
    except QtoolError as error:
        return [], (
            "experts are written one by one, since nothing tells whether the model's class has "
            f"them in one tensor: {error}"
        )
    return fused_tensors(built, names, part_with_text(model.config)), None


def teller() -> str:
    """What told which tensors a class has: transformers, and its version."""
    from transformers import __version__

    return f"transformers {__version__}"


def stacked(model: Model, fused: Sequence[FusedTensor]) -> tuple[Tensor, ...]:
    """The model's tensors with fused ones in the places of the first of their parts.

    FormatError where a part is missing, or has another shape than config.json says.
    """
    tensors = {tensor.name: tensor for tensor in model.tensors}
    place = {name: number for number, name in enumerate(tensors)}
    first: dict[str, Tensor] = {}
    taken: set[str] = set()
    for one in fused:
        names = [name for expert in one.parts for name in expert]
        if not any(name in tensors for name in names) and one.name in tensors:
            continue  # the other tensor of its layer alone is apart
        for name in names:
            _check(model, one, name, tensors.get(name))
        parts = tuple(tuple(tensors[name] for name in expert) for expert in one.parts)
        stored = sorted({tensors[name].stored for name in names})
        whole = Tensor(
            one.name, one.shape, parts[0][0].dtype, " and ".join(stored), parts=parts,
            transposed=one.transposed,
        )  # fmt: skip
        first[min(names, key=place.__getitem__)] = whole
        taken.update(names)
    layers = {layer_of(name) for name in taken}
    for name in tensors:
        if name not in taken and (layer := layer_of(name)) is not None and layer in layers:
            raise FormatError(
                f"{model.path}: has {name!r}, an expert more than its config.json says that the "
                "layer has; config and weights are of different models: fetch both again"
            )
    found = [first.get(name, tensor) for name, tensor in tensors.items()]
    return tuple(tensor for tensor in found if tensor.name not in taken)


def _check(model: Model, fused: FusedTensor, name: str, part: Tensor | None) -> None:
    if part is None:
        raise FormatError(
            f"{model.path}: has no {name!r}, one of the {len(fused.parts)} experts that "
            f"config.json says {fused.name!r} has; it is incomplete: fetch it again"
        )
    if part.shape != fused.matrix:
        raise FormatError(
            f"{model.path}: {name!r} has the shape {list(part.shape)}, but with its config.json "
            f"{fused.name!r} has experts of {list(fused.matrix)}; config and weights are of "
            "different models: fetch both again"
        )


def pieces(tensor: Tensor, dtype: str, sums: Squares) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a fused tensor in a dtype, in order, an expert or less at a time; `sums` gets
    what that loses. FormatError for what is no number."""
    for expert in tensor.parts:
        if not tensor.transposed:
            for part in expert:
                yield _bytes(part, dtype, sums)
            continue
        transposed = [as_array(_bytes(part, dtype, sums), dtype, part.shape).T for part in expert]
        yield np.concatenate(transposed, axis=1).reshape(-1).view(np.uint8)


def _bytes(part: Tensor, dtype: str, sums: Squares) -> NDArray[np.uint8]:
    """One matrix, quantized or not."""
    if part.read is not None:
        return plain(part, part.read(), dtype, sums)
    assert part.raw is not None
    raw = part.raw()
    if dtype not in FLOAT_DTYPES:  # and so is its own
        return raw
    values = to_float32(raw, part.dtype, part.shape)
    if part.dtype != dtype:
        raw = from_float32(values, dtype, part.name)
    sums.add(values, to_float32(raw, dtype, part.shape))
    return raw
