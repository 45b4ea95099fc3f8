"""Values that are of no sense for what a setting is: switches, shares, windows, bounds of rope."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from qtool import tiny
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from qtool.verification.setting_values import (
    CHECK,
    MAY_BE_NULL,
    NAMED_SWITCHES,
    PLAIN_SWITCHES,
    SWITCHES,
)

TINY = Path(tiny.__file__).parent
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
OTHER = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def changed(folder: Path, changes: dict[str, Any]) -> Path:
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(TINY / name, folder / name)
    config = json.loads((TINY / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serious(folder: Path) -> list[Finding]:
    return [one for one in verify_artifact(folder).findings if one.severity != "note"]


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"use_cache": "maybe"}, "use_cache 'maybe'; expected true or false, and no string"),
        ({"use_cache": None}, "use_cache null; expected true or false, and no null"),
        ({"use_cache": 1}, "use_cache 1; expected true or false, and no number"),
        ({"mlp_bias": "no"}, "mlp_bias 'no'; expected true or false"),
        ({"attention_bias": "no"}, "attention_bias 'no'; expected true or false"),
        ({"attention_bias": 0}, "attention_bias 0; expected true or false"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; expected true or"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings 0; expected true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings null; expected true or false"),
    ],
)
def test_what_transformers_takes_for_no_switch(
    changes: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    """And vLLM and SGLang with it; one error is enough."""
    folder = changed(tmp_path / "x", changes)
    (one,) = serious(folder)
    assert (one.severity, one.check) == ("error", CHECK) and phrase in one.message
    with pytest.raises(Exception, match="expected bool"):
        AutoConfig.from_pretrained(folder)
    for engine in ("vllm", "sglang", "transformers"):
        found = verify_artifact(folder, engine=engine).findings
        assert [f for f in found if f.severity == "error"] == [one]


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"sliding_window": -4}, "sliding_window -4; expected a number of tokens, or null"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window -1; expected a number of tokens"),
        ({"partial_rotary_factor": 3}, "partial_rotary_factor 3; expected a share of each head"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": -0.5}},
         "rope_scaling.partial_rotary_factor -0.5; expected a share"),
        ({"rms_norm_eps": 1e9}, "rms_norm_eps 1000000000.0; expected a small fraction"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}},
         "rope_scaling.beta_fast -1; expected a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x"}},
         "rope_scaling.attention_factor 'x'; expected a positive number"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
         "rope_scaling.type 'linear'; expected no other type than its rope_type 'yarn'"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}},
         "rope_scaling.original_max_position_embeddings 0; expected an integer"),
    ],
)  # fmt: skip
def test_numbers_beyond_what_they_can_be(
    changes: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    (one,) = serious(changed(tmp_path / "x", changes))
    assert (one.severity, one.check) == ("error", CHECK) and phrase in one.message
    (one,) = [f for f in serious(changed(tmp_path / "y", changes | OTHER)) if f.check == CHECK]
    assert one.severity == "warning"


def test_a_decoder_is_no_encoder(tmp_path: Path) -> None:
    folder = changed(tmp_path / "x", {"is_encoder_decoder": True})
    (one,) = serious(folder)
    assert one.severity == "error" and "is_encoder_decoder True; expected false" in one.message


@pytest.mark.parametrize("window", [0, -4])
def test_a_window_without_positions(window: int, tmp_path: Path) -> None:
    """transformers fails at the first token."""
    folder = changed(tmp_path / "x", MISTRAL | {"sliding_window": window})
    (one,) = serious(folder)
    assert one.severity == ("warning" if window == 0 else "error") and one.name == "sliding_window"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(RuntimeError):
        model(torch.arange(20)[None])


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"attention_dropout": 5.0}, "attention_dropout 5.0; expected a share from 0 to 1"),
        ({"resid_pdrop": -1}, "resid_pdrop -1; expected a share from 0 to 1"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 8.0}},
         "low_freq_factor 8.0; expected no more than its high_freq_factor 4.0"),
        (OTHER | {"attention_bias": "no"}, "attention_bias 'no'; expected true or false"),
        (OTHER | {"use_cache": 1}, "use_cache 1; expected true or false"),
        (OTHER | {"tie_word_embeddings": None}, "tie_word_embeddings null; expected true or false"),
    ],
)  # fmt: skip
def test_what_may_do_no_harm_is_a_warning(
    changes: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    (one,) = serious(changed(tmp_path / "x", changes))
    assert (one.severity, one.check) == ("warning", CHECK) and phrase in one.message


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": -1, "use_sliding_window": False},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": -1},
        MISTRAL | {"sliding_window": 4096},
        {"attention_dropout": 1},
        {"attention_dropout": None},
        {"rms_norm_eps": 1e-3},
        {"partial_rotary_factor": 0.5},
        {"pretraining_tp": 0},  # which no class of a known model looks at
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}},
        {"use_bidirectional_attention": "vision"},
        {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]}},
        OTHER | {"is_encoder_decoder": True},
        OTHER | {"use_cache": None, "mlp_bias": None, "qk_norm": "rms"},
    ],
)
def test_what_is_well(changes: dict[str, Any], tmp_path: Path) -> None:
    assert serious(changed(tmp_path / "x", changes)) == []


def test_a_decoder_alone_has_no_part_for_it(tmp_path: Path) -> None:
    """Where engines look for what stands around it."""
    part = {"model_type": "llama", "hidden_size": 256}
    folder = changed(tmp_path / "x", {"text_config": part})
    (one,) = serious(folder)
    assert one.severity == "error" and "has a text_config, where engines look" in one.message
    with pytest.raises(AttributeError):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert not [f for f in serious(changed(tmp_path / "y", {"text_config": part} | OTHER))
                if f.check == CHECK]  # fmt: skip


def test_switches_are_those_of_transformers() -> None:
    """No class has a string for one, and null those that are listed alone."""
    for kind in CONFIG_MAPPING:
        made = CONFIG_MAPPING[kind]
        for field in dataclasses.fields(made) if dataclasses.is_dataclass(made) else ():
            said = str(field.type)
            if SWITCHES.fullmatch(field.name) and field.name not in NAMED_SWITCHES:
                assert not re.search(r"\bstr\b|Literal", said), (kind, field.name)
            if field.name in PLAIN_SWITCHES:
                null = kind in MAY_BE_NULL.get(field.name, ())
                assert "bool" in said and ("None" in said) == null, (kind, field.name)
