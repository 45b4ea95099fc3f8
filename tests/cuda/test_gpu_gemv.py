"""tests/gpu/gemv.py without a GPU: what it would time; its first kernels are qtool's."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qtool.benching import cuda as bench
from qtool.cuda import compiling, pack_gemv_tasks, running
from qtool.cuda.tasks import Task
from support.places import TESTS

PATH = TESTS / "gpu" / "gemv.py"


class _Pool:
    """Of processes that compile: here nothing is, and one cannot be."""

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, _: object, unit: str, source: str, arch: str) -> "Future[str]":
        assert (unit, arch) == ("tried", "sm_90")
        found: Future[str] = Future()
        if "WordsRing<false, 512" in source.splitlines()[-2]:
            found.set_exception(RuntimeError("does not compile"))
        else:
            found.set_result(source)
        return found


@pytest.fixture
def gemv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """On the CPU, where nothing is launched and every result is 1."""

    def here(function: Any) -> Any:
        return lambda *given, device="cpu", **more: function(*given, **more)

    for name in ("randint", "full", "zeros", "randn", "empty"):
        monkeypatch.setattr(torch, name, here(getattr(torch, name)))
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    monkeypatch.setattr(running, "require", lambda: None)
    monkeypatch.setattr(bench, "_seconds_of_copy", lambda *_: 1e-3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=7))
    api = SimpleNamespace(ObjectCode=SimpleNamespace(from_cubin=lambda _: code))
    monkeypatch.setattr(compiling, "core", lambda: api)
    prefix = "CU_FUNC_ATTRIBUTE_"
    names = ("MAX_DYNAMIC_SHARED_SIZE_BYTES", "PREFERRED_SHARED_MEMORY_CARVEOUT")
    driver = SimpleNamespace(
        CUfunction_attribute=SimpleNamespace(**{prefix + name: name for name in names}),
        cuKernelSetAttribute=lambda what, value, kernel, device: (
            int((kernel, device) != (7, 0) or (value == 100) != (what == names[1])),
        ),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.syspath_prepend(str(PATH.parent))
    monkeypatch.delitem(sys.modules, "tried", raising=False)
    spec = importlib.util.spec_from_file_location("gemv", PATH)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gemv", found)
    spec.loader.exec_module(found)
    monkeypatch.setattr(sys.modules["tried"], "ProcessPoolExecutor", _Pool)

    def run(command: list[str], timeout: float, check: bool) -> None:
        """Another process: the same, here."""
        assert command[:2] == [sys.executable, found.__file__] and timeout <= 120 and check
        monkeypatch.setattr("sys.argv", command[1:])
        found.main()

    monkeypatch.setattr(subprocess, "run", run)
    for name, value in {
        "SHAPES": [(1024, 4096)], "IN_TURN": 1 << 20, "OUT": tmp_path, "COPIED": 1 << 10,
    }.items():  # fmt: skip
        monkeypatch.setattr(found, name, value)
    return found


def test_what_is_timed(
    gemv: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, made, seen = gemv.matrix, [], []

    def matrix(*given: Any) -> Any:
        found = real(*given)
        made.append(found.out)
        return found

    def seconds(tasks: list[Task], nbytes: int) -> float:
        assert len(tasks) == 4 and nbytes > 1 << 21
        seen.append(tasks[0])
        for out in made:
            out.fill_(1)
        if tasks[0].shared == 42768:
            raise RuntimeError("cuLaunchKernelEx says no")
        if tasks[0].shared == 43280:
            made[-1][0, 5] = math.nan  # of the last matrix
        return 1e-5 if tasks[0].shared == 91152 or tasks[0].threads == 512 else 2e-5

    def launch(task: Task) -> None:
        """Of a small matrix, first."""
        if task.shared == 85520:
            raise RuntimeError("cuLaunchKernelEx says never")
        made[-1].fill_(2 if task.shared == 171024 else 1)

    monkeypatch.setattr(running, "launch", launch)
    monkeypatch.setattr(gemv, "matrix", matrix)
    monkeypatch.setattr(gemv, "seconds", seconds)
    monkeypatch.setattr("sys.argv", ["gemv.py"])
    gemv.main()
    parts = gemv.families_of([*gemv.NAMES])
    assert [name for _, name in parts] == sorted(
        (name for _, name in parts),
        key=["", "wide", "ahead", "early", "ring", "broad", "bulk"].index,
    )
    files = {part: gemv.OUT / f"gpu-gemv-{part[0]}-{part[1] or 'usual'}.jsonl" for part in parts}
    lines = [json.loads(line) for file in files.values() for line in file.read_text().splitlines()]
    assert len(lines) == len(seen) > 60
    wrong = {
        str(kernel)
        for kind in gemv.NAMES
        for kernel in gemv.kernels_of(kind)
        if kernel.shared in (85520, 171024)
    } - {"gptq ring-512-1-2-1"}
    for (kind, name), file in files.items():
        every = {json.loads(line)["kernel"] for line in file.read_text().splitlines()}
        own, *others = gemv.kernels_of(kind)
        wanted = {str(kernel) for kernel in others if kernel.family == name}
        assert every == {str(own)} | wanted - wrong - {"gptq ring-512-1-2-1"}
        if name != own.family:  # which is compared with alone, as qtool launches it
            times = [line for line in map(json.loads, file.read_text().splitlines())
                     if line["kernel"] == str(own)]  # fmt: skip
            assert len(times) == 2
    said = capsys.readouterr().out
    for kernel in wrong:
        assert re.search(rf"^{kernel}, 256x2816: (1 from|cuLaunchKernelEx says never)", said, re.M)
    # Of eight vectors qtool's own and the two fastest.
    eight = [line for line in said.splitlines() if " of 8:" in line]
    found = [re.findall(r"(\S+) \d+% \(\d+\)", line) for line in eight]
    assert ["256-2-2", "512-1-1", "256-1-2"] in found
    assert ["128-1-2-4", "ring-256-1-2-2", "ring-256-2-2-2"] in found, found
    assert {task.shared for task in seen} > {0, 91152}
    failed = {line["kernel"]: line["failed"] for line in lines if "failed" in line}
    assert failed["awq ring-128-1-2-4"] == "cuLaunchKernelEx says no"
    assert failed["gptq ring-256-1-2-3-32"] == "nan from gptq 256-2-2"
    assert "gptq ring-512-1-2-1: does not compile\n" in said
    assert "ring-256-1-2-3-32 0%" in said and all(
        line["share"] == 0 for line in lines if "failed" in line
    )
    monkeypatch.setattr("sys.argv", ["gemv.py", "q9"])
    with pytest.raises(SystemExit, match="expected some of awq"):
        gemv.main()


def test_its_first_kernels_are_the_ones_in_use(gemv: Any) -> None:
    text = (compiling.folders()[0] / "gemv.h").read_text()
    for kind, name in gemv.NAMES.items():
        kernel, *_ = gemv.kernels_of(kind)
        assert kernel.blocks == pack_gemv_tasks._BLOCKS[name]
        assert f"{kernel.layout})" in text
