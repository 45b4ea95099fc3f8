"""Numbers as people read them."""

import pytest

from qtool.cli.eval import _interval
from qtool.messages.printable import size


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0.0 kB"), (41_664, "41.7 kB"), (1e6, "1.0 MB"), (145_401_984, "145.4 MB"),
     (9.99e9, "9990.0 MB"), (1.25e10, "12.50 GB")],
)  # fmt: skip
def test_sizes(nbytes: float, said: str) -> None:
    assert size(nbytes) == said


def test_nothing_is_no_negative_number() -> None:
    assert _interval([-1e-9, 2e-9], 5) == "95 %: 0.00000 to 0.00000"
    assert _interval([-1e-4, 0.5], 3) == "95 %: 0.000 to 0.500"
    assert _interval([-0.25, 0.5], 3) == "95 %: -0.250 to 0.500"
