"""`qtool calibrate`: statistics of the unquantized model in a file that serves many recipes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.calibration import TOPICS, Calibration, calibration_tokens
from qtool.checkpoint import Checkpoint
from qtool.errors import FormatError, SourceError
from qtool.formats import safetensors_file as st
from qtool.progress import Progress
from qtool.recipe import Calibration as Settings
from qtool.sites import Tracer
from qtool.stats import StatsFile, StatsWriter, collect
from qtool.stream import Skeleton, Workers

VECTORS = frozenset({"mean_abs", "max_abs"})
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Measured:
    """What was written."""

    sites: int
    tokens: int
    unseen: tuple[str, ...]  # experts that no token was routed to


def calibrate(
    checkpoint: Checkpoint,
    out: Path,
    settings: Settings,
    needs: frozenset[str],
    threads: int,
    progress: Progress,
) -> Measured:
    """Stream the original model once and write `needs` of every input of every block."""
    if out.exists():
        raise SourceError(f"{out}: exists; remove it or choose another -o")
    with progress.stage("calibrate"), Workers(threads) as workers:
        calibration = calibration_tokens(settings, checkpoint.folder)
        skeleton = Skeleton.open(checkpoint)
        stream = skeleton.embed(calibration.tokens)
        tokens = stream.tokens
        metadata = {
            "model_digest": checkpoint.digest(),
            "calibration": json.dumps(calibration.record()),
        }
        sites = 0
        unseen: list[str] = []
        tracer = Tracer()
        with StatsWriter(out, metadata, sum(map(len, _tensors(skeleton)))) as writer:
            for index in progress.blocks(skeleton.count):
                block = skeleton.block(index)
                found = tracer.sites(block, stream)
                measured = collect(block, stream, found.sites, needs, workers)
                for site in found.sites:
                    writer.add(site, measured[site.id])
                    if not measured[site.id].count:
                        unseen.append(site.id)
                sites += len(found.sites)
                if index + 1 < skeleton.count:
                    skeleton.advance(block, stream, workers)
    return Measured(sites, tokens, tuple(unseen))


def _tensors(skeleton: Skeleton) -> Sequence[tuple[str, ...]]:
    return [skeleton.block_tensors(index) for index in range(skeleton.count)]


def check_same_model(saved: StatsFile, checkpoint: Checkpoint) -> dict[str, Any]:
    """The calibration record of a statistics file; SourceError where it is of another model."""
    if saved.metadata.get("model_digest") != checkpoint.digest():
        raise SourceError(
            f"{saved.path}: the statistics are of another model than {checkpoint.path}; run "
            "`qtool calibrate MODEL -o STATS` on this one"
        )
    where = f"{saved.path}: calibration"
    record = st.parse_json(saved.metadata.get("calibration", "").encode(), where)
    for key, kind in (("source", str), ("samples", int), ("length", int), ("seed", int)):
        if not isinstance(record.get(key), kind):
            raise FormatError(
                f"{where}: {key} is {json.dumps(record.get(key))[:50]}; write the file again with "
                "`qtool calibrate`"
            )
    return record


def probe(checkpoint: Checkpoint) -> Calibration:
    """A few tokens that every machine has, to run a block on."""
    settings = Settings(source=TOPICS, samples=1, length=_PROBE_TOKENS, seed=0)
    return calibration_tokens(settings, checkpoint.folder)
