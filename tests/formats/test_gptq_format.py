"""GPTQ: known words, zeros field by field, mislabelled files, `dynamic`, and round trips."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats import Facts, Options, detect, gptq
from qtool.formats.facts import ArtifactScheme
from qtool.formats.gptq_dynamic import dynamic, overridden
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import assert_same, random_quant, write_folder

V1, V2 = Options("v1"), Options("v2")


def found(scheme: Scheme, layout: str = "v1") -> ArtifactScheme:
    return ArtifactScheme("gptq", "gptq", scheme, layout)


def hexadecimal(words: NDArray[Any]) -> list[str]:
    return [f"{word:08x}" for word in words.reshape(-1).view(np.uint32)]


@pytest.mark.parametrize(
    ("width", "v1", "v2"),
    [
        (2, ["55555555"], ["aaaaaaaa"]),
        (3, ["db6db6db", "b6db6db6", "6db6db6d"], ["24924924", "49249249", "92492492"]),
        (4, ["77777777"], ["88888888"]),
        (8, ["7f7f7f7f"], ["80808080"]),
    ],
)
def test_symmetric_zeros_are_known_words(width: int, v1: list[str], v2: list[str]) -> None:
    quant = random_quant(Scheme(width, 32, True), 32, 64)
    for options, words in ((V1, v1), (V2, v2)):
        stored = gptq.pack("m", quant, options)["m.qzeros"]
        assert hexadecimal(stored[0])[: len(words)] == words
        assert hexadecimal(stored[1])[: len(words)] == words


def test_one_word_by_hand() -> None:
    codes = np.repeat(np.arange(8, dtype=np.uint8)[None], 8, axis=0)
    zero = np.arange(8, 16, dtype=np.uint8)[:, None]
    scale = np.arange(1, 9, dtype=np.float16)[:, None]
    stored = gptq.pack("m", GroupQuant(Scheme(4, 8, False), codes, scale, zero), V2)
    assert hexadecimal(stored["m.qweight"]) == ["76543210"] * 8
    assert stored["m.qweight"].shape == (1, 8)
    assert hexadecimal(stored["m.qzeros"]) == ["fedcba98"]
    assert stored["m.scales"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert stored["m.g_idx"].tolist() == [0] * 8 and stored["m.g_idx"].dtype == np.int32


def test_v1_zeros_do_not_carry_into_their_neighbours() -> None:
    # Stored 15 is the zero 0: adding 0x11111111 to the word would carry into the next field.
    quant = random_quant(Scheme(4, 8, False), 8, 8)
    stored = gptq.pack("m", quant, V2)
    stored["m.qzeros"] = np.array([[0xF0F3F1FF]], np.uint32).view(np.int32)
    zero = gptq.unpack("m", stored.__getitem__, found(quant.scheme)).zero
    assert zero[:, 0].tolist() == [0, 0, 2, 0, 4, 0, 1, 0]


@pytest.mark.parametrize("width", gptq.WIDTHS)
def test_element_by_element(width: int) -> None:
    quant = random_quant(Scheme(width, 32, False), 32, 64)
    stored = gptq.pack("m", quant, V2)
    mask = (1 << width) - 1
    for row in range(32):
        column_stream = sum(
            int(word) << (32 * i) for i, word in enumerate(stored["m.qweight"][:, row].view("<u4"))
        )
        for column in range(64):
            assert (column_stream >> (width * column)) & mask == quant.codes[row, column]
    for group in range(2):
        zeros = sum(
            int(word) << (32 * i) for i, word in enumerate(stored["m.qzeros"][group].view("<u4"))
        )
        for row in range(32):
            assert (zeros >> (width * row)) & mask == quant.zero[row, group]


@pytest.mark.parametrize("width", gptq.WIDTHS)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("kind", ["v1 symmetric", "v2 symmetric", "v2 asymmetric", "act order"])
def test_round_trip(width: int, group_size: int, kind: str) -> None:
    scheme = Scheme(width, group_size, "asymmetric" not in kind)
    act_order = kind == "act order" and group_size > 0
    quant = random_quant(scheme, 96, 384, seed=width, act_order=act_order)
    options = gptq.choose([scheme], kind[:2] if kind[0] == "v" else None)
    stored = gptq.pack("a.b", quant, options)
    for spec in gptq.specs("a.b", scheme, quant.shape, options):
        assert stored[spec.name].shape == spec.shape
        assert stored[spec.name].nbytes == spec.nbytes
    config = gptq.config(Facts({"a.b": scheme}, act_order=act_order), options)
    assert config["desc_act"] is act_order
    assert_same(gptq.unpack("a.b", stored.__getitem__, detect(config)), quant)


def test_the_label_v1_on_v2_zeros_is_seen_through() -> None:
    quant = random_quant(Scheme(4, 32, True), 16, 64)
    mislabelled = gptq.pack("m", quant, V2)
    assert_same(gptq.unpack("m", mislabelled.__getitem__, found(quant.scheme, "v1")), quant)
    # An asymmetric file that says v1 is believed.
    asymmetric = replace(quant, scheme=Scheme(4, 32, False))
    stored = gptq.pack("m", asymmetric, V2)
    assert (gptq.unpack("m", stored.__getitem__, found(asymmetric.scheme)).zero == 9).all()


def test_a_missing_g_idx_means_groups_in_order() -> None:
    quant = random_quant(Scheme(3, 32, True), 32, 96)
    stored = gptq.pack("m", quant, V1)
    del stored["m.g_idx"]
    assert_same(gptq.unpack("m", stored.__getitem__, found(quant.scheme)), quant)


def test_shapes_tell_width_and_group_size_where_the_config_is_wrong() -> None:
    quant = random_quant(Scheme(8, 64, True), 32, 128)
    stored = gptq.pack("m", quant, V1)
    assert_same(gptq.unpack("m", stored.__getitem__, found(Scheme(4, 128, True))), quant)
    channel = random_quant(Scheme(2, -1, True), 32, 128)
    stored = gptq.pack("m", channel, V1)
    assert_same(gptq.unpack("m", stored.__getitem__, found(Scheme(4, 64, True))), channel)


def wide_zero(quant: GroupQuant) -> GroupQuant:
    return replace(quant, scheme=Scheme(4, 32, False), zero=quant.zero | np.uint8(16))


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (lambda q: replace(q, scheme=Scheme(4, 32, False)), V1, "v1 cannot hold"),
        (lambda q: replace(q, zero=q.zero - np.uint8(1)), V1, "not every zero is 8"),
        (lambda q: replace(q, scheme=Scheme(5, 32, True)), V2, "2, 3, 4 or 8 bits, not 5"),
        (lambda q: replace(q, scheme=Scheme(2, 32, False)), V2, "does not fit 2 bits"),
        (lambda q: replace(q, scheme=Scheme(4, 48, True)), V1, "64 is not divisible by the group"),
        (lambda q: replace(q, scale=q.scale.astype(np.float32)), V1, "scales are float32"),
        (lambda q: replace(q, g_idx=np.full(64, 2, np.int32)), V1, "outside of 0 .. 1"),
        (lambda q: replace(q, g_idx=np.full(64, -1, np.int32)), V1, "outside of 0 .. 1"),
        (lambda q: replace(q, g_idx=np.zeros(63, np.int32)), V1, r"g_idx: the shape is \[63\]"),
        (lambda q: replace(q, codes=q.codes | np.uint8(16)), V1, "does not fit 4 bits"),
        (wide_zero, V2, "a zero does not fit 4 bits"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    change: Callable[[GroupQuant], GroupQuant], options: Options, sentence: str
) -> None:
    with pytest.raises(FormatError, match=sentence):
        gptq.pack("m", change(random_quant(Scheme(4, 32, True), 32, 64)), options)


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        (Scheme(3, -1, True), (32, 48), "in_features 48 is not divisible by 32"),
        (Scheme(3, -1, True), (48, 32), "out_features 48 is not divisible by 32"),
        (Scheme(2, -1, True), (32, 40), "in_features 40 is not divisible by 16"),
        (Scheme(8, -1, True), (30, 40), "out_features 30 is not divisible by 4"),
        (Scheme(6, -1, True), (32, 32), "not 6"),
        (Scheme(4, -1, True, "float32"), (32, 32), "not float32"),
        (Scheme(4, 40, True), (8, 40), None),
    ],
)
def test_supports(scheme: Scheme, shape: tuple[int, int], reason: str | None) -> None:
    said = gptq.supports(scheme, shape, V1)
    assert said is None if reason is None else said is not None and reason in said


def test_symmetric_goes_to_v1_and_anything_else_to_v2() -> None:
    symmetric, asymmetric = Scheme(4, 64, True), Scheme(4, 64, False)
    assert gptq.choose([symmetric, symmetric]) == V1
    assert gptq.choose([symmetric, asymmetric]) == V2
    assert gptq.choose([symmetric], "v2") == V2
    with pytest.raises(FormatError, match="no layout 'v3'"):
        gptq.choose([symmetric], "v3")


def layers(*names: str, count: int = 12) -> list[str]:
    return [f"model.layers.{i}.{name}" for i in range(count) for name in names]


def matched(table: dict[str, dict[str, Any]], name: str) -> tuple[str, dict[str, Any]] | None:
    """The first rule that an engine finds: re.match, anchored at the start only."""
    for pattern, value in table.items():
        if re.match(pattern[2:], name):
            return pattern[:2], value
    return None


FOUR, EIGHT = Scheme(4, 128, True), Scheme(8, 64, True)


@pytest.mark.parametrize(
    ("dense", "eight"),
    [
        (["lm_head"], []),
        (layers("mlp.gate"), []),
        (layers("self_attn.o_proj", count=2), layers("mlp.down_proj")),
        ([], ["model.layers.1.mlp.down_proj", "model.layers.11.mlp.down_proj"]),
        (layers("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", count=3), []),
        (["model.layers.3.mlp.experts.1.down_proj"], layers("mlp.experts.2.down_proj")),
    ],
)
def test_dynamic_matches_what_it_must_and_nothing_else(dense: list[str], eight: list[str]) -> None:
    everything = layers(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "mlp.experts.1.down_proj", "mlp.experts.2.down_proj",
    )  # fmt: skip
    quantized = {n: EIGHT if n in eight else FOUR for n in everything if n not in dense}
    table = dynamic(Facts(quantized, dense))
    assert len(table) <= 5
    for name in quantized:
        expected = ("+:", {"bits": 8, "group_size": 64, "sym": True}) if name in eight else None
        assert matched(table, name) == expected, name
    for name in dense:
        assert matched(table, name) == (None if name == "lm_head" else ("-:", {})), name


def test_fused_names_follow_their_parts() -> None:
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rest = layers("mlp.gate_proj", "mlp.up_proj")
    dense = [f"model.layers.{i}.{name}" for i in (0, 10) for name in attention]
    others = [n for n in layers(*attention) if n not in dense]
    table = dynamic(Facts(dict.fromkeys(others + rest, FOUR), dense))
    assert matched(table, "model.layers.10.self_attn.qkv_proj") == ("-:", {})
    assert matched(table, "model.layers.1.self_attn.qkv_proj") is None
    assert matched(table, "model.layers.10.mlp.gate_up_proj") is None


def test_experts_of_a_block_are_one_layer() -> None:
    """Engines ask about `...mlp.experts` once, and never about one expert."""

    def experts(block: int) -> list[str]:
        parts = ("w1", "w2", "w3")
        return [f"model.layers.{block}.mlp.experts.{i}.{p}" for i in range(3) for p in parts]

    half = experts(4)
    quantized = {n: FOUR for b in (0, 10) for n in experts(b)} | dict.fromkeys(half[:2], FOUR)
    quantized |= {n: EIGHT for b in (1, 2) for n in experts(b)}
    table = dynamic(Facts(quantized, [*experts(3), *half[2:]]))
    eight = {"bits": 8, "group_size": 64, "sym": True}
    for block, expected in {0: None, 10: None, 1: ("+:", eight), 2: ("+:", eight),
                            3: ("-:", {}), 4: None}.items():  # fmt: skip
        assert matched(table, f"model.layers.{block}.mlp.experts") == expected, block
    for name in [*quantized, *experts(3), *half[2:]]:
        dense = name not in quantized
        expected = ("-:", {}) if dense else ("+:", eight) if quantized[name] == EIGHT else None
        assert matched(table, name) == expected, name


def test_both_config_files_agree(tmp_path: Path) -> None:
    quants = {n: random_quant(FOUR, 32, 128, seed=i) for i, n in enumerate(layers("a", count=3))}
    quants["model.layers.1.b"] = random_quant(EIGHT, 32, 128, seed=9)
    write_folder(tmp_path, "gptq", quants, {"lm_head.weight": np.zeros((4, 4), np.float16)})
    inside = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert inside == json.loads((tmp_path / "quantize_config.json").read_text())
    assert (inside["bits"], inside["group_size"], inside["sym"]) == (4, 128, True)
    assert inside["checkpoint_format"] == "gptq" and inside["pack_dtype"] == "int32"
    assert inside["lm_head"] is False and inside["desc_act"] is False
    assert list(inside["dynamic"]) == [r"+:^model\.layers\.\d+\.b$"]


def test_meta_claims_only_what_was_done() -> None:
    """Rounding to nearest has none of GPTQ's settings, and no block is measured in stages."""
    plain = gptq.config(Facts({"a": FOUR}, version="1"), V1)["meta"]
    assert plain == {"quantizer": ["qtool:1"]}
    facts = Facts({"a": FOUR}, version="1", damp_percent=0.01, static_groups=False, mse=True)
    assert gptq.config(facts, V1)["meta"] == {
        "quantizer": ["qtool:1"],
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": False,
        "mse": True,
    }


