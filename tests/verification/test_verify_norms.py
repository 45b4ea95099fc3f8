"""A norm that is zeros, or a multiple of the source's, is told against it."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qtool import tiny
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize
from support.verification.verifying import forget_digests

TINY = Path(tiny.__file__).parent
FINAL, INSIDE = "model.norm.weight", "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(scope="module", params=["w4g128-rtn", "w4g128-awq", "w3g128-awq-gptq"])
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("norms") / str(request.param)
    few = (
        [] if request.param == "w4g128-rtn" else ["calibration.samples=4", "calibration.length=64"]
    )
    quantize(TINY, request.param, out, *few)
    forget_digests(out)
    return out


def multiplied(folder: Path, name: str, by: float, out: Path) -> Path:
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(out / "model.safetensors")
    tensors[name] = tensors[name] * by
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def errors(folder: Path) -> list[Finding]:
    return [f for f in verify_artifact(folder, against=TINY).findings if f.severity == "error"]


@pytest.mark.parametrize("by", [0.0, 0.5, 2.0])
def test_a_norm_that_was_multiplied(healthy: Path, by: float, tmp_path: Path) -> None:
    """Within a block where scales were folded these may tell of a factor themselves, or hide it."""
    names = [FINAL] if "awq" in healthy.name and by else [FINAL, INSIDE]
    for name in names:
        folder = multiplied(healthy, name, by, tmp_path / name)
        found = [f for f in errors(folder) if f.check == "norms"]
        assert [f.name for f in found] == [name]
        said = f"{name} ({by:g} times)" if by else "1 norm is 0 altogether"
        assert said in found[0].message


def test_norms_that_are_sound(healthy: Path) -> None:
    assert errors(healthy) == []
    assert "norms" in verify_artifact(healthy, against=TINY).checks
