"""A matrix under another one's name is told by what it is."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool import tiny
from qtool.verification.run import verify_artifact
from support.gallery import raw
from support.runs.quantizing import quantize
from support.verification.verifying import forget_digests

TINY = Path(tiny.__file__).parent
Q, OUT = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.o_proj"


def exchange(folder: Path, *modules: str) -> None:
    """Each of the modules gets the tensors of the one before it."""
    with raw.edited(folder) as tensors:
        parts = [
            {n[len(m) :]: tensors[n] for n in tensors if n.startswith(m + ".")} for m in modules
        ]
        for module, part in zip(modules, [parts[-1], *parts[:-1]], strict=True):
            for end, tensor in part.items():
                tensors[module + end] = tensor


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w2g64-gptq", "fp8-dynamic", "w4g128-awq"])
def test_what_it_is_instead(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "x"
    few = [] if recipe in ("w4g128-rtn", "fp8-dynamic") else ["samples=4", "length=64"]
    quantize(TINY, recipe, out, *(f"calibration.{one}" for one in few))
    forget_digests(out)
    healthy = verify_artifact(out, against=TINY)
    assert "swapped" in healthy.checks and not [f for f in healthy.findings if f.check == "swapped"]
    exchange(out, Q.format(0), Q.format(2), OUT.format(1))
    (one,) = [f for f in verify_artifact(out, against=TINY).findings if f.severity != "note"]
    assert (one.severity, one.check) == ("error", "swapped")
    assert one.message.startswith("3 matrices stand under names of another: ")
    for here, there in ((Q.format(0), OUT.format(1)), (Q.format(2), Q.format(0))):
        assert f"{here}.weight is the source's {there}.weight" in one.message


def test_what_is_no_weight_of_the_source_is_passed_over(tmp_path: Path) -> None:
    out, source = tmp_path / "x", tmp_path / "source"
    quantize(TINY, "w4g128-rtn", out)
    exchange(out, Q.format(0), Q.format(2))
    shutil.copytree(TINY, source, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors = load_file(source / "model.safetensors")
    shape = tensors[f"{Q.format(0)}.weight"].shape
    tensors["model.layers.0.self_attn.table"] = torch.zeros(shape, dtype=torch.int32)
    save_file(tensors, source / "model.safetensors")
    (one,) = [f for f in verify_artifact(out, against=source).findings if f.check == "swapped"]
    assert one.message.startswith("2 matrices stand")


@pytest.mark.parametrize("recipe", ["w4g128-awq", "w3g128-awq"])
def test_with_scales_in_rows_and_columns(recipe: str, tmp_path: Path) -> None:
    out, up = tmp_path / "x", "model.layers.{}.mlp.up_proj"
    quantize(TINY, recipe, out, "calibration.samples=4", "calibration.length=64")
    forget_digests(out)
    exchange(out, up.format(1), up.format(2))
    (one,) = [f for f in verify_artifact(out, against=TINY).findings if f.severity != "note"]
    assert (one.check, one.name) == ("swapped", f"{up.format(1)}.weight")
    assert f"{up.format(2)}.weight is the source's {up.format(1)}.weight" in one.message
