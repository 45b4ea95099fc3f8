"""llama-quantize still says what tests/support/gguf/gguf_types.json says it does.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools.
"""

import json
from pathlib import Path

import pytest
from oracle import gguf_types, llama_quantize

from support.gguf import gguf_shapes

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", gguf_shapes.MODELS)
def test_goldens_are_what_llama_quantize_says(name: str, tmp_path: Path) -> None:
    folder = llama_quantize.tools()
    if folder is None:
        pytest.skip("QTOOL_ORACLE_LLAMA is not set: it names the folder of llama.cpp's tools")
    program = str((folder / "llama-quantize").resolve())
    found = gguf_types.collect(program, tmp_path, gguf_shapes.MODELS[name]())
    assert found == json.loads(gguf_types.GOLDEN.read_text())[name]
