"""numpy, imported when first used.

`qtool inspect` reads headers and needs no arrays; numpy alone would be a third of its time.
Modules on its path write

    if TYPE_CHECKING:
        import numpy as np
    else:
        from qtool.lazy_numpy import np

and `from __future__ import annotations`, since annotations would be a first use.
"""

from typing import Any


class _Numpy:
    def __getattr__(self, name: str) -> Any:
        import numpy

        value = getattr(numpy, name)
        setattr(self, name, value)
        return value


np = _Numpy()
