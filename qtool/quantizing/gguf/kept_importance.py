"""What an importance matrix is made of, kept block by block, so that a run that dies goes on.

`importance-N` in the workspace holds the sums of squares of block N, float32, one site after
another; the journal has the sites and the checksum, those of the hidden states that follow, the
scales that a transform found, and what GPTQ swept (gptq/swept_files.py).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qtool.gguf.importance.measured import Squares
from qtool.native.sums import checksum
from qtool.streaming.hidden import keep as keep_hidden
from qtool.streaming.hidden import take_up as take_up_states
from qtool.streaming.stream import Stream
from qtool.streaming.workers import Workers
from qtool.workspaces.workspace import Workspace

if TYPE_CHECKING:
    from qtool.quantizing.gguf.gptq.sweeping import Sweeping
    from qtool.quantizing.gguf.scaling import Scaling

_SWEPT_HEAD = "sweep of the head"


def keep(
    space: Workspace,
    index: int,
    block: Sequence[Squares],
    stream: Stream,
    workers: Workers,
    *,
    goes_on: bool,
    scaling: "Scaling | None" = None,
    sweeping: "Sweeping | None" = None,
) -> None:
    """Block `index` is measured; the stream is before the next one, where that goes_on."""
    sums = np.concatenate([np.empty(0, np.float32), *(site.square for site in block)])
    # numpy's own tofile does not tell of a full disk by its number.
    (space.folder / f"importance-{index}").write_bytes(sums.view(np.uint8).data)
    hidden = keep_hidden(space.folder, index + 1, stream, workers) if goes_on else []
    if goes_on and sweeping is not None and sweeping.originals is not None:
        hidden += sweeping.originals.keep(index + 1)
    space.journal.commit(
        _unit(index),
        sites=[[s.id, s.names, s.expert, s.count, s.square.size] for s in block],
        sums=checksum(sums.view(np.uint8)),
        hidden=hidden,
        **({} if scaling is None else {"scaled": scaling.kept[index]}),
        **({} if sweeping is None else {"swept": sweeping.kept[index]}),
    )


def keep_head(space: Workspace, sweeping: "Sweeping") -> None:
    """The head is swept, too."""
    space.journal.commit(_SWEPT_HEAD, swept=sweeping.head_kept)


def take_up(
    space: Workspace,
    count: int,
    scaling: "Scaling | None" = None,
    sweeping: "Sweeping | None" = None,
) -> list[list[Squares]]:
    """The leading blocks that are measured; what is damaged is forgotten with all after it."""
    found: list[list[Squares]] = []
    while len(found) < count and (entry := space.journal.done.get(_unit(len(found)))) is not None:
        path = space.folder / f"importance-{len(found)}"
        sites = _sites(entry)
        widths = [site[4] for site in sites or ()]
        sums = np.fromfile(path, np.float32) if path.is_file() else np.empty(0, np.float32)
        right = sums.size == sum(widths) and checksum(sums.view(np.uint8)) == entry.get("sums")
        right = right and (scaling is None or scaling.restore(entry.get("scaled")))
        right = right and (sweeping is None or sweeping.restore(entry.get("swept")))
        if sites is None or not right:
            space.journal.forget_from(_unit(len(found)))
            break
        parts = np.split(sums, np.cumsum(widths)[:-1]) if widths else []
        found.append(
            [
                Squares(name, tuple(names), expert, part, tokens)
                for (name, names, expert, tokens, _), part in zip(sites, parts, strict=True)
            ]
        )
    if len(found) == count and sweeping is not None and sweeping.head is not None:
        entry = space.journal.done.get(_SWEPT_HEAD)
        if entry is not None and not sweeping.restore_head(entry.get("swept")):
            space.journal.forget_from(_SWEPT_HEAD)
    return found


def _sites(entry: Mapping[str, Any]) -> list[Any] | None:
    """The sites of a line as keep() wrote it; None of a line that it never wrote."""
    sites = entry.get("sites")
    good = isinstance(sites, list) and all(
        isinstance(site, list)
        and len(site) == 5
        and isinstance(site[0], str)
        and isinstance(site[1], list)
        and all(isinstance(name, str) for name in site[1])
        and (site[2] is None or type(site[2]) is int)
        and all(type(number) is int and number >= 0 for number in site[3:])
        for site in sites
    )
    return sites if isinstance(sites, list) and good else None


def take_up_hidden(
    space: Workspace,
    kept: list[list[Squares]],
    stream: Stream,
    workers: Workers,
    sweeping: "Sweeping | None" = None,
) -> None:
    """Bring the stream to where the measuring goes on; what has no states is measured again."""
    while kept:
        name = _unit(len(kept) - 1)
        hidden = space.journal.done[name].get("hidden")
        originals = None if sweeping is None else sweeping.originals
        if originals is not None:
            there = originals.take_up(space.folder, len(kept), hidden)
        else:
            there = take_up_states(space.folder, len(kept), hidden, stream, workers)
        if there:
            return
        space.journal.forget_from(name)
        kept.pop()


def _unit(index: int) -> str:
    return f"importance of block {index}"
