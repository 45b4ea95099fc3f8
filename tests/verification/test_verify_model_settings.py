"""What a model computes with is of the form, and has a name, that engines read."""

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qtool import tiny
from qtool.verification.finding import Finding
from qtool.verification.model_settings import _NUMBERS, ACTIVATIONS, CHECK, DTYPES, ROPES
from qtool.verification.run import verify_artifact
from qtool.verification.sizes import unlike_shapes

TINY = Path(tiny.__file__).parent
OTHER = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
REMOVED = object()


def changed(folder: Path, changes: dict[str, Any]) -> Path:
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(TINY / name, folder / name)
    config = json.loads((TINY / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def said(folder: Path) -> list[Finding]:
    return [one for one in verify_artifact(folder).findings if one.check == CHECK]


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **more}}


WRONG = [
    ({"rope_theta": None}, "rope_theta null; expected a number"),
    ({"rope_theta": "10000"}, "rope_theta '10000'"),
    (rope("default", rope_theta=None), "rope_scaling.rope_theta null"),
    (rope("foo", factor=2.0), "rope_scaling.rope_type 'foo'; expected a kind"),
    ({"rope_parameters": {"type": "foo"}}, "rope_parameters.type 'foo'"),
    (rope("linear"), "rope_scaling of rope_type linear without factor"),
    (rope("yarn"), "of rope_type yarn without factor"),
    (rope("llama3", factor=2.0, low_freq_factor=1.0), "llama3 without high_freq_factor"),
    (rope("longrope", short_factor=[1.0]), "longrope without long_factor"),
    (rope("linear", factor="2"), "rope_scaling.factor '2'"),
    (rope("linear", factor=None), "rope_scaling.factor null"),
    ({"dtype": "foo"}, "dtype 'foo'; expected a dtype"),
    ({"dtype": REMOVED, "torch_dtype": "foo"}, "torch_dtype 'foo'"),
    ({"dtype": "torch.bfloat16"}, "dtype 'torch.bfloat16'"),
    ({"dtype": ["bfloat16"]}, "dtype ['bfloat16']; expected a dtype"),
    ({"hidden_act": "foo"}, "hidden_act 'foo'; expected an activation"),
    ({"hidden_act": "SiLU"}, "hidden_act 'SiLU'"),
    ({"hidden_act": 3}, "hidden_act 3; expected the name"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6'; expected a number"),
    ({"rms_norm_eps": None}, "rms_norm_eps null"),
    ({"rms_norm_eps": 1}, "rms_norm_eps 1; expected a small fraction"),
    ({"attention_dropout": "0"}, "attention_dropout '0'"),
    ({"max_position_embeddings": "2048"}, "max_position_embeddings '2048'"),
    ({"attention_bias": "false"}, "attention_bias 'false'; expected true or false"),
    ({"max_position_embeddings": 100.5}, "max_position_embeddings 100.5; expected an integer"),
]


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 0.5}, OTHER | {"rope_theta": 1}, OTHER | {"rope_theta": float("inf")},
     {"note": "true"}, OTHER | {"attn_dropout": "none"}, OTHER | {"attention_bias": "false"}],
)  # fmt: skip
def test_what_nobody_may_read_is_a_warning(changes: dict[str, Any], tmp_path: Path) -> None:
    (found,) = said(changed(tmp_path / "x", changes))
    assert found.severity == "warning" and [*changes][-1] in found.message


