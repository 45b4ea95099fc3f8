"""The kernels on every instruction set of this machine."""

from collections.abc import Iterator

import pytest

from qtool import native


@pytest.fixture(autouse=True)
def isa_restored() -> Iterator[None]:
    """Leaves the instruction set as it was."""
    before = native.selected()
    yield
    native.select(before)


def isas() -> Iterator[str]:
    """Each of them, selected."""
    for isa in native.available():
        native.select(isa)
        yield isa
