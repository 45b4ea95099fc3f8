"""DeepSeek's attention to latents as GGUF: parts of a matrix, transposed or not; refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_values import Kind, f32, u32
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.from_hf import cuts
from qtool.gguf.from_hf.cuts import Cut, cut_out
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.importance.measured import Gathered, Squares
from qtool.gguf.source import GgufSource
from qtool.texts.calibration import Calibration
from support.gguf import gguf_models
from support.gguf.gguf_from_hf import without_tokenizers
from support.models.hf_arrays import Arrays, numbers, write

__all__ = ["without_tokenizers"]

HEADS, KEYS, VALUES, LATENTS, ROTATED, WIDTH = 2, 6, 4, 8, 2, 16
SETTINGS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": 24,
    "vocab_size": 10, "kv_lora_rank": LATENTS, "q_lora_rank": 12, "qk_nope_head_dim": KEYS,
    "qk_rope_head_dim": ROTATED, "v_head_dim": VALUES, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64,
}  # fmt: skip


def model(*, ranked: bool = True) -> Arrays:
    at, attention = "model.layers.0.", "model.layers.0.self_attn."
    queries = HEADS * (KEYS + ROTATED)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (10, WIDTH), "lm_head": (10, WIDTH), "model.norm": (WIDTH,),
        f"{at}input_layernorm": (WIDTH,), f"{at}post_attention_layernorm": (WIDTH,),
        f"{attention}kv_a_proj_with_mqa": (LATENTS + ROTATED, WIDTH),
        f"{attention}kv_a_layernorm": (LATENTS,),
        f"{attention}kv_b_proj": (HEADS * (KEYS + VALUES), LATENTS),
        f"{attention}o_proj": (WIDTH, HEADS * VALUES),
        f"{at}mlp.gate_proj": (24, WIDTH), f"{at}mlp.up_proj": (24, WIDTH),
        f"{at}mlp.down_proj": (WIDTH, 24),
    }  # fmt: skip
    if ranked:
        shapes |= {
            f"{attention}q_a_proj": (12, WIDTH), f"{attention}q_a_layernorm": (12,),
            f"{attention}q_b_proj": (queries, 12),
        }  # fmt: skip
    else:
        shapes[f"{attention}q_proj"] = (queries, WIDTH)
    return {f"{name}.weight": numbers(*shape) for name, shape in shapes.items()}


def source_of(folder: Path, tensors: Arrays, **change: Any) -> GgufSource:
    return hf_source(write(folder, {**SETTINGS, **change}, tensors))


@pytest.mark.parametrize("bytes_at_once", [1 << 24, 40])
def test_parts_of_matrices(bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any range of bytes, transposed or not, in bands and reads of any size."""
    monkeypatch.setattr(cuts, "_BAND_BYTES", bytes_at_once)
    monkeypatch.setattr(cuts, "_READ_BYTES", bytes_at_once)
    whole = np.arange(3 * 5 * 7, dtype=np.float16).reshape(3, 5, 7)
    raw = whole.reshape(-1).view(np.uint8)
    info = TensorInfo("w", "F16", (15, 7), 0, raw.nbytes)
    for cut, expected in (
        (Cut(3, 5, 0, 2), whole[:, :2]),
        (Cut(3, 5, 2, 5), whole[:, 2:]),
        (Cut(3, 5, 1, 4, transposed=True), whole[:, 1:4].swapaxes(1, 2)),
    ):
        stretch, found = cut_out(lambda a, b: raw[a:b], info, cut)
        assert found.shape == expected.shape
        wanted = np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
        for start, stop in ((0, wanted.nbytes), (6, 6), (14, 38), (30, wanted.nbytes)):
            assert np.array_equal(stretch(start, stop), wanted[start:stop])
    axes = TensorInfo("w", "F16", (3, 5, 7), 0, raw.nbytes)
    stretch, found = cut_out(lambda a, b: raw[a:b], axes, Cut(transposed=True))
    assert found.shape == (3, 7, 5)
    assert np.array_equal(stretch(0, raw.nbytes).view(np.float16).reshape(3, 7, 5),
                          whole.swapaxes(1, 2))  # fmt: skip
    with pytest.raises(FormatError, match=r"\[15, 7\].* it should have 16 rows"):
        cut_out(lambda a, b: raw[a:b], info, Cut(4, 4))


def test_keys_and_values_apart(tmp_path: Path) -> None:
    tensors = model()
    made = {t.name: t for t in source_of(tmp_path / "m", tensors).tensors}
    both = tensors["model.layers.0.self_attn.kv_b_proj.weight"].reshape(HEADS, -1, LATENTS)
    for name, part in (
        ("attn_k_b", both[:, :KEYS].swapaxes(1, 2)),
        ("attn_v_b", both[:, KEYS:]),
    ):
        tensor = made[f"blk.0.{name}.weight"]
        assert tensor.shape == part.shape
        assert tensor.origin == ("model.layers.0.self_attn.kv_b_proj.weight",)
        assert tensor.read(0, tensor.rows).tobytes() == np.ascontiguousarray(part).tobytes()


