"""Artifacts that are packed as nothing says: commands tell what is missing, and count no words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qtool.cli.verify import lines
from qtool.errors import UnsupportedError
from qtool.inspecting.inspect import inspect
from qtool.quality.weights import open_weights
from qtool.verification.run import verify_artifact
from support.converting.converting import run as convert
from support.runs import quantizing
from support.verification.verifying import serious

RECIPES = {"mlx": "w4g64-mlx-rtn", "compressed": "w8a16-ct", "fp8": "fp8-block-hf"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    model = quantizing.first_blocks_of_tiny(root / "model", 1)
    for name, recipe in {**RECIPES, "awq": "w4g128-rtn"}.items():
        quantizing.quantize(model, recipe, root / name)
        (root / name / "qtool.json").unlink()
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def edit(folder: Path, *keys: str, **values: object) -> None:
    """Change a table of config.json, or leave a key out (None)."""
    config = json.loads((folder / "config.json").read_text())
    table = config
    for key in keys:
        table = table[key]
    for key, value in values.items():
        table.pop(key, None)
        table |= {} if value is None else {key: value}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mlx", "8 matrices are packed as MLX packs them (model.embed_tokens.weight, model.layers."
         "0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight and 5 more), and config.json "
         "has no quantization, which would say in how many bits"),
        ("compressed", "7 matrices are packed (model.layers.0.mlp.down_proj.weight_packed, "),
        ("fp8", "7 matrices are packed (model.layers.0.mlp.down_proj.weight, "),
    ],
)  # fmt: skip
def test_a_lost_config(name: str, said: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(name)
    edit(folder, quantization_config=None, quantization=None)
    found = inspect(folder)
    assert dict(found.summary())["not told"].startswith(said)
    assert "left unquantized" not in dict(found.summary())
    assert found.json()["unquantized_share"] is None
    (finding,) = serious(folder)
    assert finding.severity == "error" and finding.message.startswith(said)
    with pytest.raises(UnsupportedError) as error:
        convert(folder, "hf", tmp_path / "out")
    assert str(error.value).startswith(f"{folder}: {said}")
    with pytest.raises(UnsupportedError, match="are packed"), open_weights(folder):
        pass


def test_mlx_without_bits(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("mlx")
    edit(folder, quantization_config=None)
    edit(folder, "quantization", bits=None)
    said = "quantization of config.json lacks bits or group_size"
    assert said in dict(inspect(folder).summary())["not told"]
    assert [said in f.message for f in serious(folder) if f.severity == "error"] == [True]
    with pytest.raises(UnsupportedError, match=said):
        convert(folder, "hf", tmp_path / "out")


def test_words_are_no_dense_weights(copy: Callable[[str], Path]) -> None:
    """What nobody knows the numbers of is not counted."""
    folder = copy("awq")
    edit(folder, "quantization_config", group_size=96)
    verdict = verify_artifact(folder, threads=1)
    assert verdict.json()["unquantized_share"] is None
    assert "awq, an unknown share of the weights unquantized, " in lines(verdict)[-1]


def test_bits_of_mlx_are_told(copy: Callable[[str], Path]) -> None:
    folder = copy("mlx")
    edit(folder, "quantization", bits=8)
    (finding,) = serious(folder)
    assert finding.message.startswith("config.json says quantization.bits 8, and the shapes of 7 ")
    assert "are those of 4, with which every matrix fits" in finding.message


def test_biases_of_mlx_have_no_convention(copy: Callable[[str], Path]) -> None:
    folder = copy("mlx")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(".biases"):
            tensors[name] += tensors[name.replace("biases", "scales")]
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    (finding,) = serious(folder)
    assert finding.check == "zero-convention"
    assert finding.message.startswith("the biases of 7 of 8 matrices (")
    assert "off by one scale, which makes every weight wrong by a step; fetch or" in finding.message
