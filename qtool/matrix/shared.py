"""The one pass that several recipes are calibrated by: a file of statistics, and importance.

Both lie in a hidden folder of the matrix while they are needed, and are taken up by a run that goes
on where an earlier one died: they say of which model and text they are, and what they hold.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool.calibrating.stats_file import StatsFile
from qtool.checkpoints.checkpoint import Checkpoint, hash_file
from qtool.checkpoints.fused_experts import all_apart
from qtool.checkpoints.gguf_models import is_gguf
from qtool.converting.source import opened
from qtool.cuda.device import Device
from qtool.errors import QtoolError, UnsupportedError
from qtool.gguf.importance.imatrix import read_importance
from qtool.matrix.cells import Cell
from qtool.messages.progress import Progress
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Calibration, Recipe
from qtool.texts.calibration import calibration_tokens
from qtool.texts.chats import Chat
from qtool.texts.mixture import mixture
from qtool.texts.source import Texts, load_text
from qtool.texts.stored import kind_of
from qtool.workspaces.staging import free_bytes

IMATRIX = "imatrix.gguf"  # a name that the artifacts record
_READ = 1 << 26  # characters of a text, by what it says


@dataclass(frozen=True)
class Measured:
    """What a pass left."""

    recipes: tuple[str, ...]
    stats: Path | None
    imatrix: Path | None
    calibration: dict[str, Any]
    needs: tuple[str, ...]
    taken_up: bool
    seconds: float

    def json(self) -> dict[str, Any]:
        """For --json."""
        files = [path for path in (self.stats, self.imatrix) if path is not None]
        return {
            "recipes": list(self.recipes),
            "calibration": self.calibration,
            "needs": list(self.needs),
            "size_bytes": sum(path.stat().st_size for path in files),
            "taken_up": self.taken_up,
            "seconds": round(self.seconds, 3),
        }


def text_digest(settings: Calibration, source: Path, progress: Progress) -> str:
    """Of the tokens that a recipe is calibrated on; of a GGUF file's, whose tokenizer is in the
    file, of the text and of what is taken of it."""
    if not is_gguf(source):
        return calibration_tokens(settings, _folder(source), progress).digest
    found = hashlib.sha256(f"{settings.samples} {settings.length} {settings.seed}".encode())
    of = mixture(settings.source)
    for own, count in zip(of.parts, of.counts(settings.samples), strict=True):
        if of.name:
            found.update(f"\0{count}".encode())
        _add_text(found, load_text(own.source))
    return found.hexdigest()


def _add_text(found: "hashlib._Hash", texts: Texts) -> None:
    """By what it says; of a long text by its file, since all of it takes long to read."""
    characters = 0
    for piece in texts.pieces():
        found.update(b"\0")
        for part in (str(piece),) if isinstance(piece, Chat) else piece:
            found.update(part.encode())
            characters += len(part)
            if characters > _READ and texts.path is not None:
                found.update(f"\0{kind_of(texts.path)} {hash_file(texts.path)}".encode())
                return


def _folder(source: Path) -> Path:
    """Where the tokenizer lies."""
    return source if source.is_dir() else source.parent


def needs_of(group: Sequence[Cell]) -> frozenset[str]:
    """What the recipes ask for, of a file of statistics."""
    from qtool.blockwise.given import recipe_needs

    return frozenset[str]().union(
        *(recipe_needs(cell.recipe) for cell in group if isinstance(cell.recipe, Recipe))
    )


def measure(
    group: Sequence[Cell],
    source: Path,
    place: Path,
    threads: int,
    progress: Progress,
    fresh: bool = False,
    device: Device | None = None,
) -> Measured:
    """Everything that a group of recipes needs, in one pass; or what an earlier run measured.

    place: a folder of its own for what is measured on one text. device: where blocks are run; what
    another has measured is measured again. UnsupportedError where the disk of `place` has no room.
    """
    from qtool.quantizing import calibrate as measuring
    from qtool.streaming.precision import settled

    settings: Calibration = group[0].settings
    place.mkdir(parents=True, exist_ok=True)
    before = progress.total()
    needs = needs_of(group)
    stats = place / "statistics" if needs else None
    imatrix = None
    if any(isinstance(cell.recipe, GgufRecipe) for cell in group):
        imatrix = place / IMATRIX
    precision = settled(settings.precision, device, progress)
    settings = settings.model_copy(update={"precision": precision})
    tokens = calibration_tokens(settings, _folder(source), progress)
    calibration = replace(tokens, precision=precision).record()
    gpu = None if device is None else device.name
    there = not fresh and _fits(stats, imatrix, source, needs, calibration, gpu)
    if there:
        progress.say("statistics: those of an earlier run are used")
    else:
        shutil.rmtree(place)
        place.mkdir()
        if stats is not None:
            _check_space(stats, source, needs)
        progress.say(f"statistics: one pass for {', '.join(cell.name for cell in group)}")
        with measuring.opened(source, imatrix) as (model, target):
            # Without statistics the importance is measured as `calibrate --imatrix` does.
            measuring.calibrate(model, stats, settings, needs, threads, progress, target, device)
    return Measured(
        tuple(cell.name for cell in group),
        stats,
        imatrix,
        calibration,
        tuple(sorted(needs)),
        there,
        progress.total() - before,
    )


def _fits(
    stats: Path | None,
    imatrix: Path | None,
    source: Path,
    needs: frozenset[str],
    calibration: dict[str, Any],
    gpu: str | None,
) -> bool:
    """Whether the files of an earlier run are there and serve these recipes."""
    from qtool.calibrating.same_model import check_same_model

    with suppress(QtoolError):
        if stats is not None:
            if not stats.is_file():
                return False
            saved = StatsFile.open(stats)
            if check_same_model(saved, Checkpoint.open(source)) != calibration:
                return False
            if not needs <= saved.fields or saved.metadata.get("gpu") != gpu:
                return False
        # Written after the statistics are complete, so that it may be missing.
        if imatrix is not None:
            if not imatrix.is_file() or (said := read_importance(imatrix).calibration) is None:
                return False
            known = json.loads(said)
            if known.get("environment", {}).get("gpu") != gpu:
                return False
            keys = ["source", "samples", "length", "seed"]
            keys += ["digest"] if stats is not None else []  # by itself it has BOS in its tokens
            return all(known.get(key) == calibration.get(key) for key in (*keys, "precision"))
        return stats is not None
    return False


def statistics_bytes(checkpoint: Checkpoint, needs: frozenset[str]) -> int:
    """How large the file of statistics will be, without its header. Of blocks with the same
    tensors only the first is read."""
    from qtool.calibrating.same_model import probe
    from qtool.calibrating.sites import Tracer
    from qtool.streaming.skeleton import Skeleton

    skeleton = Skeleton.open(checkpoint)
    stream, tracer = skeleton.embed(probe(checkpoint).tokens), Tracer()
    known: dict[object, int] = {}
    total = 0
    for index in range(skeleton.count):
        named = skeleton.blocks[index].named_parameters()
        key = tuple((name, tuple(one.shape)) for name, one in named)
        if key not in known:
            widths = [
                site.in_features for site in tracer.sites(skeleton.block(index), stream).sites
            ]
            known[key] = sum(
                4 * width * (width if need == "gram" else 1) for width in widths for need in needs
            )
        total += known[key]
    return total


def _check_space(stats: Path, source: Path, needs: frozenset[str]) -> None:
    out = stats.parents[2]
    wanted, free = statistics_bytes(all_apart(opened(source, False)), needs), free_bytes(stats)
    if free < wanted:
        raise UnsupportedError(
            f"{out}: the statistics that these recipes share need {wanted:,} bytes, and its disk "
            f"has {free:,} left; free some space, choose another -o, or give --error-aware, which "
            "keeps none"
        )
