"""Write tests/support/gguf/gguf_types.json: the types llama-quantize chooses, and qtool has to.

    python tests/oracle/gguf_types.py LLAMA_QUANTIZE [FOLDER]

LLAMA_QUANTIZE is the program of llama.cpp 0c1e57098. The models of
tests/support/gguf/gguf_shapes.py are written as files without data, and `--dry-run` tells what
would become of each tensor. FOLDER holds the real smollm2-f16.gguf and
smollm2-768-f16.gguf, whose types must be those of the models so called.

A golden is: model -> options -> file type -> the number of fallbacks and a digest of the lines
"name type" in the order of writing, and without options how many tensors there are of each type;
null where llama-quantize refuses.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from qtool.formats.gguf_values import Kind  # noqa: E402
from qtool.gguf.source import GgufSource  # noqa: E402
from qtool.gguf_mixtures.table import FILE_TYPES  # noqa: E402
from support.gguf import gguf_shapes  # noqa: E402

Goldens = dict[str, dict[str, list[object] | None]]  # options -> file type -> golden

GOLDEN = Path(__file__).parents[1] / "support" / "gguf" / "gguf_types.json"
# Options that go beyond the file type; with what file types each is tried.
SOME = ("Q4_K_M", "Q2_K", "IQ3_XXS", "Q8_0", "IQ1_S", "MXFP4_MOE", "F16")
QUANTIZED = SOME[:-1]  # llama-quantize ignores --tensor-type in files of plain numbers
OPTIONS = {
    "--imatrix importance.gguf": tuple(FILE_TYPES),
    "--pure": SOME,
    "--output-tensor-type q8_0": SOME,
    "--token-embedding-type f16": SOME,
    "--token-embedding-type q4_1 --output-tensor-type q5_1": SOME,
    "--leave-output-tensor": SOME,
    r"--tensor-type attn_v=q8_0 --tensor-type BLK\.(0|3)\.f=f16 --tensor-type n_d=q6_k": QUANTIZED,
    "--pure --tensor-type embd=q8_0 --token-embedding-type q5_0": QUANTIZED,
}  # fmt: skip
_LINE = re.compile(r"^\[ *\d+/ *\d+\] (\S+) +- \[.*?\], type = +(\w+), size = .*?(?:\((\w+)\))?$")


def write_header(path: Path, model: GgufSource) -> None:
    """The model as a file whose data is a hole."""
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in model.metadata.items():
        if key == "general.architecture":
            continue
        if value.kind is Kind.ARRAY:
            writer.add_array(key, list(value.value))
        else:
            writer.add_key_value(key, value.value, gguf.GGUFValueType(value.kind))
    size = 0
    for tensor in model.tensors:
        dtype = np.dtype(np.float32 if tensor.type.name == "F32" else np.float16)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.nbytes)
        size += -(-tensor.nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + size)


def write_importance(path: Path) -> None:
    """An importance matrix of one entry: whether there is any decides about types."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for end in ("in_sum2", "counts"):
        writer.add_tensor(f"blk.0.attn_q.weight.{end}", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def counts(types: dict[str, str]) -> str:
    """How many tensors there are of each type."""
    return ", ".join(f"{n} {type_}" for type_, n in sorted(Counter(types.values()).items()))


def golden(types: dict[str, str], fallbacks: int) -> list[object] | None:
    """What is kept of a choice of types; None where llama-quantize refuses."""
    if not types:
        return None
    text = "".join(f"{name} {type_}\n" for name, type_ in types.items())
    return [fallbacks, sha256(text.encode()).hexdigest()[:12]]


def ask(program: str, file: Path, file_type: str, options: str) -> tuple[dict[str, str], int]:
    """The type of each tensor as llama-quantize says, and the fallbacks it counts."""
    command = [program, *options.split(), "--dry-run", str(file), file_type]
    result = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    text = result.stdout + result.stderr
    if result.returncode:
        # The one thing that it cannot do without saying so.
        assert "no tensor type fallback is defined" in text, f"{command}\n{text[-2000:]}"
        return {}, 0
    lines = re.sub(r"^warning: .*\n", "", text, flags=re.MULTILINE).splitlines()
    types = {m[1]: (m[3] or m[2]).upper() for line in lines if (m := _LINE.match(line))}
    count = re.search(r"WARNING: (\d+) of (\d+) tensor", text)
    total = re.search(r"and (\d+) tensors from", text)
    assert total is not None and len(types) == int(total[1]), text[-2000:]
    return types, int(count[1]) if count else 0


def collect(program: str, folder: Path, model: GgufSource) -> Goldens:
    """The goldens of a model, for every option and file type."""
    file = folder / "model.gguf"
    write_header(file, model)
    write_importance(folder / "importance.gguf")
    found: Goldens = {}
    for options, file_types in {"": tuple(FILE_TYPES), **OPTIONS}.items():
        found[options] = {}
        for file_type in file_types:
            types, fallbacks = ask(program, file, file_type, options)
            made = golden(types, fallbacks)
            if made is not None and not options:
                made.append(counts(types))
            found[options][file_type] = made
    return found


def main() -> None:
    """Ask for every model, file type and option."""
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: collect(program, Path(folder), make())
            for name, make in gguf_shapes.MODELS.items()
        }
    for name in ("smollm2", "smollm2-768") if len(sys.argv) > 2 else ():
        for file_type in FILE_TYPES:
            file = Path(sys.argv[2]) / f"{name}-f16.gguf"
            made = golden(*ask(program, file.resolve(), file_type, ""))
            assert (made and made[:2]) == ((other := found[name][""][file_type]) and other[:2])
    GOLDEN.write_text(_lines(found))


def _lines(found: dict[str, Goldens]) -> str:
    """The goldens as JSON, a line for each model and each of its options."""
    models = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(made)}" for key, made in cases.items())
        + "}"
        for name, cases in found.items()
    )
    return "{\n" + ",\n".join(models) + "\n}\n"


if __name__ == "__main__":
    main()
