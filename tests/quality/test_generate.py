"""`generate`: the tokens that a whole forward pass without a cache finds likeliest, from matrices
that stay as they are stored; and with a device in the emulated grid."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import qtool
from qtool.cli.main import app
from qtool.cuda.device import Device
from qtool.errors import SourceError, UnsupportedError, UsageError
from qtool.generating import packed_matmul
from qtool.generating.generate import generate
from qtool.generating.ready import _room, ready
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import forward
from qtool.quality.reading import OnDevice
from qtool.quality.rounded_inputs import Activations
from qtool.quality.weights import open_weights
from qtool.quantizing import pipeline
from qtool.streaming.online import Online
from qtool.streaming.skeleton import Skeleton
from qtool.texts import tokenizing
from support.cuda.cuda_device import device, emulator
from support.models.handed_models import HANDED
from support.models.small_models import checkpoint
from support.models.unusual_decoders import built
from support.quality.generated_tokens import QUIET, check
from support.runs import quantizing

# Names that transformers no longer wants are none of a user's business.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

__all__ = ["device", "emulator"]

TINY = Path(pipeline.__file__).parent.parent / "tiny"
PROMPT = "def main("


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What a recipe makes of the first two blocks of `tiny`, once."""
    folder = tmp_path_factory.mktemp("made")

    def artifact(recipe: str) -> Path:
        out = folder / recipe
        if not out.exists():
            source = quantizing.first_blocks_of_tiny(folder / "model", 2)
            plain = recipe in (*RECIPES[:2], "w4g128-rtn", "w3g128-rtn")
            samples: dict[str, Any] = {} if plain else {"samples": 2, "length": 64}
            qtool.quantize(source, recipe, out, **samples)
        return out

    return artifact


RECIPES = ["q4_k_m", "w8a8-dynamic", "w4a4-rotated", "w4a8kv4-qserve", "kv-fp8"]
SLOW = ("w4a8kv4-qserve", "w3g128-rtn")


def some(*names: str) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@pytest.mark.parametrize("recipe", some(*RECIPES))
def test_what_a_forward_pass_finds_likeliest(recipe: str, made: Callable[[str], Path]) -> None:
    """Online rotations, rounded inputs and KV caches are done as in `eval`."""
    out = made(recipe)
    found = generate(out, PROMPT, 10, None, QUIET)
    assert len(found.tokens) == 10 or found.ended
    assert found.fused == 0 and found.matrices > 10
    check(out, found, 1e-3)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", *some("w3g128-rtn"), "q4_k_m", "w8a8-dynamic"])
def test_on_a_device(recipe: str, made: Callable[[str], Path], device: Device) -> None:
    """Products are of float16 there, so that logits differ by a little."""
    out = made(recipe)
    found = generate(out, PROMPT, 5, device, QUIET)
    assert found.device == device.name
    assert (found.fused > 0) == (recipe in ("w4g128-rtn", "q4_k_m"))
    check(out, found, 0.1)


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q4_k_m"])
def test_packed_words_are_what_is_multiplied(
    recipe: str, made: Callable[[str], Path], device: Device
) -> None:
    """For single tokens; a prompt of more than eight is multiplied by dequantized matrices."""
    out = made(recipe)
    seen: list[str] = []

    def launch(*tasks: Any, **how: Any) -> None:
        assert all(task.kernel != "gemv_sum" for task in tasks)  # one launch is enough
        seen.extend(task.kernel.split("_")[0] for task in tasks)
        device.launch(*tasks, **how)

    watched = Device(device.place, launch, device.name, 0)
    generate(out, "one two three four five six seven eight nine ten", 3, watched, QUIET)
    assert "dequantize" in seen[:20] and "gemv" in seen
    if recipe == "w4g128-rtn":  # all of its matrices have such a kernel
        assert "dequantize" not in seen[seen.index("gemv") :]


