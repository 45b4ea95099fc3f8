"""GGUF files encoded on a device, which is the emulator here: the CPU's files, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qtool.cuda.staging import CudaPlace, Place
from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.importance.imatrix import write_importance
from qtool.gguf_types import BF16, F16, F32, BlockType
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.quantizing.gguf import on_device
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.file import shipped
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from support.cuda.cuda_emulation import EmulatedPlace, Emulator, OnGpu, emulator
from support.gguf import gguf_files
from support.runs.quantizing import text_file

__all__ = ["emulator"]

Make = Callable[[], Place]


@pytest.fixture
def places(emulator: Emulator) -> tuple[Make, list[EmulatedPlace]]:
    """What makes a place, and the emulated ones that were made."""
    made: list[EmulatedPlace] = []

    def make() -> Place:
        if isinstance(emulator, OnGpu):
            return CudaPlace(0)
        made.append(EmulatedPlace(emulator))
        return made[-1]

    return make, made


def quantize(
    source: Path,
    recipe: str,
    out: Path,
    places: Make | None = None,
    imatrix: Path | None = None,
    fresh: bool = True,
) -> Summary:
    loaded = load(recipe, ["importance=false"])
    assert isinstance(loaded, GgufRecipe)
    request = GgufRequest(
        "m", source, loaded, out, 3, imatrix, requantize=True, fresh=fresh, places=places
    )
    return run_gguf(request, Progress(quiet=True))


def both(
    source: Path, recipe: str, places: Make, folder: Path, imatrix: Path | None = None
) -> None:
    out = [folder / f"{recipe}-{where}.gguf" for where in ("here", "there")]
    here = quantize(source, recipe, out[0], imatrix=imatrix)
    there = quantize(source, recipe, out[1], places, imatrix)
    assert out[0].read_bytes() == out[1].read_bytes()
    assert here.layers == there.layers  # errors, to the last bit
    assert here.notes == there.notes


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("q4_k_m", "experts"), ("q5_1", "experts")]
    + [(recipe, "dense") for recipe in ("q2_k", "q3_k_m", "iq4_xs", "iq3_s")]
    + [pytest.param(recipe, "dense", marks=pytest.mark.slow) for recipe in ("q4_k_m", "iq1_m")],
)
def test_files_are_the_cpus(
    recipe: str, name: str, places: tuple[Make, list[EmulatedPlace]], tmp_path: Path
) -> None:
    """Experts have importance of their own."""
    source = gguf_files.model(tmp_path / "x.gguf", gguf_files.SMALL[name], 1)
    imatrix = tmp_path / "imatrix.gguf"
    write_importance(imatrix, gguf_files.importance(source))
    both(source, recipe, places[0], tmp_path, imatrix)
    if places[1]:
        launched = {kernel for place in places[1] for kernel in place.launched}
        assert "measure_squares" in launched
        assert ("measure_rows" in launched) == (recipe == "q5_1")


ROUNDED = [
    name for name in shipped() if isinstance(found := load(name), GgufRecipe) and not found.sweeps
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ROUNDED)
def test_every_recipe_makes_the_cpus_file(
    recipe: str, places: tuple[Make, list[EmulatedPlace]], tmp_path: Path
) -> None:
    """But for those whose codes are chosen by a sweep."""
    source = gguf_files.model(tmp_path / "x.gguf", layers=8)
    imatrix = tmp_path / "imatrix.gguf"
    write_importance(imatrix, gguf_files.importance(source))
    both(source, recipe, places[0], tmp_path, imatrix)


@pytest.mark.parametrize("type_", [F32, BF16, F16], ids=lambda type_: type_.name)
def test_sources_and_batches(
    type_: BlockType,
    places: tuple[Make, list[EmulatedPlace]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain numbers, and blocks dequantized first; batches of one piece and of several."""
    source = gguf_files.model(tmp_path / "x.gguf", layers=1, type_=type_)
    both(source, "q4_k_s", places[0], tmp_path)
    quantize(source, "q8_0", tmp_path / "q8_0.gguf")
    monkeypatch.setattr(on_device, "BATCH_WEIGHTS", 1 << 12)
    both(tmp_path / "q8_0.gguf", "q6_k", places[0], tmp_path)


def test_a_checkpoint_as_the_source(
    places: tuple[Make, list[EmulatedPlace]], tmp_path: Path
) -> None:
    """Rows that no file has as they are: read into memory of their own first."""
    both(tiny_folder(), "q8_0", places[0], tmp_path)


