"""qtool: turn any Hugging Face decoder LLM into a quantized artifact that engines load."""

from pathlib import Path

__version__ = "0.1.0"

# In an installed package formats/ and recipes/ lie inside qtool/; in a source checkout they lie
# beside it. Looking there too makes `python -m qtool` work from a clone without installing.
if not (Path(__file__).parent / "formats").is_dir():
    __path__.append(str(Path(__file__).parent.parent))
