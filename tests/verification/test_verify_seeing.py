"""A decoder alone against the model of which it is a part, which also sees."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact
from support.converting.converting import converted, first_block
from support.gallery import raw
from support.gguf import gguf_from_hf
from support.runs.quantizing import quantize

# How a checkpoint calls its decoder: the outer class, what stands before its names, those beside.
KINDS = {
    "as it was": ("Mistral3ForConditionalGeneration", "language_model.{}", ""),
    "as it is": ("Mistral3ForConditionalGeneration", "model.language_model.{}", "model."),
    "no name": ("Qwen2VLForConditionalGeneration", "{}", ""),
}
EYES = {"Mistral3": "vision_tower.patch_conv.weight", "Qwen2VL": "visual.patch_embed.weight"}


def seeing(decoder: Path, out: Path, kind: str) -> Path:
    """The model that a decoder is a part of."""
    outer, inside, beside = KINDS[kind]
    shutil.copytree(decoder, out)
    inner = json.loads((out / "config.json").read_text())
    del inner["architectures"]
    config = {"text_config": inner} if kind != "no name" else inner
    config |= {"architectures": [outer], "vision_config": {"hidden_size": 16}}
    config["tie_word_embeddings"] = inner["tie_word_embeddings"]
    (out / "config.json").write_text(json.dumps(config))
    with raw.edited(out) as tensors:
        for name in list(tensors):
            plain = name.removeprefix("model.") if beside else name
            tensors[inside.format(plain)] = tensors.pop(name)
        eye = EYES[outer.removesuffix("ForConditionalGeneration")]
        tensors[beside + eye] = raw.Raw("BF16", (16, 3, 4, 4), bytes(2 * 16 * 3 * 4 * 4))
    return out


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    return classed(first_block(tmp_path / "decoder"), "Mistral", sliding_window=None)


def classed(folder: Path, name: str, **more: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [f"{name}ForCausalLM"], **more}
    path.write_text(json.dumps(config))
    return folder


def said(path: Path, source: Path) -> list[Finding]:
    return list(verify_artifact(path, against=source).findings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_is_compared(kind: str, decoder: Path, tmp_path: Path) -> None:
    source = seeing(decoder, tmp_path / "sees", kind)
    if kind == "no name":
        classed(decoder, "Qwen2", model_type="qwen2")
    out = tmp_path / "out"
    quantize(decoder, "w4g64-rtn", out)
    verdict = verify_artifact(out, against=source)
    finding, made_of = verdict.findings
    assert (finding.severity, finding.check) == ("note", "against")
    assert (made_of.severity, made_of.check) == ("note", "made-of")
    assert "the source's decoder alone, without 1 tensor of the source's vision" in finding.message
    assert len(verdict.layers) == 7
    with raw.edited(out) as tensors:
        name = "model.layers.0.mlp.down_proj.scales"
        tensors[name] = tensors[name].changed(tensors[name].array * np.float16(1.5))
    assert "layer-error" in {f.check for f in said(out, source) if f.severity == "error"}


def test_one_that_went_through_gguf(decoder: Path, tmp_path: Path) -> None:
    """All of the settings too, some of which lie in text_config."""
    source = seeing(decoder, tmp_path / "sees", "as it is")
    gguf_from_hf.write(source, tmp_path / "m.gguf", "bf16")
    converted(tmp_path / "m.gguf", "hf", tmp_path / "out")
    assert [(f.severity, f.check) for f in said(tmp_path / "out", source)] == [("note", "against")]
    classed(tmp_path / "out", "Mistral", rope_theta=5e5, rope_parameters={"rope_theta": 5e5})
    assert {f.check for f in said(tmp_path / "out", source) if f.severity == "error"} == {
        "settings"
    }


def test_another_model_stays_one(decoder: Path, tmp_path: Path) -> None:
    source = seeing(decoder, tmp_path / "sees", "as it is")
    with raw.edited(source) as tensors:
        for name in [name for name in tensors if "layers" in name]:
            tensors[name.replace("layers", "h")] = tensors.pop(name)
    errors = [f.message for f in said(decoder, source) if f.severity == "error"]
    assert any("it was made of another model" in message for message in errors)


@pytest.mark.parametrize("kind", KINDS)
def test_eyes_that_a_tool_lost_are_missed(kind: str, decoder: Path, tmp_path: Path) -> None:
    """A config.json of the whole model is no decoder's."""
    source = seeing(decoder, tmp_path / "sees", kind)
    shutil.copytree(source, tmp_path / "blind")
    with raw.edited(tmp_path / "blind") as tensors:
        del tensors[next(name for name in tensors if "vis" in name)]
    errors = [f.message for f in said(tmp_path / "blind", source) if f.severity == "error"]
    assert any("make it again with a tool that keeps them" in message for message in errors)


@pytest.mark.parametrize("gguf", [False, True])
@pytest.mark.parametrize("kind", ["as it was", "as it is"])
def test_diff_knows_the_decoder(kind: str, gguf: bool, decoder: Path, tmp_path: Path) -> None:
    source = seeing(decoder, tmp_path / "sees", kind)
    if gguf:
        gguf_from_hf.write(source, tmp_path / "m.gguf", "bf16")
    other = tmp_path / "m.gguf" if gguf else decoder
    for pair, counts in (((source, other), (1, 0)), ((other, source), (0, 1))):
        words = ["diff", *map(str, pair)]
        found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert (found["counts"]["only-a"], found["counts"]["only-b"]) == counts
        assert found["counts"]["values"] == 0
        assert not {one["key"] for one in found["metadata"]} & {"hidden_size", "rms_norm_eps"}
        assert "named as it would be alone" in CliRunner().invoke(app, words).stdout
