"""One module per on-disk format; what those of checkpoints share is in `facts`.

The names below are imported when first asked for: who reads a GGUF file needs none of the others,
and they would be a tenth of the time of `qtool inspect`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtool.formats.facts import ArtifactScheme, Facts, Options
    from qtool.formats.known import FORMATS, detect

__all__ = ["FORMATS", "ArtifactScheme", "Facts", "Options", "detect"]

_HOME = {"FORMATS": "known", "detect": "known"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'facts')}"), name)
    globals()[name] = value
    return value
