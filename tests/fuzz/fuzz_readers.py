"""Fuzzing what reads all but GGUF: only a QtoolError may come out, soon and in little memory.

    python tests/fuzz/fuzz_readers.py READER [--seconds 60] [--seed 0] [--atheris] [FILE ...]

Honest inputs, made by `readers`, are told lies (`lies`). An input fails when anything but a
QtoolError comes out, when a promise of the reader is broken, when it takes a second of processor
time, or when Python's objects take more than ten times the bytes of the files, and a constant.
With --atheris libFuzzer chooses the lies by what they reach in the reader (it has to be installed
for this Python). A failure does not end the run: what failed is kept in the working directory, once
for each place where it failed, and the exit status is 1. A FILE is only tried.
"""

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE.parents[1]))  # where no package is installed

SECONDS = 1.0  # of processor time
TIMES, BYTES = 10, 1 << 21  # of memory: so many times the files, and so many more
EVERY, TRACED = 8, 8  # memory is watched for one input in so many: it makes Python so slow
LONGEST = 60_000  # bytes of an input, where the reader says nothing else; of longer ones memory is
# watched always, because the constant hides what short ones take


class Watch:
    """Tries inputs and counts what came of them."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.tried: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        for data in reader.seeds():  # what is imported or kept by the first is not counted
            reader.attempt(data)

    def __call__(self, data: bytes) -> None:
        from qtool.errors import QtoolError
        from qtool.messages.printable import printable

        measured = len(data) > LONGEST or sum(self.tried.values()) % EVERY == EVERY - 1
        if measured:
            tracemalloc.start()
        start = time.process_time()
        outcome = "accepted"
        try:
            self.reader.attempt(data)
        except QtoolError as error:
            outcome = "refused"
            printable(str(error)).encode()  # main() cuts it to a length
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # anything, a panic of Rust too: to say where it was
            self._fail(_where(error), data, error)
        took = time.process_time() - start
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > TIMES * (len(data) + self.reader.beside) + BYTES:
                self._fail(f"memory: {peak} bytes", data)
        if took > SECONDS * (TRACED if measured else 1):
            self._fail(f"time: {took:.1f} s", data)
        self.tried[outcome] += 1

    def _fail(self, what: str, data: bytes, error: BaseException | None = None) -> None:
        kind = what.partition(":")[0] if error is None else what
        if kind in self.failed:
            return
        name = f"failed-{self.reader.name}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
        Path(name).write_bytes(data)
        self.failed[kind] = name
        print(f"FAILED {what} -> {name}", flush=True)
        if error is not None:
            traceback.print_exception(error, limit=-6)


def _where(error: BaseException) -> str:
    """The kind of an error and the last line of qtool that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/qtool/" in f.filename or "/formats/" in f.filename]
    at = (own or frames)[-1]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}"


def longest(reader: Any) -> int:
    """How many bytes of an input a reader gets."""
    return int(getattr(reader, "longest", LONGEST))


def own(watch: Watch, seconds: float, seed: int, most: int | None = None) -> None:
    """Lies by chance, each told of an honest input or of one that was accepted."""
    choose = random.Random(seed)
    honest = watch.reader.seeds()
    end = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < end and (most is None or tried < most):
        data = choose.choice(honest)
        for _ in range(choose.choice([1, 1, 2, 3])):
            data = watch.reader.lie(data, choose)
        watch(data[: longest(watch.reader)])
        tried += 1


def guided(make: Callable[[], Watch], seconds: float, seed: int, folder: Path) -> None:
    """libFuzzer's choice of lies; ends the process."""
    import atheris

    # What coverage is counted of has to be imported under its eyes.
    with atheris.instrument_imports(include=["qtool"]):
        watch = make()
    corpus = folder / "corpus"
    corpus.mkdir()
    choose = random.Random(seed)
    honest = watch.reader.seeds()
    for number, data in enumerate(honest):
        (corpus / f"{number}").write_bytes(data)
        for lie in range(-(-200 // len(honest))):
            (corpus / f"{number}-{lie}").write_bytes(
                watch.reader.lie(data, choose)[: longest(watch.reader)]
            )
    began = time.monotonic()

    def lie(data: bytes, most: int, lie_seed: int) -> bytes:
        choice = random.Random(lie_seed)
        if choice.random() < 0.7:
            told: bytes = watch.reader.lie(bytes(data), choice)[:most]
            return told
        mutated: bytes = atheris.Mutate(data, most)
        return mutated

    def one(data: bytes) -> None:
        watch(data)
        if time.monotonic() - began > seconds:
            report(watch, began)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1 if watch.failed else 0)

    options = [f"-seed={seed + 1}", f"-max_len={longest(watch.reader)}", "-timeout=60",
               "-rss_limit_mb=6000", "-verbosity=0"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=lie)
    atheris.Fuzz()


def report(watch: Watch, began: float) -> None:
    """One line of figures."""
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(watch.tried.items()))
    failures = [f"{what} ({name})" for what, name in watch.failed.items()] or ["no failure"]
    print(
        f"{watch.reader.name}: {sum(watch.tried.values()):,} inputs in "
        f"{time.monotonic() - began:.0f} s: {counts}; {', '.join(failures)}",
        flush=True,
    )


def main() -> int:
    import readers

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reader", choices=sorted(readers.READERS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = folder / "place"
        place.mkdir()

        def make() -> Watch:
            return Watch(readers.READERS[options.reader](place))

        if options.atheris and not options.files:
            guided(make, options.seconds, options.seed, folder)
        watch = make()
        began = time.monotonic()
        for file in options.files:
            watch(file.read_bytes())
        if not options.files:
            own(watch, options.seconds, options.seed)
        report(watch, began)
    return 1 if watch.failed else 0


if __name__ == "__main__":
    sys.exit(main())
