"""Text that a model writes by itself, to calibrate it on: no data, no licence, its own languages.

Every text begins with the token that begins one, and each that follows is drawn from what the model
predicts, hotter at first, so that texts differ: softmax(logits / T), T from 2 down to 1 over the
first ten tokens. A model that ends a text goes on with another, as it would. Special tokens are
written as they are spelled, and are cut into the same tokens again: so chats are as the model sees
them. Source: Self-calibration for language model quantization and pruning (Williams, Chrysostomou,
Aletras), 2410.17170.

A draw is a number of a generator that is the text's own, so that the order of the work does not
matter to it; logits have other last digits with other libraries, threads or numbers of texts at a
time, and once a token differs, so do all after it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.device import Device
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.tokenizing import decoder
from qtool.errors import SourceError
from qtool.generating.ready import Ready, check_positions, ends, ready, rows_of
from qtool.gguf.resume import source_files
from qtool.quality.weights import open_weights
from qtool.runs import program
from qtool.runs.differences import DEVICE
from qtool.runs.identity import file_facts
from qtool.runs.progress import Progress
from qtool.runs.provenance import environment
from qtool.runs.watched import marks
from qtool.runs.workspace import COMMAND, Workspace, check_free, workspace

AT_ONCE = 32  # texts; each step reads all weights once for them
_HOT, _WARM = 2.0, 10  # the temperature at the beginning, and how many tokens it takes to be 1
_BYTES_PER_TOKEN = 16  # that the disk is asked for, with what is kept to go on with


@dataclass(frozen=True)
class Sampling:
    """How much is written, and which of all possible texts."""

    samples: int = 128
    length: int = 512  # tokens
    seed: int = 0


@dataclass(frozen=True)
class Sampled:
    """What was written."""

    out: str
    model: str
    device: str
    samples: int
    length: int
    seed: int
    texts: int  # a line each; samples without text have none
    tokens: int
    size_bytes: int
    seconds: float

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool sample`."""
        return asdict(self)


def sample(
    path: Path,
    out: Path,
    sampling: Sampling,
    device: Device | None,
    progress: Progress,
    *,
    model: str,
    fresh: bool = False,
) -> Sampled:
    """Write `out`: JSONL, a line {"text": ...} for each text.

    model: as it was named. SourceError where what the model says is not finite; UnsupportedError
    where transformers cannot run it with a cache; UsageError for more tokens than it has positions.
    """
    check_free(out, is_folder=False)
    with open_weights(path) as weights:
        skeleton = Skeleton.open(weights)
        check_positions(skeleton, sampling.length, f"{sampling.length} tokens (--length) are", path)
        decode = decoder(weights.folder, special=True)
        first = _first(skeleton, weights.folder)
        nbytes = _BYTES_PER_TOKEN * sampling.samples * sampling.length
        sources = marks(source_files(path))
        with workspace(out, is_folder=False, nbytes=nbytes, fresh=fresh, sources=sources) as space:
            space.agree(
                {
                    COMMAND: "sample",
                    **program.facts(),
                    "source": [file_facts(file) for file in sources],
                    "sampling": asdict(sampling),
                    DEVICE: "cpu" if device is None else device.name,
                    "version of torch or kind of CPU": environment(),
                }
            )
            kept = _kept(space, sampling)
            if not all(kept.values()):
                if any(kept.values()):
                    done = sum(map(bool, kept.values()))
                    progress.say(f"going on with an earlier run: {done} of {len(kept)} steps")
                running = ready(skeleton, weights, device, progress)
                with progress.stage("generate"), torch.no_grad(), running.products:
                    _draw(_Drawing(running, path, sampling, first), kept, space, progress)
            tokens = [row for rows in kept.values() for row in rows]
            # Without what is left of a character that the last token cuts in two.
            texts = [text for row in tokens if (text := decode(row).rstrip("\ufffd")).strip()]
            if not texts:
                raise SourceError(
                    f"{path}: all that it writes is tokens without text; is it whole?"
                )
            lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
            space.artifact.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Sampled(
        str(out),
        model,
        "cpu" if device is None else device.name,
        sampling.samples,
        sampling.length,
        sampling.seed,
        len(texts),
        sum(map(len, tokens)),
        out.stat().st_size,
        round(progress.total(), 3),
    )


