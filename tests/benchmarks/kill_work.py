"""How far a command had come when it was killed, by its log and by its journal."""

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
JUDGED = {"block", "piece"}  # the others are apart


def events(log: Path) -> list[Event]:
    """What one command has logged so far; half a line of a killed one is none."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]
    return []


@dataclass
class Work:
    """How far one command has come by its log, each kind of work in parts of the whole."""

    began: dict[str, float] = field(default_factory=dict)  # what it took over, where it told
    done: dict[str, float] = field(default_factory=dict)
    last: str = "start"  # what its last event was about
    parts: dict[str, int] = field(default_factory=dict)  # of the whole
    apart: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, log: list[Event], names: dict[str, str]) -> "Work":
        """names: what kinds of steps are here, where their names do not say it."""
        found = cls()
        taken, count = 0, 0  # pieces of a GGUF file
        for event in log:
            if event["event"] == "stage" and found.done:
                found.last = event["name"]
            if event["event"] == "message":
                told = re.search(r"(\d+) of (\d+) pieces are finished", event["text"])
                if told:
                    taken, count = int(told[1]), int(told[2])
            if event["event"] != "step":
                continue
            kind = names.get(event["kind"], event["kind"])
            done, whole = event["done"], event["of"]
            if kind not in JUDGED:
                found.apart[kind] = done / whole
                continue
            found.last = kind
            if kind == "block":
                found.began.setdefault(kind, (done - 1) / whole)
                found.done[kind] = done / whole
                found.parts[kind] = whole
            else:
                share = taken / count if count else 0.0
                found.began.setdefault(kind, share)
                found.done[kind] = share + (1 - share) * done / whole
                found.parts[kind] = max(whole, count)
        return found

    def ended(self, kinds: set[str]) -> bool:
        """Whether all blocks are made."""
        return all(self.done.get(kind, 0.0) >= 1 for kind in kinds)


def steps_of(journal: Path) -> int:
    """Finished steps by the journal."""
    with contextlib.suppress(OSError):
        return journal.read_bytes().count(b' {"done":')
    return 0


def journal_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial") / "journal"
