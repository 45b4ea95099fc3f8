"""GGUF to plain numbers of another dtype: what that does not hold is in the certificate."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from support.converting.converting import converted, first_block


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of numbers that each dtype holds and the other does not, as a file of each type."""
    folder = tmp_path_factory.mktemp("files")
    model = first_block(folder / "model")
    file = model / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    for name, value in (tensors := load_file(file)).items():
        tensors[name] = torch.randn(value.shape, generator=generator) * 0.05
    made = {}
    for kind, dtype in {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}.items():
        save_file({n: v.to(dtype) for n, v in tensors.items()}, file, metadata={"format": "pt"})
        made[kind] = folder / f"{kind}.gguf"
        request = GgufRequest("org/tiny", model, load(kind), made[kind], 1)
        run_gguf(request, Progress(quiet=True))
        (folder / f"{kind}.safetensors").write_bytes(file.read_bytes())
    return made


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("f32", "float16"), ("f32", "bfloat16"), ("f16", "bfloat16"), ("bf16", "float16")],
)
def test_every_tensor_that_is_rounded_is_named(
    kind: str, dtype: str, files: dict[str, Path], tmp_path: Path
) -> None:
    made = converted(files[kind], "hf", tmp_path / "out", dtype=dtype)
    source = load_file(files[kind].with_suffix(".safetensors"))
    found = Checkpoint.open(tmp_path / "out")
    expected = {}
    for name, value in source.items():
        before, after = value.float().numpy(), found.float32(name)
        if not np.array_equal(before, after):
            expected[name] = np.linalg.norm(before - after) / np.linalg.norm(before)
    assert "model.embed_tokens.weight" in expected and not made.certificate.exact
    said = {one.name: one for one in made.certificate.rounded}
    assert said.keys() == expected.keys()
    for name, one in said.items():
        assert one.relative_error == pytest.approx(expected[name], rel=1e-3)
        assert one.why == f"is {kind.upper()}, which {dtype} does not hold"


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_as_it_is_nothing_is_rounded(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    made = converted(files[kind], "hf", tmp_path / "out")
    assert made.certificate.exact
    for name, value in load_file(files[kind].with_suffix(".safetensors")).items():
        np.testing.assert_array_equal(
            Checkpoint.open(tmp_path / "out").float32(name), value.float().numpy()
        )
