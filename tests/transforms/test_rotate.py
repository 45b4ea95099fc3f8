"""Rotations: Hadamard matrices, the rotated view, the proof, and whole runs with them."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import RecipeError, UnsupportedError
from qtool.planning.plan import make_plan
from qtool.provenance import embedded
from qtool.provenance.record import environment
from qtool.recipe import recipe as recipes
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.skeleton import Skeleton
from qtool.transforms import hadamard, rotate, rotated, rotation
from qtool.transforms.rotated import Rotated
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf
from support.models import arch_models
from support.models.small_models import checkpoint, difference, logits, models
from support.runs import quantizing
from support.transforms.rotating import CENTERED, quiet, settings

__all__ = ["models"]

# Width of the stream and of a head that is rotated, by architecture.
HEADS = {"llama": 8, "qwen3": 32, "gemma3": 16, "phi3": 16, "opt": 16, "gpt_neox": 16,
         "mixtral": 16, "qwen3_moe": 16, "qwen2": 16, "stablelm": 16, "sarvam_moe": 16}  # fmt: skip


@pytest.mark.parametrize(
    "size", [1, 2, 4, 12, 20, 24, 28, 36, 40, 44, 52, 60, 64, 76, 96, 100, 128, 576, 768, 960]
)
def test_hadamard_matrices_are_orthogonal_and_their_fast_product_is_the_plain_one(
    size: int,
) -> None:
    odd = hadamard.odd_factor(size)
    assert odd is not None
    found = hadamard.multiply(np.eye(size), odd) * np.sqrt(size)
    assert np.abs(np.abs(found) - 1).max() < 1e-12
    signs = np.rint(found)
    assert np.array_equal(signs @ signs.T, size * np.eye(size))
    small = hadamard.paley(odd).astype(float) if odd > 1 else np.ones((1, 1))
    grown = np.ones((1, 1))
    while grown.shape[0] < size // odd:
        grown = np.block([[grown, grown], [grown, -grown]])
    assert np.array_equal(signs.T, np.kron(small, grown))
    x = np.random.default_rng(0).standard_normal((size, 5))
    plain = np.kron(small, grown).T @ x / np.sqrt(size)
    assert np.abs(hadamard.multiply(x.copy(), odd) - plain).max() < 1e-13


def test_sizes_without_a_known_matrix_get_a_random_orthogonal_one() -> None:
    for size in (3, 6, 90, 92):
        assert hadamard.odd_factor(size) is None
        found = rotation.make("hadamard", size, (0,))
        assert found.kind == "random" and found.describe() == f"random {size}"
        dense = found.dense()
        assert np.abs(dense @ dense.T - np.eye(size)).max() < 1e-13


@pytest.mark.parametrize("kind", ["hadamard", "random"])
def test_a_rotation_can_fix_the_ones(kind: str) -> None:
    free = rotation.make(kind, 576, (3,))
    fixed = rotation.fixing_ones(free)
    dense = fixed.dense()
    assert np.abs(dense @ dense.T - np.eye(576)).max() < 1e-13
    assert np.abs(free.dense().sum(axis=0) - 1).max() > 0.1
    assert np.abs(dense.sum(axis=0) - 1).max() < 1e-13
    # Columns alone are what they are among others, to the bit.
    x = np.random.default_rng(0).standard_normal((576, 130))
    assert np.array_equal(fixed.apply(x)[:, 70:71], fixed.apply(np.ascontiguousarray(x[:, 70:71])))


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_rotating_changes_no_logits(name: str, models: Path) -> None:
    source = checkpoint(models, name)
    view = rotated.untied(source)
    found = rotate.prepare(view, RotateOptions(), quiet)
    assert {r.size for r in found.r2.values()} == {HEADS[name]}
    assert len(found.r2) == Skeleton.open(source).count
    if name == "gemma3":
        assert found.r1 is None and view.head is None
        assert "norm between a projection and the stream" in found.left_out[0]
    else:
        assert found.r1 is not None and found.r1.size == 64 and not found.left_out
        assert (found.r1.reflected is not None) == (name in CENTERED)
    assert difference(logits(source), logits(view)) < 2e-6
    changed = [n for n in view.changes if view.changes[n].fill is None and n in source.tensors]
    for tensor in changed:
        if "bias" not in tensor:
            assert not np.array_equal(view.float32(tensor), source.float32(tensor)), tensor


def test_numbers_refuse_what_names_do_not_tell(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's norms after projections, were they called otherwise."""
    monkeypatch.setattr(rotated, "_AFTER", ())
    source = checkpoint(models, "gemma3")
    view = rotated.untied(source)
    said: list[str] = []
    found = rotate.prepare(view, RotateOptions(), said.append)
    assert found.r1 is None and len(found.r2) == 4
    assert "model.layers.0 gives other outputs once rotated" in found.left_out[0]
    assert found.left_out[0].endswith("the head stays untied") and said
    assert view.head == ("lm_head.weight", "model.embed_tokens.weight")
    assert difference(logits(source), logits(view)) < 2e-6


