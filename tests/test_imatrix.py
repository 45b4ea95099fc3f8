"""Importance matrices: files by hand and by other people's reader, sums against float64."""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_from_hf
import gguf_models
import numpy as np
import pytest
import quantizing
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from quantizing import Call

import qtool.tiny
from qtool.calibrating import measure
from qtool.calibrating.calibration import calibration_tokens
from qtool.checkpoint import Checkpoint
from qtool.errors import QtoolError, SourceError
from qtool.formats.gguf_values import Kind, Value, array, boolean, string, strings, u32
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.formats.safetensors_file import read_header
from qtool.gguf import from_hf
from qtool.gguf.imatrix import Importance, read_importance, write_importance
from qtool.gguf.importance import first_token
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf_types import F16, F32
from qtool.recipe.recipe import Calibration
from qtool.runs.progress import Progress

Q, DOWN = "blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"
KEYS = {
    "general.type": string("imatrix"),
    "imatrix.datasets": strings(["a.txt"]),
    "imatrix.chunk_count": u32(5),
    "imatrix.chunk_size": u32(512),
}


def example() -> Importance:
    """One matrix, and three experts of which the middle one was never reached."""
    sums = {
        DOWN: np.array([[1, 2], [0, 0], [5, 7]], np.float32),
        Q: np.array([[10, 0.1, 3]], np.float32),
    }
    counts = {DOWN: np.array([3, 0, 7]), Q: np.array([10])}
    return Importance(sums, counts, ("a.txt",), 5, 512)


