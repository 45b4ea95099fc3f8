"""A setting of config.json that makes no sense is told by the first check that looks at it."""

import re
from collections.abc import Iterable, Iterator, Sequence

from qtool.verification import unlike_settings
from qtool.verification.finding import Finding

# As qtool.gguf.from_hf.hf_config says it, and the check of classes.
_SAID = re.compile(r"config\.json: (\w+) is |config\.json says (\w+) .*; expected a whole number")


def untold(before: Sequence[Finding], found: Iterable[Finding]) -> Iterator[Finding]:
    """The findings but for those that only say again which setting has no sense."""
    known = {key for one in before if (key := _setting(one)) is not None}
    for one in found:
        alone = one.check == unlike_settings.CHECK and " has 1 setting unlike " in one.message
        if (one.name if alone else _setting(one)) not in known:
            yield one


def _setting(finding: Finding) -> str | None:
    found = _SAID.match(finding.message)
    return None if found is None else found[1] or found[2]
