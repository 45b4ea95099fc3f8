"""`qtool verify --against` of the shipped model: errors explained, folds undone, damage named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from qtool.cli.verify import lines
from qtool.hub import resolve, tiny_folder
from qtool.messages.progress import Progress
from qtool.provenance.digests import add_digests
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from qtool.verification.finding import Finding, Verdict
from qtool.verification.run import verify_artifact
from support.runs.quantizing import quantize

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    where = tmp_path_factory.mktemp("made")
    done: dict[str, Path] = {}

    def get(recipe: str, *sets: str) -> Path:
        name = "_".join([recipe, *sets]).replace("=", "-")
        if name not in done:
            done[name] = where / name
            quantize(resolve("tiny"), recipe, done[name], *sets)
        return done[name]

    return get


def damaged(folder: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with other tensors."""
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    out.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, torch.Tensor] = load_torch(folder / "model.safetensors")
    change(tensors)
    save_torch({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors")
    if (out / "qtool.json").exists():
        add_digests(out)  # the other checks are to find it
    return out


def against_tiny(folder: Path) -> Verdict:
    return verify_artifact(folder, against=resolve("tiny"), threads=1)


def errors(verdict: Verdict) -> dict[str, Finding]:
    return {f.check: f for f in verdict.findings if f.severity != "note"}


FEW = ("calibration.samples=4", "calibration.length=32")


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("w4g64-rtn", ()),
        ("w4g128-rtn", ("format=gptq",)),
        pytest.param("w8a8-dynamic", (), marks=pytest.mark.slow),
        ("fp8-block", ()),
        ("nvfp4", ()),
        ("w4g64-awq", (*FEW, "awq.grid=4")),
        pytest.param("w2g64-gptq", FEW, marks=pytest.mark.slow),
    ],
)
def test_what_recipes_make_is_explained(
    recipe: str, sets: tuple[str, ...], made: Callable[..., Path]
) -> None:
    verdict = against_tiny(made(recipe, *sets))
    assert verdict.ok and not errors(verdict), verdict.findings
    assert len(verdict.layers) == 28
    for layer in verdict.layers:
        assert layer.expected is not None and 0 < layer.relative_error < 3 * layer.expected


