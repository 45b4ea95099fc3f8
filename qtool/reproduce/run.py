"""`qtool reproduce`: make an artifact again from what it records, and compare.

    the record -> recipe, source, calibration -> are they the same? -> make it in a temporary folder
               -> every file by its bytes, every tensor by its codes

On the kind of CPU and the versions that a calibrated artifact was made with every byte must agree;
elsewhere last digits of sums differ, and so may single codes, which are counted.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import __version__
from qtool.checkpoints.gguf_models import is_gguf
from qtool.diff.diff import Diff, diff
from qtool.errors import QtoolError, SourceError, UnsupportedError
from qtool.hub import public_name, resolve
from qtool.messages.progress import Progress
from qtool.provenance import record as provenance
from qtool.provenance.embedded import Embedded, read
from qtool.provenance.statement import subjects
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import Recipe
from qtool.reproduce import inputs
from qtool.streaming.allocator import give_back


@dataclass(frozen=True)
class Asked:
    """What the user gives beside the artifact."""

    artifact: Path
    model: str | None = None  # where the record names no source
    calibration: Path | None = None  # the text, where the record says `file`
    imatrix: Path | None = None  # where another program wrote it
    work: Path | None = None  # where the second one is made
    threads: int = 1


@dataclass(frozen=True)
class Reproduced:
    """How the second one differs from the first."""

    artifact: str
    recipe: str
    source: str
    alike: bool  # whether the machine is one on which all bytes must agree
    recorded: dict[str, Any] | None  # the environment, where bytes depend on it
    here: dict[str, str]
    files: tuple[str, ...]
    differing_files: tuple[str, ...]
    tensors: tuple[dict[str, Any], ...]  # that differ, with their codes or blocks that do
    codes: int  # that differ, of all tensors
    seconds: float

    @property
    def same(self) -> bool:
        """Whether all bytes agree; on another kind of machine all tensors."""
        return not (self.differing_files if self.alike else self.tensors)

    def json(self) -> dict[str, Any]:
        """The --json object."""
        return {
            "artifact": self.artifact,
            "same": self.same,
            "compared": "bytes" if self.alike else "codes",
            "recipe": self.recipe,
            "source": self.source,
            "environment": {"recorded": self.recorded, "here": self.here},
            "files": list(self.files),
            "differing_files": list(self.differing_files),
            "tensors": list(self.tensors),
            "differing_codes": self.codes,
            "seconds": round(self.seconds, 3),
        }


def reproduce(asked: Asked, progress: Progress) -> Reproduced:
    """Make it again; SourceError or UnsupportedError where that cannot be, and why."""
    record = read(asked.artifact)
    if record.version != __version__:
        raise UnsupportedError(
            f"{asked.artifact}: was made by qtool {record.version[:40]}, and this is "
            f"{__version__}, whose bytes may be others; run `qtool reproduce` of that version"
        )
    model = _model(record, asked)
    with progress.stage("download"):
        source = _resolve(model, record)
    inputs.check_source(record, source, model)
    if asked.calibration is not None and record.calibration is None:
        progress.say("note: --calibration is not used: the artifact was made of no text")
    recipe = record.load(inputs.text_of(record, asked.calibration))
    with tempfile.TemporaryDirectory(prefix="qtool-reproduce-", dir=asked.work) as name:
        made = Path(name) / asked.artifact.resolve().name
        if isinstance(recipe, Recipe):
            _folder(record, recipe, model, source, made, asked, progress)
        else:
            _file(record, recipe, model, source, made, asked, progress)
        give_back()
        with progress.stage("verify"):
            return _compared(record, model, made, asked, progress)


def _model(record: Embedded, asked: Asked) -> str:
    """What to make it of."""
    if asked.model is not None:
        return asked.model
    if record.source is None:
        raise SourceError(
            f"{asked.artifact}: was made of a folder or file, whose place is not recorded; say "
            "where it is with --model SOURCE"
        )
    return record.source


def _resolve(model: str, record: Embedded) -> Path:
    """The source, or a sentence that says which artifact asks for it."""
    try:
        return resolve(model)
    except QtoolError as error:
        raise SourceError(
            f"the source that {record.path} was made of is not to be had: {error}"
        ) from error


def _typed(record: Embedded, model: str) -> str:
    """What was typed then, as far as bytes tell: nothing but a public name is recorded."""
    return record.source or (model if public_name(model) is None else "")


def _folder(
    record: Embedded,
    recipe: Recipe,
    model: str,
    source: Path,
    made: Path,
    asked: Asked,
    progress: Progress,
) -> None:
    from qtool.planning.plan import MAX_SHARD_BYTES
    from qtool.quantizing.pipeline import run
    from qtool.runs.request import Request

    with _checkpoint(source, made, progress) as folder:
        inputs.check_calibration(record, recipe, folder)
        stats = None
        if record.from_statistics:
            stats = made.with_name("statistics")
            inputs.measure(record, recipe, folder, stats, asked.calibration, asked.threads)
        request = Request(
            _typed(record, model), folder, recipe, made, stats, asked.threads,
            record.max_shard_bytes or MAX_SHARD_BYTES, requantize=record.requantized,
        )  # fmt: skip
        run(request, progress)
        if stats is not None:
            stats.unlink()


@contextmanager
def _checkpoint(source: Path, made: Path, progress: Progress) -> Iterator[Path]:
    if not is_gguf(source):
        yield source
        return
    from qtool.converting.gguf_to_hf import checkpoint_folder

    with checkpoint_folder(source, made, progress, requantize=True) as folder:
        yield folder


def _file(
    record: Embedded,
    recipe: GgufRecipe,
    model: str,
    source: Path,
    made: Path,
    asked: Asked,
    progress: Progress,
) -> None:
    from qtool.quantizing.gguf.quantize import run_gguf
    from qtool.runs.gguf_request import GgufRequest

    imatrix = asked.imatrix
    if record.imatrix is not None and imatrix is None:
        imatrix = inputs.importance(record, source, made, asked.calibration, asked.threads)
    request = GgufRequest(
        _typed(record, model), source, recipe, made, asked.threads, imatrix, record.requantized
    )
    run_gguf(request, progress)
    again = read(made)
    inputs.check_tokens(record, again)
    recorded, here = _environments(record, again)
    as_they_are = not recipe.scaling and not recipe.rotates
    if as_they_are or recorded == here:  # else what they are read with may be other here
        inputs.check_weights(record, again, model)


def _compared(
    record: Embedded, model: str, made: Path, asked: Asked, progress: Progress
) -> Reproduced:
    first, second = subjects(asked.artifact.resolve()), subjects(made)
    differing = sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or not same_bytes(first[name], second[name])
    )
    tensors: list[dict[str, Any]] = []
    if differing:
        tensors = _tensors(diff(asked.artifact, made, Progress(quiet=True)))
    recorded, here = _environments(record, read(made))
    return Reproduced(
        str(asked.artifact),
        str(record.recipe["name"]),
        model,
        (recorded is None or recorded == here) and "gpu" not in (record.calibration or {}),
        recorded,
        here,
        tuple(sorted(first)),
        tuple(differing),
        tuple(tensors),
        sum(one["differing"] for one in tensors),
        progress.total(),
    )


def _environments(record: Embedded, made: Embedded) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What bytes depend on, as recorded, None where on no machine, and here."""
    here = provenance.environment()
    if record.environment is None:
        return None, here
    recorded = dict(record.environment)
    matmuls = [(one.calibration or {}).get("precision", "float32") for one in (record, made)]
    if matmuls[0] != matmuls[1]:
        recorded["matmuls"], here["matmuls"] = matmuls
    return recorded, here


def _tensors(found: Diff) -> list[dict[str, Any]]:
    """Tensors that differ: how many of their codes, blocks or numbers."""
    rows = []
    for one in found.tensors:
        count, what = one.differing_codes, "codes"
        if count is None:
            count, what = one.differing_blocks, "blocks"
        if count is None:
            count, what = (one.numbers.differing if one.numbers is not None else 0), "numbers"
        rows.append({"name": one.name, "differing": count, "of": what})
    return rows


def same_bytes(first: Path, second: Path, at_once: int = 1 << 22) -> bool:
    """Whether two files hold the same."""
    if first.stat().st_size != second.stat().st_size:
        return False
    with first.open("rb") as one, second.open("rb") as other:
        while piece := one.read(at_once):
            if piece != other.read(at_once):
                return False
    return True
