"""Block by block, a model computes what transformers computes with all of it in memory."""

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qtool.calibrating.sites import Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import SourceError, UnsupportedError
from qtool.streaming.joined_rows import Joined, RowsOf
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from support.models.arch_models import ARCHITECTURES, CONFIGS, VOCABULARY, build


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every architecture."""
    return {name: build(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def some_tokens(samples: int = 5, length: int = 40, seed: int = 0) -> NDArray[np.int64]:
    """More positions than Gemma's window has, and samples that fill no micro-batch evenly."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, (samples, length), dtype=np.int64)


def whole(folder: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def edit(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with tensors replaced, or removed where the value is None."""
    tensors = load_file(source / "model.safetensors")
    for name, value in changes.pop("tensors", {}).items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    config = json.loads((source / "config.json").read_text()) | changes
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, folders: dict[str, Path], workers: Workers
) -> None:
    tokens = some_tokens()
    skeleton = Skeleton.open(Checkpoint.open(folders[name]))
    stream = skeleton.embed(tokens, micro_batch_tokens=80)
    assert len(stream.hidden) == 3
    for index in range(skeleton.count):
        skeleton.advance(skeleton.block(index), stream, workers)
    ours = torch.cat([skeleton.head(hidden) for hidden in stream.hidden])
    with torch.no_grad():
        theirs = whole(folders[name])(input_ids=torch.from_numpy(tokens)).logits
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def tensors_of_a_block(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Under the names that transformers has."""
    parts: dict[str, torch.Tensor] = {}
    found = dict(module.state_dict())
    for path, part in module.named_modules():
        if isinstance(part, Joined):
            for key, _ in part.named_parameters():
                del found[f"{path}.{key}"]
        if isinstance(part, RowsOf):
            parts[f"{path}.weight"] = part.weight
            if part.bias is not None:
                parts[f"{path}.bias"] = part.bias
    return found | parts


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_a_block_is_bit_equal(name: str, folders: dict[str, Path]) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders[name]))
    theirs = whole(folders[name]).state_dict()
    for index in range(skeleton.count):
        block = skeleton.block(index)
        own = tensors_of_a_block(block.module)
        here = {key for key in theirs if key.startswith(block.prefix)}
        assert {block.prefix + key for key in own} == here
        for key, value in own.items():
            assert torch.equal(value, theirs[block.prefix + key]), key
        assert set(block.weights) == set(skeleton.block_tensors(index))
        for key, view in block.weights.items():
            assert np.array_equal(view.numpy(), skeleton.checkpoint.float32(key)), key
    assert skeleton.unknown == ()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_writing_into_a_weight_changes_the_block(
    name: str, folders: dict[str, Path], workers: Workers
) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders[name]))
    stream = skeleton.embed(some_tokens(1))
    block = skeleton.block(0)
    before = block.run(stream.hidden[0], stream.calls[0][0])
    for key, view in block.weights.items():
        if view.ndim == 2 and "gate" not in key.split(".")[-2]:
            kept = view.clone()
            view.mul_(1.5)
            assert not torch.equal(block.run(stream.hidden[0], stream.calls[0][0]), before), key
            view.copy_(kept)
    assert torch.equal(block.run(stream.hidden[0], stream.calls[0][0]), before)


