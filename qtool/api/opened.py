"""An artifact or model opened from Python, to look at what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qtool.diff.sides import Item, Side
    from qtool.scheme import GroupQuant


@dataclass(frozen=True)
class Model:
    """An artifact opened for reading; headers only, until weights are asked for."""

    side: Side

    @property
    def path(self) -> Path:
        """What was opened."""
        return self.side.path

    @property
    def format(self) -> str:
        """Such as `awq gemm`, `gguf`, `dense`."""
        return self.side.format

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Config, provenance and other keys, nested ones joined by dots."""
        return self.side.metadata

    @property
    def tensors(self) -> Mapping[str, Item]:
        """Name, shape, dtype, scheme (None: dense) and stored bytes of every tensor."""
        return self.side.items

    def float32(self, name: str) -> NDArray[np.float32]:
        """One tensor as the numbers it stands for, dequantized exactly. SourceError without it."""
        import numpy

        from qtool.diff.sides import rows_of

        item = self._item(name)
        values = self.side.rows(item.name, 0, rows_of(item.shape))
        return numpy.ascontiguousarray(values, numpy.float32).reshape(item.shape)

    def codes(self, name: str) -> GroupQuant | None:
        """Codes, scales and zeros of one matrix; None where it has none of single weights."""
        return self.side.quant(self._item(name).name)

    def _item(self, name: str) -> Item:
        from qtool.errors import SourceError

        found = self.tensors.get(name) or self.tensors.get(f"{name}.weight")
        if found is None:
            raise SourceError(f"{self.path}: has no tensor {name!r}")
        return found


def open(model: str | Path) -> Model:
    """Open an artifact of any format that qtool reads, or an unquantized model."""
    from qtool.diff.gguf import open_side
    from qtool.hub import resolve

    return Model(open_side(resolve(str(model))))
