"""`qtool convert` to GGUF and from it: the same numbers as other people's code reads them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import qtool
from qtool.artifacts.artifact import Artifact
from qtool.converting.blocks import Q4_0, Q4_1, Q8_0, BlockMatrix, pack, unpack
from qtool.errors import QtoolError, UnsupportedError
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.to_hf import files
from qtool.gguf_types import BlockType
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.scheme import GroupQuant, Scheme
from support.converting.converting import (
    MATRICES,
    artifacts,
    assert_read_alike,
    first_block,
    numbers,
    run,
    said_of,
    types,
    weights,
)
from support.formats.artifact_files import random_quant, write_folder
from support.gguf import gguf_from_hf, gguf_models
from support.runs import quantizing


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tiny, rounded to nearest in several formats."""
    cases = {
        "gptq": ("format=gptq", "weights.symmetric=true"),
        "gptq-32": ("format=gptq", "weights.symmetric=true", "weights.group_size=32"),
        "gptq-channel": ("format=gptq", "weights.symmetric=true", "weights.group_size=-1"),
        "gptq-8": ("format=gptq", "weights.symmetric=true", "weights.bits=8"),
        "gptq-3": ("format=gptq", "weights.symmetric=true", "weights.bits=3"),
        "awq": ("format=awq", "weights.symmetric=true", "weights.group_size=64"),
        "awq-asymmetric": ("format=awq",),
    }
    return artifacts(tmp_path_factory.mktemp("artifacts"), cases)


@pytest.mark.parametrize(
    ("case", "back", "expected"),
    [
        ("gptq", "gptq", "Q4_0"),
        ("gptq-32", "gptq", "Q4_0"),
        ("gptq-channel", "gptq", "Q4_0"),
        ("gptq-8", "gptq", "Q8_0"),
        ("awq", "awq", "Q4_0"),
    ],
)
def test_there_and_back_gives_the_same_files(
    made: dict[str, Path], case: str, back: str, expected: str, tmp_path: Path
) -> None:
    file = run(made[case], "gguf", tmp_path / "file.gguf")
    found = types(file)
    assert found["blk.0.attn_q.weight"] == found["blk.0.ffn_down.weight"] == expected
    assert found["token_embd.weight"] == "BF16" and found["output_norm.weight"] == "F32"
    folder = run(file, back, tmp_path / "folder")
    assert weights(folder) == weights(made[case])
    record = json.loads((folder / "qtool.json").read_text())
    assert [one["exact"] for one in record["conversions"]] == [True, True]
    assert record["recipe"]["name"] == "w4g128-rtn"


def test_a_name_that_does_not_say_gguf(made: dict[str, Path], tmp_path: Path) -> None:
    said = (
        f"{tmp_path / 'x'} is one GGUF file; most programs know them by a name that ends in .gguf"
    )
    assert said in qtool.convert(made["gptq"], "gguf", tmp_path / "x").warnings
    assert not qtool.convert(made["gptq"], "gguf", tmp_path / "x.gguf").warnings
    for to, what in (("gguf", "a GGUF file"), ("gptq-v2", "a folder")):
        with pytest.raises(UnsupportedError, match=f"makes {what}; choose another name"):
            qtool.convert(made["gptq"], to, tmp_path / "x.safetensors")


@pytest.mark.parametrize("case", ["gptq", "gptq-8", "gptq-3", "awq"])
def test_gguf_py_reads_the_same_numbers(made: dict[str, Path], case: str, tmp_path: Path) -> None:
    file = run(made[case], "gguf", tmp_path / "file.gguf")
    assert_read_alike(file, made[case])


