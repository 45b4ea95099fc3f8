"""`qtool verify`: its command, what configs mean, and what quantize asks of its own output.

That every kind of damage is found and every healthy artifact passes is in test_gallery.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from qtool.artifacts.artifact import Artifact
from qtool.errors import FormatError, SourceError, UsageError
from qtool.hub import resolve
from qtool.messages.sentences import count, some
from qtool.provenance.digests import add_digests
from qtool.quantizing import verify as reading_back
from qtool.verification.dense_list import says_dense
from qtool.verification.run import verify_artifact
from qtool.verification.written import check_written
from support.formats.packed_files import compressed_tensors
from support.formats.packed_files import write as write_packed
from support.runs.quantizing import caller, first_block_of_tiny, first_blocks_of_tiny, quantize
from support.verification.verified_folders import GATE, Q, folder_of, subject


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("awq") / "out"
    quantize(resolve("tiny"), "w4g64-rtn", out)
    return out


def copied(folder: Path, out: Path) -> Path:
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def test_sentences() -> None:
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some([*"abcde"]) == "a, b, c and 2 more"
    assert [count(n, "matrix") for n in (1, 2000)] == ["1 matrix", "2,000 matrices"]
    assert [count(n, "bias") for n in (1, 2)] == ["1 bias", "2 biases"]


def test_the_command(
    awq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capfd)
    good = call("verify", awq, "--against", "tiny")
    assert good.status == 0 and "nothing wrong" in good.out and "median" in good.out
    bad = copied(awq, tmp_path / "bad")
    edit(bad / "generation_config.json", eos_token_id=[0, 5000])
    (bad / "tokenizer_config.json").unlink()
    add_digests(bad)
    said = call("verify", bad)
    assert said.status == 1
    assert "error (tokenizer): generation_config.json says eos_token_id 5000" in said.out
    assert said.out.strip().endswith("1 error")
    assert call("verify", awq, "--engine", "ollama").status == 2
    assert call("verify", tmp_path / "nothing").status == 1


@pytest.mark.parametrize(
    ("key", "outcome"),
    [
        ("bos_token_id", "texts that begin with it would fail"),
        ("eos_token_id", "generation would never end, or fail"),
        ("pad_token_id", "texts that are padded with it would fail"),
    ],
)
def test_ids_that_the_embedding_has_not(key: str, outcome: str, awq: Path, tmp_path: Path) -> None:
    bad = copied(awq, tmp_path / "bad")
    edit(bad / "generation_config.json", **{key: 5000})
    (found,) = (f for f in verify_artifact(bad).findings if f"says {key} 5000" in f.message)
    assert found.severity == "error" and f"; {outcome}: correct it" in found.message


def test_json_keeps_to_its_schema(
    awq: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    call = caller(monkeypatch, capfd)
    from qtool import schemas

    schema = json.loads((Path(schemas.__path__[0]) / "verify.json").read_text())
    for arguments in ([], ["--against", "tiny"], ["--engine", "vllm", "--tp", "2"]):
        found = json.loads(call("verify", awq, "--json", *arguments).out)
        jsonschema.validate(found, schema)
    assert len(found["checks"]) > 15 and found["unquantized_share"] < 0.2
    found["layers"] = [{"name": "x"}]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema)


def test_nothing_to_look_at(tmp_path: Path, awq: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        verify_artifact(tmp_path / "nothing")
    with pytest.raises(UsageError, match="ollama"):
        verify_artifact(awq, engine="ollama")


def test_an_empty_folder_is_a_verdict(tmp_path: Path) -> None:
    verdict = verify_artifact(tmp_path)
    assert not verdict.ok and verdict.checks == ("files", "readable")
    assert [f.severity for f in verdict.findings] == ["error", "note"]


def test_unquantized_models_pass() -> None:
    verdict = verify_artifact(resolve("tiny"), against=resolve("tiny"))
    assert verdict.ok and not verdict.findings and verdict.unquantized_share == 1


@pytest.mark.parametrize(
    ("kind", "config", "dense"),
    [
        ("awq", {}, {"lm_head"}),
        ("awq", {"modules_to_not_convert": ["mlp.gate"]}, {"lm_head", GATE}),
        ("awq", {"modules_to_not_convert": None, "lm_head": True}, set()),
        ("gptq", {}, {"lm_head"}),
        ("gptq", {"lm_head": True}, set()),
        ("gptq", {"dynamic": {"-:.*gate_proj": {}}}, {"lm_head", GATE}),
        ("gptq", {"dynamic": {"-:gate_proj": {}}}, {"lm_head"}),  # engines match from the start
        ("gptq", {"dynamic": {"+:.*q_proj": {"bits": 4}, "-:.*": {}}}, {"lm_head", GATE}),
        ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, {"lm_head", GATE}),
    ],
)
def test_what_a_config_leaves_out(
    kind: str, config: dict[str, Any], dense: set[str], tmp_path: Path
) -> None:
    found = folder_of(tmp_path, kind, **config)
    assert {m for m in (Q, GATE, "lm_head") if says_dense(found, m)} == dense


@pytest.mark.parametrize(
    ("targets", "ignore", "dense"),
    [
        (["Linear"], ["lm_head"], {"lm_head"}),
        (["Linear"], ["re:.*gate_proj$", "lm_head"], {GATE, "lm_head"}),
        (["re:.*q_proj"], [], {GATE, "lm_head"}),
        (["Linear"], [r"re:.*layers\.[0-9]{1}\.mlp.*", "re:(lm|the)?_head"], {GATE, "lm_head"}),
        (["Linear"], ["re:(?i).*GATE_PROJ"], {None}),
        ([Q], [], {GATE, "lm_head"}),
    ],
)
def test_what_compressed_tensors_leave_out(
    targets: list[str], ignore: list[str], dense: set[str], tmp_path: Path
) -> None:
    weights = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "targets": targets
    }  # fmt: skip
    config = compressed_tensors("int-quantized", weights) | {"ignore": ignore}
    tensors = {
        f"{Q}.weight": ("I8", np.ones((8, 32), np.int8)),
        f"{Q}.weight_scale": ("F32", np.ones((8, 1), np.float32)),
    }
    found = subject(write_packed(tmp_path / "out", tensors, config))
    said = {m: says_dense(found, m) for m in (Q, GATE, "lm_head")}
    assert {None if said[m] is None else m for m in said if said[m] is not False} == dense


def test_an_expression_that_is_not_matched_here_is_a_note(tmp_path: Path) -> None:
    """Where layers fall that only it could leave out is not known: that is no error."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = compressed_tensors("int-quantized", weights) | {"ignore": ["re:(?i).*GATE_PROJ"]}
    tensors = {
        f"{Q}.weight": ("I8", np.ones((8, 32), np.int8)),
        f"{Q}.weight_scale": ("F32", np.ones((8, 1), np.float32)),
        f"{GATE}.weight": ("F16", np.ones((8, 32), np.float16)),
    }
    verdict = verify_artifact(write_packed(tmp_path / "out", tensors, config), engine="vllm")
    found = [f for f in verdict.findings if f.check in ("dense-list", "engine-skip-list")]
    assert [f.severity for f in found] == ["note"] and "not matched here" in found[0].message


