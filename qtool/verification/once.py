"""What is wrong once is told once: by the first check that sees it, or the one that knows most."""

from collections.abc import Iterable, Iterator, Sequence

from qtool.verification.finding import Finding


def wrong_settings(findings: Iterable[Finding]) -> frozenset[str]:
    """Settings that errors are about."""
    wrong = (one.about.settings for one in findings if one.severity == "error")
    return frozenset().union(*wrong)


def untold(before: Sequence[Finding], found: Iterable[Finding]) -> Iterator[Finding]:
    """The findings but for those that only say again which settings make no sense."""
    known = wrong_settings(before)
    for one in found:
        if not one.about.settings or not one.about.settings <= known:
            yield one


def with_engine(said: Sequence[Finding], found: Sequence[Finding]) -> list[Finding]:
    """What was said without asking an engine, and what one has to say: of layers that an engine
    refuses by its own reading of a list, only that; of what is no list, nothing more."""
    new = [*untold(said, found)]
    known = frozenset().union(*(one.about.listed for one in new if one.severity == "error"))
    return [one for one in said if not one.about.listed or not one.about.listed <= known] + new
