"""NVFP4 and MXFP4 on both sides: inputs by their definitions, and what is stored for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.float_codes import TABLES
from qtool.hub import tiny_folder
from qtool.methods import activations
from qtool.quality.engine_inputs import declared
from qtool.recipe.recipe import load
from qtool.texts.calibration import calibration_tokens
from qtool.transforms import smooth_search
from qtool.verification.run import verify_artifact
from support.runs import quantizing
from support.verification.verifying import forget_digests

FEW = ("calibration.samples=4", "calibration.length=64")
Floats = NDArray[np.float32]
GLOBAL = "input_global_scale"


def inputs() -> Floats:
    """Rows of very different sizes; zeros; numbers that are ties, of codes and of scales."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 64)) * np.exp2(rng.integers(-14, 9, (40, 1)))
    x[0] = 0
    x[1, :32] = 0
    x[2] = np.tile([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], 8)
    x[3] = -x[2]
    x[4] = np.linspace(-7, 7, 64)
    x[5] = 2.0 ** np.arange(-32, 32)
    return x.astype(np.float32)


def nearest(values: Floats, book: str) -> Floats:
    """The nearest number of a code book, of two the one with the even code; too large: the last."""
    table = TABLES[book].astype(np.float64)
    codes = [code for code in range(len(table)) if np.isfinite(table[code])]
    codes.sort(key=lambda code: code % 2)  # argmin takes the first of equals
    apart = np.abs(values.astype(np.float64)[..., None] - table[codes])
    return table[np.array(codes)[apart.argmin(-1)]].astype(np.float32)


def nvfp4(x: Floats, outer: float) -> Floats:
    """A float8 scale for 16 numbers, with `outer` multiplied into it; all in float32."""
    by, out = np.float32(outer), np.zeros_like(x)
    for row, values in zip(out.reshape(-1, 16), x.reshape(-1, 16), strict=True):
        scale = nearest(np.abs(values).max() / np.float32(6) * by, "e4m3") / by
        if scale > 0:
            row[:] = nearest(values / scale, "e2m1") * scale
    return out


def mxfp4(x: Floats) -> Floats:
    """A power of two for 32 numbers: 2^(e - 2), where 7/8 * 2^e is the largest that fits."""
    out = np.zeros_like(x)
    for row, values in zip(out.reshape(-1, 32), x.reshape(-1, 32), strict=True):
        most = float(np.abs(values).max())
        if most > 0:
            power = max(e for e in range(-160, 129) if 7 * 2.0**e <= 8 * most)
            scale = np.float32(2.0 ** (power - 2))
            row[:] = nearest(values / scale, "e2m1") * scale
    return out


@pytest.mark.parametrize("outer", [0.5, 2688.0, 17.008095])
def test_nvfp4_is_its_definition(outer: float) -> None:
    x = inputs()
    found = activations.nvfp4(outer).apply(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, nvfp4(x, outer))
    assert len(np.unique(found)) > 100


def test_mxfp4_is_its_definition() -> None:
    x = inputs()
    found = activations.microscaling(4).apply(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, mxfp4(x))
    assert len(np.unique(found)) > 100


def arguments(out: Path) -> dict[str, Any]:
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["format"] == config["format"]
    found: dict[str, Any] = group["input_activations"] | {"format": config["format"]}
    return found


def outers(out: Path) -> dict[str, float]:
    """input_global_scale by module."""
    state = load_file(out / "model.safetensors")
    names = [name for name in state if name.endswith(f".{GLOBAL}")]
    assert all(state[n].shape == (1,) and state[n].dtype == torch.float32 for n in names)
    return {name.removesuffix(f".{GLOBAL}"): float(state[name]) for name in names}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> quantizing.Run:
    out = tmp_path_factory.mktemp("nvfp4") / "a"
    return quantizing.quantize(tiny_folder(), "nvfp4-w4a4", out, *FEW)


