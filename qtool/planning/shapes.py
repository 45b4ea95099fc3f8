"""What the memory and the time of a run depend on: the shapes of its tensors, and how much of it is
there at once."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm, prod
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.checkpoints.decoder_names import of_tower
from qtool.errors import QtoolError, SourceError
from qtool.memory import gram_sum_bytes
from qtool.planning.handed import ALONE, PER_LAYER, Handed

if TYPE_CHECKING:
    from qtool.planned import Planned
    from qtool.recipe.file import Calibration
    from qtool.recipe.recipe import Recipe

MICRO_BATCH_TOKENS = 1024  # as qtool.streaming.skeleton has it, which needs torch
# Gram matrices that are in memory together, where the recipe leaves a choice. Of a dense block of
# 32 billion parameters all fit; of 256 experts a few dozen.
GRAM_BYTES = 4 << 30

SHORT_TOKEN = 2  # bytes of a text that a token has at least, as a rule
PYARROW_BYTES, COPIES_OF_A_PAGE = 60_000_000, 3
UNPACKED = 8  # bytes of a text in one of a compressed file, likewise at most

# Weights of the output head that a thread rounds at once, and of other matrices.
ROWS_AT_ONCE, CACHED_AT_ONCE = 1 << 23, 1 << 18

# Of each scale that is read back, in several types.
_SCALE_BYTES = 16

_ATTENDING = re.compile(r"(?i)[._]([qkv]|w?qkv|query_key_value|att|[qk]v?_[ab])(_proj\w*)?$")
_LAST = re.compile(r"[._](ffn_down_exps|down_proj|w2|output_linear)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Setting:
    """How much of a run is in memory at once. No byte of what it writes depends on it."""

    threads: int
    states_on_disk: bool = False
    gram_bytes: int = GRAM_BYTES


@dataclass(frozen=True)
class Input:
    """What matrices of a block read together."""

    width: int
    largest: int  # numbers in the largest of the matrices
    share: float | None = None  # of an expert's: of the tokens that come here
    rows: int = 0  # of the matrix with most of them, which all tokens meet
    fed: int = 0  # numbers in the largest whose rows may compensate for each other


@dataclass(frozen=True)
class Block:
    """What a decoder block needs memory for."""

    nbytes: int  # as float32
    largest: int  # numbers in its largest tensor
    widest: int  # the longer side of its largest matrix that every token meets
    inputs: tuple[Input, ...]  # the widest first
    folded: int = 0  # most numbers in matrices of one kind of input, those of all experts together
    attending: int = 0  # rows of queries, keys and values, as far as names tell
    made: tuple[int, ...] = ()  # rows of each matrix that all tokens meet, the most first
    given: float = 0.0  # rows that a token's experts give the hidden states, those of all together


def text_bytes(text: "Calibration") -> int:
    """Of a file, as far as it is read, the largest one of a mixture; 0 of a hub dataset and of
    Python's help, which is short, and of what a run will refuse."""
    from qtool.texts.mixture import mixture
    from qtool.texts.source import most_read
    from qtool.texts.stored import is_plain

    try:
        files = [Path(part.source or "") for part in mixture(text.source).parts]
        there = [(path, path.stat().st_size) for path in files if path.is_file()]
    except (SourceError, OSError):
        return 0
    most = SHORT_TOKEN * most_read(text.samples * text.length)
    sizes = [size if is_plain(path) else UNPACKED * size for path, size in there]
    return min(max(sizes, default=0), most)


def table_bytes(text: "Calibration") -> int:
    """What reading Parquet takes, which a text is by its name: pyarrow, which stays, and the
    largest page of a file that is here."""
    from qtool.texts.mixture import mixture
    from qtool.texts.stored import PARQUET, kind_of

    try:
        named = [Path(part.source or "") for part in mixture(text.source).parts]
        found = [path for path in named if kind_of(path) == PARQUET]
        return PYARROW_BYTES + COPIES_OF_A_PAGE * max(map(_page, found)) if found else 0
    except (QtoolError, OSError):
        return 0


def _page(path: Path) -> int:
    from qtool.texts.parquet import largest_page

    return largest_page(path) if path.is_file() else 0


def is_last(name: str) -> bool:
    """Whether an expert's matrix is its last one, as far as its name tells."""
    return _LAST.search(name) is not None


def sensitivity_bytes(matrices: Iterable[tuple[int, ...]]) -> int:
    """Of matrices [out, in], and of experts [experts, out, in]."""
    return sum(8 * prod(shape[:-2]) * sum(shape[-2:]) for shape in matrices if len(shape) > 1)


