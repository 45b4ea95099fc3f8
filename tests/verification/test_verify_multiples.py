"""A matrix that is a multiple of the source's, or has 1 / scale for its scales, is told once, and
only where nothing compensates for it; and tensors that the source lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.hub import tiny_folder
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize
from support.verification.verifying import forget_digests

Tensors = dict[str, torch.Tensor]
EMBEDDING, LAYER = "model.embed_tokens.weight", "model.layers.1."
Q, K, UP, DOWN = (
    LAYER + name
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
)
NORM = f"{LAYER}input_layernorm.weight"
SCALES = {"fp8-dynamic": "weight_scale", "w8a8-dynamic": "weight_scale"}  # others: scales
FEW = ("calibration.samples=4", "calibration.length=64")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    where = tmp_path_factory.mktemp("made")

    def get(recipe: str) -> Path:
        if not (where / recipe).exists():
            rtn = recipe.endswith(("rtn", "dynamic"))
            quantize(tiny_folder(), recipe, where / recipe, *(() if rtn else FEW))
            assert not told(where / recipe)
        return where / recipe

    return get


def told(folder: Path) -> list[Finding]:
    found = verify_artifact(folder, against=tiny_folder(), threads=1).findings
    return [one for one in found if one.severity != "note"]


def changed(healthy: Path, out: Path, change: Callable[[Tensors], None]) -> Path:
    out.mkdir()
    for path in healthy.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    forget_digests(out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def times(*factors: tuple[str, float]) -> Callable[[Tensors], None]:
    """The stored tensors with these names multiplied."""

    def change(tensors: Tensors) -> None:
        for name, by in factors:
            tensors[name] = (tensors[name].float() * by).to(tensors[name].dtype)

    return change


def only(findings: list[Finding], name: str) -> str:
    (found,) = findings
    assert (found.severity, found.check, found.name) == ("error", "layer-error", name)
    return found.message


@pytest.mark.parametrize("by", [1.1, 0.5, 7.0])
@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-awq"])
def test_the_embedding(recipe: str, by: float, made: Callable[[str], Path], tmp_path: Path) -> None:
    said = only(told(changed(made(recipe), tmp_path / "x", times((EMBEDDING, by)))), EMBEDDING)
    assert said.startswith("1 unquantized matrix is the source's but for a factor that no norm ")
    assert f"about {by:.2g}" in said


@pytest.mark.parametrize("by", [2.0, 0.5])
@pytest.mark.parametrize(
    "recipe", ["w4g128-rtn", "fp8-dynamic", "w8a8-dynamic", "w3g128-awq", "w2g64-gptq"]
)
def test_scales_that_were_multiplied(
    recipe: str, by: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of two bits, where GPTQ left a fifth less, too; half of them is not sure then."""
    if (recipe, by) == ("w2g64-gptq", 0.5):
        return
    name = f"{Q}.{SCALES.get(recipe, 'scales')}"
    said = only(told(changed(made(recipe), tmp_path / "x", times((name, by)))), f"{Q}.weight")
    assert "1 matrix is the source's but for a factor" in said
    assert "are the scales right?" in said
    found = float(said.partition("about ")[2].split(" ")[0])
    assert found == pytest.approx(by, rel=0.25 if recipe == "w2g64-gptq" else 0.1)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "fp8-dynamic"])
def test_all_of_them(recipe: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        end = f"_proj.{SCALES.get(recipe, 'scales')}"
        times(*((name, 2.0) for name in tensors if name.endswith(end)))(tensors)

    (found,) = told(changed(made(recipe), tmp_path / "x", change))
    assert found.message.startswith("28 matrices are the source's but for a factor ")


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "fp8-dynamic", "w4g128-awq"])
def test_reciprocals(recipe: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    name = f"{Q}.{SCALES.get(recipe, 'scales')}"

    def change(tensors: Tensors) -> None:
        tensors[name] = (1 / tensors[name].float()).to(tensors[name].dtype)

    said = only(told(changed(made(recipe), tmp_path / "x", change)), f"{Q}.weight")
    assert said.startswith("1 matrix has scales that are the reciprocals of those that the codes ")


@pytest.mark.parametrize(
    "factors",
    [
        ((UP, 2.0), (DOWN, 0.5)), ((UP, 1.15), (DOWN, 1 / 1.15)), ((Q, 2.0), (K, 0.5)),
        ((NORM, 0.5), (Q, 2.0), (K, 2.0), (f"{LAYER}self_attn.v_proj", 2.0)),
    ],
)  # fmt: skip
def test_what_is_compensated_for(factors: Any, made: Callable[[str], Path], tmp_path: Path) -> None:
    stored = [(n if n == NORM else f"{n}.weight_scale", by) for n, by in factors]
    assert not told(changed(made("w8a8-dynamic"), tmp_path / "x", times(*stored)))


@pytest.mark.parametrize("recipe", ["w4g128-awq", "w3g128-awq"])
@pytest.mark.parametrize("by", [2.0, 0.5])
def test_a_norm_that_its_readers_divided(
    recipe: str, by: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """And that is another one by more than their scales."""
    found = told(changed(made(recipe), tmp_path / "x", times((NORM, by))))[0]
    assert (found.severity, found.check, found.name) == ("error", "norms", NORM)
    assert found.message.startswith("1 norm is unlike the source's by more than the layers that ")


@pytest.mark.parametrize(
    ("end", "said"), [("bias", "compensate for what was lost"), ("x", "Remove")]
)
def test_what_the_source_lacks(
    end: str, said: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """A warning that says what to do."""

    def change(tensors: Tensors) -> None:
        tensors[f"{Q}.{end}"] = torch.ones(256)

    found = told(changed(made("w4g128-rtn"), tmp_path / "x", change))
    (one,) = [f for f in found if f.check == "against"]
    assert one.severity == "warning" and said in one.message
    assert one.message.endswith("fetch or make the artifact again")


@pytest.mark.parametrize("by", [1.25, 2.0, 0.5])
@pytest.mark.parametrize("name", ["mlp.up_proj", "mlp.down_proj", "self_attn.v_proj"])
def test_half_of_a_fold(name: str, by: float, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Channel by channel the rows of one still undo the columns of the other."""
    first = LAYER + ("self_attn.v_proj" if "attn" in name else "mlp.up_proj")
    factor = times((f"{LAYER}{name}.scales", by))
    said = only(told(changed(made("w4g128-awq"), tmp_path / "x", factor)), f"{first}.weight")
    assert said.startswith("1 pair of matrices that share scales is together ")
    assert float(said.split(" times ")[0].split(" ")[-1]) == pytest.approx(by, rel=0.03)


def test_both_halves_of_a_fold(made: Callable[[str], Path], tmp_path: Path) -> None:
    """One more factor, and its inverse: what the model computes is the same."""
    factors = times((f"{UP}.scales", 2.0), (f"{DOWN}.scales", 0.5))
    assert not told(changed(made("w4g128-awq"), tmp_path / "x", factors))