@pytest.mark.parametrize(("changes", "phrase"), WRONG, ids=[phrase for _, phrase in WRONG])
def test_what_no_engine_reads(changes: dict[str, Any], phrase: str, tmp_path: Path) -> None:
    """transformers refuses all of it, as it reads the config or as it builds the model."""
    folder = changed(tmp_path / "x", changes)
    (one,) = said(folder)
    assert one.severity == "error" and phrase in one.message, one.message
    with pytest.raises(Exception):  # noqa: B017 - it has a type of its own for each
        config = AutoConfig.from_pretrained(folder)
        with torch.device("cpu"):
            AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": REMOVED},
        {"rope_theta": 10000},
        {"rope_theta": None, **rope("default", rope_theta=1e4)},
        {"rope_theta": REMOVED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": None}},
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        rope("yarn", factor=4.0),
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"mrope_section": [8, 12, 12], "type": "mrope"}},
        {"rope_scaling": []},
        {"rope_scaling": None},
        {"dtype": None},
        {"dtype": "half"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": None},
        {"transformers_version": "5.0"},
    ],
)
def test_what_is_well(changes: dict[str, Any], tmp_path: Path) -> None:
    assert said(changed(tmp_path / "x", changes)) == []


@pytest.mark.parametrize(
    "changes", [rope("foo", factor=2.0), {"hidden_act": "foo"}, {"rope_theta": None}]
)
def test_a_class_that_is_not_known_may_have_names_of_its_own(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (one,) = said(changed(tmp_path / "x", changes | OTHER))
    assert one.severity == "warning"


def test_a_decoder_that_does_not_turn_has_no_theta(tmp_path: Path) -> None:
    """transformers 5 stores null of Granite's without positions."""
    still = {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "position_embedding_type": "nope", "rope_theta": REMOVED,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    }  # fmt: skip
    made = CONFIG_MAPPING["granitemoehybrid"](position_embedding_type="nope", rope_theta=None)
    assert made.to_dict()["rope_parameters"] == still["rope_parameters"]
    assert said(changed(tmp_path / "x", still)) == []


def test_no_root_is_taken_of_what_is_below_zero(tmp_path: Path) -> None:
    (one,) = said(changed(tmp_path / "x", {"rms_norm_eps": -1e-5}))
    assert one.severity == "error" and "expected a number from 0 on" in one.message


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": 0}, "rope_theta 0;"),
        ({"rope_theta": -10000.0}, "rope_theta -10000.0"),
        ({"rope_theta": 1e300}, "rope_theta 1e+300"),
        ({"rope_theta": REMOVED, "rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
         "rope_parameters.rope_theta -10000.0"),
        (rope("linear", factor=0), "rope_scaling.factor 0"),
        (rope("yarn", factor=-4.0), "rope_scaling.factor -4.0"),
    ],
)  # fmt: skip
def test_angles_that_are_no_numbers(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Nobody refuses them, and transformers turns by what is no number."""
    folder = changed(tmp_path / "x", changes)
    (one,) = said(folder)
    assert one.severity == "error" and key in one.message and "a positive number" in one.message
    with contextlib.suppress(ValueError, ZeroDivisionError):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        turns = made.model.rotary_emb.inv_freq
        assert not (torch.isfinite(turns).all() and (turns > 0).all())


def test_an_empty_part_hides_nothing(tmp_path: Path) -> None:
    """transformers hands it on in place of the config: then nothing has heads."""
    folder = changed(tmp_path / "x", {"text_config": {}})
    (one,) = said(folder)
    assert one.severity == "error" and "an empty text_config" in one.message
    assert AutoConfig.from_pretrained(folder).get_text_config() == {}
    one, other = said(changed(tmp_path / "y", {"text_config": {}, "rms_norm_eps": "1e-6"}))
    assert "text_config" in one.message and "rms_norm_eps" in other.message
    around = {"text_config": {}, "num_attention_heads": REMOVED}
    assert said(changed(tmp_path / "z", around | OTHER)) == []
    (one,) = said(changed(tmp_path / "w", {"text_config": {}} | OTHER))
    assert one.severity == "warning"


@pytest.mark.parametrize("value", [0, -1, -2048])
def test_no_text_has_no_positions(value: int, tmp_path: Path) -> None:
    """vLLM takes it for the longest text, and ends; SGLang refuses each text."""
    (one,) = said(changed(tmp_path / "x", {"max_position_embeddings": value}))
    assert one.severity == "error" and one.message.endswith("from 1: put back the model's own")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "rope_theta": 0},
        OTHER | {"rope_theta": 0},
        OTHER | {"rope_theta": [10000.0, 0, 0, 10000.0]},
        OTHER | {"rms_norm_eps": 0},
        {"rope_scaling": {"rope_type": "default", "factor": 0}},
        {"rms_norm_eps": 0.0},
        {"max_position_embeddings": 1},
    ],
)
def test_a_theta_of_0_may_mean_that_nothing_is_turned(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """To vLLM's and SGLang's Granite; and other numbers at the ends of what makes sense."""
    assert said(changed(tmp_path / "x", changes)) == []


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": -1.0}, {"rms_norm_eps": -1e-5}, {"max_position_embeddings": 0},
     rope("linear", factor=-2.0), {"rope_local_base_freq": -1.0}],
)  # fmt: skip
def test_numbers_without_sense_of_a_class_that_is_not_known(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (one,) = said(changed(tmp_path / "x", changes | OTHER))
    assert one.severity == "warning"


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"hidden_size": 512}, "hidden_size 512, and no tensor is so wide"),
        ({"vocab_size": 4096}, "vocab_size 4096, and no tensor is so long"),
        ({"num_attention_heads": 7}, "num_attention_heads 7, by which the rows of no q_proj"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3, by which the rows of no k_proj"),
    ],
)
def test_sizes_of_a_class_that_is_not_known(
    changes: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "x", changes | OTHER)
    (one,) = [f for f in verify_artifact(folder).findings if f.check == "tensors"]
    assert one.severity == "warning" and phrase in one.message and one.name in changes
    folder = changed(tmp_path / "y", OTHER)
    assert not [f for f in verify_artifact(folder).findings if f.check == "tensors"]


def test_a_draft_without_an_embedding_has_no_vocabulary() -> None:
    draft = {"model.layers.0.self_attn.q_proj.weight": (64, 64), "model.fc.bias": (64,)}
    sizes = {"hidden_size": 64, "vocab_size": 1000, "num_attention_heads": 4}
    assert not [*unlike_shapes(sizes, draft, "model.layers.")]
    whole = draft | {"model.embed_tokens.weight": (900, 64)}
    assert [key for key, _ in unlike_shapes(sizes, whole, "model.layers.")] == ["vocab_size"]
    tower = {"tower.layers.0.self_attn.q_proj.weight": (48, 64)}
    assert not [*unlike_shapes(sizes | {"num_attention_heads": 64}, draft | tower, "model.layers.")]


def test_integers_are_no_models_dtype(tmp_path: Path) -> None:
    """vLLM takes one of its own instead."""
    (one,) = said(changed(tmp_path / "x", {"dtype": "int8"}))
    assert one.severity == "warning"


def test_the_names_are_those_of_transformers() -> None:
    assert {*ACT2FN} <= ACTIVATIONS
    assert {*ROPE_INIT_FUNCTIONS} <= {*ROPES}
    assert all(getattr(torch, name).is_floating_point for name in DTYPES)


def test_no_class_has_a_string_where_a_number_is_expected() -> None:
    for kind in CONFIG_MAPPING:
        made = CONFIG_MAPPING[kind]
        for field in dataclasses.fields(made) if dataclasses.is_dataclass(made) else ():
            if _NUMBERS.fullmatch(field.name):
                assert not re.search(r"\bstr\b", str(field.type)), (kind, field.name)


def test_transformers_is_asked_to_build_it(tmp_path: Path) -> None:
    """What no rule here knows, and only once where one does."""

    def refused(name: str, changes: dict[str, Any]) -> list[Finding]:
        folder = changed(tmp_path / name, changes)
        return [f for f in verify_artifact(folder, engine="transformers").findings
                if f.check == "engine-class"]  # fmt: skip

    assert refused("well", {}) == []
    (one,) = refused("odd", {"initializer_range": 2.0})
    assert one.severity == "error" and "cannot build the 'llama'" in one.message
    assert "initializer_range" in one.message
    assert refused("told", {"rms_norm_eps": "1e-6"}) == []
