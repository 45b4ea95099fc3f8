"""The card and the provenance of an artifact: what they say, and what they must not depend on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from qtool import __version__, hub
from qtool.cards import modelcard
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.messages.summary import LayerReport
from qtool.methods import rtn
from qtool.planning.plan import make_plan
from qtool.provenance import record as provenance
from qtool.provenance.outcome import Outcome
from qtool.recipe.recipe import Recipe, load
from qtool.runs import each_tensor
from qtool.scheme import Scheme
from support.models import header_files

LAYERS = [
    LayerReport(f"model.layers.{i}.mlp.{part}.weight", "w4 g128 asym", 0.01 * (i + 1), "outputs")
    for i in range(12)
    for part in ("up_proj", "down_proj")
]


def make(
    folder: Path, recipe: Recipe, model: str, config: dict[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    header_files.write(folder, header_files.llama(), config)
    checkpoint = Checkpoint.open(folder)
    calibration = {"digest": "sha256:00", "samples": 4} if recipe.calibrates else None
    outcome = Outcome(LAYERS, ["v to o of block 3 left out"], calibration)
    record = provenance.record(recipe, checkpoint, model, outcome)
    plan = make_plan(recipe, checkpoint)
    return record, modelcard.render(plan, checkpoint, record, LAYERS)


def front_matter(card: str) -> dict[str, Any]:
    found = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_card_says_what_was_done(tmp_path: Path) -> None:
    record, card = make(tmp_path / "m", load("w4g128-awq", ["awq.grid=10"]), "llama-7b")
    assert front_matter(card) == {
        "base_model": "huggyllama/llama-7b",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "quantized_by": "qtool",
        "tags": ["qtool", "quantized", "awq", "4-bit"],
    }
    assert "recipe `w4g128-awq` `--set awq.grid=10`" in card
    assert "AWQ scale search, then rounding to nearest with clipped ranges" in card
    assert "14 matrices w4 g128 asym" in card and "14 quantized, 7 dense, 0 dropped" in card
    assert "vllm serve DIR" in card and "from_pretrained" in card
    assert "| `model.layers.*.mlp.up_proj.weight` | outputs | 12 | 0.0700 | 0.1200 |" in card
    assert card.count("| w4 g128 asym |") == modelcard.WORST_SHOWN
    assert "- v to o of block 3 left out" in card
    # The errors of all layers are in qtool.json; the card shows the worst.
    shown = {key: value for key, value in record.items() if key != "layers"}
    files = shown["source"].pop("files")
    assert json.loads(card.split("```json\n")[1].split("```")[0]) == shown
    assert files.keys() == {"model.safetensors", "config.json"} and record["set"] == ["awq.grid=10"]
    assert len(record["layers"]) > modelcard.WORST_SHOWN
    assert record["qtool_version"] == __version__
    assert record["source"]["name"] == str(hub.ALIASES["llama-7b"])
    assert record["source"]["digest"] == f"sha256:{Checkpoint.open(tmp_path / 'm').digest()}"
    assert record["recipe"]["awq"]["grid"] == 10
    assert set(record["environment"]) == {"cpu", "torch", "numpy", "transformers"}


def test_what_engines_refuse_is_not_advised(tmp_path: Path) -> None:
    for name, *sets in (
        ("w4g128-gptq", "weights.symmetric=false"),
        ("w4g128-awq", "awq.layout=gemv"),
    ):
        _, card = make(tmp_path / "m", load(name, sets), "./m")
        assert "vllm serve" not in card
    _, card = make(tmp_path / "m", load("w4g128-gptq"), "./m")
    assert "vllm serve DIR" in card
    _, card = make(tmp_path / "m", load("w8-rtn", ["method=none", "format=dense"]), "./m")
    assert "quantized" not in front_matter(card)["tags"]


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
def test_nothing_depends_on_the_host(recipe: str, tmp_path: Path) -> None:
    """Neither on the folder's name nor on where the calibration text lies."""
    texts = [tmp_path / name for name in ("one.txt", "two.txt")]
    made = []
    for text in texts:
        text.write_text("text")
        folder = tmp_path / f"{text.stem}-model"
        loaded = load(recipe, [f"calibration.source={text}"])
        made.append(make(folder, loaded, str(folder), {"_name_or_path": "/home/ann/llama"}))
    assert made[0] == made[1]
    record, card = made[0]
    assert str(tmp_path) not in card and "/home" not in card
    assert record["source"]["name"] is None and "base_model" not in front_matter(card)
    assert record["recipe"]["calibration"]["source"] == "file"
    assert (record["environment"] is None) == (recipe == "w4g128-rtn")


def test_only_the_user_names_the_source(tmp_path: Path) -> None:
    """A fine-tune's config often names the model that it was made of."""
    config = {"_name_or_path": "ann/llama"}
    record, card = make(tmp_path / "m", load("w4g128-rtn"), str(tmp_path / "m"), config)
    assert record["source"]["name"] is None and "base_model" not in front_matter(card)
    assert "ann/llama" not in card


def test_a_matrix_error_is_summed_in_double_precision() -> None:
    """A sum in float32 depends on its order, which BLAS chooses by the number of threads."""
    weight = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    quant = rtn.quantize(weight, None, Scheme(4, 128, False), rtn.Options()).quant
    lost = (weight - quant.dequantize()).astype(np.float64)
    exact = np.sqrt((lost**2).sum() / (weight.astype(np.float64) ** 2).sum())
    assert each_tensor.frobenius_error(weight, quant.dequantize()) == pytest.approx(exact, rel=2e-9)
    assert each_tensor.frobenius_error(weight * 0, quant.dequantize()) == 0
