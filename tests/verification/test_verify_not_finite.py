"""NaN and infinity among what is stored: one error, and nothing else; links to themselves."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qtool.checkpoints.links import check_links
from qtool.cli.main import app
from qtool.errors import SourceError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.hub import tiny_folder
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize
from support.verification.verifying import forget_digests

UP = "model.layers.1.mlp.up_proj"


def errors(folder: Path, against: Path | None = None) -> list[Finding]:
    found = verify_artifact(folder, against=against, threads=1).findings
    return [one for one in found if one.severity != "note"]


@pytest.mark.parametrize(
    ("recipe", "tensor", "what"),
    [
        ("w4g64-mlx-rtn", "biases",
         "1 of 3,072 biases is NaN or infinite (the first: row 1, columns 192 to 255)"),
        ("w4g64-mlx-rtn", "scales",
         "1 of 3,072 scales is NaN or infinite (the first: row 1, columns 192 to 255)"),
        ("w4g128-awq", "scales",
         "1 of 1,536 scales is NaN or infinite (the first: row 7, columns 0 to 127)"),
        ("w4g128-rtn", "scales",
         "1 of 1,536 scales is NaN or infinite (the first: row 7, columns 0 to 127)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_one_number(recipe: str, tensor: str, what: str, number: float, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reads = ["calibration.samples=4", "calibration.length=32"] if "awq" in recipe else []
    quantize(tiny_folder(), recipe, out, *reads)
    forget_digests(out)
    tensors = load_file(out / "model.safetensors")
    tensors[f"{UP}.{tensor}"].view(-1)[7] = torch.tensor(number)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for against in (None, tiny_folder()):
        found, *more = errors(out, against)
        assert not more, more
        assert (found.severity, found.check, found.name) == ("error", "scales", f"{UP}.weight")
        assert what in found.message


def test_bounds_at_infinity(tmp_path: Path) -> None:
    """Gemma 4 has such around linear layers of its towers, where nothing was calibrated."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    infinite = torch.tensor(float("inf"))
    tensors |= {"tower.q_proj.input_min": -infinite, "tower.q_proj.input_max": infinite,
                "tower.k_proj.input_max": torch.tensor(float("nan")),
                "tower.layer_scalar": infinite.clone()}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = [one.name for one in errors(folder) if one.check == "dense-values"]
    assert sorted(found) == ["tower.k_proj.input_max", "tower.layer_scalar"]


@pytest.mark.parametrize("name", ["config.json", "qtool.json", "tokenizer.json"])
def test_a_link_to_itself(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    with pytest.raises(SourceError, match=f"{name}: a link that leads back to itself; remove it"):
        check_links(folder, [folder / "model.safetensors"], ["tokenizer*"])
    assert any("leads back to itself" in one.message for one in errors(folder))


def test_parts_of_mlx_may_have_other_bits(tmp_path: Path) -> None:
    """Engines that fuse layers load none of it."""
    sets = ["overrides=[{match: '*.v_proj', weights: {bits: 8}}]"]
    quantize(tiny_folder(), "w4g64-mlx-rtn", tmp_path / "out", *sets)
    assert not [one for one in errors(tmp_path / "out") if one.check == "fused"]


@pytest.mark.parametrize(
    ("name", "row", "where"),
    [("blk.1.ffn_up.weight", 5, "row 5, column 0"), ("output_norm.weight", 0, "column 0")],
)
def test_one_number_of_gguf(name: str, row: int, where: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    quantize_gguf(path)
    with GgufFile.open(path) as file:
        tensor = file.tensors[name]
    data = bytearray(path.read_bytes())
    at = tensor.start + row * tensor.row_bytes
    data[at : at + 4] = b"\0\x7e\xff\x7f"  # NaN of float16, and of float32
    path.write_bytes(data)
    (found,) = errors(path)
    assert found.check == "values" and found.name == name
    assert f"NaN or infinite, the first in {where}; fetch" in found.message
    if row == 0:
        return  # which `convert` keeps as it is
    words = ["convert", str(path), "--to", "hf", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and isinstance(result.exception, UnsupportedError)
    assert "NaN or infinite: the file is damaged" in str(result.exception)
    assert not (tmp_path / "out").exists()


def quantize_gguf(path: Path) -> None:
    words = ["quantize", "tiny", "--recipe", "q4_k_m", "-o", str(path)]
    assert CliRunner().invoke(app, words).exit_code == 0