def test_overrides_are_read_back_with_their_own_scheme() -> None:
    schemes = {"x.0.a": FOUR, "x.1.a": FOUR, "x.0.b": EIGHT, "x.0.c": Scheme(4, 32, False)}
    options = gptq.choose(schemes.values())
    said = detect(gptq.config(Facts(schemes), options))
    for name, scheme in schemes.items():
        quant = random_quant(scheme, 32, 128, seed=len(name))
        stored = gptq.pack(name, quant, options)
        assert overridden(name, said) == scheme
        assert_same(gptq.unpack(name, stored.__getitem__, said), quant)


@pytest.mark.parametrize(
    ("config", "scheme", "layout"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, FOUR, "v1"),
        ({"bits": 8, "group_size": 64, "desc_act": True, "sym": True}, EIGHT, "v1"),
        ({"quant_method": "gptq", "bits": 3, "group_size": -1, "sym": False,
          "checkpoint_format": "gptq_v2"}, Scheme(3, -1, False), "v2"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 32, "checkpoint_format": "gptq_p"},
         Scheme(5, 32, True), "gptq_p"),
    ],
)  # fmt: skip
def test_other_writers_configs(config: dict[str, Any], scheme: Scheme, layout: str) -> None:
    said = detect(config)
    assert (said.format, said.scheme, said.layout) == ("gptq", scheme, layout)


