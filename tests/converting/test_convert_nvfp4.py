"""`qtool convert` of NVFP4 to GGUF: codes and scales as they are, second scales beside them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.converting import nvfp4
from qtool.converting.blocks import second_scale
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.open import open_source
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.scheme import GroupQuant
from support.converting.converting import converted, first_block, run
from support.models.nvfp4_models import model, rounded, their_numbers
from support.verification.verifying import forget_digests


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first block of `tiny`, NVFP4."""
    root = tmp_path_factory.mktemp("tiny")
    return rounded(first_block(root / "model"), root / "nvfp4")


def stored(artifact: Path, name: str) -> GroupQuant:
    found = Artifact.open(artifact).read(name)
    assert isinstance(found, GroupQuant)
    return found


def test_codes_and_scales_are_those_of_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.gguf"
    made = converted(tiny, "gguf", file)
    assert made.certificate.exact and made.certificate.last_bit == 7
    assert made.certificate.kept.endswith("but for the last bit of those of 7 matrices")
    quant = stored(tiny, "model.layers.0.mlp.down_proj.weight")
    assert quant.outer is not None and quant.scheme.outer == "divides"
    with GgufFile.open(file) as opened:
        raw = opened.read_rows("blk.0.ffn_down.weight", 0, 256).reshape(256, -1, 36)
        second = opened.read_rows("blk.0.ffn_down.scale", 0, 1).view(np.float32)
        assert opened.metadata["general.file_type"].value == 39
        assert opened.tensors["blk.0.ffn_down.scale"].shape == (1,)
        assert opened.tensors["token_embd.weight"].type.name == "BF16"
    bits = torch.from_numpy(quant.scale.astype(np.float32)).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(raw[..., :4].reshape(256, -1), bits.view(torch.uint8).numpy())
    low, high = raw[..., 4:].reshape(256, -1, 8) & 15, raw[..., 4:].reshape(256, -1, 8) >> 4
    codes = np.concatenate([low, high], axis=-1).reshape(256, -1)
    np.testing.assert_array_equal(codes, quant.codes)
    assert second.item() == np.float32(1) / np.float32(quant.outer)


def test_gguf_py_and_qtool_read_the_same_numbers(tiny: Path, tmp_path: Path) -> None:
    file = run(tiny, "gguf", tmp_path / "file.gguf")
    theirs = their_numbers(file)
    with gguf_weights(open_source(file)) as (weights, _):
        ours = weights.float32("model.layers.0.mlp.down_proj.weight")
        assert not [name for name in weights.tensors if name.endswith("scale")]
        block = weights.types()["model.layers.0.mlp.down_proj.weight"]
        assert block.name == "NVFP4"
        assert weights.stored_rows("model.layers.0.mlp.down_proj.weight") is None
    np.testing.assert_array_equal(ours, theirs["blk.0.ffn_down.weight"])
    source = stored(tiny, "model.layers.0.mlp.down_proj.weight").dequantize()
    # Only the order differs: value * (scale / outer) there, (value * scale) * (1 / outer) here.
    np.testing.assert_allclose(ours, source, rtol=2.0**-22, atol=0)


def test_inputs_stay_as_they_are_where_the_checkpoint_leaves_them(
    tiny: Path, tmp_path: Path
) -> None:
    file = run(tiny, "gguf", tmp_path / "file.gguf")
    with GgufFile.open(file) as opened:
        names = list(opened.metadata["general.tensor_extra.name"].value)
        told = list(opened.metadata["general.tensor_extra.prec_a4"].value)
        assert names == sorted(n for n, i in opened.tensors.items() if i.type.name == "NVFP4")
    assert len(names) == 7 and told == [False] * 7
    both = rounded(first_block(tmp_path / "model"), tmp_path / "w4a4", "nvfp4-w4a4")
    made = converted(both, "gguf", tmp_path / "both.gguf")
    assert "quantized activations" in " ".join(made.warnings)
    with GgufFile.open(tmp_path / "both.gguf") as opened:
        assert not [key for key in opened.metadata if "tensor_extra" in key]
        assert not [name for name in opened.tensors if name.endswith("input_scale")]


