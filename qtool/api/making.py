"""What makes something of a model: an artifact, a recipe, another format. See qtool.api."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.api.common import path_of, refuse_less, threads_as_before

if TYPE_CHECKING:
    from qtool.converting.certificate import Converted
    from qtool.fitting.request import Fitted
    from qtool.generating.sample import Sampled
    from qtool.messages.progress import Progress
    from qtool.messages.summary import Summary


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
    from qtool.formats.safetensors_file import parse_size
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.quantizing.quantize import Asked
    from qtool.quantizing.quantize import quantize as run
    from qtool.recipe.recipe import calibration_sets, load
    from qtool.runs.request import check_device, check_names
    from qtool.streaming.allocator import share_heap

    check_device(device)
    check_names(model, recipe, out, calibration, stats, imatrix)
    refuse_less(threads=(threads, 1))
    calibration = None if calibration is None else str(calibration)
    if isinstance(changes, str):  # its letters would be taken for items
        changes = [changes]
    share_heap()
    fixed = {"calibration": calibration, "samples": samples, "length": length, "seed": seed}
    given = [f"--{name}" for name, value in fixed.items() if value is not None]
    given += [f"--set {item}" for item in changes if item.startswith("calibration.")]
    asked = Asked(
        str(model),
        path_of(out),
        path_of(stats),
        path_of(imatrix),
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
    progress = progress or Progress(quiet=quiet, log=path_of(log_file))
    with progress.logged("quantize", model=asked.model, recipe=loaded.name), threads_as_before():
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
    from qtool.fitting.request import fit_request
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.runs.request import check_names
    from qtool.streaming.allocator import share_heap

    check_names(model, recipe, out, calibration, costs)
    refuse_less(threads=(threads, 1))
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
        costs=path_of(costs),
        threads=threads or default_threads(),
        max_ram=None if max_ram is None else str(max_ram),
        fresh=fresh,
        requantize=requantize,
        progress=progress,
        device=device,
    )
    from qtool.fitting.fit import fit as run  # torch: what can be told before is

    with threads_as_before():
        return run(request, progress)


def convert(
    artifact: str | Path,
    to: str,
    out: str | Path,
    *,
    lossy: bool = False,
    dtype: str | None = None,
    assume: str | None = None,
    max_shard_size: str | int = "5GB",
    replace: bool = False,
    fresh: bool = False,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Converted:
    """Write an artifact in another format without changing a number, as `qtool convert` does.

    Returns what was written: `artifact`, `size_bytes`, `certificate`, `warnings` and `json()`, the
    object of `qtool convert --json`.
    """
    from qtool.converting.request import Request, check_choices
    from qtool.converting.run import convert as run
    from qtool.converting.targets import target
    from qtool.formats.safetensors_file import parse_size
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.runs.request import check_names

    check_names(artifact, out)
    check_choices(dtype, assume)
    progress = progress or Progress(quiet=quiet)
    request = Request(
        source=resolve(str(artifact), progress),
        target=target(to),
        out=Path(out),
        lossy=lossy,
        dtype=dtype,
        assume=assume,
        max_shard_bytes=parse_size(str(max_shard_size), "--max-shard-size"),
        replaces=replace,
        fresh=fresh,
    )
    return run(request, progress)


def sample(
    model: str | Path,
    out: str | Path,
    *,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    fresh: bool = False,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Sampled:
    """Let a model write a text to calibrate it on, as `qtool sample` does.

    Returns what was written: `out`, `texts`, `tokens` and `json()`, the object of `qtool sample
    --json`.
    """
    refuse_less(samples=(samples, 1), length=(length, 8), seed=(seed, 0), threads=(threads, 1))
    import torch

    from qtool.cuda.device import explained
    from qtool.errors import UsageError
    from qtool.generating.sample import Sampling
    from qtool.generating.sample import sample as run
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.native.library import default_threads
    from qtool.runs.request import check_names, device_of
    from qtool.workspaces.leftovers import check_free

    check_names(model, out)
    if seed >= 2**32:
        raise UsageError(f"seed {seed}: expected less than {2**32:,}")
    if Path(out).suffix.lower() not in (".jsonl", ".ndjson"):
        raise UsageError(f"-o {out}: the texts are lines of JSON; name it {out}.jsonl")
    # Before a download that may take hours.
    check_free(Path(out), is_folder=False, again=not fresh)
    place = device_of(device, ways_back=False)
    progress = progress or Progress(quiet=quiet)
    with progress.stage("download"):
        path = resolve(str(model), progress)
    sampling = Sampling(samples, length, seed)
    # Without share_heap(): keys and values grow by a copy each step, which come from the heap.
    with threads_as_before(), explained(place, "the model"):
        torch.set_num_threads(threads or default_threads())
        return run(path, Path(out), sampling, place, progress, model=str(model), fresh=fresh)


def download(
    model: str, include: Sequence[str] = (), *, quiet: bool = True, progress: Progress | None = None
) -> Path:
    """Bring a model of the hub into its cache, as `qtool download` does; its folder, or file."""
    from qtool.hub.asked import asked
    from qtool.messages.progress import Progress

    found = asked(model, include, progress or Progress(quiet=quiet))
    return found.named or found.folder
