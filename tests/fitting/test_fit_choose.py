"""What `qtool fit` refuses: a size that is too small, naming one that is not; costs of another
version."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from qtool.errors import SourceError, UnsupportedError
from qtool.fitting import costs as kept
from qtool.fitting.choose import check_size, choose
from qtool.fitting.costs import Costs
from qtool.fitting.request import FitRequest
from qtool.fitting.ways import Made, Ways
from qtool.recipe.recipe import load
from qtool.workspaces.program import VERSION

NUMBERS, DENSE = 2999, 777  # weights; bytes that nothing is chosen for
SIZES = {"a": {"3": 400, "8": 1000}, "b": {"3": 401, "8": 1000}}
LOSSES = Costs({name: {"3": 0.5, "8": 0.01} for name in SIZES}, 64)


def made(text: str) -> Made:
    """A header is longer where matrices differ."""
    picked = dict(pair.split(":") for pair in text.split())
    tensors = DENSE + sum(SIZES[name][choice] for name, choice in picked.items())
    return Made(tensors + 100 * len({*picked.values()}), tensors, NUMBERS)


def ways() -> Ways:
    before = Made(DENSE + 801 + 300, DENSE + 801, NUMBERS)
    given: dict[str, Any] = dict.fromkeys(("weights", "tokens", "losses", "fitting"))
    return Ways(
        sizes=SIZES, members={name: 1 for name in SIZES}, before=before,
        chosen_before={name: ("3", sizes["3"]) for name, sizes in SIZES.items()},
        text=lambda _, choices: " ".join(f"{k}:{v}" for k, v in choices.items()),
        made=made, facts={}, unit="layer", **given,
    )  # fmt: skip


def request(**asked: Any) -> FitRequest:
    nothing = cast(Any, np.nan)  # what is not looked at
    return replace(
        FitRequest(Path("m"), load("w4g64-mlx-rtn"), nothing, Path("r.yaml"), None, None, None,
                   None, 1), **asked,
    )  # fmt: skip


def refusal(**asked: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        check_size(request(**asked), ways())
    return str(caught.value)


def test_what_a_refusal_names_is_enough() -> None:
    said = refusal(size_bytes=1000)
    least = int(re.findall(r"artifact has ([\d,]+) bytes", said)[0].replace(",", ""))
    assert least == DENSE + 801 + 100
    found = choose(request(size_bytes=least), ways(), LOSSES)
    assert {name: one.name for name, one in found.chosen.items()} == {"a": "3", "b": "3"}
    assert found.made.size_bytes == least and found.loss == 1.0
    with pytest.raises(UnsupportedError, match="smallest artifact has"):
        choose(request(size_bytes=least - 1), ways(), LOSSES)
    bits = float(re.findall(r"([\d.]+) bits a weight", said)[0])
    assert 8 * (DENSE + 801) / NUMBERS < bits == 4.21
    assert choose(request(bits=bits), ways(), LOSSES).made.size_bytes == least


def test_smaller_types_are_named_where_they_could_do() -> None:
    said = refusal(size_bytes=1000)
    assert said.startswith("--size: 1,000 bytes are asked for, and with these types the smallest")
    assert said.endswith("ask for more, or name smaller --types")
    assert refusal(bits=0.5).startswith("--bits: 0.5 bits are asked for, and ")
    said = refusal(size_bytes=500, kept_keys=frozenset({"head"}))
    assert "777 bytes of it in tensors that are not chosen for (with mlx.head as given)" in said
    assert said.endswith("; ask for more")


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({VERSION: "0.0.9", "model": 1}, "costs that qtool 0.0.9 measured, and this is qtool 1.0;"),
        ({"model": 2}, "costs that a qtool that did not say which measured, and this is qtool 1.0"),
        ({VERSION: "1.0", "model": 1}, ""),
    ],
)
def test_costs_of_another_version(of: dict[str, Any], said: str, tmp_path: Path) -> None:
    path, now = tmp_path / "costs.json", {VERSION: "1.0", "model": 1}
    kept.write(path, LOSSES, of)
    if not said:
        assert kept.read(path, now, SIZES) == LOSSES
        return
    with pytest.raises(SourceError, match=f"^{path}: {said}.* or remove this one"):
        kept.read(path, now, SIZES)
