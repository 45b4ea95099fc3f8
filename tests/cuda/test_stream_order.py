"""The order of streams, threads and memory, where torch has a GPU that is emulated: nothing is
wrong with what runs on a GPU."""

import ctypes
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qtool
from qtool.calibrating import placed
from qtool.calibrating.sites import Tracer
from qtool.calibrating.stats import NEEDS, collect
from qtool.cuda import pack_gemv_tasks, uploads
from qtool.cuda.device import Device, open_gpu
from qtool.gguf.importance.imatrix import write_importance
from qtool.quality import forward
from qtool.quantizing.gguf import on_device
from qtool.quantizing.gguf.gptq import swept_site
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import InMemory, LoadedBlock
from qtool.streaming.workers import Workers
from qtool.transforms import awq
from support.cuda.cuda_emulation import Emulator, OnGpu, emulator
from support.cuda.cuda_emulation import placed as placed_
from support.cuda.emulated_cuda import Cuda
from support.cuda.emulated_gpu import cuda, gpu, quantized
from support.cuda.emulated_tensors import Tensor
from support.gguf import gguf_files, gguf_from_hf
from support.models.arch_models import VOCABULARY
from support.models.small_models import checkpoint
from support.runs import quantizing

__all__ = ["cuda", "emulator", "gpu"]


def test_the_way_back_is_torchs(cuda: Cuda) -> None:
    """Through what is broadcast, and what two readers read; hooks change what passes on."""
    rng = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=rng) for shape in ((5, 4), (3, 4), (3,)))

    def back(place: str, doubled: bool) -> list[torch.Tensor]:
        first, weight, bias = (one.to(place).requires_grad_() for one in (x, w, b))
        middle = torch.nn.functional.linear(first, weight) + bias
        seen: Any = middle.tanh()
        if doubled:
            seen.register_hook(lambda gradient: gradient * 2)
        out = seen * seen.softmax(-1) + bias
        asked = [first, weight, bias, middle]
        found = torch.autograd.grad(out, asked, torch.ones_like(out), materialize_grads=True)
        return [one.cpu() for one in found]

    for doubled in (False, True):
        pairs = zip(back("cuda:0", doubled), back("cpu", doubled), strict=True)
        assert all(torch.allclose(there, here, rtol=1e-5, atol=1e-6) for there, here in pairs)
    assert cuda.ways_back == 2


def passed(gpu: Device, states: Any) -> None:
    """Each micro-batch doubled, or as it is; then one more, which nobody waits for."""
    passing = placed.Passing(states, gpu)
    for number in range(len(passing)):
        there = passing[number]
        passing[number] = there * 2 if number % 2 else there
    passing.settle()
    _ = passing[0] * 2
    passing.leave()