@pytest.mark.parametrize("name", ["qwen3", "phi3", "opt"])
@pytest.mark.parametrize("kind", ["hadamard", "random"])
def test_parts_have_the_bytes_of_the_whole(kind: str, name: str, models: Path) -> None:
    view = rotated.untied(checkpoint(models, name, "bfloat16"))
    rotate.prepare(view, RotateOptions(kind=kind), quiet)  # type: ignore[arg-type]
    for tensor, info in view.tensors.items():
        whole = view.raw(tensor)
        assert whole.size == info.nbytes
        cuts = [0, 7, info.shape[0] // 2, info.shape[0]]
        parts = [view.part(tensor, a, b) for a, b in pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole), tensor


def test_seeds_give_other_rotations_and_one_seed_the_same(models: Path) -> None:
    source = checkpoint(models, "llama")

    def weight(seed: int) -> np.ndarray:
        view = rotated.untied(source)
        rotate.prepare(view, RotateOptions(seed=seed), quiet)
        return view.float32("model.layers.1.self_attn.v_proj.weight")

    assert np.array_equal(weight(0), weight(0))
    assert not np.array_equal(weight(0), weight(1))


@pytest.mark.parametrize("which", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_what_float16_cannot_hold_is_left_out(which: str, tmp_path: Path) -> None:
    """The proof runs in float32; what a gain makes of a matrix has to fit the file."""
    folder = arch_models.build("llama", tmp_path / "m", dtype="float16")
    tensors = load_file(folder / "model.safetensors")
    tensors[which][3] = 60000
    matrix = (
        "lm_head.weight"
        if which == "model.norm.weight"
        else "model.layers.1.self_attn.q_proj.weight"
    )
    tensors[matrix][5, 3] = 16
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = Checkpoint.open(folder)
    view = rotated.untied(source)
    found = rotate.prepare(view, RotateOptions(), quiet)
    assert found.r1 is None and found.r2
    (said,) = found.left_out
    assert "too large for the float16" in said and " would hold " in said
    for name in view.tensors:
        view.raw(name)  # or it would raise


def test_a_gain_of_zero_with_a_bias_is_left_out(tmp_path: Path) -> None:
    folder = quantizing.build("stablelm", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][5] = 0
    save_file(tensors, folder / "model.safetensors")
    source = Checkpoint.open(folder)
    view = rotated.untied(source)
    found = rotate.prepare(view, RotateOptions(), quiet)
    assert found.r1 is None and len(found.r2) == 2
    assert "model.layers.1.input_layernorm.weight has gains of zero" in found.left_out[0]
    assert difference(logits(source), logits(view)) < 2e-6


def test_plan_unties_a_tied_head(models: Path) -> None:
    source = checkpoint(models, "qwen3", "bfloat16")
    recipe = recipes.load("w4-gptq-rotated")
    assert isinstance(recipe, recipes.Recipe)
    plan = make_plan(recipe, source)
    head = plan.by_name["lm_head.weight"]
    assert head.reason == "output head" and head.nbytes == 2 * 96 * 64
    assert any("lm_head.weight takes 12,288 bytes more" in said for said in plan.warnings)
    kept = recipes.load("w4-gptq-rotated", ["rotate.r1=false"])
    assert isinstance(kept, recipes.Recipe)
    assert "lm_head.weight" not in make_plan(kept, source).by_name


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_dense_run_is_another_checkpoint_of_the_same_network(
    name: str, models: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = checkpoint(models, name)
    recipe = tmp_path / "rotated.yaml"
    recipe.write_text("method: none\nformat: dense\ntransforms: [rotate]\n")
    run = quantizing.quantize(source.path, str(recipe), tmp_path / "out")
    written = Checkpoint.open(run.out)
    assert written.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in written.tensors
    assert difference(logits(source), logits(written)) < 2e-6
    model = AutoModelForCausalLM.from_pretrained(run.out, dtype=torch.float32).eval()
    ids = np.random.default_rng(1).integers(3, arch_models.VOCABULARY, (2, 40), dtype=np.int64)
    with torch.no_grad():
        theirs = model(input_ids=torch.from_numpy(ids)).logits
    assert difference(logits(source), theirs) < 1e-5
    record = json.loads((run.out / "qtool.json").read_text())["rotation"]
    assert record["r1"] == "hadamard 64" and record["left_out"] == []
    assert any("residual stream is rotated (hadamard 64)" in note for note in run.summary.notes)


def test_a_quantized_run_is_the_same_for_any_number_of_threads(
    models: Path, tmp_path: Path
) -> None:
    source = checkpoint(models, "qwen3", "bfloat16")
    runs = [
        quantizing.quantize(
            source.path, "w4-gptq-rotated", tmp_path / str(n), *settings(models), threads=n
        )
        for n in (1, 2)
    ]
    quantizing.assert_reads_back(runs[0])
    assert quantizing.files(runs[0].out) == quantizing.files(runs[1].out)
    # What was quantized is the rotated model.
    view: Rotated = rotated.untied(source)
    rotate.prepare(view, RotateOptions(), quiet)
    name = "model.layers.0.mlp.down_proj.weight"
    quant = dict(Artifact.open(runs[0].out).dequantized())[name]
    lost = np.linalg.norm(quant - view.float32(name)) / np.linalg.norm(quant)
    assert lost < 0.3 < np.linalg.norm(quant - source.float32(name)) / np.linalg.norm(quant)


def test_what_a_rotation_does_not_go_with(models: Path, tmp_path: Path) -> None:
    source = checkpoint(models, "qwen3", "bfloat16")
    stats = tmp_path / "stats.safetensors"
    stats.write_bytes(b"")
    with pytest.raises(UnsupportedError, match="statistics are of the model as it was"):
        quantizing.quantize(source.path, "w4-gptq-rotated", tmp_path / "out", stats=stats)
    with pytest.raises(RecipeError, match="rotate changes the whole network and comes first"):
        recipes.load("w4-gptq-rotated", ["transforms=[awq, rotate]"])
    with pytest.raises(RecipeError, match="r1, r2, r3 and r4 are all false"):
        recipes.load("w4-gptq-rotated", ["rotate.r1=false", "rotate.r2=false"])


def test_gguf_of_a_rotated_checkpoint_is_that_of_the_dense_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the tensors of the rotated checkpoint, with a head of its own."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    source = checkpoint(models, "qwen3")
    dense = tmp_path / "rotated.yaml"
    dense.write_text("method: none\nformat: dense\ntransforms: [rotate]\n")
    folder = quantizing.quantize(source.path, str(dense), tmp_path / "dense").out
    rotated_q8 = tmp_path / "q8.yaml"
    rotated_q8.write_text("format: gguf\ntype: q8_0\ntransforms: [rotate]\n")

    def tensors(model: Path, recipe: str) -> dict[str, bytes]:
        out = tmp_path / f"{model.name}-{Path(recipe).stem}.gguf"
        with gguf_from_hf.write(model, out, recipe) as file:
            # Products of floats depend on the kind of CPU; blocks of q8_0 do not.
            assert embedded.read(out).environment == (environment() if "/" in recipe else None)
            return {name: gguf_from_hf.raw(file, name).tobytes() for name in file.tensors}

    found = tensors(source.path, str(rotated_q8))
    assert "output.weight" in found and found == tensors(folder, "q8_0")
    assert found["blk.0.ffn_up.weight"] != tensors(source.path, "q8_0")["blk.0.ffn_up.weight"]
    with pytest.raises(RecipeError, match="learned rotations go with formats other than gguf"):
        recipes.load("q8_0", ["transforms=[rotate]", "rotate.kind=learned"])

    def said(against: Path) -> list[tuple[str, str]]:
        verdict = verify_artifact(tmp_path / f"{source.path.name}-q8.gguf", against=against)
        compared = ("rotation", "against", "layer-error", "provenance")
        return [(one.severity, one.message) for one in verdict.findings if one.check in compared]

    ((level, message),) = said(source.path)
    assert (
        level == "note" and message == "compared with the source rotated as its recipe says it was"
    )
    assert "error" in [level for level, _ in said(folder)]  # it is rotated already
    ((level, message),) = said(tmp_path / f"{source.path.name}-q8_0.gguf")
    assert level == "note" and "no checkpoint of safetensors" in message
    file = tmp_path / f"{source.path.name}-q8.gguf"
    whole, key = file.read_bytes(), b'"kind":"hadamard"'
    assert whole.count(key) == 1
    file.write_bytes(whole.replace(key, key.replace(b"rd", b"rt")))
    ((level, message),) = said(source.path)
    assert level == "error" and 'its recipe says rotate.kind "hadamart" (input sho' in message


def test_verify_rotates_the_source_as_the_artifact_was(models: Path, tmp_path: Path) -> None:
    from qtool.verification.run import verify_artifact

    source = checkpoint(models, "qwen3")
    run = quantizing.quantize(
        source.path, "w4-gptq-rotated", tmp_path / "out", "method=rtn", "rotate.seed=3"
    )
    verdict = verify_artifact(run.out, against=source.path)
    assert not [f for f in verdict.findings if f.severity == "error"]
    assert any("rotated as qtool.json says" in f.message for f in verdict.findings)
    assert len(verdict.layers) == 14
    for layer in verdict.layers:
        assert layer.expected is not None and layer.relative_error < 1.5 * layer.expected, layer
    record = json.loads((run.out / "qtool.json").read_text())
    assert record["environment"] == environment()  # though no text was read
    record["rotation"]["seed"] = 4
    (run.out / "qtool.json").write_text(json.dumps(record))
    verdict = verify_artifact(run.out, against=source.path)
    assert any(f.severity == "error" for f in verdict.findings)
    for key, value, shown in (("kind", "hadamart", '"hadamart"'), ("seed", -1, "-1")):
        damaged = record | {"rotation": record["rotation"] | {key: value}}
        (run.out / "qtool.json").write_text(json.dumps(damaged))
        verdict = verify_artifact(run.out, against=source.path)
        (finding,) = [f for f in verdict.findings if f.check == "rotation"]
        assert finding.severity == "error" and f"rotation.{key} {shown}" in finding.message
        assert not verdict.layers
    record["rotation"]["kind"] = "learned"
    (run.out / "qtool.json").write_text(json.dumps(record))
    verdict = verify_artifact(run.out, against=source.path)
    assert any("what was learned, and is not kept" in f.message for f in verdict.findings), verdict
    assert not verdict.layers
