"""A tensor of a planned GGUF file."""

from dataclasses import dataclass
from math import prod

from qtool.gguf.source import SourceTensor
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_types import BlockType


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file."""

    source: SourceTensor
    type: BlockType
    why: str | None  # where the type is not simply the mixture's
    fallback: bool
    eligible: bool  # False: never quantized, whatever the recipe says
    importance: bool  # encoded with importance: it was measured, or will be
    swept: bool = False  # GPTQ chooses its codes, where what it reads can be measured

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file states it, in numpy's order."""
        return stored_shape(self.source.shape)

    @property
    def copied(self) -> bool:
        """Whether the source's bytes go into the file as they are."""
        return self.type == self.source.type_in_file

    @property
    def parameters(self) -> int:
        """Numbers in the tensor."""
        return prod(self.source.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data, without padding."""
        return self.source.rows * self.type.row_bytes(self.source.in_features)
