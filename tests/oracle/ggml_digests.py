"""Writes gguf_digests.json: digests of what ggml's own encoder makes of gguf_data.py, both in
tests/support/kernels.

    QTOOL_ORACLE_GGML=.../libggml-base.so python tests/oracle/ggml_digests.py

ggml 0.25.3 (llama.cpp 0c1e57098), built for baseline x86-64.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from oracle import ggml_blocks  # noqa: E402

from qtool.gguf_types import BY_NAME  # noqa: E402
from support.kernels import gguf_data  # noqa: E402


def main() -> None:
    """One digest for each type and kind of importance, over the kinds of weights named with it."""
    digests: dict[str, dict[str, list[str]]] = {}
    for block in BY_NAME.values():
        digests[block.name] = {}
        for importance in gguf_data.IMPORTANCE:
            if block.needs_importance and importance == "none":
                continue
            digest, kinds = sha256(), []
            for kind in gguf_data.DIGESTED:
                weight = gguf_data.digested(kind)
                factors = gguf_data.importance(importance, 1280)
                blocks = ggml_blocks.encode(weight, block, factors)
                if blocks is not None:
                    kinds.append(kind)
                    digest.update(blocks.tobytes())
            digests[block.name][importance] = [digest.hexdigest()[:32], ",".join(kinds)]
    out = TESTS / "support" / "kernels" / "gguf_digests.json"
    out.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
