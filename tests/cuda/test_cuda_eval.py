"""`eval --device cuda` with torch's part on the CPU and the kernels in the emulated grid: weights
that were dequantized there are the CPU's bit for bit, and so are the figures but for their sums."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils

import qtool
from qtool.calibrating.placed import Calls
from qtool.cuda.device import Device
from qtool.errors import UnsupportedError, UsageError
from qtool.messages.progress import Progress
from qtool.quality.evaluate import Protocol, evaluate
from qtool.quality.reading import OnDevice
from qtool.quality.weights import open_weights
from qtool.streaming import reading
from qtool.streaming.skeleton import Skeleton
from support.cuda.cuda_device import device, emulator
from support.models import arch_models
from support.models.arch_models import VOCABULARY
from support.models.small_models import checkpoint, models
from support.runs import quantizing

__all__ = ["device", "emulator", "models"]

UP = "model.layers.0.mlp.up_proj.weight"
# Of every format; which kernel reads a matrix, and whether one multiplies it: None is the CPU.
CASES = {
    "w4g128-rtn": ("across_4", True),
    "w4g128-rtn awq.layout=gemv": ("rows_4", False),
    "w4g128-rtn awq.layout=llm_awq": None,
    "w3g128-rtn": ("columns_3", False),
    "w4g128-rtn format=gptq": ("columns_4", True),
    "w4g128-gptq gptq.static_groups=false": ("columns_4", False),
    "w4a16-ct": ("rows_4", False),
    "w4a16-ct weights.bits=3 weights.symmetric=false": ("rows_3", False),
    "w8a8-dynamic": ("uint8", False),
    "fp8-dynamic": ("float8_e4m3fn", False),
    "fp8-block-hf": ("float8_e4m3fn", False),
    "nvfp4": ("fp4_e4m3fn", False),
    "mxfp4": ("fp4_e8m0", False),
    "int8-llmint8": None,
    "q4_k_m": ("q4_k", True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_weights(case: str, models: Path, tmp_path: Path, device: Device) -> None:
    recipe, *changes = case.split()
    samples = {"samples": 2, "length": 64}
    needs = {} if recipe.endswith(("rtn", "dynamic", "hf", "fp4", "_m")) else samples
    source = quantizing.first_blocks_of_tiny(models / "one", 1)
    out = qtool.quantize(source, recipe, tmp_path / "out", changes=changes, **needs).artifact
    with open_weights(Path(out)) as weights:
        found = OnDevice(weights, device).packed(UP)
        if CASES[case] is None:
            assert found is None
        else:
            assert found is not None
            task = found.dense(torch.empty(found.shape))
            name, fused = CASES[case]
            assert task.kernel == f"dequantize_{name}_f32"
            assert (found.times is not None) == fused
        skeleton = Skeleton.open(weights)
        here, there = skeleton.block(0), skeleton.block(0, OnDevice(weights, device))
        assert set(here.weights) == set(there.weights)
        for name, view in there.weights.items():
            assert view.device.type == device.place.type
            bits = view.cpu().numpy().view(np.uint32)
            np.testing.assert_array_equal(bits, here.weights[name].numpy().view(np.uint32), name)


FIGURES = {"w4g128-rtn": "", "w8a8-dynamic": "", "q4_k_m": "", "int8-llmint8": "threshold=2"}


@pytest.mark.parametrize(
    "recipe", [pytest.param("w4g128-rtn", marks=pytest.mark.slow), *list(FIGURES)[1:]]
)
def test_the_same_figures(recipe: str, models: Path, tmp_path: Path, device: Device) -> None:
    """However many windows are computed together: outliers of LLM.int8() are those of a window."""
    changes = [f"llm_int8.{FIGURES[recipe]}"] if FIGURES[recipe] else []
    options: dict[str, Any] = {"samples": 2, "length": 64} if changes else {}
    source = quantizing.first_blocks_of_tiny(models / "two", 2)
    made = qtool.quantize(source, recipe, tmp_path / "out", changes=changes, **options)
    protocol = Protocol("plain", quantizing.text_file(tmp_path / "text.txt"), 2, 384)
    rows = [
        evaluate(
            [Path(made.artifact)],
            source,
            protocol,
            1,
            Progress(quiet=True),
            cache=False,
            device=where,
        )[0]
        for where in (None, device)
    ]
    here, there = (row.found for row in rows)
    assert here["protocol"] == there["protocol"]
    for key in ("perplexity", "reference_perplexity"):
        assert there[key] == pytest.approx(here[key], rel=1e-4)
    assert there["kld"]["mean"] == pytest.approx(here["kld"]["mean"], rel=1e-2)


@pytest.mark.parametrize("name", [name for name in arch_models.CONFIGS if name != "opt"])
def test_nothing_of_a_head_stays_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for blocks: on the meta device, where what is partly elsewhere fails as on a GPU."""
    # One holds tensors back from there, as a table of the CPU needs; the other asks for numbers.
    monkeypatch.setattr(reading, "_names_meta", lambda _: False)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)

    class Nowhere:
        place = torch.device("meta")

        def copy(self, name: str, target: torch.Tensor) -> None:
            assert target.device.type == "meta"

    source = checkpoint(tmp_path, name)
    skeleton = Skeleton.open(source)
    stream = skeleton.embed(np.random.default_rng(2).integers(3, VOCABULARY, (2, 8)))
    buffers = {path: one.device for path, one in skeleton.model.named_buffers()}
    with skeleton.open_head(Nowhere()) as head:
        logits = head(stream.hidden[0])
    assert logits.shape == (2, 8, VOCABULARY) and logits.device.type == "meta"
    assert {path: one.device for path, one in skeleton.model.named_buffers()} == buffers
    if name in ("mixtral", "qwen3_moe"):
        return  # which rows an expert reads depends on numbers
    block = skeleton.block(0, Nowhere())
    meta = Device(Nowhere.place, print, "", 0)
    call = Calls(stream.calls, meta)[0][0]
    hidden = stream.hidden[0].to("meta")
    assert block.run(hidden, call).device.type == "meta"


def test_positions_are_looked_up_where_ids_are(tmp_path: Path) -> None:
    """In a table of the CPU, also where a head makes its tensors elsewhere by default."""
    weights = checkpoint(tmp_path, "opt")
    skeleton = Skeleton.open(weights)
    path = "model.decoder.embed_positions.weight"
    table, ids = skeleton.model.get_parameter(path), torch.tensor([[2, 5, 2]])
    (piece,) = skeleton.names.of_parameter[path]
    rows = reading.EmbeddingRows(weights, {id(table): (piece.checkpoint_name,)}, ids.numpy())
    with torch.device("meta"), rows:
        found = torch.nn.functional.embedding(ids, table)
    exact = torch.from_numpy(weights.float32(piece.checkpoint_name))
    assert torch.equal(found, exact[ids])


def test_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    text = quantizing.text_file(tmp_path / "text.txt")
    with pytest.raises(UnsupportedError, match="no NVIDIA GPU is here"):
        qtool.evaluate("nobody/nothing", text, device="cuda")
    with pytest.raises(UsageError, match='device="tpu": expected auto, cpu or cuda'):
        qtool.generate("nobody/nothing", "x", device="tpu")
