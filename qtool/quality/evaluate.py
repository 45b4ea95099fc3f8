"""`qtool eval`: one artifact, one text, and a reference if there is one.

plain       consecutive windows from the start of the text, no special tokens; KL divergence
            over all positions, perplexity over those that are followed by a token
llama.cpp   as llama-perplexity does: the text begins with BOS where llama.cpp adds one, is cut into
            windows, BOS is put in the place of each window's first token, and only the second half
            of each counts

Weights are what their blocks stand for. What else an engine rounds (see engine_inputs.py) is
rounded here where the artifact says so or, in the protocol llama.cpp, where that program does so on
a CPU: smollm2-768 as q4_k_m has a KL divergence of 0.248 with inputs as they are, and of 0.270
both here and there with inputs rounded to 8 bits. Source: llama.cpp 0c1e57098,
tools/perplexity/perplexity.cpp.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.gguf_models import is_gguf
from qtool.errors import QtoolError, SourceError, UsageError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.architectures import TABLE
from qtool.gguf.importance.measured import bos_of, first_token
from qtool.gguf.open import open_source
from qtool.gguf.tokenizer.keys import tokenizer_metadata
from qtool.hub import is_hub_id
from qtool.messages.progress import Progress
from qtool.quality import metrics
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import Forward, forward
from qtool.quality.rounded_inputs import Activations
from qtool.quality.weights import open_weights, say_damaged_record
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.weights import Weights
from qtool.texts.datasets import named
from qtool.texts.encoding import filled
from qtool.texts.source import read_text
from qtool.texts.tokenizing import tokenize, tokenized

if TYPE_CHECKING:
    from qtool.cuda.device import Device

PROTOCOLS = ("plain", "llama.cpp")
_IN_FRONT = 2  # tokens: BOS, and the blank of SentencePiece
WINDOWS = 20
_COMPARED_CHARACTERS = 4096


@dataclass(frozen=True)
class Protocol:
    """Which positions of which text are looked at."""

    name: str
    text: Path
    windows: int | None  # None: as many as there are, WINDOWS at most
    length: int

    @property
    def positions(self) -> range:
        """Of a window."""
        if self.name == "plain":
            return range(self.length)
        return range(self.length // 2, self.length - 1)


@dataclass(frozen=True)
class Evaluation:
    """What was measured, ready for --json."""

    artifact: str
    size_bytes: int
    found: Mapping[str, Any]

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool eval`."""
        return {"artifact": self.artifact, "size_bytes": self.size_bytes, **self.found}


@dataclass(frozen=True)
class _Opened:
    """A model until it has been measured."""

    files: ExitStack  # which closes it
    skeleton: Skeleton
    rounded: Activations


def check_protocol(protocol: Protocol) -> None:
    """UsageError or SourceError for what cannot be evaluated at all."""
    if protocol.name not in PROTOCOLS:
        raise UsageError(f"--protocol {protocol.name}: expected {' or '.join(PROTOCOLS)}")
    text = protocol.text
    if text.is_dir():
        raise SourceError(f"{text}: a folder; name a text file")
    if not text.is_file():
        hint = "; of a hub dataset name a file, owner/name:FILE" if is_hub_id(str(text)) else ""
        raise SourceError(f"{text}: no such text file{hint}")
    if text.suffix.lower() in (".yaml", ".yml"):
        raise SourceError(f"{text}: YAML, which names several texts for --calibration; name one")
    # No token is less than a byte, but for what is put in front.
    count = protocol.windows or 1
    size = len(filled("", read_text(text), count * protocol.length).encode())
    if size + _IN_FRONT < count * protocol.length:
        many = "a window" if count == 1 else f"{count} windows"
        raise SourceError(
            f"{text}: {size:,} bytes, too few for {many} of {protocol.length} tokens; give a "
            "longer text, or fewer or shorter windows"
        )


def evaluate(
    artifacts: Sequence[Path],
    against: Path | None,
    protocol: Protocol,
    threads: int,
    progress: Progress,
    *,
    cache: bool = True,
    device: "Device | None" = None,
    failed: dict[Path, QtoolError] | None = None,
) -> list[Evaluation]:
    """Evaluate each artifact over the same windows; the reference is run once. Of several it is
    said which is measured; several have a reference.

    device: that does the work; None: the CPU. failed: is filled with artifacts whose numbers turn
    out to be no good, as long as there are others; None: the first ends it.
    """
    import torch

    check_protocol(protocol)
    begin = filled("", _text(protocol), _COMPARED_CHARACTERS)[:_COMPARED_CHARACTERS]
    with ExitStack() as stack:
        base = _open(against or artifacts[0], protocol, progress, stack)
        weights, vocabulary = base.skeleton.checkpoint, _vocabulary(base.skeleton)
        tokens = window_tokens(weights, protocol, vocabulary)
        past = structure.past_positions(weights.config, protocol.length, "windows")
        if past is not None:
            progress.say(f"warning: {past}")
        ready = [base]
        if against is not None:
            # Whatever one of them lacks is told before hours of work.
            ready = [_open(path, protocol, progress, stack) for path in artifacts]
            for one in ready:
                _check_same(one.skeleton, weights, vocabulary, begin)
        reference = None
        if against is not None:
            running = f"running the reference: {against}" if len(artifacts) > 1 else None
            with progress.stage("reference"):
                reference = forward(
                    base.skeleton, base.rounded, tokens, threads, progress, keep=cache,
                    device=device, running=running,
                )  # fmt: skip
                if reference.cached is not None:
                    progress.say(f"reference: {reference.cached}")
        found = []
        left = _Left(failed, len(artifacts), progress)
        for number, (path, one) in enumerate(zip(artifacts, ready, strict=True), 1):
            if len(artifacts) > 1:
                progress.say(f"measuring {number} of {len(artifacts)}: {path}")
            with left.without(path), one.files:
                with progress.stage("forward"):
                    run = forward(
                        one.skeleton, one.rounded, tokens, threads, progress, keep=False,
                        device=device,
                    )  # fmt: skip
                torch.set_num_threads(threads)
                with progress.stage("compare"):
                    measured = metrics.measure(tokens, protocol.positions, run, reference, progress)
                size = size_of(path)
                cost = size / size_of(against) if against is not None else 1.0
                row = {**metrics.summary(measured, cost), **_where(tokens, protocol, run)}
                found.append(Evaluation(str(path), size, row))
    return found


