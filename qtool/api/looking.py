"""What looks at a model or an artifact, and writes nothing. See qtool.api."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.api.common import path_of, refuse_less, refuse_ranks, threads_as_before

if TYPE_CHECKING:
    from qtool.generating.generate import Generated
    from qtool.messages.progress import Progress
    from qtool.quality.evaluate import Evaluation
    from qtool.quantizing.plan import Foreseen
    from qtool.report.compared import Compared
    from qtool.verification.finding import Verdict


def plan(
    model: str | Path,
    recipe: str | Path,
    *,
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    changes: Sequence[str] = (),
    imatrix: str | Path | None = None,
    requantize: bool = False,
    threads: int | None = None,
    max_ram: str | int | None = None,
    max_shard_size: str | int | None = None,
    engine: str | None = None,
    tp: int = 1,
) -> Foreseen:
    """What a recipe would make of a model, as `qtool plan` says it: from headers alone.

    Returns `size_bytes`, `bits_per_weight`, `warnings`, `plan`, of the engine that is named
    `findings`, and `json()`, the object of `qtool plan --json`.
    """
    from qtool.formats.safetensors_file import parse_size
    from qtool.quantizing.plan import Asked, foresee
    from qtool.runs.request import check_names

    check_names(model, recipe, calibration, imatrix)
    refuse_less(threads=(threads, 1), samples=(samples, 1), length=(length, 1), tp=(tp, 1))
    refuse_ranks(engine, tp)
    asked = Asked(
        str(model),
        str(recipe),
        (changes,) if isinstance(changes, str) else tuple(changes),
        None if calibration is None else str(calibration),
        samples,
        length,
        None if max_shard_size is None else str(max_shard_size),
        path_of(imatrix),
        requantize,
        threads,
        None if max_ram is None else parse_size(str(max_ram), "--max-ram"),
        _engine(engine),
        tp,
    )
    return foresee(asked)


def _engine(name: str | None) -> str | None:
    """As the table of engines has it, whatever case it is typed in."""
    return None if name is None else name.lower()


def verify(
    artifact: str | Path,
    *,
    against: str | Path | None = None,
    engine: str | None = None,
    tp: int = 1,
    threads: int | None = None,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Verdict:
    """Whether an artifact is whole and sane, and how far it is from its source, as `qtool verify`
    does.

    Returns a verdict: `ok`, `findings`, `layers` and `json()`, the object of `qtool verify --json`.
    """
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.runs.request import check_names
    from qtool.streaming.allocator import share_heap
    from qtool.verification.run import verify_artifact

    check_names(artifact, against)
    refuse_less(threads=(threads, 1), tp=(tp, 1))
    refuse_ranks(engine, tp)
    share_heap()
    progress = progress or Progress(quiet=quiet)
    with threads_as_before():
        return verify_artifact(
            resolve(str(artifact), progress),
            against=None if against is None else resolve(str(against), progress),
            engine=_engine(engine),
            tp=tp,
            progress=progress,
            threads=threads,
        )


def evaluate(
    artifact: str | Path,
    text: str | Path,
    *,
    against: str | Path | None = None,
    windows: int | None = None,
    length: int = 512,
    protocol: str = "plain",
    threads: int | None = None,
    cache: bool = True,
    device: str = "auto",
    quiet: bool = True,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure an artifact on a text, as `qtool eval` does: `found` has the figures by name."""
    refuse_less(windows=(windows, 1), length=(length, 8), threads=(threads, 1))
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.cuda.device import explained
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.quality.evaluate import Protocol, check_protocol
    from qtool.quality.evaluate import evaluate as run
    from qtool.runs.request import device_of
    from qtool.texts.source import text_file

    chosen = Protocol(protocol, text_file(text), windows, length)
    check_protocol(chosen)
    place = device_of(device, ways_back=False)
    progress = progress or Progress(quiet=quiet)
    reference = None if against is None else resolve(str(against), progress)
    with threads_as_before(), explained(place, "the head and its logits"):
        (found,) = run(
            [resolve(str(artifact), progress)],
            reference,
            chosen,
            threads or default_threads(),
            progress,
            cache=cache,
            device=place,
        )
    return found


def generate(
    artifact: str | Path,
    prompt: str,
    *,
    tokens: int = 32,
    device: str = "auto",
    threads: int | None = None,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Generated:
    """Let an artifact go on with a text, as `qtool generate` does."""
    refuse_less(tokens=(tokens, 1), threads=(threads, 1))
    from qtool.streaming.allocator import share_heap

    share_heap()
    import torch

    from qtool.cuda.device import explained
    from qtool.generating.generate import generate as run
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.runs.request import device_of

    place = device_of(device, ways_back=False)
    progress = progress or Progress(quiet=quiet)
    path = resolve(str(artifact), progress)
    with threads_as_before(), explained(place, "the model"):
        torch.set_num_threads(threads or default_threads())
        return run(path, prompt, tokens, place, progress)


def compare(
    artifacts: Sequence[str | Path],
    text: str | Path,
    *,
    against: str | Path,
    windows: int | None = None,
    length: int = 512,
    protocol: str = "plain",
    threads: int | None = None,
    cache: bool = True,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Compared:
    """Measure several artifacts of one model on a text, as `qtool compare` does.

    Returns `found`, an Evaluation each; `front`, the names of those that none of the others beats;
    `failed`, by path, those that could not be measured; and `json()`, the object of `qtool compare
    --json`.
    """
    refuse_less(windows=(windows, 1), length=(length, 8), threads=(threads, 1))
    from qtool.streaming.allocator import share_heap

    share_heap()
    from qtool.errors import QtoolError, UsageError
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.quality.evaluate import Protocol, check_protocol
    from qtool.quality.evaluate import evaluate as run
    from qtool.report.compared import Compared
    from qtool.runs.request import check_names
    from qtool.texts.source import text_file

    artifacts = [artifacts] if isinstance(artifacts, str | Path) else [*artifacts]
    if not artifacts:
        raise UsageError("artifacts: none are named")
    check_names(*artifacts, against)
    chosen = Protocol(protocol, text_file(text), windows, length)
    check_protocol(chosen)
    progress = progress or Progress(quiet=quiet)
    failed: dict[Path, QtoolError] = {}
    with threads_as_before():
        found = run(
            [*dict.fromkeys(resolve(str(one), progress) for one in artifacts)],
            resolve(str(against), progress),
            chosen,
            threads or default_threads(),
            progress,
            cache=cache,
            failed=failed,
        )
    return Compared(str(against), tuple(found), failed)
