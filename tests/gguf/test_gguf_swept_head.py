"""GPTQ into GGUF: the head, by what the final norm makes of the states behind quantized blocks."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtool import native_gguf
from qtool.calibrating.stats import SiteStats
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.gguf_to_hf import convert_to_hf
from qtool.converting.resume import at_once
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.gptq.levels import together
from qtool.gguf.open import open_source, open_view
from qtool.gguf_mixtures.kinds import HEAD
from qtool.gguf_types import BY_NAME
from qtool.messages.summary import OUTPUTS
from qtool.methods import gptq
from qtool.quantizing.gguf import measure
from qtool.quantizing.gguf.gptq import sweep, sweeping
from qtool.recipe import recipe as recipes
from qtool.texts.calibration import Calibration
from qtool.transforms import rotate
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf
from support.gguf.gguf_runs import QUIET, sets, without_tokenizers, write
from support.models.small_models import checkpoint, models
from support.runs.killed_runs import Died, damage, dying

__all__ = ["models", "sets", "without_tokenizers"]


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[SiteStats]:
    """What a run measures of its head."""
    found: list[SiteStats] = []
    measured = sweeping.measured

    def watched(*given: Any) -> SiteStats | None:
        one = measured(*given)
        found.extend([] if one is None else [one])
        return one

    monkeypatch.setattr(sweeping, "measured", watched)
    return found


def texts_of(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """What a run is calibrated on."""
    found: list[Calibration] = []
    begin = measure.begin_with_bos

    def watched(*given: Any) -> Calibration:
        found.append(begin(*given))
        return found[-1]

    monkeypatch.setattr(measure, "begin_with_bos", watched)
    return found


def read_by_head(
    folder: Path, tokens: np.ndarray[Any, Any], embedding: np.ndarray[Any, Any] | None
) -> np.ndarray[Any, Any]:
    """The Gram matrix of the head's input in a checkpoint, as transformers runs it, float64.
    embedding: in place of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if embedding is not None:
        model.get_input_embeddings().weight = torch.nn.Parameter(torch.from_numpy(embedding))
    rows: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0]))
    with torch.no_grad():
        model(torch.from_numpy(tokens))
    hook.remove()
    inputs = rows[0].flatten(0, -2).double()
    gram: np.ndarray[Any, Any] = (inputs.T @ inputs).numpy()
    return gram


@pytest.mark.parametrize(
    ("name", "recipe", "chain"),
    [
        ("llama", "q4_k_m", "awq"),
        ("llama", "q4_0", "rotate"),
        ("llama", "iq3_xxs", ""),
        ("gemma3", "q5_k_m", ""),  # its embedding is the head
    ],
)
def test_codes_are_those_of_what_the_head_reads(
    name: str, recipe: str, chain: str, models: Path, sets: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is measured is what the file's own blocks leave; every byte follows from it."""
    seen, texts = seen_by(monkeypatch), texts_of(monkeypatch)
    model, out = checkpoint(models, name, "bfloat16").path, tmp_path / "out.gguf"
    head, module = HEAD, "lm_head.weight"
    chosen = ["method=gptq", f"transforms=[{chain}]"]
    if name == "gemma3":
        head, module = "token_embd.weight", "model.embed_tokens.weight"
    else:
        chosen.append("embedding_type=f32")  # blocks are fed by the original one
    made = write(model, out, recipe, *chosen, *sets)
    (stats,) = seen
    assert stats.gram is not None and stats.count == 8 * 32
    with GgufFile.open(out) as file:
        stored, kind = gguf_from_hf.raw(file, head), BY_NAME[file.tensors[head].type.name]
    back = tmp_path / "back"
    with closing(open_source(out)) as source:
        convert_to_hf(source, back, "float32", 1 << 40, QUIET, lambda _: at_once(back))
    recipe_of = recipes.load(recipe, chosen)
    view = open_view(model, recipe_of, None) if chain == "rotate" else None
    if view is not None:
        rotate.prepare(view, recipe_of.rotate, QUIET.say)
    weight = (view or Checkpoint.open(model)).float32(module)
    gram = read_by_head(back, texts[0].tokens, weight if head != HEAD else None)
    np.testing.assert_allclose(stats.gram, gram, rtol=0, atol=1e-4 * np.abs(gram).max())
    factor = gptq.factor(stats.gram, gptq.Options(), stats.count, together=together(kind))
    given = sweep.swept(np.ascontiguousarray(np.diagonal(stats.gram)), factor)
    np.testing.assert_array_equal(stored, sweep.blocks_of(weight, kind, given))
    (report,) = [layer for layer in made.layers if layer.name == head]
    assert report.of == OUTPUTS
    lost = weight - native_gguf.dequantize(stored, kind, weight.shape[1])
    error = np.trace(lost @ gram @ lost.T) / np.trace(weight @ gram @ weight.T)
    assert report.relative_error == pytest.approx(np.sqrt(error), rel=1e-3)
    plain = weight - native_gguf.dequantize(
        native_gguf.encode(weight, kind, None), kind, weight.shape[1]
    )
    assert np.trace(lost @ gram @ lost.T) < 0.9 * np.trace(plain @ gram @ plain.T)
    assert verify_artifact(out, against=model).ok


@pytest.mark.parametrize("what", ["swept-head", "hidden-1", "lacking"])
def test_what_is_damaged_is_done_again(
    what: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that died before the head was kept, or right after it."""
    model, chosen = checkpoint(models, "llama", "bfloat16").path, ("q4_0", "method=gptq", *sets)
    write(model, tmp_path / "whole", *chosen)
    out, folder = tmp_path / "out", tmp_path / ".out.partial"
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(3 if what == "hidden-1" else 4, patched)
        write(model, out, *chosen, threads=1)
    if what == "lacking":
        (folder / "swept-head").unlink()
    else:
        damage(folder / what, (folder / what).stat().st_size // 2)
    write(model, out, *chosen)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_type_without_levels_is_left(models: Path, sets: list[str], tmp_path: Path) -> None:
    model = checkpoint(models, "llama", "bfloat16").path
    made = write(model, tmp_path / "out", "q4_0", "method=gptq", "output_type=f16", *sets)
    assert HEAD not in {layer.name for layer in made.layers if layer.of == OUTPUTS}


def test_a_head_that_is_stored_beside_the_embedding_that_it_is(
    models: Path, sets: list[str], tmp_path: Path
) -> None:
    """Of tied weights many a checkpoint has both; the file has one, which is swept as well."""
    both, one = tmp_path / "both" / "model", tmp_path / "one" / "model"
    shutil.copytree(checkpoint(models, "llama", "bfloat16").path, both)
    config = json.loads((both / "config.json").read_text()) | {"tie_word_embeddings": True}
    (both / "config.json").write_text(json.dumps(config))
    shutil.copytree(both, one)
    tensors = load_file(both / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, both / "model.safetensors", metadata={"format": "pt"})
    del tensors["lm_head.weight"]
    save_file(tensors, one / "model.safetensors", metadata={"format": "pt"})
    made = [write(model, model / "out", "q4_0", "method=gptq", *sets) for model in (both, one)]
    assert (both / "out").read_bytes() == (one / "out").read_bytes()
    assert made[0].layers == made[1].layers
    assert "token_embd.weight" in {layer.name for layer in made[0].layers if layer.of == OUTPUTS}
