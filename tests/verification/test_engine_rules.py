"""What engines ask of shapes and configs: models of real sizes, told from headers alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qtool.cards.planned_view import planned_view
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli import main as cli
from qtool.errors import UsageError
from qtool.gguf_types import BY_NAME, F32, TENSOR_TYPES
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import Recipe, load
from qtool.verification.engines.rules import (
    ENGINES,
    engine_findings,
    type_findings,
    view_findings,
)
from qtool.verification.finding import Finding
from support.formats.header_artifacts import awq, compressed, packed, plain, stored
from support.models import header_files

QWEN_72B = {"hidden": 8192, "inner": 29568, "kv": 1024, "vocabulary": 256}
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8}


def planned(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    engine: str,
    tp: int,
    recipe: str = "w4g128-gptq",
    *sets: str,
    **config: Any,
) -> list[Finding]:
    """What an engine says of a plan for a model of which only the header exists."""
    header_files.write(folder, shapes, config)
    checkpoint = Checkpoint.open(folder)
    loaded = load(recipe, sets)
    assert isinstance(loaded, Recipe)
    view = planned_view(make_plan(loaded, checkpoint), checkpoint.config)
    return view_findings(view, engine, tp)


def said(found: list[Finding], check: str, severity: str = "error") -> list[str]:
    return [f.message for f in found if (f.check, f.severity) == (check, severity)]


def test_a_width_that_ranks_cannot_share(tmp_path: Path) -> None:
    """Qwen2-72B: 29568 / 8 = 3696, which is no multiple of 128; its makers padded to 29696."""
    shapes = header_files.llama(1, **QWEN_72B)
    found = planned(tmp_path, shapes, "vllm", 8, **HEADS)
    (message,) = said(found, "engine-group-split")
    assert message == (
        "vLLM with --tp 8 will refuse model.layers.0.mlp.down_proj: in_features 29568 / 8 = 3696 "
        "is not a multiple of 128, its group size; use --tp 1, or quantize with --set "
        "pad_intermediate=1024 (zeros up to 29696)"
    )
    assert [f.name for f in found if f.severity == "error"] == ["model.layers.0.mlp.down_proj"]
    for sizes, tp in (({"inner": 29696}, 8), ({}, 1)):
        good = planned(tmp_path, header_files.llama(1, **QWEN_72B | sizes), "vllm", tp, **HEADS)
        assert not [f for f in good if f.severity == "error"]
    smaller = planned(tmp_path, shapes, "vllm", 4, "w4g32-gptq", **HEADS)
    assert not [f for f in smaller if f.severity == "error"]


def test_fewer_ranks_are_advised_that_heads_allow(tmp_path: Path) -> None:
    """768 / 4 is no multiple of 128, 768 / 3 is; but 4 key heads are not shared out by 3."""
    shapes = header_files.llama(1, hidden=768, inner=1536, kv=256)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    (message, *_) = said(planned(tmp_path, shapes, "vllm", 4, **heads), "engine-group-split")
    assert "192 is not a multiple of 128, its group size; use --tp 2, or" in message


@pytest.mark.parametrize(
    ("heads", "keys", "tp", "phrase"),
    [
        (28, 4, 8, "28 attention heads cannot be shared out between 8 ranks; use --tp 4"),
        (64, 6, 4, "6 key and value heads can neither"),
        (64, 8, 16, ""),  # each is repeated on two ranks
        (64, 1, 8, ""),
    ],
)
def test_heads(tmp_path: Path, heads: int, keys: int, tp: int, phrase: str) -> None:
    shapes = header_files.llama(1, hidden=8192, inner=32768, kv=128 * keys)
    settings = {"num_attention_heads": heads, "num_key_value_heads": keys}
    found = said(planned(tmp_path, shapes, "vllm", tp, **settings), "engine-heads")
    assert (phrase in found[0]) if phrase else not found


def test_keys_and_values_repeated_on_ranks_are_not_split_further(tmp_path: Path) -> None:
    """Two heads of 128 on 8 ranks: each rank has a whole head, not a quarter."""
    shapes = header_files.llama(1, hidden=4096, inner=8192, kv=256)
    settings = {"num_attention_heads": 32, "num_key_value_heads": 2}
    assert not planned(tmp_path, shapes, "sglang", 8, **settings)


@pytest.mark.parametrize(
    ("engine", "tp", "check", "severity"),
    [
        ("vllm", 2, "engine-slow", None),  # 384: Marlin
        ("vllm", 4, "engine-slow", "warning"),  # 192: groups of 64 for Triton
        ("sglang", 4, "engine-experts", "error"),
        ("vllm", 3, "engine-split", None),
    ],
)
def test_experts(tmp_path: Path, engine: str, tp: int, check: str, severity: str | None) -> None:
    """The widths of Qwen3-30B-A3B: 2048 and 768."""
    shapes = header_files.experts(1, 2, 2048, 768)
    found = planned(tmp_path, shapes, engine, tp, "w4g128-gptq")
    about = {f.severity for f in found if f.check == check and "expert" in f.name + f.message}
    assert about == ({severity} if severity else set()), found


def test_marlin_pads_in_vllm_and_not_in_sglang(tmp_path: Path) -> None:
    shapes = header_files.llama(1, hidden=256, inner=768, kv=128) | {
        "model.layers.0.mlp.gate_proj.weight": (360, 256),
        "model.layers.0.mlp.up_proj.weight": (360, 256),
    }
    found = planned(tmp_path, shapes, "vllm", 1)
    (message,) = said(found, "engine-slow", "warning")
    assert "gate_proj: [720, 256] is not of 64 rows and 128 columns" in message
    (message,) = said(planned(tmp_path, shapes, "sglang", 1), "engine-shape")
    assert message.startswith("SGLang will refuse model.layers.0.mlp.gate_proj")


def test_parts_of_a_fused_layer(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(
        "method: rtn\nformat: gptq\nweights: {bits: 4, group_size: 128, symmetric: true}\n"
        "overrides: [{match: '*.q_proj', weights: {bits: 8}}]\n"
    )
    found = planned(tmp_path / "m", header_files.llama(1), "vllm", 1, str(mixed))
    (message,) = said(found, "engine-fused")
    assert "q_proj is w8 g128 sym, model.layers.0.self_attn.k_proj is w4 g128 sym" in message


def test_kernels_of_gptq(tmp_path: Path) -> None:
    shapes = header_files.llama(1)
    sets = ("format=gptq", "weights.symmetric=true", "weights.group_size=256")
    found = planned(tmp_path, shapes, "vllm", 1, "w4g128-rtn", *sets)
    assert "group_size 256, where -1, 32, 64 and 128" in said(found, "engine-scheme")[0]
    assert len(said(found, "engine-scheme")) == 1  # of all layers, not one each
    found = planned(tmp_path, shapes, "transformers", 1, "w4g128-rtn", *sets)
    assert [f.check for f in found] == ["engine-route"]
    found = planned(tmp_path, shapes, "vllm", 1, "w4g128-rtn", "weights.group_size=256")
    assert "AWQ's slow kernels: group_size 256" in said(found, "engine-slow", "warning")[0]
    found = planned(tmp_path, shapes, "transformers", 1, "w4g128-rtn", "weights.group_size=256")
    assert "no kernel for group_size 256" in said(found, "engine-scheme")[0]


@pytest.mark.parametrize(
    ("engine", "bits", "changes", "check", "severity", "phrase"),
    [
        ("vllm", 4, {}, None, "", ""),
        ("sglang", 4, {}, None, "", ""),
        ("vllm", 4, {"symmetric": False}, None, "", ""),
        ("sglang", 4, {"symmetric": False}, None, "", ""),
        ("sglang", 8, {"symmetric": False}, "engine-scheme", "error", "with zero points int4 has"),
        ("sglang", 4, {"actorder": "group"}, "engine-slow", "warning", "actorder group puts"),
        (
            "sglang",
            4,
            {"actorder": "group", "symmetric": False},
            "engine-scheme",
            "error",
            "actorder group with zero points",
        ),
        ("vllm", 8, {"symmetric": False}, "engine-slow", "warning", "on Hopper alone"),
        ("vllm", 4, {"actorder": "group"}, "engine-scheme", "error", "actorder group"),
        ("transformers", 4, {}, "engine-route", "note", "no speed is won"),
        ("exllama", 4, {}, "engine-format", "error", "not compressed-tensors"),
    ],
)
def test_compressed_tensors(
    tmp_path: Path,
    engine: str,
    bits: int,
    changes: dict[str, Any],
    check: str | None,
    severity: str,
    phrase: str,
) -> None:
    tensors = packed(bits, changes.get("symmetric", True))
    found = engine_findings(stored(tmp_path / "a", tensors, compressed(bits, **changes)), engine, 1)
    if check is None:
        assert not found
    else:
        (finding,) = found
        assert (finding.check, finding.severity) == (check, severity) and phrase in finding.message


def test_an_expression_that_hits_more_than_it_should(tmp_path: Path) -> None:
    config = compressed() | {"ignore": ["lm_head", r"re:.*mlp\.gate"]}
    found = engine_findings(stored(tmp_path / "a", packed(4), config), "vllm", 1)
    assert [f.name for f in found if f.check == "engine-skip-list"] == [
        "model.layers.0.mlp.gate_proj"
    ]
    anchored = compressed() | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}
    assert not engine_findings(stored(tmp_path / "b", packed(4), anchored), "vllm", 1)
    # transformers quantizes a head that no entry names, vLLM does not.
    unnamed = stored(tmp_path / "c", packed(4), compressed() | {"ignore": []})
    assert not engine_findings(unnamed, "vllm", 1)
    found = engine_findings(unnamed, "transformers", 1)
    assert [f.name for f in found if f.severity == "error"] == ["lm_head"]


def test_layers_that_vllm_builds_without_quantization(tmp_path: Path) -> None:
    block = "model.layers.0"
    shapes = {"model.embed_tokens.weight": (256, 256)} | {
        f"{block}.{name}.weight": (512, 256)
        for name in ("mamba.in_proj", "mamba.x_proj", "mamba.dt_proj", "self_attn.q_proj",
                     "self_attn.indexer.weights_proj", "self_attn.indexer.wk")
    }  # fmt: skip
    found = planned(tmp_path / "a", shapes, "vllm", 1)
    (message,) = said(found, "engine-dense")  # indexers stay as they are
    assert message == (
        f"{block}.mamba.in_proj and 2 more is quantized: vLLM builds the matrices of Mamba-1 "
        "layers without quantization and finds no weight for it; leave it dense by an override "
        '({match: "*.mamba.*", dense: true})'
    )
    assert not said(planned(tmp_path / "b", shapes, "sglang", 1), "engine-dense")
    dense = 'overrides=[{match: "*.mamba.*", dense: true}]'
    found = planned(tmp_path / "c", shapes, "vllm", 1, "w4g128-gptq", dense)
    assert not said(found, "engine-dense")
    # Mamba-2 has no x_proj, and its matrices are quantized.
    del shapes[f"{block}.mamba.x_proj.weight"], shapes[f"{block}.mamba.dt_proj.weight"]
    assert not said(planned(tmp_path / "d", shapes, "vllm", 1), "engine-dense")
    # Of another tool's artifact.
    wk = f"{block}.self_attn.indexer.wk"
    tensors = {k.replace(f"{block}.mlp.gate_proj", wk): v for k, v in packed(4).items()}
    (finding,) = engine_findings(stored(tmp_path / "e", tensors, compressed()), "vllm", 1)
    assert (finding.name, finding.check) == (wk, "engine-dense")
    assert "builds what an indexer is made of without quantization" in finding.message


def test_sglang_asks_by_the_name_of_the_fused_layer(tmp_path: Path) -> None:
    """A list of the parts is enough for vLLM; SGLang looks for parts of the fused name."""
    tensors = awq()
    parts = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    for module in parts:
        for last in ("qweight", "qzeros", "scales"):
            del tensors[f"{module}.{last}"]
        tensors[f"{module}.weight"] = ("F16", (512, 256))
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    named = stored(tmp_path / "a", tensors, config | {"modules_to_not_convert": parts})
    assert not engine_findings(named, "vllm", 1)
    (message,) = said(engine_findings(named, "sglang", 1), "engine-skip-list")
    assert "does not name model.layers.0.mlp.gate_up_proj, which SGLang asks for" in message
    fused = [*parts, "model.layers.0.mlp.gate_up_proj"]
    named = stored(tmp_path / "b", tensors, config | {"modules_to_not_convert": fused})
    assert not engine_findings(named, "sglang", 1)


def test_a_quantized_head_is_asked_for_by_name(tmp_path: Path) -> None:
    tensors = packed(4)
    del tensors["lm_head.weight"]
    for part, (dtype, shape) in {
        "weight_packed": ("I32", (512, 32)), "weight_scale": ("BF16", (512, 2)),
        "weight_shape": ("I64", (2,)),
    }.items():  # fmt: skip
        tensors[f"lm_head.{part}"] = (dtype, shape)
    config = compressed() | {"ignore": []}
    (finding,) = engine_findings(stored(tmp_path / "a", tensors, config), "vllm", 1)
    assert (finding.check, finding.name) == ("engine-head", "lm_head")
    config["config_groups"]["group_0"]["targets"] = ["Linear", "lm_head"]
    assert not engine_findings(stored(tmp_path / "b", tensors, config), "vllm", 1)


def _fp8(inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for expert in range(2):
        module = f"model.layers.0.mlp.experts.{expert}"
        for name, rows, columns in (
            ("gate", inner, 2048), ("up", inner, 2048), ("down", 2048, inner),
        ):  # fmt: skip
            blocks = (-(-rows // 128), -(-columns // 128))
            tensors[f"{module}.{name}_proj.weight"] = ("F8_E4M3", (rows, columns))
            tensors[f"{module}.{name}_proj.weight_scale_inv"] = ("F32", blocks)
    return tensors


@pytest.mark.parametrize(
    ("inner", "tp", "bad"), [(2560, 4, False), (2560, 8, True), (768, 4, True)]
)
def test_blocks_of_fp8(tmp_path: Path, inner: int, tp: int, bad: bool) -> None:
    """Qwen3-Coder-480B has experts of 2560: 320 on each of 8 ranks, no whole blocks of 128."""
    config = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    }  # fmt: skip
    artifact = stored(tmp_path / "a", _fp8(inner), config)
    for engine in ("vllm", "sglang"):
        found = said(engine_findings(artifact, engine, tp), "engine-block-split")
        assert bool(found) == bad
        assert not bad or f"{inner} / {tp} = {inner // tp} is not a multiple of 128" in found[0]


def test_gguf() -> None:
    q4, plain = {"a.weight": BY_NAME["Q4_K"]}, {"a.weight": F32}
    assert not type_findings("llama", q4, "llama.cpp", 1)
    assert not type_findings("gemma3", plain, "llama.cpp", 1)
    (finding,) = type_findings("llama-9", q4, "llama.cpp", 1)
    assert finding.check == "engine-architecture" and "'llama-9'" in finding.message
    eight = next(kind for kind in TENSOR_TYPES.values() if kind.name == "I8")
    (finding,) = type_findings("llama", {"a.weight": eight}, "llama.cpp", 1)
    assert finding.check == "engine-types" and finding.name == "a.weight"
    assert type_findings("llama", q4, "vllm", 1)[0].severity == "error"
    assert type_findings("llama", q4, "transformers", 1)[0].severity == "warning"


def test_usage(tmp_path: Path) -> None:
    artifact = stored(tmp_path / "a", packed(4), compressed())
    with pytest.raises(UsageError, match=r"--engine is 'tgi'; there are vllm, sglang"):
        engine_findings(artifact, "tgi", 1)
    with pytest.raises(UsageError, match="--tp is 0"):
        engine_findings(artifact, "vllm", 0)
    assert len(ENGINES) == 6


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["qtool", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_plan_asks_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = header_files.write(tmp_path / "m", header_files.llama(1), {"num_attention_heads": 4})
    plan = ("plan", str(model), "--recipe", "w4g128-gptq")
    assert call(monkeypatch, *plan, "--engine", "vllm", "--tp", "4") == 1
    said = capsys.readouterr().out
    assert "error: vLLM with --tp 4 will refuse model.layers.0.mlp.down_proj: in_features" in said
    assert call(monkeypatch, *plan, "--engine", "vllm", "--tp", "4", "--json") == 1
    made = json.loads(capsys.readouterr().out)
    assert (made["engine"], made["tp"]) == ("vllm", 4)
    assert {f["check"] for f in made["findings"]} == {"engine-group-split"}
    assert call(monkeypatch, *plan, "--engine", "vLLM") == 0
    assert "note: vllm has nothing to say against it" in capsys.readouterr().out
    assert call(monkeypatch, *plan, "--json") == 0
    assert not {"engine", "tp", "findings"} & json.loads(capsys.readouterr().out).keys()
    assert call(monkeypatch, *plan, "--tp", "2") == 2
    assert call(monkeypatch, *plan, "--engine", "ollama") == 2


@pytest.mark.parametrize(
    "bits, strategy, inputs, refused",
    [
        (8, "channel", {"strategy": "tensor", "dynamic": False}, False),  # SmoothQuant's O3
        (8, "tensor", {"strategy": "tensor", "dynamic": False}, False),
        (8, "channel", {"strategy": "tensor", "dynamic": True}, True),  # O2
        (8, "channel", {"strategy": "token", "dynamic": True}, False),  # O1
        (8, "group", {"strategy": "token", "dynamic": True}, True),  # ZeroQuant
        (4, "group", {"strategy": "token", "dynamic": True}, False),
        (4, "group", {"strategy": "tensor", "dynamic": False}, True),
        (4, "tensor", {"strategy": "token", "dynamic": True}, True),
        (8, "channel", {"strategy": "token", "dynamic": True, "num_bits": 4}, True),
    ],
)
def test_engines_multiply_some_inputs_with_some_weights(
    bits: int, strategy: str, inputs: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    size = {"group_size": 128 if strategy == "group" else None}
    config = compressed(bits, strategy=strategy, **size) | {"format": "int-quantized"}
    arguments = {"num_bits": 8, "type": "int", "symmetric": True} | inputs
    config["config_groups"]["group_0"]["input_activations"] = arguments
    artifact = stored(tmp_path / "a", plain(strategy), config)
    found = [f for f in engine_findings(artifact, "vllm", 1) if f.check == "engine-scheme"]
    assert bool(found) == refused
    if refused:
        assert found[0].severity == "error" and "have no kernel" in found[0].message
    # SGLang multiplies the same, but for 4 bits.
    other = [f for f in engine_findings(artifact, "sglang", 1) if f.check == "engine-scheme"]
    assert bool(other) == (refused or bits == 4)
