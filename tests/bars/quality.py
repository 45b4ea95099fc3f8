"""How far quantized artifacts are from their original: KL divergence, perplexity, agreement.

    python tests/bars/quality.py MODEL TEXT ARTIFACT... [--protocol first|rng] [--windows N]

    windows     TEXT tokenized without special tokens, cut into n consecutive windows of --length;
                `first`: the first N of them; `rng`: sorted(default_rng(0).permutation(n)[:N])
    kld         mean over all positions of sum_v p(v) (log p(v) - log q(v)), p of MODEL, in nats
    perplexity  exp of the mean negative log-probability of the tokens that follow in a window
    top1        share of positions where both models' best tokens are the same
    bytes       of the tensor files

Both models run in float32, block by block; an artifact is first dequantized, tensor by tensor, into
a temporary folder. Defaults are those of the project's quality bar: the first 20 windows of 512.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.artifact import Artifact
from qtool.calibration import read_text, tokenize
from qtool.checkpoint import Checkpoint
from qtool.formats.safetensors_file import StreamWriter, TensorSpec, plan_shards
from qtool.native.library import default_threads
from qtool.stream import Skeleton, Workers


def windows(
    model: Path, text: Path, protocol: str, count: int, length: int
) -> NDArray[np.int64]:  # [count, length]
    """The evaluated tokens."""
    ids = tokenize(read_text(text), model)
    n = len(ids) // length
    if n < count:
        raise SystemExit(f"{text}: {len(ids)} tokens, {count} windows of {length} are asked for")
    cut = ids[: n * length].reshape(n, length)
    if protocol == "first":
        return cut[:count]
    return cut[np.sort(np.random.default_rng(0).permutation(n)[:count])]


@contextmanager
def dequantized(artifact: Artifact) -> Iterator[Checkpoint]:
    """The artifact as an ordinary float32 checkpoint in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        floats = [e for e in artifact.entries.values() if e.scheme is not None or e.dtype != "I64"]
        layout = plan_shards([TensorSpec(entry.name, "F32", entry.shape) for entry in floats])
        kept = {entry.name for entry in floats}
        with StreamWriter(folder, layout) as writer:
            for key, values in artifact.dequantized():
                if key in kept:
                    writer.add(key, values.astype(np.float32, copy=False))
        config = dict(artifact.checkpoint.config)
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Checkpoint.open(folder)


@dataclass
class Forward:
    """A model's last hidden states for all windows, and its head."""

    skeleton: Skeleton
    hidden: torch.Tensor  # [windows, length, width]

    @classmethod
    def of(cls, checkpoint: Checkpoint, tokens: NDArray[np.int64], threads: int) -> "Forward":
        """Run every block over all windows."""
        skeleton = Skeleton.open(checkpoint)
        with Workers(threads) as workers:
            stream = skeleton.embed(tokens)
            for index in range(skeleton.count):
                skeleton.advance(skeleton.block(index), stream, workers)
        torch.set_num_threads(threads)
        return cls(skeleton, torch.cat(stream.hidden))

    def log_probabilities(self, window: int) -> torch.Tensor:
        """log p, [length, vocabulary]."""
        logits = self.skeleton.head(self.hidden[window : window + 1])[0]
        return torch.log_softmax(logits, -1)


def compare(
    reference: Forward, candidate: Forward | None, tokens: NDArray[np.int64]
) -> dict[str, float]:
    """kld, kld_error (its standard error over windows), perplexity, top1; of the reference alone
    where there is no candidate."""
    divergence = []
    loss = agreeing = 0.0
    for number, ids in enumerate(tokens):
        p = reference.log_probabilities(number)
        q = p if candidate is None else candidate.log_probabilities(number)
        following = torch.from_numpy(ids[1:, None])
        loss -= float(q[:-1].gather(1, following).sum(dtype=torch.float64))
        agreeing += float((p.argmax(-1) == q.argmax(-1)).sum())
        divergence.append(float((p.exp() * (p - q)).sum(-1).mean(dtype=torch.float64)))
    spread = np.std(divergence, ddof=1) / math.sqrt(len(tokens)) if len(tokens) > 1 else 0.0
    return {
        "kld": float(np.mean(divergence)),
        "kld_error": float(spread),
        "perplexity": math.exp(loss / (tokens.size - len(tokens))),
        "top1": agreeing / tokens.size,
    }


def tensor_bytes(checkpoint: Checkpoint) -> int:
    """Size of the tensor files."""
    return sum(path.stat().st_size for path in checkpoint.files)


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("artifacts", nargs="*", type=Path)
    parser.add_argument("--protocol", choices=("first", "rng"), default="first")
    parser.add_argument("--windows", type=int, help="default: 20 first, 16 rng")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", action="store_true", help="one object a line")
    given = parser.parse_args()
    count = given.windows or {"first": 20, "rng": 16}[given.protocol]
    tokens = windows(given.model, given.text, given.protocol, count, given.length)
    original = Checkpoint.open(given.model)
    reference = Forward.of(original, tokens, given.threads)

    def say(name: Path, found: dict[str, float], nbytes: int) -> None:
        row: dict[str, Any] = {"name": str(name), **found, "bytes": nbytes}
        if given.json:
            print(json.dumps(row), flush=True)
            return
        print(
            f"{name}: KLD {row['kld']:.5f} +- {row['kld_error']:.5f}, perplexity "
            f"{row['perplexity']:.4f}, top-1 {row['top1']:.4f}, {nbytes / 1e6:.1f} MB",
            flush=True,
        )

    say(given.model, compare(reference, None, tokens), tensor_bytes(original))
    for path in given.artifacts:
        artifact = Artifact.open(path)
        with dequantized(artifact) as checkpoint:
            candidate = Forward.of(checkpoint, tokens, given.threads)
            say(path, compare(reference, candidate, tokens), tensor_bytes(artifact.checkpoint))


if __name__ == "__main__":
    main()
