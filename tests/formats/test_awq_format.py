"""AWQ: words worked out by hand, an element-by-element definition, and round trips."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.errors import FormatError
from qtool.formats import Facts, Options, awq, detect
from qtool.formats.facts import ArtifactScheme
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import assert_same, random_quant

GEMM = Options("gemm")
ASYMMETRIC = Scheme(4, 32, False)


def found(scheme: Scheme, layout: str = "gemm") -> ArtifactScheme:
    return ArtifactScheme("awq", "awq", scheme, layout)


def hexadecimal(words: NDArray[Any]) -> list[str]:
    return [f"{word:08x}" for word in words.reshape(-1).view(np.uint32)]


def test_one_word_by_hand() -> None:
    # Output o of eight has the code o, in every column: nibbles 0, 2, 4, 6, 1, 3, 5, 7.
    codes = np.repeat(np.arange(8, dtype=np.uint8)[:, None], 32, axis=1)
    scale = np.arange(1, 9, dtype=np.float16)[:, None]
    zero = np.arange(8, 16, dtype=np.uint8)[:, None]
    stored = awq.pack("m", GroupQuant(ASYMMETRIC, codes, scale, zero), GEMM)
    assert set(stored) == {"m.qweight", "m.qzeros", "m.scales"}
    assert hexadecimal(stored["m.qweight"]) == ["75316420"] * 32
    assert hexadecimal(stored["m.qzeros"]) == ["fdb9eca8"]
    assert stored["m.scales"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_symmetric_zeros_are_eights() -> None:
    quant = random_quant(Scheme(4, 64, True), 16, 128)
    stored = awq.pack("m", quant, GEMM)
    assert set(hexadecimal(stored["m.qzeros"])) == {"88888888"}


def test_gemm_element_by_element() -> None:
    quant = random_quant(ASYMMETRIC, 24, 96)
    stored = awq.pack("m", quant, GEMM)
    words = stored["m.qweight"].view(np.uint32)
    zeros = stored["m.qzeros"].view(np.uint32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for column in range(96):
        for word in range(3):
            for nibble in range(8):
                row = 8 * word + order[nibble]
                code = (int(words[column, word]) >> (4 * nibble)) & 15
                assert code == quant.codes[row, column]
                zero = (int(zeros[column // 32, word]) >> (4 * nibble)) & 15
                assert zero == quant.zero[row, column // 32]
                assert stored["m.scales"][column // 32, row] == quant.scale[row, column // 32]


def test_gemv_element_by_element() -> None:
    quant = random_quant(ASYMMETRIC, 8, 96)
    stored = awq.pack("m", quant, Options("gemv"))
    words, zeros = stored["m.qweight"].view(np.uint32), stored["m.qzeros"].view(np.uint32)
    assert words.shape == (8, 12) and zeros.shape == (8, 4)
    assert stored["m.scales"].shape == (8, 32)
    for row in range(8):
        for column in range(96):
            code = (int(words[row, column // 8]) >> (4 * (column % 8))) & 15
            assert code == quant.codes[row, column]
        for group in range(32):
            zero = (int(zeros[row, group // 8]) >> (4 * (group % 8))) & 15
            assert zero == (quant.zero[row, group] if group < 3 else 0)
            expected = quant.scale[row, group] if group < 3 else 0
            assert stored["m.scales"][row, group] == expected


@pytest.mark.parametrize(
    ("layout", "zeros"), [("gemv_fast", "qzeros"), ("llm_awq", "scaled_zeros")]
)
def test_gemv_fast_element_by_element(layout: str, zeros: str) -> None:
    quant = random_quant(ASYMMETRIC, 8, 128)
    stored = awq.pack("m", quant, Options(layout))
    words = stored["m.qweight"].view(np.uint16)
    assert words.shape == (2, 128)
    for row in range(8):
        for column in range(128):
            run, within = divmod(column % 64, 32)
            # 0, 8, 16, 24 come first, then 1, 9, 17, 25, ...
            place = run * 32 + 4 * (within % 8) + within // 8
            at = (column // 64) * 256 + (row % 4) * 64 + place
            code = (int(words[row // 4, at // 4]) >> (4 * (at % 4))) & 15
            assert code == quant.codes[row, column], (row, column)
    scaled = stored[f"m.{zeros}"]
    assert scaled.dtype == np.float16 and scaled.shape == (32, 8)
    for group in range(32):
        for row in range(8):
            expected = np.float16(0)
            if group < 4:
                product = np.float32(quant.scale[row, group]) * quant.zero[row, group]
                expected = np.float16(-product)
            assert scaled[group, row] == expected


@pytest.mark.parametrize(
    ("columns", "group_size", "width"),
    [(4096, 128, 4), (11008, 128, 11), (11008, 64, 22), (4096, 32, 16), (1536, 128, 2)],
)
def test_width_of_gemv_zeros(columns: int, group_size: int, width: int) -> None:
    scheme = Scheme(4, group_size, False)
    shapes = {s.name: s.shape for s in awq.specs("m", scheme, (64, columns), Options("gemv"))}
    assert shapes["m.qzeros"] == (64, width)
    assert shapes["m.scales"] == (64, 8 * width)


@pytest.mark.parametrize("layout", list(awq.LAYOUTS))
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_round_trip(layout: str, group_size: int, symmetric: bool) -> None:
    scheme = Scheme(4, group_size, symmetric)
    quant = random_quant(scheme, 40, 384, seed=group_size + 2)
    options = awq.choose([scheme], layout)
    stored = awq.pack("a.b", quant, options)
    for spec in awq.specs("a.b", scheme, quant.shape, options):
        assert stored[spec.name].shape == spec.shape
        assert stored[spec.name].nbytes == spec.nbytes
    config = awq.config(Facts({"a.b": scheme}), options)
    assert_same(awq.unpack("a.b", stored.__getitem__, detect(config)), quant)


def test_gemv_fast_refuses_a_zero_that_float16_cannot_hold() -> None:
    quant = random_quant(ASYMMETRIC, 8, 64)
    quant.scale[0, 0] = np.float16(60000)
    quant.zero[0, 0] = 15
    with pytest.raises(FormatError, match="too large for the float16"):
        awq.pack("m", quant, Options("gemv_fast"))
    assert awq.pack("m", quant, GEMM)


def test_scaled_zeros_survive_subnormal_scales() -> None:
    quant = random_quant(ASYMMETRIC, 8, 64)
    quant.scale[:] = np.float16(2**-24)
    quant.scale[1] = np.float16(6.1e-5)
    stored = awq.pack("m", quant, Options("gemv_fast"))
    found_there = awq.unpack("m", stored.__getitem__, found(ASYMMETRIC, "gemv_fast"))
    assert_same(found_there, quant)
    stored["m.qzeros"][0, 0] = np.float16(1.0)
    with pytest.raises(FormatError, match="no 4-bit zeros times the scales"):
        awq.unpack("m", stored.__getitem__, found(ASYMMETRIC, "gemv_fast"))


@pytest.mark.parametrize(
    ("scheme", "shape", "layout", "reason"),
    [
        (Scheme(3, 128, False), (64, 128), "gemm", "4 bits only, not 3"),
        (Scheme(4, 128, False), (64, 192), "gemm", "192 is not divisible by the group size 128"),
        (Scheme(4, 64, False), (60, 192), "gemm", "out_features 60 is not divisible by 8"),
        (Scheme(4, 64, False, "bfloat16"), (64, 192), "gemm", "float16 scales, not bfloat16"),
        (Scheme(4, 16, False), (64, 192), "gemv", "groups of 32, 64"),
        (Scheme(4, 32, False), (64, 96), "gemv_fast", "96 is not divisible by 64"),
        (Scheme(4, 32, False), (64, 96), "gemm", None),
        (Scheme(4, 16, False), (64, 96), "gemm", None),
    ],
)
def test_supports(scheme: Scheme, shape: tuple[int, int], layout: str, reason: str | None) -> None:
    said = awq.supports(scheme, shape, Options(layout))
    assert said is None if reason is None else said is not None and reason in said


def wide_zero(quant: GroupQuant) -> GroupQuant:
    return replace(quant, zero=quant.zero | np.uint8(16))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda q: replace(q, scale=q.scale.astype(np.float32)), "scales are float32"),
        (lambda q: replace(q, scale=q.scale[:, :1]), "m: scale: the shape is"),
        (lambda q: replace(q, zero=q.zero[:4]), "m: zero: the shape is"),
        (lambda q: replace(q, g_idx=np.zeros(64, np.int32)), "g_idx"),
        (lambda q: replace(q, scheme=Scheme(8, 32, False)), "4 bits only"),
        (wide_zero, "does not fit 4 bits"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    change: Callable[[GroupQuant], GroupQuant], sentence: str
) -> None:
    with pytest.raises(FormatError, match=sentence):
        awq.pack("m", change(random_quant(ASYMMETRIC, 8, 64)), GEMM)


def test_config_has_the_keys_that_engines_read() -> None:
    facts = Facts({"model.layers.0.q": Scheme(4, 64, True)}, ("lm_head",), version="1.2")
    assert awq.config(facts, GEMM) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "zero_point": True,
        "version": "gemm",
        "lm_head": False,
        "modules_to_not_convert": ["lm_head"],
        "meta": {"quantizer": ["qtool:1.2"], "symmetric": True},
    }
    side = awq.side_files(facts, GEMM)["quant_config.json"]
    assert (side["w_bit"], side["q_group_size"], side["version"]) == (4, 64, "GEMM")
    quantized_head = Facts({"lm_head": Scheme(4, 64, False)})
    assert awq.config(quantized_head, GEMM)["lm_head"] is True
    assert awq.config(quantized_head, GEMM)["sym"] is False
    assert awq.config(quantized_head, GEMM)["modules_to_not_convert"] is None


def test_a_dense_name_inside_a_quantized_one_is_refused() -> None:
    scheme = Scheme(4, 64, False)
    apart = Facts({"model.layers.0.mlp.gate_proj": scheme}, ("model.layers.1.mlp.gate",))
    assert awq.config(apart, GEMM)["modules_to_not_convert"] == ["model.layers.1.mlp.gate"]
    together = Facts({"model.layers.1.mlp.gate_proj": scheme}, ("model.layers.1.mlp.gate",))
    with pytest.raises(FormatError, match="matches parts of names"):
        awq.config(together, GEMM)


def test_dense_parts_of_a_fused_layer_go_by_its_name_too() -> None:
    """vLLM asks by the names of the parts as well, SGLang by the fused one alone."""
    block = "model.layers.0"
    quantized = {f"{block}.mlp.down_proj": Scheme(4, 64, False)}
    dense = [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj", f"{block}.self_attn.q_proj"]
    found = awq.config(Facts(quantized, dense), GEMM)["modules_to_not_convert"]
    assert found == sorted([*dense, f"{block}.mlp.gate_up_proj"])


def test_dense_experts_go_by_the_name_of_their_layer() -> None:
    """Engines ask about `...mlp.experts` once, and never about one expert."""
    scheme = Scheme(4, 64, False)

    def experts(block: int, *numbers: int) -> list[str]:
        parts = ("gate_proj", "up_proj", "down_proj")
        return [f"model.layers.{block}.mlp.experts.{i}.{p}" for i in numbers for p in parts]

    quantized = dict.fromkeys([*experts(1, 0, 1), *experts(2, 0)], scheme)
    found = awq.config(Facts(quantized, [*experts(11, 0, 1), *experts(2, 1)]), GEMM)
    assert found["modules_to_not_convert"] == sorted(
        ["model.layers.11.mlp.experts", *experts(2, 1)]
    )


def test_one_artifact_has_one_width_and_group_size() -> None:
    mixed = {"a": Scheme(4, 64, False), "b": Scheme(4, 32, False)}
    assert "4 bits g32, 4 bits g64" in str(awq.supports_together(mixed.values()))
    with pytest.raises(FormatError, match="one width and one group size"):
        awq.config(Facts(mixed), GEMM)
    assert awq.supports_together([Scheme(4, 64, False), Scheme(4, 64, True)]) is None
    with pytest.raises(FormatError, match="no layout 'spiral'"):
        awq.choose([], "spiral")


@pytest.mark.parametrize(
    ("config", "scheme", "layout"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
          "version": "gemm"}, Scheme(4, 128, False), "gemm"),
        ({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMV"},
         Scheme(4, 64, False), "gemv"),
        ({"quant_method": "AWQ", "wbits": 4, "group_size": -1, "zero_point": False},
         Scheme(4, -1, True), "gemm"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "sym": True,
          "checkpoint_format": "gemm", "method": "awq"}, Scheme(4, 32, True), "gemm"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemv-fast"},
         Scheme(4, 32, False), "gemv_fast"),
    ],
)  # fmt: skip
def test_synonyms(config: dict[str, Any], scheme: Scheme, layout: str) -> None:
    said = detect(config)
    assert (said.format, said.scheme, said.layout) == ("awq", scheme, layout)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": "4"}, 'bits is "4"'),
        ({"bits": True}, "bits is true"),
        ({"bits": None}, "bits is null"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": -2}, "group_size is -2"),
        ({"version": "marlin"}, 'awq version "marlin"'),
    ],
)
def test_a_config_that_makes_no_sense(change: dict[str, Any], sentence: str) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    with pytest.raises(FormatError, match=sentence):
        detect(config | change)


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("qweight", np.zeros((64, 1), np.float32), "m.qweight: the dtype is float32"),
        ("qweight", np.zeros((64, 1), np.int16), "m.qweight: the dtype is int16"),
        ("qweight", np.zeros(64, np.int32), r"m.qweight: the shape is \[64\]"),
        ("qweight", np.zeros((0, 1), np.int32), "m: it is empty"),
        ("qweight", np.zeros((48, 1), np.int32), "48 is not divisible by the group size"),
        ("qzeros", np.zeros((3, 1), np.int32), r"m.qzeros: the shape is \[3, 1\]; expected \[2, 1"),
        ("scales", np.zeros((2, 9), np.float16), r"m.scales: the shape is \[2, 9\]"),
        ("scales", np.zeros((2, 8), np.int32), "m.scales: the dtype is int32"),
        ("scales", None, "m.scales: missing"),
    ],
)
def test_stored_tensors_that_do_not_fit(
    name: str, array: NDArray[Any] | None, sentence: str
) -> None:
    stored = awq.pack("m", random_quant(ASYMMETRIC, 8, 64), GEMM)
    if array is None:
        del stored[f"m.{name}"]
    else:
        stored[f"m.{name}"] = array
    with pytest.raises(FormatError, match=sentence):
        awq.unpack("m", stored.__getitem__, found(ASYMMETRIC))