def test_importance_of_latents(tmp_path: Path) -> None:
    """The values of every head read them; what reads the queries is not seen."""
    source = source_of(tmp_path / "m", model())
    square = np.arange(LATENTS, dtype=np.float32)
    gathered = Gathered()
    gathered.add(Squares("s", ("model.layers.0.self_attn.kv_b_proj.weight",), None, square, 5))
    calibration = Calibration(np.zeros((1, 4), np.int64), "none", 0)
    found = gathered.importance(source, calibration)
    assert np.array_equal(found.entries["blk.0.attn_v_b.weight"], np.stack([square / 5] * HEADS))
    assert "blk.0.attn_k_b.weight" in found.unmeasured


def test_a_rank_that_llama_cpp_asks_for(tmp_path: Path) -> None:
    key = "deepseek2.attention.q_lora_rank"
    assert source_of(tmp_path / "a", model()).metadata[key] == u32(12)
    plain = source_of(tmp_path / "b", model(ranked=False), q_lora_rank=None)
    assert plain.metadata[key] == u32(0)
    assert plain.metadata["deepseek2.expert_gating_func"] == u32(2)
    said = source_of(tmp_path / "c", model(), scoring_func="softmax").metadata
    assert said["deepseek2.expert_gating_func"] == u32(1)
    rope = {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7}
    keys = source_of(tmp_path / "d", model(), rope_scaling=rope).metadata
    assert keys["deepseek2.rope.scaling.yarn_log_multiplier"] == f32(0.1 * 0.7)


def test_blocks_that_predict_are_dropped(tmp_path: Path) -> None:
    ahead = {"model.layers.1.eh_proj.weight": numbers(WIDTH, 2 * WIDTH)}
    source = source_of(tmp_path / "m", {**model(), **ahead}, num_nextn_predict_layers=1)
    ((name, reason),) = source.dropped
    assert name == "model.layers.1.eh_proj.weight" and "multi-token prediction" in reason
    assert source.metadata["deepseek2.block_count"] == u32(1)
    with pytest.raises(FormatError, match=r"no place for the tensor .*eh_proj"):
        source_of(tmp_path / "n", {**model(), **ahead})


def test_groups_by_their_best_are_told(tmp_path: Path) -> None:
    grouped = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
    own = {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": False}
    (said,) = source_of(tmp_path / "m", model(), **own, **grouped).warnings
    assert "by the sum of the best two" in said


_YARN = {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}
_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 1}, "there are 1 heads of keys"),
    ({"attention_bias": True}, "attention_bias is true"),
    ({"rope_scaling": {**_YARN, "mscale": 0.7}}, "mscale is 0.7 and mscale_all_dim 1.0"),
    (
        {"rope_scaling": {**_YARN, "mscale": 1.0, "attention_factor": 2}},
        "attention_factor of .* is 2",
    ),
    ({"rope_scaling": {**_YARN, "mscale": 1.0, "beta_fast": 16}}, "beta_fast of .* is 16"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling of the type 'linear'"),
    ({"n_group": 4, "topk_group": 4}, "of 4 of 4 groups"),
    ({"rope_interleave": False}, "it rotates neighbours"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ({"num_hidden_layers": 27, "first_k_dense_replace": 27}, "with 27 blocks it takes none"),
    ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob is tr"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_head_dim": 96}, "index_head_dim is 96, and it rotates keys of a multiple of 64"),
        ({"indexer_types": ["shared", *["full"] * 3]}, "the first block is shared"),
        ({"index_topk_pattern": "SFFF", "indexer_types": None}, "the first block is shared"),
        ({"indexer_types": ["full"]}, "not a list of 4 words"),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types is not 2 blocks without experts"),
        ({"rope_parameters": {**_YARN, "rope_theta": 1e4}}, "rope scaling of the type 'yarn'"),
        ({"attention_bias": True}, "attention_bias is true"),
    ],
)
def test_indexers_that_llama_cpp_has_not(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = gguf_models.build("glm-5", tmp_path / "m")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(QtoolError, match=message):
        hf_source(Checkpoint.open(folder))


def test_which_blocks_have_an_indexer(tmp_path: Path) -> None:
    """As the settings say, in any of three ways."""
    folder = gguf_models.build("glm-5", tmp_path / "m")
    ways: list[dict[str, Any]] = [
        {"indexer_types": None, "index_topk_pattern": "FSFS"},
        {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ]
    for way in ({}, *ways):
        gguf_models.rewrite_config(folder, lambda config, way=way: config.update(way))  # type: ignore[misc]
        source = hf_source(Checkpoint.open(folder))
        key = source.metadata["glm-dsa.attention.indexer.types"]
        assert key.value == [True, False, True, False] and key.element == Kind.BOOL
        names = {tensor.name for tensor in source.tensors}
        assert "blk.2.indexer.proj.weight" in names and "blk.3.indexer.proj.weight" not in names


@pytest.mark.parametrize(("change", "message"), _REFUSED)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.x": numbers(1) for i in range(1, 27)}  # as many as blocks
    with pytest.raises(UnsupportedError, match=message):
        source_of(tmp_path / "m", {**model(), **extra}, **change)


def test_another_shape(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"kv_b_proj.* should have 22 rows"):
        source_of(tmp_path / "m", model(), v_head_dim=5)
