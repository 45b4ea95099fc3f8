"""Scales of keys and values: measured as transformers' attention sees them, stored as vLLM reads
them, rounded by the evaluator, and missed by `verify` where they are not there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.cache_scales import attention_of
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.from_artifact import artifact_model
from qtool.errors import FormatError, RecipeError, UnsupportedError
from qtool.inspecting.inspect import inspect
from qtool.methods import activations
from qtool.planning.plan import make_plan
from qtool.quality.engine_inputs import declared
from qtool.recipe import recipe as recipes
from qtool.streaming.skeleton import Skeleton
from qtool.texts.calibration import calibration_tokens
from qtool.verification.engines.rules import engine_findings
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.models import arch_models
from support.runs import quantizing
from support.verification.verifying import but_digests, forget_digests

WIDTHS = {"float": 448.0, "int": 127.0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantizing.text_file(tmp_path_factory.mktemp("text") / "text.txt")


def settings(text: Path, *more: str) -> list[str]:
    return [
        f"calibration.source={text}", "calibration.samples=5", "calibration.length=40", *more,
    ]  # fmt: skip


def seen_by_transformers(folder: Path, tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """max|x| of keys and of values, of each block and head, after rotary embedding."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found: list[tuple[np.ndarray, np.ndarray]] = []

    def attention(module: object, query: object, key: torch.Tensor, value: torch.Tensor,
                  *rest: object, **more: object) -> object:  # fmt: skip
        found.append(tuple(x.abs().amax((0, 2, 3)).numpy() for x in (key, value)))  # type: ignore[arg-type]
        return sdpa_attention_forward(module, query, key, value, *rest, **more)  # type: ignore[arg-type]

    AttentionInterface.register("watched", attention)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="watched"
    ).eval()
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens), use_cache=False)
    return found


