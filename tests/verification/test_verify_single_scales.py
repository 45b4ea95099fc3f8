"""`qtool verify --against`: one scale among thousands that is not the one its codes were made with,
where no digest tells; and none that methods have moved on purpose."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qtool.hub import tiny_folder
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.against import single_scales
from qtool.verification.against.compared import Compared
from qtool.verification.against.off_scales import OffScale
from qtool.verification.against.scaling import compare
from qtool.verification.against.side_by_side import rows_of_array
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize
from support.verification import made_up_matrices
from support.verification.made_up_matrices import beside, rounded, scattered
from support.verification.verifying import beside_tiny, forget_digests

Floats = NDArray[np.float32]
SHAPE = (96, 512)


def normal(seed: int = 0, shape: tuple[int, int] = SHAPE) -> Floats:
    return made_up_matrices.normal(seed, shape)


def with_scale(quant: GroupQuant, at: tuple[int, int], factor: float) -> GroupQuant:
    quant.scale[at] *= np.asarray(factor, quant.scale.dtype)
    return quant


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5, 2.0, 4.0, -1.0, 1000.0])
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(4, 32, False), Scheme(4, 128, False), Scheme(4, 128, True), Scheme(8, 32, True),
        Scheme(8, 512, False), Scheme(5, 64, False),
    ],
    ids=str,
)  # fmt: skip
def test_one_scale(scheme: Scheme, factor: float) -> None:
    weight = normal()
    quant = with_scale(rounded(weight, scheme), (5, 0), factor)
    found = beside(quant, weight)
    (off,) = found.off_scales
    last = scheme.group_size - 1
    alone = scheme.group_size == SHAPE[1]
    assert off.weights == ("row 5" if alone else f"row 5, columns 0 to {last}")
    assert (off.row, off.group) == (5, None if alone else 0)
    assert off.times == pytest.approx(factor, rel=0.05)
    # All else is told of the others alone.
    assert alone or (found.explained and found.columns is found.rows is None and not found.off)
    assert found.as_stored is None or found.as_stored > found.error


@pytest.mark.parametrize("far", [(5, 40, 63), (0, 70, 199), (64, 128, 191)])
def test_scales_of_some_rows(far: tuple[int, ...]) -> None:
    """Rows are looked at a few at a time, and none is told for another."""
    weight = normal(shape=(200, 512))
    quant = rounded(weight, Scheme(4, 128, False))
    for group, row in enumerate(far):
        with_scale(quant, (row, group), 2.0 + group)
    found = {(one.row, one.group): one.times for one in beside(quant, weight).off_scales}
    wanted = {(row, group): 2.0 + group for group, row in enumerate(far)}
    assert found == pytest.approx(wanted, rel=0.05)


def test_damage_everywhere_takes_few_reads() -> None:
    """As a file that was never fetched to its end has, whose every scale seems to be off."""
    weight, reads = normal(shape=(512, 256)), 0

    def source(first: int, last: int) -> Floats:
        nonlocal reads
        reads += 1
        return weight[first:last]

    quant = rounded(weight, Scheme(4, 128, False))
    quant.scale[:] = 0
    with np.errstate(all="ignore"):
        assert compare("w", quant, source, {}).wrong
    assert reads < 100


@pytest.mark.parametrize("size", [1e-18, 1e-23, 1e-24, 1e-30])
@pytest.mark.filterwarnings("error")
def test_weights_whose_squares_are_lost(size: float) -> None:
    """They are 0 with scales in float16: no scale is told for that, and numpy does not warn."""
    weight = normal() * np.float32(size)
    found = compare("w", rounded(weight, Scheme(4, 32, False)), rows_of_array(weight), {})
    assert found.error == 1 and not found.off_scales


def test_half_of_a_scale_of_three_bits() -> None:
    weight = normal()
    quant = with_scale(rounded(weight, Scheme(3, 128, False)), (5, 1), 0.5)
    assert [one.weights for one in beside(quant, weight).off_scales] == [
        "row 5, columns 128 to 255"
    ]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_of_two_bits_nothing_is_told(factor: float) -> None:
    weight = normal()
    quant = with_scale(rounded(weight, Scheme(2, 64, False)), (5, 1), factor)
    assert not beside(quant, weight).off_scales


def test_groups_that_lie_anywhere() -> None:
    weight = normal()
    quant = scattered(weight)
    assert not beside(quant, weight).off_scales
    (off,) = beside(with_scale(quant, (7, 2), 2.0), weight).off_scales
    assert off.weights == "row 7, group 2 of its g_idx"


def test_beside_a_fold_that_is_taken_out() -> None:
    weight = normal()
    columns = np.exp(normal(1, (1, SHAPE[1]))[0] * 10).astype(np.float32)
    sound = rounded(weight * columns, Scheme(4, 128, False))
    assert not beside(sound, weight).off_scales
    for factor in (2.0, 1000.0):
        quant = rounded(weight * columns, Scheme(4, 128, False))
        found = beside(with_scale(quant, (5, 1), factor), weight)
        (off,) = found.off_scales
        assert off.weights == "row 5, columns 128 to 255" and found.columns is not None
        assert off.times == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("folded", ["columns", "row"])
def test_what_columns_or_a_row_have_in_common_is_a_fold(folded: str) -> None:
    """Too few to be looked for in the error of the whole matrix."""
    weight, scales = normal(shape=(96, 2048)), np.ones((96, 2048), np.float32)
    scales[(slice(None), slice(128, 256)) if folded == "columns" else 5] = 2
    found = beside(rounded(weight * scales, Scheme(4, 128, False)), weight)
    assert all(one.group is None for one in found.off_scales)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_what_moves_weights_is_no_damage(bits: int) -> None:
    """Pruned, clipped, a few large ones, groups of almost nothing, and errors like GPTQ's."""
    rng = np.random.default_rng(2)
    scheme = Scheme(bits, 64, bits == 4)
    weight = normal()
    weight[3, :64] = 0
    weight[4, 64:128] *= 1e-6
    weight[5, 10] = 2.0
    pruned = np.where(rng.random(SHAPE) < 0.5, 0, weight).astype(np.float32)
    clipped = np.clip(weight, -0.04, 0.04)
    step = rounded(weight, scheme).scale.astype(np.float32).repeat(64, axis=1)
    moved = (weight + rng.normal(0, 0.6, SHAPE) * step).astype(np.float32)
    for other in (weight, pruned, clipped, moved):
        assert not beside(rounded(other, scheme), weight).off_scales