def test_the_global_scale_is_of_the_largest_input(made: quantizing.Run) -> None:
    """448 * 6 / max|x|: of the first block what transformers feeds it, of later ones nearly."""
    from transformers import AutoModelForCausalLM

    quantizing.assert_reads_back(made)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    largest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, given: tuple[torch.Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(given[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(watch(name))
    tokens = calibration_tokens(load("nvfp4-w4a4", FEW).calibration, tiny_folder()).tokens
    with torch.no_grad():
        model(torch.from_numpy(tokens))
    found = outers(made.out)
    assert found.keys() == largest.keys() and len(found) == 28
    for name, top in largest.items():
        near = 1e-5 if name.endswith(".0.self_attn.q_proj") else 0.25
        assert found[name] * top == pytest.approx(448 * 6, rel=near), name
    for block in range(4):
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            assert len({found[f"model.layers.{block}.{part}_proj"] for part in parts}) == 1


def test_what_is_written_is_what_eval_rounds(made: quantizing.Run, tmp_path: Path) -> None:
    local = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
             "group_size": 16, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn",
             "observer": None, "format": "nvfp4-pack-quantized"}  # fmt: skip
    assert arguments(made.out) == local
    x = inputs()
    rounded = declared(Artifact.open(made.out))
    assert not rounded.not_simulated and len(rounded.of_matrix) == 28
    for module, outer in outers(made.out).items():
        rounding = rounded.of_matrix[f"{module}.weight"]
        assert rounding.name == "nvfp4"
        found = rounding.apply(torch.from_numpy(x[:8])).numpy()
        np.testing.assert_array_equal(found, nvfp4(x[:8], outer))

    run = quantizing.quantize(tiny_folder(), "mxfp4-w4a4", tmp_path / "mx")
    quantizing.assert_reads_back(run)
    groups = {"strategy": "group", "group_size": 32, "dynamic": True,
              "scale_dtype": "torch.uint8", "format": "mxfp4-pack-quantized"}  # fmt: skip
    assert arguments(run.out) == local | groups
    assert not outers(run.out)
    assert any("MXFP4 on Blackwell alone" in warning for warning in run.summary.warnings)
    rounded = declared(Artifact.open(run.out))
    assert not rounded.not_simulated and len(rounded.of_matrix) == 28
    for rounding in rounded.of_matrix.values():
        np.testing.assert_array_equal(rounding.apply(torch.from_numpy(x)).numpy(), mxfp4(x))


def test_a_percentile_makes_it_larger(made: quantizing.Run, tmp_path: Path) -> None:
    sets = (*FEW, "activations.observer=percentile", "activations.percentile=99")
    plain = outers(made.out)
    cut = outers(quantizing.quantize(tiny_folder(), "nvfp4-w4a4", tmp_path / "a", *sets).out)
    assert cut.keys() == plain.keys()
    assert all(cut[name] > 1.05 * plain[name] for name in plain)


@pytest.mark.parametrize(
    "sets",
    [
        ("transforms=[smooth]",),
        ("transforms=[smooth]", "smooth.alpha=search", "smooth.grid=2"),
        ("transforms=[rotate]",),
    ],
    ids=["smooth", "search", "rotate"],
)
def test_after_transforms(made: quantizing.Run, sets: tuple[str, ...], tmp_path: Path) -> None:
    """Scales are those of smoothed and of rotated inputs."""
    plain, first = outers(made.out), "model.layers.0.self_attn.q_proj"
    run = quantizing.quantize(tiny_folder(), "nvfp4-w4a4", tmp_path / "a", *FEW, *sets)
    quantizing.assert_reads_back(run)
    found = outers(run.out)
    assert found.keys() == plain.keys() and abs(found[first] / plain[first] - 1) > 0.01


def test_a_search_rounds_inputs_as_engines_do() -> None:
    x = torch.from_numpy(inputs())
    for name, expected in (
        ("nvfp4-w4a4", nvfp4(inputs(), 2688 / 7)),
        ("mxfp4-w4a4", mxfp4(inputs())),
    ):
        rounding = smooth_search.input_rounding(load(name), 7.0)
        assert rounding is not None
        np.testing.assert_array_equal(rounding.apply(x).numpy(), expected)


def test_experts_and_what_verify_says(tmp_path: Path) -> None:
    """w1 and w3 of an expert share one; another number for one of them is found."""
    source = quantizing.build("mixtral", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt", 6000)
    given = (f"calibration.source={text}", "calibration.samples=8", "calibration.length=64")
    out = quantizing.quantize(source, "nvfp4-w4a4", tmp_path / "a", *given).out
    found = outers(out)
    expert = "model.layers.0.block_sparse_moe.experts.{}.{}"
    for number in range(4):
        w1, w2, w3 = (found[expert.format(number, part)] for part in ("w1", "w2", "w3"))
        assert w1 == w3 != w2
    assert not verify_artifact(out).findings
    forget_digests(out)
    state = load_file(out / "model.safetensors")
    state[expert.format(2, "w3") + f".{GLOBAL}"] *= 2
    save_file(state, out / "model.safetensors", {"format": "pt"})
    (said,) = [f for f in verify_artifact(out).findings if f.severity == "error"]
    assert said.check == "global-scales" and "experts.2.w1" in said.message
