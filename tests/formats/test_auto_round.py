"""AutoRound's own config around codes that lie as GPTQ's or AWQ's do, packed here by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cuda.reading import OnDevice
from qtool.errors import QtoolError, UnsupportedError
from qtool.formats.auto_round import left_dense
from qtool.formats.known import detect
from qtool.inspect import inspect
from qtool.quality.weights import open_weights
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.device import Device
from qtool.verification.engines.rules import engine_findings
from qtool.verification.run import verify_artifact
from support.converting.converting import converted, first_block
from support.cuda.cuda_device import device, emulator
from support.formats import other_tools as other
from support.formats.packed_files import write
from support.verification.verifying import but_digests, serious

__all__ = ["device", "emulator"]

ROWS, COLUMNS = 64, 256
V1, V2, AWQ = "auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"
Words = NDArray[np.int32]


def config(packing: str | None = V1, bits: int = 4, size: int = 128, **more: Any) -> dict[str, Any]:
    """As AutoRound 0.16 writes it."""
    found = {
        "autoround_version": "0.16.1", "bits": bits, "block_name_to_quantize": "model.layers",
        "data_type": "int", "enable_quanted_input": False, "group_size": size,
        "packing_format": packing, "quant_method": "auto-round", "sym": True,
    } | more  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def stream(fields: NDArray[Any], bits: int) -> Words:
    """Fields along the last axis as one number of so many bits each, the first lowest; words of
    it. A field that is negative borrows from those above it."""
    digits = fields.astype(np.int64)
    borrowed = np.zeros(fields.shape[:-1], np.int64)
    for place in range(fields.shape[-1]):
        borrowed += digits[..., place]
        digits[..., place] = borrowed & ((1 << bits) - 1)
        borrowed >>= bits
    each = ((digits[..., None] >> np.arange(bits)) & 1).astype(np.uint8)
    packed = np.packbits(each.reshape(*fields.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view("<i4")


def gptq(module: str, quant: GroupQuant, less: int) -> other.Tensors:
    """`less`: what is taken from every zero, of each word apart."""
    bits = quant.scheme.bits
    zeros = quant.zero.T.astype(np.int64) - less
    if 32 % bits == 0:
        zeros = zeros.reshape(len(zeros), -1, 32 // bits)
    words = stream(zeros, bits).reshape(quant.zero.shape[1], -1)
    return {
        f"{module}.qweight": ("I32", np.ascontiguousarray(stream(quant.codes, bits).T)),
        f"{module}.qzeros": ("I32", words),
        f"{module}.scales": ("F16", np.ascontiguousarray(quant.scale.T)),
    }


def awq(module: str, quant: GroupQuant) -> other.Tensors:
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def words(fields: NDArray[Any]) -> tuple[str, Words]:
        eights = fields.T.reshape(fields.shape[1], -1, 8)[:, :, order]
        return "I32", stream(eights, 4).reshape(fields.shape[1], -1)

    return {
        f"{module}.qweight": words(quant.codes),
        f"{module}.qzeros": words(quant.zero),
        f"{module}.scales": ("F16", np.ascontiguousarray(quant.scale.T)),
    }


def stored(packing: str, module: str, quant: GroupQuant) -> other.Tensors:
    if "awq" in packing:
        return awq(module, quant)
    return gptq(module, quant, 0 if packing in (V2, "auto_round:gptqmodel") else 1)


def random_quant(bits: int, size: int, symmetric: bool, least: int = 1) -> GroupQuant:
    rng = np.random.default_rng(bits)
    groups = COLUMNS // size if size > 0 else 1
    zero = rng.integers(least, 1 << bits, (ROWS, groups)).astype(np.uint8)
    if symmetric:
        zero[:] = 1 << (bits - 1)
    return GroupQuant(
        Scheme(bits, size, symmetric),
        rng.integers(0, 1 << bits, (ROWS, COLUMNS)).astype(np.uint8),
        rng.uniform(0.01, 0.1, (ROWS, groups)).astype(np.float16),
        zero,
    )


def same(found: object, quant: GroupQuant) -> None:
    assert isinstance(found, GroupQuant) and found.scheme == quant.scheme
    for what in ("codes", "scale", "zero"):
        np.testing.assert_array_equal(getattr(found, what), getattr(quant, what), err_msg=what)


CASES = [
    *((V1, bits, 64, True) for bits in (2, 3, 4, 8)),
    *((V2, bits, 64, False) for bits in (2, 3, 4, 8)),
    (V1, 4, 128, False), (V1, 8, -1, True), ("auto_round:gptqmodel", 4, 128, False),
    (AWQ, 4, 128, False), (AWQ, 4, 64, True), (AWQ, 4, -1, False),
]  # fmt: skip


@pytest.mark.parametrize(("packing", "bits", "size", "symmetric"), CASES)
def test_codes_zeros_and_scales(
    packing: str, bits: int, size: int, symmetric: bool, tmp_path: Path
) -> None:
    quant = random_quant(bits, size, symmetric, least=0 if packing == V2 else 1)
    tensors = stored(packing, "model.layers.0.m", quant)
    artifact = Artifact.open(write(tmp_path, tensors, config(packing, bits, size, sym=symmetric)))
    assert artifact.found.label.startswith("auto-round, stored as ")
    same(artifact.read("model.layers.0.m.weight"), quant)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ones_taken_from_a_word_at_once_are_given_back(bits: int, tmp_path: Path) -> None:
    """Up to version 0.15 a zero of 0 borrows from its neighbour."""
    quant = random_quant(bits, 64, False, least=0)
    quant.zero[::3] = 0
    tensors = stored(V1, "model.layers.0.m", quant)
    artifact = Artifact.open(write(tmp_path, tensors, config(V1, bits, 64, sym=False)))
    same(artifact.read("model.layers.0.m.weight"), quant)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, ("gptq", "v1")),
        ({"packing_format": "auto"}, ("gptq", "v1")),
        ({"packing_format": "auto_gptq"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:gptq"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:gptq:exllamav2"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:exllamav2"}, ("gptq", "v2")),
        ({"packing_format": "auto_round:gptqmodel"}, ("gptq", "v2")),
        ({"packing_format": "auto_round:awq"}, ("awq", "gemm")),
        ({"packing_format": V2, "backend": "gptq:marlin"}, ("gptq", "v2")),
        ({"backend": "marlin"}, ("gptq", "v1")),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, ("gptq", "v2")),
        ({"quant_method": "intel/auto-round", "backend": "gptq:exllamav2"}, ("gptq", "v1")),
        ({"packing_format": "auto_round:llm_compressor"}, ("auto-round", None)),
        ({"packing_format": "auto_round:fp8"}, ("auto-round", None)),
        ({"packing_format": "mlx"}, ("auto-round", None)),
        ({"data_type": "mx_fp"}, ("auto-round", None)),
        ({"act_bits": 8}, ("auto-round", None)),
        ({"bits": 5}, ("auto-round", None)),
        ({"rotation_config": {"hadamard_type": "hadamard"}}, ("auto-round", None)),
        ({"extra_config": {"lm_head": {"bits": 6}}}, ("auto-round", None)),
        ({"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, ("gptq", "v1")),
    ],
)
def test_what_a_config_means(said: Mapping[str, Any], expected: tuple[str, str | None]) -> None:
    found = detect({**config(None), **said})
    assert (found.format, found.layout if found.scheme else None) == expected
    assert found.quant_method == "auto-round"


EXTRA = {
    "model.layers.0.mlp.up_proj": {"bits": 16},
    r".*up_proj.*": {"bits": 8, "group_size": 64},
    r"layers\.1\.self_attn\.(q|k|v)_proj$": {"bits": 2, "sym": False},
    "lm_head": {"bits": 8, "group_size": None, "act_bits": 16, "rotation_config": None},
    r"layers\.1\.mlp\.down_proj": {"bits": 16},
}


def test_layers_that_differ(tmp_path: Path) -> None:
    """By name, by expressions of which the first counts, and the head."""
    schemes = {
        "model.layers.1.mlp.up_proj": random_quant(8, 64, True),
        "model.layers.1.self_attn.q_proj": random_quant(2, 128, False),
        "model.layers.1.self_attn.o_proj": random_quant(4, 128, True),
        "lm_head": random_quant(8, 128, True),
    }
    tensors: other.Tensors = {}
    for module, quant in schemes.items():
        tensors |= stored(V1, module, quant)
    artifact = Artifact.open(write(tmp_path, tensors, config(extra_config=EXTRA)))
    for module, quant in schemes.items():
        same(artifact.read(f"{module}.weight"), quant)
    dense = {
        module: left_dense(config(extra_config=EXTRA), module)
        for module in (*schemes, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj",
                       "model.layers.11.mlp.down_proj", "visual.blocks.0.mlp.up")
    }  # fmt: skip
    assert [module for module, left in dense.items() if left] == [
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "visual.blocks.0.mlp.up",
    ]  # fmt: skip


def test_names_without_their_beginning() -> None:
    said = config(extra_config={"mlp.up_proj": {"bits": 16}, "lm_head": {"bits": 4}})
    for module, short, entire in (
        ("model.layers.0.mlp.up_proj", True, False), ("model.layers.0.smlp.up_proj", False, False),
        ("model.lm_head", False, True), ("lm_head", False, False),
    ):  # fmt: skip
        assert left_dense(said, module) is short
        assert left_dense(said, module, entire=True) is entire


def test_blocks_that_are_quantized() -> None:
    for said in ("model.a.0, model.b", ["model.a.0", "model.b"], [["model.a.0"], ["model.b.1"]]):
        old = {**config(block_name_to_quantize=None), "to_quant_block_names": said}
        assert left_dense(old, "model.b.1.up") is False and left_dense(old, "model.c.1.up") is True
    unsaid = config(block_name_to_quantize=None)
    assert left_dense(unsaid, "lm_head") is True and left_dense(unsaid, "a.b") is False
    hard = config(extra_config={r"(\w+)\.\1": {"bits": 16}})
    assert left_dense(hard, "model.layers.0.mlp.up_proj") is None


def test_groups_of_their_own_in_awqs_layout(tmp_path: Path) -> None:
    quant, fine = random_quant(4, 128, False), random_quant(4, 32, False)
    tensors = stored(AWQ, "model.layers.0.a", quant) | stored(AWQ, "model.layers.0.b", fine)
    extra = {r".*layers\.\d+\.b": {"group_size": 32}}
    said = config(AWQ, sym=False, extra_config=extra)
    artifact = Artifact.open(write(tmp_path, tensors, said))
    same(artifact.read("model.layers.0.a.weight"), quant)
    same(artifact.read("model.layers.0.b.weight"), fine)


def rounded(weight: NDArray[np.float32], bits: int, symmetric: bool, size: int = 128) -> GroupQuant:
    """To nearest, as AutoRound does without iterations."""
    groups = weight.reshape(len(weight), -1, size)
    top = (1 << bits) - 1
    if symmetric:
        scale = (np.abs(groups).max(axis=2) / (top / 2)).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1), np.uint8)
    else:
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, top).astype(np.uint8)
    codes = np.rint(groups / scale.astype(np.float32)[..., None]) + zero[..., None]
    codes = np.clip(codes, 0, top).astype(np.uint8).reshape(weight.shape)
    return GroupQuant(Scheme(bits, size, symmetric), codes, scale, zero)


def values(quant: GroupQuant) -> NDArray[np.float32]:
    steps = quant.codes.astype(np.float32) - np.repeat(quant.zero, 128, 1)
    return steps * np.repeat(quant.scale.astype(np.float32), 128, 1)


def folder(
    path: Path, packing: str, bits: int, symmetric: bool, **more: Any
) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """A whole model; and its weights, as float32."""
    expected = {}

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        quant = rounded(weight, bits, symmetric)
        expected[f"{module}.weight"] = values(quant)
        return stored(packing, module, quant)

    tensors = other.model(store)
    said = config(packing, bits, sym=symmetric, **more)
    return other.folder(path, tensors, said), expected


HEALTHY = [(V1, 4, True), (V1, 4, False), (V1, 8, True), (V1, 3, True), (V2, 4, False),
           (V2, 2, False), (AWQ, 4, False), (AWQ, 4, True)]  # fmt: skip


@pytest.mark.parametrize(("packing", "bits", "symmetric"), HEALTHY)
def test_healthy_ones_pass(packing: str, bits: int, symmetric: bool, tmp_path: Path) -> None:
    path, expected = folder(tmp_path / "out", packing, bits, symmetric)
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    verdict = verify_artifact(path, against=source, threads=1)
    assert not but_digests(verdict.findings) and len(verdict.layers) == 14
    found = dict(Artifact.open(path).dequantized())
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_few_weights_clipped_hard_are_no_folds(damaged: bool, tmp_path: Path) -> None:
    """As its search leaves a matrix of 8 bits whose columns do not count alike."""
    last = "model.layers.1.mlp.down_proj"

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        weight = weight.copy()
        weight[:, ::64] *= 8  # the columns that are clipped
        kept = weight.copy()
        kept[::2, ::64] /= 1.7
        quant = rounded(kept, 8, True)
        wide = np.repeat(quant.scale.astype(np.float32), 128, 1)
        quant.codes[:] = np.clip(np.rint(weight / wide) + 128, 0, 255)
        if damaged and module == last:
            quant.scale[:] /= 2
        return stored(V1, module, quant)

    def source(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        weight = weight.copy()
        weight[:, ::64] *= 8
        return {f"{module}.weight": ("F32", weight)}

    path = other.folder(tmp_path / "out", other.model(store), config(bits=8))
    of = other.folder(tmp_path / "source", other.model(source), {})
    verdict = verify_artifact(path, against=of, threads=1)
    assert {f.name for f in but_digests(verdict.findings)} == (
        {f"{last}.weight"} if damaged else set()
    )
    assert max(layer.relative_error for layer in verdict.layers) > 0.05


@pytest.mark.parametrize(("says", "holds"), [(V1, V2), (V2, V1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_by_another_convention_are_found(
    says: str, holds: str, symmetric: bool, tmp_path: Path
) -> None:
    path, _ = folder(tmp_path, holds, 4, symmetric)
    file = path / "config.json"
    said = json.loads(file.read_text())
    said["quantization_config"]["packing_format"] = says
    file.write_text(json.dumps(said))
    found = [f for f in serious(path) if f.check == "zero-convention"]
    assert len(found) == 1 and f"set packing_format to {holds}" in found[0].message


def test_damage_is_found(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "out", V1, 4, True)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, end = header["model.layers.1.mlp.up_proj.scales"]["data_offsets"]
    data[8 + length + start : 8 + length + end] = b"\0" * (end - start)
    file.write_bytes(data)
    assert {f.name for f in serious(path)} == {"model.layers.1.mlp.up_proj.weight"}


def test_the_config_against_the_tensors(tmp_path: Path) -> None:
    """A layer that is dense must stand in extra_config; one that is quantized must not."""
    left: dict[str, other.Store] = {"1.mlp.down_proj": other.dense}
    tensors = other.model(lambda m, w: stored(V1, m, rounded(w, 4, True)), left)
    silent = other.folder(tmp_path / "a", tensors, config())
    said = other.folder(
        tmp_path / "b", tensors, config(extra_config={r".*1\.mlp\.down.*": {"bits": 16}})
    )
    both = config(
        extra_config={r".*1\.mlp\.down.*": {"bits": 16}, r".*0\.mlp\.down.*": {"bits": 16}}
    )
    wrong = other.folder(tmp_path / "c", tensors, both)
    down = "model.layers.{}.mlp.down_proj"
    for engine in ("vllm", "sglang", "transformers"):
        checks = [(f.check, f.name) for f in serious(silent, engine)]
        assert checks == [("engine-skip-list", down.format(1))]
        assert not serious(said, engine)
        checks = [(f.check, f.name) for f in serious(wrong, engine)]
        assert checks == [("engine-skip-list", down.format(0))]
    for folder, block in ((silent, 1), (wrong, 0)):
        assert [(f.check, f.name) for f in serious(folder)] == [("dense-list", down.format(block))]


@pytest.mark.parametrize(
    ("engine", "packing", "bits", "symmetric", "more", "expected"),
    [
        ("vllm", V1, 4, True, {}, []),
        ("vllm", V1, 4, False, {}, ["error engine-scheme"]),
        ("vllm", V1, 3, True, {}, ["warning engine-slow"]),
        ("vllm", V2, 4, True, {}, ["error engine-format"]),
        ("vllm", AWQ, 4, False, {}, []),
        ("vllm", AWQ, 4, True, {}, ["warning engine-slow"]),
        ("vllm", V1, 4, True, {"backend": "auto_round:exllamav2"}, ["error engine-format"]),
        ("vllm", V1, 4, True, {"quant_method": "intel/auto-round"}, ["error engine-format"]),
        ("sglang", V1, 8, True, {}, []),
        ("sglang", V1, 4, False, {}, ["error engine-scheme"]),
        ("sglang", V1, 3, True, {}, ["error engine-scheme"]),
        ("sglang", AWQ, 4, False, {}, []),
        ("sglang", AWQ, 4, True, {}, ["warning engine-slow"]),
        ("sglang", "auto_round:gptqmodel", 4, True, {}, ["error engine-format"]),
        ("transformers", V2, 2, False, {}, ["note engine-route"]),
        ("transformers", V1, 4, False, {}, ["warning engine-route", "note engine-route"]),
        ("transformers", V1, 4, True, {}, ["note engine-route"]),
        ("transformers", AWQ, 4, True, {}, ["warning engine-route", "note engine-route"]),
        ("transformers", V1, 4, True, {"quant_method": "intel/auto-round"},
         ["error engine-format", "note engine-route"]),
        ("exllama", V1, 4, True, {}, ["error engine-format"]),
    ],
)  # fmt: skip
def test_engines(
    engine: str, packing: str, bits: int, symmetric: bool, more: Any, expected: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    path, _ = folder(tmp_path, packing, bits, symmetric, **more)
    found = engine_findings(Artifact.open(path), engine, 1)
    assert [f"{f.severity} {f.check}" for f in found] == expected


def test_sglang_wants_whole_names(tmp_path: Path) -> None:
    """An expression that means a part of a name leaves nothing dense there."""
    left: dict[str, other.Store] = {"mlp.down_proj": other.dense}
    tensors = other.model(lambda m, w: stored(V1, m, rounded(w, 4, True)), left)
    part = config(extra_config={r"mlp\.down_proj$": {"bits": 16}})
    path = other.folder(tmp_path, tensors, part)
    artifact = Artifact.open(path)
    assert not engine_findings(artifact, "vllm", 1)
    assert [f.check for f in engine_findings(artifact, "sglang", 1)] == ["engine-skip-list"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """A block of `tiny` in 4 bits with its tokenizer, and its weights."""
    root = tmp_path_factory.mktemp("tiny")
    checkpoint = Checkpoint.open(first_block(root / "model"))
    tensors, expected = {}, {}
    for name in checkpoint.tensors:
        weight = expected[name] = checkpoint.float32(name)
        if "_proj" in name:
            quant = rounded(weight, 4, True)
            tensors |= stored(V1, name.removesuffix(".weight"), quant)
            expected[name] = values(quant)
        else:
            tensors[name] = other.bfloat16(weight)
    path = root / "model"
    write(path, tensors, {})
    said = dict(checkpoint.config) | {"quantization_config": config()}
    (path / "config.json").write_text(json.dumps(said))
    return path, expected


@pytest.mark.parametrize("to", ["awq", "gptq", "compressed-tensors", "gguf", "hf"])
def test_conversion_changes_no_number(
    to: str, tiny: tuple[Path, dict[str, NDArray[np.float32]]], tmp_path: Path
) -> None:
    path, expected = tiny
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    converted(path, to, out, dtype="float32" if to == "hf" else None)
    if to == "gguf":
        converted(out, "hf", out := tmp_path / "out", dtype="float32")
    found = dict(Artifact.open(out).dequantized())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.slow
def test_a_gpu_reads_the_same_weights(device: Device, tmp_path: Path) -> None:
    """Zeros that borrow are left to the CPU."""
    module = "model.layers.0.mlp.up_proj"
    for least in (0, 1):
        quant = random_quant(4, 128, False, least)
        quant.zero[::3] = least
        path = write(tmp_path / str(least), stored(V1, module, quant), config(sym=False))
        with open_weights(path) as weights:
            np.testing.assert_array_equal(weights.float32(f"{module}.weight"), values(quant))
            found = OnDevice(weights, device).packed(f"{module}.weight")
            assert (found is None) == (least == 0)
            if found is not None:
                out = torch.empty(found.shape, device=device.place)
                device.launch(found.dense(out))
                np.testing.assert_array_equal(out.cpu().numpy(), values(quant))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "in", V2, 2, False)
    with pytest.raises(QtoolError, match="awq holds 4 bits only, not 2"):
        converted(path, "awq", tmp_path / "out")


def test_what_is_recognised_only(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "in", V1, 4, True, act_bits=8)
    seen = inspect(path)
    assert seen.summary()[0] == ("format", "auto-round auto_round:auto_gptq with inputs of 8 bits")
    shapes = {entry.name: entry.shape for entry in seen.entries}
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (other.HIDDEN, other.INNER)
    said = "auto-round auto_round:auto_gptq with inputs of 8 bits, which is recognised, but not"
    with pytest.raises(UnsupportedError, match=said):
        converted(path, "gptq", tmp_path / "out")
