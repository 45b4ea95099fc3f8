"""Importance as it is measured: sums against float64, every expert, and the commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import qtool.tiny
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import SourceError
from qtool.formats.gguf_values import Value, boolean, string, u32
from qtool.formats.safetensors_file import read_header
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.importance.imatrix import Importance, read_importance, write_importance
from qtool.gguf.importance.measured import first_token
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf_types import F16
from qtool.messages.progress import Progress
from qtool.quantizing import calibrate as measure
from qtool.quantizing.gguf.measure import measure_importance
from qtool.recipe.recipe import Calibration
from qtool.texts.calibration import calibration_tokens
from support.gguf import gguf_from_hf, gguf_models
from support.runs import quantizing
from support.runs.quantizing import Call

Q = "blk.0.attn_q.weight"
LLAMA = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "input_layernorm": "attn_norm",
}  # fmt: skip


EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def named(checkpoint: Checkpoint, **keys: Value) -> GgufSource:
    """The checkpoint under llama.cpp's names, experts merged; nothing can be read of it."""

    def unread(first: int, last: int) -> NDArray[np.uint8]:
        raise AssertionError("measuring reads the checkpoint")

    origins: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors, key=natural):
        module = name.removesuffix(".weight").removeprefix("model.layers.").split(".")
        if not module[0].isdigit():
            continue
        known = LLAMA.get(".".join(module[1:])) or (
            EXPERTS[module[-1]] if "experts" in module else "attn_q_norm"
        )
        origins.setdefault(f"blk.{module[0]}.{known}.weight", []).append(name)
    tensors = []
    for name, origin in origins.items():
        shape: tuple[int, ...] = checkpoint.tensors[origin[0]].shape
        if "_exps" in name:
            shape = (len(origin), *shape)
        tensors.append(SourceTensor(name, shape, F16, unread, tuple(origin)))
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return GgufSource(checkpoint.path, metadata, tuple(tensors))


