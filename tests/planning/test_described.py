"""What a plan says of a recipe's methods."""

import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.recipe.described import methods
from qtool.recipe.recipe import load

TEXT = "; calibrated on 128 samples of 512 tokens"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("q4_k_m", None),
        ("w4g128-rtn", None),
        ("q4_k_m importance=true", "importance"),
        ("q4_k_m method=[gptq,tune]", "gptq, tune"),
        ("q4_k_m-awq-gptq", "awq, gptq (gptq.guided 0.5, gptq.yaqa 16)"),
        ("w4g128-gptq gptq.gptaq=0.5", "gptq (gptq.gptaq 0.5)"),
        ("w4g128-awq-gptq-tune gptq.guided=0", "awq, gptq (gptq.yaqa 16), tune"),
        ("kv-fp8", "kv_cache"),
    ],
)
def test_methods(recipe: str, said: str | None) -> None:
    name, *sets = recipe.split()
    assert methods(load(name, sets)) == (None if said is None else said + TEXT)


@pytest.mark.parametrize("recipe", ["w4g64-gptq", "q4_0-awq-gptq"])
def test_a_plan_says_them(recipe: str) -> None:
    (line,) = lines(recipe, "--samples", "3")
    assert line.endswith("calibrated on 3 samples of 512 tokens")


def test_a_plan_says_none_where_nothing_is_measured() -> None:
    assert not lines("q4_0")


def lines(recipe: str, *more: str) -> list[str]:
    result = CliRunner().invoke(app, ["plan", "tiny", "--recipe", recipe, *more])
    assert result.exit_code == 0
    return [line for line in result.stdout.splitlines() if line.startswith("methods: ")]
