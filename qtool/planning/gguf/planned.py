"""A planned GGUF file: its tensors in the order of writing, and its metadata."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qtool.formats.gguf_values import Value
from qtool.formats.gguf_writer import Layout, TensorSpec, lay_out
from qtool.gguf.planned import PlannedTensor
from qtool.gguf_types import BY_NAME
from qtool.messages.remarks import told_apart
from qtool.planning.budget import Memory
from qtool.recipe.gguf import GgufRecipe


@dataclass(frozen=True)
class GgufPlan:
    """What a run will write."""

    recipe: GgufRecipe
    tensors: tuple[PlannedTensor, ...]  # in the order of writing
    metadata: Mapping[str, Value]  # complete, in the order of writing
    warnings: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]  # source tensors that are not written, and why
    memory: Memory
    seconds: float  # estimated, on this machine
    scales_bytes: int = 0  # estimated, of the scales that are yet to be found

    @property
    def format(self) -> str:
        return "gguf"

    @cached_property
    def layout(self) -> Layout:
        """The header's bytes, and where everything lies."""
        specs = [TensorSpec(tensor.name, tensor.shape, tensor.type) for tensor in self.tensors]
        return lay_out(self.metadata, specs)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file. Exact, but for the few that tell of what is yet to be measured."""
        return self.layout.size + self.scales_bytes

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data for each number of the model, as llama-quantize counts them."""
        numbers = sum(tensor.parameters for tensor in self.tensors)
        return 8 * self.tensor_bytes / numbers if numbers else 0.0

    @property
    def unquantized_share(self) -> float:
        """Share of the model's numbers that are stored as plain numbers."""
        numbers = sum(tensor.parameters for tensor in self.tensors)
        plain = sum(t.parameters for t in self.tensors if t.type.name not in BY_NAME)
        return plain / numbers if numbers else 0.0

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors are encoded anew, and how many are copied."""
        copied = sum(tensor.copied for tensor in self.tensors)
        return {
            "converted": len(self.tensors) - copied,
            "copied": copied,
            "dropped": len(self.dropped),
        }

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type, the most frequent first."""
        return dict(Counter(tensor.type.name for tensor in self.tensors).most_common())

    @property
    def peak_rss_bytes(self) -> int:
        """Estimated."""
        return self.memory.estimated.nbytes

    @property
    def fallbacks(self) -> tuple[PlannedTensor, ...]:
        """Those whose rows do not divide into the blocks that they should have."""
        return tuple(tensor for tensor in self.tensors if tensor.fallback)

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool plan`."""
        return {
            "recipe": self.recipe.name,
            "format": self.format,
            "type": self.recipe.type,
            "size_bytes": self.size_bytes,
            "bits_per_weight": self.bits_per_weight,
            "unquantized_share": self.unquantized_share,
            "peak_rss_bytes": self.peak_rss_bytes,
            "memory": self.memory.json(),
            "seconds": self.seconds,
            "counts": self.counts,
            "types": self.types,
            "fallbacks": len(self.fallbacks),
            **told_apart(self.warnings),
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "source_type": tensor.source.type_in_file.name,
                    "type": tensor.type.name,
                    "reason": tensor.why,
                    "fallback": tensor.fallback,
                    "importance": tensor.importance,
                    "swept": tensor.swept,
                    "bytes": tensor.nbytes,
                }
                for tensor in self.tensors
            ],
            "dropped": self.dropped_json(),
        }

    def dropped_json(self) -> list[dict[str, str]]:
        """What is not written, for --json."""
        return [{"name": name, "reason": reason} for name, reason in self.dropped]
