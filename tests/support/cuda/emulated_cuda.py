"""torch.cuda without a GPU: tensors of a device "cuda" whose numbers lie in the host's memory.

Every operation of torch and every launch is done at once, and noted in an Order: which memory it
reads and writes, on the stream that is current for the thread. A copy between pinned memory and the
device that does not wait is the stream's; others wait for it. What mixes numbers of the device with
those of the host fails as on a GPU, and so does a launch with an address that is nowhere there. The
program is the one that runs on a GPU: functions of torch.cuda, and cuda-core, are replaced.
"""

import ctypes
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from qtool.cuda import compiling, running
from qtool.cuda.tasks import FIELDS, Task
from support.cuda import emulated_autograd
from support.cuda.cuda_emulation import Emulator
from support.cuda.emulated_tensors import CPU, Held, Tensor, tensors_of
from support.cuda.stream_order import Clock, Memory, Order, watched

_grad = torch.autograd.grad
_SIZES = {"codes": 1, "f16": 2, "bf16": 2, "sum": 2, "squares": 8}  # by the end of a kernel's name
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")  # by numbers of the host, too
_ARRAYS = [name for name in FIELDS if f"{name}_bytes" in FIELDS]


class Event:
    """torch.cuda.Event."""

    cuda: "Cuda"

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self.clock = self.cuda.order.now((stream or self.cuda.stream_of()).actor)

    def synchronize(self) -> None:
        self.cuda.order.after(self.clock)


