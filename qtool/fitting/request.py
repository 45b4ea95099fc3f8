"""What is asked of `qtool fit`, and what it found."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.errors import UsageError
from qtool.fitting.allocate import Candidate
from qtool.gguf.mixture_table import TYPES
from qtool.gguf.recipe import GgufRecipe
from qtool.gguf_types import FLOATS, BlockType
from qtool.recipe.file import Calibration, did_you_mean

SAMPLES = 16  # of the text, unless more are asked for: each costs four forward passes
# Between these there is a type for every half a bit; larger ones gain nothing.
USUAL = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")


def block_types(text: str | None) -> tuple[BlockType, ...]:
    """`q3_k,q4_k` as types; UsageError for what is none that a matrix is quantized to."""
    names = USUAL if text is None else [name.strip().upper() for name in text.split(",")]
    found = []
    for name in names:
        kind = TYPES.get(name)
        if kind is None or kind in FLOATS:
            known = [one for one, block in TYPES.items() if block not in FLOATS]
            near = did_you_mean(name, known, 3)
            raise UsageError(
                f"--types: {name.lower() or 'nothing'} is no type that matrices are quantized to; "
                f"{near or 'expected some of ' + ', '.join(known).lower()}"
            )
        found.append(kind)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class FitRequest:
    """`model` as typed, `source` as resolved; one of `size_bytes` and `bits` is given."""

    model: str
    source: Path
    recipe: GgufRecipe
    settings: Calibration  # of the text that is measured
    out: Path
    size_bytes: int | None  # of the file
    bits: float | None  # a weight, all tensors counted
    types: tuple[BlockType, ...]
    costs: Path | None
    threads: int
    fresh: bool = False


@dataclass(frozen=True)
class Fitted:
    """The recipe that was written, and what it makes."""

    out: Path
    size_bytes: int
    bits_per_weight: float
    loss: float  # estimated, of the tensors that were chosen for, in nats a token
    before: tuple[int, float | None]  # bytes and loss of the recipe as it was, where known
    tensors: Sequence[tuple[str, Candidate]]  # in the order of the file
    kept: Sequence[str]  # quantized tensors that have the recipe's own types
    tokens: int
    seconds: float
    peak_rss_bytes: int

    def lines(self, model: str) -> list[str]:
        """For people: how many tensors have which type, and what it comes to."""
        kinds: dict[str, dict[str, int]] = {}
        for name, one in self.tensors:
            found = kinds.setdefault(re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight"), {})
            found[one.name] = found.get(one.name, 0) + 1
        width = max(map(len, kinds))
        said = [
            f"  {name:<{width}}  " + ", ".join(f"{n} {kind}" for kind, n in sorted(found.items()))
            for name, found in kinds.items()
        ]
        if self.kept:
            said.append(
                f"{len(self.kept)} tensors could not be measured and have the recipe's own types: "
                + ", ".join(self.kept[:3])
                + (" ..." if len(self.kept) > 3 else "")
            )
        size, loss = self.before
        was = "" if loss is None else f"; the recipe as it was: {size:,} bytes, {loss:.4f}"
        return [
            *said,
            f"{self.out}: {self.size_bytes:,} bytes, {self.bits_per_weight:.3f} bits per weight, "
            f"loss about {self.loss:.4f} nats a token{was}",
            f"{self.seconds:.1f} s, peak memory {self.peak_rss_bytes / 2**20:.0f} MiB",
            f"next: qtool quantize {shlex.quote(model)} --recipe {shlex.quote(str(self.out))}",
        ]

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool fit`."""
        return {
            "recipe": str(self.out),
            "size_bytes": self.size_bytes,
            "bits_per_weight": self.bits_per_weight,
            "loss": self.loss,
            "before": {"size_bytes": self.before[0], "loss": self.before[1]},
            "tokens": self.tokens,
            "tensors": [
                {"name": name, "type": one.name, "bytes": one.nbytes, "loss": one.loss}
                for name, one in self.tensors
            ],
            "kept": list(self.kept),
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
        }