def test_vectors_that_lie_beside_each_other(made: Callable[[str], Path], device: Device) -> None:
    """As a state-space layer gives them, transposed: their numbers are not neighbours."""
    with open_weights(made("w4g128-rtn")) as weights:
        name = "model.layers.0.mlp.up_proj.weight"
        times = packed_matmul.matrix(OnDevice(weights, device), name).times
        given = torch.from_numpy(np.random.default_rng(1).normal(size=(256, 3)).astype(np.float32))
        assert torch.equal(times(given.T), times(given.T.contiguous()))


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts(name: str, tmp_path: Path, device: Device) -> None:
    """Each is multiplied as it is stored, and what it reads is rounded as in `eval`."""
    source = checkpoint(tmp_path, name).path
    for recipe, where, slack in (("w8a8-dynamic", None, 1e-4), ("w4a16-ct", device, 0.05)):
        changes = ["weights.group_size=32"] if recipe == "w4a16-ct" else []
        made = qtool.quantize(source, recipe, tmp_path / f"{name}-{recipe}", changes=changes)
        out = Path(made.artifact)
        with open_weights(out) as weights:
            named = {n for n, info in weights.tensors.items() if len(info.shape) == 2}
        linear = {n for n in named if "embed" not in n and not n.endswith(".gate.weight")}
        found = generate(out, "w1 w", 2, where, QUIET)
        assert found.matrices == len(linear)
        check(out, found, slack)


