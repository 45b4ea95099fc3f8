"""What config.json says of which model it is, and of how weights are stored, is compared with what
is there; one wrong setting is one finding."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.auto import modeling_auto

from qtool.verification.classes import _OTHERS, classes_of, named_so, refused_by_transformers
from support.gallery import raw
from support.runs.quantizing import quantize
from support.verification.labelled_folders import TINY, dense, said
from support.verification.verifying import forget_digests

UP = "model.layers.{}.mlp.up_proj"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("class") / "awq"
    quantize(TINY, "w4g128-rtn", out, "format=awq")
    forget_digests(out)
    return out


@pytest.fixture
def awq(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "awq"))


@pytest.mark.parametrize(
    ("changes", "severity", "phrase"),
    [
        ({"architectures": ["FooForCausalLM"]}, "warning", "architectures 'FooForCausalLM', and"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "warning", "and model_type 'llama', which are n"),
        ({"model_type": "qwen2"}, "warning", "model_type 'qwen2', which are not one model's"),
        ({"model_type": "foo"}, "warning", "model_type 'foo', which are not one model's"),
        ({"model_type": None}, "warning", "no model_type"),
        ({"model_type": 3}, "error", "model_type 3; expected a name"),
        ({"model_type": "llama\n"}, "error", "expected a name of letters"),
        ({"model_type": "Llama"}, "warning", "model_type 'Llama', and .* in small letters"),
        ({"model_type": "foo", "auto_map": {}}, "warning", "model_type 'foo', which"),
        ({"architectures": ["x" * 5000]}, "warning", "architectures 'x{10,60}, and model_type"),
        ({"num_hidden_layers": []}, "error", r"num_hidden_layers \[\]; .* from 1"),
        ({"num_attention_heads": []}, "error", r"num_attention_heads \[\]"),
        ({"architectures": "LlamaForCausalLM"}, "error", "expected a list"),
        ({"architectures": [None]}, "error", "expected a list"),
        ({"num_hidden_layers": -1}, "error", "num_hidden_layers -1; .* from 1"),
        ({"num_hidden_layers": 0}, "error", "num_hidden_layers 0"),
        ({"num_hidden_layers": "4"}, "error", "num_hidden_layers '4'"),
        ({"vocab_size": 2048.5}, "error", "vocab_size 2048.5"),
        ({"num_attention_heads": True}, "error", "num_attention_heads True; .* from 0"),
    ],
)
def test_what_is_no_model(
    changes: dict[str, Any], severity: str, phrase: str, tmp_path: Path
) -> None:
    (one,) = said(dense(tmp_path / "x", **changes), "class")
    assert one.severity == severity
    assert re.search(phrase, one.message), one.message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["MistralForCausalLM"]},  # of one computation
        {"architectures": ["LLaMAForCausalLM"]},  # as it was called at first
        {"architectures": ["LlamaForCausalLMEagle3"]},  # a draft of the same model
        {"architectures": ["Eagle3LlamaForCausalLM"]},
        {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava"},
        {"architectures": ["LongcatFlashForCausalLM"], "model_type": None},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
        {"architectures": ["OwnForCausalLM"], "model_type": "own"},  # newer than what is installed
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "internlm3"},
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        {"architectures": None},
        {"model_type": "foo", "auto_map": {"AutoConfig": "own.Config"}},  # code beside it
        {"num_key_value_heads": None},
    ],
)
def test_other_names_of_one_model(changes: dict[str, Any], tmp_path: Path) -> None:
    assert said(dense(tmp_path / "x", **changes), "class") == []


def test_names_of_types_and_classes_are_those_of_transformers() -> None:
    """Of all that write text or judge it; and no name is listed that its type has not."""
    for tables in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION", "DECISION"):
        found = getattr(modeling_auto, f"MODEL_FOR_{tables}_MAPPING_NAMES", {})
        for kind, classes in found.items():
            for name in (classes,) if isinstance(classes, str) else classes:
                assert named_so(name, kind), (name, kind)
    for kind, others in _OTHERS.items():
        names = {one.lower().replace("_", "") for one in classes_of(kind) or ()}
        assert all(any(other in name for name in names) for other in others), kind


@pytest.mark.parametrize("changes", [{"model_type": "internlm3"}, {"model_type": "foo"}])
def test_transformers_is_not_imported(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = dense(tmp_path / "x", **changes)
    code = (
        "import sys; from pathlib import Path; from qtool.verification.run import verify_artifact;"
        "verify_artifact(Path(sys.argv[1])); print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_transformers_refuses_what_it_does_not_know() -> None:
    (one,) = refused_by_transformers({"model_type": "foo"})
    assert one.severity == "error" and "will refuse model_type 'foo'" in one.message
    assert not [*refused_by_transformers({"model_type": "llama"})]
    assert not [*refused_by_transformers({"model_type": "foo", "auto_map": {"AutoConfig": "x.Y"}})]
    assert [*refused_by_transformers({"model_type": "foo", "auto_map": {"AutoTokenizer": "x.Y"}})]
    assert classes_of("foo") is None and "LlamaForCausalLM" in (classes_of("llama") or ())


def test_damage_that_is_alike_is_told_once(awq: Path) -> None:
    """No setting explains it: some matrices are of other groups, and all others are not."""
    with raw.edited(awq) as tensors:
        for block in (0, 2, 3):
            name = f"{UP.format(block)}.qzeros"
            tensors[name] = tensors[name].changed(tensors[name].array[:1])
        name = f"{UP.format(1)}.scales"
        tensors[name] = tensors[name].changed(tensors[name].array[:1])
    many, one = said(awq, "shapes")
    assert many.name == UP.format(0)
    assert "3 matrices (" in many.message and UP.format(3) in many.message
    assert "qzeros: the shape is [1, 96]; expected [2, 96]" in many.message
    assert one.name == UP.format(1) and one.message.startswith(f"{UP.format(1)}.scales")


def test_a_wrong_width_is_told_once(awq: Path) -> None:
    """And is no reason to take the source for a padded one."""
    path = awq / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 1536}))
    (one,) = said(awq, "tensors", against=TINY)
    assert (
        "12 tensors of other shapes: model.layers.0.mlp.gate_proj.weight is [768, 256], and by"
        in (one.message)
    )
    assert said(awq, "against", against=TINY) == []
    assert said(awq, "folds", against=TINY) == []


def test_a_wrong_source_is_told_once(awq: Path, tmp_path: Path) -> None:
    source = dense(tmp_path / "wide")
    with raw.edited(source) as tensors:
        for block in range(4):
            name = f"{UP.format(block)}.weight"
            tensors[name] = tensors[name].changed(tensors[name].array[:512])
    (one,) = [o for o in said(awq, "against", against=source) if o.severity == "error"]
    assert "4 tensors of other shapes than the source's: " in one.message
    assert "is [768, 256], there [512, 256]; also" in one.message


def test_the_key_of_the_format_is_named(awq: Path) -> None:
    path = awq / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["zero_point"] = False
    path.write_text(json.dumps(config))
    (one,) = said(awq, "zeros")
    assert "set zero_point to true" in one.message
    (beside,) = said(awq, "side-config")
    assert "config.json says zero_point False, and quant_config.json zero_point True" in (
        beside.message
    )


def test_a_record_that_is_no_file(awq: Path) -> None:
    (awq / "qtool.json").unlink()
    (awq / "qtool.json").mkdir()
    (one,) = said(awq, "provenance")
    assert one.severity == "error" and "cannot be read (it is no file)" in one.message


def test_a_file_that_cannot_be_read_has_no_digest(
    awq: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((awq / "qtool.json").read_text())
    record["files"] = {"config.json": "sha256:" + "0" * 64}
    (awq / "qtool.json").write_text(json.dumps(record))
    monkeypatch.setattr("qtool.verification.stated.hash_file", _denied)
    (one,) = [o for o in said(awq, "digests") if o.name == "config.json"]
    assert one.severity == "error"
    assert one.message == (
        "config.json cannot be compared with what qtool.json records of it: Permission denied"
    )


def _denied(path: Path) -> str:
    raise OSError("Permission denied")


def test_what_is_quantized_itself_is_no_source(awq: Path, healthy: Path) -> None:
    record = json.loads((awq / "qtool.json").read_text())
    del record["source"]["digest"]
    (awq / "qtool.json").write_text(json.dumps(record))
    (one,) = said(awq, "against", against=healthy)
    assert one.severity == "note" and "is itself quantized (awq)" in one.message
    assert said(awq, "against", against=TINY) == []


def test_a_setting_that_shapes_all_is_told_once(awq: Path) -> None:
    path = awq / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": [1, 2]}))
    assert len(said(awq, "tensors")) == 1


def test_one_file_of_many(awq: Path) -> None:
    (awq / "model.safetensors").rename(awq / "model-00001-of-00002.safetensors")
    (one,) = said(awq, "files")
    assert one.severity == "warning" and "is one file of 2 by its name" in one.message


def test_a_scale_that_is_none_of_a_group_without_columns(tmp_path: Path) -> None:
    quantize(TINY, "w4g64-rtn", tmp_path / "x", "format=gptq", "weights.symmetric=true")
    name = UP.format(1)
    with raw.edited(tmp_path / "x") as tensors:
        index, scales = tensors[f"{name}.g_idx"], tensors[f"{name}.scales"]
        tensors[f"{name}.g_idx"] = index.changed(np.where(index.array == 1, 0, index.array))
        changed = scales.array.copy()
        changed[1, 5] = np.nan
        tensors[f"{name}.scales"] = scales.changed(changed)
    (one,) = said(tmp_path / "x", "scales")
    assert "the first: row 5, group 1 of its g_idx" in one.message


@pytest.mark.parametrize("key", ["zero_point", "bits", "group_size"])
def test_what_vllm_asks_for(key: str, awq: Path) -> None:
    assert said(awq, "engine-config", engine="vllm") == []
    path = awq / "config.json"
    config = json.loads(path.read_text())
    other = {"bits": "w_bit", "group_size": "q_group_size"}.get(key)
    config["quantization_config"].pop(key)
    if other is not None:  # by the name that AutoAWQ had for it first
        config["quantization_config"][other] = {"bits": 4, "group_size": 128}[key]
    path.write_text(json.dumps(config))
    found = said(awq, "engine-config", engine="vllm")
    assert [one.name for one in found] == ([] if other else [key])
    assert said(awq, "engine-config", engine="sglang") == []


def test_transformers_refuses_a_config_without_a_type(awq: Path) -> None:
    path = awq / "config.json"
    config = json.loads(path.read_text())
    del config["model_type"]
    path.write_text(json.dumps(config))
    (one,) = said(awq, "engine-class", engine="transformers")
    assert one.severity == "error" and "without a model_type" in one.message


def test_a_type_unlike_the_source_is_told(awq: Path) -> None:
    path = awq / "config.json"
    for kind, told in (("foo", 1), ("mistral", 0)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
        assert len(said(awq, "settings", against=TINY)) == told


def test_a_file_of_another_name(awq: Path) -> None:
    (awq / "model.safetensors").rename(awq / "weights.safetensors")
    (one,) = said(awq, "files")
    assert one.severity == "warning" and "weights.safetensors is not called model" in one.message
    (refused,) = said(awq, "engine-files", engine="transformers")
    assert refused.severity == "error" and refused.name == "weights.safetensors"
    path = awq / "config.json"
    config = json.loads(path.read_text()) | {"transformers_weights": "weights.safetensors"}
    path.write_text(json.dumps(config))
    assert said(awq, "files") == []
