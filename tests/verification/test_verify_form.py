"""The quantization_config has the form that the classes of engines read."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from qtool import tiny
from qtool.verification.finding import Finding
from qtool.verification.quantization_form import CHECK
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize
from support.verification.labelled_folders import copy_of, dense, label, said

TINY = Path(tiny.__file__).parent
GROUP = "config_groups.group_0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("form")
    quantize(TINY, "w4a16-ct", folder / "ct")
    (folder / "ct" / "qtool.json").unlink()
    return folder


def changed(kind: str, made: Path, folder: Path, key: str, value: Any) -> Path:
    """A copy with one other setting; its place is told with dots between."""
    copy_of(kind, made, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    table = config["quantization_config"]
    *outer, last = key.split(".")
    for name in outer:
        table = table[name]
    table[last] = value
    path.write_text(json.dumps(config))
    return folder


def errors(folder: Path) -> list[Finding]:
    return [f for f in verify_artifact(folder).findings if f.severity == "error"]


@pytest.mark.parametrize(
    ("kind", "key", "value", "phrase"),
    [
        ("gptq", "sym", "maybe", 'says sym "maybe"; expected true or false, and no string'),
        ("gptq", "desc_act", "no", 'says desc_act "no"; expected true or false'),
        ("awq", "zero_point", "true", 'says zero_point "true"; expected true or false'),
        ("blocks", "activation_scheme", "foo", 'activation_scheme "foo"; expected static or'),
        ("blocks", "activation_scheme", None, "activation_scheme null; expected static or"),
        ("ct", f"{GROUP}.weights.actorder", "foo", 'weights.actorder "foo"; expected weight'),
        ("ct", f"{GROUP}.weights.foo", 1, f"says {GROUP}.weights.foo, a key that compressed-"),
        ("ct", f"{GROUP}.foo", 1, f"says {GROUP}.foo, a key that compressed-tensors 0.20"),
        ("ct", f"{GROUP}.input_activations", "x", 'input_activations "x"; expected an object'),
        ("ct", "kv_cache_scheme", "fp8", 'kv_cache_scheme "fp8"; expected an object, or null'),
    ],
)
def test_what_no_class_reads(
    kind: str, key: str, value: Any, phrase: str, made: Path, tmp_path: Path
) -> None:
    folder = changed(kind, made, tmp_path / "x", key, value)
    for beside in ("quantize_config.json", "quant_config.json"):  # which would differ
        (folder / beside).unlink(missing_ok=True)
    (one,) = errors(folder)
    assert one.check == CHECK and phrase in one.message, one.message


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("ct", f"{GROUP}.weights.actorder", "weight"),
        ("ct", f"{GROUP}.weights.actorder", None),
        ("ct", f"{GROUP}.weights.observer_kwargs", {}),
        ("ct", "version", "0.20.1"),
        ("gptq", "lm_head", False),
        ("gptq", "meta", None),
        ("blocks", "fmt", "e4m3"),
        ("mlx", "bits", 4),
    ],
)
def test_what_is_well(kind: str, key: str, value: Any, made: Path, tmp_path: Path) -> None:
    assert errors(changed(kind, made, tmp_path / "x", key, value)) == []


@pytest.mark.parametrize("kind", ["gptq", "fp8"])  # AWQ is taken for MLX without, and does not fit
def test_a_method_is_named(kind: str, made: Path, tmp_path: Path) -> None:
    folder = label(copy_of(kind, made, tmp_path / "x"), quant_method=None)
    (one,) = said(folder, CHECK)
    assert one.severity == "error" and "has no quant_method; transformers refuses" in one.message
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("table", [[], "awq"])
def test_a_table_that_is_none(table: Any, tmp_path: Path) -> None:
    folder = dense(tmp_path / "x", quantization_config=table)
    (one,) = errors(folder)
    assert one.check == CHECK and "expected an object" in one.message
    with pytest.raises(AttributeError):
        AutoConfig.from_pretrained(folder)


def test_an_empty_table_is_a_warning(tmp_path: Path) -> None:
    """vLLM takes it for none."""
    folder = dense(tmp_path / "x", quantization_config={})
    (one,) = said(folder, CHECK)
    assert one.severity == "warning" and "transformers refuses" in one.message
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(folder)
