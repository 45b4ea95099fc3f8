"""Small models into GGUF files in one run, and runs that die."""

import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.calibrating.sites import refuse_conv1d
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart
from qtool.cuda.device import Device
from qtool.gguf.to_hf import files
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.quantizing.gguf.gptq.sweeping import Sweeping
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe import recipe as recipes
from qtool.recipe.gguf import GgufRecipe
from qtool.runs.gguf_request import GgufRequest
from qtool.streaming.skeleton import Skeleton
from qtool.transforms import awq
from support.gguf import gguf_from_hf, gguf_models
from support.runs import quantizing
from support.runs.killed_runs import Died, dying

QUIET = Progress(quiet=True)
# Those of gguf_models that no forward pass runs through, and what is said of them.
NOT_STREAMED = {
    **dict.fromkeys(("gpt2", "gpt2-inner"), "a Conv1D"),
    "gpt-oss-mxfp4": "no tensor for",  # a view of it can be
    "hrm-text": "several times",
    **dict.fromkeys(
        ("kormo", "minicpm", "minicpm-long", "ling", "ling-2", "smallthinker",
         "smallthinker-windows", "internlm2", "baichuan", "chatglm", "deci", "deci-linear",
         "nemotron-puzzle"),
        "transformers has no causal language model",
    ),
}  # fmt: skip
STREAMED = [name for name in gguf_models.MODELS if name not in NOT_STREAMED]


@pytest.fixture(autouse=True)
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models have one that llama.cpp does not know; and few scales to choose from."""
    monkeypatch.setattr(awq, "_WEIGHT_EXPONENTS", (0.0, 0.5))
    gguf_from_hf.no_vocabulary(monkeypatch)
    monkeypatch.setattr(files, "tokenizer_files", lambda _: {})


def write(
    model: Path,
    out: Path,
    recipe: str,
    *sets: str,
    threads: int = 2,
    device: Device | None = None,
) -> Summary:
    """`qtool quantize MODEL --recipe RECIPE --set SETS -o OUT`."""
    loaded = recipes.load(recipe, sets)
    assert isinstance(loaded, GgufRecipe)
    return run_gguf(GgufRequest(str(model), model, loaded, out, threads, device=device), QUIET)


def goes_on(
    lines: int,
    model: Path,
    recipe: str,
    chosen: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that ends behind so many lines of its journal goes on, on other threads, to the bytes
    of one that does not. A recipe whose name begins with q makes GGUF."""

    def made(name: str, threads: int) -> dict[str, bytes]:
        out = folder / name
        if recipe.startswith("q"):
            write(model, out, recipe, *chosen, threads=threads)
            return {"": out.read_bytes()}
        quantizing.quantize(model, recipe, out, *chosen, threads=threads)
        return quantizing.files(out)

    whole = made("whole", 1)
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(lines, patched)
        made("killed", 3)
    assert made("killed", 3) == whole


def streamed(name: str, folder: Path) -> Skeleton:
    """One of gguf_models, of those that can be calibrated."""
    skeleton = Skeleton.open(apart(Checkpoint.open(gguf_models.build(name, folder))))
    refuse_conv1d(skeleton.block(0).module, name)
    return skeleton


def fed_blocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Weights of decoder blocks once they are swept, by checkpoint name; filled by write()."""
    fed: dict[str, torch.Tensor] = {}
    original = Sweeping.block

    def watched(self: Sweeping, block: Any, *rest: Any) -> Any:
        yield from original(self, block, *rest)
        fed.update({key: value.clone() for key, value in block.weights.items()})

    monkeypatch.setattr(Sweeping, "block", watched)
    return fed


def begun(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *chosen: str) -> Path:
    """A file that is not there yet: its run died after a block. Made to its end it is `whole`."""
    write(model, folder / "whole", *chosen)
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(1, patched)
        write(model, folder / "out", *chosen, threads=1)
    return folder / "out"


def begun_once(
    models: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *chosen: str
) -> Path:
    """The same, made once of a model and settings: later ones are copies of what it left."""
    kept = models / f"begun {zlib.crc32(repr((model, chosen)).encode()):x}"
    if kept.exists():
        shutil.copytree(kept, folder, dirs_exist_ok=True)
    else:
        begun(model, folder, monkeypatch, *chosen)
        shutil.copytree(folder, kept)
    return folder / "out"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A text, and how little of it is used."""
    text = quantizing.text_file(tmp_path_factory.mktemp("text") / "text.txt", 6000)
    return [f"calibration.source={text}", "calibration.samples=8", "calibration.length=32"]
