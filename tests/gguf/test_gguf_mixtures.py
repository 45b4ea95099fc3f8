"""The types of tensors are those that llama-quantize chooses.

tests/support/gguf/gguf_types.json was measured with llama-quantize --dry-run by
tests/oracle/gguf_types.py.
"""

import json
import shlex
from collections import Counter
from functools import cache
from hashlib import sha256

import pytest

from qtool.errors import UnsupportedError
from qtool.gguf.source import GgufSource
from qtool.gguf_mixtures.kinds import ModelFacts, layer_of, model_facts, output_order, stored_shape
from qtool.gguf_mixtures.rules import Choice, Options, Override, choose, fallback, needs_importance
from qtool.gguf_mixtures.table import FILE_TYPES, TYPES
from support.gguf import gguf_shapes
from support.gguf.gguf_shapes import tensor
from support.places import SUPPORT

GOLDEN = json.loads((SUPPORT / "gguf" / "gguf_types.json").read_text())
CASES = [(model, options) for model, cases in GOLDEN.items() for options in cases]
LLAMA = ModelFacts("llama", 32, 32, 32)


def options_of(file_type: str, command: str) -> tuple[Options, bool]:
    """llama-quantize's options as ours, and whether there is an importance matrix."""
    words = shlex.split(command.replace("\\", "\\\\"))
    given: dict[str, object] = {}
    overrides = []
    while words:
        word = words.pop(0)
        if word == "--pure":
            given["pure"] = True
        elif word == "--leave-output-tensor":
            given["leave_output"] = True
        elif word == "--tensor-type":
            pattern, _, type_ = words.pop(0).partition("=")
            overrides.append(Override(pattern, TYPES[type_.upper()]))
        elif word == "--output-tensor-type":
            given["output_type"] = TYPES[words.pop(0).upper()]
        elif word == "--token-embedding-type":
            given["embedding_type"] = TYPES[words.pop(0).upper()]
        else:
            assert word == "--imatrix" and words.pop(0)
    options = Options(FILE_TYPES[file_type], overrides=tuple(overrides), **given)  # type: ignore
    return options, "--imatrix" in command


@cache
def source_of(model: str) -> GgufSource:
    return gguf_shapes.MODELS[model]()


def chosen(model: str, file_type: str, command: str = "") -> dict[str, Choice]:
    source = source_of(model)
    options, imatrix = options_of(file_type, command)
    return choose(model_facts(source.metadata), source.tensors, options, imatrix)


@pytest.mark.parametrize(("model", "command"), CASES)
def test_types_are_those_of_llama_quantize(model: str, command: str) -> None:
    for file_type, golden in GOLDEN[model][command].items():
        if golden is None:
            with pytest.raises(UnsupportedError, match="is not a multiple of that"):
                chosen(model, file_type, command)
            continue
        choices = chosen(model, file_type, command)
        if len(golden) > 2:
            counts = Counter(choice.type.name for choice in choices.values())
            assert ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) == golden[2]
        text = "".join(f"{name} {choice.type.name}\n" for name, choice in choices.items())
        digest = sha256(text.encode()).hexdigest()[:12]
        fallbacks = sum(choice.fallback for choice in choices.values())
        assert [fallbacks, digest] == golden[:2], file_type


def test_the_goldens_are_of_all_file_types_and_see_every_option() -> None:
    assert GOLDEN.keys() == gguf_shapes.MODELS.keys()
    for cases in GOLDEN.values():
        assert cases[""].keys() == cases["--imatrix importance.gguf"].keys() == FILE_TYPES.keys()
    # Each option changes something somewhere, so that none of them is tested in vain.
    for option in GOLDEN["zoo"]:
        pairs = [
            (cases[""][name][:2], golden[:2])
            for cases in GOLDEN.values()
            for name, golden in cases[option].items()
            if golden and cases[""][name]
        ]
        assert any(plain != changed for plain, changed in pairs) == (option != "")


def test_dense_overrides_and_what_comes_first() -> None:
    tensors = [tensor(f"blk.{k}.attn_v.weight", 256, 256) for k in range(8)]
    tensors += [tensor("output.weight", 96, 256), tensor("token_embd.weight", 96, 256)]
    overrides = (
        Override(r"blk\.0\.attn", None), Override("*.attn_v.weight", TYPES["Q5_0"]),
        Override("attn", TYPES["Q8_0"]), Override("output", TYPES["Q8_0"]),
    )  # fmt: skip
    options = Options(FILE_TYPES["Q4_K_M"], output_type=TYPES["F16"], overrides=overrides)
    found = choose(LLAMA, tensors, options, False)
    types = {name: (choice.type.name, choice.eligible) for name, choice in found.items()}
    assert types["blk.0.attn_v.weight"] == ("F16", False)
    assert types["blk.1.attn_v.weight"] == ("Q5_0", True)
    assert types["output.weight"] == ("F16", True)  # a type given by name wins
    assert types["token_embd.weight"] == ("Q4_K", True)
    assert found["blk.0.attn_v.weight"].why == r"override blk\.0\.attn"
    # In a file of plain numbers an override counts too.
    plain = choose(LLAMA, tensors, Options(FILE_TYPES["F16"], overrides=overrides), False)
    assert plain["blk.1.attn_v.weight"].type.name == "Q5_0"


