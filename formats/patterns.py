"""Regular expressions from files, run only where they cannot take exponential time."""

import re

_HARMLESS = re.compile(r"[\w.\\^$|:?!=,<()\[\]\-+*]{1,2000}")
_LONGEST_NAME = 256


def harmless(expression: str) -> bool:
    """Whether an expression is one that is run."""
    risky = re.search(r"\)\s*[+*{?]", expression) or len(re.findall(r"[+*]", expression)) > 4
    return not risky and _HARMLESS.fullmatch(expression) is not None


def matches(expression: str, name: str) -> bool:
    """Whether it matches from the start of the name; False for one that is not run."""
    if not harmless(expression) or len(name) > _LONGEST_NAME:
        return False
    try:
        return re.match(expression, name) is not None
    except re.error:
        return False
