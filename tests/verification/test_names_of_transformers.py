"""Models that also see, in compressed-tensors and bitsandbytes: transformers finds everything.

It compares a config's list with the modules of its class, whose names are not the checkpoint's.
What it would take for quantized is worked out here by Python's own expressions over that class, as
compressed-tensors and transformers do (utils/match.py, quantizers_utils.should_convert_module).
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoConfig

from qtool.api import convert
from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.formats.facts import Facts
from qtool.formats.other_names import expressions, names
from qtool.scheme import Scheme
from qtool.streaming.meta_model import meta_model
from qtool.verification.engines.modules import class_modules
from qtool.verification.engines.view import view_of
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.models import arch_models
from support.runs import quantizing
from support.verification.verifying import errors_of

SEEING = ("llava", "pixtral", "idefics3", "internvl", "lfm2-vl", "paddleocr-vl", "glm4v")
W8 = Scheme(8, -1, True)


def linear_layers(folder: Path) -> set[str]:
    """Of the class that transformers has for a checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = gguf_models.auto_model(config).from_config(config)
    return {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}


def ignored(config: dict[str, Any]) -> Callable[[str], bool]:
    listed = config["ignore"]

    def one(name: str) -> bool:
        return any(
            re.match(entry[3:], name) if entry.startswith("re:") else entry == name
            for entry in listed
        )

    return one


def skipped(config: dict[str, Any]) -> Callable[[str], bool]:
    listed, boundary = config["llm_int8_skip_modules"], r"(?:(?<=\.)|(?=\.|$))"
    return lambda name: any(
        re.match(f"(?:{entry}){boundary}", name) or name.endswith(entry) for entry in listed
    )


def blocks(modules: set[str]) -> list[str]:
    """From the number of the block on, in which nothing is renamed."""
    return sorted(re.sub(r".*\blayers\.", "", name) for name in modules)


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize(
    ("recipe", "left_out"), [("w8a16-ct", ignored), ("int8-llmint8", skipped)], ids=["ct", "bnb"]
)
def test_what_is_left_out_is_what_is_dense(
    name: str, recipe: str, left_out: Callable[..., Callable[[str], bool]], tmp_path: Path
) -> None:
    source = gguf_models.build(name, tmp_path / "source", dtype="bfloat16")
    quantizing.add_tokenizer(source)
    out = tmp_path / "out"
    # One matrix of a block stays dense, too.
    last = "w2" if name == "lfm2-vl" else "down_proj"
    other = f'overrides=[{{match: "*layers.1.*.{last}", dense: true}}]'
    quantizing.quantize(source, recipe, out, other, "calibration.samples=2")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    leaves = left_out(config)
    looked_for = {module for module in linear_layers(source) if not leaves(module)}
    artifact = Artifact.open(out)
    packed = {entry.module for entry in artifact.entries.values() if entry.scheme is not None}
    assert blocks(looked_for) == blocks(packed) and len(packed) > 8
    dense = re.compile(rf"(?<!vision_tower\.)layers\.1\..*\b{last}")
    assert not any(dense.search(module) for module in looked_for)
    verdict = verify_artifact(out, against=source, engine="transformers")
    assert verdict.ok, verdict.findings
    without = json.loads((out / "config.json").read_text())
    key = "ignore" if "ignore" in config else "llm_int8_skip_modules"
    dense = [entry.module for entry in artifact.entries.values() if entry.scheme is None]
    without["quantization_config"][key] = [e for e in config[key] if e in dense]
    (out / "config.json").write_text(json.dumps(without))
    said = next((f for f in errors_of(out)), None)
    if key == "ignore" and name not in (
        "idefics3",
        "glm4v",
        "lfm2-vl",
    ):  # whose names are the checkpoint's
        assert said is not None and said.check == "engine-skip-list"
        assert "does not name" in said.message and "makes up the weights" in said.message