def test_the_bytes_of_a_file_by_hand(tmp_path: Path) -> None:
    """Keys and name-sorted tensors as llama-imatrix has them; axes of one are dropped."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % 32)

    def info(name: str, ne: list[int], offset: int) -> bytes:
        return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, 0, offset)

    header = b"GGUF" + struct.pack("<IQQ", 3, 4, 4)
    header += text("general.type") + struct.pack("<I", 8) + text("imatrix")
    header += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("a.txt")
    header += text("imatrix.chunk_count") + struct.pack("<II", 4, 5)
    header += text("imatrix.chunk_size") + struct.pack("<II", 4, 512)
    header += info(Q + ".in_sum2", [3], 0) + info(Q + ".counts", [1], 32)
    header += info(DOWN + ".in_sum2", [2, 3], 64) + info(DOWN + ".counts", [1, 3], 96)
    data = padded(struct.pack("<3f", 10, 0.1, 3)) + padded(struct.pack("<f", 10))
    data += padded(struct.pack("<6f", 1, 2, 0, 0, 5, 7)) + padded(struct.pack("<3f", 3, 0, 7))
    path = tmp_path / "imatrix.gguf"
    write_importance(path, example())
    assert path.read_bytes() == padded(header) + data
    assert [one.name for one in tmp_path.iterdir()] == ["imatrix.gguf"]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    write_importance(path, example())
    found = read_importance(path)
    assert (found.datasets, found.chunks, found.chunk_size) == (("a.txt",), 5, 512)
    assert found.file == "imatrix.gguf" and found.unmeasured == ()
    for mine, its in ((example().sums, found.sums), (example().counts, found.counts)):
        assert mine.keys() == its.keys()
        assert all(np.array_equal(value, its[name]) for name, value in mine.items())
    theirs = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    assert list(theirs) == [Q + ".in_sum2", Q + ".counts", DOWN + ".in_sum2", DOWN + ".counts"]
    assert np.array_equal(theirs[DOWN + ".in_sum2"], example().sums[DOWN])
    assert np.array_equal(theirs[DOWN + ".counts"], [[3], [0], [7]])


def test_entries_are_means_in_float32() -> None:
    """One rounded division each, and 1 where there is nothing to divide."""
    found = example()
    assert set(found.entries) == {Q, DOWN} and len(found.entries) == 2
    assert found.entries[Q].dtype == np.float32
    assert found.entries[Q].tolist() == [[1.0, np.float32(0.1) / np.float32(10), np.float32(0.3)]]
    third, seventh = np.float32(1) / np.float32(3), np.float32(5) / np.float32(7)
    expected = [[third, np.float32(2) / np.float32(3)], [1.0, 1.0], [seventh, 1.0]]
    assert found.entries[DOWN].tolist() == expected
    with pytest.raises(KeyError):
        found.entries["blk.1.attn_q.weight"]


def test_experts_without_tokens_are_told() -> None:
    found = example()
    assert found.unreached == {DOWN: (1,)}
    (note,) = found.notes()
    assert f"{DOWN}: 1" in note and "weigh 1" in note and "more calibration text" in note
    assert found.record()["unreached"] == {DOWN: [1]}
    many = {f"blk.{i}.x.weight": np.zeros((12, 1), np.float32) for i in range(5)}
    counts = {name: np.zeros(12, np.int64) for name in many}
    (note,) = Importance(many, counts).notes()
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in note and "in 2 more tensors" in note


def test_tensors_without_an_entry_are_told() -> None:
    """What llama-quantize says among its thousand lines, if at all."""
    assert len(replace(example(), file="a.gguf").notes()) == 1
    *_, note = replace(example(), file="a.gguf").notes([f"blk.{i}.attn_k.weight" for i in range(5)])
    assert note.startswith("a.gguf has nothing of blk.0.attn_k.weight, blk.1.attn_k.weight, ")
    assert "and 2 more; without it all columns" in note


def test_counts_are_rounded_as_lround_does(tmp_path: Path) -> None:
    counts = np.array([[0.4], [0.5], [2.5], [3.5]], np.float32)
    path = stored(tmp_path, tensors={"a.in_sum2": np.ones((4, 2), np.float32), "a.counts": counts})
    assert read_importance(path).counts["a"].tolist() == [0, 1, 3, 4]


def stored(
    folder: Path,
    metadata: Mapping[str, Value] = KEYS,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """A GGUF file with these keys and tensors."""
    if tensors is None:
        tensors = {"a.in_sum2": np.ones((1, 2), np.float32), "a.counts": np.ones(1, np.float32)}
    kinds = {"float32": F32, "float16": F16}
    specs = [TensorSpec(name, t.shape, kinds[t.dtype.name]) for name, t in tensors.items()]
    path = folder / "stored.gguf"
    with open(path, "wb") as file:
        writer = GgufWriter(file.fileno(), lay_out(metadata, specs))
        for number, (spec, values) in enumerate(zip(specs, tensors.values(), strict=True)):
            writer.rows(number, 0, values.reshape(spec.rows, -1).view(np.uint8))
        writer.finish()
    return path


def test_a_file_of_another_program_is_read(tmp_path: Path) -> None:
    """Other tensors and keys do not matter, nor does the order."""
    one = np.ones(1, np.float32)
    tensors = {"b.counts": one, "a.counts": one, "x": one, "a.in_sum2": one, "b.in_sum2": 2 * one}
    found = read_importance(stored(tmp_path, KEYS | {"general.name": string("n")}, tensors))
    assert list(found.sums) == ["a", "b"] and found.entries["b"].tolist() == [[2.0]]
    assert found.extra == {}


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ({"general.type": string("model")}, {}, "of general.type 'model', not an importance"),
        ({}, {"a.weight": ONE}, "no tensors named"),
        ({"general.type": None}, {}, "no general.type"),
        ({"imatrix.chunk_count": None}, {}, "lacks 'imatrix.chunk_count'"),
        ({"imatrix.chunk_size": string("512")}, {}, "chunk_size' is of kind STRING, expected"),
        ({"imatrix.datasets": string("a")}, {}, "expected an array of strings"),
        ({"imatrix.datasets": array(Kind.INT32, [1])}, {}, "expected an array of strings"),
        ({}, {"b.in_sum2": ONE}, "'b.in_sum2' without 'b.counts'"),
        ({}, {"b.counts": ONE}, "'b.counts' without 'b.in_sum2'"),
        ({}, {"a.counts": ONE.astype(np.float16)}, "'a.counts' is F16, expected F32"),
        ({}, {"a.counts": np.ones(3, np.float32)}, "2 values for 3 counts"),
        ({}, {"a.in_sum2": np.full(2, np.nan, np.float32)}, "not finite"),
        ({}, {"a.counts": np.full(1, np.inf, np.float32)}, "not finite"),
        ({}, {"a.in_sum2": np.full(2, -1, np.float32)}, "negative"),
        ({}, {"a.counts": -ONE}, "negative"),
        ({}, {"a.counts": np.full(1, 1e20, np.float32)}, "a number of tokens"),
    ],
)
def test_files_that_lie_are_refused(
    keys: Mapping[str, Value | None], tensors: dict[str, NDArray[Any]], said: str, tmp_path: Path
) -> None:
    metadata = {key: value for key, value in (KEYS | keys).items() if value is not None}
    whole = {"a.in_sum2": np.ones((1, 2), np.float32), "a.counts": ONE} | tensors
    if "a.weight" in tensors:
        whole = tensors
    path = stored(tmp_path, metadata, whole)
    with pytest.raises(QtoolError, match=said) as caught:
        read_importance(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def entry(name: bytes, calls: int, values: list[float]) -> bytes:
    """One of a .dat."""
    head = struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
    return head + struct.pack(f"<{len(values)}f", *values)


DAT = struct.pack("<i", 2) + entry(b"blk.0.b", 3, [1, 2]) + entry(b"blk.0.a", 0, [5])


@pytest.mark.parametrize(
    ("end", "chunks", "datasets"),
    [
        (b"", 0, ()),
        (struct.pack("<i", 7), 7, ()),
        (struct.pack("<ii", 7, 0), 7, ()),
        (struct.pack("<ii", 7, 5) + b"x.txt", 7, ("x.txt",)),
    ],
)
def test_dat(end: bytes, chunks: int, datasets: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(DAT + end)
    found = read_importance(path)
    assert (found.chunks, found.datasets, found.file) == (chunks, datasets, "imatrix.dat")
    third = np.float32(1) / np.float32(3)
    assert found.entries["blk.0.b"].tolist() == [[third, np.float32(2) / np.float32(3)]]
    assert found.entries["blk.0.a"].tolist() == [[5.0]]  # never called: taken as it is
    assert found.unreached == {}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither of llama.cpp's layouts"),
        (b"\1\0\0", "neither of llama.cpp's layouts"),
        (struct.pack("<i", 0), "neither of llama.cpp's layouts"),
        (struct.pack("<i", -1) + DAT, "neither of llama.cpp's layouts"),
        (struct.pack("<i", 1 << 30) + DAT[4:], "neither of llama.cpp's layouts"),
        (b"this is a text, and not an importance matrix", "neither of llama.cpp's layouts"),
        (struct.pack("<i", 3) + DAT[4:], "4 bytes and 0 are left"),
        (DAT[:-1], "entry 'blk.0.a' takes 4 bytes and 3 are left"),
        (DAT[:38], "the name of entry 1 takes 7 bytes and 3 are left"),
        (
            struct.pack("<i", 1) + entry(b"", 1, [1.0] * 9),
            "length of the name of entry 0: 0, expected 1",
        ),
        (struct.pack("<ii", 1, -5) + DAT, "length of the name of entry 0: -5, expected 1"),
        (struct.pack("<ii", 1, 1 << 30) + DAT, "expected 1 to 1024"),
        (struct.pack("<ii", 1, 1000) + DAT, "1000 bytes and"),
        (struct.pack("<i", 1) + entry(b"\xff\xfe", 1, [1.0]), "is not UTF-8"),
        (struct.pack("<i", 1) + entry(b"a\0b", 1, [1.0]), "null character"),
        (struct.pack("<i", 2) + 2 * entry(b"aaaa", 1, [1.0]), "'aaaa' comes twice"),
        (struct.pack("<i", 1) + entry(b"aaaa", -1, [1.0]), "calls of 'aaaa': -1"),
        (struct.pack("<i", 1) + entry(b"aaaa", 1, []) + DAT, "values of 'aaaa': 0"),
        (
            struct.pack("<ii4sii", 1, 4, b"aaaa", 1, (1 << 31) - 1),
            "takes 8589934588 bytes and 0 are left",
        ),
        (struct.pack("<i", 1) + entry(b"aaaa", 1, [float("nan")]), "not finite"),
        (struct.pack("<i", 1) + entry(b"aaaa", 1, [-1.0]), "negative"),
        (DAT + b"\1\2", "the number of chunks takes 4 bytes and 2 are left"),
        (DAT + struct.pack("<ii", 1, 1 << 30), "expected 0 to 65536"),
        (DAT + struct.pack("<ii", 1, 9) + b"short", "9 bytes and 5 are left"),
        (DAT + struct.pack("<ii", 1, 1) + b"ab", "after its end, for 1 bytes"),
    ],
)
def test_dat_files_that_lie_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(QtoolError, match=said) as caught:
        read_importance(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "."):
        with pytest.raises(SourceError, match=r"cannot be read|not a file"):
            read_importance(tmp_path / name)
    model = Path(qtool.tiny.__file__).parent / "model.safetensors"
    with pytest.raises(QtoolError, match=r"model\.safetensors: .* no importance matrix"):
        read_importance(model)


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="cannot be made"):
        write_importance(Path(os.devnull) / "folder" / "a", example())
    long = example().sums | {"x" * 60: np.ones((1, 2), np.float32)}
    with pytest.raises(QtoolError, match="its name has"):
        write_importance(
            tmp_path / "a", Importance(long, dict.fromkeys(long, np.ones(1, np.int64)))
        )
    assert list(tmp_path.iterdir()) == []


def test_no_file_of_the_user_is_touched(tmp_path: Path) -> None:
    """Neither one of that name, nor one that looks like a file in the making."""
    (tmp_path / "a.partial").write_text("mine")
    write_importance(tmp_path / "a", example())
    whole = (tmp_path / "a").read_bytes()
    with pytest.raises(QtoolError, match="exists"):
        write_importance(tmp_path / "a", replace(example(), chunks=6))
    assert (tmp_path / "a").read_bytes() == whole
    assert {file.name for file in tmp_path.iterdir()} == {"a", "a.partial"}
    assert (tmp_path / "a.partial").read_text() == "mine"
    write_importance(tmp_path / "no" / "folder" / "a", example())
    assert (tmp_path / "no" / "folder" / "a").read_bytes() == whole


LLAMA = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "input_layernorm": "attn_norm",
}  # fmt: skip
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def named(checkpoint: Checkpoint, **keys: Value) -> GgufSource:
    """The checkpoint under llama.cpp's names, experts merged; nothing can be read of it."""

    def unread(first: int, last: int) -> NDArray[np.uint8]:
        raise AssertionError("measuring reads the checkpoint")

    origins: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors, key=natural):
        module = name.removesuffix(".weight").removeprefix("model.layers.").split(".")
        if not module[0].isdigit():
            continue
        known = LLAMA.get(".".join(module[1:])) or (
            EXPERTS[module[-1]] if "experts" in module else "attn_q_norm"
        )
        origins.setdefault(f"blk.{module[0]}.{known}.weight", []).append(name)
    tensors = []
    for name, origin in origins.items():
        shape: tuple[int, ...] = checkpoint.tensors[origin[0]].shape
        if "_exps" in name:
            shape = (len(origin), *shape)
        tensors.append(SourceTensor(name, shape, F16, unread, tuple(origin)))
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return GgufSource(checkpoint.path, metadata, tuple(tensors))


