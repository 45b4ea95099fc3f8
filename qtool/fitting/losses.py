"""What each choice of each unit loses, in nats a token: kept in the journal as it comes.

    {"done": "losses of UNIT", "of": what they hang on, "losses": {"Q4_K": nats, "Q2_K": null, ...}}

So a run that dies rounds again what it was at, and no more. Losses of other sensitivities, types or
settings are not taken for these: `of` is a digest of all three.
"""

import hashlib
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from qtool.fitting.ways import Losses, Ways
from qtool.gradients.sensitivity import Sensitivities
from qtool.messages.progress import Progress
from qtool.streaming.workers import Workers
from qtool.workspaces.workspace import Workspace

Lost = Mapping[str, float | None]


def losses_of(
    ways: Ways, sensitivities: Sensitivities, space: Workspace, threads: int, progress: Progress
) -> Losses:
    """Of every unit, those that an earlier run has found among them."""
    digest = sensitivities.digest()
    hangs_on = {name: _digest(digest, ways, name) for name in ways.sizes}
    found: dict[str, Lost] = {}
    for name, of in hangs_on.items():
        if (lost := _taken(space, name, of, ways.sizes[name])) is not None:
            found[name] = lost
    left = [name for name in ways.sizes if name not in found]
    first = len(found)
    if first:
        progress.say(f"going on with an earlier run: {first} of {len(ways.sizes)} are rounded")
    with Workers(threads) as workers:
        for number in progress.blocks(len(ways.sizes), ways.unit, first=first):
            name = left[number - first]
            found[name] = ways.losses(name, sensitivities, workers)
            space.journal.commit(_line(name), of=hangs_on[name], losses=found[name])
    return {name: found[name] for name in ways.sizes}


def _line(name: str) -> str:
    return f"losses of {name}"


def _digest(sensitivities: str, ways: Ways, name: str) -> str:
    said = json.dumps([sensitivities, ways.facts, ways.sizes[name]], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def _taken(space: Workspace, name: str, of: str, choices: Mapping[str, int]) -> Lost | None:
    """Of an earlier run; None where it has none, or of something else."""
    entry: Mapping[str, Any] = space.journal.done.get(_line(name), {})
    lost = entry.get("losses")
    if entry.get("of") != of or not isinstance(lost, dict):
        return None
    good = lost.keys() in (set(), choices.keys()) and all(map(_is_loss, lost.values()))
    return lost if good else None


def _is_loss(value: Any) -> bool:
    """Whether it is what a choice may lose; None: it cannot hold the unit."""
    return value is None or (type(value) is float and isfinite(value) and value >= 0)