def test_states_pass(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without any one of the waits the checker says so."""
    gpu, needed = open_gpu(), set()
    before = [torch.full((samples, 3, 2), float(samples)) for samples in (3, 3, 3, 2, 1)]
    wait, synchronize = cuda.Stream.wait_stream, cuda.Event.synchronize

    def every(without: int | None) -> None:
        def unless(do: Any) -> Any:
            def called(*given: Any) -> None:
                line = sys._getframe(1).f_lineno
                needed.add(line)
                if line != without:
                    do(*given)

            return called

        monkeypatch.setattr(cuda.Stream, "wait_stream", unless(wait))
        monkeypatch.setattr(cuda.Event, "synchronize", unless(synchronize))
        states = InMemory()
        for one in before:
            states.append(one)
        passed(gpu, states)
        for number, one in enumerate(states):
            assert torch.equal(one, before[number] * (2 if number % 2 else 1))

    every(None)
    assert not cuda.order.faults and len(needed) == 6
    for line in sorted(needed):
        every(line)
        assert cuda.order.faults, f"placed.py:{line} is not needed"
        cuda.order.faults.clear()


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("llama", marks=pytest.mark.slow)])
def test_statistics(
    name: str, cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton.open(checkpoint(tmp_path, name))
    tokens = np.random.default_rng(2).integers(3, VOCABULARY, (5, 16), dtype=np.int64)
    stream = skeleton.embed(tokens, micro_batch_tokens=32)
    calls = placed.Calls(stream.calls, gpu)
    begun: list[int] = []
    begin = placed.Passing._begin
    monkeypatch.setattr(placed.Passing, "_begin", lambda self, n: begun.append(n) or begin(self, n))
    with Workers(2) as workers, placed.ahead(skeleton, gpu) as blocks:
        for index in range(2):
            block = blocks.take(index)
            sites = Tracer().sites(block, stream).sites
            wanted = collect(block, stream, sites, NEEDS, workers)
            with placed.placed(gpu, calls, block, stream, workers) as (there, passing, turn):
                found = collect(there, passing, sites, NEEDS, turn)
                assert begun == list(range(len(stream.hidden)))  # each is copied once
                skeleton.advance(there, passing, turn)
            begun.clear()
            for site in sites:
                if wanted[site.id].count:
                    gram, its = found[site.id].gram, wanted[site.id].gram
                    assert gram is not None and its is not None
                    np.testing.assert_allclose(gram, its, atol=1e-4 * np.abs(its).max())


@pytest.mark.parametrize(
    "recipe", [pytest.param("w4g128-awq-gptq", marks=pytest.mark.slow), "w4g128-rtn"]
)
def test_recipes_of_a_small_model(recipe: str, cuda: Cuda, gpu: Device, tmp_path: Path) -> None:
    """The search of few scales: a thread of the emulated grid is a loop."""
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = ["rtn.clip=true"]
    if "awq" in recipe:
        sets = [f"calibration.source={text}", "awq.grid=1", "gptq.yaqa=2"]
    source = checkpoint(tmp_path, "llama").path
    quantized(recipe, tmp_path / "out", gpu, source, "weights.group_size=32", *sets)
    assert cuda.devices == {1}


def test_gguf(cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few rows, on four streams by as many threads."""
    monkeypatch.setattr(on_device, "BATCH_WEIGHTS", 1 << 14)
    source = gguf_files.model(tmp_path / "x.gguf", 2, 1)
    imatrix = tmp_path / "imatrix.gguf"
    write_importance(imatrix, gguf_files.importance(source))
    made = []
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.gguf"
        qtool.quantize(source, "q4_k_m", out, imatrix=imatrix, threads=4, device=device)
        made.append(out.read_bytes())
    assert made[0] == made[1] and "measure_squares" in cuda.launched and cuda.devices == {1}


@pytest.mark.slow
def test_gguf_that_is_swept(
    cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, scaled and swept there, by several threads; the statement names the GPU."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    monkeypatch.setattr(swept_site, "AT_ONCE", 32 * 64)
    monkeypatch.setattr(awq, "_WEIGHT_EXPONENTS", (0.0,))
    source, out = checkpoint(tmp_path, "llama", "bfloat16").path, tmp_path / "x.gguf"
    text = quantizing.text_file(tmp_path / "text.txt")
    given: dict[str, Any] = {
        "calibration": str(text),
        "samples": 4,
        "length": 32,
        "provenance": True,
    }
    qtool.quantize(source, "q4_0-awq-gptq", out, threads=3, device="cuda", **given)
    swept = cuda.launched.count("quantize_sweep_levels")
    assert swept > 3 * 4 and "quantize_groups_full" in cuda.launched and cuda.devices == {1}
    said = json.loads((tmp_path / "x.gguf.provenance.json").read_text())
    assert "Emulated (sm_90)" in json.dumps(said)


@pytest.mark.parametrize("way", [True, False])
def test_uploads(way: bool, cuda: Cuda, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through buffers that are smaller than what passes them; refilled only when they are empty."""
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 256)
    if not way:
        monkeypatch.setattr(cuda.Event, "synchronize", lambda self: None)
    upload = uploads.Uploads(gpu)
    for shape, dtype in (((33, 7), np.float32), ((0, 4), np.int32), ((), np.float16)):
        array = np.random.default_rng(1).integers(0, 99, shape).astype(dtype)
        there = upload.array(array)
        assert there.device == gpu.place and (way is False or (there.cpu().numpy() == array).all())
    assert bool(cuda.order.faults) != way
    cuda.order.faults.clear()


def test_buffers_are_the_hosts_where_new_tensors_are_the_gpus(cuda: Cuda, gpu: Device) -> None:
    """As a head reads its weights, before which no block may have been read."""
    with gpu.place:
        there = uploads.Uploads(gpu).array(np.arange(5))
        assert there.device == gpu.place and there.cpu().tolist() == [0, 1, 2, 3, 4]


def blocks_there(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many others are on the device whenever a block is taken, after which one more is read."""
    alive: list[tuple[int, list[weakref.ref[Any]]]] = []
    counted: list[int] = []
    read, take = Skeleton.block, placed.Ahead.take

    def block(self: Skeleton, index: int, reading: Any = None) -> LoadedBlock:
        made = read(self, index, reading)
        tensors = [one for one in made.module.parameters() if isinstance(one, Tensor)]
        assert tensors and all(one.memory.stream != cuda.default().actor for one in tensors)
        alive.append((index, [weakref.ref(one.memory) for one in tensors]))
        return made

    def taken(self: placed.Ahead, index: int) -> LoadedBlock:
        others = [block for number, block in alive if number != index]
        counted.append(sum(any(one() is not None for one in block) for block in others))
        return take(self, index)

    monkeypatch.setattr(Skeleton, "block", block)
    monkeypatch.setattr(placed.Ahead, "take", taken)
    return counted


@pytest.mark.slow
def test_eval_against_logits_that_are_kept(
    cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time no block of the reference is read before its head is."""
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 1)
    text = quantizing.text_file(tmp_path / "text.txt")
    given: dict[str, Any] = {"windows": 1, "length": 32, "threads": 1, "device": "cuda"}
    first, second = (qtool.evaluate(model, text, against=model, **given).found for _ in "12")
    assert first["kld"]["mean"] == second["kld"]["mean"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["q4_k_m", "w4g128-rtn"])
def test_eval_and_generate(
    recipe: str, cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks at most are on the device, on streams on which nothing is computed."""
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 1 << 16)
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 3)
    out = Path(qtool.quantize(model, recipe, tmp_path / "out").artifact)
    text = quantizing.text_file(tmp_path / "text.txt")
    monkeypatch.setattr(forward, "MICRO_BATCH_TOKENS", 32)  # three, of a window each
    given: dict[str, Any] = {"against": model, "windows": 3, "length": 32, "cache": False}
    here = qtool.evaluate(out, text, **given, threads=1).found
    counted = blocks_there(cuda, monkeypatch)
    there = qtool.evaluate(out, text, **given, threads=1, device="cuda").found
    assert there["kld"]["mean"] == pytest.approx(here["kld"]["mean"], rel=2e-2)
    assert len(counted) > 4 and not any(counted)
    made = qtool.generate(out, "def main(", tokens=3, threads=1, device="cuda")
    assert 1 <= len(made.tokens) <= 3
    products = sum(name.startswith("gemv") for name in cuda.launched)
    assert products == cuda.programmatic > 0 and cuda.devices == {1}


def test_a_gpu_machine_notices(cuda: Cuda, emulator: Emulator) -> None:
    """What the tests of kernels look at there: counters that are not zero again, and what was only
    to be read."""
    shape, groups = (128, 2048), 16
    words, zeros = (placed_(np.full((n, 16), 0x11111111, np.int32)) for n in (shape[1], groups))
    scales = placed_(np.ones((groups, 128), np.float16))
    x, out = (placed_(np.ones((1, n), np.float16)) for n in (shape[1], shape[0]))
    done = placed_(np.zeros(pack_gemv_tasks.counters(shape[0]), np.int32))
    kept = [x]

    def room(numbers: int) -> Any:
        kept.append(placed_(np.zeros(numbers, np.float32)))
        return kept[-1]

    given: dict[str, Any] = {"out": out, "room": room, "done": done}
    (task,) = pack_gemv_tasks.gemv_awq(words, zeros, scales, 128, x, **given)
    assert task.fields["splits"] > 1
    gpu = OnGpu(emulator.library)
    gpu.run(task, out)
    right, what = emulator.fault, ""

    def wrong(task: Any, *rest: Any) -> Any:
        fault = right(task, *rest)
        np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(task.fields[what]))[0] ^= 1
        return fault

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "fault", wrong)
        for what in ("done", "inputs", "codes"):
            with pytest.raises(AssertionError, match=f"gemv_across_4: {what}"):
                gpu.run(task, out)
