"""Whole runs in which tokens do not count alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qtool.calibrating import guidance
from qtool.calibrating.guidance import Guidance
from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.gguf_file import GgufFile
from qtool.messages.progress import Progress
from qtool.methods import gptq
from qtool.quantizing.calibrate import calibrate
from qtool.quantizing.gguf import kept_importance
from qtool.recipe.recipe import load
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from qtool.texts.calibration import calibration_tokens
from qtool.verification.run import verify_artifact
from support.calibrating.recorded_inputs import recorded
from support.gguf import gguf_from_hf
from support.gguf.gguf_runs import goes_on, without_tokenizers, write
from support.models.small_models import checkpoint, models
from support.runs import quantizing

__all__ = ["models", "without_tokenizers"]

MADE_UP = "gptq.gptaq=0.5"


def test_a_missing_gradient_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all blocks, with the codes of plain sums."""
    model = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")

    def failing(*_: Any) -> None:
        raise RuntimeError("derivative for aten::cummax is not implemented")

    plain = quantizing.quantize(
        model, "w4g128-gptq", tmp_path / "plain", "weights.group_size=32", *sets(text, 0.0)
    )
    monkeypatch.setattr(guidance, "_gradients", failing)
    made = quantizing.quantize(
        model, "w4g128-gptq", tmp_path / "out", "weights.group_size=32", *sets(text)
    )
    said = [note for note in made.summary.notes if "count alike" in note]
    assert len(said) == 1 and "in 3 of 3 blocks" in said[0] and "cummax" in said[0]
    for name, quant in plain.quants.items():
        assert np.array_equal(made.quants[name].codes, quant.codes), name


def sets(text: Path, power: float = 0.5) -> list[str]:
    return [
        f"gptq.guided={power}", f"calibration.source={text}",
        "calibration.samples=12", "calibration.length=64",
    ]  # fmt: skip


def test_codes_are_those_of_the_weighted_sums(tmp_path: Path) -> None:
    """Of the first block, whose inputs nothing has changed; but for last digits of sums."""
    model = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    settings = ["weights.group_size=32", *sets(text)]
    made = quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *settings)
    settings[1] = "gptq.guided=0"
    plain = quantizing.quantize(model, "w4g128-gptq", tmp_path / "plain", *settings)
    source = Checkpoint.open(model)
    skeleton = Skeleton.open(source)
    wanted = load("w4g128-gptq", settings).calibration
    stream = skeleton.embed(calibration_tokens(wanted, model).tokens)
    block = skeleton.block(0)
    found = Tracer().sites(block, stream)
    with Workers(1) as workers:
        passage = Passage.of(stream, workers, None)
        counts = Guidance(0.5, wanted.seed).weights(block, passage, found)
    assert len(counts) == 1
    rows = recorded(block, stream)
    for site in found.sites:
        x = rows[site.matrix]
        weighed = site.id in counts
        own = torch.cat([*counts[site.id]]).double() if weighed else torch.ones(len(x))
        factor = gptq.factor(((x * own[:, None]).T @ x).float().numpy(), gptq.Options(), len(x))
        for name in site.names:
            mine = made.quants[name]
            quant = gptq.quantize_with(source.float32(name), factor, mine.scheme, gptq.Options())
            assert np.mean(quant.codes == mine.codes) > 0.999, name
            assert np.array_equal(mine.codes, plain.quants[name].codes) is not weighed, name
    count = skeleton.count
    assert f"tokens were guided in {count} of {count} blocks" in "\n".join(made.summary.notes)
    assert guidance.GUIDED not in made.summary.notes
    assert verify_artifact(made.out, against=model).ok


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_gguf_is_swept_with_them(name: str, models: Path, tmp_path: Path) -> None:
    """q, k and v alone differ in the first block."""
    model = checkpoint(models, name, "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    found = []
    for power in (0.0, 0.5):
        out = tmp_path / f"{power}.gguf"
        write(model, out, "q4_0", "method=gptq", *sets(text, power))
        assert verify_artifact(out, against=model).ok
        with GgufFile.open(out) as file:
            names = [one for one in file.tensors if one.startswith("blk.0.") and "norm" not in one]
            found.append({one: gguf_from_hf.raw(file, one).tobytes() for one in names})
    differ = {one for one in names if found[0][one] != found[1][one]}
    parts = ["attn_qkv"] if name == "phi3" else ["attn_q", "attn_k", "attn_v"]
    assert {f"blk.0.{part}.weight" for part in parts} <= differ
    assert not any("ffn_up" in one for one in differ)


@pytest.mark.parametrize("how", ["transforms=[]", "transforms=[awq]", MADE_UP])
def test_importance_stays_of_plain_sums(
    how: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first block, which both runs read alike; after scales of AWQ these are others."""
    model = checkpoint(models, "llama", "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    keep, kept = kept_importance.keep, list[dict[tuple[str, ...], Any]]()

    def watched(space: Any, index: int, block: Any, *rest: Any, **more: Any) -> None:
        if index == 0:
            kept.append({one.names: (one.count, one.square) for one in block})
        keep(space, index, block, *rest, **more)

    monkeypatch.setattr(kept_importance, "keep", watched)
    for power in (0.0, 0.5):
        more = ["method=gptq", how, "smooth.grid=1", *sets(text, power)]
        write(model, tmp_path / f"{power}.gguf", "q4_0", *more)
    plain, guided = kept
    assert plain.keys() == guided.keys() and len(plain) >= 4
    for names, (count, square) in plain.items():
        assert guided[names][0] == count
        ratio = guided[names][1] / square
        # Scales are powers of two.
        assert (np.log2(ratio) % 1 == 0).all() if "awq" in how else (ratio == 1).all()


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param(
            "w4g128-awq-gptq", ["weights.group_size=32", "awq.grid=2"], marks=pytest.mark.slow
        ),
        pytest.param("w4g128-gptq", ["weights.group_size=32", MADE_UP], marks=pytest.mark.slow),
        pytest.param("q4_0", ["method=gptq"], marks=pytest.mark.slow),
        pytest.param("q4_0", ["method=gptq", MADE_UP], marks=pytest.mark.slow),
    ],
)
def test_killed_it_goes_on_to_the_same_bytes(
    recipe: str, more: list[str], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between blocks, on another number of threads."""
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = [*more, *sets(quantizing.text_file(tmp_path / "text.txt"))]

    goes_on(1, model, recipe, chosen, tmp_path, monkeypatch)


def test_statistics_of_a_file_count_tokens_alike(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    stats, needs = tmp_path / "stats", frozenset({"gram"})
    settings = load("w4g128-gptq", chosen).calibration
    calibrate(Checkpoint.open(model), stats, settings, needs, 2, Progress(quiet=True))
    found = []
    for power in (0.5, 0.0):
        more = [*chosen, f"gptq.guided={power}"]
        out = tmp_path / f"{power}"
        found.append(quantizing.quantize(model, "w4g128-gptq", out, *more, stats=stats))
    guided, plain = found
    assert all(np.array_equal(q.codes, plain.quants[n].codes) for n, q in guided.quants.items())
    assert any("gptq.guided" in n and "no text" in n for n in guided.summary.notes)
    assert not any("gptq.guided" in note for note in plain.summary.notes)