def natural(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def moe(folder: Path) -> Checkpoint:
    quantizing.text_file(folder / "text.txt")
    return Checkpoint.open(quantizing.build("qwen3_moe", folder / "moe"))


def settings(folder: Path, samples: int, length: int) -> Calibration:
    return Calibration(source=str(folder / "text.txt"), samples=samples, length=length)


def test_every_expert_counts_its_own_tokens(tmp_path: Path) -> None:
    """Against transformers' own model, run on the same tokens; an expert is never reached."""
    checkpoint = moe(tmp_path)
    given = settings(tmp_path, 2, 8)
    found = measure_importance(checkpoint, named(checkpoint), given, 2, Progress(quiet=True))
    seen = inputs_of(checkpoint.path, calibration_tokens(given, checkpoint.path).tokens)
    assert len(found.sums) == 3 * 4 + 3 + 2 * 4 and found.unmeasured == ()
    assert (found.chunks, found.chunk_size, found.datasets) == (2, 8, ("file",))
    assert found.sums["blk.0.ffn_gate_exps.weight"].shape == (8, 64)
    assert found.sums["blk.2.ffn_down_exps.weight"].shape == (8, 32)
    gate, up = (found.sums[f"blk.0.ffn_{x}_exps.weight"] for x in ("gate", "up"))
    assert np.array_equal(gate, up)
    for name, expected in seen.items():
        assert found.counts[name].tolist() == [len(x) for x in expected], name
        sums = np.stack([(x * x).sum(0) for x in expected])
        assert np.allclose(found.sums[name], sums, rtol=1e-4, atol=1e-6 * sums.max()), name
    assert len(seen) == 3 * 4 + 3 + 2 * 4
    missed = {name: counts for name, counts in found.unreached.items() if "gate" in name}
    assert missed and all("_exps" in name for name in found.unreached)
    name, experts = next(iter(missed.items()))
    assert (found.entries[name][list(experts)] == 1).all()
    assert "experts that no token reached" in found.notes()[0]


def inputs_of(model: Path, tokens: NDArray[np.int64]) -> dict[str, list[NDArray[np.float64]]]:
    """What every matrix of every block reads, float64, by expert; from transformers itself."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows: dict[str, list[NDArray[np.float64]]] = {}

    def keep(name: str, x: torch.Tensor) -> None:
        rows.setdefault(name, []).append(x.detach().reshape(-1, x.shape[-1]).double().numpy())

    def hook(block: str, module: str) -> Callable[..., None]:
        def dense(_: Any, given: Any, __: Any) -> None:
            keep(f"blk.{block}.{LLAMA[module]}.weight", given[0])

        def experts(owner: Any, given: Any, __: Any) -> None:
            hidden, chosen = given[0].reshape(-1, given[0].shape[-1]), given[1]
            for expert in range(owner.gate_up_proj.shape[0]):
                x = hidden[(chosen == expert).any(-1)]
                gate, up = (x @ owner.gate_up_proj[expert].T).chunk(2, dim=-1)
                for name in ("gate", "up"):
                    keep(f"blk.{block}.ffn_{name}_exps.weight", x)
                keep(f"blk.{block}.ffn_down_exps.weight", owner.act_fn(gate) * up)

        return experts if module == "mlp.experts" else dense

    for path, owner in loaded.named_modules():
        _, _, where = path.partition("layers.")
        block, _, module = where.partition(".")
        if module == "mlp.experts" or (module in LLAMA and "norm" not in module):
            owner.register_forward_hook(hook(block, module))
    with torch.no_grad():
        loaded(input_ids=torch.from_numpy(tokens))
    return rows


ARCHITECTURES = {
    "phi3": {"attn_qkv", "attn_output", "ffn_up", "ffn_down"},
    "gpt-neox": {"attn_qkv", "attn_output", "ffn_up", "ffn_down"},
    "gemma3": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"},
    "mixtral": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps",
                "ffn_up_exps", "ffn_down_exps"},
    "qwen2-moe": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps",
                  "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp_shexp", "ffn_gate_shexp",
                  "ffn_up_shexp", "ffn_down_shexp"},
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_matrix_of_a_block_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused, merged and shared ones, by the names that converting has for them."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    gguf_models.build(name, tmp_path / "model")
    quantizing.add_tokenizer(tmp_path / "model")
    quantizing.text_file(tmp_path / "text.txt")
    checkpoint = Checkpoint.open(tmp_path / "model")
    source = from_hf.hf_source(checkpoint)
    given = settings(tmp_path, 1, 40)
    found = measure_importance(checkpoint, source, given, 1, Progress(quiet=True))
    assert found.unmeasured == ()
    blocks = range(checkpoint.config["num_hidden_layers"])
    expected = {f"blk.{i}.{kind}.weight" for i in blocks for kind in ARCHITECTURES[name]}
    assert found.sums.keys() == expected
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    for matrix, sums in found.sums.items():
        matrices = shapes[matrix][0] if "_exps" in matrix else 1
        assert sums.shape == (matrices, shapes[matrix][-1]) and sums.max() > 0
        if matrices == 1:
            assert found.counts[matrix].tolist() == [40]
        else:
            routed = found.counts[matrix]
            assert routed.sum() == 2 * 40 and len(routed) == matrices


def test_experts_in_one_tensor_are_measured_as_those_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5 has them in memory, and some checkpoints on disk: the same bytes."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    quantizing.text_file(tmp_path / "text.txt")
    apart = quantizing.add_tokenizer(gguf_models.build("qwen3-moe", tmp_path / "apart"))
    fused = gguf_models.fuse_experts(apart, tmp_path / "fused")
    given = settings(tmp_path, 1, 40)
    files = []
    for folder in (apart, fused):
        checkpoint = Checkpoint.open(folder)
        source = from_hf.hf_source(checkpoint)
        target = measure.ImportanceFile(tmp_path / f"{folder.name}.gguf", source)
        stats, needs = tmp_path / f"{folder.name}.stats", frozenset({"mean_abs"})
        made = measure.calibrate(
            checkpoint, stats, given, needs, 1, Progress(quiet=True), target
        ).importance
        assert made is not None and made.unmeasured == () and made.unreached
        assert len([name for name in made.sums if "_exps" in name]) == 6
        assert not any("[" in name for name in read_header(stats)[0])
        files.append(target.path.read_bytes())
        alone = measure_importance(checkpoint, source, given, 1, Progress(quiet=True))
        for name, sums in made.sums.items():
            assert np.array_equal(alone.sums[name], sums)
            assert np.array_equal(alone.counts[name], made.counts[name])
    assert files[0] == files[1]


def test_threads_change_no_byte(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path)
    for threads in (1, 3):
        found = measure_importance(
            checkpoint, named(checkpoint), settings(tmp_path, 9, 300), threads, Progress(quiet=True)
        )
        write_importance(tmp_path / str(threads), found)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    """A matrix that no call reads, and one of which only half is known; norms are none."""
    checkpoint = moe(tmp_path)
    source = named(checkpoint)
    stray = SourceTensor("blk.9.attn_q.weight", (4, 64), F16, source.tensors[0].read, ("mtp.q",))
    experts = next(t for t in source.tensors if t.name == "blk.0.ffn_up_exps.weight")
    half = SourceTensor(
        "blk.8.ffn_up_exps.weight", experts.shape, F16, experts.read, (*experts.origin[:-1], "x")
    )
    more = GgufSource(source.path, {}, (*source.tensors, stray, half))
    given = settings(tmp_path, 1, 16)
    found = measure_importance(checkpoint, more, given, 1, Progress(quiet=True))
    assert found.unmeasured == ("blk.9.attn_q.weight", "blk.8.ffn_up_exps.weight")
    assert found.notes()[-1].startswith(
        "importance could not be measured for blk.9.attn_q.weight, blk.8.ffn_up_exps.weight; "
    )
    assert not found.sums.keys() & {*found.unmeasured, "blk.0.attn_norm.weight"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"bos_token_id": u32(5)}, None),
        ({"bos_token_id": u32(5), "add_bos_token": boolean(True)}, 5),
        ({"bos_token_id": u32(5), "model": string("llama")}, 5),
        ({"bos_token_id": u32(5), "model": string("llama"), "add_bos_token": boolean(False)}, None),
        ({"bos_token_id": u32(5), "model": string("gpt2"), "pre": string("llama-bpe")}, 5),
        ({"bos_token_id": u32(5), "model": string("gpt2"), "pre": string("smollm")}, None),
    ],
)
def test_bos_as_llama_cpp_has_it(keys: dict[str, Value], expected: int | None) -> None:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert first_token(GgufSource(Path("m"), metadata, ())) == expected


def test_chunks_begin_with_bos(tmp_path: Path) -> None:
    """Shown by a text whose every token is BOS: the chunks are then the same with and without."""
    checkpoint = moe(tmp_path)
    (tmp_path / "text.txt").write_text("a" * 200)
    bos = {"bos_token_id": u32(1), "add_bos_token": boolean(True)}
    other = {"bos_token_id": u32(2), "add_bos_token": boolean(True)}
    results = []
    for keys in ({}, bos, other):
        source = named(checkpoint, **keys)
        given = settings(tmp_path, 2, 16)
        found = measure_importance(checkpoint, source, given, 1, Progress(quiet=True))
        results.append(found.sums[Q])
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


def test_a_checkpoint_that_overflows_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint = moe(tmp_path)
    file = tmp_path / "moe" / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"][:] = 3e37
    save_file(state, file, {"format": "pt"})
    again = Checkpoint.open(tmp_path / "moe")
    with pytest.raises(SourceError, match=r"input of model.layers.1.mlp.down_proj.*not finite"):
        measure_importance(
            again, named(checkpoint), settings(tmp_path, 1, 16), 1, Progress(quiet=True)
        )


def test_calibrate_tiny(tmp_path: Path, call: Call) -> None:
    """The command on the model that ships with the package, against float64 sums."""
    quantizing.text_file(tmp_path / "text.txt")
    out = tmp_path / "imatrix.gguf"
    given = ["--calibration", tmp_path / "text.txt", "--samples", 3, "--length", 64]
    said = call("calibrate", "tiny", "--imatrix", out, *given)
    assert said.status == 0, said.err
    found = read_importance(out)
    model = Path(qtool.tiny.__file__).parent
    tokens = calibration_tokens(settings(tmp_path, 3, 64), model).tokens
    seen = inputs_of(model, tokens)
    assert found.sums.keys() == seen.keys()
    for name, (x,) in seen.items():
        assert found.counts[name].tolist() == [3 * 64]
        sums = (x * x).sum(0)
        assert np.allclose(found.sums[name][0], sums, rtol=1e-4, atol=1e-6 * sums.max()), name
    assert said.out.startswith(f"{out}: importance of {len(seen)} tensors over 192 tokens")
    record = json.loads(found.extra["qtool.calibration"].value)
    assert record["samples"] == 3 and record["digest"].startswith("sha256:")
    assert found.chunk_size == 64 and found.datasets == ("file",)
    # Both files in one pass are the same as each by itself.
    both, stats = tmp_path / "both.gguf", tmp_path / "stats"
    said = call("calibrate", "tiny", "--imatrix", both, "-o", stats, *given, "--json")
    assert said.status == 0, said.err
    told = json.loads(said.out)
    assert both.read_bytes() == out.read_bytes()
    assert told["stats"] == str(stats) and told["imatrix"]["entries"] == len(seen)
    assert told["imatrix"]["file"] == str(both) and told["imatrix"]["unreached"] == {}
    assert call("calibrate", "tiny", "-o", tmp_path / "alone", *given).status == 0
    assert (tmp_path / "alone").read_bytes() == stats.read_bytes()


def test_a_gguf_file_measures_as_its_checkpoint_does(tmp_path: Path, call: Call) -> None:
    """Of float32 tensors nothing is lost on the way: the same bytes, whichever is the model."""
    whole = tmp_path / "tiny-f32.gguf"
    assert call("quantize", "tiny", "--recipe", "f32", "-o", whole).status == 0
    small = ("--samples", "2", "--length", "64", "--threads", "1")
    for model, name in (("tiny", "a.gguf"), (whole, "b.gguf")):
        assert call("calibrate", model, "--imatrix", tmp_path / name, *small).status == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    said = call("calibrate", whole, "-o", tmp_path / "stats")
    assert said.status == 1 and "--imatrix OUT.gguf alone" in said.err
    assert not (tmp_path / "stats").exists()


def test_what_a_file_lacks_is_told_by_quantize(tmp_path: Path, call: Call) -> None:
    width = Checkpoint.open(Path(qtool.tiny.__file__).parent).config["hidden_size"]
    known = Importance({Q: np.ones((1, width), np.float32)}, {Q: np.ones(1, np.int64)})
    write_importance(tmp_path / "some.gguf", known)
    given = ["--recipe", "q4_0", "--imatrix", tmp_path / "some.gguf", "--json"]
    said = call("quantize", "tiny", *given, "-o", tmp_path / "tiny.gguf")
    assert said.status == 0, said.err
    (note,) = json.loads(said.out)["notes"]
    assert note.startswith("some.gguf has nothing of blk.0.attn_k.weight, ") and "more" in note
    assert Q not in note


def test_something_has_to_be_written(tmp_path: Path, call: Call) -> None:
    said = call("calibrate", "tiny")
    assert said.status == 2 and "--imatrix OUT.gguf" in said.err
    said = call("calibrate", "tiny", "-o", tmp_path / "s", "--recipe", "q2_k")
    assert said.status == 2 and "--imatrix OUT.gguf" in said.err
    taken = tmp_path / "taken"
    taken.write_text("mine")
    said = call("calibrate", "tiny", "--imatrix", taken)
    assert said.status == 1 and said.err.startswith(f"error: {taken}: exists")
    assert taken.read_text() == "mine"
    for option in ("--imatrix", "-o"):
        said = call("calibrate", "nobody/such-model", option, taken / "in" / "x.gguf")
        assert said.status == 1 and f"{taken} is no folder" in said.err, said.err
