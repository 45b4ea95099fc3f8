"""Real file systems and real refusals: a full disk, a read-only folder, a source that goes.

    python tests/benchmarks/full_disk.py [--only NAME]... [--recipe w4g128-rtn]...

(as root, on Linux)

Small file systems are mounted (tmpfs, and ext4 in a file), and what the system does is done while
a run is stopped in its middle. Every case must end in one sentence and a status that is not zero,
with nothing under the final name and no traceback; when the cause is gone the same command must go
on and end with the bytes of an undisturbed run. Exit status 1 where one does not, and 2
where one was not checked, because this machine cannot make it: it is told as skipped.

    begin          too little room from the beginning: refused before work
    full           a file of somebody else's takes all room behind a step
    full-journal   the same with room for a few more bytes, which the journal meets first
    read-only      a file system that is mounted so, and a folder without the right to write
    unreadable     a source without the right to read
    deleted        the source's weights are removed behind a step
    changed        a byte of them is changed behind a step
    removed        the hidden folder is removed behind a step
    clock          the system's clock goes back an hour at each look, killed and resumed
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kill import deep, digest, journal_of, steps_of

MIB = 1 << 20
# Without these even root is asked for rights.
LIMITED = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
CLOCK = r"""
#define _GNU_SOURCE
#include <time.h>
#include <sys/time.h>
#include <sys/syscall.h>
#include <unistd.h>
static long looks;
static void back(long *seconds) { *seconds -= 3600 * __sync_add_and_fetch(&looks, 1); }
int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && clock == CLOCK_REALTIME) back(&at->tv_sec);
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class Skipped(Exception):
    """This machine cannot make the case."""


