"""What inspect says of GGUF files whose contents can be worked out by hand."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from qtool import native_gguf
from qtool.checkpoints.gguf_models import gguf_models
from qtool.cli.main import app
from qtool.errors import FormatError, QtoolError, SourceError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from qtool.gguf import statistics
from qtool.gguf.inspect import GgufInspection, tensor_detail
from qtool.gguf_types import BY_NAME
from support.gguf import gguf_big
from support.gguf.gguf_bytes import Gguf, array, entry, info

# Of inspect's JSON for safetensors, what a reader of either relies on.
COMMON = {"format", "quant_method", "bits_per_weight", "size_bytes", "parameters",
          "unquantized_share", "provenance", "tensors"}  # fmt: skip
ROW = {"name", "shape", "dtype", "scheme", "bits_per_weight", "bytes"}
Q4_K, Q6_K = BY_NAME["Q4_K"], BY_NAME["Q6_K"]
ARCH = entry("general.architecture", Kind.STRING, "llama")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    if result.exception is not None and isinstance(result.exception, QtoolError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def model(path: Path) -> tuple[Path, NDArray[np.float32]]:
    """Two layers of Q4_K and Q6_K, a norm, an f16 embedding and a small tokenizer."""
    random = np.random.default_rng(5)
    weight = random.standard_normal((4, 512)).astype(np.float32)
    parts = [
        ("token_embd.weight", (3, 512), 1, weight[:3].astype(np.float16).tobytes()),
        ("blk.0.ffn_up.weight", (4, 512), 12, native_gguf.encode(weight, Q4_K).tobytes()),
        ("blk.1.ffn_up.weight", (4, 512), 12, native_gguf.encode(weight, Q4_K).tobytes()),
        ("blk.0.ffn_down.weight", (4, 512), 14, native_gguf.encode(weight, Q6_K).tobytes()),
        ("output_norm.weight", (512,), 0, weight[0].tobytes()),
    ]
    infos, data = [], b""
    for name, shape, kind, raw in parts:
        infos.append(info(name, shape, kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    entries = [
        ARCH,
        entry("general.name", Kind.STRING, "Tiny \x1b[31m Llama"),
        entry("general.file_type", Kind.UINT32, 15),
        entry("llama.block_count", Kind.UINT32, 2),
        entry("llama.embedding_length", Kind.UINT32, 512),
        entry("llama.rope.freq_base", Kind.FLOAT32, math.inf),
        array("llama.rope.factors", Kind.FLOAT32, [1.0, math.nan]),
        entry("tokenizer.ggml.model", Kind.STRING, "gpt2"),
        entry("tokenizer.ggml.pre", Kind.STRING, "smollm"),
        array("tokenizer.ggml.tokens", Kind.STRING, [f"t{i}" for i in range(20)]),
        array("tokenizer.ggml.merges", Kind.STRING, [f"a b{i}" for i in range(12)]),
        entry("tokenizer.ggml.bos_token_id", Kind.UINT32, 7),
        entry("tokenizer.ggml.eos_token_id", Kind.UINT32, 2),
        entry("tokenizer.ggml.unknown_token_id", Kind.UINT32, 99),
        entry("tokenizer.chat_template", Kind.STRING, "{{ x }}" * 30),
        entry("quantize.imatrix.file", Kind.STRING, "imatrix.gguf"),
        entry("quantize.imatrix.chunks_count", Kind.UINT32, 125),
        entry("qtool.version", Kind.STRING, "0.4"),
    ]
    path.write_bytes(bytes(Gguf(entries, infos, data)))
    return path, weight


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return model(tmp_path / "tiny.gguf")[0]


def test_json_by_hand(tiny: Path) -> None:
    found = json.loads(run(tiny, "--json"), parse_constant=pytest.fail)
    assert found.keys() >= COMMON and found["format"] == "gguf" and found["version"] == 3
    assert (found["architecture"], found["kind"], found["file_type"]) == (
        "llama",
        "model",
        "Q4_K_M",
    )
    assert found["files"] == ["tiny.gguf"] and found["size_bytes"] == tiny.stat().st_size
    parameters = 3 * 512 + 3 * 4 * 512 + 512
    size = 3 * 512 * 2 + 2 * 8 * 144 + 8 * 210 + 512 * 4
    assert found["parameters"] == parameters
    assert found["bits_per_weight"] == pytest.approx(8 * size / parameters)
    assert found["unquantized_share"] == pytest.approx((3 * 512 + 512) / parameters)
    assert [(t["type"], t["tensors"], t["weights"], t["bytes"]) for t in found["types"]] == [
        ("F16", 1, 1536, 3072),
        ("Q4_K", 2, 4096, 2304),
        ("F32", 1, 512, 2048),
        ("Q6_K", 1, 2048, 1680),
    ]
    assert found["importance"] == {"file": "imatrix.gguf", "chunks_count": 125}
    assert found["provenance"] == {"version": "0.4"}
    assert found["tokenizer"] == {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": 20,
        "merges": 12,
        "special": {
            "bos": {"id": 7, "token": "t7"},
            "eos": {"id": 2, "token": "t2"},
            "unknown": {"id": 99, "token": None},
        },
        "chat_template_characters": 210,
    }
    metadata = found["metadata"]
    assert len(metadata) == 18 and metadata["llama.rope.freq_base"] == "inf"
    assert metadata["llama.rope.factors"] == [1.0, "nan"]
    assert metadata["tokenizer.ggml.tokens"] == {
        "kind": "string",
        "count": 20,
        "first": ["t0", "t1", "t2", "t3"],
    }
    rows = {row["name"]: row for row in found["tensors"]}
    assert len(rows) == 5 and all(row.keys() == ROW for row in rows.values())
    assert rows["blk.1.ffn_up.weight"] == {
        "name": "blk.1.ffn_up.weight",
        "shape": [4, 512],
        "dtype": "Q4_K",
        "scheme": "Q4_K",
        "bits_per_weight": 4.5,
        "bytes": 8 * 144,
    }
    assert rows["output_norm.weight"]["scheme"] is None


def test_plain_text_in_a_pipe(tiny: Path) -> None:
    text = run(tiny)
    for line in (
        "format: GGUF 3",
        "architecture: llama",
        r"name: Tiny \x1b[31m Llama",
        "file type: Q4_K_M",
        "parameters: 8,192",
        "shape: 2 layers, hidden 512",
        "tokenizer: gpt2 (smollm), 20 tokens, 12 merges",
        "special tokens: bos 7 t7, eos 2 t2, unknown 99",
        "chat template: 210 characters",
        "importance file: imatrix.gguf",
        "importance chunks_count: 125",
        "qtool.version: 0.4",
    ):
        assert line in text.splitlines()
    assert "\x1b" not in text
    assert "blk.*.ffn_up.weight (2)" in text and "blk.1.ffn_up.weight" not in text
    assert "[t0, t1, t2, t3, ... 20 in all]" in text
    assert "... (210 characters)" in text
    every = run(tiny, "--all")
    assert "blk.0.ffn_up.weight" in every and "blk.1.ffn_up.weight" in every


@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "token_embd.weight", "output_norm.weight"])
def test_one_tensor(tmp_path: Path, name: str) -> None:
    path, weight = model(tmp_path / "m.gguf")
    detail = json.loads(run(path, "--tensor", name, "--json"))
    if name.startswith("blk"):
        expected = native_gguf.dequantize(native_gguf.encode(weight, Q4_K), Q4_K, 512)
    else:
        expected = weight[:3].astype(np.float16) if "embd" in name else weight[0]
    reference = expected.astype(np.float64)
    assert detail["range"] == [reference.min(), reference.max()]
    assert detail["mean"] == pytest.approx(reference.mean(), rel=1e-12)
    assert detail["std"] == pytest.approx(reference.std(), rel=1e-12)
    assert detail["rms"] == pytest.approx(np.sqrt(np.square(reference).mean()), rel=1e-12)
    assert detail["zeros"] == pytest.approx((reference == 0).mean())
    assert detail["not_finite"] == 0 and detail["file"] == "m.gguf"
    with GgufFile.open(path) as file:
        assert detail["offset"] == file.tensors[name].start
    text = run(path, "--tensor", name)
    assert text.startswith(name) and "root mean square" in text


def test_one_tensor_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers however the tensor is cut, and not finite weights told apart."""
    path = tmp_path / "m.gguf"
    values = (np.arange(1000) ** 2 - 3e5).astype(np.float32)
    values[[3, 500, 999]] = np.inf, np.nan, 0
    path.write_bytes(bytes(Gguf([ARCH], [info("x", [4, 250])], values.tobytes())))
    finite = values[np.isfinite(values)].astype(np.float64)
    with GgufFile.open(path) as file:
        for piece in (1, 7, 250, 1 << 20):
            monkeypatch.setattr(statistics, "_PIECE", piece)
            detail = tensor_detail(file, "x")
            assert detail["not_finite"] == 2 and detail["zeros"] == 1 / 998
            assert detail["range"] == [finite.min(), finite.max()]
            assert detail["mean"] == pytest.approx(finite.mean(), rel=1e-12)
            assert detail["std"] == pytest.approx(finite.std(), rel=1e-12)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(0, "<f4"), (1, "<f2"), (24, "<i1"), (25, "<i2"), (26, "<i4"), (27, "<i8"), (28, "<f8")],
)
def test_plain_types(tmp_path: Path, number: int, dtype: str) -> None:
    path = tmp_path / "m.gguf"
    values = np.array([-7, 0, 3, 100], dtype)
    path.write_bytes(bytes(Gguf([ARCH], [info("x", [4], number)], values.tobytes())))
    with GgufFile.open(path) as file:
        detail = tensor_detail(file, "x")
    assert detail["range"] == [-7, 100] and detail["mean"] == 24 and detail["zeros"] == 0.25


