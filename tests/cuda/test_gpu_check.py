"""`make gpu-check` keeps what was said, and names tests that are there: that needs no GPU."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtool.benching import cuda as bench
from qtool.cuda import compiling
from support.places import ROOT, TESTS


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(TESTS / "gpu")
    import check

    return check


@pytest.mark.slow
def test_what_a_check_said_is_kept(check: object, tmp_path: Path) -> None:
    """Also of one that takes too long, or fails; and times as far as they came."""
    said = """print('{"kernel": "x", "gb_per_s": 1.5}', '{"kernel": "y", ', sep=chr(10), flush=True)
"""
    endings = {"pass": True, "raise ValueError(7)": False, "import time; time.sleep(60)": False}
    for ending, good in endings.items():
        log = tmp_path / "log.txt"
        most = 1.0 if "sleep" in ending else 60.0
        command = [sys.executable, "-I", "-S", "-c", said + ending]
        found, text = check.run(command, most, log)  # type: ignore[attr-defined]
        assert found is good
        assert log.read_text() in text
        results = check.results_of(text)  # type: ignore[attr-defined]
        assert results == [{"kernel": "x", "gb_per_s": 1.5}]
        assert ("ValueError" in text) == ("raise" in ending)
        assert ("took more than 1 s" in text) == ("sleep" in ending)


@pytest.mark.slow
def test_tests_that_take_too_long_tell_what_has_failed(check: object, tmp_path: Path) -> None:
    """In several processes, as on a GPU."""
    (tmp_path / "test_it.py").write_text(
        "import time\n"
        "def test_fails():\n    assert 7 * 7 == 48\n"
        "def test_hangs():\n    time.sleep(120)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, str(tmp_path)]
    good, said = check.run(command, 25.0, tmp_path / "log.txt")  # type: ignore[attr-defined]
    assert not good and "assert (7 * 7) == 48" in said and "took more than 25 s" in said


@pytest.mark.slow
@pytest.mark.parametrize(("device", "passed"), [("cuda", 5), ("", 1)])
def test_a_process_whose_gpu_is_broken_is_replaced(
    device: str, passed: int, tmp_path: Path
) -> None:
    """By one that does what is left; what went wrong is told."""
    conftest = TESTS / "conftest.py"
    (tmp_path / "conftest.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('theirs', {str(conftest)!r})\n"
        "theirs = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(theirs)\n"
        "pytest_runtest_logfinish = theirs.pytest_runtest_logfinish\n"
    )
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import pytest, sys
            from types import SimpleNamespace

            def wrong():
                raise RuntimeError("an illegal memory access")

            cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: None)
            sys.modules["torch"] = SimpleNamespace(cuda=cuda)

            @pytest.mark.parametrize("number", range(6))
            def test_it(number):
                if number == 1:
                    cuda.synchronize = wrong
                cuda.synchronize()
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, str(tmp_path)]
    environment = {**os.environ, "QTOOL_TEST_DEVICE": device}
    environment["PYTHONPATH"] = str(TESTS)
    said = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert f"{passed} passed" in said and "an illegal memory access" in said


@pytest.mark.parametrize("stays", [True, False])
def test_one_kernel_that_fails_is_told_and_others_are_timed(
    stays: bool,
    check: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By another process where what the kernel did to the GPU's memory stays with its own."""
    broken: list[str] = []

    def synchronize() -> None:
        if broken:
            raise RuntimeError("an illegal memory access")

    def again(program: str, command: list[str]) -> None:
        assert program == sys.executable == command[0] and command[1] == check.__file__  # type: ignore[attr-defined]
        assert command[2] == "--time"
        broken.clear()
        check.timed(*map(int, command[3:]))  # type: ignore[attr-defined]

    def timed(cases: list[bench.Case]) -> Iterator[bench.Result]:
        (case,) = cases
        if case.name == "gemv awq batch 4 8192x8192" or broken:
            broken.extend([case.name] if stays else [])
            raise RuntimeError("an illegal memory access")
        yield bench.Result(case.name, 1.0, 2.0)

    monkeypatch.setattr(bench, "bench", timed)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(os, "execv", again if stays else None)
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    with pytest.raises(SystemExit) as ended:
        check.timed()  # type: ignore[attr-defined]
    said = capsys.readouterr().out
    names = [one["kernel"] for one in check.results_of(said)]  # type: ignore[attr-defined]
    assert ended.value.code == 1 and "gemv awq batch 4 8192x8192: Traceback" in said
    assert "gemv awq batch 8 8192x8192" in names and len(names) == len(set(names)) > 40
    assert "gemv awq batch 4 8192x8192" not in names


