"""Plans of GGUF files: layout, metadata, what is refused before any work, and what users see."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool import __version__
from qtool.cli import main as cli
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind, Value, array, string, u32
from qtool.gguf.source import GgufSource
from qtool.gguf_types import BY_NAME, F16, TENSOR_TYPES
from qtool.planning.rows import rows, type_of
from support.gguf import gguf_files, gguf_shapes
from support.gguf.gguf_plans import Measured, plan_of, recipe_of
from support.gguf.gguf_shapes import dense, experts, tensor, with_metadata

SMALL = dense("llama", 8, 256, 512, 8, 2)


def test_order_sizes_and_places() -> None:
    plan = plan_of(gguf_shapes.zoo(), "q4_k_m")
    names = [t.name for t in plan.tensors]
    assert names[:2] == ["a.rvq.codebook.weight", "mm.a.code_embd.weight"]
    assert sorted(names) == sorted(t.name for t in gguf_shapes.zoo().tensors)
    by_name = {t.name: t for t in plan.tensors}
    # As ggml counts axes; what has one is a vector.
    assert by_name["blk.9.one_row.weight"].shape == (256,)
    assert by_name["blk.9.one_row.weight"].type == F16
    assert by_name["blk.9.three.weight"].shape == (8, 256)
    assert by_name["blk.9.three.weight"].nbytes == 8 * 144
    assert (
        by_name["blk.10.odd.weight"].nbytes == 8 * 100 * 2 and by_name["blk.10.odd.weight"].fallback
    )
    layout = plan.layout
    ends = (*layout.starts[1:], plan.size_bytes)
    for planned, start, end in zip(plan.tensors, layout.starts, ends, strict=True):
        assert start % 32 == 0
        assert planned.nbytes <= end - start < planned.nbytes + 32
    weights = sum(int(np.prod(t.source.shape)) for t in plan.tensors)
    assert plan.bits_per_weight == pytest.approx(8 * plan.tensor_bytes / weights)


def test_alignment_of_the_source_is_kept() -> None:
    model = with_metadata(SMALL, {"general.alignment": u32(256)})
    layout = plan_of(model, "q6_k").layout
    assert all(start % 256 == 0 for start in layout.starts)


def test_metadata_is_the_sources_then_llama_cpps_then_ours() -> None:
    more = {
        "general.file_type": u32(1), "general.quantization_version": u32(1),
        "split.no": Value(Kind.UINT16, 0), "split.count": Value(Kind.UINT16, 3),
        "split.tensors.count": Value(Kind.INT32, 9), "qtool.recipe": string("old"),
        "tokenizer.ggml.tokens": array(Kind.STRING, ["a", "b"]),
    }  # fmt: skip
    model = with_metadata(SMALL, more)
    long = "ä" * 100 + ".txt"
    measured = Measured.of(SMALL, file="i" * 200, datasets=(long,))
    metadata = plan_of(model, "q4_k_m", importance=measured, origin="hub/model").metadata
    kept = [key for key in SMALL.metadata] + ["tokenizer.ggml.tokens"]
    assert list(metadata) == [
        *kept, "general.quantization_version", "general.file_type", "quantize.imatrix.file",
        "quantize.imatrix.dataset", "quantize.imatrix.entries_count",
        "quantize.imatrix.chunks_count", "qtool.version", "qtool.recipe", "qtool.source",
        "qtool.source_checksum",
    ]  # fmt: skip
    assert metadata["general.quantization_version"] == u32(2)
    assert metadata["general.file_type"] == u32(15)
    # As many bytes as llama-quantize keeps, but whole letters.
    assert metadata["quantize.imatrix.file"] == string("i" * 127)
    assert metadata["quantize.imatrix.dataset"] == string("ä" * 63)
    assert metadata["quantize.imatrix.entries_count"] == u32(len(measured.entries))
    assert metadata["quantize.imatrix.chunks_count"] == u32(7)
    assert metadata["qtool.version"] == string(__version__)
    recorded = json.loads(metadata["qtool.recipe"].value)
    assert recorded == {"name": "q4_k_m", **recipe_of("q4_k_m").effective()}
    assert metadata["qtool.source"] == string("hub/model")
    run = Measured.of(SMALL, file=None, datasets=(), chunks=0, calibration='{"samples": 3}')
    keys = plan_of(model, "q4_k_m", importance=run).metadata.keys()
    assert [key for key in keys if "imatrix" in key] == ["quantize.imatrix.entries_count"]
    assert "qtool.calibration" in keys
    assert not any("imatrix" in key for key in plan_of(model, "q4_k_m").metadata)


@pytest.mark.parametrize(("name", "number"), [("f32", 0), ("q8_0", 7), ("bf16", 32), ("q2_0", 41)])
def test_file_type(name: str, number: int) -> None:
    assert plan_of(SMALL, name).metadata["general.file_type"] == u32(number)


def test_importance_is_asked_for_before_any_work() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_of(SMALL, "iq2_xs", "importance=false")
    assert str(caught.value) == (
        "model.gguf: blk.0.attn_k.weight would become IQ2_XS, which is useless without an "
        "importance matrix; add --set importance=true, or give one with --imatrix FILE"
    )
    # It will be measured, or was: then all is well.
    for plan in (
        plan_of(SMALL, "iq2_xs"),
        plan_of(SMALL, "iq2_xs", "importance=false", importance=Measured.of(SMALL)),
    ):
        weighed = {t.name for t in plan.tensors if t.importance}
        assert weighed == {t.name for t in plan.tensors if len(t.shape) > 1 and t.name[:3] == "blk"}
    # Embeddings are never measured.
    with pytest.raises(UnsupportedError, match=r"token_embd\.weight would become IQ1_S, which can"):
        plan_of(SMALL, "iq1_s", "embedding_type=iq1_s")
    with pytest.raises(UnsupportedError, match=r"output\.weight would become IQ2_XXS"):
        plan_of(SMALL, "iq2_xxs", "pure=true")


def test_importance_decides_about_types() -> None:
    plain, weighed = plan_of(SMALL, "q4_0"), plan_of(SMALL, "q4_0", importance=Measured.of(SMALL))
    assert "Q4_1" not in plain.types and weighed.types["Q4_1"] == 1
    assert plan_of(SMALL, "q4_0", "importance=true").types == weighed.types


def test_importance_of_another_model_is_refused() -> None:
    measured = Measured.of(SMALL)
    measured.entries["blk.3.ffn_down.weight"] = np.ones((1, 256), np.float32)
    with pytest.raises(SourceError) as caught:
        plan_of(SMALL, "q4_k_m", importance=measured)
    assert str(caught.value) == (
        "imatrix.gguf: blk.3.ffn_down.weight has 256 numbers, expected 512 (1 x 512); "
        "it was measured on another model"
    )
    # Of an embedding llama-quantize says nothing, and goes on without.
    measured = Measured.of(SMALL)
    measured.entries["token_embd.weight"] = np.ones((1, 3), np.float32)
    plan = plan_of(SMALL, "q4_k_m", importance=measured)
    assert not next(t for t in plan.tensors if t.name == "token_embd.weight").importance
    # What has none is encoded without, unless its type cannot be.
    del measured.entries["blk.2.attn_q.weight"]
    plan = plan_of(SMALL, "q4_k_m", importance=measured)
    assert [
        t.name for t in plan.tensors if t.name.endswith("attn_q.weight") and not t.importance
    ] == ["blk.2.attn_q.weight"]
    with pytest.raises(
        SourceError, match=r"^imatrix.gguf: has nothing of blk\.2\.attn_q\.weight, w"
    ):
        plan_of(SMALL, "iq2_xs", importance=measured)
    model = experts("llama", 4, 8, 4, 1)
    measured = Measured.of(model)
    assert measured.entries["blk.1.ffn_up_exps.weight"].shape == (8, 256)
    assert plan_of(model, "iq2_xs", importance=measured).types["IQ2_XS"]


def quantized(type_: str) -> GgufSource:
    """SMALL with the matrices of blocks in a quantized type."""
    tensors = [
        replace(t, type=BY_NAME[type_]) if len(t.shape) > 1 and "blk." in t.name else t
        for t in SMALL.tensors
    ]
    return replace(SMALL, tensors=tuple(tensors))


def test_a_quantized_source_needs_to_be_asked_for() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_of(quantized("Q8_0"), "q4_k_m")
    assert str(caught.value) == (
        "model.gguf: blk.0.attn_k.weight is quantized already, as Q8_0; quantizing it again loses "
        "more than quantizing the original: use the F16, BF16 or F32 file, or give --requantize"
    )
    plan = plan_of(quantized("Q8_0"), "q4_k_m", requantize=True)
    assert plan.metadata["qtool.requantized_from"] == string("Q8_0")
    assert "the source is quantized already (Q8_0)" in plan.warnings[0]
    with pytest.raises(UnsupportedError, match="into F16 does not bring back what was lost: use"):
        plan_of(quantized("Q8_0"), "f16")
    (warning,) = plan_of(quantized("Q8_0"), "f16", requantize=True).warnings
    assert warning.endswith("(Q8_0): turning it into f16 does not bring back what was lost")
    # What keeps its type is copied, and nobody need be asked.
    plan = plan_of(quantized("Q8_0"), "q8_0")
    assert plan.counts == {"converted": 2, "copied": len(plan.tensors) - 2, "dropped": 0}
    assert "qtool.requantized_from" not in plan.metadata
    with pytest.raises(UnsupportedError, match="its matrices are Q8_0 already, and are copied"):
        plan_of(quantized("Q8_0"), "q8_0", "method=gptq")
    one = "overrides=[{match: attn_k, type: q8_0}]"  # the others are encoded, for which GPTQ is not
    with pytest.raises(UnsupportedError, match="nothing to do with type tq2_0"):
        plan_of(quantized("Q8_0"), "tq2_0", "method=gptq", one, requantize=True)


def test_what_is_no_float_is_not_converted() -> None:
    odd = replace(tensor("blk.0.table.weight", 4, 256), type=TENSOR_TYPES[26])
    model = replace(SMALL, tensors=(*SMALL.tensors, odd))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.table\.weight is I32, which is not conv"):
        plan_of(model, "q8_0")
    kept = plan_of(model, "q8_0", "overrides=[{match: table, dense: true}]")
    assert next(t for t in kept.tensors if t.name == odd.name).copied


def test_a_name_that_llama_cpp_cannot_load_is_refused() -> None:
    model = replace(SMALL, tensors=(*SMALL.tensors, tensor("x" * 64 + ".weight", 4, 256)))
    with pytest.raises(FormatError, match="its name has 71 bytes"):
        _ = plan_of(model, "q8_0").size_bytes


@pytest.mark.parametrize(
    ("model", "recipe", "sets", "sentence"),
    [
        ("smollm2", "q4_k_m", (), "166 of 272 tensors fall back to Q5_0, as rows of 576 are no"),
        ("smollm2", "tq1_0", (), "tq1_0 is for models trained with ternary weights; any other"),
        ("smollm2", "mxfp4_moe", (), "the model has no experts, so that mxfp4_moe stores every"),
        ("smollm2", "q8_0", ("importance=true",), "importance has no effect with type q8_0"),
        ("smollm2", "q8_0", ("calibration.samples=3",), "note: settings of calibration (samples)"),
        ("smollm2", "q4_k_m", ("gptq.gptaq=0.5",), "gptq.gptaq has no effect without method: gptq"),
        ("smollm2", "q8_0", ("rotate.seed=3",), "rotate.seed has no effect without the transform"),
        ("smollm2", "q8_0", ("leave_output=true",), "leave_output has no effect: the head is th"),
        ("smollm2", "q8_0", ("output_type=q6_k", "embedding_type=q8_0"), "output_type has no ef"),
        ("smollm2", "q8_0", ("overrides=[{match: _norm, type: q5_0}]",), "what it matches is ne"),
        ("smollm2", "q8_0", ("overrides=[{match: a, type: f16}, {match: attn_v, type: q5_0}]",),
         "override attn_v has no effect: it matches no tensor that an earlier one leaves"),
    ],
)  # fmt: skip
def test_warnings(model: str, recipe: str, sets: tuple[str, ...], sentence: str) -> None:
    plan = plan_of(gguf_shapes.MODELS[model](), recipe, *sets)
    assert any(sentence in warning for warning in plan.warnings), plan.warnings
    # And none without a reason.
    assert plan_of(SMALL, "q4_k_m", "overrides=[{match: attn_v, type: q5_0}]").warnings == ()


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("rotate.kind=random",),
         "rotate.kind has no effect without the transform rotate: add `transforms: [rotate]`"),
        (("transforms=[awq]", "smooth_attention.alpha=0.3"),
         "smooth_attention.alpha has no effect without the transform smooth-attention: add "
         "`transforms: [awq, smooth-attention]`"),
        (("transforms=[rotate]", "rotate.steps=3"),
         "rotate.steps has no effect: rotations are not learned for format gguf"),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_said_once(sets: tuple[str, ...], said: str) -> None:
    plan = plan_of(SMALL, "q4_k_m", *sets)
    assert [one for one in plan.warnings if "no effect" in one] == [said]


def test_rows_and_json() -> None:
    plan = plan_of(gguf_shapes.MODELS["smollm2"](), "q4_k_m")
    found = {row.name: row for row in rows(plan.tensors, type_of)}
    row = found["blk.{0-2,5,8,11,14,17,20,23,26-29}.ffn_down.weight"]
    assert (row.shape, row.stored, row.count) == ("576x1536", "Q6_K", 14)
    fallback = found["blk.{0-29}.attn_q.weight"].stored
    assert fallback == "Q5_0: rows of 576 are no whole blocks of Q4_K (256)"
    assert found["output_norm.weight"].stored == "F32 kept: one-dimensional"
    assert sum(row.nbytes for row in found.values()) == plan.tensor_bytes
    assert len(list(rows(plan.tensors, type_of, every=True))) == 272
    said = json.loads(json.dumps(plan.json()))
    assert said["size_bytes"] == plan.size_bytes and said["fallbacks"] == 180
    assert said["types"] == {"Q5_0": 166, "F32": 61, "Q4_K": 16, "Q8_0": 15, "Q6_K": 14}
    assert said["counts"] == {"converted": 211, "copied": 61, "dropped": 0}
    assert said["tensors"][1]["reason"] == "head; rows of 576 are no whole blocks of 256"
    assert said["unquantized_share"] == pytest.approx(61 * 576 / 106_258_752)


def test_estimates_grow_with_what_there_is_to_do() -> None:
    small, large = plan_of(SMALL, "q4_k_m"), plan_of(dense("llama", 80, 256, 512, 8, 2), "q4_k_m")
    assert small.seconds < large.seconds
    measured = plan_of(SMALL, "q4_k_m", "importance=true")
    assert measured.seconds > small.seconds and measured.peak_rss_bytes > small.peak_rss_bytes
    # Memory does not depend on the number of layers.
    assert large.peak_rss_bytes - small.peak_rss_bytes < 100_000
    # Of many experts a token visits few.
    many = with_metadata(experts("llama", 8, 64, 4, 1), {"llama.expert_used_count": u32(2)})
    all_ = with_metadata(many, {"llama.expert_used_count": u32(64)})
    more = "calibration.samples=100000"
    assert plan_of(many, "iq2_xs", more).seconds < plan_of(all_, "iq2_xs", more).seconds / 3


@pytest.mark.parametrize(
    ("words", "merges", "measured"), [(151_936, 1791, 101), (49_152, 48_900, 100)]
)
def test_a_vocabulary_takes_what_was_measured(words: int, merges: int, measured: int) -> None:
    """Of checkpoints, whose header is made of Python's objects: `bf16` of two threads, of a Llama
    with more rows in its embedding than words, and of SmolLM2."""
    header = {
        "tokenizer.ggml.tokens": array(Kind.STRING, ["word"] * words),
        "tokenizer.ggml.token_type": array(Kind.INT32, [1] * words),
        "tokenizer.ggml.merges": array(Kind.STRING, ["a b"] * merges),
    }
    planned = plan_of(with_metadata(SMALL, header), "bf16", threads=2).peak_rss_bytes / 2**20
    assert 0.96 * measured <= planned <= 1.15 * measured


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["qtool", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_on_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gguf_files.model(tmp_path / "m.gguf", 0, gguf_files.SMALL_LAYERS)
    monkeypatch.setattr(GgufFile, "read_rows", gguf_shapes.unread)  # headers are enough
    assert call(monkeypatch, "plan", str(path), "--recipe", "Q4_K_M") == 0
    said = capsys.readouterr().out
    assert "blk.{0-1}.attn_q.weight" in said and " Q4_K " in said
    assert "recipe q4_k_m, format gguf: " in said and "0 of them fallbacks" in said
    assert re.search(r"estimated: peak memory [\d.]{3,4} MiB, time ", said)
    assert call(monkeypatch, "plan", str(path), "--recipe", "q4_k_m", "--all") == 0
    assert "blk.1.attn_q.weight" in capsys.readouterr().out
    assert call(monkeypatch, "plan", str(path), "--recipe", "q4_k_m", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    monkeypatch.undo()
    out = tmp_path / "made.gguf"
    assert call(monkeypatch, "quantize", str(path), "--recipe", "q4_k_m", "-o", str(out)) == 0
    assert out.stat().st_size == found["size_bytes"]
    assert {t["name"]: t["type"] for t in found["tensors"]} == {
        name: info.type.name for name, info in GgufFile.open(out).tensors.items()
    }


def test_the_command_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = gguf_files.model(tmp_path / "m.gguf", 0, gguf_files.SMALL_LAYERS)
    command = [sys.executable, "-X", "importtime", "-m", "qtool", "plan", str(path)]
    result = subprocess.run(
        [*command, "--recipe", "iq2_xs"], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    roots = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "qtool" in roots and not roots & {"torch", "transformers", "gguf"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["q4_k_m", "--max-shard-size", "1GB"], "--max-shard-size would change nothing: recipe q"),
        (["iq2_xs", "--set", "importance=false"], "would become IQ2_XS, which is useless without"),
        (["q1_0", "--set", "output_type=nope"], "output_type: expected one of q4_0"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = gguf_files.model(tmp_path / "m.gguf", 0, gguf_files.SMALL_LAYERS)
    assert call(monkeypatch, "plan", str(path), "--recipe", *arguments) == 1
    said = capsys.readouterr()
    assert sentence in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert said.out == ""