def test_a_list_that_leaves_out_what_is_quantized(tmp_path: Path) -> None:
    source = quantizing.add_tokenizer(gguf_models.build("llava", tmp_path / "source"))
    out = tmp_path / "out"
    quantizing.quantize(source, "w8a16-ct", out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] += [r"re:model\.language_model\.layers\.1\.mlp\..*"]
    (out / "config.json").write_text(json.dumps(config))
    assert verify_artifact(out, engine="vllm").ok  # which has no such names
    (said,) = errors_of(out)
    assert said.message.startswith("language_model.model.layers.1.mlp.down_proj, ")
    assert "ignore leaves out model.language_model.layers.1.mlp.down_proj" in said.message


QUANTIZED = {
    f"model.layers.{n}.mlp.{part}": W8 for n in (0, 1) for part in ("up_proj", "down_proj")
}


def test_a_decoder_alone_is_named_as_it_was() -> None:
    for dense in (["lm_head"], [], ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.x"]):
        assert not expressions(Facts(QUANTIZED, dense)) and not names(Facts(QUANTIZED, dense))


@pytest.mark.parametrize(
    ("dense", "said", "listed"),
    [
        (["head"], ["lm_head"], ["lm_head"]),
        (
            ["model.visual.blocks.0.attn.qkv", "model.visual.merger.0", "lm_head"],
            [r"re:(?:.*\.)?(?:visual|multi_modal_projector|projector)(?:\..*)?$"],
            ["model.multi_modal_projector", "model.projector"],
        ),
        (  # a part whose name a quantized module has, too, goes by the whole of it
            ["tower.mlp.fc", "mlp1.0", "language_model.model.layers.0.mlp.gate"],
            [r"re:(?:.*\.)?layers\.\d+\.mlp\.gate$",
             r"re:(?:.*\.)?(?:tower|mlp1|multi_modal_projector|projector)(?:\..*)?$"],
            ["model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate", "model.tower",
             "model.mlp1", "model.multi_modal_projector", "model.projector"],
        ),
        (
            ["model.mlp.fc"],
            [r"re:(?:.*\.)?(?:model\.mlp|multi_modal_projector|projector)(?:\..*)?$"],
            ["model.multi_modal_projector", "model.projector"],
        ),
        (["model.fc"], [r"re:(?:.*\.)?(?:fc|multi_modal_projector|projector)(?:\..*)?$"],
         ["model.multi_modal_projector", "model.projector"]),
    ],
)  # fmt: skip
def test_expressions_and_names(dense: list[str], said: list[str], listed: list[str]) -> None:
    before = "language_model." if "language_model." in "".join(dense) else ""
    facts = Facts({before + name: scheme for name, scheme in QUANTIZED.items()}, dense)
    assert expressions(facts) == said and names(facts) == listed
    for entry in said:
        assert not any(re.match(entry.removeprefix("re:"), name) for name in QUANTIZED)


def test_a_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    """Nothing is asked of its class; names are compared with the checkpoint's, as they were."""
    source = quantizing.add_tokenizer(gguf_models.build("llava", tmp_path / "source"))
    out = tmp_path / "out"
    quantizing.quantize(source, "w8a16-ct", out)
    config = json.loads((out / "config.json").read_text())
    config |= {"model_type": "nobodys", "architectures": ["Nobodys"]}
    config["quantization_config"]["ignore"] = ["vision_tower"]
    (out / "config.json").write_text(json.dumps(config))
    artifact = Artifact.open(out)
    assert class_modules(artifact.checkpoint, view_of(artifact)) is None
    assert "language_model.lm_head" in {f.name for f in errors_of(out)}


def listed(out: Path, found: object) -> Path:
    """The artifact with another list of what is left out."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    table = config["quantization_config"]
    table["ignore" if "ignore" in table else "llm_int8_skip_modules"] = found
    path.write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA in bitsandbytes."""
    folder = tmp_path_factory.mktemp("eight")
    source = quantizing.add_tokenizer(gguf_models.build("llava", folder / "source"))
    quantizing.quantize(source, "int8-llmint8", folder / "out", "calibration.samples=2")
    return folder / "out"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["lm_head", ".*vision_tower", ".*projector"], None),
        (["lm_head", "model.(vision_tower|multi_modal_projector)"], None),
        (["lm_head", r"(?s:.*)"], None),  # which is not matched here
        (
            ["lm_head", "vision_tower", "projector"],
            "does not name",
        ),  # from the start, or at the end
        (["lm_head", ".*vision_tower", ".*projector", r".*layers\.1\.mlp\.up_proj"], "leaves out"),
        (None, "does not name"),  # only the head is left out then
    ],
)
def test_entries_are_expressions(
    entries: list[str] | None, said: str | None, eight: Path, tmp_path: Path
) -> None:
    out = listed(shutil.copytree(eight, tmp_path / "out"), entries)
    found = [f.message for f in errors_of(out) if f.check == "engine-skip-list"]
    assert len(found) == (said is not None) and (said or "") in "".join(found)
    assert not any("lm_head" in message for message in found)


