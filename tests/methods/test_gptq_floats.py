"""GPTQ onto small floats: against the float64 oracle; searched scales against every candidate."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import small_floats
from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.float_codes import E8M0, LARGEST, TABLES
from qtool.float_codes import nearest as nearest_numbers
from qtool.methods import gptq, rtn
from qtool.recipe.recipe import load
from qtool.scheme import GroupQuant, Scheme
from qtool.small_floats import Search
from qtool.verification.run import verify_artifact
from support.formats.nearest_floats import FP8, MXFP4, MXFP8, NVFP4, nearest, tops, weights
from support.methods.sweep_reference import Real, output_error, problem
from support.models.small_models import checkpoint, models
from support.runs import quantizing

MLX = replace(NVFP4, outer="")
SEARCHED = {"nvfp4": NVFP4, "nvfp4 of mlx": MLX, "mxfp4": MXFP4, "mxfp8": MXFP8}
SCHEMES = SEARCHED | {"channel": FP8["channel"], "tensor": FP8["tensor"], "block": FP8["block"]}


__all__ = ["models"]  # a fixture


# Numbers.


@pytest.mark.parametrize("book", ["e2m1", "e4m3", "e5m2"])
def test_numbers_are_those_of_the_codes(book: str) -> None:
    """To the sign of zero: of all numbers of the book, of what lies between them, and beyond."""
    numbers = TABLES[book][np.isfinite(TABLES[book])]
    ordered = np.unique(numbers)
    middles = (ordered[1:] + ordered[:-1]) / 2
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [numbers, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, ordered[1:]),
         rng.standard_normal(10_000) * LARGEST[book], [np.inf, -np.inf, 1e-45, -1e-45]]
    ).astype(np.float32)  # fmt: skip
    from qtool.float_codes import encode

    found = nearest_numbers(values, book)
    assert found.tobytes() == TABLES[book][encode(values, book)].tobytes()
    inside = np.abs(values) <= LARGEST[book]
    exact = values[inside].astype(np.float64)
    assert np.array_equal(np.abs(found[inside] - exact), np.abs(nearest(exact, book) - exact))


# Scales.


def every_scale(scheme: Scheme, top: Real, outer: float) -> Iterator[Real]:
    """All that a search is to try for groups of these largest weights."""
    if scheme.scale_dtype == "e8m0":
        exponent = np.floor(np.log2(np.where(top == 0, 1, top))) - (2 if scheme.bits == 4 else 8)
        low = np.where(top == 0, 1, np.exp2(exponent))
        yield from (low, low * 2, low / 2)
        return
    wanted = np.where(top == 0, 1, np.maximum(nearest(top / 6 * outer, "e4m3"), 2.0**-9))
    numbers = TABLES["e4m3"][1:127].astype(np.float64)
    place = np.searchsorted(numbers, np.minimum(wanted, 448))
    yield from (numbers[np.clip(place + step, 0, 125)] for step in range(-6, 6))


@pytest.mark.parametrize("kind", SEARCHED)
@pytest.mark.parametrize("weighed", [False, True])
def test_a_searched_scale_is_the_best_there_is(kind: str, weighed: bool) -> None:
    scheme, weight = SEARCHED[kind], weights()
    rng = np.random.default_rng(1)
    importance = rng.lognormal(0, 2, weight.shape[1]).astype(np.float32) if weighed else None
    plain = small_floats.quantize(weight, scheme)
    quant = small_floats.quantize(weight, scheme, search=Search(importance))
    assert quant.outer == plain.outer
    width, outer = scheme.group_size, quant.outer or 1.0
    cost = np.ones(weight.shape[1]) if importance is None else importance.astype(np.float64)

    def error(step: Real) -> Real:
        spread = np.repeat(step, width, axis=1)
        lost = nearest(np.clip(weight / spread, *_range(scheme)), scheme.book) * spread - weight
        total: Real = (cost * lost**2).reshape(len(weight), -1, width).sum(-1)
        return total

    every = [
        error(scale / outer)
        for scale in every_scale(scheme, tops(weight, scheme)[:, ::width], outer)
    ]
    best = np.minimum.reduce(every)
    found = error(quant.scale.astype(np.float64) / outer)
    np.testing.assert_allclose(found, best, rtol=1e-4, atol=1e-30)
    gains = best < 0.999 * error(plain.scale.astype(np.float64) / outer)
    assert gains.mean() > {"nvfp4": 0.5, "nvfp4 of mlx": 0.3}.get(kind, -1)
    assert gains.any() or kind == "mxfp8" or (kind == "mxfp4" and not weighed)
    step = quant.row_scale()[:, quant.group_index()]
    ratio = (weight / step).astype(np.float64)
    values = TABLES[scheme.book][quant.codes].astype(np.float64)
    assert np.array_equal(np.abs(values - ratio), np.abs(nearest(ratio, scheme.book) - ratio))


def _range(scheme: Scheme) -> tuple[float, float]:
    return -LARGEST[scheme.book], LARGEST[scheme.book]


def test_powers_stay_in_their_range() -> None:
    weight = np.zeros((2, 32), np.float32)
    weight[0, :2], weight[1, :2] = (2.0**-149, 2.0**-148), (3e38, 1.0)
    for scheme in (MXFP4, MXFP8):
        scale = small_floats.quantize(weight, scheme, search=Search()).scale
        assert np.isin(scale, E8M0[:-1]).all() and (scale > 0).all()


@pytest.mark.parametrize("kind", SCHEMES)
def test_rounded_is_what_codes_stand_for(kind: str) -> None:
    scheme, weight = SCHEMES[kind], weights()
    wanted = small_floats.quantize(weight, scheme).dequantize()
    assert small_floats.rounded(weight, scheme).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", SEARCHED)
def test_clip_searches_with_what_is_known_of_the_input(kind: str) -> None:
    weight, gram = problem(7, columns=96)
    scheme = SEARCHED[kind]

    class Given:
        pass

    stats = Given()
    stats.gram = gram.astype(np.float32)  # type: ignore[attr-defined]
    diagonal = np.diagonal(gram).astype(np.float32)
    for given, importance in ((None, None), (stats, diagonal)):
        made = rtn.quantize(weight, given, scheme, rtn.Options(clip=True)).quant  # type: ignore[arg-type]
        wanted = small_floats.quantize(weight, scheme, search=Search(importance))
        assert made.codes.tobytes() == wanted.codes.tobytes()
        assert made.scale.tobytes() == wanted.scale.tobytes()


# The sweep.


def sweep_reference(
    weight: Real, gram: Real, grids: GroupQuant, options: gptq.Options
) -> tuple[NDArray[np.uint8], Real]:
    """GPTQ by its definition onto grids that are given: codes, and what they stand for."""
    columns, book = weight.shape[1], grids.scheme.book
    order = np.arange(columns)
    if options.act_order:
        order = np.argsort(-np.diagonal(gram), kind="stable")
    step = grids.row_scale()[:, grids.group_index()]
    numbers = TABLES[book][: 1 << grids.scheme.bits]
    finite = np.flatnonzero(np.isfinite(numbers))
    left = weight[:, order].astype(np.float64)
    hessian = gram[np.ix_(order, order)] / np.diagonal(gram).mean()
    hessian = hessian + options.damp_percent * np.eye(columns)
    codes = np.empty(weight.shape, np.uint8)
    values = np.empty(weight.shape)
    for at in range(columns):
        column = order[at]
        every = (step[:, column, None] * numbers[finite]).astype(np.float64)
        code = finite[np.abs(left[:, at, None] - every).argmin(1)]
        value = (step[:, column] * numbers[code]).astype(np.float64)
        inverse = np.linalg.inv(hessian[at:, at:])
        left[:, at:] -= np.outer((left[:, at] - value) / inverse[0, 0], inverse[0])
        codes[:, column], values[:, column] = code, value
    return codes, values


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("order", [True, False])
def test_codes_equal_the_oracle(kind: str, order: bool) -> None:
    weight, gram = problem(3, columns=96)
    scheme, options = SCHEMES[kind], gptq.Options(act_order=order)
    given = gptq.factor(gram, options, dtype=np.float64)
    largest = 2 * float(np.abs(weight).max()) if scheme.outer or scheme.rows < 0 else None
    quant = gptq.quantize_with(weight.astype(np.float64), given, scheme, options, largest=largest)
    grids = small_floats.grids(weight, scheme, largest, Search(given.importance))
    assert (quant.scale.tobytes(), quant.outer) == (grids.scale.tobytes(), grids.outer)
    expected, values = sweep_reference(weight.astype(np.float64), gram, grids, options)
    assert np.array_equal(quant.codes, expected)
    assert np.array_equal(quant.dequantize(), values.astype(np.float32))
    plain = small_floats.quantize(weight, scheme, largest)
    assert (quant.codes != plain.codes).mean() > 0.05
    better = output_error(weight, quant.dequantize(), gram)
    assert better < 0.8 * output_error(weight, plain.dequantize(), gram)


@pytest.mark.parametrize("kind", SCHEMES)
def test_float32_and_threads(kind: str) -> None:
    """As good in float32, to the byte by two threads, and without a search with other scales."""
    weight, gram = problem(4, rows=96, columns=96)
    scheme, options = SCHEMES[kind], gptq.Options()
    exact = gptq.factor(gram, options, dtype=np.float64)
    given = gptq.factor(gram.astype(np.float32), options)
    one, two = (gptq.quantize_with(weight, given, scheme, options, count) for count in (1, 2))
    assert one.codes.tobytes() == two.codes.tobytes()
    wanted = gptq.quantize_with(weight.astype(np.float64), exact, scheme, options)
    assert (one.codes == wanted.codes).mean() > 0.98
    ratio = output_error(weight, one.dequantize(), gram)
    assert ratio == pytest.approx(output_error(weight, wanted.dequantize(), gram), rel=0.02)
    full = gptq.quantize_with(weight, given, scheme, replace(options, mse=False))
    same = full.scale.tobytes() == small_floats.grids(weight, scheme).scale.tobytes()
    assert same and (full.scale.tobytes() != one.scale.tobytes()) is ("fp4" in kind)


# Runs.


def typical(run: quantizing.Run) -> float:
    """Of the relative errors of layers' outputs."""
    return float(np.median([layer.relative_error for layer in run.summary.layers]))


