"""`qtool verify` of GGUF files that hold no language model, or a damaged one."""

from pathlib import Path

import numpy as np
import pytest

from qtool.cli.verify import lines
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Value, string, strings, u32
from qtool.gguf_types import F32, FLOATS
from qtool.verification.run import verify_artifact
from support.converting.converting import first_block
from support.converting.converting import run as convert
from support.gguf import gguf_files, gguf_from_hf, gguf_models
from support.runs import quantizing
from support.verification.verifying import serious

# GGUF files that hold no language model


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            {"general.architecture": string("clip"), "general.type": string("mmproj")},
            "(mmproj), no language model",
        ),
        ({"general.architecture": string("clip")}, "(mmproj), no language model"),
        (
            {"general.architecture": string("llama"), "general.type": string("adapter")},
            "(LoRA), no language model",
        ),
    ],
)
def test_other_ggufs(metadata: dict[str, Value], said: str, tmp_path: Path) -> None:
    kind = next(one for one in FLOATS if one.name == "F32")
    weight = np.ones((8, 64), np.float32)
    path = gguf_files.write(tmp_path / "x.gguf", metadata, {"mm.0.weight": (weight, kind)})
    verdict = verify_artifact(path, engine="llama.cpp", threads=1)
    assert [f.severity for f in verdict.findings] == ["note"]
    assert said in verdict.findings[0].message
    weight = np.full((8, 64), np.nan, np.float32)
    path = gguf_files.write(tmp_path / "y.gguf", metadata, {"mm.0.weight": (weight, kind)})
    assert [f.check for f in serious(path)] == ["values"]


@pytest.mark.parametrize(
    ("key", "number", "severity", "outcome"),
    [
        ("padding_token_id", 0xFFFFFFFF, None, ""),
        ("padding_token_id", 64, "warning", "llama.cpp ignores it"),
        ("eos_token_id", 64, "error", "generation would never end, or fail"),
        ("eos_token_id", 0xFFFFFFFF, "error", "generation would never end, or fail"),
        ("bos_token_id", 64, "error", "texts that begin with it would fail"),
    ],
)
def test_token_ids_of_ggufs(
    key: str, number: int, severity: str | None, outcome: str, tmp_path: Path
) -> None:
    kind = next(one for one in FLOATS if one.name == "F32")
    metadata: dict[str, Value] = {
        "general.architecture": string("strange"),
        "strange.block_count": u32(1), "strange.embedding_length": u32(64),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.tokens": strings([f"t{n}" for n in range(64)]),
        f"tokenizer.ggml.{key}": u32(number),
    }  # fmt: skip
    weight = np.ones((64, 64), np.float32)
    names = ("token_embd.weight", "blk.0.attn_q.weight")
    path = gguf_files.write(tmp_path / "x.gguf", metadata, {n: (weight, kind) for n in names})
    found = [f for f in serious(path) if f.check == "tokenizer"]
    assert [f.severity for f in found] == ([] if severity is None else [severity])
    assert all(f"; {outcome}: correct it" in f.message for f in found)