@dataclass(frozen=True)
class _Left:
    """What becomes of artifacts that fail as they are measured: see `failed` of evaluate()."""

    failed: dict[Path, QtoolError] | None
    count: int  # of all artifacts
    progress: Progress

    @contextmanager
    def without(self, path: Path) -> Iterator[None]:
        """Goes on without an artifact that fails, as long as there are others."""
        try:
            yield
        except QtoolError as error:
            if self.failed is None:
                raise
            if len(self.failed) + 1 == self.count:
                said = [*map(str, self.failed.values()), str(error)]
                raise type(error)("; ".join(said)) from error
            self.failed[path] = error
            self.progress.say(f"{path} cannot be measured: {error}")


def _where(tokens: NDArray[np.int64], protocol: Protocol, run: Forward) -> dict[str, Any]:
    windows, length = tokens.shape
    return {
        "tokens": windows * len(protocol.positions),
        "protocol": {
            "name": protocol.name,
            "text": named(protocol.text),
            "windows": windows,
            "length": length,
            **run.rounded.json(),
        },
    }


def _open(path: Path, protocol: Protocol, progress: Progress, stack: ExitStack) -> _Opened:
    files = stack.enter_context(ExitStack())
    weights = files.enter_context(open_weights(path))
    say_damaged_record(path, weights, progress)
    return _Opened(files, Skeleton.open(weights), activations(weights, protocol.name))


def _vocabulary(skeleton: Skeleton) -> int:
    """Rows of the embedding."""
    return int(skeleton.model.get_input_embeddings().num_embeddings)


def window_tokens(weights: Weights, protocol: Protocol, vocabulary: int) -> NDArray[np.int64]:
    """[windows, length] ids, of the text no more than they take; SourceError where it is too
    short."""
    wanted = (protocol.windows or WINDOWS) * protocol.length
    parts: list[NDArray[np.int64]] = []
    for some in tokenized(_text(protocol), weights.folder):
        parts.append(some)
        if sum(map(len, parts)) >= wanted:
            break
    ids = np.concatenate(parts)
    bos = _bos(weights, vocabulary) if protocol.name == "llama.cpp" else None
    if bos is not None:
        if bos >= vocabulary:
            raise SourceError(
                f"{weights.path}: the tokenizer's BOS is the id {bos}, and the vocabulary has "
                f"{vocabulary}; tokenizer and model do not belong together"
            )
        ids = np.concatenate([np.array([bos], dtype=np.int64), ids])
    n = len(ids) // protocol.length
    count = min(n, WINDOWS) if protocol.windows is None else protocol.windows
    if n < max(count, 1):
        raise SourceError(
            f"{protocol.text}: {len(ids)} tokens, enough for {n} windows of {protocol.length}, and "
            f"{max(count, 1)} are asked for; give a longer text, or --windows or --length"
        )
    tokens = ids[: count * protocol.length].reshape(count, protocol.length).copy()
    if bos is not None:
        tokens[:, 0] = bos
    return tokens


def _bos(weights: Weights, vocabulary: int) -> int | None:
    """The token that llama.cpp puts before a text, None where it puts none.

    Of a checkpoint by the keys that a GGUF file made of it has.
    """
    if is_gguf(weights.path):
        return first_token(open_source(weights.path))
    config = weights.config
    named = config.get("architectures")
    known = TABLE.get(str(named[0])) if isinstance(named, list) and named else None
    architecture = "" if known is None else known.name
    return bos_of(tokenizer_metadata(weights.folder, architecture, vocabulary, config))


def _text(protocol: Protocol) -> Iterator[str]:
    return read_text(protocol.text, raw=protocol.name == "llama.cpp")


def _check_same(skeleton: Skeleton, reference: Weights, vocabulary: int, text: str) -> None:
    """The same text has to be the same tokens, or the comparison says nothing."""
    its = skeleton.checkpoint
    if (found := _vocabulary(skeleton)) != vocabulary:
        raise SourceError(
            f"{its.path}: a vocabulary of {found}, the reference has {vocabulary}; they cannot be "
            "compared"
        )
    if not np.array_equal(tokenize(text, its.folder), tokenize(text, reference.folder)):
        raise SourceError(
            f"{its.path}: its tokenizer cuts the text into other tokens than that of "
            f"{reference.path}; they are not of one model"
        )


def size_of(path: Path) -> int:
    """Bytes of the files that make up the model, all parts of a split one."""
    if is_gguf(path):
        with GgufFile.open(open_source(path).path) as file:
            return file.size_bytes
    return sum(file.stat().st_size for file in Checkpoint.open(path).files)
