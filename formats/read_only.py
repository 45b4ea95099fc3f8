"""What the modules of formats that are read, and not written, have in the place of writing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats.facts import Facts, Options
from qtool.formats.safetensors_header import TensorSpec
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REASON = "this format is read, and not written, by this version"


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """There is one layout."""
    return Options("")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Nothing is written in this format."""
    return _REASON


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """Nothing is written in this format."""
    return _REASON


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """Nothing is written in this format."""
    raise FormatError(f"{module}: {_REASON}")


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """Nothing is written in this format."""
    raise FormatError(f"{module}: {_REASON}")


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """Nothing is written in this format."""
    raise FormatError(_REASON)


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """Nothing is written in this format."""
    return {}
