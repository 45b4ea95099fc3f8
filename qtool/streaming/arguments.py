"""What blocks are called with beside states: kept once where it is the same, and where memory is
short on the disk where it is not.

Masks and rotary embeddings are the same for all blocks and micro-batches. Some models give each
block an input of its own for every position (Gemma's per-layer embeddings), which together are
wider than the hidden states.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qtool.streaming.layout import Stored, mapped
from qtool.streaming.stream import Call

_FILE = "arguments"
_LARGE = 1 << 16  # bytes of what goes to the disk


class Arguments:
    """Of all calls of one text."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where large ones go; without, they stay in memory."""
        self._seen: dict[tuple[torch.dtype, torch.Size, int], list[torch.Tensor]] = {}
        self._kept: dict[tuple[torch.dtype, torch.Size, int], list[Stored]] = {}
        self._path = None if folder is None else folder / _FILE
        self._size = 0
        if self._path is not None:
            self._path.write_bytes(b"")

    def kept(self, call: Call) -> Call:
        """The same call; the tensors of the given one are needed no more."""
        args = tuple(self._own(value) for value in call.args)
        kwargs = {name: self._own(value) for name, value in call.kwargs.items()}
        return replace(call, args=args, kwargs=kwargs)

    def _own(self, value: Any) -> Any:
        large = isinstance(value, torch.Tensor) and value.nbytes >= _LARGE
        if self._path is not None and large and value.is_floating_point():
            return self._stored(self._path, value.contiguous())
        return mapped(value, self._once)

    def _stored(self, path: Path, value: torch.Tensor) -> Stored:
        alike = self._kept.setdefault((value.dtype, value.shape, _crc(value)), [])
        for other in alike:  # a mask, say, which is the same for all
            if torch.equal(other.read(), value):
                return other
        with path.open("ab", buffering=0) as file:
            view = memoryview(value.view(-1).view(torch.uint8).numpy().data)
            while view:
                view = view[file.write(view) :]
        start, self._size = self._size, self._size + value.nbytes
        alike.append(Stored(path, start, value.shape, value.dtype))
        return alike[-1]

    def _once(self, value: Any) -> Any:
        """An equal tensor seen before in place of this one, if there is one."""
        if not isinstance(value, torch.Tensor):
            return value
        alike = self._seen.setdefault((value.dtype, value.shape, _crc(value)), [])
        for other in alike:
            if torch.equal(other, value):
                return other
        # Of a view, the rest of what it is a part of is not kept.
        own = value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        alike.append(own)
        return own


def tensors_in(value: Any) -> Iterator[Any]:
    """Tensors of a call, or of a part of one, in order, those among them that are Stored."""
    if isinstance(value, torch.Tensor | Stored):
        yield value
    elif isinstance(value, Call):
        yield from tensors_in((*value.args, *value.kwargs.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def with_tensors(call: Call, tensors: Iterator[torch.Tensor]) -> Call:
    """The same call with others in place of tensors_in() it."""

    def other(value: Any) -> Any:
        return next(tensors) if isinstance(value, torch.Tensor | Stored) else value

    args = mapped(call.args, other)
    return replace(call, args=args, kwargs=mapped(dict(call.kwargs), other))


def _crc(value: torch.Tensor) -> int:
    """Of its bytes; equal tensors have the same, but for zeros of either sign."""
    if value.device.type == "meta":
        return 0
    flat = value.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
