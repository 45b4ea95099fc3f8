"""SIGKILL at random moments: every run that goes on ends with the bytes of one never killed.

    python tests/bars/kill.py MODEL --recipe w4g128-awq --recipe q4_k_m [--kills 100] [--seed 0]
        [--option=--samples=8 --option=--length=128]

Each recipe runs undisturbed first. Then one run after the other is killed, one time in six at a
moment drawn evenly from all the time that one took, else from its end of starting up (Python, the
model's headers, until the journal is there) on; and the same command is given again, until the
output is there; after five kills it is left alone. A difference in any byte, or anything left
beside the output, fails (exit status 1).

    kills      SIGKILLs; `before` of them came before the first step was finished
    resumed    commands that went on with steps that an earlier one had finished
    redone     time from the last finished step to the kill, by the time of the whole run less its
               starting up: the work that had to be done again; mean and largest, over kills after
               the first step
    step       the longest that a step took in the undisturbed run, by the same
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

MOST_KILLS = 5  # of one output


@dataclass
class Tally:
    """What happened with one recipe."""

    runs: int = 0
    kills: int = 0
    before: int = 0
    resumed: int = 0
    mismatches: int = 0
    redone: list[float] = field(default_factory=list)


def digest(out: Path) -> dict[str, str]:
    """SHA-256 of every file of an output, by its name in it."""
    files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    return {
        "" if path == out else path.relative_to(out).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in files
    }


def steps_of(journal: Path) -> tuple[int, float]:
    """Finished steps, and when the last of them was written."""
    try:
        return journal.read_bytes().count(b' {"done":'), journal.stat().st_mtime
    except OSError:
        return 0, 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of an undisturbed run."""

    whole: float
    ready: float  # until the journal is there
    step: float  # the longest


def watched(command: list[str], journal: Path) -> Times:
    """Run a command and look on."""
    began = time.time()
    ready = 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    times: dict[int, float] = {}
    while process.poll() is None:
        count, at = steps_of(journal)
        if not ready and journal.exists():
            ready = time.time() - began
        if count:
            times.setdefault(count, at)
        time.sleep(0.005)
    whole = time.time() - began
    if process.returncode:
        assert process.stderr is not None
        sys.exit(f"{' '.join(command)}: {process.stderr.read().decode()}")
    moments = [*times.values()]
    gaps = [later - at for at, later in pairwise(moments)]
    return Times(whole, ready, max(gaps, default=whole))


def one_output(
    command: list[str], out: Path, times: Times, expected: dict[str, str], left: int, tally: Tally
) -> None:
    """Kill, begin again, and compare at the end. left: how many kills are still wanted."""
    journal = out.with_name(f".{out.name}.partial") / "journal"
    tally.runs += 1
    for kills in range(MOST_KILLS + 1):
        finished, _ = steps_of(journal)
        tally.resumed += finished > 0
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        stop = kills < MOST_KILLS and left > 0
        try:
            first = 0.0 if random.random() < 1 / 6 else times.ready
            moment = random.uniform(first, times.whole)
            _, said = process.communicate(timeout=moment if stop else None)
        except subprocess.TimeoutExpired:
            moment = time.time()
            process.send_signal(signal.SIGKILL)
            process.communicate()
            tally.kills += 1
            left -= 1
            count, at = steps_of(journal)
            if count:
                # Starting up comes again with every command, and is no work of this one.
                lost = moment - max(at, began + times.ready)
                tally.redone.append(max(0.0, lost) / (times.whole - times.ready))
            else:
                tally.before += 1
            if not out.exists():
                continue
        else:
            if process.returncode:
                sys.exit(f"{' '.join(command)}: {said.decode()}")
        break
    if digest(out) != expected:
        tally.mismatches += 1
    # Killed behind its last step a run leaves an empty folder, which the next command removes.
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    beside = [path.name for path in out.parent.iterdir() if path != out and path.name != "whole"]
    if beside:
        print(f"left beside {out}: {beside}")
        tally.mismatches += 1
    shutil.rmtree(out) if out.is_dir() else out.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="SIGKILL at random moments")
    parser.add_argument("model")
    parser.add_argument("--recipe", action="append", required=True)
    parser.add_argument("--kills", type=int, default=100, help="of each recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="such as --option=--samples=8"
    )
    given = parser.parse_args()
    random.seed(given.seed)
    bad = 0
    print(f"{'recipe':>16} {'runs':>5} {'kills':>6} {'before':>7} {'resumed':>8} {'mismatches':>11}"
          f" {'redone':>15} {'step':>7} {'seconds':>8}")  # fmt: skip
    for recipe in given.recipe:
        with tempfile.TemporaryDirectory() as folder:
            base = [sys.executable, "-m", "qtool", "quantize", given.model, "--recipe", recipe]
            base += [word for option in given.option for word in option.split("=")]
            whole_out, out = Path(folder) / "whole", Path(folder) / "out"
            journal = whole_out.with_name(".whole.partial") / "journal"
            times = watched([*base, "-o", str(whole_out)], journal)
            expected, tally = digest(whole_out), Tally()
            while tally.kills < given.kills:
                left = given.kills - tally.kills
                one_output([*base, "-o", str(out)], out, times, expected, left, tally)
            mean = sum(tally.redone) / max(1, len(tally.redone))
            most = max(tally.redone, default=0.0)
            work = times.whole - times.ready
            print(f"{recipe:>16} {tally.runs:5} {tally.kills:6} {tally.before:7} "
                  f"{tally.resumed:8} {tally.mismatches:11} {mean:7.2%} {most:7.2%} "
                  f"{times.step / work:7.2%} {times.whole:8.2f}", flush=True)  # fmt: skip
            bad += tally.mismatches
    sys.exit(bad > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
