"""tests/gpu/products.py without a GPU: what it would time; its first kernels are qtool's."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qtool.cuda import bench, compiling, more_tasks, running
from qtool.cuda.tasks import Task

PATH = Path(__file__).parent / "gpu" / "products.py"


class _Pool:
    """Of processes that compile: here nothing is."""

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, _: object, __: object, sources: list[str], *___: object) -> list[str]:
        return sources


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
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
    code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=7))
    api = SimpleNamespace(ObjectCode=SimpleNamespace(from_cubin=lambda _: code))
    monkeypatch.setattr(compiling, "core", lambda: api)
    driver = SimpleNamespace(
        CUfunction_attribute=SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most shared"
        ),
        cuKernelSetAttribute=lambda what, size, kernel, device: (
            int((what, kernel, device) != ("most shared", 7, 0) or size <= 48 << 10),
        ),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    spec = importlib.util.spec_from_file_location("products", PATH)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "products", found)
    spec.loader.exec_module(found)
    for name, value in {
        "ProcessPoolExecutor": _Pool, "SHAPES": [(1024, 4096)], "IN_TURN": 1 << 20,
        "OUT": tmp_path / "out.jsonl",
    }.items():  # fmt: skip
        monkeypatch.setattr(found, name, value)
    return found


def test_what_is_timed(
    products: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, made, seen = products.matrix, [], []

    def matrix(*given: Any) -> Any:
        found = real(*given)
        made.append(found.out)
        return found

    def seconds(tasks: list[Task]) -> float:
        assert len(tasks) == 4
        seen.append(tasks[0])
        for out in made:
            out.fill_(1)
        return 1e-5 if tasks[0].shared == 91152 or tasks[0].threads == 512 else 2e-5

    monkeypatch.setattr(products, "matrix", matrix)
    monkeypatch.setattr(products, "seconds", seconds)
    monkeypatch.setattr("sys.argv", ["products.py"])
    products.main()
    lines = [json.loads(line) for line in products.OUT.read_text().splitlines()]
    assert len(lines) == len(seen) > 60
    assert {line["kernel"].split()[0] for line in lines} == {"awq", "gptq", "q4_k"}
    for kind in products.NAMES:
        every = {line["kernel"] for line in lines if line["kernel"].split()[0] == kind}
        assert every == {str(kernel) for kernel in products.kernels_of(kind)}
    said = capsys.readouterr().out
    # Of eight vectors qtool's own and the two fastest.
    eight = [line for line in said.splitlines() if " of 8:" in line]
    assert [re.findall(r"(\S+) \d+% \(\d+\)", line) for line in eight] == [
        *[["256-2-2", "512-1-1", "ahead-512-1-1-1"]] * 2,
        ["128-1-2-4", "ring-256-1-2-2", "ring-256-2-2-2"],
    ]
    assert {task.shared for task in seen} > {0, 85520, 91152, 171024}
    monkeypatch.setattr(products, "seconds", lambda _: 1e-5)  # a kernel that writes nothing
    with pytest.raises(AssertionError, match="nan from"):
        products.main()
    monkeypatch.setattr("sys.argv", ["products.py", "q9"])
    with pytest.raises(SystemExit, match="expected some of awq"):
        products.main()


def test_its_first_kernels_are_the_ones_in_use(products: Any) -> None:
    text = (compiling.folders()[0] / "gemv.h").read_text()
    for kind, name in products.NAMES.items():
        kernel, *_ = products.kernels_of(kind)
        assert kernel.blocks == more_tasks._BLOCKS[name]
        assert f"{kernel.layout})" in text
