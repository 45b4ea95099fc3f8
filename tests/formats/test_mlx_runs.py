"""Runs into MLX's format, and back: recipes, embeddings, heads and experts, files of mlx-lm itself,
and what mlx-lm refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import qtool
from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting import pieces
from qtool.diff import sides
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats import mlx, mlx_experts
from qtool.methods import rtn
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.scheme import GroupQuant
from qtool.verification.run import verify_artifact
from support.converting import converting
from support.formats.artifact_files import assert_same
from support.models import arch_models
from support.runs import quantizing

PLAIN = mlx.choose([])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantizing.first_blocks_of_tiny(tmp_path_factory.mktemp("tiny") / "model", 1)


GROUPS = "weights.group_size=32"
FEW = ("calibration.samples=4", "calibration.length=64")


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("w4g64-mlx-rtn", ("rtn.clip=true", "weights.symmetric=true")),
        ("w3g64-mlx-awq-gptq", FEW),
        (
            "w4g64-mlx-rtn",
            (*FEW, "method=gptq", 'overrides=[{match: "*down_proj", weights: {bits: 6}}]'),
        ),
        ("w4g64-mlx-rtn", (*FEW, "method=[gptq, tune]", "tune.steps=2")),
    ],
)
def test_a_run(recipe: str, sets: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    """What is stored is what was in memory; config.json has both keys; verify finds nothing."""
    dense = ("mlx.embedding=null", "mlx.head=null")
    run = quantizing.quantize(tiny, recipe, tmp_path / "out", *sets, *dense)
    quantizing.assert_reads_back(run)
    config = json.loads((run.out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"]["bits"] == int(recipe[1])
    infos = Checkpoint.open(run.out).tensors
    assert {infos[f"{n.removesuffix('.weight')}.scales"].dtype for n in run.quants} == {"BF16"}
    verdict = verify_artifact(run.out, against=tiny, engine="mlx-lm")
    assert [f for f in verdict.findings if f.severity != "note"] == []
    assert "mlx_lm.server --model DIR" in (run.out / "README.md").read_text()


def test_scales_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    for dtype, stored in (("float16", "F16"), ("float32", "F32")):
        model = quantizing.add_tokenizer(arch_models.build("llama", tmp_path / dtype, dtype=dtype))
        out = quantizing.quantize(
            model, "w4g64-mlx-rtn", tmp_path / f"{dtype}-out", "weights.group_size=32"
        ).out
        infos = Checkpoint.open(out).tensors
        assert {i.dtype for n, i in infos.items() if n.endswith((".scales", ".biases"))} == {stored}


def test_there_and_back(tiny: Path, tmp_path: Path) -> None:
    """Symmetric GPTQ is exact in MLX and comes back to the byte; AWQ's zeros are rounded."""
    gptq = quantizing.quantize(
        tiny, "w4g64-gptq", tmp_path / "gptq", "method=rtn", "weights.symmetric=true"
    ).out
    converting.run(gptq, "mlx", tmp_path / "mlx")
    converting.run(tmp_path / "mlx", "gptq", tmp_path / "back")
    one, other = (path / "model.safetensors" for path in (gptq, tmp_path / "back"))
    assert one.read_bytes() == other.read_bytes()
    awq = quantizing.quantize(tiny, "w4g64-rtn", tmp_path / "awq").out
    with pytest.raises(UnsupportedError, match="zeros times scales that float16, as mlx stores"):
        converting.run(awq, "mlx", tmp_path / "no")
    converting.run(awq, "mlx", tmp_path / "lossy", lossy=True)
    before, after = Artifact.open(awq), Artifact.open(tmp_path / "lossy")
    name = "model.layers.0.mlp.up_proj.weight"
    off = after.read(name).dequantize() - before.read(name).dequantize()
    assert 0 < np.abs(off).max() < 2.0**-11 * np.abs(before.read(name).dequantize()).max()