def test_gemma_blocks_get_their_own_arguments(folders: dict[str, Path]) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["gemma3"]))
    stream = skeleton.embed(some_tokens(4), micro_batch_tokens=80)
    masks = [calls[0].kwargs["attention_mask"] for calls in stream.calls]
    sliding, full = masks[0], masks[2]
    assert masks[1] is sliding and masks[3] is sliding
    # Full attention over whole samples is sdpa's own, without a mask; a window needs one.
    assert full is None
    assert not bool(sliding[0, 0, 39, 39 - 8]) and bool(sliding[0, 0, 39, 39 - 7])
    rope = [calls[0].kwargs["position_embeddings"] for calls in stream.calls]
    assert rope[1][0] is rope[0][0] and rope[2][0] is not rope[0][0]
    # Equal arguments of several micro-batches are kept once.
    assert stream.calls[0][1].kwargs["attention_mask"] is sliding


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "opt"])
def test_the_probe_is_a_prefix(name: str, folders: dict[str, Path], workers: Workers) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders[name]))
    stream = skeleton.embed(some_tokens(3, length=100), micro_batch_tokens=100)
    for index in range(skeleton.count):
        block = skeleton.block(index)
        hidden, call = stream.probe(index)
        short = block.run(hidden, call)
        skeleton.advance(block, stream, workers)
        assert short.shape[1] == 64
        assert torch.allclose(short, stream.hidden[0][:1, :64], rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit(folders: dict[str, Path]) -> None:
    results = []
    for threads in (1, 2, 3):
        with Workers(threads) as pool:
            skeleton = Skeleton.open(Checkpoint.open(folders["mixtral"]))
            results.append(skeleton.logits(some_tokens(7), pool).numpy().tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(
    dtype: torch.dtype, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders["mixtral"] / "model.safetensors")
    half = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder = edit(folders["mixtral"], tmp_path / "half", tensors=half)
    block = Skeleton.open(Checkpoint.open(folder)).block(1)
    for name, view in block.weights.items():
        assert view.dtype == torch.float32
        assert torch.equal(view, half[name].to(torch.float32)), name


def test_a_dropped_block_is_freed(folders: dict[str, Path]) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["llama"]))
    block = skeleton.block(0)
    alive = weakref.ref(block.module)
    del block
    gc.collect()
    assert alive() is None
    assert all(p.device.type == "meta" for p in skeleton.model.parameters())


def test_embedding_leaves_nothing_behind(folders: dict[str, Path]) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["opt"]))
    stream = skeleton.embed(some_tokens(1))
    skeleton.head(stream.hidden[0])
    assert all(p.device.type == "meta" for p in skeleton.model.parameters())
    assert not any("forward" in module.__dict__ for module in skeleton.model.modules())


def test_tensors_unknown_to_the_class_are_told(folders: dict[str, Path], tmp_path: Path) -> None:
    extra = {"model.layers.3.mtp.weight": torch.zeros(2, 2), "extra.weight": torch.zeros(1)}
    folder = edit(folders["llama"], tmp_path / "extra", tensors=extra)
    assert set(Skeleton.open(Checkpoint.open(folder)).unknown) == set(extra)


def test_a_missing_weight_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    folder = edit(folders["llama"], tmp_path / "missing", tensors={name: None})
    with pytest.raises(
        SourceError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*LlamaForCausalLM needs"
    ):
        Skeleton.open(Checkpoint.open(folder))


