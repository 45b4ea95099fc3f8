"""Conversions in this process, of the first block of `tiny`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import quantizing
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from qtool.artifact import Artifact
from qtool.convert.certificate import Converted
from qtool.convert.request import Request
from qtool.convert.run import convert
from qtool.convert.targets import target
from qtool.formats.gguf_file import GgufFile
from qtool.hub import resolve
from qtool.runs.progress import Progress

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