def test_no_list_leaves_out_the_head(tmp_path: Path) -> None:
    """As transformers writes it of what it has quantized itself."""
    source = quantizing.add_tokenizer(arch_models.build("llama", tmp_path / "source"))
    quantizing.quantize(source, "int8-llmint8", tmp_path / "out", "calibration.samples=2")
    assert not errors_of(listed(tmp_path / "out", None))
    assert [f.name for f in errors_of(listed(tmp_path / "out", []))] == ["lm_head"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("llava", "*layers.1.self_attn.*"),
        ("llava", "*lm_head"),
        ("paddleocr-vl", "*layers.1.self_attn.*"),
    ],
)
def test_matrices_of_another_width(name: str, other: str, tmp_path: Path) -> None:
    """Their targets mean the same modules of the class, and no others that are quantized."""
    source = quantizing.add_tokenizer(gguf_models.build(name, tmp_path / "source"))
    out = tmp_path / "out"
    four = f'overrides=[{{match: "{other}", weights: {{bits: 4, group_size: 32}}}}]'
    quantizing.quantize(source, "w8a16-ct", out, four)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    eights, fours = config["config_groups"].values()
    assert eights["targets"] == ["Linear"] and fours["weights"]["num_bits"] == 4
    leaves = ignored(config)
    meant = {
        module
        for module in linear_layers(source)
        if not leaves(module) and any(re.match(t[3:], module) for t in fours["targets"])
    }
    artifact = Artifact.open(out)
    packed = {e.module for e in artifact.entries.values() if getattr(e.scheme, "bits", 0) == 4}
    assert blocks(meant) == blocks({n.replace("language_model.lm_head", "lm_head") for n in packed})
    assert verify_artifact(out, engine="transformers").ok and verify_artifact(out).ok
    fours["targets"] = sorted(packed)  # names of the checkpoint
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    assert [f.check for f in errors_of(out)] == ["engine-targets"]


def test_nothing_is_fetched_to_build_a_class(tmp_path: Path) -> None:
    source = gguf_models.build("llava", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["vision_config"] = {"model_type": "dpt", "backbone": "nobody/nothing"}
    (source / "config.json").write_text(json.dumps(config))
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(UnsupportedError, match="not fetched"):
        meta_model(Checkpoint.open(source))
    assert before == constants.HF_HUB_OFFLINE
    assert class_modules(Checkpoint.open(source), view_of(Artifact.open(source))) is None


def test_what_a_model_card_says_of_models_that_see(tmp_path: Path) -> None:
    source = quantizing.add_tokenizer(gguf_models.build("llava", tmp_path / "source"))
    quantizing.quantize(source, "w8a16-ct", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert 'AutoModelForImageTextToText.from_pretrained("DIR"' in text
    assert "pipeline_tag: image-text-to-text" in text
    convert(tmp_path / "out", to="hf", out=tmp_path / "plain")
    assert "pipeline_tag: image-text-to-text" in (tmp_path / "plain" / "README.md").read_text()


def test_a_tied_head_is_a_layer(tmp_path: Path) -> None:
    """It has no tensor; transformers makes a quantized layer of it, and fails."""
    source = quantizing.add_tokenizer(gguf_models.build("paddleocr-vl", tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    assert not [n for n in load_file(source / "model.safetensors") if "lm_head" in n], config
    out = tmp_path / "out"
    quantizing.quantize(source, "w8a16-ct", out)
    listed_now = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert not errors_of(out)
    (error,) = errors_of(listed(out, [entry for entry in listed_now if entry != "lm_head"]))
    assert error.name == "lm_head" and "does not name it" in error.message
