"""Writes gguf_files.json: digests of what llama-quantize makes of gguf_files.py, both in
tests/support/gguf.

    QTOOL_ORACLE_LLAMA=.../bin python tests/oracle/llama_digests.py

llama.cpp 0c1e57098. A digest is of all tensor data with its padding; null where it refuses.
"""

import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from oracle import llama_quantize  # noqa: E402

from qtool.gguf.importance.imatrix import write_importance  # noqa: E402
from qtool.gguf_mixtures.table import FILE_TYPES  # noqa: E402
from support.gguf import gguf_files  # noqa: E402


def main() -> None:
    """One digest for each model, recipe, and with and without importance."""
    digests: dict[str, dict[str, list[str | None]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, experts in gguf_files.SMALL.items():
            model = gguf_files.model(folder / f"{title}.gguf", experts, gguf_files.SMALL_LAYERS)
            factors = folder / f"{title}-imatrix.gguf"
            write_importance(factors, gguf_files.importance(model))
            digests[title] = {}
            for recipe in map(str.lower, FILE_TYPES):
                found = [
                    llama_quantize.quantized(model, recipe, imatrix, folder)
                    for imatrix in (None, factors)
                ]
                digests[title][recipe] = [None if one is None else one.padding for one in found]
    (TESTS / "support" / "gguf" / "gguf_files.json").write_text(
        json.dumps(digests, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