def test_layers_that_changed_places(made: Callable[..., Path], tmp_path: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            one, other = f"{UP}.{part}", f"{UP.replace('1', '2')}.{part}"
            tensors[one], tensors[other] = tensors[other], tensors[one]

    verdict = against_tiny(damaged(made("w4g64-rtn"), tmp_path / "out", swap))
    (found,) = [f for f in verdict.findings if f.severity != "note"]
    assert found.check == "swapped" and "up_proj" in found.name
    assert found.message.startswith("2 matrices stand under names of another: ")


def test_a_matrix_that_is_another_one(made: Callable[..., Path], tmp_path: Path) -> None:
    def turn(tensors: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            tensors[f"{UP}.{part}"] = tensors[f"{UP}.{part}"].flip(1)

    found = errors(against_tiny(damaged(made("w4g64-rtn"), tmp_path / "out", turn)))["layer-error"]
    assert "1 matrix farther" in found.message and "up_proj" in found.name
    assert "by qtool.json the artifact was made of this model" in found.message


def test_one_matrix_among_others_is_damaged_and_not_of_another_model(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].flip(0)

    source = damaged(resolve("tiny"), tmp_path / "source", swap)
    out = damaged(made("w4g64-rtn"), tmp_path / "out", lambda tensors: None)
    (out / "qtool.json").unlink()
    found = errors(verify_artifact(out, against=source, threads=1))["layer-error"]
    assert found.message.endswith("; the others are near it: fetch or make the artifact again")


def test_codes_that_were_zeroed_out(made: Callable[..., Path], tmp_path: Path) -> None:
    def hole(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.weight_packed"].reshape(-1)[3000:3100] = 0

    verdict = against_tiny(damaged(made("w4a16-ct"), tmp_path / "out", hole))
    said = [f.message for f in verdict.findings if f.severity == "error"]
    assert any("have codes that are others by whole steps" in message for message in said)
    assert not any(f.check == "zeros" for f in verdict.findings)


def test_scales_that_are_no_numbers_are_told_of_once(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.scales"][0, 0] = float("nan")

    verdict = against_tiny(damaged(made("w4g64-rtn"), tmp_path / "out", spoil))
    assert [(f.check, f.name) for f in verdict.findings] == [("scales", f"{UP}.weight")]
    assert "text" not in verdict.findings[0].message  # which rounding to the nearest reads none of
    (layer,) = [layer for layer in verdict.json()["layers"] if layer["name"] == f"{UP}.weight"]
    assert layer["relative_error"] is None
    json.dumps(verdict.json(), allow_nan=False)
    assert "median 1" in lines(verdict)[-2]


def test_a_model_of_other_weights(made: Callable[..., Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("proj.weight"):
                tensors[name] = tensors[name].flip(0)

    source = damaged(resolve("tiny"), tmp_path / "flipped", change)
    verdict = verify_artifact(made("w4g64-rtn"), against=source, threads=1)
    assert "made of another model than this one" in errors(verdict)["layer-error"].message


def test_the_exact_verdict_on_zeros(made: Callable[..., Path], tmp_path: Path) -> None:
    """Of one matrix by its groups; of all, as the other convention."""
    artifact = made("w4g128-rtn", "format=gptq")

    def one(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.qzeros"] ^= 1  # the lowest zero of each word

    verdict = against_tiny(damaged(artifact, tmp_path / "one", one))
    assert errors(verdict)["zeros"].name == f"{UP}.weight"
    assert "of 1 matrix" in errors(verdict)["zeros"].message

    config = json.loads((artifact / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    out = damaged(artifact, tmp_path / "all", lambda tensors: None)
    (out / "config.json").write_text(json.dumps(config))
    found = [f for f in against_tiny(out).findings if f.check == "zero-convention"]
    assert any("against the source, the zeros of 28 matrices" in f.message for f in found)


def test_halves_of_folds(made: Callable[..., Path], tmp_path: Path) -> None:
    """A norm that was divided and no reader multiplied; and a reader that was not."""
    artifact = made("w4g64-rtn")
    name = "model.layers.2.input_layernorm.weight"

    def divide(tensors: dict[str, Any]) -> None:
        tensors[name] /= 1 + tensors[name].new_ones(256).cumsum(0) / 256

    verdict = against_tiny(damaged(artifact, tmp_path / "norm", divide))
    assert errors(verdict)["folds"].name == name and not verdict.ok

    awq = made("w4g64-awq", *FEW, "awq.grid=4")
    plain = load_file_bits(artifact)

    def undo(tensors: dict[str, Any]) -> None:
        import torch

        for part in ("qweight", "qzeros", "scales"):
            key = f"model.layers.2.self_attn.k_proj.{part}"
            tensors[key] = torch.from_numpy(plain[key])

    verdict = against_tiny(damaged(awq, tmp_path / "reader", undo))
    assert errors(verdict)["folds"].name == "model.layers.2.self_attn.k_proj.weight"


def load_file_bits(folder: Path) -> dict[str, NDArray[Any]]:
    import torch
    from safetensors.torch import load_file as load_torch

    tensors = load_torch(folder / "model.safetensors")
    return {k: v.numpy() for k, v in tensors.items() if v.dtype != torch.bfloat16}


def test_a_dense_tensor_that_changed(made: Callable[..., Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][100:200] = 0.5

    verdict = against_tiny(damaged(made("w4g64-rtn"), tmp_path / "out", change))
    assert errors(verdict)["layer-error"].name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.float16, "float16, in the source bfloat16"), (torch.float32, None)]
)
def test_matrices_in_another_dtype_are_noted(
    dtype: torch.dtype, said: str | None, made: Callable[..., Path], tmp_path: Path
) -> None:
    """Where it cannot hold each number of the source's."""

    def cast(tensors: dict[str, Any]) -> None:
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name].to(dtype)

    verdict = against_tiny(damaged(made("w4g64-rtn"), tmp_path / "out", cast))
    notes = [f.message for f in verdict.findings if f.check == "layer-error"]
    assert verdict.ok and len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_a_rotated_model_is_not_comparable(made: Callable[..., Path], tmp_path: Path) -> None:
    """An orthogonal matrix over the width of the embedding and of all that read it."""
    import torch

    def rotate(tensors: dict[str, Any]) -> None:
        torch.manual_seed(0)
        turn = torch.linalg.qr(torch.randn(256, 256)).Q
        for name, tensor in tensors.items():
            if tensor.shape[-1:] == (256,) and tensor.ndim == 2:
                tensors[name] = (tensor.float() @ turn).to(tensor.dtype)

    source = damaged(resolve("tiny"), tmp_path / "turned", rotate)
    verdict = verify_artifact(made("w4g64-rtn"), against=source, threads=1)
    notes = [f.message for f in verdict.findings if f.severity == "note"]
    assert any("the model was rotated" in note for note in notes)


def gguf(recipe: str, out: Path) -> Path:
    chosen = load(recipe)
    assert not isinstance(chosen, Recipe)
    run_gguf(GgufRequest("tiny", resolve("tiny"), chosen, out, 1), Progress(quiet=True))
    return out


def test_gguf_against_its_source(tmp_path: Path) -> None:
    file = gguf("q4_k_m", tmp_path / "q.gguf")
    verdict = against_tiny(file)
    assert {f.check for f in verdict.findings} == {"digests"} and verdict.ok
    assert verdict.layers and all(layer.relative_error < 0.15 for layer in verdict.layers)

    tensors = load_file_of_tiny()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"]
    source = tmp_path / "other"
    source.mkdir()
    for path in resolve("tiny").glob("*.json"):
        (source / path.name).write_bytes(path.read_bytes())
    save_file(tensors, source / "model.safetensors")
    found = errors(verify_artifact(file, against=source, threads=1))
    assert found["layer-error"].name == "blk.1.ffn_up.weight"
    assert found["provenance"].name == "qtool.source_checksum"


def load_file_of_tiny() -> dict[str, NDArray[Any]]:
    from qtool.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(resolve("tiny"))
    return {name: checkpoint.float32(name) for name in checkpoint.tensors}


def test_one_gguf_against_another(tmp_path: Path) -> None:
    one, other = gguf("q8_0", tmp_path / "a.gguf"), gguf("f16", tmp_path / "b.gguf")
    verdict = verify_artifact(one, against=other, threads=2)
    found = [f for f in verdict.findings if f.severity != "note"]
    assert [f.check for f in found] == ["provenance"] and verdict.ok  # bfloat16 it was
    assert all(layer.relative_error < 0.01 for layer in verdict.layers)


def test_another_model_that_is_near_is_told_by_the_record(tmp_path: Path) -> None:
    """A fine-tune whose weights are within what rounding makes."""
    quantize(tiny_folder(), "w4g128-rtn", tmp_path / "made")
    assert not verify_artifact(tmp_path / "made", against=tiny_folder()).findings
    shutil.copytree(tiny_folder(), tmp_path / "tuned")
    tensors = load_torch(tmp_path / "tuned" / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.add_((noise * 0.02 * weight.std()).to(weight.dtype))
    save_torch(tensors, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    (finding,) = verify_artifact(tmp_path / "made", against=tmp_path / "tuned").findings
    assert (finding.severity, finding.check) == ("note", "made-of")
    assert "by qtool.json the artifact was made of other files than those given" in finding.message
