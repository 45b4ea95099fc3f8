"""A config that calls matrices what they are not, or calls them what an engine does not know."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qtool.verification.engines.local import _METHODS
from qtool.verification.run import verify_artifact
from support.verification.labelled_folders import RECIPES, copy_of, errors, label, said

ENGINES = (None, "vllm", "sglang", "transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels")


@pytest.mark.parametrize("kind", RECIPES)
def test_under_its_own_name_it_is_well(kind: str, made: Path, tmp_path: Path) -> None:
    folder = copy_of(kind, made, tmp_path / "x")
    served = {
        "int8": (None, "transformers"),
        "mxfp4": (None, "vllm", "transformers"),
        "mlx": (None, "mlx-lm"),
    }
    for engine in served.get(kind, ENGINES):
        assert errors(folder, engine) == []


def test_rows_of_fp8_are_not_what_engines_call_fp8(made: Path, tmp_path: Path) -> None:
    folder = label(
        copy_of("fp8", made, tmp_path / "x"),
        quant_method="fp8", activation_scheme="dynamic", ignored_layers=["lm_head"],
        config_groups=None, format=None, ignore=None, quantization_status=None,
    )  # fmt: skip
    for engine in ("vllm", "sglang"):
        ((check, message),) = errors(folder, engine)
        assert check == "engine-scheme" and "and 27 more: a scale a row, where" in message
    ((check, message),) = errors(folder, "transformers")
    assert check == "engine-format" and "looks for weight_scale_inv" in message


@pytest.mark.parametrize(
    ("kind", "other", "found"), [("nvfp4", "mxfp4", (16, 32)), ("mxfp4", "nvfp4", (32, 16))]
)
def test_four_bit_floats_of_the_other_kind(
    kind: str, other: str, found: tuple[int, int], made: Path, tmp_path: Path
) -> None:
    folder = copy_of(kind, made, tmp_path / "x")
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    name = f"{other}-pack-quantized"
    groups = {key: one | {"format": name} for key, one in table["config_groups"].items()}
    ((check, message),) = errors(label(folder, format=name, config_groups=groups))
    assert check == "stored-as"
    assert f"groups of {found[0]} cannot be stored as {name}, which has {found[1]}" in message


def test_words_of_another_width(made: Path, tmp_path: Path) -> None:
    folder = copy_of("gptq", made, tmp_path / "x")
    for same in ("int32", "torch.int32"):
        assert errors(label(folder, pack_dtype=same)) == []
    ((check, message),) = errors(label(folder, pack_dtype="int8"))
    assert check == "stored-as" and "28 matrices (" in message and "pack_dtype int8" in message


def test_a_method_that_nobody_knows(made: Path, tmp_path: Path) -> None:
    folder = label(copy_of("awq", made, tmp_path / "x"), quant_method="foo")
    for engine in ("vllm", "sglang", "transformers"):
        assert [check for check, _ in errors(folder, engine)] == ["engine-format"]
    assert _METHODS | {"bitsandbytes_4bit", "bitsandbytes_8bit"} == {
        *AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes",
    }  # fmt: skip


def test_four_bits_of_what_has_eight(made: Path, tmp_path: Path) -> None:
    folder = copy_of("int8", made, tmp_path / "x")
    ((check, message),) = errors(label(folder, load_in_8bit=False, load_in_4bit=True))
    assert check == "stored-as" and "load_in_4bit, and 28 matrices" in message
    assert len(said(folder, "stored-as")) == 1


def test_transformers_reads_no_file_beside(made: Path, tmp_path: Path) -> None:
    folder = copy_of("awq", made, tmp_path / "x")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert errors(folder, "vllm") == []
    ((check, message),) = errors(folder, "transformers")
    assert check == "engine-format" and "no quantization_config but that of config.json" in message


def test_servers_go_by_the_class_that_is_named(made: Path, tmp_path: Path) -> None:
    folder = copy_of("awq", made, tmp_path / "x")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))
    for engine, phrase in (("vllm", "answers with embeddings"), ("sglang", "SGLang will refuse")):
        ((check, message),) = errors(folder, engine)
        assert check == "engine-class" and phrase in message
    assert errors(folder, "transformers") == []


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"bits": 8}, "bits 4 in quantization, and 8 in quantization_config"),
        ({"mode": None, "group_size": 32}, "group_size 64 in quantization, and 32 in"),
        (
            {"model.norm": {"bits": 2, "group_size": 64}},
            "model.norm.bits nothing in quantization, and 2 in",
        ),
    ],
)
def test_tables_of_mlx_that_say_two_things(
    changes: dict[str, Any], phrase: str, made: Path, tmp_path: Path
) -> None:
    folder = label(copy_of("mlx", made, tmp_path / "x"), **changes)
    (found,) = [f for f in verify_artifact(folder).findings if f.check == "side-config"]
    assert found.severity == "warning" and phrase in found.message


@pytest.mark.parametrize(
    "changes", [{"mode": None}, {"quant_method": "fp8", "bits": 8}, {"symmetric": False}]
)
def test_tables_of_mlx_that_do_not(changes: dict[str, Any], made: Path, tmp_path: Path) -> None:
    """A default left out; what a model was before it was converted, which has a method."""
    folder = label(copy_of("mlx", made, tmp_path / "x"), **changes)
    assert not [f for f in verify_artifact(folder).findings if f.severity != "note"]
