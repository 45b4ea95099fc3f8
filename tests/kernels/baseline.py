"""Whether a wheel works on an x86-64 processor without AVX: `make test-wheel` runs it emulated.

    python tests/kernels/baseline.py unpack WHEEL FOLDER
    python tests/kernels/baseline.py quantize FOLDER [--isa scalar]

`unpack` requires that the wheel contains one shared library. `quantize` takes qtool from the
folder, quantizes a matrix of the shipped model with round to nearest and with every GGUF type, and
prints digests of what it made. Neither needs more than numpy, which torch does.
"""

import argparse
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LIBRARY = "qtool/libqtool_kernels.so"
NAME = "model.layers.0.mlp.gate_proj.weight"
ROWS = 32


def unpack(wheel: Path, folder: Path) -> None:
    """The wheel's files in the folder; ends the process unless one library is among them."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [name for name in names if Path(name).suffix in {".so", ".pyd", ".dylib"}]
        if libraries != [LIBRARY]:
            sys.exit(f"{wheel.name} contains {libraries}, expected [{LIBRARY!r}]")
        archive.extractall(folder)
    print(f"{wheel.name}: {len(names)} files, one library")


def show(what: str, *arrays: NDArray[np.generic]) -> None:
    """One line: a digest of all of the arrays."""
    digest = sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    print(what, digest.hexdigest()[:16])


def quantize(folder: Path, isa: str | None) -> None:
    """Digests of what the package in the folder makes of one matrix."""
    sys.path.insert(0, str(folder))
    import qtool
    from qtool import native_gguf
    from qtool.checkpoints.checkpoint import Checkpoint
    from qtool.gguf_types import BY_NAME
    from qtool.native import library as native
    from qtool.native.rounding import quantize_groups

    at = Path(qtool.__path__[0])
    if at.resolve() != (folder / "qtool").resolve():
        sys.exit(f"qtool comes from {at}, expected {folder}")
    if isa is not None and native.selected() != isa:
        sys.exit(f"{native.selected()} was chosen, expected {isa}")
    print(f"{native.selected()} of {', '.join(native.available())}", file=sys.stderr)
    weight = Checkpoint.open(at / "tiny").float32(NAME)[:ROWS]
    weight = np.ascontiguousarray(weight, np.float32)
    rounded = quantize_groups(weight, bits=4, group_size=128, symmetric=True, dequantize=True)
    assert rounded.dequantized is not None
    show("round to nearest", rounded.codes, rounded.scale, rounded.zero, rounded.dequantized)
    factors = np.linspace(0.5, 2.0, weight.shape[1], dtype=np.float32)
    for name, block in BY_NAME.items():
        blocks = native_gguf.encode(weight, block, factors)
        show(name, blocks, native_gguf.dequantize(blocks, block, weight.shape[1]))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("unpack")
    one.add_argument("wheel", type=Path)
    one.add_argument("folder", type=Path)
    other = commands.add_parser("quantize")
    other.add_argument("folder", type=Path)
    other.add_argument("--isa")
    options = parser.parse_args()
    if options.command == "unpack":
        unpack(options.wheel, options.folder)
    else:
        quantize(options.folder, options.isa)


if __name__ == "__main__":
    main()
