"""`qtool verify` finds what is wrong with every artifact of the gallery, names it, and says why;
and passes the healthy ones that they were made of."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.hub import resolve
from qtool.recipe.recipe import Recipe, load, shipped
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact
from support.gallery import engines, floats, folders, gguf, packed, parents
from support.gallery.case import Broken
from support.models.gpt_oss import source_for
from support.verification.verifying import but_digests, forget_digests

CASES = [*packed.CASES, *floats.CASES, *folders.CASES, *gguf.CASES, *engines.CASES]
Parent = Callable[[str], Path]


@pytest.fixture(scope="session")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Parent:
    """Healthy artifacts by name, each made when it is first asked for."""
    where = tmp_path_factory.mktemp("gallery")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = parents.make(name, where)
        return made[name]

    return get


def shown(verdict: Verdict) -> str:
    return "\n".join(f"{f.severity} {f.check} [{f.name}] {f.message}" for f in verdict.findings)


def test_there_are_enough() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_found(case: Broken, parent: Parent, tmp_path: Path) -> None:
    healthy = parent(case.parent)
    path = tmp_path / healthy.name
    shutil.copytree(healthy, path) if healthy.is_dir() else shutil.copy(healthy, path)
    forget_digests(path)
    case.damage(path)
    source = (
        parents.source_of(parents.RECIPES[case.parent][0], healthy.parent) if case.against else None
    )
    verdict = verify_artifact(path, against=source, engine=case.engine, tp=case.tp)
    found = [
        finding
        for finding in verdict.findings
        if re.fullmatch(case.check, finding.check)
        and finding.severity == case.severity
        and case.named in f"{finding.name} {finding.message}"
        and re.search(case.phrase, finding.message)
    ]
    assert found, f"{case}\n{shown(verdict)}"
    assert verdict.ok == (case.severity != "error"), shown(verdict)


@pytest.mark.parametrize(
    "name",
    [
        "qweight-cut", "qzeros-lost", "scales-lost", "packed-cut", "packed-scales-lost",
        "zero-points-lost", "fp8-scale-lost", "block-scales-transposed",
    ],
)  # fmt: skip
def test_no_other_matrix_is_named(name: str, parent: Parent, tmp_path: Path) -> None:
    """One matrix that cannot be read is no reason to call the others broken."""
    case = next(case for case in CASES if case.name == name)
    path = tmp_path / name
    shutil.copytree(parent(case.parent), path)
    forget_digests(path)
    case.damage(path)
    verdict = verify_artifact(path)
    assert {f.name for f in verdict.findings if f.check == "shapes"} == {case.named}
    assert len(but_digests(verdict.findings)) == 1, shown(verdict)


@pytest.mark.parametrize("name", [*parents.RECIPES, *parents.GGUF])
def test_the_healthy_pass(name: str, parent: Parent) -> None:
    verdict = verify_artifact(parent(name))
    assert verdict.ok and not [f for f in verdict.findings if f.severity == "warning"], shown(
        verdict
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_recipe_passes_with_its_engine(name: str, tmp_path: Path) -> None:
    """Of the model that qtool ships, or gpt-oss; vLLM takes GPTQ of 4 and 8 symmetric bits alone,
    and neither LLM.int8(), QServe's files nor inputs of 4 bits, rotated."""
    recipe, out = load(name), tmp_path / "out"
    engine: str | None = "vllm"
    if not isinstance(recipe, Recipe):
        engine, out = "llama.cpp", tmp_path / "out.gguf"
    elif recipe.format == "gptq" and recipe.scheme.bits not in (4, 8):
        engine = "transformers"
    elif recipe.format == "mlx":
        engine = "mlx-lm"
    elif recipe.format in ("bitsandbytes", "qserve") or name == "w4a4-rotated":
        engine = None
    source = source_for(name, resolve("tiny"), tmp_path / "model")
    arguments = ["quantize", str(source), "--recipe", name, "-o", str(out)]
    # From elsewhere than the checkout, which may have no kernels: the installed package.
    line = [sys.executable, "-m", "qtool", *arguments]
    done = subprocess.run(line, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0
    verdict = verify_artifact(out, against=source, engine=engine)
    assert verdict.ok and ("engine" in verdict.checks) == (engine is not None), shown(verdict)