def test_a_layout_that_is_not_decoded_is_named() -> None:
    stored = gptq.pack("m", random_quant(FOUR, 32, 128), V1)
    with pytest.raises(UnsupportedError, match='checkpoint_format "marlin" is not known'):
        gptq.unpack("m", stored.__getitem__, found(FOUR, "marlin"))


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(x|xx)*y", "(" * 30, "[", ".*.*.*.*.*.*.*=", "a" * 3000]
)
def test_patterns_that_could_hang_are_not_run(pattern: str) -> None:
    rules = ((pattern, {"bits": 8}), (r"+:^a+b$", {"bits": 2}))
    said = ArtifactScheme("gptq", "gptq", FOUR, "v1", (), rules)
    assert overridden("a" * 200 + "c", said) == FOUR
    assert overridden("aab", said).bits == 2


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("qweight", np.zeros((16, 32), np.int64), "m.qweight: the dtype is int64"),
        ("qweight", np.zeros((17, 32), np.int32), "fit no width"),
        ("qweight", np.zeros((16, 31), np.int32), r"m.qweight: the shape is \[16, 31\]"),
        ("qzeros", np.zeros((1, 5), np.int32), "fit no width"),
        ("qzeros", np.zeros((2, 4), np.int32), r"m.qzeros: the shape is \[2, 4\]"),
        ("scales", np.zeros((0, 32), np.float16), "m: it is empty"),
        ("scales", np.zeros((200, 32), np.float16), "128 columns do not divide into 200 groups"),
        ("g_idx", np.zeros((128, 1), np.int32), r"m.g_idx: the shape is \[128, 1\]"),
        ("g_idx", np.full(128, 1, np.int32), "outside of 0 .. 0"),
        ("g_idx", np.full(128, -1, np.int32), "outside of 0 .. 0"),
        ("g_idx", np.zeros(1 << 20, np.int32), "fit no width"),
        ("qzeros", None, "m.qzeros: missing"),
    ],
)
def test_stored_tensors_that_do_not_fit(
    name: str, array: NDArray[Any] | None, sentence: str
) -> None:
    stored = gptq.pack("m", random_quant(FOUR, 32, 128), V1)
    if array is None:
        del stored[f"m.{name}"]
    else:
        stored[f"m.{name}"] = array
    with pytest.raises(FormatError, match=sentence):
        gptq.unpack("m", stored.__getitem__, found(FOUR))
