"""What a format module is told when it writes, and what it finds out when it reads.

Every format module has the same functions:

    NAME
    CODES                                    last parts of the names of tensors that hold codes
    choose(schemes, layout)                  -> Options        one layout for a whole artifact
    supports(scheme, shape, options)         -> str | None     the reason why it cannot be stored
    supports_together(schemes)               -> str | None     the same, of an artifact's mixture
    specs(module, scheme, shape, options)    -> list[TensorSpec]
    pack(module, quant, options)             -> dict[str, array]
    scheme_in(module, look, found)           -> Scheme, shape  of a stored matrix, from shapes
    unpack(module, get, found)               -> GroupQuant
    config(facts, options)                   -> dict           quantization_config of config.json
    side_files(facts, options)               -> dict[str, dict]   further JSON files
    detect(config)                           -> ArtifactScheme | None

and CONFIG_KEYS where config() goes into config.json under other names than quantization_config.

A module is named as in the checkpoint, without `.weight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from qtool.errors import FormatError
from qtool.formats.layer_names import experts_of, is_head
from qtool.messages.printable import in_json
from qtool.scheme import Scheme

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Options:
    """How a format is laid out: awq: gemm, gemv, gemv_fast, llm_awq; gptq: v1, v2."""

    layout: str
    input_scale: str = ""  # the tensor of a stored scale of all inputs, of each quantized matrix


@dataclass(frozen=True)
class Facts:
    """What a quantization_config tells about a whole artifact."""

    quantized: Mapping[str, Scheme]  # every quantized module
    dense: Sequence[str] = ()  # every linear module left as it was, routers included
    version: str = ""  # of qtool
    static_groups: bool = True
    damp_percent: float | None = None  # None: the method was not GPTQ
    activations: Mapping[str, object] | None = None  # the recipe's table
    kv_cache: Mapping[str, object] | None = None  # likewise
    rotated_inputs: Mapping[str, int] = field(default_factory=dict)  # modules, and the size of H
    rotated_heads: Mapping[str, int] = field(default_factory=dict)  # of attention, likewise
    outlier_threshold: float = 6.0  # of LLM.int8()
    act_order: bool = False  # g_idx is not k // group_size
    mse: bool = False

    @property
    def default(self) -> Scheme:
        """The scheme of most modules."""
        if not self.quantized:
            raise FormatError("nothing is quantized: there is no quantization_config to write")
        return Counter(self.quantized.values()).most_common(1)[0][0]

    @property
    def overrides(self) -> dict[str, Scheme]:
        """The modules whose scheme is another one."""
        default = self.default
        return {name: scheme for name, scheme in self.quantized.items() if scheme != default}


@dataclass(frozen=True)
class Group:
    """The modules that a config's targets name, and how they are stored."""

    targets: tuple[str, ...]  # names, classes such as Linear, or "re:" and an expression
    scheme: Scheme
    activations: Mapping[str, object] | None = None  # as the config has it; None: unquantized


@dataclass(frozen=True)
class Writer:
    """A tool that the config names as the one that wrote the file."""

    name: str
    version: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}".strip()


@dataclass(frozen=True)
class ArtifactScheme:
    """What a config says about a quantized checkpoint. `scheme` is None where not decoded here.

    `format` and `layout` say how matrices are stored; `quant_method` names the config, whose rules
    are not always those of the format.
    """

    format: str
    quant_method: str
    scheme: Scheme | None = None
    layout: str = ""
    dense: tuple[str, ...] = ()  # as written: names or patterns
    overrides: tuple[tuple[str, Mapping[str, object]], ...] = field(default=())
    groups: tuple[Group, ...] = ()  # of compressed-tensors; `scheme` is that of the first
    writer: Writer | None = None  # where it is known, and GPTQ's zeros depend on it

    @property
    def label(self) -> str:
        """Format and layout, for people."""
        text = f"{self.format} {self.layout}".strip()
        own = self.quant_method == "auto-round" != self.format
        return f"{self.quant_method}, stored as {text}" if own else text


