"""Text that a model writes by itself, to calibrate it on: no data, no licence, its own languages.

Every text begins with the token that begins one, and each that follows is drawn from what the model
predicts, hotter at first, so that texts differ: softmax(logits / T), T from 2 down to 1 over the
first ten tokens. A model that ends a text goes on with another, as it would. Special tokens are
written as they are spelled, and are cut into the same tokens again: so chats are as the model sees
them. Source: Self-calibration for language model quantization and pruning (Williams, Chrysostomou,
Aletras), 2410.17170.

A draw is a number of a generator that is the text's own, so that the order of the work does not
matter to it; logits have other last digits with other libraries, CPUs or numbers of threads, and
once a token differs, so do all after it. What is calibrated is told by the text, not by how it came
about.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.checkpoints import structure
from qtool.checkpoints.gguf_models import source_files
from qtool.cuda.device import Device
from qtool.errors import SourceError
from qtool.formats import safetensors_file as st
from qtool.generating.ready import Ready, check_positions, ready, rows_of
from qtool.messages.progress import Progress
from qtool.provenance.record import environment
from qtool.quality.weights import open_weights
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.weights import Weights
from qtool.texts.tokenizing import decoder, tokenized
from qtool.workspaces import program
from qtool.workspaces.already import SAID, AlreadyMade
from qtool.workspaces.differences import DEVICE
from qtool.workspaces.identity import file_facts
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.watched import marks
from qtool.workspaces.workspace import COMMAND, Workspace, workspace

AT_ONCE = 32  # texts, and some more; each step reads all weights once for them
_CACHE_BYTES = 4 << 30  # of keys and values, at most, unless one text takes more
_MARGIN = 16  # one more for so many: what is cut into tokens again has up to a few percent fewer
_MOST = 4  # times as many as were asked for, and no more
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
    try:
        return _sampled(path, out, sampling, device, progress, model, fresh)
    except AlreadyMade as found:
        progress.say(f"note: {SAID}")
        seconds = round(progress.total(), 3)
        return replace(Sampled(**found.made), out=str(out), model=model, seconds=seconds)


def _sampled(
    path: Path,
    out: Path,
    sampling: Sampling,
    device: Device | None,
    progress: Progress,
    model: str,
    fresh: bool,
) -> Sampled:
    check_free(out, is_folder=False, again=not fresh)
    with open_weights(path) as weights:
        skeleton = Skeleton.open(weights)
        check_positions(skeleton, sampling.length, f"{sampling.length} tokens (--length) are", path)
        first = _first(weights.config, weights.folder)
        if first is None:
            progress.say(
                "note: nothing says which token begins a text (bos_token_id in config.json): each "
                "begins with one that is drawn from all"
            )
        at_once, cache_bytes = _at_once(weights.config, sampling.length)
        nbytes = _BYTES_PER_TOKEN * sampling.samples * sampling.length
        sources = marks(source_files(path))
        facts = {
            COMMAND: "sample",
            **program.facts(),
            "source": [file_facts(file) for file in sources],
            "sampling": asdict(sampling),
            "threads": torch.get_num_threads(),
            DEVICE: "cpu" if device is None else device.name,
            "version of torch or kind of CPU": environment(),
        }
        with workspace(
            out, is_folder=False, nbytes=nbytes, fresh=fresh, sources=sources, facts=facts
        ) as space:
            space.agree(facts)
            drawing = _Drawing(
                skeleton, weights, path, sampling, first, device, at_once, cache_bytes
            )
            rows, texts = _enough(drawing, space, progress)
            if not texts:
                raise SourceError(
                    f"{path}: all that it writes is tokens without text; is it whole?"
                )
            lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
            space.artifact.write_text("\n".join(lines) + "\n", encoding="utf-8")
            made = Sampled(
                str(out),
                model,
                "cpu" if device is None else device.name,
                sampling.samples,
                sampling.length,
                sampling.seed,
                len(texts),
                sum(map(len, rows)),
                space.artifact.stat().st_size,
                round(progress.total(), 3),
            )
            space.conclude(asdict(made))
    return made


def _first(config: Mapping[str, Any], folder: Path) -> int | None:
    """The token that begins a text, as the model's files say; else one that ends a text, as models
    begin that have no other. None where nothing says any: what a class assumes is not the model's.
    """
    beside = folder / "generation_config.json"
    theirs = st.read_json(beside) if beside.is_file() else {}
    for key in ("bos_token_id", "eos_token_id"):
        for said in (structure.text_config(config).get(key), config.get(key), theirs.get(key)):
            for one in said if isinstance(said, list) else [said]:
                if type(one) is int and one >= 0:
                    return one
    return None


def _at_once(config: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Texts that are written together, and bytes that their keys and values take, by config.json:
    the same everywhere, as last digits hang on it."""
    text = structure.text_config(config)

    def number(*keys: str) -> int:
        return next((n for key in keys if type(n := text.get(key)) is int and n > 0), 1)

    heads = number("num_attention_heads", "n_head")
    size = number("head_dim") if "head_dim" in text else number("hidden_size", "n_embd") // heads
    keys = number("num_key_value_heads", "num_attention_heads", "n_head")
    each = 2 * (structure.layer_count(config) or 1) * keys * max(size, 1) * 4 * length
    texts = max(1, min(AT_ONCE, _CACHE_BYTES // each))
    return texts, texts * each


@dataclass
class _Drawing:
    """What texts are drawn with. The model is loaded when the first is."""

    skeleton: Skeleton
    weights: Weights
    path: Path
    sampling: Sampling
    first: int | None
    device: Device | None
    at_once: int
    cache_bytes: int
    loaded: Ready | None = None

    def batch(self, texts: range, progress: Progress) -> NDArray[np.int64]:
        """Tokens [texts, length], one after the other."""
        if self.loaded is None:
            self.loaded = ready(
                self.skeleton, self.weights, self.device, progress, self.cache_bytes
            )
        draws = np.stack([_draws(self.sampling, text) for text in texts])
        found = np.empty(draws.shape, np.int64)
        rows = rows_of(self.skeleton) or 1
        found[:, 0] = np.minimum(draws[:, 0] * rows, rows - 1)
        if self.first is not None:
            found[:, 0] = self.first
        cache: Any = None
        title = f"texts {texts.start + 1}-{texts.stop}, token"
        with progress.stage("generate"), torch.no_grad(), self.loaded.matmuls:
            for at in progress.blocks(self.sampling.length, title, first=1):
                before = torch.from_numpy(found[:, at - 1 : at].copy())
                logits, cache = self.loaded.step(before, cache)
                if not bool(torch.isfinite(logits).all()):
                    raise SourceError(
                        f"{self.path}: what it says after {at} tokens is not a finite number; it "
                        "is broken, or overflows in float16"
                    )
                heat = max(1.0, _HOT - (_HOT - 1.0) * (at - 1) / _WARM)
                found[:, at] = chosen(logits / heat, draws[:, at])
        return found


def _enough(
    drawing: _Drawing, space: Workspace, progress: Progress
) -> tuple[list[list[int]], list[str]]:
    """Rows of tokens, and their texts, in which a calibration finds as many samples as were asked
    for: the same text may be fewer tokens when it is cut again. Batches of an earlier run are taken
    up."""
    sampling, folder = drawing.sampling, drawing.weights.folder
    decode = decoder(folder, special=True)
    wanted = sampling.samples * sampling.length
    batches = -(-sampling.samples // drawing.at_once)
    total = sampling.samples + -(-sampling.samples // _MARGIN)
    ends = [total * number // batches for number in range(1, batches + 1)]
    rows: list[list[int]] = []
    texts: list[str] = []
    done = space.journal.done
    if done:
        progress.say(f"going on with an earlier run: {len(done)} of {len(ends)} steps are finished")
    while ends:
        batch = range(len(rows), ends.pop(0))
        unit = f"texts {batch.start + 1}-{batch.stop}"
        if unit not in done:
            space.journal.commit(unit, tokens=drawing.batch(batch, progress).tolist())
        found = done[unit]["tokens"]
        rows += found
        # Without what is left of a character that the last token cuts in two.
        texts += [text for row in found if (text := decode(row).rstrip("\ufffd")).strip()]
        if ends or not texts:
            continue
        count = sum(map(len, tokenized(["\n".join(texts)], folder)))
        if count >= wanted:
            break
        if len(rows) > _MOST * total:
            drawn = len(rows) * sampling.length
            raise SourceError(
                f"{drawing.path}: of {drawn:,} tokens that it wrote, the text is cut into "
                f"{count:,} again: it repeats itself; is it whole?"
            )
        more = -(-(wanted - count) // sampling.length) + 1
        ends.append(len(rows) + min(more, drawing.at_once))
    return rows, texts


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
