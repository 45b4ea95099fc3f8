"""llama.cpp's mixtures as a table: file types, and what each gives which kind of tensor.

A file type (Q4_K_M, IQ3_XS, ...) is a default type and exceptions by kind of tensor. An exception
may hang on the layer (`i`, how many of its kind come before in the order of writing; `n`, how many
there are), on how many heads share a key, on experts, and on whether importance was measured.

Source of every entry: llama.cpp 0c1e57098, what src/llama-quant.cpp does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qtool.gguf_mixtures.kinds import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE,
    KEY,
    QUERY,
    UP,
    VALUE,
    ModelFacts,
)
from qtool.gguf_types import BF16, BY_NAME, F16, F32, BlockType

TYPES = {**BY_NAME, "F16": F16, "BF16": BF16, "F32": F32}  # what a tensor may become


@dataclass(frozen=True)
class FileType:
    """One value of general.file_type, and the type of most tensors in such a file."""

    name: str
    number: int  # llama_ftype
    default: BlockType


_FILE_TYPES = (
    ("F32", 0, "F32"), ("F16", 1, "F16"), ("BF16", 32, "BF16"),
    ("Q4_0", 2, "Q4_0"), ("Q4_1", 3, "Q4_1"), ("Q5_0", 8, "Q5_0"), ("Q5_1", 9, "Q5_1"),
    ("Q8_0", 7, "Q8_0"), ("Q2_K", 10, "Q2_K"), ("Q2_K_S", 21, "Q2_K"), ("Q3_K_S", 11, "Q3_K"),
    ("Q3_K_M", 12, "Q3_K"), ("Q3_K_L", 13, "Q3_K"), ("Q4_K_S", 14, "Q4_K"), ("Q4_K_M", 15, "Q4_K"),
    ("Q5_K_S", 16, "Q5_K"), ("Q5_K_M", 17, "Q5_K"), ("Q6_K", 18, "Q6_K"), ("IQ1_S", 24, "IQ1_S"),
    ("IQ1_M", 31, "IQ1_M"), ("IQ2_XXS", 19, "IQ2_XXS"), ("IQ2_XS", 20, "IQ2_XS"),
    ("IQ2_S", 28, "IQ2_XS"), ("IQ2_M", 29, "IQ2_S"), ("IQ3_XXS", 23, "IQ3_XXS"),
    ("IQ3_XS", 22, "IQ3_S"), ("IQ3_S", 26, "IQ3_S"), ("IQ3_M", 27, "IQ3_S"),
    ("IQ4_NL", 25, "IQ4_NL"), ("IQ4_XS", 30, "IQ4_XS"), ("TQ1_0", 36, "TQ1_0"),
    ("TQ2_0", 37, "TQ2_0"), ("MXFP4_MOE", 38, "MXFP4"), ("Q1_0", 40, "Q1_0"), ("Q2_0", 41, "Q2_0"),
)  # fmt: skip
MOSTLY_NVFP4 = 39  # of converted checkpoints; llama-quantize has no such mixture
FILE_TYPES = {name: FileType(name, number, TYPES[type_]) for name, number, type_ in _FILE_TYPES}


@dataclass(frozen=True)
class Spot:
    """Where a rule is asked: the i-th of n of its kind, in which model, measured or not."""

    i: int
    n: int
    facts: ModelFacts
    imatrix: bool


Condition = Callable[[Spot], bool]
Rule = tuple[Condition, str]
Rules = Mapping[str, tuple[Rule, ...]]  # kind -> in order; the first whose condition holds counts


def _always(_: Spot) -> bool:
    return True


def _below(count: int) -> Condition:
    return lambda at: at.i < count


def _first(part: int) -> Condition:
    return lambda at: at.i < at.n // part


def _more(at: Spot) -> bool:
    """The first and the last eighth, and every third layer between."""
    eighth = at.n // 8
    return at.i < eighth or at.i >= 7 * at.n // 8 or (at.i - eighth) % 3 == 2


def _middle(at: Spot) -> bool:
    return at.n // 8 <= at.i < 7 * at.n // 8


def _shared(at: Spot) -> bool:
    """Four or more heads share a value head, so that its matrix is small."""
    return at.facts.gqa >= 4


def _shared_or_experts(at: Spot) -> bool:
    return at.facts.gqa >= 4 or at.facts.experts >= 4


def _eight_experts(at: Spot) -> bool:
    return at.facts.experts == 8


def _falcon(at: Spot) -> bool:
    return at.facts.falcon


def _measured(at: Spot) -> bool:
    return at.imatrix


def _not(condition: Condition) -> Condition:
    return lambda at: not condition(at)


def _both(first: Condition, second: Condition) -> Condition:
    return lambda at: first(at) and second(at)


def _all(type_: str) -> tuple[Rule, ...]:
    return ((_always, type_),)


def _low(spare: str, *output: Rule) -> Rules:
    """The file types of about two bits and less; `spare` is what their exceptions get."""
    return {
        VALUE: ((_shared_or_experts, "Q4_K"), (_always, spare)),
        KEY: ((_eight_experts, "Q4_K"),),
        DOWN: ((_first(8), spare),),
        ATTENTION_OUTPUT: ((_eight_experts, "Q5_K"), *output),
    }


# These have rules of their own throughout: nothing below that is for all file types applies.
LOW: Mapping[str, Rules] = {
    "IQ2_XXS": _low("Q2_K"),
    "IQ2_XS": _low("Q2_K"),
    "IQ1_S": _low("Q2_K", (_always, "IQ2_XXS")),
    "IQ1_M": _low("Q2_K", (_always, "IQ2_XXS")),
    "IQ2_S": _low("IQ3_S", (_always, "IQ3_S")),
    "IQ2_M": _low("IQ3_S", (_always, "IQ3_S")),
}
_FOUR_NONLINEAR: Rules = {
    VALUE: ((_shared, "Q5_K"),),
    DOWN: ((_both(_not(_measured), _first(8)), "Q5_K"),),
}
MIXTURES: Mapping[str, Rules] = {
    "Q4_0": {DOWN: ((_both(_measured, _first(8)), "Q4_1"),)},
    "Q5_0": {DOWN: ((_both(_measured, _first(8)), "Q5_1"),)},
    "Q2_K": {
        VALUE: ((_shared, "Q4_K"), (_always, "Q3_K")),
        DOWN: _all("Q3_K"),
        ATTENTION_OUTPUT: _all("Q3_K"),
    },
    "Q2_K_S": {VALUE: ((_shared, "Q4_K"),), DOWN: ((_first(8), "Q4_K"),)},
    "Q3_K_M": {
        VALUE: ((_below(2), "Q5_K"), (_always, "Q4_K")),
        DOWN: ((_first(16), "Q5_K"), (_not(_falcon), "Q4_K"), (_more, "Q4_K")),
        ATTENTION_OUTPUT: _all("Q4_K"),
    },
    "Q3_K_L": {
        VALUE: _all("Q5_K"),
        DOWN: ((_falcon, "Q4_K"), (_always, "Q5_K")),
        ATTENTION_OUTPUT: _all("Q5_K"),
    },
    "Q4_K_S": {VALUE: ((_below(4), "Q5_K"),), DOWN: ((_both(_not(_falcon), _first(8)), "Q5_K"),)},
    "Q4_K_M": {
        VALUE: ((_more, "Q6_K"),),
        DOWN: (
            (_both(_falcon, _first(16)), "Q6_K"),
            (_both(_falcon, _more), "Q5_K"),
            (_both(_not(_falcon), _more), "Q6_K"),
        ),
    },
    "Q5_K_M": {VALUE: ((_more, "Q6_K"),), DOWN: ((_more, "Q6_K"),)},
    "IQ4_NL": _FOUR_NONLINEAR,
    "IQ4_XS": _FOUR_NONLINEAR,
    "IQ3_XXS": {
        VALUE: ((_shared, "Q4_K"), (_not(_measured), "IQ3_S")),
        DOWN: ((_both(_not(_measured), _first(8)), "Q4_K"), (_not(_measured), "Q3_K")),
        ATTENTION_OUTPUT: _all("IQ3_S"),
        KEY: _all("IQ2_S"),
        QUERY: _all("IQ2_S"),
    },
    "IQ3_XS": {
        VALUE: ((_shared, "Q4_K"),),
        KEY: _all("IQ3_XXS"),
        QUERY: _all("IQ3_XXS"),
        GATE: ((_middle, "IQ3_XXS"),),
        UP: ((_middle, "IQ3_XXS"),),
    },
    "IQ3_S": {VALUE: ((_shared, "Q4_K"),)},
    "IQ3_M": {
        VALUE: _all("Q4_K"),
        DOWN: ((_first(8), "Q4_K"), (_both(_eight_experts, _more), "Q4_K")),
        ATTENTION_OUTPUT: _all("Q4_K"),
    },
    **LOW,
}
# Beside the experts of a model of eight, all else is small: attn_output gets Q5_K in these.
Q5_OUTPUT_OF_EIGHT_EXPERTS = {
    "Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S",
    "IQ3_M", "IQ4_XS",
}  # fmt: skip
FALCON_OUTPUT = {"Q3_K_L": "Q4_K"}
Q5_HEAD = {*LOW, "IQ3_XXS"}
# Of a token embedding that is not the head too.
EMBEDDING_TYPES = {
    "IQ1_S": "Q2_K", "IQ1_M": "Q2_K", "IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S",
    "IQ2_M": "IQ3_S", "IQ3_XXS": "IQ3_S", "TQ1_0": "Q4_K", "TQ2_0": "Q4_K", "Q2_0": "Q4_K",
}  # fmt: skip

# Where a row is not a multiple of the block: the type of smaller blocks that is tried instead.
FALLBACK = {
    "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "IQ2_XXS": "IQ4_NL", "IQ2_XS": "IQ4_NL",
    "IQ2_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL",
    "Q2_0": "Q4_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
NEED_IMPORTANCE = {"IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_M", "IQ1_S"}