@pytest.fixture(scope="module")
def theirs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As mlx-lm writes them: embeddings are quantized, scales may be below zero."""
    folder = tmp_path_factory.mktemp("theirs")
    source = Checkpoint.open(tiny)
    tensors: dict[str, NDArray[Any]] = {}
    for name, info in source.tensors.items():
        weight = source.float32(name)
        module = name.removesuffix(".weight")
        if len(info.shape) != 2:
            tensors[name] = weight.astype(np.float16)
            continue
        grouped = weight.reshape(len(weight), -1, 64)
        high, low = grouped.max(2), grouped.min(2)
        scale = ((low - high) / 15).astype(np.float16)  # from the largest downwards
        offset = high.astype(np.float16)
        steps = (grouped - offset[..., None]) / scale[..., None].astype(np.float32)
        codes = np.clip(np.rint(steps), 0, 15).astype(np.uint8).reshape(weight.shape)
        packed = mlx.bits.pack(codes, 4).view(np.uint32)
        tensors |= {f"{module}.weight": packed, f"{module}.scales": scale,
                    f"{module}.biases": offset}  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    table = {"group_size": 64, "bits": 4}
    config = source.config | {"quantization": table, "quantization_config": table}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tiny / file).read_bytes())
    return folder


def test_of_mlx_lm_itself(theirs: Path, tiny: Path, tmp_path: Path) -> None:
    """It is measured, and dequantized."""
    folder = theirs
    assert [
        f for f in verify_artifact(folder, against=tiny).findings if f.severity == "error"
    ] == []
    text = quantizing.text_file(tmp_path / "text.txt", 4000)
    measured = qtool.evaluate(folder, text, against=tiny, windows=1, length=128, threads=1)
    assert 0 < measured.found["kld"]["mean"] < 1
    with pytest.raises(UnsupportedError, match=r"has biases \(mlx\) that are no whole zero points"):
        converting.run(folder, "gptq-v2", tmp_path / "no")
    converting.run(folder, "gptq-v2", tmp_path / "lossy", lossy=True)
    converting.run(folder, "hf", tmp_path / "dense", dtype="float32")
    dense, stored = Checkpoint.open(tmp_path / "dense"), Artifact.open(folder)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        assert np.array_equal(dense.float32(name), stored.read(name).dequantize())


def test_experts(tmp_path: Path) -> None:
    """In stacks, as mlx-lm has them, in any number of files; each is read under its own name. Of
    models that are not known they are refused."""
    group = "weights.group_size=32"
    for name in ("qwen3_moe", "mixtral"):
        model = quantizing.build(name, tmp_path / name)
        kept = ("mlx.head=null", "mlx.embedding=null")
        run = quantizing.quantize(
            model, "w4g64-mlx-rtn", tmp_path / f"{name}-out", group, *kept, max_shard_bytes=20_000
        )
        quantizing.assert_reads_back(run)
        stored = Checkpoint.open(run.out)
        assert len(stored.files) > 2 and not any(".experts." in n for n in stored.tensors)
        experts = [n for n in run.quants if ".experts.2." in n]
        for one in experts:
            stack, place = mlx_experts.stack_of(one) or ("", -1)
            codes = mlx.pack("m", run.quants[one], PLAIN)["m.weight"]
            assert place == 2 and np.array_equal(stored.array(stack)[2], codes)
        assert verify_artifact(run.out, against=model, engine="mlx-lm").findings == ()
        gptq = converting.run(run.out, "gptq-v2", tmp_path / f"{name}-gptq", lossy=True)
        back = converting.run(gptq, "mlx", tmp_path / f"{name}-back", lossy=True)
        assert set(Checkpoint.open(back).tensors) == set(stored.tensors)
    other = tmp_path / "qwen3_moe" / "config.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"model_type": "novel_moe"}))
    with pytest.raises(UnsupportedError, match="not known how mlx-lm has quantized ones of novel"):
        make_plan(load("w4g64-mlx-rtn", [group]), Checkpoint.open(other.parent))
    left = 'overrides=[{match: "*.experts.*", dense: true}]'
    assert make_plan(load("w4g64-mlx-rtn", [group, left]), Checkpoint.open(other.parent)).tensors


def test_experts_of_a_stack_are_alike(tmp_path: Path) -> None:
    model = quantizing.build("qwen3_moe", tmp_path / "model")
    one = 'overrides=[{match: "*.experts.3.*", weights: {bits: 8}}]'
    with pytest.raises(FormatError, match="experts that are stored in one tensor have one scheme"):
        make_plan(load("w4g64-mlx-rtn", [GROUPS, one]), Checkpoint.open(model))
    every = 'overrides=[{match: "*.experts.*.down_proj", weights: {bits: 8}}]'
    out = quantizing.quantize(model, "w4g64-mlx-rtn", tmp_path / "out", GROUPS, every).out
    table = json.loads((out / "config.json").read_text())["quantization"]
    assert table["model.layers.0.mlp.switch_mlp.down_proj"]["bits"] == 8
    found = Artifact.open(out).entries["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert str(found.scheme) == "w8 g32 asym"


def test_what_mlx_lm_refuses(tiny: Path, tmp_path: Path) -> None:
    def said(path: Path) -> str:
        return "\n".join(
            f.message
            for f in verify_artifact(path, engine="mlx-lm").findings
            if "engine" in f.check
        )

    gptq = quantizing.quantize(tiny, "w4g64-gptq", tmp_path / "gptq", "method=rtn").out
    assert "is not known to load gptq; `qtool convert --to mlx`" in said(gptq)
    awq = quantizing.quantize(tiny, "w4g64-rtn", tmp_path / "awq").out
    assert said(awq).startswith("mlx-lm repacks AWQ as it loads")
    config = json.loads((awq / "config.json").read_text())
    (awq / "config.json").write_text(json.dumps(config | {"model_type": "novel"}))
    assert "no class for model_type 'novel'" in said(awq)
    with pytest.raises(QtoolError, match="holds 2, 3, 4, 5, 6 or 8 bits, not 7"):
        make_plan(load("w4g64-mlx-rtn", ["weights.bits=7"]), Checkpoint.open(tiny))


EMBEDDING = 'overrides=[{match: "*embed_tokens", weights: {bits: 6}}]'


def test_what_lies_outside_of_blocks(tiny: Path, tmp_path: Path) -> None:
    """The recipe's table has bits of the head, a tied embedding among them, and of another one; an
    override counts more."""

    def bits(model: Path, *sets: str) -> list[int | None]:
        plan = make_plan(load("w4g64-mlx-rtn", [GROUPS, *sets]), Checkpoint.open(model))
        outside = [one for one in plan.tensors if one.block is None and len(one.shape) == 2]
        return [one.scheme.bits if one.scheme else None for one in outside]

    assert bits(tiny) == bits(tiny, "mlx.embedding=8") == [6]
    assert bits(tiny, "mlx.head=null") == [None] and bits(tiny, EMBEDDING, "mlx.head=3") == [6]
    apart = quantizing.build("llama", tmp_path / "model")
    assert sorted(bits(apart), key=str) == [4, 6]
    assert bits(apart, "mlx.embedding=null", "mlx.head=8").count(8) == 1
    left = "overrides=[{match: lm_head, dense: true}]"
    assert sorted(bits(apart, left), key=str) == [4, None]
    assert load("w4g64-rtn", ["mlx.head=8"]).idle_options == ["mlx.head"]


def test_an_embedding_that_an_override_names(tiny: Path, tmp_path: Path) -> None:
    """It is the head too, where they are tied; no other format has it so."""
    out = quantizing.quantize(tiny, "w4g64-mlx-rtn", tmp_path / "out", EMBEDDING).out
    name = "model.embed_tokens.weight"
    entry = Artifact.open(out).entries[name]
    assert str(entry.scheme) == "w6 g64 asym"
    whole = rtn.quantize(Checkpoint.open(tiny).float32(name), None, entry.scheme, rtn.Options())  # type: ignore[arg-type]
    read = Artifact.open(out).read(name)
    assert isinstance(read, GroupQuant)
    assert_same(read, replace(whole.quant, scheme=read.scheme))
    swept = quantizing.quantize(
        tiny, "w4g64-mlx-rtn", tmp_path / "swept", EMBEDDING, "method=gptq", *FEW
    ).out
    assert np.array_equal(Artifact.open(swept).read(name).codes, read.codes)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"give its bits as --set mlx\.head=8"):
        make_plan(
            load("w4g64-mlx-rtn", ["overrides=[{match: lm_head, weights: {bits: 8}}]"]),
            Checkpoint.open(tiny),
        )
    plan = make_plan(load("w4g64-rtn", [EMBEDDING]), Checkpoint.open(tiny))
    assert plan.by_name[name].scheme is None
    assert any("matches no quantized tensor" in said for said in plan.warnings)


def test_bits_are_chosen(tiny: Path, tmp_path: Path) -> None:
    """Of all widths that mlx-lm has; its recipe is one of this format."""
    qtool.fit(
        tiny, tmp_path / "fit.yaml", recipe="w4g64-mlx-rtn", bits=5.5, samples=2, length=64,
        threads=2,
    )  # fmt: skip
    made = load(str(tmp_path / "fit.yaml"))
    plan = make_plan(made, Checkpoint.open(tiny))
    widths = {one.scheme.bits for one in plan.quantized if one.scheme}
    assert made.format == "mlx" and len(widths) > 1 and widths <= {3, 4, 5, 6, 8}


def test_rows_and_pieces_have_their_offsets(
    theirs: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of mlx-lm, in pieces of a few rows."""
    quant = Artifact.open(theirs).read("model.embed_tokens.weight")
    assert isinstance(quant, GroupQuant) and quant.offset is not None
    assert np.array_equal(quant.rows(slice(5, 9)).dequantize(), quant.dequantize()[5:9])
    monkeypatch.setattr(pieces, "_AT_ONCE", 4096)
    dense = converting.run(theirs, "hf", tmp_path / "dense", dtype="float32")
    config = json.loads((dense / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    again = quantizing.quantize(dense, "w4g64-rtn", tmp_path / "awq").out
    assert "quantization" not in json.loads((again / "config.json").read_text())
    other_half = sides.part_of(quant, 7, 11)
    assert np.array_equal(other_half.dequantize(), quant.dequantize()[7:11])


def test_what_mlx_lm_changes_stays_plain(tmp_path: Path) -> None:
    tables = Checkpoint.open(quantizing.build("llama", tmp_path / "model"))
    for kind, refusal in (("falcon_h1", True), ("seed_oss", False)):
        config = dict(tables.config) | {"model_type": kind, "tie_word_embeddings": True}
        tensors = {n: i for n, i in tables.tensors.items() if n != "lm_head.weight"}
        checkpoint = replace(tables, config=config, tensors=tensors)
        if refusal:
            with pytest.raises(UnsupportedError, match="mlx-lm has no quantized falcon_h1"):
                make_plan(load("w4g64-mlx-rtn", [GROUPS]), checkpoint)
        else:
            plan = make_plan(load("w4g64-mlx-rtn", [GROUPS]), checkpoint)
            assert plan.by_name["model.embed_tokens.weight"].scheme is None