@pytest.mark.parametrize("recipe", ["q4_k_m", "w8a8-dynamic", None])
def test_matrices_stay_in_memory_where_there_is_room(
    recipe: str | None, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is then read once, and what is said does not depend on how many fit."""
    out = TINY if recipe is None else made(recipe)
    real = packed_matmul.InFloat32._read
    read: list[str] = []
    monkeypatch.setattr(
        packed_matmul.InFloat32,
        "_read",
        lambda self, name: (read.append(name), real(self, name))[1],
    )
    whole = generate(out, PROMPT, 5, None, QUIET)
    assert whole.not_kept == 0 and len(read) == len(set(read)) == whole.matrices
    with open_weights(out) as weights:
        sizes = [4 * math.prod(weights.tensors[name].shape) for name in read]
    for kept in (0, len(read) // 2):
        read.clear()
        monkeypatch.setattr("qtool.generating.ready._room", lambda kept=kept: sum(sizes[:kept]))
        found = generate(out, PROMPT, 5, None, QUIET)
        assert found.tokens == whole.tokens
        assert found.not_kept <= whole.matrices - kept
        again = {name for name in read if read.count(name) == len(found.tokens)}
        assert len(again) == found.not_kept > 0


def test_half_of_the_memory_that_is_available_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, room in ((1000, 500), (None, 0)):
        monkeypatch.setattr("qtool.generating.ready.memory", lambda a=available: (4000, a))
        assert _room() == room


def test_a_dense_model_too(device: Device) -> None:
    here, there = (generate(TINY, PROMPT, 4, where, QUIET) for where in (None, device))
    check(TINY, here, 1e-3)
    check(TINY, there, 0.3)


def test_a_layer_that_multiplies_in_a_way_of_its_own(tmp_path: Path) -> None:
    """DeepSeek-V4's output projection takes groups of its weight at once."""
    kind, keys = HANDED["deepseek_v4"]
    built(kind, tmp_path, **keys)
    check(tmp_path, generate(quantizing.add_tokenizer(tmp_path), "Group", 4, None, QUIET), 1e-3)


def logits(out: Path, ids: NDArray[np.int64], where: Device | None) -> torch.Tensor:
    """Of the last token, as `generate` has them."""
    with open_weights(out) as weights:
        model = ready(Skeleton.open(weights), weights, where, QUIET)
        with torch.no_grad(), model.matmuls:
            return model.step(torch.from_numpy(ids), None)[0][0].cpu()


@pytest.mark.parametrize("recipe", [None, "w4g128-rtn", "w8-rtn"])
def test_a_matrix_that_is_multiplied_otherwise(
    recipe: str | None, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba multiplies its step sizes by a weight itself, which torch answers with whatever lies in
    memory where the weight is on the meta device."""
    source = out = tmp_path / "model"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8}
    built("mamba", source, **sizes, time_step_rank=32)
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("dt_proj.weight"):
            tensors[name] *= 10
    save_file(tensors, source / "model.safetensors")
    quantizing.add_tokenizer(source)
    if recipe is not None:
        changes = ["indivisible=dense", "weights.group_size=32"]
        out = Path(qtool.quantize(source, recipe, tmp_path / "out", changes=changes).artifact)
    ids = np.random.default_rng(0).integers(3, 90, (1, 12), dtype=np.int64)
    with open_weights(out) as weights:
        run = forward(
            Skeleton.open(weights), activations(weights, "plain"), ids, 1, QUIET, keep=False
        )
        with run.logits() as head, torch.no_grad():
            expected = head(run.hidden)[0, -1]
    torch.testing.assert_close(logits(out, ids, None), expected, rtol=0, atol=1e-4)
    there = logits(out, ids, device)
    torch.testing.assert_close(there, expected, rtol=0, atol=0.02)
    monkeypatch.setattr(packed_matmul.Matmuls, "_there", lambda _, value: value)
    with pytest.raises(UnsupportedError, match=r"matmul.* is given a weight otherwise than"):
        logits(out, ids, None)


def test_matrices_put_together_are_known_or_refused() -> None:
    """Whatever a model makes of them before it multiplies by them."""
    torch.manual_seed(0)
    meta = torch.empty(2, 6, 4, device="meta")
    real = torch.randn(2, 6, 4)
    known = {
        packed_matmul.key(meta[expert]): [
            packed_matmul.Matrix(
                str(expert), (6, 4), lambda x, n=expert: F.linear(x, real[n]),
                lambda n=expert: real[n], False,
            )
        ]
        for expert in range(2)
    }  # fmt: skip
    x = torch.randn(3, 4)
    with torch.no_grad(), packed_matmul.Matmuls(known, Online(), Activations()):
        assert torch.equal(F.linear(x, meta[1]), F.linear(x, real[1]))
        assert torch.equal(x @ meta[1].T, x @ real[1].T)
        both = torch.cat([meta[0], meta[1]])
        assert torch.equal(F.linear(x, both), F.linear(x, torch.cat([real[0], real[1]])))
        assert meta[1].shape == (6, 4) and meta[1].size(0) == 6 and meta[1].is_meta
        for wrong in (meta[:, :3][1], meta[:, 3:][1], meta.view(-1, 4), meta.chunk(2, 1)[0][0]):
            with pytest.raises(RuntimeError, match="otherwise than as a matrix"):
                F.linear(x, wrong)


def test_what_is_no_number_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(TINY, broken)
    (file,) = broken.glob("*.safetensors")
    tensors = load_file(file)
    norm = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[norm] = torch.full_like(tensors[norm], 3e38)
    save_file(tensors, file)
    with pytest.raises(SourceError, match=r"after token \d+ is not a finite number"):
        generate(broken, PROMPT, 2, None, QUIET)
    with pytest.raises(SourceError, match="--prompt: it has no tokens"):
        generate(TINY, "", 2, None, QUIET)
    with pytest.raises(UsageError, match=r"--tokens 100000 are more than the \d+ positions of"):
        generate(TINY, PROMPT, 100_000, None, QUIET)


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    model = quantizing.first_block_of_tiny(tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: 5000 + number for token, number in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SourceError, match=r"gives the id \d+, and the model has a vocabulary of"):
        generate(model, PROMPT, 2, None, QUIET)


def test_what_is_ours_is_not_said_of_the_model(made: Callable[[str], Path], device: Device) -> None:
    """A product that fails is no sign that a model cannot be run with a cache."""
    out = made("w4g128-rtn")

    def launch(*tasks: Any, **how: Any) -> None:
        raise ValueError("a kernel that is not there")

    with pytest.raises(ValueError, match="a kernel that is not there"):
        generate(out, PROMPT, 2, Device(device.place, launch, "", 0), QUIET)


def test_the_tokenizer_is_read_once_to_cut_and_once_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Path] = []
    real = tokenizing._fast

    def counted(path: Path) -> Any:
        read.append(path)
        return real(path)

    monkeypatch.setattr(tokenizing, "_fast", counted)
    found = generate(TINY, PROMPT, 3, None, QUIET)
    assert len(read) == 2
    tokenizer = real(TINY / "tokenizer.json")
    ids = tokenizer.encode(PROMPT, add_special_tokens=True).ids
    assert tokenizer.decode([*ids, *found.tokens]) == tokenizer.decode(ids) + found.text


def test_the_command() -> None:
    said = CliRunner().invoke(app, ["generate", "tiny", "--prompt", PROMPT, "--tokens", "3"])
    assert said.exit_code == 0 and said.stdout.startswith(PROMPT)
    assert "3 tokens of prompt" in said.stdout and "on cpu" in said.stdout
    said = CliRunner().invoke(app, ["generate", "tiny", "--tokens", "1", "--json"])
    row = json.loads(said.stdout)
    assert row["tokens_per_second"] is None and len(row["tokens"]) == 1


def test_a_prompt_is_text() -> None:
    with pytest.raises(UsageError, match="--prompt: is not UTF-8"):
        generate(TINY, "caf\udce9", 2, None, QUIET)