@pytest.mark.parametrize(
    ("name", "scale", "kind"),
    [("llama", "head", "float"), ("phi3", "tensor", "int"), ("opt", "head", "int")],
)
def test_scales_are_those_of_the_largest(
    name: str, scale: str, kind: str, text: Path, tmp_path: Path
) -> None:
    source = quantizing.build(name, tmp_path / "model")
    sets = settings(text, f"kv_cache.scale={scale}", f"kv_cache.type={kind}")
    run = quantizing.quantize(source, "kv-fp8", tmp_path / "out", *sets)
    tokens = calibration_tokens(recipes.load("kv-fp8", sets).calibration, source).tokens
    expected = seen_by_transformers(source, tokens)
    stored = load_file(run.out / "model.safetensors")
    named = [n for n in stored if n.endswith(("k_scale", "v_scale"))]
    assert len(named) == 2 * len(expected)
    for name_ in named:
        block, which = int(name_.split(".layers.")[1].split(".")[0]), name_[-7]
        largest = expected[block]["kv".index(which)]
        largest = largest if scale == "head" else largest.max(keepdims=True)
        assert stored[name_].shape == ((largest.size, 1, 1) if scale == "head" else (1,))
        ratio = stored[name_].reshape(-1) * WIDTHS[kind] / largest
        # Rounded up to bfloat16, which has 8 bits.
        assert (ratio > 1 - 1e-5).all() and (ratio < 1 + 2.0**-7).all()
        assert not (stored[name_].view(np.uint32) & 0xFFFF).any()
    original = Checkpoint.open(source)
    for tensor in original.tensors:
        assert np.array_equal(original.raw(tensor), Checkpoint.open(run.out).raw(tensor))
    config = json.loads((run.out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {
        "num_bits": 8, "type": kind, "symmetric": True, "dynamic": False,
        "strategy": "attn_head" if scale == "head" else "tensor",
    }  # fmt: skip
    assert (config["config_groups"], config["format"]) == ({}, "dense")


def test_beside_quantized_weights_and_into_the_evaluator(text: Path, tmp_path: Path) -> None:
    source = quantizing.build("llama", tmp_path / "model")
    kept = "kv_cache={bits: 4, type: int, scale: head}"
    plain = quantizing.quantize(source, "w8a8-dynamic", tmp_path / "plain")
    run = quantizing.quantize(source, "w8a8-dynamic", tmp_path / "out", *settings(text, kept))
    quantizing.assert_reads_back(run)
    for name, quant in plain.quants.items():
        assert np.array_equal(quant.codes, run.quants[name].codes)
    found = declared(Artifact.open(run.out))
    assert found.json()["kv_cache"] == "int4 per head" and found.of_matrix
    scales = load_file(run.out / "model.safetensors")["model.layers.1.self_attn.v_scale"]
    x = np.random.default_rng(3).standard_normal((2, 4, 5, 8)).astype(np.float32)
    each = np.repeat(scales.reshape(-1), 2)[:, None, None]  # two queries share a head of values
    expected = np.clip(np.rint(x / each), -8, 7) * each
    assert found.kept is not None
    assert np.array_equal(found.kept.of_block(1)[1].apply(torch.from_numpy(x)).numpy(), expected)


def test_the_cache_of_qserve_by_its_definition() -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((2, 3, 4, 16)) + 2 * rng.standard_normal((2, 3, 1, 1))).astype("f4")
    x[0, 0, 0] = 0
    found = activations.kept_as_it_comes(4).apply(torch.from_numpy(x)).numpy()
    for place in np.ndindex(x.shape[:-1]):
        run = x[place].astype(np.float64)
        span = run.max() - run.min()
        if not span:
            assert (found[place] == run).all()
            continue
        scale = np.float64(np.float16(span / 15))
        zero = np.float64(np.float16(-15 * run.min() / span))
        expected = (np.clip(np.rint(run / scale + zero), 0, 15) - zero) * scale
        near_tie = np.abs((run / scale + zero) % 1 - 0.5) < 1e-3
        assert np.allclose(found[place], expected, rtol=1e-5, atol=1e-6) or near_tie.any()
        assert np.abs(found[place] - run).max() < 0.6 * scale


def damaged(folder: Path, out: Path, name: str, value: object) -> Path:
    """A copy whose tensor `name` is `value`, or gone for None."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(out / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = np.asarray(value, np.float32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    forget_digests(out)
    return out


def test_verify_knows_the_scales(text: Path, tmp_path: Path) -> None:
    source = quantizing.build("llama", tmp_path / "model")
    sets = settings(text, "kv_cache.scale=head")
    out = quantizing.quantize(source, "kv-fp8", tmp_path / "out", *sets).out
    assert not verify_artifact(out, engine="vllm").findings
    with pytest.raises(UnsupportedError, match="convert or quantize the model that it was made of"):
        artifact_model(out, None)
    assert ("KV cache", "8-bit float per attn_head, static") in inspect(out).summary()
    name = "model.layers.1.self_attn.k_scale"
    for number, (value, said) in enumerate(
        [
            (None, "1 of them is missing"),
            ([[[0.1]], [[0.0]]], f"{name} is 0.0"),
            ([[[np.nan]], [[0.5]]], f"{name} is nan"),
            ([0.1], f"{name} has 1 number"),
        ]
    ):
        broken = damaged(out, tmp_path / str(number), name, value)
        errors = [f for f in verify_artifact(broken).findings if f.severity == "error"]
        (found,) = [f for f in errors if f.check == "kv-scales"]
        assert said in found.message
    with pytest.raises(FormatError, match="expected positive numbers"):
        declared(Artifact.open(tmp_path / "1"))
    config = json.loads((out / "config.json").read_text())
    arguments = config["quantization_config"]["kv_cache_scheme"]
    whole = dict(arguments)
    (out / "qtool.json").unlink()  # which would tell of any change
    forget_digests(out)
    for changed, said in (
        ({"num_bits": 5}, "5-bit float, expected 4 or 8 bits"),
        ({"num_bits": "8"}, "8-bit float, expected 4 or 8 bits"),
        ({"num_bits": 9, "type": "int"}, "9-bit int, expected 2 to 8 bits"),
        ({"type": "flout"}, "8-bit flout, expected int or float"),
        ({"type": ["int"]}, "8-bit ['int'], expected int or float"),
    ):
        arguments |= whole | changed
        (out / "config.json").write_text(json.dumps(config))
        (finding,) = but_digests(verify_artifact(out).findings)
        assert (finding.severity, finding.check) == ("error", "kv-scales")
        assert f"kv_cache_scheme asks for {said}" in finding.message
    arguments |= whole | {"type": "int"}
    (out / "config.json").write_text(json.dumps(config))
    (finding,) = but_digests(verify_artifact(out, engine="vllm").findings)
    assert finding.check == "engine-kv-cache" and "8-bit float" in finding.message
    (finding,) = engine_findings(Artifact.open(out), "sglang", 1)
    assert finding.check == "engine-kv-cache" and "passes over" in finding.message
    said = engine_findings(Artifact.open(out), "transformers", 1)[0]
    assert said.severity == "warning" and "does not know its attention" in said.message


@pytest.mark.parametrize("name", ["gpt-oss", "gemma2"])
def test_attention_that_is_not_one_call_is_told_by_a_plan(name: str, tmp_path: Path) -> None:
    """Sinks, and logits that are capped: headers and config.json tell them."""
    source = Checkpoint.open(gguf_models.build(name, tmp_path / "model"))
    with pytest.raises(UnsupportedError, match=r"self_attn: attention of this model is not one"):
        make_plan(recipes.load("kv-fp8"), source)


def test_attention_that_is_not_one_call_is_told_before_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the class alone tells it: no block is read, and nothing is left."""
    source = quantizing.add_tokenizer(gguf_models.build("bloom", tmp_path / "model"))
    assert make_plan(recipes.load("kv-fp8"), Checkpoint.open(source)).cache

    def embedding(*_: object, **__: object) -> None:
        raise AssertionError("a text passes through the model")

    monkeypatch.setattr(Skeleton, "embed", embedding)
    with pytest.raises(UnsupportedError, match=r"self_attention: attention .* remove kv_cache"):
        quantizing.quantize(source, "kv-fp8", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_is_refused(text: Path, tmp_path: Path) -> None:
    for sets, said in (
        (["kv_cache.bits=4"], "type float has bits 8"),
        (["format=dense"], "format dense does not say how keys and values are kept"),
        (["kv_cache={bits: 8, type: int, dynamic: true}"], "dynamic: true goes with scale head"),
        (["kv_cache={bits: 8, type: int, dynamic: true, scale: head}"], "have stored scales"),
        (["kv_cache=null"], "does not go with format compressed-tensors"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipes.load("kv-fp8", sets)
        assert said in str(caught.value)
    with pytest.raises(UnsupportedError, match="latent vectors"):
        attention_of(["model.layers.0.self_attn.kv_b_proj.weight"], {}, False)
    with pytest.raises(UnsupportedError, match="no tensor is known to make keys"):
        attention_of(["model.layers.0.mlp.up_proj.weight"], {}, False)
    source = arch_models.build("llama", tmp_path / "model")
    plan = make_plan(recipes.load("kv-fp8", ["kv_cache.type=int"]), Checkpoint.open(source))
    assert any("vLLM keeps keys and values in FP8 only" in said for said in plan.warnings)
    quantizing.add_tokenizer(source)
    with pytest.raises(UnsupportedError, match="run without --stats"):
        quantizing.quantize(source, "kv-fp8", tmp_path / "out", stats=text)