def attention_rows(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Rows of queries, keys and values, of names without ".weight" and shapes; for estimates."""
    return sum(shape[0] for name, shape in tensors if _ATTENDING.search(name) and len(shape) == 2)


@dataclass(frozen=True)
class Shapes:
    """What the memory of a run depends on, beside its setting."""

    calibrates: bool
    tokens: int
    length: int  # tokens of a sample
    batch: int  # tokens of a micro-batch
    hidden: int  # width of the hidden states
    vocabulary: int
    outside: int  # bytes of the largest tensor of no block
    quantized: int  # numbers in the largest matrix that is quantized
    blocks: tuple[Block, ...]  # one of each kind
    grams: bool  # whether Gram matrices are measured
    chained: bool  # of all of a block's inputs together, since transforms share scales
    solves: bool  # whether they are factored
    tunes: int = 0  # micro-batches of a step of tuning; 0 where blocks are not tuned
    compensates: bool = False  # whether inputs are compared with those of the original
    guides: bool = False  # whether tokens of keys and values count by gradients
    fed_back: int = 0  # tokens whose gradients say how rows compensate for each other
    light: bool = False  # whether kernels read back what was rounded
    text: int = 0  # bytes of the text to calibrate on
    tables: int = 0  # bytes that it takes to read them, where it is Parquet
    rotates: bool = False
    rotates_online: bool = False  # whether inputs are rotated while the model runs
    handed: Handed = ALONE
    head: int = 0  # bytes that reading the output head back takes, where it is quantized
    whole: int = 0  # numbers in the largest whose rows are rounded together
    back: int = 0  # bytes that reading the largest quantized one back takes
    stored: int = 0  # bytes of the largest of them as it is written
    fours: bool = False  # whether some of them are floats of 4 bits
    band: int = 0  # numbers in the fewest rows that are rounded together
    width: int = 0  # of the widest quantized matrix
    viewed: int = 0  # bytes of the largest of them in its source, where that is a view
    heads: tuple[int, int] = (0, 0)  # weights of that or of the embedding, and bytes of both stored
    count: int = 0  # of all blocks
    sensitivities: int = 0  # bytes of the sensitivities of all matrices, where they are measured

    @property
    def passed(self) -> int:
        """Numbers of a position that go from block to block."""
        return self.handed.streams * self.hidden + self.handed.columns

    @property
    def states(self) -> int:
        """Bytes of the states of all tokens, those of the original model and what blocks are given
        beside them included."""
        return 4 * self.tokens * (self.passed * (2 if self.follows else 1) + self.handed.given)

    @property
    def sensitivities_on_disk(self) -> int:
        """Bytes on the disk while sensitivities are measured: these, states before each block and
        behind the last, gradients twice; and what blocks are given beside states, and gradients by
        it."""
        numbers = self.passed * (self.count + 3) + 2 * self.handed.given
        return 4 * self.tokens * numbers + self.sensitivities

    @property
    def on_disk(self) -> int:
        """Bytes on the disk beside the artifact: states before a block and after it, from which a
        run goes on; and where rows compensate for each other, gradients behind each block, and what
        it takes to measure them."""
        if not self.fed_back:
            return 2 * self.states
        measured = replace(self, tokens=self.fed_back)
        behind = 4 * self.fed_back * self.passed * self.count
        return behind + max(2 * self.states, measured.sensitivities_on_disk)

    @property
    def follows(self) -> bool:
        """Whether states of the original model are there beside those of the quantized one."""
        return self.tunes > 0 or self.compensates


def micro_batch(samples: int, length: int, tokens: int = MICRO_BATCH_TOKENS) -> int:
    """Tokens that pass through a block together; of whole samples, at least `tokens`."""
    return length * min(samples, -(-tokens // length))


def whole_batches(some: int, samples: int, length: int) -> int:
    """Tokens of so many of all samples, whole micro-batches of them."""
    together = micro_batch(samples, length)
    return min(samples * length, together * -(-some * length // together))


def shapes_of(
    recipe: "Recipe",
    tensors: "Iterable[Planned]",
    active: float = 1.0,
    handed: Handed = ALONE,
) -> Shapes:
    """What counts of a plan. active: the share of a block's experts that a token visits."""
    inside: dict[int, list[Planned]] = defaultdict(list)
    outside = vocabulary = quantized = hidden = head = longest = stored = 0
    whole = back = band = width = written = 0
    matrices: list[tuple[int, ...]] = []
    floats = fours = False
    for tensor in tensors:
        if tensor.scheme is not None and tensor.scheme.is_float:
            floats = True
            fours |= tensor.scheme.bits == 4
        matrices.append(tensor.shape)
        if tensor.scheme is not None and tensor.block is None:
            head = max(head, read_back(tensor))
            longest = max(longest, tensor.parameters)
            stored += tensor.parameters * (1 + tensor.scheme.bits) // 8
        elif tensor.scheme is not None:
            quantized = max(quantized, tensor.parameters)
            back = max(back, read_back(tensor))
            written = max(written, tensor.nbytes)
            width = max(width, tensor.shape[-1])
            if tensor.scheme.by_rows:
                band = max(band, rows_together(tensor.scheme.rows) * tensor.shape[1])
            else:
                whole = max(whole, tensor.parameters)
        if tensor.block is not None:
            inside[tensor.block].append(tensor)
        elif len(tensor.shape) == 2:
            outside = max(outside, tensor.nbytes)
            vocabulary = max(vocabulary, tensor.shape[0])
            if PER_LAYER not in tensor.name and not of_tower(tensor.name):
                hidden = max(hidden, tensor.shape[1])
    settings = recipe.calibration
    grams = "awq" in recipe.transform_chain or recipe.rounding == "gptq" or recipe.searches_scales
    return Shapes(
        calibrates=recipe.calibrates,
        tokens=settings.samples * settings.length,
        length=settings.length,
        batch=micro_batch(settings.samples, settings.length),
        hidden=hidden,
        vocabulary=vocabulary,
        outside=outside,
        quantized=quantized,
        whole=whole,
        back=back,
        stored=written,
        fours=fours,
        band=band,
        width=width,
        blocks=tuple({_block(group, active) for group in inside.values()}),
        grams=grams,
        chained=recipe.shares_scales,
        solves=recipe.rounding == "gptq",
        tunes=recipe.tune.batch if recipe.tunes else 0,
        compensates=recipe.compensates > 0,
        guides=recipe.guides > 0,
        fed_back=whole_batches(recipe.feeds_back, settings.samples, settings.length),
        light=not floats and not recipe.reorders_groups,
        text=text_bytes(settings),
        tables=table_bytes(settings),
        rotates=recipe.rotates,
        rotates_online=recipe.rotates and recipe.rotate.online,
        handed=handed,
        head=head,
        heads=(longest, stored),
        count=len(inside),
        sensitivities=sensitivity_bytes(matrices),
    )


def _block(group: "list[Planned]", active: float) -> Block:
    """Of a block's tensors."""
    from qtool.checkpoints import structure  # not where only the constants above are wanted

    inputs: dict[str, Input] = {}
    alike: dict[str, int] = defaultdict(int)
    widest = 0
    attending = attention_rows((one.module, one.shape) for one in group)
    made: list[int] = []
    given = 0.0
    for tensor in group:
        if len(tensor.shape) != 2:
            continue
        share = active if structure.expert_of(tensor.name) is not None else None
        if share is None:
            widest = max(widest, *tensor.shape)
        if tensor.scheme is not None:
            site = structure.input_site(tensor.module)
            alike[_NUMBER.sub("*", site)] += tensor.parameters
            rows = fed = 0
            if share is None:
                made.append(tensor.shape[0])
                rows, fed = tensor.shape[0], tensor.parameters
            elif is_last(tensor.module):
                fed = tensor.parameters
                given += share * tensor.shape[0]
            before = inputs.get(site, Input(tensor.shape[1], 0, share))
            inputs[site] = replace(
                before,
                largest=max(before.largest, tensor.parameters),
                rows=max(before.rows, rows),
                fed=max(before.fed, fed),
            )
    numbers = [tensor.parameters for tensor in group]
    folded = max(alike.values(), default=0)
    ordered = sorted(inputs.values(), key=lambda one: (-one.width, -one.largest))
    return Block(
        4 * sum(numbers), max(numbers), widest, tuple(ordered), folded, attending,
        tuple(sorted(made, reverse=True)), given,
    )  # fmt: skip


def rows_together(rows: int) -> int:
    """The fewest rows that are rounded together, where so many share a scale: their codes, of any
    width, fill words."""
    return lcm(32, rows)


def read_back(tensor: "Planned") -> int:
    """Bytes that it takes to read a quantized matrix back: codes, words twice, and scales."""
    assert tensor.scheme is not None
    rows, columns = tensor.scheme.grid(tensor.shape)
    return tensor.parameters * (4 + tensor.scheme.bits) // 4 + _SCALE_BYTES * rows * columns


def groups(shapes: Shapes, block: Block, setting: Setting) -> int:
    """How many times the inputs of a block are measured, some at a time."""
    if not shapes.grams or shapes.chained:
        return 1
    total = sum(gram_sum_bytes(one.width) for one in block.inputs)
    return max(1, -(-total // setting.gram_bytes))