def test_a_wrong_shape_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(folders["llama"], tmp_path / "shape", intermediate_size=80)
    with pytest.raises(SourceError, match=r"down_proj.*\[64, 96\].*\[64, 80\]"):
        Skeleton.open(Checkpoint.open(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(
    value: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folders["llama"] / "model.safetensors")[name]
    weight[5, 7] = value
    folder = edit(folders["llama"], tmp_path / "nan", tensors={name: weight})
    skeleton = Skeleton.open(Checkpoint.open(folder))
    skeleton.block(0)
    with pytest.raises(SourceError, match=rf"{name}.* at \[5, 7\]"):
        skeleton.block(1)


def test_an_unknown_architecture_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(folders["llama"], tmp_path / "unknown", model_type="frobnicator")
    with pytest.raises(UnsupportedError, match=r"frobnicator.*RTN can quantize"):
        Skeleton.open(Checkpoint.open(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"hidden_size": -4},
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"vocab_size": None},
        {"rope_parameters": {"rope_type": "nope"}},
    ],
)
def test_a_config_that_makes_no_model_is_an_error(
    changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edit(folders["llama"], tmp_path / "odd", **changes)
    with pytest.raises(SourceError, match=r"config\.json: transformers cannot build the 'llama'"):
        Skeleton.open(Checkpoint.open(folder))


def test_a_model_without_blocks_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(folders["llama"], tmp_path / "empty", num_hidden_layers=0)
    with pytest.raises(UnsupportedError, match="no list of blocks"):
        Skeleton.open(Checkpoint.open(folder))


def test_code_that_comes_with_a_checkpoint_is_never_run(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    folder = edit(folders["llama"], tmp_path / "code", auto_map=code)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    Skeleton.open(Checkpoint.open(folder))
    (tmp_path / "other").mkdir()
    folder = edit(folder, tmp_path / "other", model_type="frobnicator", auto_map=code)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UnsupportedError):
        Skeleton.open(Checkpoint.open(folder))
    assert not (tmp_path / "ran").exists()


def test_no_config_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit(folders["llama"], tmp_path / "bare")
    (folder / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config\.json"):
        Skeleton.open(Checkpoint.open(folder))


def test_gpt2_is_run_and_not_calibrated(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    skeleton = Skeleton.open(Checkpoint.open(tmp_path))
    tokens = some_tokens(2)
    with Workers(2) as workers, torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits
        torch.testing.assert_close(skeleton.logits(tokens, workers), expected)
    with pytest.raises(UnsupportedError, match=r"h\.0\.attn\.c_attn: a Conv1D"):
        Tracer().sites(skeleton.block(0), skeleton.embed(tokens))


def test_blocks_that_hand_on_more_than_hidden_states_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["llama"]))
    inner = skeleton.model.model
    forward = inner.layers[1].forward

    def loop(input_ids: Any, **_: Any) -> Any:
        hidden, extra = inner.embed_tokens(input_ids), None
        for layer in inner.layers:
            hidden, extra = layer(hidden, position_embeddings=extra)
        return hidden

    monkeypatch.setattr(inner, "forward", loop)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM hands 'position_emb.*RTN can"):
        skeleton.embed(some_tokens(3))
    assert skeleton.blocks[1].forward == forward


def test_hidden_states_of_another_shape_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["llama"]))
    inner = skeleton.model.model

    def loop(input_ids: Any, **_: Any) -> Any:
        hidden = inner.embed_tokens(input_ids).transpose(0, 1)
        for layer in inner.layers:
            hidden = layer(hidden)
        return hidden

    monkeypatch.setattr(inner, "forward", loop)
    with pytest.raises(UnsupportedError, match=r"LlamaFor.*\[40, 3, 64\].*RTN can"):
        skeleton.embed(some_tokens(3))


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda hidden, **_: hidden @ torch.ones(3, 3), r"\(RuntimeError: .*shapes"),
        (lambda hidden, **_: hidden[..., :3], "returns other hidden states"),
        (lambda hidden, **_: None, "returns other hidden states"),
        (lambda hidden: hidden, r"\(TypeError: "),
        (lambda hidden, **_: {}["x"], r"\(KeyError: 'x'"),
    ],
)
def test_a_block_that_cannot_be_run_is_one_sentence(
    forward: Any, said: str, folders: dict[str, Path]
) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["llama"]))
    stream = skeleton.embed(some_tokens(1))
    block = skeleton.block(1)
    block.module.forward = forward
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.1: LlamaDecoderLayer .*{said}"):
        Tracer().sites(block, stream)


def test_loops_that_take_the_first_of_a_tuple_are_followed(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with Workers(1) as pool:
        ours = Skeleton.open(Checkpoint.open(tmp_path)).logits(some_tokens(3), pool)
    with torch.no_grad():
        theirs = whole(tmp_path)(input_ids=torch.from_numpy(some_tokens(3))).logits
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_positions_beyond_the_model_are_an_error(folders: dict[str, Path]) -> None:
    skeleton = Skeleton.open(Checkpoint.open(folders["opt"]))
    with pytest.raises(SourceError, match="positions"):
        skeleton.embed(some_tokens(1, length=200))


def test_the_shipped_model(workers: Workers) -> None:
    from qtool.hub import tiny_folder

    folder = tiny_folder()
    tokens = some_tokens(2, length=64)
    ours = Skeleton.open(Checkpoint.open(folder)).logits(tokens, workers)
    with torch.no_grad():
        theirs = whole(folder)(input_ids=torch.from_numpy(tokens)).logits
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
