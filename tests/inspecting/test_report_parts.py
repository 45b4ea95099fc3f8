"""The parts of a report by themselves: labels, histograms of codes, heat maps and fronts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool import native_gguf
from qtool.artifacts.artifact import Artifact
from qtool.errors import UsageError
from qtool.formats.gguf_codes import CODES, block_scales, code_counts
from qtool.gguf_types import BY_NAME
from qtool.report import layers, measured, sample, svg
from qtool.report.facts import ArtifactFacts, Quality
from qtool.report.gather import unique_labels
from qtool.report.names import decoder_prefix, kind_order, place
from qtool.scheme import GroupQuant, Scheme
from qtool.verification.finding import LayerError
from support.formats.artifact_files import random_quant, write_folder
from support.inspecting.report_figures import figures


def test_labels_are_told_apart() -> None:
    assert unique_labels(["a/x", "b/y"]) == ["x", "y"]
    assert unique_labels(["a/x", "b/x", "c/z"]) == ["a/x", "b/x", "z"]
    assert unique_labels(["/p/x", "x"]) == ["p/x", "x"]
    with pytest.raises(UsageError):
        unique_labels(["a/x", "a/x/"])


@pytest.mark.parametrize(
    ("name", "component", "kind", "block"),
    [
        ("model.embed_tokens.weight", "embedding", "embedding", None),
        ("token_embd.weight", "embedding", "embedding", None),
        ("lm_head.weight", "head", "head", None),
        ("output.weight", "head", "head", None),
        ("model.norm.weight", "norms", "norm", None),
        ("model.layers.7.self_attn.q_proj.weight", "attention", "q", 7),
        ("model.layers.7.self_attn.q_proj.bias", "attention", "q", 7),
        ("model.layers.7.self_attn.q_norm.weight", "norms", "q_norm", 7),
        ("model.layers.7.mlp.down_proj.weight", "mlp", "down", 7),
        ("model.layers.7.mlp.experts.12.up_proj.weight", "experts", "experts up", 7),
        ("model.layers.7.block_sparse_moe.experts.1.w2.weight", "experts", "experts down", 7),
        ("model.layers.7.mlp.shared_expert.up_proj.weight", "experts", "shared up", 7),
        ("model.layers.7.mlp.gate.weight", "other", "router", 7),
        ("model.layers.7.mlp.gate.wg.weight", "other", "router", 7),
        ("model.layers.7.linear_attn.out_proj.weight", "attention", "o", 7),
        ("vision.blocks.3.attn.qkv.weight", "other", "qkv", None),
    ],
)
def test_places_of_names(name: str, component: str, kind: str, block: int | None) -> None:
    found = place(name, "model.layers")
    assert (found.component, found.kind, found.block) == (component, kind, block)


def test_the_decoder_is_what_holds_most() -> None:
    sizes = [("blk.0.attn_q.weight", 5), ("blk.1.attn_q.weight", 5), ("v.blk.0.x.weight", 9)]
    assert decoder_prefix(sizes) == "blk" and decoder_prefix([("a", 1)]) is None
    assert place("blk.1.ffn_down_exps.weight", "blk").kind == "experts down"
    order = ["q", "k", "v", "o", "gate", "up", "down", "strange", "shared up", "experts gate"]
    assert sorted(reversed(order), key=kind_order) == order


def unit_blocks(name: str, count: int) -> np.ndarray:
    """Random blocks whose scales are one and whose minima are zero."""
    block = BY_NAME[name]
    raw = np.random.default_rng(1).integers(0, 256, (count, block.nbytes), dtype=np.uint8)
    one = np.array([0, 0x3C], np.uint8)  # in half precision
    if (at := CODES[name].scale) is not None:
        raw[:, at : at + 2] = one
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        raw[:, 2:4] = 0
    if name in ("Q4_K", "Q5_K"):
        raw[:, 4:16] = np.repeat([1, 0, 1], 4)
    if name == "Q2_K":
        raw[:, :16], raw[:, 82:84] = 1, 0
    if name == "Q3_K":
        raw[:, 96:104], raw[:, 104:108] = 0x11, 0xAA
    if name == "Q6_K":
        raw[:, 192:208] = 1
    if name == "IQ4_XS":
        raw[:, 2:4], raw[:, 4:8] = 0xAA, 0x11
    if name == "MXFP4":
        raw[:, 0] = 128
    if name == "NVFP4":
        raw[:, :4] = 0x38
    return raw


@pytest.mark.parametrize("name", CODES)
def test_codes_of_gguf_blocks(name: str) -> None:
    """As many of each code, in order, as there are of each weight that the kernels decode."""
    raw = unit_blocks(name, 200)
    weights = native_gguf.dequantize(raw, BY_NAME[name], BY_NAME[name].weights)
    values, expected = np.unique(weights, return_counts=True)
    counts = list(code_counts(raw, name))
    if CODES[name].order is not None:  # zero has two codes
        counts[7:9] = [counts[7] + counts[8]]
    assert counts == list(expected) and sum(counts) == weights.size
    if name[0] == "Q" and name != "Q1_0":
        assert values[0] == CODES[name].first
    scales = block_scales(raw, name)
    assert scales is None if CODES[name].scale is None else (scales == 1).all()


def test_codes_and_scales_of_a_sample(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(9)]
    quants = {name: random_quant(Scheme(4, 32, False), 16, 64, i) for i, name in enumerate(names)}
    quants[names[8]].scale[0, 0] = 0
    write_folder(tmp_path, "awq", quants)
    kinds = {f"{name}.weight": "q" for name in names}
    found = sample.of_artifact(Artifact.open(tmp_path), kinds)
    looked = [quants[names[i]] for i in (0, 3, 5, 8)]
    (codes,), (scales,) = found.codes, found.scales
    assert (codes.kind, codes.sampled, codes.matrices, codes.first) == ("q", 4, 9, 0)
    expected = sum(np.bincount(q.codes.reshape(-1), minlength=16) for q in looked)
    assert codes.counts == tuple(expected)
    values = np.concatenate([q.scale.reshape(-1) for q in looked]).astype(np.float32)
    assert scales.broken == 1 and scales.count == values.size
    good = values[values > 0]
    assert (scales.low, scales.high) == (good.min(), good.max())
    assert scales.median == np.median(good)
    assert sample.entropy(codes) == pytest.approx(4, abs=0.02)


def test_codes_of_small_floats_are_in_the_order_of_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = np.array([[0, 1, 7, 8, 15, 15]], np.uint8)
    scheme = Scheme(4, 32, True, book="e2m1")
    one = GroupQuant(scheme, codes, np.ones((1, 1), np.float32), np.zeros((1, 1), np.uint8))

    class Holder:
        def read(self, name: str) -> GroupQuant:
            return one

    looked = sample._matrix(Holder(), "x")  # type: ignore[arg-type]
    found = sample.Codes("q", "x", 1, 1, tuple(looked.counts), looked.first, looked.book)
    assert [(n, c) for n, c in sample.binned(found) if c] == [
        ("-6", 2), ("-0", 1), ("0", 1), ("0.5", 1), ("6", 1)
    ]  # fmt: skip


def test_at_most_64_bars() -> None:
    codes = sample.Codes("q", "Q8_0", 1, 1, tuple(range(256)), -128, "int")
    bars = sample.binned(codes)
    assert len(bars) == 64 and bars[0] == ("-128 to -125", 6) and bars[-1][0] == "124 to 127"
    assert sum(count for _, count in bars) == codes.total
    halves = sample.Codes("q", "fp8", 1, 1, (1,) * 256, 0, "e4m3")
    bars = sample.binned(halves)
    assert bars[0] == ("-448 to -384", 4) and bars[-1] == ("384 to 448", 4)
    assert sample.ends(halves) == ("-448", "448")
    assert sample.spread(list("abcdefg"), 4) == ["a", "c", "e", "g"]


def errors_of(blocks: int) -> list[LayerError]:
    return [
        LayerError(f"model.layers.{b}.self_attn.{k}_proj.weight", "w4", 0.01 * b + 0.001 * n, None)
        for b in range(blocks)
        for n, k in enumerate("qk")
    ]


def test_a_heat_map_has_a_cell_for_each_layer() -> None:
    grid = layers.grid(errors_of(12)[1:])  # without q of block 0
    assert list(grid.kinds) == ["q", "k"] and grid.blocks == 12
    assert sorted(block for block in grid.kinds["q"] if block is not None) == list(range(1, 12))
    low, high = layers.scale_of(errors_of(12))
    assert (low, high) == (0, 0.111)
    levels = [svg.level(error.relative_error, low, high) for error in errors_of(12)]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == svg.LEVELS - 1
    # Errors that hardly differ are not told apart by extremes of colour.
    even = [LayerError(f"model.layers.{i}.a.weight", "w4", 0.1 + 1e-4 * i, None) for i in range(9)]
    assert {svg.level(e.relative_error, *layers.scale_of(even)) for e in even} == {4}


def quality(artifact: str, size: int, mean: float, **more: Any) -> Quality:
    return measured.quality_of(artifact, figures(artifact, size, mean, **more), {})


def test_the_front_is_of_what_was_measured_alike() -> None:
    other = {"name": "plain", "text": "other.txt", "windows": 2, "length": 48}
    rows = [
        quality("a", 10, 0.3), quality("b", 20, 0.1), quality("c", 20, 0.2),
        quality("d", 5, 0.01, protocol=other), quality("e", 1, 0.1, kld=None),
    ]  # fmt: skip
    assert [row.front for row in measured.with_front(rows)] == [True, True, False, True, False]


def with_recipe(label: str, **recipe: Any) -> ArtifactFacts:
    empty: dict[str, Any] = dict.fromkeys(ArtifactFacts.__dataclass_fields__, ())
    return ArtifactFacts(**empty | {"label": label, "recipe": {"name": label, **recipe}})


def test_a_sweep_is_of_one_number() -> None:
    names = ("a", "b", "c")
    rows = [quality(name, 10, kld) for name, kld in zip(names, (0.3, 0.1, 0.2), strict=True)]
    swept = [
        with_recipe(n, smooth={"alpha": a}) for n, a in zip(names, (0.9, 0.5, 0.1), strict=True)
    ]
    found = measured.find_sweep(swept, rows)
    assert found is not None and found.key == "smooth.alpha"
    assert found.points == ((0.1, 0.2, "c"), (0.5, 0.1, "b"), (0.9, 0.3, "a"))
    assert measured.find_sweep(swept[:2], rows) is None
    two = [
        with_recipe(n, alpha=a, bits=b) for n, a, b in zip(names, (1, 2, 3), (4, 4, 8), strict=True)
    ]
    assert measured.find_sweep(two, rows) is None
    words = [with_recipe(n, method=n) for n in names]
    assert measured.find_sweep(words, rows) is None
