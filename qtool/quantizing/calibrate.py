"""`qtool calibrate`: statistics of the unquantized model in a file that serves many recipes.

And llama.cpp's importance matrix, which is made of the sums of squares among them.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.calibrating.groups import groups_of
from qtool.calibrating.placed import Passage, ahead
from qtool.calibrating.sites import Site, Tracer
from qtool.calibrating.stats import SiteStats
from qtool.calibrating.stats import Weights as Counts
from qtool.calibrating.stats_file import StatsWriter
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import all_apart, apart
from qtool.checkpoints.gguf_models import is_gguf
from qtool.checkpoints.structure import packed
from qtool.converting.source import opened as source_of
from qtool.cuda.device import Device
from qtool.errors import SourceError, UnsupportedError
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.importance.imatrix import write_importance
from qtool.gguf.importance.measured import Gathered, Squares, begin_with_bos, first_token
from qtool.gguf.open import open_source
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.messages.progress import Progress
from qtool.quantizing.named import (
    BESIDE,
    Measured,
    check_absent,
    facts_of,
    keep_both,
    measured_before,
    measured_both,
    name_imatrix,
    place,
)
from qtool.recipe.recipe import Calibration as Settings
from qtool.streaming.allocator import give_back
from qtool.streaming.precision import settled
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers
from qtool.texts.calibration import Calibration, calibration_tokens
from qtool.workspaces.already import SAID, AlreadyMade, seen
from qtool.workspaces.workspace import Workspace

if TYPE_CHECKING:
    from qtool.quantizing.gguf.gptq.sweeping import Sweeping
    from qtool.quantizing.gguf.scaling import Scaling

VECTORS = frozenset({"mean_abs", "max_abs"})
SQUARE = frozenset({"square"})
SWEEP = frozenset({"gram", "square"})
_NO_BOS = (
    "measured together with -o, on chunks without the BOS token that llama-imatrix begins them "
    "with; --imatrix alone has it"
)


@dataclass(frozen=True)
class ImportanceFile:
    """An importance matrix to write, and the tensors as llama.cpp names them."""

    path: Path
    source: GgufSource


@contextmanager
def opened(
    path: Path, imatrix: Path | None, requantize: bool = False
) -> Iterator[tuple[Weights, ImportanceFile | None]]:
    """The model to run, a folder or a GGUF file, and the importance matrix to write."""
    if is_gguf(path):
        with gguf_weights(open_source(path)) as (weights, source):
            yield weights, None if imatrix is None else ImportanceFile(imatrix, source)
    else:
        # Under the names that recipes quantize them by, whichever of them are.
        checkpoint = source_of(path, requantize)
        view = all_apart(checkpoint)
        from qtool.quality.weights import runnable

        runs = runnable(view)
        if runs is view and (codes := packed(checkpoint.tensors)) is not None:
            raise SourceError(
                f"{path}: this checkpoint is quantized ({codes}); measure the one that it was made "
                "from or, where there is none, give --requantize, or take what `qtool convert "
                "MODEL --to hf` makes of it"
            )
        yield (
            runs,
            None if imatrix is None else ImportanceFile(imatrix, hf_source(apart(checkpoint))),
        )


def calibrate(
    model: Weights,
    out: Path | None,
    settings: Settings,
    needs: frozenset[str],
    threads: int,
    progress: Progress,
    imatrix: ImportanceFile | None = None,
    device: Device | None = None,
) -> Measured:
    """Stream the original model once and write `needs` of every input of every block to `out`.

    imatrix: an importance matrix made in the same pass. Without `out` its tokens are those of
    measure_importance; with it they are the same as ever, so that the statistics are, too. device:
    where blocks are run, which the files name; None: the CPU.
    """
    try:
        return _calibrate(model, out, settings, needs, threads, progress, imatrix, device)
    except AlreadyMade as found:
        progress.say(f"note: {SAID}")
        return measured_before(found.made)


def _calibrate(
    model: Weights,
    out: Path | None,
    settings: Settings,
    needs: frozenset[str],
    threads: int,
    progress: Progress,
    imatrix: ImportanceFile | None,
    device: Device | None,
) -> Measured:
    path = None if imatrix is None else imatrix.path
    check_absent(out, path)
    if out is not None and not isinstance(model, Checkpoint):
        what, way = "this is GGUF", ""
        if not is_gguf(model.path):
            what = "this one has experts in MXFP4"
            way = ", and `qtool convert MODEL --to hf` makes a plain one of it"
        raise UnsupportedError(
            f"{model.path}: -o measures for recipes that quantize a Hugging Face checkpoint, and "
            f"{what}; --imatrix OUT.gguf alone measures what GGUF recipes need{way}"
        )
    gpu = None if device is None else device.name
    with progress.stage("calibrate"), ExitStack() as stack:
        precision = settled(settings.precision, device, progress)
        calibration = calibration_tokens(settings, model.folder, progress)
        calibration = replace(calibration, precision=precision)
        if imatrix is not None and out is None:
            calibration = begin_with_bos(calibration, imatrix.source)
        facts = facts_of(model.path, calibration.record(), needs, gpu, out, path)
        space = stack.enter_context(place(model.path, out, path, facts))
        space.agree(facts)
        both = out is not None and path is not None
        made = measured_both(space) if both else None
        if made is None:
            made = _made(model, out, calibration, needs, threads, progress, imatrix, device, space)
            if both:
                keep_both(space, made)
            elif made.importance is not None:
                write_importance(space.artifact, made.importance)
        else:
            progress.say("going on with an earlier run: all is measured")
        beside = {}
        if both and path is not None:
            name_imatrix(space, path)
            beside = {BESIDE: seen(path)}
        space.conclude({**made.json(), **beside})
    return made


def _made(
    model: Weights,
    out: Path | None,
    calibration: Calibration,
    needs: frozenset[str],
    threads: int,
    progress: Progress,
    imatrix: ImportanceFile | None,
    device: Device | None,
    space: Workspace,
) -> Measured:
    """What is measured, the statistics in the file that they are made in."""
    skeleton = Skeleton.open(model)
    gpu = None if device is None else device.name
    gathered = Gathered()
    unseen: list[str] = []
    wanted = needs | {"square"} if imatrix is not None else needs
    sites = 0
    stacked = imatrix is not None
    with ExitStack() as stack:
        writer = None
        if out is not None and isinstance(model, Checkpoint):
            metadata = {
                "model_digest": model.digest(),
                "calibration": json.dumps(calibration.record()),
            }
            if gpu is not None:
                metadata["gpu"] = gpu
            tensors = sum(len(skeleton.block_tensors(i)) for i in range(skeleton.count))
            writer = stack.enter_context(StatsWriter(space.artifact, metadata, tensors))
        for site, stats in _measured(
            skeleton, calibration, wanted, threads, progress, stacked, device
        ):
            if imatrix is not None:
                gathered.add(Squares.of(site, stats))
            if site.stacked:
                continue
            sites += 1
            if writer is not None:
                writer.add(site, stats if "square" in needs else replace(stats, square=None))
            if not stats.count:
                unseen.append(site.id)
    importance = None
    notes: list[str] = []
    if imatrix is not None:
        importance = gathered.importance(imatrix.source, calibration, gpu)
        notes = importance.notes()
        if out is not None and first_token(imatrix.source) is not None:
            notes.append(_NO_BOS)
    record = None if importance is None else importance.record()
    return Measured(sites, calibration.tokens.size, tuple(unseen), importance, tuple(notes), record)


def _measured(
    skeleton: Skeleton,
    calibration: Calibration,
    needs: frozenset[str],
    threads: int,
    progress: Progress,
    stacked: bool,
    device: Device | None,
) -> Iterator[tuple[Site, SiteStats]]:
    """Every site of every block with its statistics, block after block; see Tracer.stacked."""
    with Workers(threads) as workers, ahead(skeleton, device) as coming:
        stream = skeleton.embed(calibration.tokens)
        passage = Passage.of(stream, workers, device, calibration.precision)
        tracer = Tracer(stacked)
        for index in progress.blocks(skeleton.count):
            give_back()
            yield from measure_block(skeleton, coming.take(index), passage, tracer, needs)


def measure_block(
    skeleton: Skeleton,
    block: LoadedBlock,
    passage: Passage,
    tracer: Tracer,
    needs: frozenset[str],
    scaling: "Scaling | None" = None,
    sweeping: "Sweeping | None" = None,
) -> Iterator[tuple[Site, SiteStats]]:
    """Every site of one block, scaled and quantized where that is asked for; the stream is then
    before the next one."""
    seen: dict[str, SiteStats] = {}
    found = tracer.sites(block, passage.stream)
    counts: Counts = {}
    if sweeping is not None and sweeping.guidance is not None:
        counts = sweeping.guidance.weights(block, passage, found)
    if scaling is not None:
        own = SWEEP if sweeping is not None else frozenset[str]()
        seen = scaling.scale(block, passage, own, counts)
    more = block.index + 1 < skeleton.count
    if sweeping is not None:
        yield from sweeping.block(block, passage, found, seen, counts)
        if more or sweeping.awaits_head:
            with passage.placed(block) as (there, stream, workers):
                skeleton.advance(there, stream, workers)
        return
    groups = [list(found.sites)]
    if passage.device is not None and "gram" in needs:
        groups = groups_of(found.sites, passage.device.sums_bytes)
    for number, group in enumerate(groups, start=1):
        last = number == len(groups)
        stats = passage.collect(block, group, needs, advance=more and last)
        for site in group:
            yield site, stats.pop(site.id)