@pytest.mark.parametrize(("times", "told"), [(1.0, False), (1.01, True)])
def test_norms_that_were_bfloat16_on_the_way(times: float, told: bool, tmp_path: Path) -> None:
    """A GGUF file has them in float32 whatever they were, and nothing says what that was."""
    kind = next(one for one in FLOATS if one.name == "F32")
    metadata: dict[str, Value] = {
        "general.architecture": string("strange"),
        "strange.block_count": u32(1), "strange.embedding_length": u32(64),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    there = {
        "token_embd.weight": rng.standard_normal((64, 64)).astype(np.float32),
        "blk.0.attn_norm.weight": (1 + 0.3 * rng.standard_normal(64)).astype(np.float32),
    }
    here = {n: (w.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, w in there.items()}
    here["blk.0.attn_norm.weight"] = (here["blk.0.attn_norm.weight"] * times).astype(np.float32)
    paths = []
    for name, tensors in (("source", there), ("out", here)):
        stored = {n: (w, kind) for n, w in tensors.items()}
        paths.append(gguf_files.write(tmp_path / f"{name}.gguf", metadata, stored))
    verdict = verify_artifact(paths[1], against=paths[0], threads=1)
    assert bool([f for f in verdict.findings if f.check == "layer-error"]) is told


def test_holes_of_ggufs(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {
        "general.architecture": string("clip"), "general.type": string("mmproj"),
    }  # fmt: skip
    kind = next(one for one in FLOATS if one.name == "F16")
    weight = np.ones((64, 2048), np.float32)
    weight[10:12] = 0  # whole rows
    path = gguf_files.write(tmp_path / "x.gguf", metadata, {"mm.0.weight": (weight, kind)})
    assert not serious(path)
    weight[12, :1000] = 0
    path = gguf_files.write(tmp_path / "y.gguf", metadata, {"mm.0.weight": (weight, kind)})
    assert [(f.severity, f.check) for f in serious(path)] == [("error", "values")]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rope.dimension_count", 64, None),
        ("rope.dimension_count", 63, ("error", "keys", "expected 64")),
        ("block_count", 3, ("error", "tensors", "of blocks beyond the 3")),
    ],
)
def test_what_llama_cpp_refuses(
    name: str, value: int, expected: tuple[str, str, str] | None, tmp_path: Path
) -> None:
    from qtool.formats.gguf_values import Kind
    from qtool.hub import resolve
    from qtool.messages.progress import Progress
    from qtool.quantizing.gguf.quantize import run_gguf
    from qtool.recipe.recipe import Recipe, load
    from qtool.runs.gguf_request import GgufRequest

    recipe = load("q8_0")
    assert not isinstance(recipe, Recipe)
    path = tmp_path / "x.gguf"
    run_gguf(GgufRequest("tiny", resolve("tiny"), recipe, path, 1), Progress(quiet=True))
    data = bytearray(path.read_bytes())
    key = f"llama.{name}".encode()
    at = data.index(len(key).to_bytes(8, "little") + key) + 8 + len(key)
    assert Kind(int.from_bytes(data[at : at + 4], "little")) is Kind.UINT32
    data[at + 4 : at + 8] = value.to_bytes(4, "little")
    path.write_bytes(data)
    found = [f for f in serious(path) if f.severity == "error"]
    assert bool(found) == (expected is not None)
    if expected is not None:
        assert (found[0].severity, found[0].check) == expected[:2]
        assert expected[2] in found[0].message


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"qtool.recipe": string("{")}, "has no qtool.version"),
        ({"qtool.recipe": string("{"), "qtool.version": string("0.1.0")}, "qtool.recipe"),
        ({"qtool.recipe": string("[]"), "qtool.version": string("0.1.0")}, "qtool.recipe"),
        ({"qtool.recipe": string("{}"), "qtool.version": string("0.1.0")}, "no recipe that has a"),
        ({}, None),
    ],
)
def test_a_damaged_record_of_a_gguf_is_told(
    record: dict[str, Value], said: str | None, tmp_path: Path
) -> None:
    """What `reproduce` would say of it, before weights are compared with a source as it is."""
    kind = next(one for one in FLOATS if one.name == "F32")
    tensors = {"output_norm.weight": (np.ones(8, np.float32), kind)}
    source = gguf_files.write(tmp_path / "source.gguf", gguf_files.llama(1), tensors)
    path = gguf_files.write(tmp_path / "x.gguf", gguf_files.llama(1) | record, tensors)
    found = [
        f for f in verify_artifact(path, against=source, threads=1).findings
        if (f.check, f.name) == ("provenance", "qtool.recipe")
    ]  # fmt: skip
    assert len(found) == (said is not None)
    for finding in found:
        assert said is not None and said in finding.message and finding.severity == "warning"
        assert str(path) in finding.message
        assert finding.message.endswith("it is compared with the source as that is")


# What llama.cpp asks for of families that are never made checkpoints again.
LOST = {
    "deepseek-v2": "blk.1.attn_q_a.weight",
    "deepseek-v2-lite": "blk.0.attn_q.weight",
    "deepseek-v3": "blk.2.attn_k_b.weight",
    "deepseek-v3.2": "blk.1.indexer.attn_k.weight",
    "glm-5": "blk.2.indexer.proj.weight",
    "gpt-oss": "blk.1.attn_sinks.weight",
    "apertus": "blk.2.ffn_up.weight",
    "cohere2-moe": "blk.3.ffn_up_shexp.weight",
    "cohere2-moe-softmax": "blk.0.ffn_gate_inp.weight",
    "falcon-h1": "blk.1.ssm_norm.weight",
    "falcon-mamba": "blk.2.ssm_x.weight",
    "gemma3n": "blk.21.laurel_l.weight",
    "granite-moe-shared": "blk.1.ffn_up_shexp.weight",
    "jamba": "blk.3.ffn_up_exps.weight",
    "mamba": "blk.0.ssm_a",
    "mamba2": "blk.1.ssm_d",
    "granite-4-h-moe": "blk.2.ssm_d",
    "granite-moe": "blk.1.ffn_up_exps.weight",
    "llama4": "blk.1.ffn_gate_shexp.weight",
    "mistral4": "blk.1.ffn_gate_up_exps.weight",
    "qwen3-next": "blk.0.ssm_a",
}
DTYPES = {"F16": np.float16, "F32": np.float32}