class Stream:
    """torch.cuda.Stream."""

    cuda: "Cuda"

    def __init__(self, device: Any = None) -> None:
        self.device = self.cuda.device_of(device)
        self.actor = self.cuda.order.actor("stream")
        self.cuda_stream = self.actor.number
        self.cuda.streams[self.cuda_stream] = self

    def record_event(self) -> Event:
        event: Event = self.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.cuda.order.after(event.clock, self.actor)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Cuda:
    """Two devices; what is current is so for a thread."""

    def __init__(self, emulator: Emulator | None = None) -> None:
        self.order, self._emulator = Order(), emulator
        self.held: dict[int, weakref.ref[Held]] = {}  # the devices' memory, by its address
        self.launched: list[str] = []
        self.programmatic = 0  # of them
        self.devices: set[int] = set()  # on which kernels were launched
        self.streams: dict[int, Stream] = {}
        self.hooks: emulated_autograd.Hooks = {}
        self.ways_back = 0
        self._local, self._one = threading.local(), threading.Lock()
        self.Event: Any = type("Event", (Event,), {"cuda": self})
        self.Stream: Any = type("Stream", (Stream,), {"cuda": self})
        self._default = [self.Stream(torch.device("cuda", index)) for index in range(2)]

    def index(self) -> int:
        return int(getattr(self._local, "index", 0))

    def set_device(self, device: Any) -> None:
        self._local.index = self.device_of(device).index

    def device_of(self, device: Any = None) -> torch.device:
        if isinstance(device, int):
            return torch.device("cuda", device)
        found = torch.device(device or "cuda")
        return found if found.index is not None else torch.device("cuda", self.index())

    def default(self, device: Any = None) -> Any:
        return self._default[self.device_of(device).index]

    def stream_of(self, device: Any = None) -> Any:
        """The current one."""
        index = self.device_of(device).index
        return vars(self._local).get(f"stream {index}", self._default[index])

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before = self.index()
        self.set_device(device)
        try:
            yield
        finally:
            self._local.index = before

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        key, before = f"stream {stream.device.index}", self.stream_of(stream.device)
        with self.on_device(stream.device):
            vars(self._local)[key] = stream
            try:
                yield
            finally:
                vars(self._local)[key] = before

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of torch's."""
        name, mine = func.overloadpacket.__name__, tensors_of((args, kwargs))
        asked = kwargs.get("device")
        to = self.device_of(asked) if asked is not None and asked.type == "cuda" else asked
        free = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
        pins = kwargs.get("pin_memory") or name == "_pin_memory"
        if pins and asked is not None and asked.type == "cuda":
            raise RuntimeError("Only dense CPU tensors can be pinned")  # torch's own words
        if name == "is_pinned":
            return bool(mine) and not mine[0].there
        if not mine and not pins and (to is None or to.type != "cuda"):
            return func(*args, **kwargs)
        place = self._place(name, args, kwargs)
        if name == "_to_copy" and to == CPU and place != CPU:
            pins = free  # as torch does
        to = to or place
        given = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        given |= {"device": CPU} if asked is not None else {}
        inner = tree_map(lambda t: t.inner if isinstance(t, Tensor) else t, (args, given))
        out = inner[0][0].clone() if name == "_pin_memory" else func(*inner[0], **inner[1])
        stream = next((self.stream_of(one) for one in (place, to) if one != CPU), None)
        made: list[Held] = []

        def wrapped(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            for it in mine:
                if one is it.inner:
                    assert one.shape == it.shape, f"{name} changes the shape of a tensor"
                    return it
                if one.untyped_storage()._cdata == it.memory.storage._cdata:
                    return Tensor(self, one, it.memory)
            if to == CPU and not pins:
                return one
            made.append(Held(self, name, None if to == CPU else stream, one))
            return Tensor(self, one, made[-1])

        found = tree_map(wrapped, out)
        reads, writes = _accessed(func, args, kwargs)
        if reads or writes or made:
            if name == "copy_":
                here = [t for t in args[:2] if not (isinstance(t, Tensor) and t.there)]
                crosses, back = place != CPU and bool(here), here and here[0] is args[0]
                pins = any(isinstance(t, Tensor) for t in here)
            else:
                crosses, back = to != place and name == "_to_copy", to == CPU
            waits = crosses and not (free and (pins or not back))
            waits = waits or not isinstance(out, torch.Tensor | tuple | list)
            early = [] if "empty" in name else None  # memory alone: no launch that others wait for
            self.order.access(name, stream and stream.actor, reads, writes + made, waits, early)
        return found

    def _place(self, name: str, args: Any, kwargs: Any) -> torch.device:
        """Where an operation is done; RuntimeError where its numbers are in two places."""
        there = [one.memory.device for one in tensors_of((args, kwargs)) if one.there]
        looked_at = tree_leaves((args, kwargs)) if name not in _INDEXED else [args[0], *args[2:3]]
        numbers = [one for one in looked_at if isinstance(one, torch.Tensor)]
        places = {one.device for one in numbers if one.ndim or one.device != CPU}
        if there and len(places) > 1 and name != "copy_":
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device: {places}")
        return there[0] if there else CPU

    def grad(self, outputs: Any, inputs: Any, grad_outputs: Any = None, **how: Any) -> Any:
        """torch.autograd.grad"""
        if not tensors_of((outputs, inputs)):
            return _grad(outputs, inputs, grad_outputs, **how)
        self.ways_back += 1
        return emulated_autograd.grad(outputs, inputs, grad_outputs, self.hooks, **how)

    def memory_at(self, address: int, nbytes: int) -> Held | None:
        """The device's memory in which an array lies."""
        starts = sorted(self.held)
        place = bisect_right(starts, address) - 1
        found = self.held[starts[place]]() if place >= 0 else None
        return found if found is not None and address + nbytes <= found.end else None

    def launch(
        self, on: Stream, config: Any, kernel: str, *arguments: Any, programmatic: bool = False
    ) -> None:
        """cuda.core.launch, and what running.py does itself for programmatic ones"""
        assert getattr(self._local, "context", None) == on.device.index, f"{kernel}: no context"
        fields = dict(zip(FIELDS, (one.value for one in arguments[1:]), strict=True))
        reads, writes, at = [], [], {}
        for name in (name for name in _ARRAYS if fields[f"{name}_bytes"]):
            memory = self.memory_at(fields[name], fields[f"{name}_bytes"])
            assert memory is not None and memory.device == on.device, f"{kernel}: where is {name}?"
            (writes if name in ("values", "sums", "done") else reads).append(memory)
            at[fields[name]] = memory
        self.launched.append(kernel)
        self.devices.add(on.device.index)
        size = _SIZES.get(kernel.rsplit("_", 1)[-1], 1 if kernel.startswith("encode") else 4)
        if kernel.startswith("gemv") and (fields["splits"] == 1 or fields.get("done")):
            size = 2  # no partial sums
        assert self._emulator is not None
        with self._one:
            task = Task(kernel, config.grid, fields, config.block, programmatic)
            fault = self._emulator.fault(task, fields["values_bytes"] // size)
            early = [at[one] for one in self._emulator.early()] if programmatic else None
        assert fault is None, fault
        self.order.access(kernel, on.actor, reads, writes, early=early)
        self.programmatic += programmatic

    def launch_programmatic(self, on: int, task: Task, kernel: str, arguments: list[Any]) -> None:
        config = SimpleNamespace(grid=task.blocks, block=task.threads)
        self.launch(self.streams[on], config, kernel, *arguments, programmatic=True)

    def core(self) -> Any:
        """The module cuda.core."""

        def device(index: int) -> Any:
            return SimpleNamespace(set_current=lambda: setattr(self._local, "context", index))

        found = SimpleNamespace(Device=device, LaunchConfig=SimpleNamespace, launch=self.launch)
        found.Stream = SimpleNamespace(from_handle=self.streams.__getitem__)
        return found


def _accessed(func: Any, args: Any, kwargs: Any) -> tuple[list[Memory], list[Memory]]:
    """What an operation reads, and what it writes."""
    reads: list[Memory] = []
    writes: list[Memory] = []
    for number, one in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(one.name)
        into = writes if one.alias_info is not None and one.alias_info.is_write else reads
        into += [tensor.memory for tensor in tensors_of(value)]
    return ([], []) if func.is_view else (reads, writes)


@contextmanager
def _guarded() -> Iterator[None]:
    """Within, what torch does in C++ to make a device current does nothing, as on the CPU; a build
    without CUDA would refuse."""
    folder = Path(torch.__file__).parent / "lib"
    library = next(folder.glob("libc10.*"))
    kinds = ctypes.c_void_p * 2  # CPU, CUDA
    registry = kinds.in_dll(ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE")
    before, registry[1] = registry[1], registry[0]
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor: made here, then copied there
    try:
        yield
    finally:
        registry[1] = before
        torch._C._set_only_lift_cpu_tensors(lifts)


@contextmanager
def emulated(patch: Any, emulator: Emulator | None = None) -> Iterator[Cuda]:
    """Within, torch has two GPUs, in this thread and in those that are started."""
    cuda = Cuda(emulator)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cuda.run(func, args, kwargs or {})

    found = SimpleNamespace(name="Emulated", major=9, minor=0, multi_processor_count=132)
    replaced = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "Stream": cuda.Stream,
        "Event": cuda.Event, "current_stream": cuda.stream_of, "stream": cuda.on_stream,
        "default_stream": cuda.default,
        "device": cuda.on_device, "current_device": cuda.index, "set_device": cuda.set_device,
        "get_device_properties": lambda _: found, "mem_get_info": lambda _: (1 << 31, 1 << 31),
        "get_device_capability": lambda _: (9, 0),
    }  # fmt: skip
    # In the same way with every build of PyTorch: others ask for the GPU's properties.
    plain = sdpa_kernel(SDPBackend.MATH)
    with patch.context() as patches, _guarded(), plain, watched(patches, cuda.order, Mode):
        for name, one in replaced.items():
            patches.setattr(torch.cuda, name, one)
        patches.setattr(torch.autograd, "grad", cuda.grad)
        patches.setattr(compiling, "core", cuda.core)
        patches.setattr(running, "_check_gpu", lambda _: None)
        patches.setattr(running, "_kernel", lambda name, _: name)
        patches.setattr(running, "overlaps", lambda _: True)
        patches.setattr(running, "_launch_programmatic", cuda.launch_programmatic)
        with Mode():
            yield cuda
