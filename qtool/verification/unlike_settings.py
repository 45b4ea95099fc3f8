"""Settings unlike the source's, as findings: of config.json, and of a GGUF file's metadata."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

from qtool.verification.finding import Finding, of_setting

CHECK, VOCABULARY = "settings", "vocabulary"


def is_number(value: object) -> TypeGuard[int | float]:
    """JSON and GGUF both tell truth from numbers; Python does not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def unlike(
    different: Sequence[str],
    chosen: tuple[str, ...],
    listed: Callable[[list[str]], str],
    why: str,
    remedy: str,
    called: Callable[[str], str] = str,
) -> Iterator[Finding]:
    """settings: an error for keys that engines compute with, a warning for those that end in one of
    `chosen`, which may have been changed on purpose. called: what a key is where it was written."""
    meant = [key for key in different if key.endswith(chosen)]
    wrong = [key for key in different if key not in meant]
    if wrong:
        about = of_setting(*map(called, wrong))
        yield Finding("error", CHECK, wrong[0], f"{listed(wrong)}; {why}", about)
    if meant:
        said = f"{listed(meant)}; unless that is meant, {remedy}"
        yield Finding("warning", CHECK, meant[0], said, of_setting(*map(called, meant)))
