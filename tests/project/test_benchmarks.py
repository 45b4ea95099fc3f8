"""The exit status of benchmarks: what was not checked is not told as good."""

import sys

from support.places import TESTS

sys.path.insert(0, str(TESTS / "benchmarks"))
import full_disk
import max_ram


def test_full_disk() -> None:
    assert full_disk.status(True, 9, 0) == 0
    assert full_disk.status(True, 0, 9) == 2 and full_disk.status(True, 0, 0) == 2
    assert full_disk.status(True, 8, 1) == 2 and full_disk.status(False, 0, 9) == 1


def test_max_ram() -> None:
    assert max_ram.status(True, [], False) == 0 and max_ram.status(False, ["x"], True) == 1
    assert max_ram.status(True, ["x"], False) == 2 and max_ram.status(True, ["x"], True) == 0
