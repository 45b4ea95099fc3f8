"""GPTQ's zeros under the label of the other version: converting refuses, or says how it reads."""

import json
import shutil
from pathlib import Path

import pytest

from qtool.errors import FormatError
from support.converting.converting import converted, numbers, run
from support.runs import quantizing

FILES = ("config.json", "quantize_config.json")
NAMES = {"v1": "gptq", "v2": "gptq_v2"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    model = quantizing.first_blocks_of_tiny(root / "model", 1)
    for name, symmetric in (("symmetric", "true"), ("asymmetric", "false")):
        sets = ("method=rtn", f"weights.symmetric={symmetric}")
        quantizing.quantize(model, "w4g128-gptq", root / name, *sets)
    run(root / "symmetric", "gptq-v2", root / "symmetric-v2")
    return root


def labelled(folder: Path, out: Path, version: str) -> Path:
    shutil.copytree(folder, out)
    (out / "qtool.json").unlink()
    for file in FILES:
        content = json.loads((out / file).read_text())
        table = content.get("quantization_config", content)
        assert table["checkpoint_format"] != NAMES[version]
        table["checkpoint_format"] = NAMES[version]
        (out / file).write_text(json.dumps(content))
    return out


@pytest.mark.parametrize(("name", "label"), [("symmetric", "v2"), ("asymmetric", "v1")])
def test_a_wrong_label_is_refused(name: str, label: str, made: Path, tmp_path: Path) -> None:
    wrong, truth = labelled(made / name, tmp_path / "wrong", label), {"v1": "v2", "v2": "v1"}[label]
    with pytest.raises(FormatError) as error:
        converted(wrong, "hf", tmp_path / "out")
    assert str(error.value) == (
        f"{wrong}: by its config zeros are stored as GPTQ {label} does it, and those of 7 of 7 "
        "matrices that were looked at (as model.layers.0.mlp.down_proj.weight) are stored as "
        f"{truth} does: give --assume {truth}, or correct the config"
    )
    meant = numbers(run(wrong, "hf", tmp_path / "meant", assume=truth))
    whole = numbers(run(made / name, "hf", tmp_path / "whole"))
    assert all((meant[key] == whole[key]).all() for key in whole)
    converted(wrong, "hf", tmp_path / "forced", assume=label)


def test_what_is_read_right_is_a_warning(made: Path, tmp_path: Path) -> None:
    """Zeros in the middle of a symmetric grid are read as those of v2, whatever the label."""
    wrong = labelled(made / "symmetric-v2", tmp_path / "wrong", "v1")
    (warning,) = converted(wrong, "gptq-v2", tmp_path / "out").warnings
    assert warning.endswith("are stored as v2 does; they are read as that")
    assert not converted(made / "symmetric", "hf", tmp_path / "sound").warnings
