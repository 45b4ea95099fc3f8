"""What a format module is told when it writes, and what it finds out when it reads.

Every format module has the same functions:

    NAME
    choose(schemes, layout)                  -> Options        one layout for a whole artifact
    supports(scheme, shape, options)         -> str | None     the reason why it cannot be stored
    supports_together(schemes)               -> str | None     the same, of an artifact's mixture
    specs(module, scheme, shape, options)    -> list[TensorSpec]
    pack(module, quant, options)             -> dict[str, array]
    unpack(module, get, found)               -> GroupQuant
    config(facts, options)                   -> dict           quantization_config of config.json
    side_files(facts, options)               -> dict[str, dict]   further JSON files
    detect(config)                           -> ArtifactScheme | None

A module is named as in the checkpoint, without `.weight`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qtool.errors import FormatError
from qtool.scheme import Scheme


@dataclass(frozen=True)
class Options:
    """How a format is laid out: awq: gemm, gemv, gemv_fast, llm_awq; gptq: v1, v2."""

    layout: str


@dataclass(frozen=True)
class Facts:
    """What a quantization_config tells about a whole artifact."""

    quantized: Mapping[str, Scheme]  # every quantized module
    dense: Sequence[str] = ()  # every linear module left as it was, routers included
    version: str = ""  # of qtool
    static_groups: bool = True
    damp_percent: float | None = None
    act_order: bool = False  # g_idx is not k // group_size
    mse: bool = False

    @property
    def default(self) -> Scheme:
        """The scheme of most modules."""
        if not self.quantized:
            raise FormatError("nothing is quantized: there is no quantization_config to write.")
        return Counter(self.quantized.values()).most_common(1)[0][0]

    @property
    def overrides(self) -> dict[str, Scheme]:
        """The modules whose scheme is another one."""
        default = self.default
        return {name: scheme for name, scheme in self.quantized.items() if scheme != default}


@dataclass(frozen=True)
class ArtifactScheme:
    """What a config says about a quantized checkpoint. `scheme` is None where not decoded here."""

    format: str
    quant_method: str
    scheme: Scheme | None = None
    layout: str = ""
    dense: tuple[str, ...] = ()  # as written: names or patterns
    overrides: tuple[tuple[str, Mapping[str, object]], ...] = field(default=())


def head_quantized(facts: Facts) -> bool:
    """Whether the output head is among the quantized modules."""
    return any(name.rpartition(".")[2] in ("lm_head", "embed_out") for name in facts.quantized)


def first(config: Mapping[str, object], *keys: str) -> object:
    """The value under the first of several synonyms that is there, or None."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def whole(value: object, what: str, low: int, high: int) -> int:
    """A whole number from a config, within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"quantization_config: {what} is {value!r}; expected {low} to {high}.")
    return value


def group_size_of(value: object) -> int:
    """A group size: -1, or a positive number."""
    size = whole(value, "group_size", -1, 1 << 24)
    if size == 0:
        raise FormatError("quantization_config: group_size is 0; expected -1 or a positive number.")
    return size


def names_of(value: object) -> tuple[str, ...]:
    """A list of names from a config, or none."""
    if not isinstance(value, list):
        return ()
    return tuple(name for name in value if isinstance(name, str))


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """FormatError where a stored tensor has another shape than its neighbours ask for."""
    if found != expected:
        raise FormatError(f"{name}: the shape is {list(found)}; expected {list(expected)}.")
