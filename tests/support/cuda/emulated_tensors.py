"""Tensors and arrays of the emulated device, or of pinned memory: see emulated_cuda.py.

A numpy view that is taken of pinned memory counts as written to where it is taken.
"""

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from support.cuda import emulated_autograd
from support.cuda.stream_order import Memory

if TYPE_CHECKING:
    from support.cuda.emulated_cuda import Cuda

CPU = torch.device("cpu")


class Held(Memory):
    """Memory of a stream's device, or pinned, and where its numbers are."""

    def __init__(self, cuda: "Cuda", what: str, stream: Any, inner: torch.Tensor) -> None:
        kind = "pinned memory" if stream is None else f"memory of {stream.actor}"
        name = f"{kind}, {list(inner.shape)} {inner.dtype} made by {what}"
        super().__init__(cuda.order, name, None if stream is None else stream.actor)
        self.device = CPU if stream is None else stream.device
        self.storage, self._all = inner.untyped_storage(), cuda.held
        self.at, self.end = inner.data_ptr(), inner.data_ptr() + self.storage.nbytes()
        if stream is not None:
            self._all[self.at] = weakref.ref(self)

    def __del__(self) -> None:
        super().__del__()
        self._all.pop(self.at, None)


class Tensor(torch.Tensor):
    """A tensor of the device, or of pinned memory."""

    cuda: "Cuda"
    inner: torch.Tensor
    memory: Held
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, cuda: "Cuda", inner: torch.Tensor, memory: Held) -> "Tensor":
        made: Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=memory.device,
        )  # fmt: skip
        made.cuda, made.inner, made.memory = cuda, inner, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tensors_of((args, kwargs))[0].cuda.run(func, args, kwargs or {})

    @property
    def there(self) -> bool:
        """On the device."""
        return self.memory.stream is not None

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def register_hook(self, hook: Any) -> None:  # type: ignore[override]
        self.cuda.hooks.setdefault(emulated_autograd.edge_of(self), []).append(hook)

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(stream.actor)

    def numpy(self, *, force: bool = False) -> Any:
        if self.there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        found = self.inner.numpy().view(Pinned)
        found.memory = self.memory
        return found


def tensors_of(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


class Pinned(np.ndarray):
    """An array in pinned memory."""

    memory: Held | None = None

    def __array_finalize__(self, whole: Any) -> None:
        self.memory = getattr(whole, "memory", None)

    def __getitem__(self, key: Any) -> Any:
        self._used()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._used()
        super().__setitem__(key, value)

    def _used(self) -> None:
        if self.memory is not None:
            self.memory.order.access("an array", None, [], [self.memory])
