"""Reading back: an artifact as planned passes, and each kind of damage is named."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError
from qtool.formats.safetensors_file import Layout, StreamWriter, TensorSpec, lay_out
from qtool.planning.plan import Plan, make_plan
from qtool.quantizing.verify import verify
from qtool.recipe.recipe import load
from qtool.runs.sink import Sink
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import random_quant

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Written:
    """An artifact on disk with what `verify` needs to know."""

    folder: Path
    plan: Plan
    checksums: dict[str, int]


def source(folder: Path) -> Checkpoint:
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": (32, 128), "model.norm.weight": (128,)}
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = (64, 128)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = (128,)
    folder.mkdir()
    save_file(
        {n: rng.standard_normal(s).astype(np.float16) for n, s in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Checkpoint.open(folder)


def write(
    tmp_path: Path,
    recipe: str = "w4g128-rtn",
    change: Callable[[GroupQuant], None] | None = None,
    max_shard_bytes: int = 10**9,
) -> Written:
    checkpoint = source(tmp_path / "source")
    plan = make_plan(load(recipe), checkpoint, max_shard_bytes)
    folder = tmp_path / "out"
    folder.mkdir()
    sink = Sink(plan, checkpoint, folder)
    for number, planned in enumerate(plan.tensors):
        if isinstance(planned.action, Scheme):
            quant = random_quant(planned.action, *planned.shape, seed=number)
            if change is not None:
                change(quant)
            sink.quantized(planned, quant)
        else:
            sink.dense(planned)
    sink.close({}, "card")
    return Written(folder, plan, sink.writer.checksums)


def check(written: Written) -> Any:
    return verify(written.folder, written.plan, written.checksums)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w3g128-rtn", "w8-rtn"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 5000])
def test_as_planned(tmp_path: Path, recipe: str, max_shard_bytes: int) -> None:
    written = write(tmp_path, recipe, max_shard_bytes=max_shard_bytes)
    report = check(written)
    assert report.matrices == 2
    assert report.tensors == len(written.checksums)
    assert report.nbytes == sum(t.nbytes for t in written.plan.tensors)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    written = write(tmp_path, "w3g128-rtn")
    path = written.folder / "model.safetensors"
    whole = path.read_bytes()
    layout = written.plan.layout.files[0]
    for name, info in layout.tensors.items():
        for at in (info.start, info.end - 1):
            damaged = bytearray(whole)
            damaged[at] ^= 0x40
            path.write_bytes(damaged)
            with pytest.raises(FormatError) as caught:
                check(written)
            # Zeros and g_idx may be found wrong before their bytes are compared.
            assert name.rpartition(".")[0] in str(caught.value)
    path.write_bytes(whole)
    assert check(written)


def test_a_missing_and_an_unplanned_tensor(tmp_path: Path) -> None:
    written = write(tmp_path)
    path = written.folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"more": np.ones(1, np.float32)}, path)
    with pytest.raises(FormatError, match="'more' was not planned"):
        check(written)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(FormatError, match=r"'model\.norm\.weight' is missing"):
        check(written)


def test_another_order_of_the_same_tensors(tmp_path: Path) -> None:
    written = write(tmp_path)
    path = written.folder / "model.safetensors"
    tensors = Checkpoint.open(path)
    specs = [TensorSpec(t.name, t.dtype, t.shape) for t in tensors.tensors.values()]
    layout = Layout((lay_out("other.safetensors", reversed(specs), {"format": "pt"}),))
    with StreamWriter(written.folder, layout) as writer:
        for spec in specs:
            writer.add(spec.name, tensors.raw(spec.name))
    (written.folder / "other.safetensors").replace(path)
    with pytest.raises(FormatError, match="planned was TensorInfo"):
        check(written)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quant_method": "gptq", "desc_act": False}, "its config says format gptq"),
        ({"group_size": 64}, "group size|shape"),
        ({"meta": {"symmetric": True}}, "reads back as w4 g128 sym"),
    ],
)
def test_a_config_that_tells_another_scheme(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    written = write(tmp_path)
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError, match=sentence):
        check(written)


@pytest.mark.parametrize("value", [0.0, -0.5, np.inf, np.nan])
def test_scales_must_be_finite_and_positive(tmp_path: Path, value: float) -> None:
    def spoil(quant: GroupQuant) -> None:
        quant.scale[3, 0] = value

    written = write(tmp_path, change=spoil)
    with pytest.raises(FormatError, match=r"q_proj.weight: the scale of row 3, group 0 is"):
        check(written)


def test_a_tensor_that_was_never_counted(tmp_path: Path) -> None:
    written = write(tmp_path)
    fewer = {n: c for n, c in written.checksums.items() if n != "model.norm.weight"}
    with pytest.raises(FormatError, match=r"model\.norm\.weight' reads back with other bytes"):
        verify(written.folder, written.plan, fewer)
