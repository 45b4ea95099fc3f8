"""Blocks that hand on more than one stream of hidden states: what is run is what transformers
runs, and calibrated recipes, resuming, proofs, tuning and fitting take it as any other."""

from pathlib import Path
from typing import Any

import handed_models
import numpy as np
import pytest
import quantizing
import test_fit_slopes
import test_resume
import torch
from test_fit_slopes import likeliest  # noqa: F401
from test_unusual_decoders import TOKENS, check_logits
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from qtool.artifact import Artifact
from qtool.calibrating import arguments
from qtool.calibrating.hidden import OnDisk
from qtool.calibrating.layout import Beside, Entry, Layout, Positions, Stored
from qtool.calibrating.skeleton import PROBE_TOKENS, Skeleton
from qtool.calibrating.workers import Workers
from qtool.checkpoint import Checkpoint
from qtool.errors import UnsupportedError
from qtool.plan.handed import handed_on

SETS = ("calibration.samples=4", "calibration.length=96", "indivisible=dense")
ALL = 256  # positions to choose from, of fewer: which of equally good ones is taken is chance


def built(name: str, folder: Path, chosen: int | None = None) -> Any:
    """chosen: how many positions."""
    kind, keys = handed_models.HANDED[name]
    text = keys.get("text_config", keys)
    if chosen is not None and "index_topk" in text:
        text = {**text, "index_topk": chosen}
        keys = {**keys, "text_config": text} if "text_config" in keys else text
    torch.manual_seed(0)
    family = AutoModelForImageTextToText if "vision_config" in keys else AutoModelForCausalLM
    model = family.from_config(CONFIG_MAPPING[kind](**keys), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    quantizing.add_tokenizer(folder)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    quantizing.text_file(root / "text.txt")
    for name in handed_models.HANDED:
        built(name, root / name, ALL)
    return {name: root / name for name in handed_models.HANDED}


def quantize(model: Path, recipe: str, out: Path, *sets: str) -> quantizing.Run:
    text = f"calibration.source={model.parent / 'text.txt'}"
    return quantizing.quantize(model, recipe, out, text, *SETS, *sets)


def logits(model: Path) -> torch.Tensor:
    with Workers(2) as workers:
        return Skeleton.open(Checkpoint.open(model)).logits(TOKENS, workers)


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
        ("gemma3n", "[smooth-attention, smooth]"),
        ("glm_moe_dsa", "[awq]"),
        ("glm_moe_dsa", "[smooth]"),
        ("deepseek_v4", "[awq]"),
        ("mistral_large4", "[smooth]"),
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


@pytest.mark.parametrize("name", ["gemma4", "glm_moe_dsa", "gemma3n"])
def test_a_run_goes_on_and_keeps_states_on_the_disk(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(folders[name], "w4g128-gptq", tmp_path / "whole", "weights.group_size=16")
    for after in (2, 1):
        with monkeypatch.context() as patched, pytest.raises(test_resume.Died):
            test_resume.dying(after, patched)
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


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_scales_are_tuned(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    run = quantize(folders[name], "w4g128-awq-gptq-tune", tmp_path / "out",
                   "weights.group_size=16", "tune.steps=20")  # fmt: skip
    assert any("blocks were tuned" in note for note in run.summary.notes)


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("name", ["gemma4", "gemma3n", "glm_moe_dsa"])
def test_slopes_are_those_of_autograd(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Through keys and values that later blocks attend to, too."""
    found = test_fit_slopes.measured(folders[name], tmp_path / "out")
    expected, tables = test_fit_slopes.by_hand(folders[name])
    test_fit_slopes.check_tables(found, tables)
    checked = 0
    for weight, slope in expected.items():
        if weight in found.matrices and ".experts." not in weight:
            test_fit_slopes.check_same(found.matrices[weight][-1], slope)
            checked += 1
    assert checked > 12


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("name", ["deepseek_v4", "zaya"])
def test_tables_are_those_of_autograd(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Where all streams begin as the embedding, and where it is scaled."""
    found = test_fit_slopes.measured(folders[name], tmp_path / "out")
    test_fit_slopes.check_tables(found, test_fit_slopes.by_hand(folders[name])[1])


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
@pytest.mark.parametrize("damaged", [False, True])
def test_a_fit_goes_on_with_gradients_by_what_blocks_are_given(
    damaged: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = test_fit_slopes.measured(folders["gemma4"], tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(test_resume.Died):
        test_resume.dying(7 + 4, patched)  # states before each block and the head, then backwards
        test_fit_slopes.measured(folders["gemma4"], tmp_path / "out")
    kept = sorted((tmp_path / ".out.partial").glob("given-*"))
    assert [path.name for path in kept] == ["given-2", "given-3", "given-4", "given-5"]
    if damaged:
        test_resume.damage(kept[2], 100)
    again = test_fit_slopes.measured(folders["gemma4"], tmp_path / "out")
    assert again.tables.keys() == whole.tables.keys()
    for name, columns in whole.tables.items():
        assert again.tables[name].tobytes() == columns.tobytes()
    for name, slope in whole.matrices.items():
        assert again.matrices[name][-1].rows.tobytes() == slope[-1].rows.tobytes()
