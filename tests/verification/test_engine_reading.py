"""Whether vLLM and SGLang read a config.json at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from qtool.verification.classes import classes_of
from qtool.verification.engines import reading
from qtool.verification.finding import Finding
from support.verification.labelled_folders import dense, said

SERVERS = ("vllm", "sglang")
OWN_CODE = {"architectures": ["OwnForCausalLM"], "model_type": "own"}


def refused(folder: Path, engine: str) -> list[Finding]:
    return said(folder, reading.CHECK, engine=engine)


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"model_type": "foo"}, "will refuse model_type 'foo', which neither"),
        (OWN_CODE, "has a class for: put back the model's own, or use versions that know it"),
        ({"model_type": None}, "will refuse a config.json without a model_type"),
        ({"layer_types": ["full_attention"]}, "through transformers, which refuses it (Strict"),
        ({"initializer_range": 2.0}, "through transformers, which refuses it (Strict"),
        (OWN_CODE | {"auto_map": {"AutoConfig": "own_config.Own"}},
         "its class is in own_config.py (auto_map), which is not there"),
        ({"model_type": ["own"], "auto_map": {"AutoConfig": "own_config.Own"}},
         "its class is in own_config.py (auto_map), which is not there"),
        ({"auto_map": {"AutoConfig": 3}}, "its auto_map says AutoConfig 3, and no name of a class"),
        (OWN_CODE | {"auto_map": {"AutoTokenizer": "own.Own"}}, "will refuse model_type 'own'"),
    ],
)  # fmt: skip
def test_what_has_no_class(
    engine: str, changes: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    (one,) = refused(dense(tmp_path / "x", **changes), engine)
    assert one.severity == "error" and phrase in one.message, one.message


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
        {"model_type": None, "architectures": ["LongcatFlashForCausalLM"]},
        OWN_CODE | {"auto_map": {"AutoConfig": "owner/name--own_config.Own"}},
        {"auto_map": {"AutoConfig": "own_config.Own"}},  # of a type that transformers knows, too
    ],
)
def test_what_is_read(engine: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert refused(dense(tmp_path / "x", **changes), engine) == []


def test_code_beside_it_and_mistrals_own_form_are_left_alone(tmp_path: Path) -> None:
    folder = dense(tmp_path / "x", **OWN_CODE, auto_map={"AutoConfig": "own_config.Own"})
    (folder / "own_config.py").write_text("")
    other = dense(tmp_path / "y", **OWN_CODE)
    (other / "params.json").write_text(json.dumps({"dim": 256}))
    for engine in SERVERS:
        assert refused(folder, engine) == [] == refused(other, engine)


def test_each_has_types_of_its_own(tmp_path: Path) -> None:
    """And knows nothing of the other's."""
    only = {"vllm": "bagel", "sglang": "jet_nemotron"}
    for engine, kind in only.items():
        folder = dense(tmp_path / kind, model_type=kind)
        assert [bool(refused(folder, one)) for one in SERVERS] == [one != engine for one in SERVERS]


def test_an_old_transformers_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dense(tmp_path / "x", **OWN_CODE)
    monkeypatch.setattr(reading, "installed", lambda: "transformers 5.9.1")
    (one,) = refused(folder, "vllm")
    assert one.severity == "warning" and "transformers 5.9.1" in one.message


def test_what_transformers_knows_is_what_most_have() -> None:
    assert all(classes_of(kind) is None for kind in ("bagel", "jet_nemotron", "kimi_k2"))
