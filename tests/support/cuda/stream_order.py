"""Whether accesses of threads and streams are ordered, whatever the speed of either.

Each thread and each stream has a vector clock: how much of every other one has certainly happened
before what it does next. Threads order each other by starting, joining, and by locks (and so by all
of the standard library that is made of locks); a thread is before what it gives to a stream; events
and waits order streams. Of two accesses of the same memory, one of which writes, one must be before
the other, on the device, and in the threads that asked for them. Memory that is freed goes to what
its own stream does next, so that whatever other streams do with it must be before that.

A programmatic launch begins before what is before it on its stream has ended. What it reads early
has to be before the last access of the stream that was no such launch, or before the thread that
asks for it.
"""

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from support.places import ROOT

Clock = dict[object, int]
_lock = threading.Lock  # as it is where nothing is watched
_EMULATED = ("emulated_cuda.py", "emulated_tensors.py")
_HERE = {__file__, *(str(Path(__file__).with_name(name)) for name in _EMULATED)}


def join(clock: Clock, other: Clock) -> None:
    """All that is before `other` is before `clock`, too."""
    for actor, steps in other.items():
        if clock.get(actor, 0) < steps:
            clock[actor] = steps


@dataclass(frozen=True)
class Actor:
    """A thread, or a stream."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


@dataclass(frozen=True)
class Access:
    """One that has been asked for."""

    what: str
    actor: Actor
    step: int  # of the actor
    thread: Actor  # that asked
    asked: int  # the thread's step

    def __str__(self) -> str:
        return f"{self.what} ({self.actor}, asked by {self.thread})"


class Memory:
    """Some bytes: of a device, given out to a stream, or pinned (stream None)."""

    def __init__(self, order: "Order", name: str, stream: Actor | None) -> None:
        self.order, self.name, self.stream = order, name, stream
        self.written: Access | None = None
        self.read: dict[tuple[Actor, Actor], Access] = {}
        self.recorded: set[Actor] = set()  # streams that the allocator was told of

    def __del__(self) -> None:
        self.order.freed(self)


class Order:
    """The clocks of all, and what was found to be wrong."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.clocks: dict[Actor, Clock] = {}
        self.ended: dict[Actor, Clock] = {}  # of a stream, before a programmatic launch begins
        self._numbers = count()
        self._local = threading.local()
        self._lock = threading.RLock()  # memory is freed at any time, while it is held too

    def actor(self, name: str) -> Actor:
        """A new one."""
        made = Actor(name, next(self._numbers))
        self.clocks[made], self.ended[made] = {}, {}
        return made

    def thread(self) -> Actor:
        """The one that calls."""
        if not hasattr(self._local, "actor"):
            self._local.actor = self.actor("thread")
        found: Actor = self._local.actor
        return found

    def now(self, actor: Actor | None = None) -> Clock:
        """A copy of the clock of a stream as the calling thread sees it, or of the thread."""
        with self._lock:
            clock = dict(self.clocks[self.thread()])
            join(clock, self.clocks[actor] if actor is not None else {})
            return clock

    def after(self, clock: Clock, actor: Actor | None = None) -> None:
        """What a stream, or the calling thread, does next is after all that."""
        with self._lock:
            for clocks in (self.clocks, self.ended):
                join(clocks[actor or self.thread()], clock)

    def access(
        self,
        what: str,
        stream: Actor | None,
        reads: list[Memory],
        writes: list[Memory],
        waits: bool = False,
        early: list[Memory] | None = None,
    ) -> None:
        """By a stream, or by the calling thread itself; waits: the thread, for the stream. early:
        what a programmatic launch reads before it has waited for its stream; none of what is no
        launch."""
        with self._lock:
            thread, what = self.thread(), f"{what} at {_where()}"
            own, actor = self.clocks[thread], stream or thread
            own[thread] = own.get(thread, 0) + 1
            clock = self.clocks[actor]
            join(clock, own)
            if early is None:
                self.ended[actor] = dict(clock)
            join(self.ended[actor], own)
            if stream is not None:
                clock[stream] = clock.get(stream, 0) + 1
            made = Access(what, actor, clock[actor], thread, own[thread])
            begun = replace(made, what=f"{what}, which does not wait there,")
            for memory in early or ():
                self._check(memory, begun, self.ended[actor], [memory.written])
            for memory in reads:
                self._check(memory, made, clock, [memory.written])
                memory.read[actor, thread] = made
            for memory in writes:
                self._check(memory, made, clock, [memory.written, *memory.read.values()])
                memory.written, memory.read = made, {}
            if waits:
                join(own, clock)

    def _check(
        self, memory: Memory, made: Access, clock: Clock, before: list[Access | None]
    ) -> None:
        for one in before:
            if one is None:
                continue
            done = clock.get(one.actor, 0) >= one.step
            if not done or self.clocks[made.thread].get(one.thread, 0) < one.asked:
                how = "nothing orders" if not done else "nothing orders the threads of"
                self.faults.append(f"{memory.name}: {how} {one} and {made}")

    def freed(self, memory: Memory) -> None:
        """No more of it is known to the program; its stream may be given it again."""
        if memory.stream is None:
            return  # pinned memory is not given out before copies from and to it have ended
        with self._lock:
            clock = self.now(memory.stream)
            for one in (memory.written, *memory.read.values()):
                if one is None or one.actor in (memory.stream, *memory.recorded):
                    continue
                if clock.get(one.actor, 0) < one.step:
                    self.faults.append(
                        f"{memory.name} is freed to {memory.stream} at {_where()} while {one} may "
                        "still use it"
                    )


def _where() -> str:
    """The lines of the program that called, the innermost first."""
    found: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(found) < 4:
        name = frame.f_code.co_filename
        if name not in _HERE and name.startswith(str(ROOT)):
            found.append(f"{Path(name).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


class _Lock:
    """A lock that says who was before whom; what threading makes of locks is made of these."""

    order: Order

    def __init__(self) -> None:
        self._held, self._clock = _lock(), Clock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._held.acquire(blocking, timeout)
        if got:
            self.order.after(self._clock)
        return got

    def release(self) -> None:
        join(self._clock, self.order.now())
        self._held.release()

    def locked(self) -> bool:
        return self._held.locked()

    def _at_fork_reinit(self) -> None:
        self._held, self._clock = _lock(), Clock()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def watched(patch: Any, order: Order, within: Any) -> Iterator[None]:
    """Threads that are started are watched, and run inside of `within()`."""
    start, run, wait = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def started(thread: Any) -> None:
        thread._before = order.now()
        start(thread)

    def running(thread: Any) -> None:
        order.after(thread._before)
        try:
            with within():
                run(thread)
        finally:
            thread._ended = order.now()

    def joined(thread: Any, timeout: float | None = None) -> None:
        wait(thread, timeout)
        if not thread.is_alive() and hasattr(thread, "_ended"):
            order.after(thread._ended)

    kind = type("_Lock", (_Lock,), {"order": order})
    with patch.context() as patches:
        for name in ("Lock", "_allocate_lock"):
            patches.setattr(threading, name, kind)
        patches.setattr(threading, "RLock", threading._PyRLock)  # type: ignore[attr-defined]
        patches.setattr(queue, "SimpleQueue", queue._PySimpleQueue)  # type: ignore[attr-defined]
        patches.setattr(threading.Thread, "start", started)
        patches.setattr(threading.Thread, "run", running)
        patches.setattr(threading.Thread, "join", joined)
        yield
