"""GGUF files of GPTQ's sweep, against the sweep itself."""

from pathlib import Path

import numpy as np
import pytest

from qtool import tiny
from qtool.cuda.device import Device
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.gptq.levels import SWEPT
from qtool.gguf.open import open_source
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.gguf_mixtures import kinds
from qtool.messages.summary import OUTPUTS
from qtool.verification.run import verify_artifact
from support.gguf.gguf_runs import fed_blocks, write
from support.models.small_models import checkpoint
from support.runs import quantizing

TINY = Path(tiny.__file__).parent


def model_of(models: Path, name: str) -> Path:
    """A small one; "tiny" has two blocks of that."""
    if name == "tiny":
        return quantizing.first_blocks_of_tiny(models / "two blocks", 2)
    return checkpoint(models, name, "bfloat16").path


def check_fed(
    model: Path,
    out: Path,
    chosen: list[str],
    monkeypatch: pytest.MonkeyPatch,
    device: Device | None = None,
) -> None:
    """Every matrix of a decoder block, when the block has been swept, is the file's, dequantized,
    at the checkpoint's place; whatever the order of rows and however tensors are parted there."""
    fed = fed_blocks(monkeypatch)
    made = write(model, out, *chosen, device=device)
    with GgufFile.open(out) as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    swept, head = {layer.name for layer in made.layers if layer.of == OUTPUTS}, kinds.head_of(types)
    assert (head in swept) == (types[head] in SWEPT)
    swept -= {head}
    matrices = {n for n in types if n.startswith("blk.") and types[n] in SWEPT}
    assert swept == matrices and len(swept) >= 8
    compared = 0
    with gguf_weights(open_source(out)) as (weights, source):
        for tensor in source.tensors:
            for key in tensor.origin if tensor.name in swept else ():
                np.testing.assert_array_equal(fed[key].numpy(), weights.float32(key), key)
                compared += 1
    assert compared >= len(swept)
    assert verify_artifact(out, against=model).ok