def natural(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def moe(folder: Path) -> Checkpoint:
    quantizing.text_file(folder / "text.txt")
    return Checkpoint.open(quantizing.build("qwen3_moe", folder / "moe"))


def settings(folder: Path, samples: int, length: int) -> Calibration:
    return Calibration(source=str(folder / "text.txt"), samples=samples, length=length)


def test_every_expert_counts_its_own_tokens(tmp_path: Path) -> None:
    """Against transformers' own model, run on the same tokens; an expert is never reached."""
    checkpoint = moe(tmp_path)
    given = settings(tmp_path, 2, 8)
    found = measure.measure_importance(
        checkpoint, named(checkpoint), given, 2, Progress(quiet=True)
    )
    seen = inputs_of(checkpoint.path, calibration_tokens(given, checkpoint.path).tokens)
    assert len(found.sums) == 3 * 4 + 3 + 2 * 4 and found.unmeasured == ()
    assert (found.chunks, found.chunk_size, found.datasets) == (2, 8, ("file",))
    assert found.sums["blk.0.ffn_gate_exps.weight"].shape == (8, 64)
    assert found.sums["blk.2.ffn_down_exps.weight"].shape == (8, 32)
    gate, up = (found.sums[f"blk.0.ffn_{x}_exps.weight"] for x in ("gate", "up"))
    assert np.array_equal(gate, up)
    for name, expected in seen.items():
        assert found.counts[name].tolist() == [len(x) for x in expected], name
        sums = np.stack([(x * x).sum(0) for x in expected])
        assert np.allclose(found.sums[name], sums, rtol=1e-4, atol=1e-6 * sums.max()), name
    assert len(seen) == 3 * 4 + 3 + 2 * 4
    missed = {name: counts for name, counts in found.unreached.items() if "gate" in name}
    assert missed and all("_exps" in name for name in found.unreached)
    name, experts = next(iter(missed.items()))
    assert (found.entries[name][list(experts)] == 1).all()
    assert "experts that no token reached" in found.notes()[0]


def inputs_of(model: Path, tokens: NDArray[np.int64]) -> dict[str, list[NDArray[np.float64]]]:
    """What every matrix of every block reads, float64, by expert; from transformers itself."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows: dict[str, list[NDArray[np.float64]]] = {}

    def keep(name: str, x: torch.Tensor) -> None:
        rows.setdefault(name, []).append(x.detach().reshape(-1, x.shape[-1]).double().numpy())

    def hook(block: str, module: str) -> Callable[..., None]:
        def dense(_: Any, given: Any, __: Any) -> None:
            keep(f"blk.{block}.{LLAMA[module]}.weight", given[0])

        def experts(owner: Any, given: Any, __: Any) -> None:
            hidden, chosen = given[0].reshape(-1, given[0].shape[-1]), given[1]
            for expert in range(owner.gate_up_proj.shape[0]):
                x = hidden[(chosen == expert).any(-1)]
                gate, up = (x @ owner.gate_up_proj[expert].T).chunk(2, dim=-1)
                for name in ("gate", "up"):
                    keep(f"blk.{block}.ffn_{name}_exps.weight", x)
                keep(f"blk.{block}.ffn_down_exps.weight", owner.act_fn(gate) * up)

        return experts if module == "mlp.experts" else dense

    for path, owner in loaded.named_modules():
        _, _, where = path.partition("layers.")
        block, _, module = where.partition(".")
        if module == "mlp.experts" or (module in LLAMA and "norm" not in module):
            owner.register_forward_hook(hook(block, module))
    with torch.no_grad():
        loaded(input_ids=torch.from_numpy(tokens))
    return rows


ARCHITECTURES = {
    "phi3": {"attn_qkv", "attn_output", "ffn_up", "ffn_down"},
    "gpt-neox": {"attn_qkv", "attn_output", "ffn_up", "ffn_down"},
    "gemma3": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"},
    "mixtral": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps",
                "ffn_up_exps", "ffn_down_exps"},
    "qwen2-moe": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps",
                  "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp_shexp", "ffn_gate_shexp",
                  "ffn_up_shexp", "ffn_down_shexp"},
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_matrix_of_a_block_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused, merged and shared ones, by the names that converting has for them."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    gguf_models.build(name, tmp_path / "model")
    quantizing.add_tokenizer(tmp_path / "model")
    quantizing.text_file(tmp_path / "text.txt")
    checkpoint = Checkpoint.open(tmp_path / "model")
    source = from_hf.hf_source(checkpoint)
    given = settings(tmp_path, 1, 40)
    found = measure.measure_importance(checkpoint, source, given, 1, Progress(quiet=True))
    assert found.unmeasured == ()
    blocks = range(checkpoint.config["num_hidden_layers"])
    expected = {f"blk.{i}.{kind}.weight" for i in blocks for kind in ARCHITECTURES[name]}
    assert found.sums.keys() == expected
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    for matrix, sums in found.sums.items():
        matrices = shapes[matrix][0] if "_exps" in matrix else 1
        assert sums.shape == (matrices, shapes[matrix][-1]) and sums.max() > 0
        if matrices == 1:
            assert found.counts[matrix].tolist() == [40]
        else:
            routed = found.counts[matrix]
            assert routed.sum() == 2 * 40 and len(routed) == matrices


def test_experts_in_one_tensor_are_measured_as_those_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5 has them in memory, and some checkpoints on disk: the same bytes."""
    from safetensors.numpy import load_file, save_file

    gguf_from_hf.no_vocabulary(monkeypatch)
    quantizing.text_file(tmp_path / "text.txt")
    apart = quantizing.add_tokenizer(gguf_models.build("qwen3-moe", tmp_path / "apart"))
    fused = Path(shutil.copytree(apart, tmp_path / "fused"))
    state = load_file(fused / "model.safetensors")
    for block in range(2):
        at = f"model.layers.{block}.mlp.experts"
        matrices = {
            kind: np.stack([state.pop(f"{at}.{i}.{kind}_proj.weight") for i in range(8)])
            for kind in ("gate", "up", "down")
        }
        state[f"{at}.gate_up_proj"] = np.concatenate([matrices["gate"], matrices["up"]], axis=1)
        state[f"{at}.down_proj"] = matrices["down"]
    save_file(state, fused / "model.safetensors", {"format": "pt"})
    given = settings(tmp_path, 1, 40)
    files = []
    for folder in (apart, fused):
        checkpoint = Checkpoint.open(folder)
        source = from_hf.hf_source(checkpoint)
        target = measure.ImportanceFile(tmp_path / f"{folder.name}.gguf", source)
        stats, needs = tmp_path / f"{folder.name}.stats", frozenset({"mean_abs"})
        made = measure.calibrate(
            checkpoint, stats, given, needs, 1, Progress(quiet=True), target
        ).importance
        assert made is not None and made.unmeasured == () and made.unreached
        assert len([name for name in made.sums if "_exps" in name]) == 6
        assert not any("[" in name for name in read_header(stats)[0])
        files.append(target.path.read_bytes())
        alone = measure.measure_importance(checkpoint, source, given, 1, Progress(quiet=True))
        for name, sums in made.sums.items():
            assert np.array_equal(alone.sums[name], sums)
            assert np.array_equal(alone.counts[name], made.counts[name])
    assert files[0] == files[1]


def test_threads_change_no_byte(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path)
    for threads in (1, 3):
        found = measure.measure_importance(
            checkpoint, named(checkpoint), settings(tmp_path, 9, 300), threads, Progress(quiet=True)
        )
        write_importance(tmp_path / str(threads), found)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    """A matrix that no call reads, and one of which only half is known; norms are none."""
    checkpoint = moe(tmp_path)
    source = named(checkpoint)
    stray = SourceTensor("blk.9.attn_q.weight", (4, 64), F16, source.tensors[0].read, ("mtp.q",))
    experts = next(t for t in source.tensors if t.name == "blk.0.ffn_up_exps.weight")
    half = SourceTensor(
        "blk.8.ffn_up_exps.weight", experts.shape, F16, experts.read, (*experts.origin[:-1], "x")
    )
    more = GgufSource(source.path, {}, (*source.tensors, stray, half))
    given = settings(tmp_path, 1, 16)
    found = measure.measure_importance(checkpoint, more, given, 1, Progress(quiet=True))
    assert found.unmeasured == ("blk.9.attn_q.weight", "blk.8.ffn_up_exps.weight")
    assert found.notes()[-1].startswith(
        "importance could not be measured for blk.9.attn_q.weight, blk.8.ffn_up_exps.weight; "
    )
    assert not found.sums.keys() & {*found.unmeasured, "blk.0.attn_norm.weight"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"bos_token_id": u32(5)}, None),
        ({"bos_token_id": u32(5), "add_bos_token": boolean(True)}, 5),
        ({"bos_token_id": u32(5), "model": string("llama")}, 5),
        ({"bos_token_id": u32(5), "model": string("llama"), "add_bos_token": boolean(False)}, None),
        ({"bos_token_id": u32(5), "model": string("gpt2"), "pre": string("llama-bpe")}, 5),
        ({"bos_token_id": u32(5), "model": string("gpt2"), "pre": string("smollm")}, None),
    ],
)
def test_bos_as_llama_cpp_has_it(keys: dict[str, Value], expected: int | None) -> None:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert first_token(GgufSource(Path("m"), metadata, ())) == expected