def test_batches_are_pieces_of_one_tensor_in_order(tmp_path: Path) -> None:
    from contextlib import closing

    from qtool.gguf.open import open_source
    from qtool.gguf.pieces import Pieces
    from qtool.planning.gguf.plan import make_gguf_plan

    source = gguf_files.model(tmp_path / "x.gguf", 4, 2)
    recipe = load("q4_k_m", ["importance=false"])
    assert isinstance(recipe, GgufRecipe)
    with closing(open_source(source)) as opened:
        plan = make_gguf_plan(recipe, opened, None, threads=1)
        pieces = Pieces(plan.tensors)
        numbers = [n for n in range(len(pieces)) if n % 11 != 5]
        found = on_device.batches(plan.tensors, pieces, numbers)
    assert [n for batch in found for n in batch.pieces] == numbers
    assert max(len(batch.pieces) for batch in found) > 1
    for batch in found:
        tensors = {pieces[n].tensor for n in batch.pieces}
        assert len(tensors) == 1
        assert batch.on_device == on_device.encodes(plan.tensors[tensors.pop()])
        assert batch.on_device or len(batch.pieces) == 1


def test_what_was_swept_is_written_as_it_is(
    places: tuple[Make, list[EmulatedPlace]], tmp_path: Path
) -> None:
    """Here by the CPU, for a device see test_cuda_swept.py. The embedding, which is not swept, is
    encoded there: the CPU's bytes, and its errors."""
    text = text_file(tmp_path / "text.txt", 4000)
    sets = ["method=gptq", f"calibration.source={text}", "calibration.samples=2",
            "calibration.length=32"]  # fmt: skip
    loaded = load("q4_k_m", sets)
    assert isinstance(loaded, GgufRecipe)
    made = []
    for where in (None, places[0]):
        out = tmp_path / f"{len(made)}.gguf"
        request = GgufRequest("m", tiny_folder(), loaded, out, 2, places=where)
        made.append((run_gguf(request, Progress(quiet=True)), out.read_bytes()))
    assert made[0][1] == made[1][1] and made[0][0].layers == made[1][0].layers
    assert made[0][0].notes == made[1][0].notes
    if places[1]:
        launched = [kernel for place in places[1] for kernel in place.launched]
        assert {k for k in launched if k.startswith("encode")} == {"encode_q6_k"}


@pytest.mark.parametrize(("odd", "error"), [(np.nan, SourceError), (1e30, FormatError)])
def test_weights_that_cannot_be_encoded(
    odd: float,
    error: type[Exception],
    places: tuple[Make, list[EmulatedPlace]],
    tmp_path: Path,
) -> None:
    """The sentence of the CPU, and nothing under the name."""
    source = gguf_files.model(tmp_path / "x.gguf", layers=1, type_=F32)
    with GgufFile.open(source) as file:
        info = file.tensors["blk.0.ffn_down.weight"]
        at = info.start + 4 * (2 * info.shape[-1] + 9)
    with source.open("r+b") as raw:
        raw.seek(at)
        raw.write(np.float32(odd).tobytes())
    said = []
    for make in (None, places[0]):
        with pytest.raises(error, match=r"blk\.0\.ffn_down\.weight") as told:
            quantize(source, "q8_0", tmp_path / "y.gguf", make)
        said.append(str(told.value))
        assert not (tmp_path / "y.gguf").exists()
    assert said[0] == said[1]


def test_the_cpu_goes_on_with_what_a_gpu_began(emulator: Emulator, tmp_path: Path) -> None:
    """What is kept of a run that dies is the same on both."""
    if isinstance(emulator, OnGpu):
        pytest.skip("the emulated place dies")
    source = gguf_files.model(tmp_path / "x.gguf", 4, 2)
    quantize(source, "q4_k_m", tmp_path / "whole.gguf")
    calls = 0

    class Dying(EmulatedPlace):
        def finish(self) -> None:
            nonlocal calls
            calls += 1
            if calls > 3:
                raise KeyboardInterrupt
            super().finish()

    with pytest.raises(KeyboardInterrupt):
        quantize(source, "q4_k_m", tmp_path / "y.gguf", lambda: Dying(emulator))
    assert not (tmp_path / "y.gguf").exists()
    assert any("partial" in path.name for path in tmp_path.iterdir())
    quantize(source, "q4_k_m", tmp_path / "y.gguf", fresh=False)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