def test_many_have_another_reason() -> None:
    """Scales of another matrix are told of as such."""
    weight = normal()
    quant = rounded(weight, Scheme(4, 128, False))
    some = np.random.default_rng(3).random(quant.scale.shape) < 0.3
    quant.scale[some] *= np.float16(2)
    found = beside(quant, weight)
    assert not found.off_scales and found.like is not None and found.like.mixed


def test_rows_that_are_undone_elsewhere_are_a_fold() -> None:
    scales = [OffScale(3, None, 2.0, "row 3"), OffScale(4, None, 0.51, "row 4")]
    both = [beside(rounded(normal(n), Scheme(8, 512, True)), normal(n)) for n in (0, 1)]
    found = [replaced(c, one) for c, one in zip(both, scales, strict=True)]
    assert not single_scales.by_matrix(found)
    assert list(single_scales.by_matrix(found[:1])) == ["w"]


def replaced(c: Compared, one: OffScale) -> Compared:
    from dataclasses import replace

    return replace(c, off_scales=(one,))


# Whole artifacts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    where = tmp_path_factory.mktemp("made")

    def get(recipe: str) -> Path:
        if not (where / recipe).exists():
            calibrated = ("calibration.samples=4", "calibration.length=32")
            reads = "gptq" in recipe or "awq" in recipe
            quantize(tiny_folder(), recipe, where / recipe, *(calibrated if reads else ()))
        return where / recipe

    return get