def test_heads_are_asked_for_only_where_a_config_can_quantize_them(tmp_path: Path) -> None:
    """Official FP8 and bitsandbytes checkpoints name no head, and no engine quantizes it."""
    head = ("F16", np.ones((8, 32), np.float16))
    fp8 = {
        f"{Q}.weight": ("F8_E4M3", np.full((32, 32), 0x38, np.uint8)),
        f"{Q}.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
        "lm_head.weight": head,
    }
    eight = {
        f"{Q}.weight": ("I8", np.ones((8, 32), np.int8)),
        f"{Q}.SCB": ("F32", np.ones(8, np.float32)),
        "lm_head.weight": head,
    }
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    bits8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}
    for name, tensors, config in (("fp8", fp8, said), ("bnb", eight, bits8)):
        found = verify_artifact(write_packed(tmp_path / name, tensors, config)).findings
        assert "dense-list" not in {f.check for f in found}
    linears = {**fp8, f"{GATE}.weight": head}
    found = verify_artifact(write_packed(tmp_path / "other", linears, said)).findings
    assert [f.name for f in found if f.check == "dense-list"] == [GATE]


def fused_model(folder: Path) -> Path:
    """One block with experts in 3-D tensors."""
    rng = np.random.default_rng(0)
    block = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 64),
        f"{block}.self_attn.q_proj.weight": (64, 64),
        f"{block}.mlp.gate.weight": (4, 64),
        f"{block}.mlp.experts.gate_up_proj": (4, 128, 64),
        f"{block}.mlp.experts.gate_up_proj_bias": (4, 128),  # so that the two are interleaved
        f"{block}.mlp.experts.down_proj": (4, 64, 64),
    }
    folder.mkdir()
    tensors = {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "x", "num_hidden_layers": 1}')
    return folder


@pytest.mark.parametrize("sets", [(), ("format=gptq",)])
def test_fused_experts_that_stay_dense_are_told_of(sets: tuple[str, ...], tmp_path: Path) -> None:
    """They stay dense: qtool's own configs say so, and one that does not is wrong."""
    out = tmp_path / "out"
    asked = 'overrides=[{match: "*.experts.*", dense: true}]'
    quantize(fused_model(tmp_path / "source"), "w4g64-rtn", out, asked, *sets)
    verdict = verify_artifact(out)
    assert verdict.ok and "unquantized" in {f.check for f in verdict.findings}
    config = json.loads((out / "config.json").read_text())
    for key in ("modules_to_not_convert", "dynamic"):
        config["quantization_config"].pop(key, None)
    (out / "config.json").write_text(json.dumps(config))
    found = [f for f in verify_artifact(out).findings if f.severity == "error"]
    assert [(f.check, f.name) for f in found] == [
        ("dense-list", "model.layers.0.mlp.experts.down_proj")
    ]


