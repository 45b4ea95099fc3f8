"""QServe's W4A8KV4: its layout derived once more from the order of its bytes, its numbers, and
whole runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.lost import activations
from qtool.dequantize import dequantize
from qtool.diff.sides import part_of
from qtool.errors import FormatError, RecipeError, UnsupportedError
from qtool.formats import detect, qserve
from qtool.methods import gptq, qoq, rtn
from qtool.quality.engine_inputs import declared
from qtool.recipe import recipe as recipes
from qtool.scheme import GroupQuant
from qtool.verification.run import verify_artifact
from support.runs import quantizing

M = "model.layers.0.self_attn.q_proj"


def random_quant(rows: int, columns: int, group: int, seed: int = 0) -> GroupQuant:
    """Any codes, scales and zeros whose 8-bit numbers fit."""
    rng = np.random.default_rng(seed)
    scheme = qserve.scheme_of(group)
    groups = scheme.groups(columns)
    outer = rng.uniform(0.001, 0.1, rows).astype(np.float16)
    zero = rng.integers(0, 16, (rows, groups)).astype(np.uint8)
    scale = rng.integers(1, 9, (rows, groups)).astype(np.float32)
    if group < 0:
        outer, scale = np.ldexp(rng.integers(64, 128, rows), -14).astype(np.float16), scale * 0 + 1
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    return GroupQuant(scheme, codes, scale, zero, outer_rows=outer)


def by_hand(stored: dict[str, np.ndarray], group: int) -> np.ndarray:
    """Every weight, found at its byte: what the kernel's lanes read, one after another."""
    words = stored[f"{M}.qweight"].view(np.uint8)
    rows, columns = words.shape[0], 2 * words.shape[1]
    flat = words.reshape(-1)
    out = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            tile = row // 32 * (columns // 32) + column // 32
            r, k = row % 32, column % 32
            lane = r % 8 * 4 + k % 16 // 4  # 32 lanes of a warp, 16 bytes each
            byte = k // 16 * 8 + r // 8 % 2 * 4 + k % 4
            found = int(flat[tile * 512 + lane * 16 + byte])
            code = found >> 4 if r >= 16 else found & 15
            scale = np.float32(stored[f"{M}.s1_scales"][row])
            if group < 0:
                zeros = np.float32(stored[f"{M}.s1_szeros"][row])
                out[row, column] = np.float32(code) * scale - zeros
                continue
            # 0, 8, 16, 24, 1, 9, ... : where row r of a tile stands.
            place = row // 32 * 32 + r % 8 * 4 + r // 8
            step = int(stored[f"{M}.s2_scales"][column // group, place])
            shift = int(stored[f"{M}.s2_zeros"][column // group, place])
            product = code * step
            assert product < 256  # in 8 bits without a sign
            eight = np.array((product + shift) % 256, np.uint8).view(np.int8)
            out[row, column] = np.float32(eight) * scale
    return out


@pytest.mark.parametrize("group", [32, 64, -1])
def test_the_layout_from_the_order_of_its_bytes(group: int) -> None:
    quant = random_quant(64, 128, group)
    stored = qserve.pack(M, quant, qserve.choose([]))
    assert {n.rpartition(".")[2]: (a.dtype.str, a.shape) for n, a in stored.items()} == {
        "qweight": ("|i1", (64, 64)), "s1_scales": ("<f2", (64,)),
        **({"s1_szeros": ("<f2", (64,))} if group < 0 else
           {n: ("|i1", (128 // group, 64)) for n in ("s2_scales", "s2_zeros")}),
    }  # fmt: skip
    expected = quant.dequantize()
    assert np.array_equal(by_hand(stored, group), expected)
    assert np.array_equal(dequantize(quant), expected)
    found = detect(qserve.config(facts(quant), qserve.choose([])))
    back = qserve.unpack(M, stored.__getitem__, found)
    assert back.scheme == quant.scheme == found.scheme
    for part in ("codes", "scale", "zero", "outer_rows"):
        left, right = getattr(back, part), getattr(quant, part)
        assert left.dtype == right.dtype and np.array_equal(left, right), part
    assert np.array_equal(part_of(quant, 5, 9).dequantize(), expected[5:9])
    specs = qserve.specs(M, quant.scheme, quant.shape, qserve.choose([]))
    assert {spec.name: spec.shape for spec in specs} == {n: a.shape for n, a in stored.items()}


def facts(quant: GroupQuant) -> qserve.Facts:
    return qserve.Facts(quantized={M: quant.scheme})


def weights(rows: int, columns: int, seed: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal((rows, columns // 32)) * 0.7).repeat(32, 1)
    found = (rng.standard_normal((rows, columns)) * spread * 0.02).astype(np.float32)
    found[5] = 0
    found[6, :64] = 0
    return found


@pytest.mark.parametrize("group", [64, -1])
@pytest.mark.parametrize("search", [False, True])
def test_grids_and_nearest_codes(group: int, search: bool) -> None:
    weight = weights(64, 256)
    scheme = qserve.scheme_of(group)
    quant = rtn.quantize(weight, None, scheme, rtn.Options(clip=search)).quant
    outer = quant.outer_rows.astype(np.float64)
    if group > 0:
        largest = np.abs(weight).max(1)
        assert np.allclose(np.where(largest, outer * 119, 0), largest, rtol=1e-3)
        assert quant.scale.max() <= 16 and (quant.scale == np.rint(quant.scale)).all()
    wide = quant.codes - quant.zero.astype(np.float64)[:, quant.group_index()]
    wide *= quant.scale[:, quant.group_index()]
    assert np.abs(wide).max() <= 128 and wide.max() <= 127
    # No other code of the same grid, of those that fit, is nearer.
    every = np.arange(16)[:, None, None] - quant.zero.astype(np.float64)[:, quant.group_index()]
    every *= quant.scale[:, quant.group_index()]
    fits = (every >= -128) & (every <= 127)
    off = np.where(fits, np.abs(every * outer[:, None] - weight), np.inf)
    mine = np.abs(quant.dequantize() - weight)
    assert (mine <= off.min(0) + 1e-6 * np.abs(weight).max()).all()
    qserve.pack(M, quant, qserve.choose([]))  # and all of it can be stored
    if search:
        plain = rtn.quantize(weight, None, scheme, rtn.Options()).quant
        assert np.square(mine).sum() < np.square(plain.dequantize() - weight).sum()
    assert (quant.dequantize()[5] == 0).all()


def test_rows_that_use_the_whole_range_do_not_overflow() -> None:
    """Groups from one end of the range to the other, where rounding goes beyond 119."""
    rng = np.random.default_rng(0)
    weight = rng.uniform(-1, 1, (32, 2048)).astype(np.float32)
    weight[:, ::32], weight[:, 1::32] = 1, -1
    for low in np.linspace(-1, 0, 9):
        clipped = np.maximum(weight, np.float32(low))
        quant = rtn.quantize(clipped, None, qserve.scheme_of(32), rtn.Options()).quant
        qserve.pack(M, quant, qserve.choose([]))
        error = np.abs(quant.dequantize() - clipped).max() / quant.outer_rows.max()
        assert error <= 16  # of 238 steps: a code's half, and what rounding of scale and zero cost


@pytest.mark.parametrize("group", [64, -1])
def test_the_sweep_against_a_slow_one(group: int) -> None:
    """GPTQ column by column in float64, the inverse recomputed at each step."""
    weight, scheme = weights(32, 128), qserve.scheme_of(group)
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((400, 128)) @ rng.standard_normal((128, 128))).astype(np.float32)
    options = gptq.Options(damp_percent=0.05, token_damping=False)
    given = gptq.factor(x.T @ x, options, None, np.float64)
    quant = gptq.quantize_with(weight, given, scheme, options)
    found = qoq.grids(weight, scheme, given.importance, options.mse)
    low, high = found.limits()
    hessian = (x.T @ x).astype(np.float64)
    hessian += np.eye(128) * 0.05 * np.diagonal(hessian).mean()
    left = weight.astype(np.float64)
    codes = np.zeros(weight.shape)
    remaining = list(given.order)
    while remaining:
        column = remaining[0]
        group_ = column // group if group > 0 else 0
        step = found.outer.astype(np.float64) * found.scale[:, group_]
        zero = found.zero[:, group_].astype(np.float64)
        code = np.clip(np.rint(left[:, column] / step) + zero, low[:, group_], high[:, group_])
        codes[:, column] = code
        inverse = np.linalg.inv(hessian[np.ix_(remaining, remaining)])
        error = (left[:, column] - (code - zero) * step) / inverse[0, 0]
        left[:, remaining] -= np.outer(error, inverse[0])
        remaining = remaining[1:]
    assert (codes != quant.codes).mean() < 0.003  # float32, near ties
    nearest = rtn.quantize(weight, None, scheme, rtn.Options(clip=True)).quant

    def cost(one: GroupQuant) -> float:
        lost = (one.dequantize() - weight).astype(np.float64)
        return float(np.einsum("oi,ij,oj->", lost, hessian, lost))

    assert cost(quant) < 0.6 * cost(nearest)
    assert np.array_equal(quant.outer_rows, found.outer)


def test_a_whole_run(tmp_path: Path) -> None:
    source = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=48",
            "weights.group_size=32", "indivisible=dense"]  # fmt: skip
    run = quantizing.quantize(source, "w4a8kv4-qserve", tmp_path / "out", *sets)
    quantizing.assert_reads_back(run)
    assert len(run.quants) == 12  # keys have 16 rows; with them queries and values stay dense
    found = declared(Artifact.open(run.out)).json()
    assert found == {"activations": "int8", "kv_cache": "int4 per token and head",
                     "not_simulated": []}  # fmt: skip
    assert activations(Artifact.open(run.out)) == "int8, dynamic, one scale a token"
    assert not [f for f in verify_artifact(run.out).findings if f.severity == "error"]
    errors = [f for f in verify_artifact(run.out, engine="vllm").findings if f.severity == "error"]
    assert [f.check for f in errors] == ["engine-format"]
    tensors = load_file(run.out / "model.safetensors")
    damaged = "model.layers.0.self_attn.o_proj"
    tensors[f"{damaged}.s1_scales"][3] = np.nan
    save_file(tensors, run.out / "model.safetensors", metadata={"format": "pt"})
    errors = [f for f in verify_artifact(run.out).findings if f.severity == "error"]
    assert ("scales", f"{damaged}.weight") in [(f.check, f.name) for f in errors]


def test_files_that_lie(tmp_path: Path) -> None:
    quant = random_quant(32, 64, 32)
    config = qserve.config(facts(quant), qserve.choose([]))
    stored = qserve.pack(M, quant, qserve.choose([]))
    cases = {
        "s2_scales": (np.zeros((2, 32), np.int8), "it has the scale 0"),
        "s2_zeros": (np.ones((2, 32), np.int8), "is no zero from 0 to 15|code stands"),
        "qweight": (np.zeros((32, 30), np.int8), "expected tiles of 32"),
        "s1_scales": (np.zeros(32, np.float32), "dtype is"),
    }
    for last, (value, said) in cases.items():
        folder = tmp_path / last
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
        save_file(stored | {f"{M}.{last}": value}, folder / "model.safetensors")
        with pytest.raises((FormatError, UnsupportedError), match=said):
            Artifact.open(folder).read(M)
    scheme = quant.scheme
    too_far = GroupQuant(scheme, quant.codes * 0 + 15, quant.scale * 0 + 12, quant.zero * 0,
                         outer_rows=quant.outer_rows)  # fmt: skip
    with pytest.raises(FormatError, match="180 of -128 to 127 steps"):
        qserve.pack(M, too_far, qserve.choose([]))
    assert "tiles are 32 by 32" in str(qserve.supports(scheme, (40, 64), qserve.choose([])))
    assert "one group_size" in str(qserve.supports_together([scheme, qserve.scheme_of(-1)]))
    assert detect({"quant_method": "qserve", "w_bit": 8}).scheme is None
    for name in ("w4a8kv4-qserve", "w4a8kv4-qserve-channel"):
        lines = recipes.shipped()[name].read_text().splitlines()
        assert lines[0].startswith("# ") and lines[0].endswith(".") and len(lines) < 25
    assert str(recipes.load("w4a8kv4-qserve").scheme) == "w4 g128 qoq"
    for item, said in (
        ("activations=null", "qserve rounds inputs to 8 bits"),
        ("weights.symmetric=true", "qserve stores int of 4 bits with zeros"),
        ("kv_cache.dynamic=false", "qserve makes scales as keys come"),
        ("gptq.static_groups=false", "qserve's groups are neighbours"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipes.load("w4a8kv4-qserve", [item])
        assert said in str(caught.value)
