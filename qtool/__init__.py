"""qtool: turn any Hugging Face decoder LLM into a quantized artifact that engines load.

From Python: `qtool.quantize`, `qtool.open`, `qtool.evaluate` and others; see qtool/api/.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtool.api import (
        Model,
        compare,
        convert,
        download,
        evaluate,
        fit,
        generate,
        open,
        plan,
        quantize,
        sample,
        verify,
    )

__version__ = "0.1.0"
__all__ = [
    "Model", "__version__", "compare", "convert", "download", "evaluate", "fit", "generate", "open",
    "plan", "quantize", "sample", "verify",
]  # fmt: skip

# In an installed package formats/ and recipes/ lie inside qtool/; in a source checkout they lie
# beside it. Looking there too makes `python -m qtool` work from a clone without installing.
if not (Path(__file__).parent / "formats").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    """The functions of qtool/api/, imported when they are asked for: importing qtool is quick."""
    if name in __all__:
        from qtool import api

        return getattr(api, name)
    raise AttributeError(f"module 'qtool' has no attribute {name!r}")
