"""Blocks that hand on more than one stream of hidden states: what is run is what transformers
runs, and calibrated recipes, resuming, proofs, tuning and fitting take it as any other."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from qtool.artifacts.artifact import Artifact
from qtool.calibrating.placed import Calls
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cuda.device import Device
from qtool.errors import UnsupportedError
from qtool.planning.handed import Handed, handed_on
from qtool.streaming import arguments
from qtool.streaming.hidden import OnDisk
from qtool.streaming.layout import Beside, Entry, Layout, Positions, Stored
from qtool.streaming.skeleton import PROBE_TOKENS, Skeleton
from qtool.streaming.workers import Workers
from qtool.transforms import awq
from support.fitting import sensitivities_by_hand
from support.fitting.sensitivities_by_hand import likeliest  # noqa: F401
from support.models import handed_models, unusual_decoders
from support.models.unusual_decoders import TOKENS, check_logits
from support.runs import killed_runs, quantizing

SETS = ("calibration.samples=4", "calibration.length=96", "indivisible=dense")
ALL = 256  # positions to choose from, of fewer: which of equally good ones is taken is chance


def built(name: str, folder: Path, chosen: int | None = None) -> Any:
    """chosen: how many positions."""
    kind, keys = handed_models.HANDED[name]
    text = keys.get("text_config", keys)
    if chosen is not None and "index_topk" in text:
        text = {**text, "index_topk": chosen}
        keys = {**keys, "text_config": text} if "text_config" in keys else text
    family = AutoModelForImageTextToText if "vision_config" in keys else AutoModelForCausalLM
    model = unusual_decoders.built(kind, folder, family, **keys)
    quantizing.add_tokenizer(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    quantizing.text_file(root / "text.txt")
    for name in handed_models.HANDED:
        built(name, root / name, ALL)
    return {name: root / name for name in handed_models.HANDED}


@pytest.fixture(autouse=True)
def few_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """For AWQ to choose from."""
    monkeypatch.setattr(awq, "_WEIGHT_EXPONENTS", (0.0, 0.5))


def quantize(model: Path, recipe: str, out: Path, *sets: str) -> quantizing.Run:
    text = f"calibration.source={model.parent / 'text.txt'}"
    return quantizing.quantize(model, recipe, out, text, *SETS, *sets)


def logits(model: Path, tokens: NDArray[np.int64] = TOKENS) -> torch.Tensor:
    with Workers(2) as workers:
        return Skeleton.open(Checkpoint.open(model)).logits(tokens, workers)


@pytest.mark.parametrize("name", handed_models.HANDED)
def test_logits(name: str, tmp_path: Path) -> None:
    model = built(name, tmp_path)
    check_logits(tmp_path, model)


@pytest.mark.parametrize("name", handed_models.HANDED)
def test_the_beginning_of_a_text_is_that_of_its_states(name: str, folders: dict[str, Path]) -> None:
    tokens = np.random.default_rng(1).integers(3, 90, (2, PROBE_TOKENS + 32), dtype=np.int64)
    skeleton = Skeleton.open(Checkpoint.open(folders[name]))
    stream = skeleton.embed(tokens)
    with Workers(1) as workers:
        for index in range(skeleton.count):
            block = skeleton.block(index)
            probed = block.run(*stream.probe(index))
            skeleton.advance(block, stream, workers)
            whole = stream.layout.hidden(stream.hidden[0])[:1, :PROBE_TOKENS]
            torch.testing.assert_close(probed, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "transforms"),
    [
        ("gemma4", "[smooth-attention, smooth]"),
        pytest.param("gemma3n", "[smooth-attention, smooth]", marks=pytest.mark.slow),
        ("glm_moe_dsa", "[awq]"),
        pytest.param("glm_moe_dsa", "[smooth]", marks=pytest.mark.slow),
        pytest.param("deepseek_v4", "[awq]", marks=pytest.mark.slow),
        pytest.param("mistral_large4", "[smooth]", marks=pytest.mark.slow),
    ],
)
def test_scales_change_nothing(
    name: str, transforms: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Of latent keys that later blocks expand with matrices of their own neither."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"method: none\nformat: dense\ntransforms: {transforms}\n"
        "weights: {bits: 4, group_size: 16, symmetric: true}\n"
    )
    run = quantize(folders[name], str(recipe), tmp_path / "out")
    before = Checkpoint.open(folders[name])
    artifact = Artifact.open(run.out)
    floats = {n for n, one in before.tensors.items() if one.dtype == "F32"}
    made = artifact.dequantized()
    assert any((values != before.float32(n)).any() for n, values in made if n in floats)
    dense = quantizing.write_dense(run.out, tmp_path / "dense")
    torch.testing.assert_close(logits(dense), logits(folders[name]), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        "gemma4",
        pytest.param("glm_moe_dsa", marks=pytest.mark.slow),
        pytest.param("gemma3n", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_and_keeps_states_on_the_disk(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(folders[name], "w4g128-gptq", tmp_path / "whole", "weights.group_size=16")
    for after in (2, 1):
        with monkeypatch.context() as patched, pytest.raises(killed_runs.Died):
            killed_runs.dying(after, patched)
            quantize(folders[name], "w4g128-gptq", tmp_path / "out", "weights.group_size=16")
    again = quantize(folders[name], "w4g128-gptq", tmp_path / "out", "weights.group_size=16")
    assert quantizing.files(again.out) == quantizing.files(whole.out)
    skeleton = Skeleton.open(Checkpoint.open(folders[name]))
    kept = skeleton.embed(TOKENS, states=OnDisk(tmp_path))
    plain = skeleton.embed(TOKENS)
    with Workers(1) as workers:
        for index in range(skeleton.count):
            for stream in (kept, plain):
                skeleton.advance(skeleton.block(index), stream, workers)
    assert torch.equal(kept.hidden[0], plain.hidden[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_scales_are_tuned(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    run = quantize(folders[name], "w4g128-awq-gptq-tune", tmp_path / "out",
                   "weights.group_size=16", "tune.steps=8")  # fmt: skip
    (note,) = [note for note in run.summary.notes if "blocks were tuned" in note]
    nearer, blocks = re.match(r"scales of (\d+) of (\d+) blocks", note).groups()  # type: ignore[union-attr]
    assert int(blocks) == 6 and int(nearer) >= 3


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("name", ["gemma4", "gemma3n", "glm_moe_dsa"])
def test_sensitivities_are_those_of_autograd(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Through keys and values that later blocks attend to, too."""
    found = sensitivities_by_hand.measured(folders[name], tmp_path / "out")
    expected, tables = sensitivities_by_hand.by_hand(folders[name])
    sensitivities_by_hand.check_tables(found, tables)
    checked = 0
    for weight, sensitivity in expected.items():
        if weight in found.matrices and ".experts." not in weight:
            sensitivities_by_hand.check_same(found.matrices[weight][-1], sensitivity)
            checked += 1
    assert checked > 12


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("name", ["deepseek_v4", "zaya"])
def test_tables_are_those_of_autograd(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Where all streams begin as the embedding, and where it is scaled."""
    found = sensitivities_by_hand.measured(folders[name], tmp_path / "out")
    sensitivities_by_hand.check_tables(found, sensitivities_by_hand.by_hand(folders[name])[1])


LAYOUT = Layout(
    (2, 3), True, (Positions(1, 4), Entry("full", 0, 2, 2), Entry("full", 1, 2, 0)), dict
)


def test_states_hold_what_is_handed_on() -> None:
    hidden = torch.randn(2, 1, 5, 3)  # streams, samples, length, width
    states = LAYOUT.first(hidden)
    assert states.shape == (1, 5, 2 * 3 + 4 + 2 * 2)
    assert torch.equal(LAYOUT.as_model(states), hidden)
    given = LAYOUT.given(states)
    keys, values = torch.randn(1, 2, 5, 2), torch.randn(1, 2, 5, 0)
    assert given.common is not None
    given.common["full"] = (keys, values)
    chosen = torch.tensor([[[3, 0, -1], [1, 0, 2], [4, 3, 2], [-1, -1, 0], [-1, -1, -1]]])
    after = LAYOUT.after(states, given, (2 * hidden, chosen), "Block")
    given = LAYOUT.given(after)
    assert torch.equal(given.hidden, 2 * hidden)
    assert given.common is not None and torch.equal(given.common["full"][0], keys)
    assert given.common["full"][1].shape == values.shape
    positions = [sorted(set(row)) for row in given.returned[1][0].tolist()]
    assert positions == [[-1, 0, 3], [0, 1, 2], [2, 3, 4], [-1, 0], [-1]]
    # One that chooses nothing leaves what was chosen.
    later = LAYOUT.after(after, given, (hidden, None), "Block")
    assert torch.equal(LAYOUT.given(later).returned[1], given.returned[1])


@pytest.mark.parametrize(
    ("values", "output", "kept", "said"),
    [
        ((), lambda h: (h[..., :1], None), {}, "returns other hidden states"),
        ((), lambda h: (h, None), {"x": 1}, "keeps something for later blocks under 'x'"),
        ((Beside(1, 2),), lambda h: (h, None), {}, "does not hand on what later blocks"),
        ((Beside(1, 2),), lambda h: h, {}, "does not hand on what later blocks"),
        ((Beside(1, 2),), lambda h: (h, h), {}, r"hands on \[1, 5, 3\] numbers, not 2"),
    ],
)
def test_what_is_handed_on_otherwise_is_refused(
    values: Any, output: Any, kept: dict[str, Any], said: str
) -> None:
    layout = Layout((3,), False, values, dict)
    states = layout.first(torch.randn(1, 5, 3))
    given = layout.given(states)
    assert given.common is not None
    given.common.update(kept)
    with pytest.raises(UnsupportedError, match=f"Block {said}"):
        layout.after(states, given, output(given.hidden), "Block")


def test_what_each_block_is_given_alone_may_lie_on_the_disk(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "_LARGE", 1)
    skeleton = Skeleton.open(Checkpoint.open(folders["gemma4"]))
    stream = skeleton.embed(TOKENS, 24, states=OnDisk(tmp_path))
    own = [call.args[0] for calls in stream.calls for call in calls]
    assert all(isinstance(one, Stored) for one in own)
    assert len({one.start for one in own}) == len(own) == 6 * 3
    with Workers(2) as workers:
        for index in range(skeleton.count):
            skeleton.advance(skeleton.block(index), stream, workers)
    with skeleton.open_head() as head:
        found = torch.cat([head(states) for states in stream.hidden])
    assert torch.equal(found, logits(folders["gemma4"]))


def test_nothing_of_other_blocks_is_kept_with_what_a_block_is_given(
    folders: dict[str, Path],
) -> None:
    """Which is a part of what all are given."""
    stream = Skeleton.open(Checkpoint.open(folders["gemma4"])).embed(TOKENS)
    for calls in stream.calls:
        given = calls[0].args[0]
        assert given.shape == (*TOKENS.shape, 16)
        assert given.untyped_storage().nbytes() == given.nbytes


@pytest.mark.parametrize("name", handed_models.HANDED)
def test_what_is_planned_for_is_what_goes(name: str, folders: dict[str, Path]) -> None:
    model = Checkpoint.open(folders[name])
    stream = Skeleton.open(model).embed(TOKENS)
    planned = handed_on(model.config, TOKENS.shape[1])
    width = stream.layout.shape[-1]
    columns = stream.hidden[0].shape[-1]
    assert columns <= planned.streams * width + planned.columns
    if name != "gemma4":  # its heads of full attention are taken for as wide as is usual
        assert columns == planned.streams * width + planned.columns
    # Rotary embeddings are [1, length, ...].
    args = [one for calls in stream.calls for one in calls[0].args]
    own = [a for a in args if isinstance(a, torch.Tensor) and a.shape[:2] == TOKENS.shape]
    assert planned.given == sum(one.shape[-1] for one in own)


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_fit_goes_on_with_gradients_by_what_blocks_are_given(
    damaged: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sensitivities_by_hand.measured(folders["gemma4"], tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(killed_runs.Died):
        killed_runs.dying(7 + 4, patched)  # states before each block and the head, then backwards
        sensitivities_by_hand.measured(folders["gemma4"], tmp_path / "out")
    kept = sorted((tmp_path / ".out.partial").glob("given-*"))
    assert [path.name for path in kept] == ["given-2", "given-3", "given-4", "given-5"]
    if damaged:
        killed_runs.damage(kept[2], 100)
    again = sensitivities_by_hand.measured(folders["gemma4"], tmp_path / "out")
    assert again.tables.keys() == whole.tables.keys()
    for name, table in whole.tables.items():
        assert again.tables[name].rows.tobytes() == table.rows.tobytes()
        assert again.tables[name].columns.tobytes() == table.columns.tobytes()
    for name, sensitivity in whole.matrices.items():
        assert again.matrices[name][-1].rows.tobytes() == sensitivity[-1].rows.tobytes()


def test_a_scale_that_an_indexer_would_see_is_refused(tmp_path: Path) -> None:
    """Where it chooses fewer positions than there are, and more than the probe has: Mistral Large
    4's reads a norm through one of its own, which no matrix compensates for."""
    built("mistral_large4", tmp_path / "model", PROBE_TOKENS + 8)
    quantizing.text_file(tmp_path / "text.txt")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "method: none\nformat: dense\ntransforms: [smooth]\n"
        "weights: {bits: 4, group_size: 16, symmetric: true}\n"
    )
    run = quantize(tmp_path / "model", str(recipe), tmp_path / "out")
    dense = quantizing.write_dense(run.out, tmp_path / "dense")
    tokens = np.random.default_rng(2).integers(3, 90, (2, 2 * PROBE_TOKENS), dtype=np.int64)
    torch.testing.assert_close(
        logits(dense, tokens), logits(tmp_path / "model", tokens), rtol=2e-3, atol=2e-4
    )
    assert any("not smoothed" in note and "attention.wq" in note for note in run.summary.notes)
    assert any(note.startswith("smoothed") for note in run.summary.notes)