def test_a_gpu_that_cannot_be_used_is_left_alone(
    check: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After some processes that could not use it."""

    def refused(*_: object) -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(bench, "bench", refused)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", refused)
    monkeypatch.setattr(os, "execv", lambda _, command: check.timed(*map(int, command[3:])))  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as ended:
        check.timed()  # type: ignore[attr-defined]
    assert ended.value.code == 1
    told = re.findall(r"^(\w.*): Traceback", capsys.readouterr().out, re.MULTILINE)
    assert len(told) == len(set(told)) == 1 + check.MOST_PROCESSES  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [480.0, 0.0])
def test_all_of_it(
    most: float,
    check: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every check is run, with files of its own for what it says, and told in the table; where no
    time is left, that."""
    logs: list[str] = []
    itself = check.__file__  # type: ignore[attr-defined]
    programs = [itself, str(Path(itself).with_name("planted.py"))]

    def run(
        command: list[str], seconds: float, log: Path, more: object, status: int
    ) -> tuple[bool, str]:
        assert 0 < seconds <= 300 and set(command) & {"pytest", "qtool", *programs}
        assert status == (9 if programs[1] in command else 0)
        logs.append(log.name)
        line = '{"kernel": "gemv x", "gb_per_s": 2, "copy_gb_per_s": 4, "fraction": 0.5}'
        if "recipes" in log.name:
            Path(more["QTOOL_TEST_DIVERGENCES"]).write_text(  # type: ignore[index]
                '{"recipe": "w4g128-awq", "cpu": 0.5, "gpu": 0.49}\n'
            )
        return not log.name.endswith("memcheck.txt"), line if "times" in log.name else "42 passed"

    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(check, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(check, "MOST", most)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("QTOOL_TEST_EMULATOR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        check.main()  # type: ignore[attr-defined]
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    failed = [line for line in said if "FAILED  " in line]
    if not most:
        assert not logs and len(failed) == 12
        assert all(line.endswith("no time was left") for line in failed)
        return
    assert len(logs) == len(set(logs)) == 12
    assert all(re.fullmatch(r"\d+-[A-Za-z0-9-]+\.txt", log) for log in logs), logs
    assert len(failed) == 1 and "memcheck" in failed[0]
    (line,) = (line for line in said if line.startswith("gemv x"))
    near = ["w4g128-awq", "-2.00%", "of", "the", "CPU's", "KL", "divergence"]
    assert sum(line.split() == near for line in said) == 1
    assert line.endswith("BELOW 70%") and said[-1] == "1 of 1 figures miss a bar"
    assert (tmp_path / "kept" / "times.json").read_text().count("gemv x") == 1


def test_figures_beside_their_bars(check: object) -> None:
    """Every bar is of kernels that are timed, and what misses one says so."""
    named = {case.name for pattern in check.TIMED for case in bench.cases_named(pattern)}  # type: ignore[attr-defined]
    for names in check.LEAST:  # type: ignore[attr-defined]
        assert sum(bool(re.fullmatch(names, name)) for name in named) > 9, names

    def said(name: str, fraction: float, **more: float) -> str:
        given = {"kernel": name, "gb_per_s": 1.0, "copy_gb_per_s": 2.0, "fraction": fraction}
        return str(check.line_of({**given, **more}))  # type: ignore[attr-defined]

    assert said("dequantize gguf-Q4_K float16", 0.84).endswith(
        "84% of a copy's 2.0 GB/s  BELOW 85%"
    )
    assert said("dequantize awq gemm float16", 0.85).endswith("85% of a copy's 2.0 GB/s")
    assert said("dequantize gguf-Q6_K float16", 0.5).endswith("GB/s")  # of no bar
    assert said("gemv awq batch 1 8192x8192", 0.69).endswith("BELOW 70%")
    encoder = "encode gguf-Q4_K float16"
    assert said(encoder, 0.1, seconds_per_1e9_weights=1.99).endswith("s for 10^9 weights")
    assert said(encoder, 0.1, seconds_per_1e9_weights=2.0).endswith("MORE THAN 2.0 s")


@pytest.mark.parametrize("name", ["RUNS", "RACES", "FEW", "RECIPES"])
def test_the_tests_it_names_are_there(name: str, check: object) -> None:
    given = getattr(check, name)
    files = [ROOT / one for one in given if one.endswith(".py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    assert texts
    terms = given[given.index("-k") + 1].split(" or ")
    for term in terms:
        if term.startswith("test_"):
            prefix = term.split("[")[0]
            tests = rf"^def {prefix}\(" if "[" in term else rf"^def {prefix}"
            assert any(re.search(tests, text, re.MULTILINE) for text in texts), term
    for file, text in zip(files, texts, strict=True):
        tests = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
        chosen = [test for test in tests for term in terms if term.split("[")[0].lower() in test]
        assert chosen or (name in ("FEW", "RACES") and "encode" in file.name), file.name


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_what_is_planted(tool: str, check: object) -> None:
    """Compiles, and is a kernel of those that a tool looks at."""
    import planted

    given, _, _ = check.TOOLS[tool]  # type: ignore[attr-defined]
    names = given[given.index("--kernel-name") + 1].removeprefix("regex=")
    assert re.match(names, planted.NAME)
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: make cuda-ptx")
    code = compiling.compile_source("planted", planted.source(tool), "sm_90")
    assert planted.NAME.encode() in code


def test_races_are_looked_for_where_memory_is_shared(check: object) -> None:
    """The kernels whose threads share any are those that the tool is told of."""
    given, _, _ = check.TOOLS["racecheck"]  # type: ignore[attr-defined]
    told = given[given.index("--kernel-name") + 1].removeprefix("regex=")
    headers = {path.name: path.read_text() for path in compiling.folders()[0].glob("*.h")}
    sharing = {name for name, text in headers.items() if "  Shared<" in text}
    assert sharing == {"encode.h", "gemv.h", "pack.h", "transposed.h"}
    for kernel in ("measure_squares", "gemv_q4_k", "gemv_sum", "pack_rows_4"):
        assert re.match(told, kernel), kernel
    for kernel in ("dequantize_across_4_f16", "dequantize_columns_3_bf16"):  # of transposed.h
        assert re.match(told, kernel), kernel