def variant(
    source: Path, out: Path, change: Callable[[GroupQuant], GroupQuant], layout: str = "v2"
) -> Path:
    """The artifact as GPTQ, with other codes, scales or zeros."""
    artifact = Artifact.open(source)
    quants, dense = {}, {}
    for name, entry in artifact.entries.items():
        value = artifact.read(name)
        if isinstance(value, GroupQuant):
            quants[entry.module] = change(value)
        else:
            dense[name] = value
    out.mkdir()
    write_folder(out, "gptq", quants, dense, layout)
    config = json.loads((source / "config.json").read_text())
    written = json.loads((out / "config.json").read_text())
    config["quantization_config"] = written["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((source / name).read_bytes())
    return out


def test_zero_points_that_q4_1_holds(made: dict[str, Path], tmp_path: Path) -> None:
    """A power of two times a float16 is one."""

    def change(quant: GroupQuant) -> GroupQuant:
        zero = np.array([0, 4, 2, 8], np.uint8)[np.arange(quant.zero.size) % 4]
        return replace(
            quant,
            scheme=replace(quant.scheme, symmetric=False),
            zero=zero.reshape(quant.zero.shape),
        )

    source = variant(made["gptq-32"], tmp_path / "source", change)
    file = run(source, "gguf", tmp_path / "file.gguf")
    assert types(file)["blk.0.attn_v.weight"] == "Q4_1"
    back = run(file, "gptq-v2", tmp_path / "back")
    before, after = numbers(source), numbers(back)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_zero_points_that_q4_1_rounds(made: dict[str, Path], tmp_path: Path) -> None:
    source = made["awq-asymmetric"]
    with pytest.raises(
        UnsupportedError, match=r"Q4_1 rounds.*6 more.*--to gguf-q8_0 holds them.*--lossy"
    ):
        run(source, "gguf", tmp_path / "file.gguf")
    assert list(tmp_path.iterdir()) == []
    exact = run(source, "gguf-q8_0", tmp_path / "exact.gguf")
    assert said_of(exact)["exact"] is True
    assert types(exact)["blk.0.ffn_up.weight"] == "Q8_0"
    rounded = run(source, "gguf", tmp_path / "rounded.gguf", lossy=True)
    record = said_of(rounded)
    assert record["exact"] is False
    errors = [one["relative_error"] for one in record["rounded"]]  # type: ignore[attr-defined]
    assert len(errors) == MATRICES and 0 < max(errors) < 1e-3
    with pytest.raises(UnsupportedError, match="no whole zero point times a scale"):
        run(rounded, "awq", tmp_path / "again")
    again = run(rounded, "awq", tmp_path / "again", lossy=True)
    assert weights(again) == weights(source)  # whole zero points are the nearest to the rounded


def test_columns_out_of_group_order(made: dict[str, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def change(quant: GroupQuant) -> GroupQuant:
        return replace(quant, g_idx=rng.permutation(quant.group_index()).astype(np.int32))

    source = variant(made["gptq-32"], tmp_path / "source", change, "v1")
    with pytest.raises(UnsupportedError, match=r"desc_act.*GGUF.*6 more.*--lossy it is encoded"):
        run(source, "gguf", tmp_path / "file.gguf")
    file = run(source, "gguf", tmp_path / "file.gguf", lossy=True)
    errors = [one["relative_error"] for one in said_of(file)["rounded"]]  # type: ignore[attr-defined]
    assert len(errors) == MATRICES and min(errors) > 0.001 and max(errors) < 0.2


def test_groups_of_sixteen(made: dict[str, Path], tmp_path: Path) -> None:
    def change(quant: GroupQuant) -> GroupQuant:
        factor = np.array([1, 2], np.float16)
        return replace(
            quant,
            scheme=replace(quant.scheme, group_size=16),
            scale=np.repeat(quant.scale, 2, axis=1)
            * factor[np.arange(2 * quant.scale.shape[1]) % 2],
            zero=np.repeat(quant.zero, 2, axis=1),
        )

    source = variant(made["gptq-32"], tmp_path / "source", change, "v1")
    with pytest.raises(UnsupportedError, match=r"groups of 16.*multiple of 32"):
        run(source, "gguf", tmp_path / "file.gguf")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny as GGUF by a recipe, and what `--set` changes in it."""
    root, found = tmp_path_factory.mktemp("gguf"), {}
    model = first_block(root / "model")

    def make(recipe: str, *sets: str) -> Path:
        if (recipe, sets) not in found:
            chosen = load(recipe, sets)
            assert isinstance(chosen, GgufRecipe)
            out = root / f"{len(found)}.gguf"
            run_gguf(GgufRequest("tiny", model, chosen, out, 2), Progress(quiet=True))
            found[recipe, sets] = out
        return found[recipe, sets]

    return make


@pytest.mark.parametrize(("recipe", "to"), [("q4_0", "awq"), ("q4_0", "gptq"), ("q8_0", "gptq")])
def test_files_of_llama_cpps_kind(
    quantized: Callable[..., Path], recipe: str, to: str, tmp_path: Path
) -> None:
    """Linear layers keep their codes; the embedding, which is quantized too, cannot."""
    file = quantized(recipe)
    with pytest.raises(UnsupportedError, match=r"embed_tokens.*--dtype float32 holds it"):
        run(file, to, tmp_path / "out")
    out = run(file, to, tmp_path / "out", dtype="float32")
    found, plain = numbers(out), numbers(run(file, "hf", tmp_path / "hf", dtype="float32"))
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    scheme = Artifact.open(out).entry("model.layers.0.mlp.up_proj").scheme
    assert isinstance(scheme, Scheme) and scheme.group_size == 32 and scheme.symmetric
    lossy = run(file, to, tmp_path / "lossy", lossy=True)
    (record,) = json.loads((lossy / "qtool.json").read_text())["conversions"]
    assert [one["name"] for one in record["rounded"]] == ["model.embed_tokens.weight"]


def test_minimums_that_are_no_zero_points(quantized: Callable[..., Path], tmp_path: Path) -> None:
    file = quantized("q4_1")
    with pytest.raises(UnsupportedError, match=r"Q4_1.*no whole zero point.*--lossy"):
        run(file, "awq", tmp_path / "out", dtype="float32")
    out = run(file, "awq", tmp_path / "out", dtype="float32", lossy=True)
    (record,) = json.loads((out / "qtool.json").read_text())["conversions"]
    errors = [one["relative_error"] for one in record["rounded"]]
    assert len(errors) == MATRICES and min(errors) > 0.001 and max(errors) < 0.2


def test_super_blocks_are_refused(quantized: Callable[..., Path], tmp_path: Path) -> None:
    for lossy in (False, True):
        with pytest.raises(UnsupportedError, match=r"Q[46]_K, not as.*--to hf"):
            run(quantized("q4_k_m"), "awq", tmp_path / "out", lossy=lossy)
    with pytest.raises(UnsupportedError, match="is GGUF already"):
        run(quantized("q4_0"), "gguf", tmp_path / "out.gguf")


def test_a_file_that_is_not_quantized(quantized: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no tensor is quantized"):
        run(quantized("bf16"), "gptq", tmp_path / "out")
    embedding = quantized("q4_0", "overrides=[{match: blk, dense: true}]")
    for to in ("awq", "compressed-tensors"):
        with pytest.raises(
            UnsupportedError,
            match=r"only model\.embed_tokens\.weight; dequantize that with --to hf",
        ):
            run(embedding, to, tmp_path / "out", lossy=True)


@pytest.mark.parametrize("name", ["mixtral", "phi3", "gpt_neox"])
def test_experts_and_fused_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of experts, and rows of fused layers in another order, go there and back."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    monkeypatch.setattr(files, "tokenizer_files", lambda _: {})
    model = quantizing.build(name, tmp_path / "model")
    source = quantizing.quantize(
        model, "w4g128-rtn", tmp_path / "source", "format=gptq", "weights.symmetric=true",
        "weights.group_size=32",
    ).out  # fmt: skip
    file = run(source, "gguf", tmp_path / "file.gguf")
    back = numbers(run(file, "gptq", tmp_path / "back"))
    for key, value in numbers(source).items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)
    if name == "mixtral":
        assert types(file)["blk.1.ffn_down_exps.weight"] == "Q4_0"


@pytest.mark.parametrize("name", ["granite-moe", "granite-4-h-moe", "gpt-oss", "llama4"])
def test_what_is_put_together_is_refused_in_codes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in one tensor: in one sentence, before anything is written."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    monkeypatch.setattr(files, "tokenizer_files", lambda _: {})
    folder = gguf_models.build(name, tmp_path / "model", dtype="bfloat16")
    gguf_from_hf.write(folder, tmp_path / "file.gguf", "q4_0")
    for to in ("gptq", "awq", "compressed-tensors"):
        with pytest.raises(UnsupportedError, match="--to hf"):
            run(tmp_path / "file.gguf", to, tmp_path / "out", lossy=True)
        assert not (tmp_path / "out").exists()


def test_a_matrix_that_becomes_two_has_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of latent attention, whose columns become rows of one of them."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    folder = gguf_models.build("deepseek-v3", tmp_path / "model", dtype="bfloat16")
    quantized = quantizing.quantize(folder, "w8a16-ct", tmp_path / "out").out
    said = r"kv_b_proj.* `qtool quantize` with --requantize"
    for lossy in (False, True):
        with pytest.raises(UnsupportedError, match=said):
            run(quantized, "gguf", tmp_path / "x.gguf", lossy=lossy)
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("block", [Q4_0, Q4_1, Q8_0], ids=lambda block: block.name)
def test_blocks_are_those_of_gguf_py(block: BlockType) -> None:
    """Bytes drawn at random, read by gguf-py and by us; then packed again from the codes."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (16, 4, block.nbytes), dtype=np.uint8)
    scale = rng.uniform(-0.1, 0.1, (16, 4)).astype(np.float16)
    raw[..., :2] = scale[..., None].view(np.uint8)
    if block is Q4_1:
        zero = rng.choice([1, 2, 4, 8], (16, 4)).astype(np.float16)
        raw[..., 2:4] = (-zero * scale)[..., None].view(np.uint8)
    raw = raw.reshape(16, -1)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[block.name])
    quant = unpack(raw, block)
    assert quant is not None
    np.testing.assert_array_equal(quant.dequantize(), theirs)
    np.testing.assert_array_equal(BlockMatrix(raw, block).dequantize(), theirs)
    np.testing.assert_array_equal(pack(quant, block), raw)


@pytest.mark.parametrize("block", [Q4_0, Q4_1, Q8_0], ids=lambda block: block.name)
def test_blocks_of_scale_zero(block: BlockType) -> None:
    """Other formats have positive scales, so the same numbers get one."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (4, 3, block.nbytes), dtype=np.uint8)
    raw[..., :2] = np.float16([0.25, 0, -0.0]).view(np.uint8).reshape(1, 3, 2)
    expected = [0.0, 0.0, 0.0, 0.0]
    if block is Q4_1:
        expected = [0.0, 1.5, -3.25, 0.0]
        raw[:, 0, 2:4] = np.float16([-2.0]).view(np.uint8)
        raw[:, 1:, 2:4] = np.float16(expected).view(np.uint8).reshape(4, 1, 2)
    matrix = BlockMatrix(raw.reshape(4, -1), block)
    quant = matrix.grouped
    assert quant is not None and (quant.scale > 0).all()
    np.testing.assert_array_equal(quant.dequantize(), matrix.dequantize())
    np.testing.assert_array_equal(quant.dequantize()[:, 40], np.float32(expected))


def test_wide_groups_and_few_bits_in_blocks() -> None:
    for bits, size in ((2, 64), (3, 128), (4, -1)):
        quant = random_quant(Scheme(bits, size, True), 8, 256)
        raw = pack(quant, Q4_0)
        np.testing.assert_array_equal(BlockMatrix(raw, Q4_0).dequantize(), quant.dequantize())
    quant = random_quant(Scheme(8, 64, True), 8, 256)
    found = BlockMatrix(pack(quant, Q8_0), Q8_0)
    np.testing.assert_array_equal(found.dequantize(), quant.dequantize())


def test_provenance_that_makes_no_sense_is_passed_over(
    made: dict[str, Path], tmp_path: Path
) -> None:
    """It is text from a file: a wrong size of groups is not believed, nor a dtype."""
    file = run(made["gptq"], "gguf", tmp_path / "file.gguf")
    raw = bytearray(file.read_bytes())
    for old, new in (
        (b'"group_size":128', b'"group_size":[8]'),
        (b'"conversions"', b'"xonversions"'),
    ):
        at = raw.find(old)
        assert at > 0 and len(old) == len(new)
        other = bytearray(raw)
        other[at : at + len(old)] = new
        (tmp_path / "other.gguf").write_bytes(other)
        found = numbers(run(tmp_path / "other.gguf", "gptq", tmp_path / new.hex()))
        for name, value in numbers(made["gptq"]).items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_nothing_is_left_where_the_tokenizer_is_unknown(
    made: dict[str, Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in made["gptq"].iterdir():
        if path.name != "tokenizer.json":
            (source / path.name).write_bytes(path.read_bytes())
    with pytest.raises(QtoolError, match="tokenizer"):
        run(source, "gguf", tmp_path / "file.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