@pytest.mark.parametrize("name", [pytest.param("gemma4", marks=pytest.mark.slow), "zaya"])
def test_rotations_are_refused_in_a_sentence(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Those of the network, and those that an engine makes while it runs."""
    for recipe, sets in (("w4g128-rtn", ["transforms=[rotate]"]),
                         ("w4a4-rotated", ["rotate.r1=false", "rotate.r2=false"])):  # fmt: skip
        out = tmp_path / recipe
        run = quantize(folders[name], recipe, out, *sets, "weights.group_size=16")
        (note, *_) = [n for n in run.summary.notes if "rotated" in n and "hand on more than" in n]
        assert note.startswith("rotate: ")


def test_positions_beyond_the_beginning_are_masked(tmp_path: Path) -> None:
    """Those that a block chose of all of a text, at its first positions alone."""
    built("glm_moe_dsa", tmp_path, 8)
    tokens = np.random.default_rng(1).integers(3, 90, (2, PROBE_TOKENS + 32), dtype=np.int64)
    skeleton = Skeleton.open(Checkpoint.open(tmp_path))
    stream = skeleton.embed(tokens)
    kinds = skeleton.model.config.indexer_types
    with Workers(1) as workers:
        for index in range(skeleton.count):
            block = skeleton.block(index)
            probed = block.run(*stream.probe(index))
            chosen = stream.layout.parts(stream.hidden[0])[1][:, :PROBE_TOKENS]
            skeleton.advance(block, stream, workers)
            whole = stream.layout.hidden(stream.hidden[0])[:1, :PROBE_TOKENS]
            if kinds[index] == "shared":  # among equal scores of its own a block's choice is chance
                assert bool((chosen >= PROBE_TOKENS).any())
                torch.testing.assert_close(probed, whole, rtol=1e-4, atol=1e-4)
    assert kinds.count("shared") == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "glm_moe_dsa", "index_topk": 16}, Handed(columns=16)),
        ({"model_type": "glm_moe_dsa", "index_topk": 4096}, Handed(columns=512)),
        ({"model_type": "deepseek_v32", "index_topk": 16}, Handed()),
        ({"indexer_types": ["full", "shared"], "index_topk": 16}, Handed(columns=16)),
        ({"model_type": "qwen4_exp", "text_config": {"hc_count": 4}}, Handed(streams=4)),
        ({"num_kv_shared_layers": 0, "head_dim": 256}, Handed()),
        ({"num_kv_shared_layers": 2, "num_key_value_heads": 1}, Handed(columns=2 * (256 + 512))),
        ({"kv_source_layers": [0, 1, 0], "kv_lora_rank": 8, "qk_rope_head_dim": 4},
         Handed(columns=20)),
        ({"kv_source_layers": [0, 1, 2], "kv_lora_rank": 8}, Handed()),
        ({"num_hidden_layers": True, "hidden_size_per_layer_input": 256}, Handed()),
    ],
)  # fmt: skip
def test_what_a_config_says_is_handed_on(config: dict[str, Any], expected: Handed) -> None:
    assert handed_on(config, 512) == expected


def test_a_mask_is_on_the_disk_once(tmp_path: Path) -> None:
    """Attention that is not torch's function has masks of numbers, the same for all blocks."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokens = np.random.default_rng(2).integers(3, 90, (3, 160), dtype=np.int64)
    skeleton = Skeleton.open(Checkpoint.open(tmp_path / "model"))
    stream = skeleton.embed(tokens, 160, folder=tmp_path)
    masks = [call.kwargs["attention_mask"] for calls in stream.calls for call in calls]
    assert all(isinstance(one, Stored) for one in masks) and len(masks) == 4 * 3
    assert len({id(one) for one in masks}) == 2
    assert (tmp_path / "arguments").stat().st_size == 2 * 4 * 160 * 160
    placed = Calls(stream.calls, Device(torch.device("cpu"), lambda *_: None, "none", 1 << 30))
    there = {id(call.kwargs["attention_mask"]) for n in range(4) for call in placed[n]}
    assert len(there) == 2
