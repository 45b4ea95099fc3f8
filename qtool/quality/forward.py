"""The last hidden states of a text's windows, block by block, and the logits they lead to.

On a device, quantized matrices are copied as they are stored and dequantized there.

Hidden states are [windows, length, width] in float32; logits exist for a few positions at a time.
Those of a reference model are kept in a cache, by the digest of the model and of the tokens, since
many artifacts are measured against one model.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.placed import Calls, ahead, passed
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cuda.device import Device
from qtool.errors import SourceError
from qtool.messages.progress import Progress
from qtool.quality.reading import reading_onto
from qtool.quality.rounded_inputs import Activations
from qtool.streaming.reading import Reading
from qtool.streaming.skeleton import MICRO_BATCH_TOKENS, Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers

Logits = Callable[[torch.Tensor], torch.Tensor]
_CACHE_FORMAT = "2"
_TOGETHER = 512  # tokens that one thread computes at a time: small shares are fair shares
_CACHE_BYTES = 4 << 30
_PART = ".part"
_UNFINISHED_SECONDS = 24 * 3600  # nobody is still writing a file as old as this


@dataclass(frozen=True)
class Forward:
    """A model and what it makes of the windows before its final norm."""

    skeleton: Skeleton
    hidden: torch.Tensor  # [windows, length, width] float32
    rounded: Activations
    reading: Reading  # to where the head goes
    cached: str | None = None  # where hidden states are kept, for people

    @contextmanager
    def logits(self) -> Iterator[Logits]:
        """Within, a function: hidden [n, positions, width] -> logits [n, positions, vocabulary]."""
        with self.skeleton.open_head(self.reading) as head, self.rounded.outside(self.skeleton):
            yield head


def forward(
    skeleton: Skeleton,
    rounded: Activations,
    tokens: NDArray[np.int64],
    threads: int,
    progress: Progress,
    *,
    keep: bool,
    device: Device | None = None,
    running: str | None = None,
) -> Forward:
    """Run all blocks over tokens [windows, length]; `keep`: through the cache.

    running: what is said before blocks are run, which they are not where the cache has it all.
    """
    weights = skeleton.checkpoint
    rounded = rounded.fitting(skeleton)
    reading = reading_onto(device, weights)
    place = _cached(weights, tokens, device) if keep else None
    if place is not None and (found := _read(place, tokens)) is not None:
        skeleton.embed(tokens[:1])  # finds out how this model hands over hidden states
        return Forward(skeleton, found, rounded, reading, f"taken from {place}")
    if running is not None:
        progress.say(running)
    with Workers(threads) as workers, ahead(skeleton, device, reading) as blocks:
        with rounded.outside(skeleton):
            stream = skeleton.embed(tokens, _TOGETHER if device is None else MICRO_BATCH_TOKENS)
        calls = None if device is None else Calls(stream.calls, device)
        for index in progress.blocks(skeleton.count):
            if device is None or calls is None:
                _advance(blocks.take(index), stream, rounded, workers)
            else:
                with passed(device, calls, stream) as (there, turn):
                    block = blocks.take(index)
                    _advance(block, there, rounded, turn)
                del block  # when it has been computed, and before the next but one is read
            if not all(bool(torch.isfinite(part).all()) for part in stream.hidden):
                raise SourceError(
                    f"{weights.path}: the output of block {index} is not finite on this text; the "
                    "model is broken, or overflows in float32"
                )
    hidden = torch.cat([stream.layout.hidden(states) for states in stream.hidden])
    kept = place is not None and _write(place, hidden)
    said = f"kept in {place}, {hidden.nbytes / 1e6:.0f} MB" if kept else None
    return Forward(skeleton, hidden, rounded, reading, said)


def _advance(block: LoadedBlock, stream: Stream, rounded: Activations, workers: Workers) -> None:
    """Replace the stream's states by those behind the block."""

    def step(number: int) -> None:
        with rounded.inside(block):
            output = block.passed(stream.hidden[number], stream.calls[block.index][number])
        stream.hidden[number] = output

    workers.map(step, range(len(stream.hidden)))


def cache_folder() -> Path:
    """Where hidden states of references are kept; QTOOL_CACHE, or qtool in the user's cache."""
    given = os.environ.get("QTOOL_CACHE")
    if given:
        return Path(given) / "reference"
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "qtool" / "reference"


def _cached(weights: Weights, tokens: NDArray[np.int64], device: Device | None) -> Path | None:
    if not isinstance(weights, Checkpoint):
        return None
    # transformers' modelling code computes the numbers, torch runs it, on whichever device.
    versions = [_CACHE_FORMAT, str(torch.__version__), version("transformers")]
    versions += [] if device is None else [device.name]
    said = "\0".join((*versions, weights.digest(), str(tokens.shape)))
    key = hashlib.sha256(said.encode() + tokens.astype("<i8").tobytes()).hexdigest()
    return cache_folder() / f"{key[:32]}.npy"


def _read(place: Path, tokens: NDArray[np.int64]) -> torch.Tensor | None:
    try:
        found = np.load(place, allow_pickle=False)
        place.touch()
    except (OSError, ValueError, EOFError):
        return None
    if found.dtype != np.float32 or found.ndim != 3 or found.shape[:2] != tokens.shape:
        return None
    return torch.from_numpy(found)


def _write(place: Path, hidden: torch.Tensor) -> bool:
    """Whether they are kept now: an evaluation does not fail for a cache that cannot be written.

    The folder is held to _CACHE_BYTES; what was not used for longest goes first.
    """
    if hidden.nbytes > _CACHE_BYTES:
        return False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _forget_unfinished(place.parent)
        descriptor, name = tempfile.mkstemp(dir=place.parent, suffix=_PART)
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.save(file, hidden.numpy())
            os.replace(name, place)
        except BaseException:  # a full disk, or the user's interrupt
            Path(name).unlink(missing_ok=True)
            raise
        old = sorted(place.parent.glob("*.npy"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in old)
        for path in old[:-1]:
            if total <= _CACHE_BYTES:
                break
            total -= path.stat().st_size
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _forget_unfinished(folder: Path) -> None:
    """Removes what a run left that was killed while it wrote."""
    for path in folder.glob(f"*{_PART}"):
        if time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS:
            path.unlink(missing_ok=True)
