"""GGUF files whose matrices of NVFP4 have a second scale, read by every command."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from qtool import native_gguf
from qtool.converting import nvfp4
from qtool.diff.diff import diff
from qtool.errors import FormatError, UnsupportedError
from qtool.fitting.fit import fit
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.gguf.inspect import tensor_detail
from qtool.gguf.inspect_text import detail_lines
from qtool.gguf.open import open_source
from qtool.gguf.second_scales import with_scales
from qtool.gguf.source import as_floats
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.gguf_types import BY_NAME, F32, BlockType
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact
from support.converting.converting import converted, first_block, run, types
from support.fitting.fitting_runs import request
from support.gguf.gguf_runs import QUIET
from support.models.nvfp4_models import model, rounded, their_numbers

Array = NDArray[np.uint8]


def verify(file: Path, against: Path | None = None) -> Verdict:
    return verify_artifact(file, against=against, threads=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first block of `tiny`, and it as NVFP4 in GGUF."""
    root = tmp_path_factory.mktemp("made")
    source = first_block(root / "model")
    return source, run(rounded(source, root / "nvfp4"), "gguf", root / "file.gguf")


def quantized(
    source: Path, out: Path, *sets: str, recipe: str = "q4_k_m", again: bool = True
) -> Path:
    run_gguf(
        GgufRequest("org/model", source, load(recipe, sets), out, 1, requantize=again),
        QUIET,
    )
    return out


def values(file: Path, name: str) -> NDArray[np.float32]:
    """A matrix as qtool reads it, second scale and all."""
    with closing(open_source(file)) as source:
        tensor = next(t for t in with_scales(source).tensors if t.name == name)
        return as_floats(tensor, np.ascontiguousarray(tensor.read(0, tensor.rows)))


def edited(file: Path, out: Path, name: str, value: float) -> Path:
    """A tensor's first number is another one."""
    out.write_bytes(file.read_bytes())
    reader = gguf.GGUFReader(out, "r+")
    next(t for t in reader.tensors if t.name == name).data[0] = value
    reader.data.flush()
    return out


def test_encoding_anew_multiplies_by_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = made
    with pytest.raises(UnsupportedError, match=r"quantized already, as NVFP4.*--requantize"):
        quantized(file, tmp_path / "no.gguf", again=False)
    out = quantized(file, tmp_path / "q8.gguf", recipe="q8_0")
    found = types(out)
    assert found["blk.0.ffn_up.weight"] == "Q8_0" and "blk.0.ffn_up.scale" not in found
    with GgufFile.open(out) as opened:
        assert not [key for key in opened.metadata if "tensor_extra" in key]
    there = their_numbers(file)["blk.0.ffn_up.weight"]
    here = their_numbers(out)["blk.0.ffn_up.weight"]
    assert np.linalg.norm(here - there) < 0.01 * np.linalg.norm(there)
    assert verify(out, file).ok


def test_matrices_that_are_copied_keep_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, file = made
    sets = ("overrides=[{match: ffn_, dense: true}]",)
    out = quantized(file, tmp_path / "some.gguf", *sets, recipe="q6_k")
    found = types(out)
    assert found["blk.0.ffn_up.weight"] == "NVFP4" and found["blk.0.ffn_up.scale"] == "F32"
    assert found["blk.0.attn_q.weight"] == "Q6_K" and "blk.0.attn_q.scale" not in found
    with GgufFile.open(out) as opened:
        told = list(opened.metadata["general.tensor_extra.name"].value)
        assert sorted(told) == [f"blk.0.ffn_{one}.weight" for one in ("down", "gate", "up")]
        assert list(opened.metadata["general.tensor_extra.prec_a4"].value) == [False] * 3
    np.testing.assert_array_equal(
        values(out, "blk.0.ffn_up.weight"), values(file, "blk.0.ffn_up.weight")
    )
    for against in (file, source):
        verdict = verify(out, against)
        errors = [f for f in verdict.findings if f.severity == "error"]
        assert not [f for f in errors if f.check != "layer-error"], errors
    exact = {one.name: one.relative_error for one in verify(out, file).layers}
    assert "blk.0.ffn_up.weight" not in exact and 0 < exact["blk.0.attn_q.weight"] < 0.03


