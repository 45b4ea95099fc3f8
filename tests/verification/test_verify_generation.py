"""What generation_config.json says engines draw with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from qtool.verification.finding import Finding
from qtool.verification.generation import FILE
from qtool.verification.run import verify_artifact
from support.verification.labelled_folders import dense

SAMPLED = {"do_sample": True}


def drawn(folder: Path, **said: Any) -> Path:
    dense(folder)
    (folder / FILE).write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0} | said))
    return folder


def serious(folder: Path, engine: str | None = None) -> list[Finding]:
    found = verify_artifact(folder, engine=engine).findings
    return [one for one in found if one.severity != "note"]


@pytest.mark.parametrize(
    ("said", "phrase"),
    [
        ({"temperature": -1}, "temperature -1; expected a number from 0 on"),
        ({"temperature": "0.7"}, "temperature '0.7'; expected a number from 0 on"),
        ({"top_p": -0.1}, "top_p -0.1; expected a share above 0"),
        ({"top_k": -3}, "top_k -3; expected an integer"),
        ({"top_k": "50"}, "top_k '50'; expected an integer"),
        ({"min_p": 4}, "min_p 4; expected a share from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty 0; expected a number above 0"),
        ({"max_new_tokens": -1}, "max_new_tokens -1; expected an integer from 1"),
        ({"eos_token_id": "a"}, "eos_token_id 'a'; expected the id of a token"),
        ({"eos_token_id": [0, "a"]}, "eos_token_id [0, 'a']; expected the id of a token"),
    ],
)
def test_what_no_engine_draws_with(said: dict[str, Any], phrase: str, tmp_path: Path) -> None:
    """transformers fails, as it loads or as it draws; and each engine says it once."""
    folder = drawn(tmp_path / "x", **SAMPLED | said)
    (one,) = serious(folder)
    assert one.severity == "error" and phrase in one.message, one.message
    for engine in ("vllm", "sglang", "transformers"):
        assert serious(folder, engine) == [one]
    with pytest.raises((ValueError, TypeError)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generate(torch.arange(5)[None], max_length=8)


@pytest.mark.parametrize(
    ("said", "phrase", "severity"),
    [
        ({"top_p": 5}, "top_p 5; expected a share above 0, up to 1", "error"),  # vLLM's alone
        ({"do_sample": "maybe"}, "do_sample 'maybe'; expected true or false", "error"),
        ({"eos_token_id": 1.5}, "eos_token_id 1.5; expected the id", "error"),
        ({"temperature": 1e9}, "temperature 1000000000.0; expected a number up to 2", "warning"),
        (SAMPLED | {"temperature": 0.0}, "temperature 0.0; expected a number above 0", "warning"),
        (SAMPLED | {"top_k": -1}, "top_k -1; expected 0 for all tokens", "warning"),
        ({"temperature": 10**400}, "temperature 1000", "warning"),  # no float is as large
        ({"repetition_penalty": -(10**400)}, "repetition_penalty -1000", "error"),
    ],
)
def test_what_some_draw_with(
    said: dict[str, Any], phrase: str, severity: str, tmp_path: Path
) -> None:
    (one,) = serious(drawn(tmp_path / "x", **said))
    assert one.severity == severity and phrase in one.message


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("said", [{"num_return_sequences": 4}, {"cache_implementation": "foo"}])
def test_what_the_class_refuses(engine: str, said: dict[str, Any], tmp_path: Path) -> None:
    folder = drawn(tmp_path / "x", **said)
    assert serious(folder) == []
    (one,) = serious(folder, engine)
    assert (one.severity, one.check) == ("error", "engine-generation")
    assert f"refuses its {FILE} (ValueError: " in one.message and next(iter(said)) in one.message
    with pytest.raises(ValueError, match=next(iter(said))):
        GenerationConfig.from_pretrained(folder)


def test_sglang_takes_no_top_k_of_0(tmp_path: Path) -> None:
    folder = drawn(tmp_path / "x", top_k=0)
    assert serious(folder) == serious(folder, "vllm") == []
    (one,) = serious(folder, "sglang")
    assert one.severity == "error" and "will refuse every request" in one.message


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0} | SAMPLED,
        {"temperature": None, "top_k": None, "max_new_tokens": None, "do_sample": None},
        {"repetition_penalty": 1, "top_p": 1, "max_new_tokens": 2048, "temperature": 2},
        {"eos_token_id": [0, 1], "pad_token_id": None},
    ],
)
def test_what_is_well(said: dict[str, Any], tmp_path: Path) -> None:
    folder = drawn(tmp_path / "x", **said)
    for engine in (None, "vllm", "sglang", "transformers"):
        assert serious(folder, engine) == []