@pytest.mark.parametrize(
    ("asked", "columns", "given"),
    [
        ("Q4_K", 512, "Q4_K"), ("Q4_K", 288, "Q5_0"), ("Q4_K", 100, "F16"), ("Q8_0", 100, "F16"),
        ("Q6_K", 96, "Q8_0"), ("Q5_K", 96, "Q5_1"), ("IQ4_XS", 96, "IQ4_NL"), ("TQ2_0", 96, "Q4_0"),
        ("Q2_0", 96, "Q4_0"), ("F16", 1, "F16"), ("MXFP4", 100, "F16"), ("IQ1_M", 100, "F16"),
    ],
)  # fmt: skip
def test_fallback(asked: str, columns: int, given: str) -> None:
    assert fallback(TYPES[asked], columns, "t").name == given


@pytest.mark.parametrize("asked", ["Q1_0", "NVFP4"])
def test_types_without_a_fallback_are_refused(asked: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^t: {asked} stores rows in blocks of .* and 96"):
        fallback(TYPES[asked], 96, "t")
    given = Options(FILE_TYPES["Q4_0"], output_type=TYPES["Q6_K"])
    with pytest.raises(
        UnsupportedError, match=r"output\.weight: Q6_K stores rows in blocks of 256"
    ):
        choose(LLAMA, [tensor("output.weight", 8, 96)], given, False)


def test_a_model_of_experts_says_the_layer() -> None:
    facts = ModelFacts("llama", 4, 4, 4, experts=8)
    for name in ("blk.4.ffn_down_exps.weight", "ffn_down.weight"):
        with pytest.raises(UnsupportedError, match=r"has to say the layer, blk\.0\. to blk\.3\."):
            choose(facts, [tensor(name, 8, 32, 256)], Options(FILE_TYPES["Q6_K"]), False)


@pytest.mark.parametrize(
    ("name", "type_", "file_type", "needed"),
    [
        ("blk.0.ffn_up.weight", "IQ2_S", "IQ2_M", True),
        ("blk.0.ffn_up.weight", "IQ3_XXS", "IQ3_XS", True),
        ("blk.0.ffn_up.weight", "IQ3_S", "IQ3_S", False),
        ("blk.0.ffn_up.weight", "IQ4_XS", "IQ4_XS", False),
        ("blk.0.ffn_up.weight", "Q2_K", "Q2_K_S", True),
        ("blk.0.ffn_up.weight", "Q2_K", "Q2_K", False),
        ("token_embd.weight", "IQ2_S", "IQ2_M", False),
        ("output.weight", "IQ1_M", "IQ1_M", False),
        ("output.weight", "IQ1_S", "IQ1_S", True),  # whose encoder cannot do without
    ],
)
def test_what_needs_importance(name: str, type_: str, file_type: str, needed: bool) -> None:
    assert needs_importance(name, TYPES[type_], FILE_TYPES[file_type]) is needed


def test_order_layers_and_stored_shapes() -> None:
    names = ["blk.10.a", "blk.9.b", "blk.9.B", "zz", "blk.2", "rope_freqs.weight", "v.blk.1.a"]
    ordered = [found.name for found in output_order([tensor(name, 1) for name in names])]
    assert ordered == [
        "blk.2", "rope_freqs.weight", "v.blk.1.a", "zz", "blk.9.B", "blk.9.b", "blk.10.a",
    ]  # fmt: skip
    assert [layer_of(name) for name in names] == [10, 9, 9, -1, -1, -1, -1]
    shapes = [(4,), (1,), (1, 4), (1, 1, 4), (2, 1, 4), (4, 1), (1, 1), ()]
    expected = [(4,), (1,), (4,), (4,), (2, 1, 4), (4, 1), (1,), (1,)]
    assert [stored_shape(shape) for shape in shapes] == expected


def test_70b_is_told_by_the_layers() -> None:
    def is_70b(architecture: str, layers: int, *heads: int, **more: int) -> bool:
        return ModelFacts(architecture, layers, *heads, **more).is_70b

    assert is_70b("llama", 80, 64, 8) and not is_70b("llama", 80, 64, 64)
    assert not is_70b("llama", 80, 64, 8, experts=8) and not is_70b("llama", 81, 64, 8)
    assert is_70b("qwen2", 80, 64, 64) and is_70b("jais2", 68, 8, 8)
    assert all(is_70b(name, 80, 64, 8) for name in ("llama-embed", "deci", "olmo"))
    assert is_70b("llama", 81, 64, 8, prediction_layers=1) and not is_70b("qwen3", 80, 64, 8)