def in_config(module: ModuleType, facts: Facts, options: Options) -> dict[str, Any]:
    """What a format adds to config.json."""
    table = module.config(facts, options)
    return dict.fromkeys(getattr(module, "CONFIG_KEYS", ("quantization_config",)), table)


def head_quantized(facts: Facts) -> bool:
    """Whether the output head is among the quantized modules."""
    return any(map(is_head, facts.quantized))


def left_out(facts: Facts) -> list[str]:
    """Linear layers that loaders must not take for quantized ones. The head is among them also
    where it is tied and has no tensor: model classes have a linear layer there."""
    names = list(facts.dense)
    if not any(map(is_head, [*names, *facts.quantized])):
        names.append("lm_head")
    return names


def whole_experts(chosen: Iterable[str], everything: Iterable[str]) -> set[str]:
    """The `...experts` layers of which every linear is among `chosen`: engines ask for that name
    and for no expert's own."""
    names = set(chosen)
    layers: dict[str, bool] = {}
    for name in everything:
        if found := experts_of(name):
            layers[found[0]] = layers.get(found[0], True) and name in names
    return {layer for layer, every in layers.items() if every}


def first(config: Mapping[str, object], *keys: str) -> object:
    """The value under the first of several synonyms that is there, or None."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def whole(value: object, what: str, low: int, high: int) -> int:
    """An integer from a config, within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(
            f"quantization_config: {what} is {in_json(value)}; expected {low} to {high}"
        )
    return value


def group_size_of(value: object) -> int:
    """A group size: -1, or a positive number."""
    size = whole(value, "group_size", -1, 1 << 24)
    if size == 0:
        raise FormatError("quantization_config: group_size is 0; expected -1 or a positive number")
    return size


def names_of(value: object) -> tuple[str, ...]:
    """A list of names from a config, or none."""
    if not isinstance(value, list):
        return ()
    return tuple(name for name in value if isinstance(name, str))


class Stored(Protocol):
    """A stored tensor as far as it is known: a header's entry, or an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> object:
        """Its type, as safetensors or as numpy calls it."""
        ...


Look = Callable[[str], Stored | None]

_WORDS = {"I32": 4, "int32": 4, "I16": 2, "int16": 2}


def find(look: Look, name: str, dimensions: int = 2) -> Stored:
    """A stored tensor; FormatError where it is missing or has other dimensions."""
    stored = look(name)
    if stored is None:
        raise FormatError(f"{name}: missing, though the rest of its matrix is there")
    if len(stored.shape) != dimensions:
        raise FormatError(f"{name}: the shape is {list(stored.shape)}; expected {dimensions} axes")
    return stored


def find_words(look: Look, name: str, width: int = 4, dimensions: int = 2) -> Stored:
    """The same for packed words, signed integers of `width` bytes."""
    stored = find(look, name, dimensions)
    if _WORDS.get(str(stored.dtype)) != width:
        raise FormatError(f"{name}: the dtype is {stored.dtype}; expected int{8 * width} words")
    return stored


def find_floats(look: Look, name: str) -> Stored:
    """The same for scales."""
    stored = find(look, name)
    if str(stored.dtype) not in ("F16", "BF16", "F32", "float16", "float32"):
        raise FormatError(f"{name}: the dtype is {stored.dtype}; expected a float type")
    return stored


def read_all(
    module: str, get: Callable[[str], NDArray[Any]], names: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """The stored tensors of a module that are there, by their full names."""
    found = {}
    for name in (f"{module}.{last}" for last in names):
        try:
            found[name] = get(name)
        except KeyError:
            continue  # the caller knows which ones it cannot do without
    return found


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """FormatError where a stored tensor has another shape than its neighbours ask for."""
    if found != expected:
        raise FormatError(f"{name}: the shape is {list(found)}; expected {list(expected)}")
