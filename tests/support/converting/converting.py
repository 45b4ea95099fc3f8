"""Conversions in this process, of the first block of `tiny`."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from qtool.artifacts.artifact import Artifact
from qtool.converting.certificate import Converted
from qtool.converting.request import Request
from qtool.converting.run import convert
from qtool.converting.targets import target
from qtool.formats.gguf_file import GgufFile
from qtool.hub import resolve
from qtool.messages.progress import Progress
from support.runs import quantizing

MATRICES, TENSORS = 7, 11  # of the model below


def first_block(folder: Path) -> Path:
    """`tiny` with one decoder block."""
    source = resolve("tiny")
    folder.mkdir(parents=True)
    with safe_open(source / "model.safetensors", "pt") as file:
        names = [n for n in file.keys() if "layers." not in n or "layers.0." in n]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def artifacts(
    root: Path, cases: dict[str, tuple[str, ...]], shard: int = 1 << 40
) -> dict[str, Path]:
    """The model rounded to nearest, by the settings of each case."""
    model = first_block(root / "model")
    for name, sets in cases.items():
        quantizing.quantize(
            model, "w4g128-rtn", root / name, *sets, max_shard_bytes=shard, name="org/tiny"
        )
    return {name: root / name for name in cases}


def converted(source: Path, to: str, out: Path, **more: object) -> Converted:
    request = Request(source, target(to), out, **more)  # type: ignore[arg-type]
    return convert(request, Progress(quiet=True))


def run(source: Path, to: str, out: Path, **more: object) -> Path:
    converted(source, to, out, **more)
    return out


def weights(folder: Path) -> dict[str, bytes]:
    """The weight files, and their index."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


def place(to: str) -> str:
    """What an artifact of a format may be called."""
    return f"{to}.gguf" if to.startswith("gguf") else to


def stored(artifact: Path) -> dict[str, Any]:
    """The weight files; of a GGUF file, whose metadata tell where it comes from, the tensors."""
    if artifact.is_dir():
        return dict(weights(artifact))
    with GgufFile.open(artifact) as file:
        return {
            name: (info.type.name, file.read_rows(name, 0, info.rows).tobytes())
            for name, info in file.tensors.items()
        }


def numbers(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor, dequantized."""
    return dict(Artifact.open(folder).dequantized())


def said_of(file: Path) -> dict[str, Any]:
    """What the last conversion says of itself."""
    with GgufFile.open(file) as opened:
        record = json.loads(opened.metadata["qtool.provenance"].value)
    found: dict[str, Any] = record["conversions"][-1]
    return found


def types(file: Path) -> dict[str, str]:
    with GgufFile.open(file) as opened:
        return {name: info.type.name for name, info in opened.tensors.items()}


def their_order(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of q and k as llama.cpp rotates them: neighbours instead of halves."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def assert_read_alike(file: Path, source: Path) -> None:
    """Matrices of blocks and the embedding, as gguf-py reads them."""
    theirs = {}
    for tensor in gguf.GGUFReader(file).tensors:
        theirs[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    for name, values in numbers(source).items():
        if name == "model.embed_tokens.weight":
            np.testing.assert_array_equal(theirs["token_embd.weight"], values)
        if values.ndim == 2 and "layers" in name:
            block, part = name.split(".")[2], name.split(".")[-2]
            ours = {
                "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
                "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
                "down_proj": "ffn_down",
            }[part]  # fmt: skip
            if part in ("q_proj", "k_proj"):
                values = their_order(values, 4 if part == "q_proj" else 2)
            np.testing.assert_array_equal(theirs[f"blk.{block}.{ours}.weight"], values)
