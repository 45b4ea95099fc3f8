"""Going on with a GGUF file that an earlier run began: the tensors that are finished, and those
that are not. What is said to be written is read back and compared before it is believed."""

import hashlib
import re
from collections.abc import Callable
from glob import escape
from pathlib import Path
from threading import Lock
from typing import Any

from qtool import __version__
from qtool.formats.gguf_writer import GgufWriter
from qtool.gguf.pieces import Done, Pieces
from qtool.gguf.plan import GgufPlan
from qtool.gguf.recipe import GgufRecipe
from qtool.gguf.source import GgufSource
from qtool.gguf.verify import Reader
from qtool.gguf.workers import in_order
from qtool.runs.journal import Journal
from qtool.runs.resume import file_facts

_PART = re.compile(r"(.*)-\d{5}(-of-\d{5}\.gguf)")


def facts(recipe: GgufRecipe, source: GgufSource, imatrix: Path | None) -> dict[str, Any]:
    """What makes it the same run, by the names that a person knows it by."""
    found = {
        "version of qtool": __version__,
        "recipe": {"name": recipe.name, **recipe.effective()},
        "source": [file_facts(file) for file in _files(source.path)],
    }
    if imatrix is not None:
        found["importance matrix"] = file_facts(imatrix)
    return found


def _files(path: Path) -> list[Path]:
    """The files of a model: of a folder, or of a GGUF file, which may come in parts."""
    if path.is_dir():
        return sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    part = _PART.fullmatch(path.name)
    return [path] if part is None else sorted(path.parent.glob(f"{escape(part[1])}-*{part[2]}"))


def header_fact(plan: GgufPlan) -> dict[str, str]:
    """Keys, tensors and their places: what the plan came to."""
    return {"header of its file": hashlib.sha256(plan.layout.header).hexdigest()}


def take_up(
    descriptor: int,
    pieces: Pieces,
    done: Done,
    writer: GgufWriter,
    journal: Journal,
    threads: int,
) -> list[int]:
    """The tensors that are still to be made; the others' pieces are in `done`."""
    tensors = writer.layout.tensors
    said = [
        number
        for number, tensor in enumerate(tensors)
        if (entry := journal.done.get(tensor.name)) is not None
        and done.put(pieces.of(number), entry["pieces"])
    ]
    good = dict.fromkeys(said, True)
    numbers = [n for tensor in said for n in range(*pieces.of(tensor).indices(len(pieces)))]

    def worker() -> Callable[[int], None]:
        reader = Reader(descriptor, writer.layout, pieces, done)

        def look(number: int) -> None:
            if not reader.same(numbers[number]):
                good[pieces[numbers[number]].tensor] = False

        return look

    in_order(len(numbers), threads, worker, range)
    for number, same in good.items():
        if same:
            writer.restored(number)
    return [number for number in range(len(tensors)) if not good.get(number)]


class Commits:
    """Counts the finished pieces of each tensor; a line goes into the journal with its last."""

    def __init__(self, pieces: Pieces, done: Done, writer: GgufWriter, journal: Journal) -> None:
        self._pieces, self._done, self._journal = pieces, done, journal
        self._tensors = writer.layout.tensors
        self._left: dict[int, int] = {}
        self._lock = Lock()

    def __call__(self, number: int) -> None:
        """A piece is written."""
        tensor = self._pieces[number].tensor
        numbers = self._pieces.of(tensor)
        with self._lock:
            left = self._left.get(tensor, numbers.stop - numbers.start) - 1
            self._left[tensor] = left
        if not left:
            del self._left[tensor]
            self._journal.commit(self._tensors[tensor].name, pieces=self._done.of(numbers))
