"""What is worth saying of a plan before the work: warnings, and notes that are none."""

from collections.abc import Iterable

NOTE = "note: "  # how a note begins, where it stands among warnings


def line(sentence: str) -> str:
    """As a person reads it."""
    return sentence if sentence.startswith(NOTE) else f"warning: {sentence}"


def told_apart(sentences: Iterable[str]) -> dict[str, list[str]]:
    """`warnings` and `notes`, for --json."""
    found: dict[str, list[str]] = {"warnings": [], "notes": []}
    for one in sentences:
        found["notes" if one.startswith(NOTE) else "warnings"].append(one.removeprefix(NOTE))
    return found