def modelopt(tiny: Path, folder: Path, algorithm: str) -> Path:
    """The same matrices as ModelOpt stores them, with second scales of many bits."""
    folder.mkdir()
    for file in tiny.iterdir():
        if file.suffix == ".json" and "qtool" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, one in load_file(tiny / "model.safetensors").items():
        if name.endswith("weight_global_scale"):
            tensors[name.replace("weight_global_scale", "weight_scale_2")] = 1.0013 / one[0]
        else:
            tensors[name.replace("weight_packed", "weight")] = one
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("algorithm", "told"), [("NVFP4", False), ("W4A16_NVFP4", True)])
def test_modelopts_second_scales_are_kept_to_the_bit(
    algorithm: str, told: bool, tiny: Path, tmp_path: Path
) -> None:
    folder = modelopt(tiny, tmp_path / "modelopt", algorithm)
    file = run(folder, "gguf", tmp_path / "file.gguf")
    with GgufFile.open(file) as opened:
        second = opened.read_rows("blk.0.ffn_up.scale", 0, 1).view(np.float32)
        assert ("general.tensor_extra.prec_a4" in opened.metadata) is told
    tensors = load_file(folder / "model.safetensors")
    there = tensors["model.layers.0.mlp.up_proj.weight_scale_2"].numpy()
    assert second == there and there.dtype == np.float32


def test_each_expert_has_its_own(tmp_path: Path) -> None:
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    source = rounded(model("Qwen3Moe", tmp_path / "model", **sizes), tmp_path / "nvfp4")
    file = run(source, "gguf", tmp_path / "file.gguf")
    theirs = their_numbers(file)
    scales = theirs["blk.1.ffn_down_exps.scale"]
    assert scales.shape == (4,) and len({*scales.tolist()}) > 1
    with gguf_weights(open_source(file)) as (weights, _):
        for expert in range(4):
            name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
            outer = stored(source, name).outer
            assert outer is not None and scales[expert] == np.float32(1) / np.float32(outer)
            ours = weights.float32(name)
            np.testing.assert_array_equal(ours, theirs["blk.1.ffn_down_exps.weight"][expert])


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("Qwen2", {}, "does not multiply by in blk.0.ffn_down.weight of qwen2.*write nonsense"),
        ("Llama", {"mlp_bias": True}, "has a second scale and a bias, at which llama.cpp ends"),
        ("Llama", {"intermediate_size": 96}, "has 96 in_features, which blocks of 64 do not"),
    ],
)
def test_what_llama_cpp_makes_nothing_good_of_is_refused(
    kind: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = rounded(model(kind, tmp_path / "model", **settings), tmp_path / "nvfp4")
    with pytest.raises(UnsupportedError, match=f"{said}.*--lossy it is encoded anew"):
        run(source, "gguf", tmp_path / "file.gguf")
    made = converted(source, "gguf", tmp_path / "file.gguf", lossy=True)
    with GgufFile.open(tmp_path / "file.gguf") as opened:
        types = {name: info.type.name for name, info in opened.tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "Q8_0" and "blk.0.ffn_down.scale" not in types
    assert types["blk.0.attn_q.weight"] == "NVFP4" and types["blk.0.attn_q.scale"] == "F32"
    assert 0 < max(one.relative_error for one in made.certificate.rounded) < 0.01


def test_scales_below_zero_have_no_place(tmp_path: Path) -> None:
    source = rounded(model("Qwen3", tmp_path / "model"), tmp_path / "nvfp4")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = (-tensors[name].float()).to(torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "qtool.json").unlink()
    with pytest.raises(UnsupportedError, match=r"up_proj.weight has scales below zero"):
        run(source, "gguf", tmp_path / "file.gguf")


@pytest.mark.parametrize("outer", [np.inf, np.nan, 0.0, 1e-40])
def test_second_scales_that_are_none(outer: float, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_global_scale"].fill_(outer)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match="is not the file that was written"):
        run(folder, "gguf", tmp_path / "file.gguf")
    forget_digests(folder)
    for lossy in (False, True):
        with pytest.raises(FormatError, match=r"up_proj.weight: its second scale is .* damaged"):
            run(folder, "gguf", tmp_path / "file.gguf", lossy=lossy)


def test_numbers_that_are_others_are_found(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(quant: GroupQuant) -> np.float32 | None:
        found = second_scale(quant)
        return None if found is None else np.float32(1.00001) * found

    monkeypatch.setattr(nvfp4, "second_scale", wrong)
    with pytest.raises(FormatError, match="reads back as other numbers than the checkpoint's"):
        run(tiny, "gguf", tmp_path / "file.gguf")
    assert not (tmp_path / "file.gguf").exists()


def test_inputs_of_some_matrices_are_rounded(tiny: Path, tmp_path: Path) -> None:
    """ModelOpt's mixtures say it by the scale of a matrix's inputs."""
    folder = modelopt(tiny, tmp_path / "modelopt", "MIXED_PRECISION")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(0.01)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = run(folder, "gguf", tmp_path / "file.gguf")
    with GgufFile.open(file) as opened:
        told = list(opened.metadata["general.tensor_extra.name"].value)
    assert len(told) == 6 and "blk.0.ffn_up.weight" not in told