def test_chunks_begin_with_bos(tmp_path: Path) -> None:
    """Shown by a text whose every token is BOS: the chunks are then the same with and without."""
    checkpoint = moe(tmp_path)
    (tmp_path / "text.txt").write_text("a" * 200)
    bos = {"bos_token_id": u32(1), "add_bos_token": boolean(True)}
    other = {"bos_token_id": u32(2), "add_bos_token": boolean(True)}
    results = []
    for keys in ({}, bos, other):
        source = named(checkpoint, **keys)
        given = settings(tmp_path, 2, 16)
        found = measure.measure_importance(checkpoint, source, given, 1, Progress(quiet=True))
        results.append(found.sums[Q])
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


def test_a_checkpoint_that_overflows_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint = moe(tmp_path)
    file = tmp_path / "moe" / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"][:] = 3e37
    save_file(state, file, {"format": "pt"})
    again = Checkpoint.open(tmp_path / "moe")
    with pytest.raises(SourceError, match=r"input of model.layers.1.mlp.down_proj.*not finite"):
        measure.measure_importance(
            again, named(checkpoint), settings(tmp_path, 1, 16), 1, Progress(quiet=True)
        )


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return quantizing.caller(monkeypatch, capfd)


def test_calibrate_tiny(tmp_path: Path, call: Call) -> None:
    """The command on the model that ships with the package, against float64 sums."""
    quantizing.text_file(tmp_path / "text.txt")
    out = tmp_path / "imatrix.gguf"
    given = ["--calibration", tmp_path / "text.txt", "--samples", 3, "--length", 64]
    said = call("calibrate", "tiny", "--imatrix", out, *given)
    assert said.status == 0, said.err
    found = read_importance(out)
    model = Path(qtool.tiny.__file__).parent
    tokens = calibration_tokens(settings(tmp_path, 3, 64), model).tokens
    seen = inputs_of(model, tokens)
    assert found.sums.keys() == seen.keys()
    for name, (x,) in seen.items():
        assert found.counts[name].tolist() == [3 * 64]
        sums = (x * x).sum(0)
        assert np.allclose(found.sums[name][0], sums, rtol=1e-4, atol=1e-6 * sums.max()), name
    assert said.out.startswith(f"{out}: importance of {len(seen)} tensors over 192 tokens")
    record = json.loads(found.extra["qtool.calibration"].value)
    assert record["samples"] == 3 and record["digest"].startswith("sha256:")
    assert found.chunk_size == 64 and found.datasets == ("file",)
    # Both files in one pass are the same as each by itself.
    both, stats = tmp_path / "both.gguf", tmp_path / "stats"
    said = call("calibrate", "tiny", "--imatrix", both, "-o", stats, *given, "--json")
    assert said.status == 0, said.err
    told = json.loads(said.out)
    assert both.read_bytes() == out.read_bytes()
    assert told["stats"] == str(stats) and told["imatrix"]["entries"] == len(seen)
    assert told["imatrix"]["file"] == str(both) and told["imatrix"]["unreached"] == {}
    assert call("calibrate", "tiny", "-o", tmp_path / "alone", *given).status == 0
    assert (tmp_path / "alone").read_bytes() == stats.read_bytes()


