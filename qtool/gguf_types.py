"""Block types of GGUF (ggml 0.25): the number a file stores, weights and bytes a block.

`kernels/gguf_types.h` states the same; what lies where in a block is told beside the code that
reads it.
"""

from dataclasses import dataclass

from qtool.errors import FormatError


@dataclass(frozen=True)
class BlockType:
    """One way to store a run of weights."""

    name: str  # as llama.cpp spells it
    number: int  # ggml_type
    weights: int  # in a block
    nbytes: int  # of a block
    needs_importance: bool = False  # encoding without importance weights makes no sense

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row; FormatError unless whole blocks cover it."""
        if in_features % self.weights:
            raise FormatError(
                f"{self.name} stores rows in blocks of {self.weights} weights, "
                f"and {in_features} is not a multiple of that"
            )
        return in_features // self.weights * self.nbytes


_TYPES = (
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("IQ2_XXS", 16, 256, 66, needs_importance=True),
    BlockType("IQ2_XS", 17, 256, 74, needs_importance=True),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50, needs_importance=True),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
    BlockType("Q2_0", 42, 64, 18),
)

BY_NAME = {block.name: block for block in _TYPES}

F32 = BlockType("F32", 0, 1, 4)
F16 = BlockType("F16", 1, 1, 2)
BF16 = BlockType("BF16", 30, 1, 2)
I32 = BlockType("I32", 26, 1, 4)
FLOATS = (F32, F16, BF16)
_PLAIN = (
    *FLOATS,
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    I32,
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
)
# What a file may hold: the block types and the plain numbers.
TENSOR_TYPES = {block.number: block for block in (*_TYPES, *_PLAIN)}