def stack(folder: Path, blocks: list[list[str]]) -> Path:
    """A model of an architecture that nobody knows; of each block, the modules."""
    tensors = {
        f"model.layers.{n}.{m}.weight": ("F16", np.ones((32, 32), np.float16))
        for n, modules in enumerate(blocks)
        for m in modules
    }
    write_packed(folder, tensors, {})
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": len(blocks)}))
    return folder


def test_blocks_of_one_kind_are_alike(tmp_path: Path) -> None:
    full, linear = ["attn.q", "attn.k", "mlp.up", "mlp.down"], ["ssm.in", "ssm.out", "mlp.up"]
    mixed = stack(tmp_path / "mixed", [full, linear, full, linear, ["mlp.wide", "attn.q"]])
    (found,) = [f for f in verify_artifact(mixed).findings if f.check == "tensors"]
    assert found.severity == "error" and "neither model_type nor architectures" in found.message
    lacking = stack(tmp_path / "lacking", [full, linear, full, linear, full[:3]])
    _, found = [f for f in verify_artifact(lacking).findings if f.check == "tensors"]
    assert found.severity == "error" and found.name == "model.layers.4.mlp.down.weight"
    # The first block of some models has less by design.
    first = stack(tmp_path / "first", [full[:3], linear, full, linear, full])
    _, found = [f for f in verify_artifact(first).findings if f.check == "tensors"]
    assert found.severity == "warning" and found.name == "model.layers.0.mlp.down.weight"


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        ("LlamaForCausalLM", True),
        ("GPT2LMHeadModel", True),
        ("LlamaForSequenceClassification", False),
        ("LlamaForTokenClassification", False),
        ("MistralModel", False),
    ],
)
def test_classes_that_classify_or_embed_have_no_head(
    architecture: str, told: bool, tmp_path: Path, awq: Path
) -> None:
    out = copied(awq, tmp_path / "out")
    edit(out / "config.json", architectures=[architecture], tie_word_embeddings=False)
    found = [f for f in verify_artifact(out).findings if f.check == "head"]
    assert [f.severity for f in found] == ["error"] * told


def test_zeros_that_a_block_was_added_with_have_any_scale(tmp_path: Path) -> None:
    """LLaMA Pro's blocks begin as zeros, of which the scale is 1; large weights have other ones."""
    folder = first_blocks_of_tiny(tmp_path / "model", 2)
    tensors = load_torch(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].zero_()
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e-4
    save_torch(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantize(folder, "w4g64-rtn", tmp_path / "out")
    found = [f for f in verify_artifact(tmp_path / "out").findings if f.name == name]
    assert [(f.severity, f.check) for f in found] == [("warning", "codes")]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"added_tokens": 5}),
        ("tokenizer.json", {"model": []}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1], "eos_token": 3}),
        ("generation_config.json", {"eos_token_id": {"a": 1}}),
        ("qtool.json", {"recipe": [], "conversions": [{"to": "gptq"}]}),
        ("qtool.json", {"recipe": {"weights": "4 bits", "format": 7}}),
        ("config.json", {"text_config": [], "architectures": {"a": 1}, "num_hidden_layers": "4"}),
        ("config.json", {"head_dim": "64", "rope_scaling": 3, "tie_word_embeddings": "yes"}),
        ("quant_config.json", {"w_bit": [4], "version": {}}),
    ],
)
def test_files_that_make_no_sense_end_in_a_verdict(
    file: str, change: dict[str, Any], awq: Path, tmp_path: Path
) -> None:
    out = copied(awq, tmp_path / "out")
    edit(out / file, **change)
    assert "scales" in verify_artifact(out, against=resolve("tiny")).checks


def test_quantize_refuses_what_does_not_pass(
    awq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that forgets a dense layer, and then the run itself."""
    bad = copied(awq, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn.q_proj"]
    (bad / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"does not pass `qtool verify` \(dense-list\).*q_proj"):
        check_written(bad, Artifact.open(bad), [])

    def refuse(*_: object) -> None:
        raise FormatError("what was written does not pass")

    monkeypatch.setattr(reading_back, "check_written", refuse)
    with pytest.raises(FormatError, match="does not pass"):
        quantize(resolve("tiny"), "w4g64-rtn", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_groups_that_had_to_be_smaller_pass(method: str, tmp_path: Path) -> None:
    """The recipe says 512, of which 256 and 768 inputs are no multiple; the config 256."""
    model = first_block_of_tiny(tmp_path / "model")
    sets = ["weights.group_size=512", "indivisible=smaller-group", f"format={method}"]
    quantize(model, "w4g128-rtn", tmp_path / "out", *sets)
    verdict = verify_artifact(tmp_path / "out", against=model)
    assert verdict.ok and "provenance" in verdict.checks
    record = tmp_path / "out" / "qtool.json"
    record.write_text(record.read_text().replace('"group_size": 512', '"group_size": 384'))
    (found,) = [f for f in verify_artifact(tmp_path / "out").findings if f.severity == "error"]
    assert found.check == "provenance" and "weights.group_size 384" in found.message
