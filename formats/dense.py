"""Dense: the transformed, unquantized checkpoint; every tensor in its own dtype and name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats.facts import ArtifactScheme, Facts, Look, Options
from qtool.formats.safetensors_file import TensorSpec
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    from numpy.typing import NDArray


NAME = "dense"
CODES: tuple[str, ...] = ()
_REASON = "the dense format stores no codes; choose awq or gptq"


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """There is one layout."""
    return Options("")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Nothing quantized is stored here."""
    return _REASON


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Nothing quantized is stored here."""
    return _REASON if any(True for _ in schemes) else None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """Nothing quantized is stored here."""
    raise FormatError(f"{module}: {_REASON}")


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """Nothing quantized is stored here."""
    raise FormatError(f"{module}: {_REASON}")


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """Nothing quantized is stored here."""
    raise FormatError(f"{module}: stored dense, there are no codes to read")


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Nothing quantized is stored here."""
    raise FormatError(f"{module}: stored dense, there are no codes to read")


def config(facts: Facts, options: Options) -> None:
    """A dense checkpoint has no quantization_config."""
    return None


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """Dense is what no other format claims: an empty quantization_config."""
    return None if config else ArtifactScheme(NAME, "none")