@pytest.mark.parametrize(
    "recipe", ["nvfp4-awq-gptq", pytest.param("mxfp4-awq-gptq", marks=pytest.mark.slow)]
)
def test_recipes_end_to_end(recipe: str, tmp_path: Path, models: Path) -> None:
    """Read back; nearer in what layers give than rounded; one outer scale of what is fused."""
    model = checkpoint(models, "llama", "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=12", "calibration.length=64"]
    run = quantizing.quantize(model, recipe, tmp_path / "out", *sets)
    quantizing.assert_reads_back(run)
    assert verify_artifact(run.out, against=model, engine="vllm").ok
    scheme = load(recipe.removesuffix("-awq-gptq")).scheme
    assert {quant.scheme for quant in run.quants.values()} == {scheme}
    assert any("gptq.yaqa" in note for note in run.summary.notes)
    plain = quantizing.quantize(
        model, recipe, tmp_path / "plain", *sets, "method=awq", "gptq.yaqa=0", "gptq.guided=0"
    )
    assert typical(run) < typical(plain)
    artifact = Artifact.open(run.out)
    outers = {name: artifact.read(name).outer for name in run.quants}  # type: ignore[union-attr]
    fused = [
        {outers[f"{name}.{part}_proj.weight"] for part in parts}
        for name, parts in (
            ("model.layers.0.self_attn", "qkv"),
            ("model.layers.0.mlp", ("gate", "up")),
        )
    ]
    assert all(len(one) == 1 for one in fused)
    assert (None in fused[0]) is (recipe[0] == "m")


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("fp8-dynamic", (), marks=pytest.mark.slow),
        ("fp8-block", ("weights.rows=32", "weights.group_size=32")),
        ("fp8-static", ()),
        ("nvfp4-w4a4", ()),
        pytest.param(
            "fp8-block-hf", ("weights.rows=32", "weights.group_size=32"), marks=pytest.mark.slow
        ),
        ("nvfp4", ("format=mlx", "mlx.head=8", "gptq.yaqa=4")),
        ("mxfp4", ("format=mlx", "weights.type=mxfp8", "weights.bits=8")),
    ],
)
def test_others_take_gptq(recipe: str, more: tuple[str, ...], tmp_path: Path, models: Path) -> None:
    model = checkpoint(models, "llama", "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=12", "calibration.length=64", *more]
    run = quantizing.quantize(model, recipe, tmp_path / "out", *sets, "method=gptq")
    quantizing.assert_reads_back(run)
    assert verify_artifact(run.out, against=model).ok
    plain = quantizing.quantize(model, recipe, tmp_path / "plain", *sets, "method=awq")
    assert typical(run) < 0.9 * typical(plain)


def test_experts_that_are_left_out_are_rounded_with_searched_scales(
    tmp_path: Path, models: Path
) -> None:
    """Two tokens reach no expert often enough; all parts of one have one outer scale."""
    model = checkpoint(models, "mixtral", "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=1", "calibration.length=8"]
    run = quantizing.quantize(model, "nvfp4-awq-gptq", tmp_path / "out", *sets, "awq.grid=1")
    source, few = Checkpoint.open(model), 0
    for name, quant in run.quants.items():
        if ".experts." not in name or ".w2." in name:
            continue
        parts = [name.replace(one, other) for one, other in ((".w3.", ".w1."), (".w1.", ".w3."))]
        other = next(one for one in parts if one != name)
        assert quant.outer == run.quants[other].outer
        largest = max(float(np.abs(source.float32(one)).max()) for one in (name, other))
        wanted = small_floats.quantize(source.float32(name), NVFP4, largest, Search())
        few += np.array_equal(quant.codes, wanted.codes)
    assert few >= 4