def _first(skeleton: Skeleton, folder: Path) -> int | None:
    """The token that begins a text; None where nothing says which."""
    said = getattr(skeleton.model.config.get_text_config(decoder=True), "bos_token_id", None)
    if isinstance(said, int) and said >= 0:
        return said
    return min(ends(skeleton, folder), default=None)


@dataclass(frozen=True)
class _Drawing:
    """What texts are drawn with."""

    model: Ready
    path: Path
    sampling: Sampling
    first: int | None

    def batch(self, texts: range, steps: Iterator[int]) -> NDArray[np.int64]:
        """Tokens [texts, length], one after the other."""
        draws = np.stack([_draws(self.sampling, text) for text in texts])
        found = np.empty(draws.shape, np.int64)
        rows = rows_of(self.model.skeleton) or 1
        found[:, 0] = np.minimum(draws[:, 0] * rows, rows - 1)
        if self.first is not None:
            found[:, 0] = self.first
        cache: Any = None
        for at in range(1, self.sampling.length):
            next(steps)
            logits, cache = self.model.step(torch.from_numpy(found[:, at - 1 : at].copy()), cache)
            if not bool(torch.isfinite(logits).all()):
                raise SourceError(
                    f"{self.path}: what it says after {at} tokens is not a finite number; it is "
                    "broken, or overflows in float16"
                )
            heat = max(1.0, _HOT - (_HOT - 1.0) * (at - 1) / _WARM)
            found[:, at] = chosen(logits / heat, draws[:, at])
        return found


def _draw(
    drawing: _Drawing, kept: dict[int, list[list[int]]], space: Workspace, progress: Progress
) -> None:
    """All that is not kept of an earlier run. kept: rows of tokens, by the first text of each
    batch."""
    left = [begin for begin, rows in kept.items() if not rows]
    each = drawing.sampling.length - 1
    done = (len(kept) - len(left)) * each
    steps = iter(progress.blocks(len(kept) * each, "token", first=done))
    for begin in left:
        texts = range(begin, min(begin + AT_ONCE, drawing.sampling.samples))
        kept[begin] = drawing.batch(texts, steps).tolist()
        space.journal.commit(_unit(begin), tokens=kept[begin])
    next(steps, None)


def _unit(begin: int) -> str:
    return f"texts from {begin}"


def _kept(space: Workspace, sampling: Sampling) -> dict[int, list[list[int]]]:
    """By the first text of each batch the rows of tokens that an earlier run has drawn."""
    found: dict[int, list[list[int]]] = {}
    for begin in range(0, sampling.samples, AT_ONCE):
        entry = space.journal.done.get(_unit(begin), {})
        found[begin] = entry.get("tokens", [])
    return found


def _draws(sampling: Sampling, text: int) -> NDArray[np.float64]:
    """A number from 0 to 1 for each token of a text."""
    generator = np.random.Generator(np.random.Philox(key=[sampling.seed, text]))
    return generator.random(sampling.length)


def chosen(logits: torch.Tensor, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """The token [texts] in whose stretch of the cumulated probabilities [texts, vocabulary] a draw
    lies."""
    sums = torch.softmax(logits.double(), -1).cumsum(-1)
    whole = sums[:, -1:]
    wanted = torch.from_numpy(draws).to(sums)[:, None] * whole
    # Less than all of it, even rounded: what has no probability is never drawn.
    wanted = torch.minimum(wanted, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(sums, wanted, right=True)[:, 0].cpu().numpy()