def test_the_file_is_as_near_to_its_source_as_it_is(made: tuple[Path, Path]) -> None:
    source, file = made
    verdict = verify(file, source)
    assert verdict.ok and "scales" in verdict.checks
    (down,) = [one for one in verdict.layers if one.name == "blk.0.ffn_down.weight"]
    assert down.scheme == "NVFP4" and 0.05 < down.relative_error < 0.1
    assert verdict.unquantized_share < 0.5


def test_a_checkpoint_of_it_has_the_numbers(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = made
    folder = tmp_path / "hf"
    conversion = converted(file, "hf", folder, dtype="float32")
    assert conversion.dequantized == {"NVFP4": 7} and conversion.certificate.exact
    dropped = {name for name, _ in conversion.certificate.dropped}
    assert len(dropped) == 7 and "blk.0.attn_q.scale" in dropped
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        load_file(folder / "model.safetensors")[name], values(file, "blk.0.ffn_up.weight")
    )
    usual = tmp_path / "usual"
    run(file, "hf", usual)
    assert json.loads((usual / "config.json").read_text())["torch_dtype"] == "float16"
    with pytest.raises(UnsupportedError, match=r"NVFP4 with a second scale.*--to hf"):
        run(file, "compressed-tensors", tmp_path / "ct")


def test_gptq_rounds_what_it_reads(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = made
    sets = ("method=gptq", "calibration.samples=2", "calibration.length=64")
    out = quantized(file, tmp_path / "gptq.gguf", *sets, recipe="q4_0")
    there, here = (values(one, "blk.0.ffn_up.weight") for one in (file, out))
    assert 0 < np.linalg.norm(here - there) < 0.2 * np.linalg.norm(there)
    assert "blk.0.ffn_up.scale" not in types(out)


@pytest.mark.parametrize(("number", "said"), [(np.nan, "not finite"), (np.inf, "not finite")])
def test_damaged_ones_are_told(
    made: tuple[Path, Path], number: float, said: str, tmp_path: Path
) -> None:
    file = edited(made[1], tmp_path / "damaged.gguf", "blk.0.ffn_up.scale", number)
    errors = [f.message for f in verify(file).findings if f.severity == "error"]
    assert any(f"blk.0.ffn_up.scale is {said}" in message for message in errors)
    with pytest.raises(FormatError, match=rf"ffn_up.scale is {said}"):
        quantized(file, tmp_path / "out.gguf")


def test_a_larger_one_is_far_from_the_source(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, file = made
    wrong = edited(file, tmp_path / "wrong.gguf", "blk.0.ffn_up.scale", 1.0)
    found = [f for f in verify(wrong, source).findings if f.severity == "error"]
    assert re.search(
        r"but for a factor: blk.0.ffn_up.weight: about [\d,.]+ times as large", found[0].message
    )


def test_one_of_another_shape_is_none(made: tuple[Path, Path]) -> None:
    with closing(open_source(made[1])) as source:
        longer = replace(
            next(t for t in source.tensors if t.name == "blk.0.ffn_up.scale"),
            shape=(3,),
            read=lambda *_: np.ones(3, np.float32).view(np.uint8)[None],
        )
        tensors = [longer if t.name == longer.name else t for t in source.tensors]
        with pytest.raises(FormatError, match=r"ffn_up.scale is F32 \[3\], expected F32 \[1\]"):
            with_scales(replace(source, tensors=tuple(tensors)))


def test_llama_cpp_forgets_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as convert_hf_to_gguf.py makes it of Qwen2, which qtool refuses to."""
    source = rounded(model("Qwen2", tmp_path / "model"), tmp_path / "nvfp4")
    monkeypatch.setattr(nvfp4, "is_forgotten", lambda *_: False)
    file = run(source, "gguf", tmp_path / "file.gguf")
    (found,) = [f for f in verify(file).findings if f.check == "scales"]
    assert found.severity == "error" and "6 second scales" in found.message
    assert "llama.cpp does not multiply in qwen2" in found.message
    mended = quantized(file, tmp_path / "mended.gguf", recipe="q8_0")
    assert not [f for f in verify(mended).findings if f.severity == "error"]


def rewritten(
    file: Path, out: Path, change: Callable[[dict[str, tuple[BlockType, Array]]], None]
) -> Path:
    """The file with other tensors: name -> type and rows."""
    with GgufFile.open(file) as opened:
        tensors = {
            name: (info.type, opened.read_rows(name, 0, info.rows).reshape(*info.shape[:-1], -1))
            for name, info in opened.tensors.items()
        }
        metadata = dict(opened.metadata)
    change(tensors)
    shapes = {
        name: (*rows.shape[:-1], rows.shape[-1] // kind.nbytes * kind.weights)
        for name, (kind, rows) in tensors.items()
    }
    specs = [TensorSpec(name, shapes[name], kind) for name, (kind, _) in tensors.items()]
    layout = lay_out(metadata, specs)
    with out.open("wb+") as opened:
        opened.truncate(layout.size)
        writer = GgufWriter(opened.fileno(), layout)
        for number, (_, rows) in enumerate(tensors.values()):
            writer.rows(number, 0, np.ascontiguousarray(rows.reshape(-1, rows.shape[-1])))
        writer.finish()
    return out


def floats(*numbers: float) -> tuple[BlockType, Array]:
    return F32, np.array(numbers, np.float32).view(np.uint8)


def test_matrices_of_other_types_may_have_one(made: tuple[Path, Path], tmp_path: Path) -> None:
    """As llama-quantize makes them of NVFP4: Q8_0 beside the scale."""
    source, file = made

    def anew(tensors: dict[str, tuple[BlockType, Array]]) -> None:
        for name, (kind, rows) in tensors.items():
            if kind.name == "NVFP4":
                flat = rows.reshape(len(rows), -1)
                numbers = native_gguf.dequantize(flat, kind, flat.shape[1] // 36 * 64)
                tensors[name] = BY_NAME["Q8_0"], native_gguf.encode(numbers, BY_NAME["Q8_0"])

    other = rewritten(file, tmp_path / "q8.gguf", anew)
    assert types(other)["blk.0.ffn_up.weight"] == "Q8_0"
    there, here = (values(one, "blk.0.ffn_up.weight") for one in (file, other))
    assert 0 < np.linalg.norm(here - there) < 0.01 * np.linalg.norm(there)
    assert verify(other, file).ok
    errors = [f.check for f in verify(other, source).findings if f.severity == "error"]
    assert {*errors} <= {"layer-error"}  # as of NVFP4, which was rounded before
    converted(other, "hf", tmp_path / "hf", dtype="float32")


def test_fit_looks_at_the_file_and_at_its_numbers(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, file = made
    out = tmp_path / "fit.yaml"
    with pytest.raises(UnsupportedError, match="quantized already, as NVFP4"):
        fit(request(file, out, bits=5), QUIET)
    sets = ["importance=true", "overrides=[{match: ffn_, dense: true}]"]
    found = fit(request(file, out, bits=5, sets=sets, requantize=True), QUIET)
    kept = {name for name, kind in types(file).items() if kind == "NVFP4" and "ffn_" in name}
    plan = make_gguf_plan(load(str(out)), open_source(file), requantize=True)
    assert {t.name for t in plan.tensors if t.copied and t.type.name == "NVFP4"} == kept
    assert plan.tensor_bytes == found.made.tensor_bytes
    # What errors cost is that of the numbers, not of blocks without their scale.
    losses = [
        fit(request(model, tmp_path / f"{model.name}.yaml", bits=5, requantize=True), QUIET).loss
        for model in (file, source)
    ]
    assert 0.5 < losses[0] / losses[1] < 2


def test_what_is_shown_of_a_matrix_has_its_second_scale(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    _, file = made
    plain = quantized(file, tmp_path / "f32.gguf", recipe="f32")
    name = "blk.0.attn_q.weight"
    with GgufFile.open(file) as one, GgufFile.open(plain) as other:
        assert other.tensors[name].type.name == "F32"
        here, there = tensor_detail(one, name), tensor_detail(other, name)
        second = float(one.read_rows("blk.0.attn_q.scale", 0, 1).view(np.float32).item())
    assert here["range"] == there["range"] and here["rms"] == pytest.approx(there["rms"])
    assert here["second_scale_range"] == [second, second]
    assert "second_scale_range" not in there
    assert f"  second scale     {second:.6g}, by which" in "\n".join(detail_lines(here))
    found = diff(file, plain, QUIET)
    assert {one.kind for one in found.tensors if one.name.startswith("blk.")} == {"storage"}
    assert not diff(file, file, QUIET).tensors


def test_plain_floats_are_encoded_anew(made: tuple[Path, Path], tmp_path: Path) -> None:
    plan = make_gguf_plan(load("f32"), open_source(made[1]), requantize=True)
    rows = {row["name"]: row for row in plan.json()["tensors"]}
    assert rows["blk.0.attn_q.weight"]["source_type"] == "NVFP4"
    assert plan.counts["converted"] == 7 + 1 and plan.counts["dropped"] == 7  # and the embedding


def test_the_file_says_what_most_of_it_is(made: tuple[Path, Path], tmp_path: Path) -> None:
    sets = ("overrides=[{match: '^blk', dense: true}]",)
    out = quantized(made[1], tmp_path / "most.gguf", *sets, recipe="q6_k")
    with GgufFile.open(out) as opened:
        most = opened.metadata["general.file_type"].value
        share = sum(i.size for i in opened.tensors.values() if i.type.name == "NVFP4")
        assert (most == 39) is (2 * share > sum(i.size for i in opened.tensors.values()))


@pytest.mark.parametrize(
    ("name", "tensor", "severity", "said"),
    [
        ("blk.0.ffn_norm.scale", floats(1.0), "error", "no place, so that it refuses the file: bl"),
        ("blk.0.ffn_up.bias", floats(*[0.0] * 768), "error", "1 matrix of NVFP4 with a second sc"),
        ("blk.0.ffn_up.scale", None, "warning", "1 matrix of NVFP4 without a second scale, which"),
        ("blk.0.ffn_up.scale", floats(1.0, 2.0), "error", r"is F32 [2], expected F32 [1], the sc"),
    ],
)
def test_what_llama_cpp_makes_of_them_is_told(
    name: str,
    tensor: tuple[BlockType, Array] | None,
    severity: str,
    said: str,
    made: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    def change(tensors: dict[str, tuple[BlockType, Array]]) -> None:
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    file = rewritten(made[1], tmp_path / "changed.gguf", change)
    found = [f for f in verify(file).findings if f.severity == severity and said in f.message]
    assert len(found) == 1


def test_scales_of_inputs_alone_are_passed_over(made: tuple[Path, Path], tmp_path: Path) -> None:
    """convert_hf_to_gguf.py leaves second scales of 1 out."""

    def change(tensors: dict[str, tuple[BlockType, Array]]) -> None:
        del tensors["blk.0.ffn_up.scale"]
        tensors["blk.0.ffn_up.input_scale"] = floats(0.01)

    file = rewritten(made[1], tmp_path / "inputs.gguf", change)
    with gguf_weights(open_source(file)) as (weights, _):
        assert weights.float32("model.layers.0.mlp.up_proj.weight").shape == (768, 256)
    assert verify(file).ok


def test_each_expert_needs_its_own(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
             "norm_topk_prob": True}  # fmt: skip
    source = rounded(model("Qwen3Moe", tmp_path / "model", **sizes), tmp_path / "nvfp4")
    file = run(source, "gguf", tmp_path / "file.gguf")

    def change(tensors: dict[str, tuple[BlockType, Array]]) -> None:
        tensors["blk.0.ffn_up_exps.scale"] = floats(1.0)

    one = rewritten(file, tmp_path / "one.gguf", change)
    errors = [f.message for f in verify(one).findings if f.severity == "error"]
    assert any("ffn_up_exps.scale is F32 [1], expected F32 [4]" in said for said in errors)
