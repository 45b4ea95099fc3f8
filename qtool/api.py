"""qtool from Python: the functions that the commands call, with their arguments by name.

    import qtool

    made = qtool.quantize("tiny", "w4g128-awq", out="tiny-awq")
    model = qtool.open(made.artifact)
    weight = model.float32("model.layers.0.mlp.up_proj.weight")
    found = qtool.evaluate(made.artifact, text="text.txt", against="tiny")

A MODEL is what the commands take: a folder, a file, a hub id, an alias. Errors are QtoolErrors (see
qtool.errors), whose text says what to do. Nothing is printed unless `quiet=False`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.opened import Model, open

if TYPE_CHECKING:
    from qtool.fitting.request import Fitted
    from qtool.generating.generate import Generated
    from qtool.quality.evaluate import Evaluation
    from qtool.runs.progress import Progress
    from qtool.runs.summary import Summary

__all__ = ["Model", "download", "evaluate", "fit", "generate", "open", "quantize"]


def quantize(
    model: str | Path,
    recipe: str | Path,
    out: str | Path | None = None,
    *,
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    changes: Sequence[str] = (),
    stats: str | Path | None = None,
    threads: int | None = None,
    max_ram: str | int | None = None,
    max_shard_size: str | None = None,
    imatrix: str | Path | None = None,
    requantize: bool = False,
    fresh: bool = False,
    modelfile: bool = False,
    provenance: bool = False,
    device: str = "auto",
    replace: bool = False,
    log_file: str | Path | None = None,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Summary:
    """Make an artifact of a model, as `qtool quantize` does; `changes` are its --set.

    Returns what was made: `artifact`, `format`, `size_bytes`, `layers` with their errors, and
    `json()`, the object of `qtool quantize --json`.
    """
    from qtool.calibrating.allocator import share_heap
    from qtool.formats.safetensors_file import parse_size
    from qtool.native.library import default_threads
    from qtool.recipe.recipe import calibration_sets, load
    from qtool.runs.progress import Progress
    from qtool.runs.quantize import Asked
    from qtool.runs.quantize import quantize as run
    from qtool.runs.request import check_device, check_names

    check_device(device)
    check_names(model, recipe, out, calibration, stats, imatrix)
    _refuse_less(threads=(threads, 1))
    calibration = None if calibration is None else str(calibration)
    if isinstance(changes, str):  # its letters would be taken for items
        changes = [changes]
    share_heap()
    fixed = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    given = [f"--{name}" for name, value in fixed.items() if value is not None]
    given += [f"--set {item}" for item in changes if item.startswith("calibration.")]
    asked = Asked(
        str(model),
        _path(out),
        _path(stats),
        _path(imatrix),
        max_shard_size,
        requantize,
        fresh,
        threads or default_threads(),
        None if max_ram is None else parse_size(str(max_ram), "--max-ram"),
        given,
        modelfile,
        provenance,
        device,
        replace,
    )
    sets = [*changes, *calibration_sets(calibration, samples, length, seed)]
    loaded = load(str(recipe), sets)
    progress = progress or Progress(quiet=quiet, log=_path(log_file))
    with progress.logged("quantize", model=asked.model, recipe=loaded.name), _threads_as_before():
        return run(loaded, asked, progress)


def fit(
    model: str | Path,
    out: str | Path,
    recipe: str | Path = "q4_k_m-awq-gptq",
    *,
    size: str | int | None = None,
    bits: float | None = None,
    types: str | Sequence[str] | None = None,
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    changes: Sequence[str] = (),
    costs: str | Path | None = None,
    threads: int | None = None,
    max_ram: str | int | None = None,
    device: str = "auto",
    requantize: bool = False,
    fresh: bool = False,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Fitted:
    """Write to `out` the recipe that loses least in a `size`, such as "4.2GB", as `qtool fit` does.

    Returns what was chosen: `out`, `loss` in nats a token, `chosen` and `json()`, the object of
    `qtool fit --json`.
    """
    from qtool.calibrating.allocator import share_heap
    from qtool.fitting.fit import fit as run
    from qtool.fitting.request import fit_request
    from qtool.native.library import default_threads
    from qtool.runs.progress import Progress
    from qtool.runs.request import check_names

    check_names(model, recipe, out, calibration, costs)
    _refuse_less(threads=(threads, 1))
    share_heap()
    progress = progress or Progress(quiet=quiet)
    calibration = None if calibration is None else str(calibration)
    text = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    request = fit_request(
        str(model),
        str(recipe),
        Path(out),
        size=size,
        bits=bits,
        types=types,
        text=text,
        sets=[changes] if isinstance(changes, str) else list(changes),
        costs=_path(costs),
        threads=threads or default_threads(),
        max_ram=None if max_ram is None else str(max_ram),
        fresh=fresh,
        requantize=requantize,
        progress=progress,
        device=device,
    )
    with _threads_as_before():
        return run(request, progress)


def _refuse_less(**given: tuple[int | None, int]) -> None:
    """UsageError for an option, by name, that is less than the least of the command's."""
    from qtool.errors import UsageError

    for name, (value, least) in given.items():
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: expected {least} or more")


@contextmanager
def _threads_as_before() -> Iterator[None]:
    """The caller's number of torch's threads comes back after; the work has its own."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None and before is not None:
            torch.set_num_threads(before)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


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
    _refuse_less(windows=(windows, 1), length=(length, 8), threads=(threads, 1))
    from qtool.calibrating.allocator import share_heap

    share_heap()
    from qtool.calibrating.device import explained
    from qtool.hub import resolve
    from qtool.native.library import default_threads
    from qtool.quality.evaluate import Protocol, check_protocol
    from qtool.quality.evaluate import evaluate as run
    from qtool.runs.progress import Progress
    from qtool.runs.request import device_of

    chosen = Protocol(protocol, Path(text), windows, length)
    check_protocol(chosen)
    place = device_of(device, ways_back=False)
    progress = progress or Progress(quiet=quiet)
    reference = None if against is None else resolve(str(against), progress)
    with _threads_as_before(), explained(place, "the head and its logits"):
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
    _refuse_less(tokens=(tokens, 1), threads=(threads, 1))
    from qtool.calibrating.allocator import share_heap

    share_heap()
    import torch

    from qtool.calibrating.device import explained
    from qtool.generating.generate import generate as run
    from qtool.hub import resolve
    from qtool.native.library import default_threads
    from qtool.runs.progress import Progress
    from qtool.runs.request import device_of

    place = device_of(device, ways_back=False)
    progress = progress or Progress(quiet=quiet)
    path = resolve(str(artifact), progress)
    with _threads_as_before(), explained(place, "the model"):
        torch.set_num_threads(threads or default_threads())
        return run(path, prompt, tokens, place, progress)


def download(
    model: str, include: Sequence[str] = (), *, quiet: bool = True, progress: Progress | None = None
) -> Path:
    """Bring a model of the hub into its cache, as `qtool download` does; its folder, or file."""
    from qtool.hub.asked import asked
    from qtool.runs.progress import Progress

    found = asked(model, include, progress or Progress(quiet=quiet))
    return found.named or found.folder