def damaged(folder: Path, out: Path, name: str, at: int, change: Callable[[Any], Any]) -> Path:
    """A copy without digests, in which one number of one tensor is another."""
    shutil.copytree(folder, out)
    forget_digests(out)
    tensors = load_file(out / "model.safetensors")
    flat = tensors[name].clone().reshape(-1)
    flat[at] = change(flat[at])
    tensors[name] = flat.reshape(tensors[name].shape)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


UP = "model.layers.1.mlp.up_proj"


def times(factor: float) -> Callable[[Any], Any]:
    return lambda number: (number.float() * factor).to(number.dtype)


@pytest.mark.parametrize(
    ("recipe", "tensor", "change", "said"),
    [
        ("w4g128-rtn", "scales", times(2), "row 7, columns 0 to 127: about 2.0 times"),
        ("w4g128-rtn", "scales", times(0.5), "row 7, columns 0 to 127: about 0.5 times"),
        ("w4g64-rtn", "scales", times(2), "row 7, columns 0 to 63: about "),
        ("w4g128-gptq", "scales", times(2), "row 7, "),
        ("w4g128-awq", "scales", times(2), "row 7, columns 0 to 127 beside the other one: about "),
        ("w4a16-ct", "weight_scale", times(2), "row 3, columns 128 to 255: about "),
        ("w8-rtn", "scales", times(2), "row 7: about 2.0 times"),
        ("w8a8-dynamic", "weight_scale", times(2), "row 7: about 2.0 times"),
        ("fp8-block", "weight_scale", times(4), "rows 384 to 511, columns 128 to 255: about "),
        ("nvfp4", "weight_scale", times(0.5), "row 0, columns 112 to 127: about 0.49 times"),
        ("mxfp4", "weight_scale", lambda code: code + 1, "row 0, columns 224 to 255: about "),
        ("w4g64-mlx-rtn", "scales", times(2), "row 1, columns 192 to 255: about "),
    ],
)  # fmt: skip
def test_one_scale_of_an_artifact(
    recipe: str, tensor: str, change: Callable[[Any], Any], said: str,
    made: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    assert not beside_tiny(made(recipe))
    (found,) = beside_tiny(damaged(made(recipe), tmp_path / "out", f"{UP}.{tensor}", 7, change))
    assert (found.severity, found.check, found.name) == ("error", "layer-error", f"{UP}.weight")
    assert found.message.startswith("1 scale of 1 matrix is unlike the source's: ")
    assert said in found.message and "another model" not in found.message


def test_the_error_of_the_matrix_is_that_of_what_is_stored(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    out = damaged(made("w4g128-rtn"), tmp_path / "out", f"{UP}.scales", 7, times(1000))
    verdict = verify_artifact(out, against=tiny_folder(), threads=1)
    (layer,) = [layer for layer in verdict.layers if layer.name == f"{UP}.weight"]
    assert layer.relative_error > 1
    assert not any("another model" in f.message for f in verdict.findings)


@pytest.mark.parametrize(("method", "told"), [(["awq", "gptq"], True), (["gptq", "tune"], False)])
@pytest.mark.parametrize("bits", [3, 4])
def test_scales_that_tuning_may_have_made(
    bits: int, method: list[str], told: bool, tmp_path: Path
) -> None:
    """Of 3 bits and fewer nothing is said of single ones; of 4 bits tuning leaves none so far."""
    out = tmp_path / "out"
    quantize(tiny_folder(), f"w{bits}g128-rtn", out)
    forget_digests(out)
    record = json.loads((out / "qtool.json").read_text())
    record["recipe"]["method"] = method
    (out / "qtool.json").write_text(json.dumps(record))
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    tensors[name].view(-1)[7] *= 0.5
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    verdict = verify_artifact(out, against=tiny_folder(), threads=1)
    found = [one for one in verdict.findings if "1 scale of 1 matrix" in one.message]
    assert bool(found) == (told or bits == 4)
