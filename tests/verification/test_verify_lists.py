"""Lists of what is left unquantized: what no engine reads as one, and one sentence for one mistake,
which names the key that is to blame."""

import json
from pathlib import Path
from typing import Any

import pytest

from qtool.verification.run import verify_artifact
from qtool.verification.settings_form import as_written
from support.runs.quantizing import quantize
from support.verification.labelled_folders import TINY, copy_of, dense, errors, label, said

DOWN = "model.layers.0.mlp.down_proj"
ENGINES = (None, "vllm", "sglang", "transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lists")


def group(folder: Path, **changes: Any) -> Path:
    """Another setting of the one group of compressed-tensors."""
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]
    return label(folder, config_groups={"group_0": groups["config_groups"]["group_0"] | changes})


@pytest.mark.parametrize(
    ("kind", "changes", "phrase"),
    [
        ("awq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head'; expec"),
        ("nvfp4", {"ignore": "lm_head"}, "ignore 'lm_head'; expected a list of names"),
        ("int8", {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules 'lm_head'"),
        ("blocks", {"modules_to_not_convert": "lm_head"}, "read a string letter by letter"),
        ("nvfp4", {"ignore": ["lm_head", "re:model.(layers"]}, "does not compile (missing ),"),
        (
            "gptq",
            {"dynamic": {"-:(foo": {}}},
            "expression '(foo' in dynamic, which Python does not",
        ),
        ("gptq", {"dynamic": {"+:*.down_proj": {}}}, "(nothing to repeat at position 0)"),
    ],
)
def test_what_is_no_list(
    kind: str,
    changes: dict[str, Any],
    phrase: str,
    made: Path,
    tmp_path: Path,
) -> None:
    folder = label(copy_of(kind, made, tmp_path / "x"), **changes)
    for engine in ENGINES if kind != "int8" else (None, "transformers"):
        ((check, message),) = errors(folder, engine)
        assert check == "dense-list" and phrase in message


BAD = "re:model.(layers"


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("awq", {"modules_to_not_convert": ["lm_head", BAD, DOWN]}, "modules_to_not_convert"),
        ("nvfp4", {"ignore": [BAD, "lm_head", "re:.*[.]0[.].*down_proj"]}, "ignore"),
        ("gptq", {"dynamic": {"-:.*[.]0[.].*down_proj": {}, "-:(foo": {}}}, "dynamic"),
    ],
)
def test_another_mistake_in_a_list_is_told_beside_an_expression_that_does_not_compile(
    kind: str, changes: dict[str, Any], key: str, made: Path, tmp_path: Path
) -> None:
    folder = label(copy_of(kind, made, tmp_path / "x"), **changes)
    for engine in ENGINES:
        (_, first), (check, second) = errors(folder, engine)
        assert "does not compile" in first and key in second and DOWN in second
        assert check == ("dense-list" if engine is None else "engine-skip-list")


def test_targets_are_told_beside_a_list_that_is_none(made: Path, tmp_path: Path) -> None:
    folder = group(copy_of("nvfp4", made, tmp_path / "x"), targets=[DOWN])
    for wrong in ("lm_head", ["re:(foo"]):
        label(folder, ignore=wrong)
        first, (check, message) = errors(folder)
        assert "ignore" in first[1] and check == "dense-list"
        assert "27 matrices stored quantized, and by the config (targets of" in message


def test_targets_with_an_expression_that_does_not_compile(made: Path, tmp_path: Path) -> None:
    """Which layers they mean nobody knows, so that nothing is said of any."""
    folder = group(copy_of("nvfp4", made, tmp_path / "x"), targets=["re:(foo"])
    for engine in ENGINES:
        ((_, message),) = errors(folder, engine)
        assert "does not compile" in message


def test_expressions_that_some_engines_compile(made: Path, tmp_path: Path) -> None:
    """vLLM by the package `regex`."""
    folder = label(copy_of("gptq", made, tmp_path / "x"), dynamic={r"-:.*(?<=x|yy)\.gate": {}})
    assert errors(folder) == []
    (found,) = [f for f in verify_artifact(folder).findings if f.check == "dense-list"]
    assert found.severity == "warning" and "so that some engines end with an error" in found.message


