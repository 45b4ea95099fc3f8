"""Which tests take long: half a second or more each, and together more than half of all the time.

    python tests/support/long_tests.py TIMES.xml    (`make long-tests` runs them all, and then this)

writes tests/long.txt by JUnit's XML of a run. They are whole runs of the program for the most part.
`make test` leaves them out and stays a matter of a few minutes, `make test-long` runs them, and
.ci/run both. Only calls are counted: what several tests share is made by whichever comes first.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).parents[1] / "long.txt"
SECONDS = 0.5
# Where all tests were collected: names of the list that none of them has.
GONE = pytest.StashKey[list[str]]()


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of the list as long, and keeps which of them are there no more."""
    names = set(LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in names:
            item.add_marker("long")
    if config.args == config.getini("testpaths"):
        config.stash[GONE] = sorted(names - {item.nodeid for item in items})


def found(times: Path) -> list[str]:
    """The names of those that took long, as pytest has them."""
    names = []
    for case in ElementTree.parse(times).iter("testcase"):
        if float(case.attrib["time"]) >= SECONDS:
            path = case.attrib["classname"].replace(".", "/") + ".py"
            names.append(f"{path}::{case.attrib['name']}")
    return sorted(names)


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in found(Path(sys.argv[1]))), "utf-8")
