"""What is wrong once is told once: a setting, the width of a matrix, a GGUF file's architecture."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.diff.sides import told_as
from qtool.errors import SettingError, UnsupportedError
from qtool.formats.gguf_values import string, u32
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.verification import once
from qtool.verification.finding import About, Finding, of_error, of_listed, of_setting
from qtool.verification.run import verify_artifact
from support.gguf import gguf_files
from support.runs import quantizing
from support.verification.verifying import serious


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return quantizing.first_blocks_of_tiny(tmp_path / "model", 2)


def errors(folder: Path, **more: Any) -> list[Finding]:
    found = verify_artifact(folder, threads=1, **more).findings
    return [one for one in found if one.severity == "error"]


@pytest.mark.parametrize("value", ["256", None, True])
def test_a_setting_that_is_no_count(value: object, model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": value}
    (model / "config.json").write_text(json.dumps(config))
    (alone,) = errors(model)
    assert "hidden_size" in alone.message and "integer" in alone.message
    assert errors(model, against=source, engine="vllm") == [alone]
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    first, second = errors(model, against=source)
    assert first == alone and "rope_theta" in second.message


def test_a_setting_that_is_a_count_of_another_model(model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": 512}
    (model / "config.json").write_text(json.dumps(config))
    found = errors(model, against=source)
    assert [one.check for one in found] == ["tensors", "settings"]
    assert found[0].message.endswith("config and weights are of different models")


@pytest.mark.parametrize(
    ("key", "value"),
    [("intermediate_size", "768"), ("rms_norm_eps", "1e-5"), ("rope_theta", "1e4"),
     ("hidden_act", "foo"), ("architectures", [3])],
)  # fmt: skip
def test_a_setting_without_sense_is_not_also_unlike_the_source_s(
    key: str, value: object, model: Path, tmp_path: Path
) -> None:
    """Nor a shape that nothing tells."""
    source = Path(shutil.copytree(model, tmp_path / "source"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    (alone,) = errors(model)
    assert alone.name.startswith(key) and errors(model, against=source) == [alone]
    # Beside another one it stands in the list of those that differ.
    (model / "config.json").write_text(json.dumps(config | {key: value, "head_dim": 32}))
    assert [one.check for one in errors(model, against=source)][-1] == "settings"


def test_a_setting_is_known_by_itself_and_not_by_a_sentence() -> None:
    theta, size = of_setting("rope_theta"), of_setting("hidden_size")
    first = Finding("error", "class", "", "one sentence", theta)
    again = Finding("error", "tensors", "x", "of other words", theta)
    both = Finding("error", "settings", "", "of two", of_setting("rope_theta", "hidden_size"))
    other = Finding("error", "tensors", "", "of another one", size)
    plain = Finding("error", "tensors", "rope_theta", "of none")
    found = [again, both, other, plain]
    assert [*once.untold([first], found)] == [both, other, plain]
    doubt = Finding("warning", "class", "", "a doubt", theta)
    assert [*once.untold([doubt], found)] == found
    assert "about" not in first.json()


def test_an_error_about_a_setting_is_told_anew_as_all_others_are() -> None:
    """With a path or a label in front, by those who know it."""
    error = SettingError("layer_types", "is not a list of 2 names")
    said = "^B: config.json: layer_types is not a list"
    with pytest.raises(SettingError, match=said) as anew, told_as("B"):
        raise error
    assert of_error("tensors", "", error).about == of_setting("layer_types")
    assert of_error("tensors", "", anew.value).about == About()
    assert str(copy.copy(error)) == str(error)


def test_lists_give_way_to_an_engine_that_speaks_of_all_their_layers() -> None:
    general = Finding("error", "dense-list", "a", "of a list", of_listed(["a", "b"]))
    one = Finding("error", "engine-skip-list", "a", "of a", of_listed(["a"]))
    other = Finding("error", "engine-skip-list", "b", "of b", of_listed(["b"]))
    doubt = Finding("warning", "engine-skip-list", "b", "of b", of_listed(["b"]))
    assert once.with_engine([general], [one, other]) == [one, other]
    assert once.with_engine([general], [one, doubt]) == [general, one, doubt]


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "intermediate_size"])
def test_transformers_does_not_say_again_what_is_no_count(key: str, model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {key: 0}
    (model / "config.json").write_text(json.dumps(config))
    (alone,) = errors(model)
    assert errors(model, engine="transformers") == [alone]


def test_a_second_reason_is_told_beside_the_first(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"initializer_range": 2.0}
    for key, value in (("rms_norm_eps", "1e-6"), ("hidden_act", "foo"), ("head_dim", "x")):
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        first, second = errors(model, engine="transformers")
        assert key in first.message and second.check == "engine-class"
        reason = f"{model}/config.json: transformers cannot build the 'llama' that it describes"
        assert second.message.startswith(reason) and "initializer_range" in second.message


def test_what_a_count_of_the_class_makes_wrong_is_no_second_reason(model: Path) -> None:
    """Of 32 heads, as the class has where nothing is said, 250 are no multiple."""
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": 250, "num_attention_heads": "5"}
    (model / "config.json").write_text(json.dumps(config))
    assert "engine-class" not in [one.check for one in errors(model, engine="transformers")]


def test_one_wrong_width_is_its_matrix_own(model: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name][:700].contiguous()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    said = (
        f"{name} is [700, 256], and by config.json it should be [768, 256]; the same tensors of "
        "other blocks are as config.json says: fetch "
    )
    (found,) = errors(model)
    assert found.message.startswith(said)
    with pytest.raises(UnsupportedError) as error:
        make_plan(load("w4g128-rtn"), Checkpoint.open(model))
    assert said in str(error.value)


def test_another_architecture_of_a_gguf_file(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": string("qwen2"),
        "llama.block_count": u32(1),
        "llama.embedding_length": u32(256),
    }
    path = gguf_files.write(tmp_path / "m.gguf", metadata, {})
    first, *others = serious(path)
    assert first.message == (
        "general.architecture says qwen2, and the keys of the model are llama's "
        "(llama.block_count): llama.cpp does not load the file; put back llama"
    )
    assert not [one for one in others if one.check == "keys"]