def test_targets_are_a_list_too(made: Path, tmp_path: Path) -> None:
    folder = group(copy_of("nvfp4", made, tmp_path / "x"), targets="Linear")
    for engine in ENGINES:
        ((_, message),) = errors(folder, engine)
        assert "config_groups.group_0.targets 'Linear'; expected a list" in message


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("awq", {"modules_to_not_convert": ["lm_head", DOWN]}, "modules_to_not_convert"),
        ("nvfp4", {"ignore": ["lm_head", "re:.*down_proj"]}, "ignore"),
        ("gptq", {"dynamic": {"-:.*down_proj": {}}}, "dynamic"),
        ("gptq", {"modules_in_block_to_quantize": [["mlp.up_proj"]]},
         "modules_in_block_to_quantize"),
        ("blocks", {"modules_to_not_convert": ["lm_head", DOWN]}, "modules_to_not_convert"),
    ],
)  # fmt: skip
def test_the_key_that_is_to_blame_is_told_once(
    kind: str,
    changes: dict[str, Any],
    key: str,
    made: Path,
    tmp_path: Path,
) -> None:
    folder = label(copy_of(kind, made, tmp_path / "x"), **changes)
    ((check, message),) = errors(folder)
    assert check == "dense-list" and f"by the config ({key}) left unquantized" in message
    for engine in ENGINES[1:]:
        ((_, message),) = errors(folder, engine)
        assert key in message
        assert ("write whole names" in message) is ("*" in str(changes))


def test_targets_that_leave_out_are_to_blame(made: Path, tmp_path: Path) -> None:
    folder = group(copy_of("nvfp4", made, tmp_path / "x"), targets=[DOWN])
    for engine in ENGINES:
        ((_, message),) = errors(folder, engine)
        assert "target" in message and "ignore" not in message
    assert "27 matrices stored quantized, and by the config (targets" in errors(folder)[0][1]


def test_of_two_keys_each_is_to_blame_for_its_own(made: Path, tmp_path: Path) -> None:
    """Of which vLLM makes something of the list alone, and only that is told in its words."""
    folder = group(copy_of("nvfp4", made, tmp_path / "x"), targets=[DOWN])
    label(folder, ignore=["lm_head", DOWN])
    (_, listed), (_, targeted) = errors(folder)
    assert "1 matrix stored quantized, and by the config (ignore)" in listed
    assert "27 matrices stored quantized, and by the config (targets of" in targeted
    assert {check: message for check, message in errors(folder, "vllm")}["dense-list"] == targeted
    assert [check for check, _ in errors(folder, "vllm")] == ["dense-list", "engine-skip-list"]
    (_, listed), (_, targeted) = errors(folder, "transformers")
    assert f"{DOWN} is quantized, and ignore leaves out" in listed
    assert "24 more are quantized, and no target names" in targeted


def test_what_an_engine_alone_makes_of_a_list_is_told(made: Path, tmp_path: Path) -> None:
    """A part of a name is none to compressed-tensors, and SGLang takes its end for one."""
    folder = label(copy_of("nvfp4", made, tmp_path / "x"), ignore=["lm_head", "mlp.down_proj"])
    assert errors(folder) == errors(folder, "vllm") == []
    ((check, message),) = errors(folder, "sglang")
    assert check == "engine-skip-list" and message.endswith("an expression that ends with $")


def test_the_file_beside_is_told_before_what_it_explains(made: Path, tmp_path: Path) -> None:
    quantize(TINY, "w4g64-rtn", tmp_path / "x", "format=awq")
    (tmp_path / "x" / "qtool.json").unlink()
    label(tmp_path / "x", group_size=128)
    found = [one.check for one in verify_artifact(tmp_path / "x").findings]
    assert [check for check in found if check in ("side-config", "shapes", "scheme")] in (
        ["side-config", "shapes"], ["side-config", "scheme"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
         "rope_parameters.rope_theta"),
    ],
)  # fmt: skip
def test_a_setting_has_the_name_that_the_file_has_for_it(
    written: dict[str, Any], key: str, tmp_path: Path
) -> None:
    here, there = dense(tmp_path / "here", **written), dense(tmp_path / "there")
    (one,) = said(here, "settings", against=there)
    assert f": {key} 1000000.0, there 10000.0; engines" in one.message


def test_names_of_rope_settings_as_files_have_them() -> None:
    key = "rope_parameters.full_attention.factor"
    nested = {"rope_parameters": {"full_attention": {"factor": 2.0}}}
    assert as_written(key, [{}, {"rope_scaling": {"factor": 2.0}}]) == "rope_scaling.factor"
    assert as_written(key, [{"text_config": nested}]) == key
    assert as_written(key, [{}]) == "rope_scaling.factor"
    assert as_written("hidden_act", [{}]) == "hidden_act"
