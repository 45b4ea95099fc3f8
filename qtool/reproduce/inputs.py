"""Whether what an artifact was made of is what is there now, and measuring it again."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import all_apart
from qtool.checkpoints.gguf_models import is_gguf
from qtool.converting.source import opened
from qtool.errors import SourceError, UnsupportedError
from qtool.messages.progress import Progress
from qtool.provenance.embedded import Embedded
from qtool.provenance.statement import source_files
from qtool.recipe.file import said_of
from qtool.recipe.recipe import Calibration, Recipe, parse

_FILE = "file"  # what a record calls a text of the user's


def check_source(record: Embedded, source: Path, model: str) -> None:
    """SourceError, naming the files, where the source is not the one of the record.

    Of a GGUF artifact that is known when its weights have been read: check_weights().
    """
    if record.digest is None or is_gguf(source):
        return
    checkpoint = Checkpoint.open(source)
    if f"sha256:{checkpoint.digest()}" == record.digest:
        return
    found = checkpoint.file_digests
    known = {name: said.removeprefix("sha256:") for name, said in record.files.items()}
    known = known or source_files(record.path)
    changed = [name for name in known if name in found and found[name] != known[name]]
    gone = sorted(known.keys() - found.keys())
    added = sorted(found.keys() - known.keys()) if known else []
    said = [f"{name} has other bytes" for name in changed]
    said += [f"{name} is not there" for name in gone] + [f"{name} is new" for name in added]
    raise SourceError(
        f"{model}: is not what {record.path} was made of: "
        f"{', '.join(said[:4]) or 'its digest is another one'}; recorded is {record.digest}, "
        f"found sha256:{checkpoint.digest()}"
    )


def check_weights(record: Embedded, made: Embedded, model: str) -> None:
    """SourceError where a GGUF file was made of other weights than the one of the record."""
    if record.checksum != made.checksum:
        raise SourceError(
            f"{model}: its weights are not those that {record.path} was made of: their checksum "
            f"is {made.checksum}, recorded is {record.checksum}"
        )


def check_tokens(record: Embedded, made: Embedded) -> None:
    """SourceError where a GGUF file was calibrated on other tokens than the one of the record."""
    known, found = ((one.calibration or {}).get("digest") for one in (record, made))
    if known is not None and known != found:
        raise _other_tokens(record, str(known), str(found))


def text_of(record: Embedded, calibration: Path | None) -> str | None:
    """The text to calibrate on; SourceError where the record says `file` and none is given.

    None where an importance matrix was given: the text is what that was measured on, not the
    recipe's; and where nothing was measured on any.
    """
    if record.imatrix is not None or record.calibration is None:
        return None
    if calibration is not None:
        return str(calibration)
    if (record.calibration or {}).get("source") == _FILE:
        raise _no_text(record)
    return None


def _no_text(record: Embedded) -> SourceError:
    return SourceError(
        f"{record.path}: was calibrated on a file, whose place is not recorded; say where it is "
        "with --calibration FILE"
    )


def check_calibration(record: Embedded, recipe: Recipe, folder: Path) -> None:
    """SourceError where the text gives other tokens than it did, before hours of work."""
    from qtool.texts.calibration import calibration_tokens

    if record.calibration is None or not recipe.calibrates:
        return
    known = record.calibration.get("digest")
    with _long_enough(record):
        found = f"sha256:{calibration_tokens(recipe.calibration, folder).digest}"
    if known != found:
        raise _other_tokens(record, str(known), found)


@contextmanager
def _long_enough(record: Embedded) -> Iterator[None]:
    """A text that is too short for the samples of the record is not the one of the record."""
    from qtool.texts.mixture import TooShortError

    try:
        yield
    except TooShortError:
        known = record.calibration or {}
        raise SourceError(
            f"{record.path}: was calibrated on another text: this one is too short for the "
            f"{known.get('samples')} samples of {known.get('length')} tokens that it was "
            "calibrated on; --calibration names the text that it was"
        ) from None


def _other_tokens(record: Embedded, known: str, found: str) -> SourceError:
    return SourceError(
        f"{record.path}: was calibrated on another text: this one gives other tokens than it did "
        f"({found}, recorded is {known}): it has changed, or --calibration names a wrong one"
    )


def measure(
    record: Embedded,
    recipe: Recipe,
    folder: Path,
    out: Path,
    calibration: Path | None,
    threads: int,
) -> None:
    """The statistics that `--stats` was given."""
    from qtool.blockwise.given import recipe_needs
    from qtool.quantizing.calibrate import VECTORS, calibrate

    needs = VECTORS | recipe_needs(recipe)
    settings = _settings(record, calibration)
    view = all_apart(opened(folder, record.requantized))
    calibrate(view, out, settings, needs, threads, Progress(quiet=True))


def importance(
    record: Embedded, source: Path, made: Path, calibration: Path | None, threads: int
) -> Path:
    """The importance matrix that `--imatrix` was given, measured as then.

    `calibrate --imatrix` puts BOS at the place of each first token, `calibrate -o ... --imatrix`
    does not; the digest of the tokens tells which it was.
    """
    from qtool.gguf.importance.measured import begin_with_bos
    from qtool.quantizing import calibrate as measuring
    from qtool.texts.calibration import calibration_tokens

    name = record.imatrix or ""
    if record.calibration is None or Path(name).name != name:
        raise UnsupportedError(
            f"{record.path}: was made with the importance matrix {name[:80]!r}, which says nothing "
            "of how it was measured; give it again with --imatrix FILE"
        )
    if record.calibration.get("source") == _FILE and calibration is None:
        raise _no_text(record)
    settings = _settings(record, calibration)
    # In a folder of its own: its name, which the artifact has, may be the artifact's, too.
    out = made.parent / "importance" / name
    out.parent.mkdir()
    with measuring.opened(source, out, record.requantized) as (model, target):
        assert target is not None
        with _long_enough(record):
            plain = calibration_tokens(settings, model.folder)
        digests = {
            f"sha256:{begin_with_bos(plain, target.source).digest}": None,
            f"sha256:{plain.digest}": made.with_name("statistics"),
        }
        known = str(record.calibration.get("digest"))
        if known not in digests:
            raise _other_tokens(record, known, f"sha256:{plain.digest}")
        # Equal digests mean that there is no BOS to put: either way is the same then.
        stats = None if next(iter(digests)) == known else digests[known]
        quiet = Progress(quiet=True)
        needs = frozenset({"mean_abs"}) if stats is not None else frozenset[str]()
        measuring.calibrate(model, stats, settings, needs, threads, quiet, target)
        if stats is not None:
            stats.unlink()
    return out


def _settings(record: Embedded, calibration: Path | None) -> Calibration:
    """How it was calibrated, with the text that the user names now."""
    known: Mapping[str, Any] = record.calibration or {}
    keys = {key: known.get(key) for key in ("source", "samples", "length", "seed")}
    keys |= said_of(known.get("precision", "float32"))
    if calibration is not None:
        keys["source"] = str(calibration)
    sets = [f"calibration.{key}={json.dumps(value)}" for key, value in keys.items()]
    name = f"{record.path}: its calibration"
    return parse("method: none\nformat: dense\n", name, "calibration", sets).calibration