def test_numbers_whose_squares_overflow(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = np.array([-1e300, 0, 3, 1.7e308], "<f8")
    path.write_bytes(bytes(Gguf([ARCH], [info("x", [4], 28)], values.tobytes())))
    detail = json.loads(run(path, "--tensor", "x", "--json"), parse_constant=pytest.fail)
    assert detail["range"] == [-1e300, 1.7e308] and detail["std"] == "nan"
    assert "1.7e+308" in run(path, "--tensor", "x")


def test_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    halves = (np.array([-2, 0, 3.5], "<f4").view("<u4") >> 16).astype("<u2")
    path.write_bytes(bytes(Gguf([ARCH], [info("x", [3], 30)], halves.tobytes())))
    with GgufFile.open(path) as file:
        assert tensor_detail(file, "x")["range"] == [-2, 3.5]


def test_a_tensor_that_is_not_there(tiny: Path) -> None:
    with pytest.raises(
        SourceError, match=r"no tensor 'blk\.9\.ffn_up\.weight'; there is blk\.0\.f"
    ):
        run(tiny, "--tensor", "blk.9.ffn_up.weight")
    with pytest.raises(SourceError, match="no tensor 'q'; `qtool inspect --all` lists them"):
        run(tiny, "--tensor", "q")


def imatrix(path: Path, counts: dict[str, list[float]]) -> Path:
    infos, data = [], b""
    for name, values in counts.items():
        for suffix, shape in ((".counts", (len(values), 1)), (".in_sum2", (len(values), 4))):
            infos.append(info(name + suffix, shape, 0, len(data)))
            width = 1 if suffix == ".counts" else 4
            raw = np.repeat(np.array(values, "<f4"), width).tobytes()
            data += raw + bytes(-len(raw) % 32)
    entries = [
        entry("general.type", Kind.STRING, "imatrix"),
        array("imatrix.datasets", Kind.STRING, ["wiki.txt", "code.txt"]),
        entry("imatrix.chunk_count", Kind.UINT32, 10),
        entry("imatrix.chunk_size", Kind.UINT32, 512),
    ]
    path.write_bytes(bytes(Gguf(entries, infos, data)))
    return path


def test_importance_matrix(tmp_path: Path) -> None:
    counts = {
        "blk.0.attn_q.weight": [5120.0],
        "blk.0.ffn_up_exps.weight": [3000.0, 0.0, 2120.0],
        "blk.1.attn_q.weight": [5000.0],
    }
    path = imatrix(tmp_path / "imatrix.gguf", counts)
    lines = run(path).splitlines()
    for line in (
        "kind: imatrix",
        "entries: 3",
        "measured over: 10 chunks of 512 tokens",
        "datasets: [wiki.txt, code.txt]",
        "never reached: blk.0.ffn_up_exps.weight 1",
    ):
        assert line in lines
    assert any(
        line.split() == ["blk.*.attn_q.weight", "(2)", "1", "5,000", "5,120"] for line in lines
    )
    assert not any(line.startswith("bits per weight") for line in lines)
    assert json.loads(run(path, "--json"))["entries"] == counts


def test_importance_matrix_of_too_many_counts(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    entries = [entry("general.type", Kind.STRING, "imatrix")]
    path.write_bytes(bytes(Gguf(entries, [info("x.counts", [300_000])], bytes(1_200_000))))
    with pytest.raises(FormatError, match="more than 262144 token counts"):
        run(path)


def test_metadata_of_other_kinds_is_shown_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    entries = [
        entry("general.architecture", Kind.UINT32, 7),
        array("general.name", Kind.STRING, ["a", "b"]),
        entry("general.file_type", Kind.INT64, -1),
        entry("tokenizer.ggml.model", Kind.BOOL, True),
        entry("tokenizer.ggml.tokens", Kind.STRING, "x"),
        array("tokenizer.ggml.merges", Kind.FLOAT32, []),
        entry("tokenizer.ggml.bos_token_id", Kind.STRING, "y"),
        array("tokenizer.ggml.eos_token_id", Kind.UINT32, [1]),
        entry("qtool.recipe", Kind.STRING, b"\xff\xfe" * 60),
    ]
    path.write_bytes(bytes(Gguf(entries)))
    lines = run(path).splitlines()
    assert "file type: unknown (-1)" in lines and "format: GGUF 3" in lines
    assert not any(line.startswith(("architecture:", "name:", "tokenizer:")) for line in lines)
    assert any(line.split() == ["general.name", "string[2]", "[a,", "b]"] for line in lines)
    found = json.loads(run(path, "--json"))
    assert found["architecture"] is None and found["tokenizer"] is None
    assert found["provenance"]["recipe"].encode("utf-8", "surrogateescape") == b"\xff\xfe" * 60


def test_what_counts_as_gguf(tmp_path: Path, tiny: Path) -> None:
    assert gguf_models(tiny) == [tiny] and gguf_models(tmp_path) == [tiny]
    other = tmp_path / "weights.bin"
    other.write_bytes(tiny.read_bytes())
    assert gguf_models(other) == [other]
    other.write_bytes(b"GGU")
    assert gguf_models(other) == [] == gguf_models(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    assert gguf_models(tmp_path) == []  # a checkpoint that has a GGUF beside it


def test_a_folder_of_several(tmp_path: Path) -> None:
    assert json.loads(run(model(tmp_path / "a.gguf")[0].parent, "--json"))["name"]
    imatrix(tmp_path / "b.gguf", {"x": [1.0]})
    lines = run(tmp_path).splitlines()
    assert len(lines) == 3 and lines[0].startswith("model")
    assert lines[1].split()[:3] == ["a.gguf", "llama", "Q4_K_M"]
    assert lines[2].split()[:3] == ["b.gguf", "imatrix", "-"]
    found = json.loads(run(tmp_path, "--json"))
    assert [one["files"] for one in found["models"]] == [["a.gguf"], ["b.gguf"]]
    with pytest.raises(SourceError, match="holds 2 GGUF models; name one of them"):
        run(tmp_path, "--tensor", "x")


def test_neither_torch_nor_numpy(tiny: Path) -> None:
    """numpy alone would be a third of the time."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "qtool", "inspect", str(tiny)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0 and "architecture: llama" in result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    roots = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "qtool" in roots and not roots & {"torch", "transformers", "numpy"}


def test_a_hundred_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    try:
        assert gguf_big.write(path) > 100e9
    except OSError:
        pytest.skip("the file system has no files of 144 GB")
    start = time.process_time()
    with GgufFile.open(path) as file:
        found = GgufInspection(file).json()
    # Alone 0.1 s; the bar of 0.3 s for the whole process is measured by
    # benchmarks/inspect_speed.py.
    assert time.process_time() - start < 1
    assert found["parameters"] == sum(math.prod(shape) for shape in gguf_big.shapes().values())
    assert found["tokenizer"]["merges"] == gguf_big.MERGES
    assert found["tokenizer"]["special"]["bos"]["token"] == f"Ġtoken{gguf_big.TOKENS - 256}"
    assert found["bits_per_weight"] == pytest.approx(16, rel=1e-3)


def test_what_was_measured_counts_and_not_what_the_recipe_asked(tmp_path: Path) -> None:
    """With --imatrix the recipe's own samples and length say nothing."""
    recipe = {"name": "iq3_xxs", "calibration": {"samples": 128, "length": 512}}
    measured = {"source": "file", "samples": 4, "length": 64, "seed": 7, "precision": "bfloat16"}
    odd = {"source": "x" * 999, "samples": 4, "length": 64, "seed": -5, "digest": "sha256:ab"}
    odd["environment"] = {"cpu": "x86_64"}
    path = tmp_path / "x.gguf"
    ours = [entry("qtool.recipe", Kind.STRING, json.dumps(recipe))]
    for text, lines in [
        (json.dumps(measured),
         ["made by: recipe iq3_xxs",
          "calibrated on: 4 samples of 64 tokens of a file, seed 7, matmuls in bfloat16"]),
        (json.dumps(odd),
         ["made by: recipe iq3_xxs", "calibrated on: 4 samples of 64 tokens",
          f"qtool.calibration.source: {'x' * 72}... (999 characters)",
          "qtool.calibration.seed: -5", "qtool.calibration.digest: sha256:ab",
          'qtool.calibration.environment: {"cpu": "x86_64"}']),
        ("[3]", ["made by: recipe iq3_xxs", "qtool.calibration: [3]"]),
        (None, ["made by: recipe iq3_xxs"]),
    ]:  # fmt: skip
        more = [] if text is None else [entry("qtool.calibration", Kind.STRING, text)]
        path.write_bytes(bytes(Gguf([ARCH, *ours, *more])))
        told = ("made by:", "calibrated on:", "qtool.calibration.", "qtool.calibration:")
        assert [line for line in run(path).splitlines() if line.startswith(told)] == lines
