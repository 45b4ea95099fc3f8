"""SIGKILL at random moments: every run that goes on ends with the bytes of one never killed.

    python tests/benchmarks/kill.py [--model tiny] [--model deep] [--recipe R[=HOW]]... [--kills 20]
        [--seconds 240] [--figures FILE] [--seed 0] [--option=--samples=8]... [--fork]
    python tests/benchmarks/kill.py --sum FILE

`deep` is the shipped model with its four blocks over and over, 24 in all, made here. Each recipe
runs undisturbed first. Then one run after the other is killed and its command given again, which is
killed in its turn, until the output is there; after five kills it is left alone. One kill in six
comes at a moment drawn evenly from all the time of the undisturbed run, as all do where no step is
left; one in three after its last step (export, verify, the new name), the others behind a random
step of those that are left. A
difference in any byte, more than a block done again, or anything left beside the output, fails
(exit status 1). HOW: importance (measured, for a GGUF file), gguf (the source is a GGUF file in
float16), max-ram (the least budget that will do, with hidden states on the disk). With --figures
each output's figures are added to a file, so that it can be run in parts; --sum adds them up.
With --fork each command is a process forked from one that has imported the libraries, which spares
most of the time that is not at stake.

    kills      SIGKILLs, and what was going on then: `start` before the first block of that command,
               `blocks`, `end` after the last one, `named` when the output had its name already
    resumed    commands that went on with what earlier ones had finished
    again      work that was begun and had to be done again after a kill, as a share of all of it,
               and the most of it in decoder blocks: blocks by the log, that under way counted as a
               whole one; of a GGUF file pieces, one a thread under way, over those of the model's
               largest block, or of its largest unit of the journal where that has more
    apart      the same of what is not done block by block: reading a source that is a GGUF file,
               learning rotations; as a share of doing it once, by output. It is not judged
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import memory
from deep_model import deep
from kill_figures import Figures, Whole, count, done_again, told
from kill_work import JUDGED, Event, Work, events, journal_of, steps_of
from killed_command import LOOK_EVERY, Command

from qtool.gguf.open import open_source
from qtool.gguf.pieces import Pieces
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.runs.gguf_resume import UNIT_PIECES

MOST_KILLS = 5  # of one output
PRELOADED = (
    "qtool.blockwise.run",
    "qtool.quantizing.pipeline",
    "qtool.quantizing.gguf.quantize",
    "transformers.models.llama.modeling_llama",
)
DEFAULT = (
    "w4g128-awq", "w4g128-gptq", "q4_k_m", "q4_k_m=importance", "w4g128-awq=gguf",
    "w4g128-gptq-rotated", "w4-gptq-rotated-learned", "w4g128-gptq=max-ram", "kv-fp8",
)  # fmt: skip
LEARNING_STEPS = 8


def digest(out: Path) -> dict[str, str]:
    """SHA-256 of every file of an output, by its name in it."""
    files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    return {
        "" if path == out else path.relative_to(out).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in files
    }


def undisturbed(words: list[str], out: Path, log: Path, most_pieces: int) -> Whole:
    """Run a command as it is. most_pieces: 0 where no GGUF file is made."""
    began = time.time()
    command = Command(words)
    most = 0
    while command.running():
        most = max(most, steps_of(journal_of(out)))
        time.sleep(LOOK_EVERY)
    command.kill_after(0)
    seconds = time.time() - began
    names = {"step": "piece" if most_pieces else "learning", "tensor": "reading"}
    work = Work.of(events(log), names)
    steps = [
        event
        for event in events(log)
        if event["event"] == "step" and names.get(event["kind"], event["kind"]) in JUDGED
    ]
    first, last = steps[0]["time"] - began, steps[-1]["time"] - began
    return Whole(
        digest(out), {*work.done}, names, most_pieces, seconds, max(1, most), last - first,
        seconds - last,
    )  # fmt: skip


def most_pieces_of(model: str, recipe: str, sets: list[str]) -> int:
    """Of the largest decoder block, or of the largest unit; 0 where no GGUF file is made."""
    loaded = load(recipe, sets)
    if not isinstance(loaded, GgufRecipe):
        return 0
    source = open_source(memory.TINY if model == "tiny" else Path(model))
    plan = make_gguf_plan(loaded, source, None, requantize=False, origin="", threads=1)
    pieces = Pieces(plan.tensors)
    counts: Counter[str] = Counter()
    for number, tensor in enumerate(plan.tensors):
        found = pieces.of(number)
        count = found.stop - found.start
        block = re.match(r"blk\.\d+\.", tensor.name)
        counts[block[0] if block else tensor.name] += count if block else min(count, UNIT_PIECES)
    return max(counts.values())


def kill(words: list[str], whole: Whole, out: Path, log: Path) -> bool:
    """Start a command and kill it at random; False where it came to its end before."""
    have = steps_of(journal_of(out))
    command = Command(words)
    where = random.random()
    if where < 1 / 6 or have >= whole.steps:  # nothing is left to count
        more = random.uniform(0, whole.seconds)
    elif where < 1 / 2:
        while command.running() and not Work.of(events(log), whole.names).ended(whole.kinds):
            time.sleep(LOOK_EVERY)
        more = random.uniform(0, whole.end)
    else:
        wanted = random.randint(min(have + 1, whole.steps), whole.steps)
        while command.running() and steps_of(journal_of(out)) < wanted:
            time.sleep(LOOK_EVERY)
        more = random.uniform(0, whole.working / whole.steps)
    return command.kill_after(more)


def one_output(command: list[str], out: Path, whole: Whole, figures: Figures) -> None:
    """Kill, begin again, and compare at the end."""
    known: dict[str, float] = {}  # what the logs say is finished
    apart: dict[str, float] = {}
    lost: list[Work] = []  # of commands that were killed, until another tells what it took over
    for tries in range(MOST_KILLS + 1):
        log = out.with_name(f"log-{tries}")
        killed = False
        words = [*command, "--log-file", str(log)]
        if tries < MOST_KILLS:
            killed = kill(words, whole, out, log)
        else:
            Command(words).kill_after(1e9)
        work = Work.of(events(log), whole.names)
        for kind, share in work.apart.items():
            apart[kind] = apart.get(kind, 0.0) + share
        took = any("going on with an earlier run" in e.get("text", "") for e in events(log))
        figures.resumed += took
        if work.began or not killed:
            for one in lost:
                done_again(one, work, known, whole, figures)
            lost = []
        for kind, done in work.done.items():
            known[kind] = max(known.get(kind, 0.0), done)
        if not killed:
            break
        figures.kills += 1
        lost.append(work)
        if out.exists():
            count(figures, "named")
            break
        stage = "end" if work.ended(whole.kinds) or work.last in ("export", "verify") else "blocks"
        if known and all(known.get(kind, 0.0) >= 1 for kind in whole.kinds) and not work.done:
            stage = "end"
        if not work.done and stage == "blocks" and not events(log):
            stage = "start"
        count(figures, stage)
    figures.apart = {kind: max(0.0, share - 1) for kind, share in apart.items()}
    figures.mismatches += digest(out) != whole.digest
    # Killed behind its last step a run leaves an empty folder, which the next command removes.
    sweeping = Command(command)
    while sweeping.running():
        time.sleep(LOOK_EVERY)
    beside = [
        path.name
        for path in out.parent.iterdir()
        if path != out and not path.name.startswith(("whole", "log-"))
    ]
    if beside:
        print(f"left beside {out}: {beside}", flush=True)
        figures.mismatches += 1
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    for log in out.parent.glob("log-*"):
        log.unlink()


def least_budget(command: list[str], out: Path) -> str:
    """What --max-ram takes at least, by the sentence about less."""
    words = [sys.executable, "-m", "qtool", *command, "--max-ram", "1MiB", "-o", str(out)]
    said = subprocess.run(words, capture_output=True, text=True).stderr
    least = re.search(r"the least that would do is (\w+)", " ".join(said.split()))
    if least is None:
        sys.exit(f"--max-ram 1MiB was not refused as expected: {said}")
    return least[1]


def main() -> None:
    """Run the benchmark, or a part of it."""
    parser = argparse.ArgumentParser(description="SIGKILL at random moments")
    parser.add_argument("--model", action="append", help="tiny, deep or a folder; default: both")
    parser.add_argument("--recipe", action="append", help="=importance, =gguf or =max-ram")
    parser.add_argument("--kills", type=int, default=20, help="of each recipe on each model")
    parser.add_argument("--seconds", type=float, help="begin no output after this time")
    parser.add_argument("--figures", type=Path, help="to add a line for each output to")
    parser.add_argument("--sum", type=Path, help="add up such a file, and do nothing else")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--fork", action="store_true", help="spare the time of importing")
    parser.add_argument("--option", action="append", help="such as --option=--samples=8")
    given = parser.parse_args()
    if given.sum is not None:
        sys.exit(told([json.loads(line) for line in given.sum.read_text().splitlines()]) > 0)
    random.seed(given.seed)
    if given.fork:
        Command.forked = True
        for name in PRELOADED:
            importlib.import_module(name)
    recipes = given.recipe or DEFAULT
    options = given.option or ["--samples=8", "--length=128"]
    until = time.monotonic() + (given.seconds or 1e9)
    lines: list[Event] = []
    for name in given.model or ["tiny", "deep"]:
        for recipe in recipes:
            with tempfile.TemporaryDirectory() as root:
                folder = Path(root)
                model = str(deep(folder / "model")) if name == "deep" else name
                plain, _, how = recipe.partition("=")
                sets = ["importance=true"] if how == "importance" else []
                if "learned" in plain:
                    sets.append(f"rotate.steps={LEARNING_STEPS}")
                most_pieces = most_pieces_of(model, plain, sets)
                if how == "gguf":
                    made = str(folder / "model.gguf")
                    Command(["quantize", model, "--recipe", "f16", "-o", made]).kill_after(1e9)
                    model = made
                command = ["quantize", model, "--recipe", plain]
                command += [word for one in sets for word in ("--set", one)]
                if load(plain, sets).calibrates:
                    command += [word for option in options for word in option.split("=", 1)]
                work = folder / "work"
                work.mkdir()
                whole_out, log = work / "whole", work / "whole.log"
                if how == "max-ram":
                    command += ["--max-ram", least_budget(command, whole_out)]
                words = [*command, "-o", str(whole_out), "--log-file", str(log)]
                whole = undisturbed(words, whole_out, log, most_pieces)
                said = " ".join(event.get("text", "") for event in events(log))
                if how == "max-ram" and "hidden states on the disk" not in said:
                    sys.exit(f"{command}: its hidden states are not on the disk")
                kills = 0
                while kills < given.kills and time.monotonic() < until:
                    figures = Figures(name, recipe)
                    out = work / "out"
                    one_output([*command, "-o", str(out)], out, whole, figures)
                    kills += figures.kills
                    lines.append(asdict(figures))
                    if given.figures is not None:
                        with given.figures.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(asdict(figures)) + "\n")
    sys.exit(told(lines) > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