@pytest.mark.parametrize("name", LOST)
def test_a_tensor_is_missed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.gguf.from_hf.source.tokenizer_metadata", lambda *_: {})
    folder = gguf_models.build(name, tmp_path / "model")
    made = gguf_from_hf.write(folder, tmp_path / "made.gguf", "f16")
    assert not [one for one in verify_artifact(made.path).findings if one.check == "tensors"]
    tensors = {}
    for info in made.tensors.values():
        values = gguf_from_hf.raw(made, info.name).view(DTYPES[info.type.name])
        tensors[info.name] = values.astype(np.float32).reshape(info.shape), info.type
    del tensors[LOST[name]]
    path = gguf_files.write(tmp_path / "lost.gguf", made.metadata, tensors)
    (found,) = [one for one in verify_artifact(path).findings if one.check == "tensors"]
    assert found.severity == "error" and found.name == LOST[name]


def test_keys_that_a_file_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp chooses experts without groups where a file does not speak of them."""
    monkeypatch.setattr("qtool.gguf.from_hf.source.tokenizer_metadata", lambda *_: {})
    folder = gguf_models.build("deepseek-v3", tmp_path / "model")
    made = gguf_from_hf.write(folder, tmp_path / "made.gguf", "f16")
    tensors = {}
    for info in made.tensors.values():
        values = gguf_from_hf.raw(made, info.name).view(DTYPES[info.type.name])
        tensors[info.name] = values.astype(np.float32).reshape(info.shape), info.type
    for lost in ("", "expert_group_count", "expert_weights_norm"):
        less = {k: v for k, v in made.metadata.items() if not (lost and k.endswith(lost))}
        path = gguf_files.write(tmp_path / f"lost{lost}.gguf", less, tensors)
        found = verify_artifact(path, against=folder).findings
        assert [f.severity for f in found if f.check == "settings"] == ["error"] * bool(lost)


def test_one_tensor_in_place_of_several(tmp_path: Path) -> None:
    """llama.cpp takes queries, keys and values of any model in one."""
    path = gguf_files.model(tmp_path / "apart.gguf", layers=1)
    with GgufFile.open(path) as file:
        metadata, tensors = file.metadata, {}
        for info in file.tensors.values():
            values = gguf_from_hf.raw(file, info.name).view(DTYPES[info.type.name])
            tensors[info.name] = values.astype(np.float32).reshape(info.shape), info.type
    parts = [tensors.pop(f"blk.0.attn_{one}.weight") for one in "qkv"]
    whole = np.concatenate([values for values, _ in parts])
    lost = gguf_files.write(tmp_path / "lost.gguf", metadata, tensors)
    assert ("error", "tensors") in [(f.severity, f.check) for f in serious(lost)]
    tensors["blk.0.attn_qkv.weight"] = whole, parts[0][1]
    joined = gguf_files.write(tmp_path / "joined.gguf", metadata, tensors)
    assert not [one for one in verify_artifact(joined).findings if one.check == "tensors"]
    tensors["blk.0.attn_sinks.weight"] = whole[:, 0].copy(), F32
    more = gguf_files.write(tmp_path / "more.gguf", metadata, tensors)
    (found,) = [one for one in verify_artifact(more).findings if one.check == "tensors"]
    assert "has no place for: blk.0.attn_sinks.weight" in found.message


def test_of_a_file_that_cannot_be_opened_no_share_is_said(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\1")
    verdict = verify_artifact(file, threads=1)
    assert [finding.severity for finding in verdict.findings] == ["error", "note"]
    assert lines(verdict)[-1] == f"{file}: cannot be opened, 1 check: 1 error"


def test_scales_folded_in_before_it_was_converted(tmp_path: Path) -> None:
    """The file has no record of them: what can be verified is said."""
    source = first_block(tmp_path / "tiny")
    artifact = quantizing.quantize(source, "mxfp4-awq-gptq", tmp_path / "out").out
    assert verify_artifact(artifact, against=source, threads=1).ok
    file = convert(artifact, "gguf", tmp_path / "x.gguf")
    verdict = verify_artifact(file, against=source, threads=1)
    (error,) = [f for f in verdict.findings if f.severity == "error"]
    assert error.check == "layer-error" and "blk.0.attn_norm.weight" in error.message
    assert "AWQ or smoothing had folded scales; verify that one instead" in error.message