def test_a_gguf_file_measures_as_its_checkpoint_does(tmp_path: Path, call: Call) -> None:
    """Of float32 tensors nothing is lost on the way: the same bytes, whichever is the model."""
    whole = tmp_path / "tiny-f32.gguf"
    assert call("quantize", "tiny", "--recipe", "f32", "-o", whole).status == 0
    small = ("--samples", "2", "--length", "64", "--threads", "1")
    for model, name in (("tiny", "a.gguf"), (whole, "b.gguf")):
        assert call("calibrate", model, "--imatrix", tmp_path / name, *small).status == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    said = call("calibrate", whole, "-o", tmp_path / "stats")
    assert said.status == 1 and "--imatrix OUT.gguf alone" in said.err
    assert not (tmp_path / "stats").exists()


def test_what_a_file_lacks_is_told_by_quantize(tmp_path: Path, call: Call) -> None:
    width = Checkpoint.open(Path(qtool.tiny.__file__).parent).config["hidden_size"]
    known = Importance({Q: np.ones((1, width), np.float32)}, {Q: np.ones(1, np.int64)})
    write_importance(tmp_path / "some.gguf", known)
    given = ["--recipe", "q4_0", "--imatrix", tmp_path / "some.gguf", "--json"]
    said = call("quantize", "tiny", *given, "-o", tmp_path / "tiny.gguf")
    assert said.status == 0, said.err
    (note,) = json.loads(said.out)["notes"]
    assert note.startswith("some.gguf has nothing of blk.0.attn_k.weight, ") and "more" in note
    assert Q not in note


def test_something_has_to_be_written(tmp_path: Path, call: Call) -> None:
    said = call("calibrate", "tiny")
    assert said.status == 2 and "--imatrix OUT.gguf" in said.err
    said = call("calibrate", "tiny", "-o", tmp_path / "s", "--recipe", "q2_k")
    assert said.status == 2 and "--imatrix OUT.gguf" in said.err
    taken = tmp_path / "taken"
    taken.write_text("mine")
    said = call("calibrate", "tiny", "--imatrix", taken)
    assert said.status == 1 and said.err.startswith(f"error: {taken}: exists")
    assert taken.read_text() == "mine"
    for option in ("--imatrix", "-o"):
        said = call("calibrate", "nobody/such-model", option, taken / "in" / "x.gguf")
        assert said.status == 1 and f"{taken} is no folder" in said.err, said.err


def test_reading_needs_no_torch() -> None:
    import subprocess

    code = "import sys, qtool.gguf.imatrix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