def system(*words: object) -> None:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"{words[0]}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(kind: str, work: Path, nbytes: int) -> Iterator[Path]:
    """A small file system."""
    folder = Path(tempfile.mkdtemp(dir=work))
    if kind == "tmpfs":
        system("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder)
    else:
        image = folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(nbytes)
        system("mkfs.ext4", "-q", "-m", "0", image)
        system("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        system("umount", folder)


class Benchmark:
    """Cases, one after another, and whether all were as they should be."""

    def __init__(self, recipe: str, model: Path, work: Path) -> None:
        self.recipe, self.model, self.work, self.good = recipe, model, work, True
        self.whole = digest(self._made(work / "whole"))

    def command(self, out: Path, model: Path | None = None) -> list[str]:
        words = [sys.executable, "-m", "qtool", "quantize", str(model or self.model), "--threads"]
        words += ["1", "--recipe", self.recipe, "-o", str(out)]
        calibrated = "gptq" in self.recipe or "awq" in self.recipe
        return words + (["--samples", "4", "--length", "128"] if calibrated else [])

    def _made(self, out: Path) -> Path:
        subprocess.run(self.command(out), check=True, capture_output=True)
        return out

    def run(
        self,
        out: Path,
        *,
        model: Path | None = None,
        prefix: list[str] | None = None,
        steps: int = 0,
        action: Callable[[], None] | None = None,
    ) -> tuple[int, str]:
        """Status and stderr; `action` is done while the run is stopped behind some steps."""
        words = [*(prefix or []), *self.command(out, model)]
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if action is not None:
            while process.poll() is None and steps_of(journal_of(out)) < steps:
                time.sleep(0.001)
            process.send_signal(signal.SIGSTOP)
            action()
            process.send_signal(signal.SIGCONT)
        _, said = process.communicate()
        return process.returncode, said

    def refused(self, name: str, out: Path, ended: tuple[int, str], wanted: str) -> None:
        """One sentence, a status, and nothing under the name."""
        status, said = ended
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        fine = status == 1 and len(lines) == 1 and wanted in lines[0] and "Traceback" not in said
        fine &= not out.exists()
        told = lines[0] if lines else said[-300:]
        self.tell(name, fine, told.replace(str(self.work), "..."))

    def goes_on(self, name: str, out: Path, model: Path | None = None, kept: bool = True) -> None:
        """The same command ends as if nothing had been."""
        status, said = self.run(out, model=model)
        resumed = "going on with an earlier run" in said
        fine = status == 0 and digest(out) == self.whole and resumed == kept
        self.tell(f"{name}, again", fine, "went on" if resumed else "from the start")
        if out.exists():
            shutil.rmtree(out) if out.is_dir() else out.unlink()

    def tell(self, name: str, fine: bool, said: str) -> None:
        self.good &= fine
        print(f"{self.recipe:12} {name:24} {'' if fine else 'FAILED '}{said}", flush=True)


def fill(folder: Path, leave: int) -> None:
    """Somebody's file that takes all but a few bytes."""
    free = shutil.disk_usage(folder).free
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        left = max(0, free - leave)
        while left > 0:
            left -= file.write(bytes(min(left, MIB)))


def begin(bench: Benchmark, kind: str) -> None:
    size = sum(path.stat().st_size for path in files_of(bench.work / "whole"))
    with mounted(kind, bench.work, max(4 * MIB, size // 2)) as folder:
        if shutil.disk_usage(folder).free > size:
            fill(folder, size // 2)
        bench.refused(f"begin {kind}", folder / "out", bench.run(folder / "out"), "its disk has ")
        left = [path.name for path in folder.iterdir() if path.name.startswith(".out")]
        bench.tell(f"begin {kind}, left", not left, str(left))


def files_of(out: Path) -> list[Path]:
    return [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]


def full(bench: Benchmark, kind: str) -> None:
    _full(bench, kind, "full", 0)


def full_journal(bench: Benchmark, kind: str) -> None:
    _full(bench, kind, "full-journal", 12_000)


def _full(bench: Benchmark, kind: str, name: str, leave: int) -> None:
    size = sum(path.stat().st_size for path in files_of(bench.work / "whole"))
    with mounted(kind, bench.work, 2 * size + 32 * MIB) as folder:
        out = folder / "out"
        ended = bench.run(out, steps=3, action=lambda: fill(folder, leave))
        bench.refused(f"{name} {kind}", out, ended, "the disk is full")
        bench.refused(f"{name} {kind}, still", out, bench.run(out), "the disk is full")
        (folder / "filler").unlink()
        bench.goes_on(f"{name} {kind}", out)


def read_only(bench: Benchmark, kind: str) -> None:
    with mounted(kind, bench.work, 32 * MIB) as folder:
        system("mount", "-o", "remount,ro", folder)
        out = folder / "out"
        bench.refused(f"read-only {kind}", out, bench.run(out), "Read-only file system")
        system("mount", "-o", "remount,rw", folder)
        bench.goes_on(f"read-only {kind}", out, kept=False)
        (folder / "inside").mkdir(mode=0o555)
        out = folder / "inside" / "out"
        ended = bench.run(out, prefix=LIMITED)
        bench.refused(f"no right to write {kind}", out, ended, "Permission denied")


def unreadable(bench: Benchmark, _: str) -> None:
    model, out = copied(bench), bench.work / "out"
    weights = model / "model.safetensors"
    weights.chmod(0)
    ended = bench.run(out, model=model, prefix=LIMITED)
    bench.refused("unreadable", out, ended, "model.safetensors: cannot be read (Permission denied)")
    weights.chmod(0o644)
    bench.goes_on("unreadable", out, model, kept=False)


def copied(bench: Benchmark) -> Path:
    """The model by its own name, which is in a GGUF file."""
    to = Path(tempfile.mkdtemp(dir=bench.work)) / bench.model.name
    return shutil.copytree(bench.model, to)


def deleted(bench: Benchmark, _: str) -> None:
    model, out = copied(bench), bench.work / "out"
    weights = model / "model.safetensors"
    aside = model.parent / "aside"
    ended = bench.run(out, model=model, steps=3, action=lambda: os.rename(weights, aside))
    bench.refused("deleted", out, ended, "was there when the work began, and is gone")
    os.rename(aside, weights)
    bench.goes_on("deleted", out, model)


def changed(bench: Benchmark, _: str) -> None:
    model, out = copied(bench), bench.work / "out"
    weights = model / "model.safetensors"
    before, times = weights.read_bytes(), weights.stat()

    def change() -> None:
        with weights.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\1")

    ended = bench.run(out, model=model, steps=3, action=change)
    bench.refused("changed", out, ended, "was changed while the work was going on")
    bench.refused("changed, still", out, bench.run(out, model=model), "began it: source: ")
    weights.write_bytes(before)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    bench.goes_on("changed", out, model)


def removed(bench: Benchmark, _: str) -> None:
    folder = bench.work / "folder"
    out = folder / "out"
    ended = bench.run(out, steps=3, action=lambda: shutil.rmtree(folder))
    bench.refused("removed", out, ended, "where the work was going on, was removed")
    bench.goes_on("removed", out, kept=False)


def clock(bench: Benchmark, _: str) -> None:
    source, library = bench.work / "clock.c", bench.work / "clock.so"
    source.write_text(CLOCK)
    system("cc", "-shared", "-fPIC", "-O1", "-o", library, source)
    prefix = ["env", f"LD_PRELOAD={library}"]
    script = "import time; a = time.time(); print(time.time() < a - 3000)"
    words = [*prefix, sys.executable, "-c", script]
    if "True" not in subprocess.run(words, capture_output=True, text=True, check=False).stdout:
        raise Skipped("the clock cannot be replaced here")
    out = bench.work / "out"
    status, said = 0, ""

    def stop() -> None:
        os.kill(int((journal_of(out).parent / "lock").read_text().split()[-1]), signal.SIGKILL)

    status, said = bench.run(out, prefix=prefix, steps=3, action=stop)
    bench.tell("clock, killed", status == -signal.SIGKILL and not out.exists(), f"status {status}")
    status, said = bench.run(out, prefix=prefix)
    fine = status == 0 and digest(out) == bench.whole and "going on with" in said
    bench.tell("clock, again", fine, "went on" if fine else said[-300:])
    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)


CASES: dict[str, tuple[Callable[[Benchmark, str], None], tuple[str, ...]]] = {
    "begin": (begin, ("tmpfs", "ext4")),
    "full": (full, ("tmpfs", "ext4")),
    "full-journal": (full_journal, ("tmpfs", "ext4")),
    "read-only": (read_only, ("ext4",)),
    "unreadable": (unreadable, ("",)),
    "deleted": (deleted, ("",)),
    "changed": (changed, ("",)),
    "removed": (removed, ("",)),
    "clock": (clock, ("",)),
}


def main() -> None:
    """Every case with every recipe."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", action="append", help="default: one of each kind")
    parser.add_argument("--only", action="append", choices=list(CASES), help="default: all")
    given = parser.parse_args()
    good, checked, skipped = True, 0, 0
    with tempfile.TemporaryDirectory() as root:
        model = deep(Path(root) / "model")
        for recipe in given.recipe or ["w4g128-rtn", "q4_k_m", "w4g128-gptq"]:
            work = Path(tempfile.mkdtemp(dir=root))
            bench = Benchmark(recipe, model, work)
            for name in given.only or CASES:
                case, kinds = CASES[name]
                for kind in kinds:
                    try:
                        case(bench, kind)
                        checked += 1
                    except Skipped as why:
                        skipped += 1
                        print(f"{recipe:12} {name} {kind}: skipped, {why}", flush=True)
            good &= bench.good
    print(f"{checked} cases checked, {skipped} not checked", flush=True)
    sys.exit(status(good, checked, skipped))


def status(good: bool, checked: int, skipped: int) -> int:
    """0 means that all was checked and all was good."""
    if not good:
        return 1
    return 2 if skipped or not checked else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
