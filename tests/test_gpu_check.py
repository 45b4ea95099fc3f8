"""`make gpu-check` keeps what was said, and names tests that are there: that needs no GPU."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtool.cuda import bench

ROOT = Path(__file__).parent.parent


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    import check

    return check


def test_what_a_check_said_is_kept(check: object, tmp_path: Path) -> None:
    """Also of one that takes too long, or fails; and times as far as they came."""
    said = """print('{"kernel": "x", "gb_per_s": 1.5}', flush=True); """
    endings = {"pass": True, "raise ValueError(7)": False, "import time; time.sleep(60)": False}
    for ending, good in endings.items():
        log = tmp_path / "log.txt"
        found, text = check.run([sys.executable, "-c", said + ending], 5.0, log)  # type: ignore[attr-defined]
        assert found is good
        assert log.read_text() in text
        results = check.results_of(text)  # type: ignore[attr-defined]
        assert results == [{"kernel": "x", "gb_per_s": 1.5}]
        assert ("ValueError" in text) == ("raise" in ending)
        assert ("took more than 5 s" in text) == ("sleep" in ending)


def test_one_kernel_that_fails_is_told_and_others_are_timed(
    check: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(cases: list[bench.Case]) -> Iterator[bench.Result]:
        (case,) = cases
        if case.name == "gemv awq batch 4 8192x8192":
            raise RuntimeError("an illegal memory access")
        yield bench.Result(case.name, 1.0, 2.0)

    monkeypatch.setattr(bench, "bench", timed)
    with pytest.raises(SystemExit) as ended:
        check.timed()  # type: ignore[attr-defined]
    said = capsys.readouterr().out
    names = [one["kernel"] for one in check.results_of(said)]  # type: ignore[attr-defined]
    assert ended.value.code == 1 and "gemv awq batch 4 8192x8192: Traceback" in said
    assert "gemv awq batch 8 8192x8192" in names and len(names) == len(set(names)) > 40
    assert "gemv awq batch 4 8192x8192" not in names


@pytest.mark.parametrize("name", ["RUNS", "FEW", "RECIPES"])
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
        assert chosen or (name == "FEW" and "encode" in file.name), file.name
