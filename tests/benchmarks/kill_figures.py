"""What kills cost: work that was done again, by output and in all."""

from collections import Counter
from dataclasses import dataclass, field

from kill_work import Event, Work

from qtool.native.library import default_threads


@dataclass(frozen=True)
class Whole:
    """An undisturbed run."""

    digest: dict[str, str]
    kinds: set[str]  # of work that is judged: blocks, pieces of a GGUF file
    names: dict[str, str]  # of kinds of steps
    most_pieces: int  # of a decoder block, or of a unit that has more
    seconds: float
    steps: int  # in the journal
    working: float  # seconds from its first block to its last
    end: float  # seconds from there on


@dataclass
class Figures:
    """What happened with one output."""

    model: str
    recipe: str
    kills: int = 0
    when: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    mismatches: int = 0
    again: list[float] = field(default_factory=list)  # share of the whole, by kill
    blocks: list[float] = field(default_factory=list)  # the same in blocks
    apart: dict[str, float] = field(default_factory=dict)  # shares of doing it once


def count(figures: Figures, stage: str) -> None:
    """One more kill at that stage."""
    figures.when[stage] = figures.when.get(stage, 0) + 1


def done_again(
    lost: Work, work: Work, known: dict[str, float], whole: Whole, figures: Figures
) -> None:
    """What one killed command had begun, and the next one did not take over."""
    again, blocks = 0.0, 0.0
    for kind in whole.kinds:
        parts = lost.parts.get(kind) or work.parts.get(kind, 1)
        # A command that finds a kind finished tells nothing of it.
        gone = max(0.0, known.get(kind, 0.0) - work.began.get(kind, 1.0))
        begun = kind == "block" or (
            "block" not in whole.kinds or known.get("block", 0.0) >= 1
        )  # pieces come after all blocks
        at_once = 1 if kind == "block" else default_threads()
        under_way = 0.0
        if begun and known.get(kind, 0.0) < 1 and kind in work.began:
            under_way = min(at_once / parts, 1 - known.get(kind, 0.0))
        again += (gone + under_way) / len(whole.kinds)
        blocks += (gone + under_way) * parts / (1 if kind == "block" else whole.most_pieces)
    figures.again.append(again)
    figures.blocks.append(blocks)


def told(lines: list[Event]) -> int:
    """Print the sums; how many outputs were not as they should be."""
    print(f"{'model':>6} {'recipe':>18} {'runs':>5} {'kills':>6} {'start':>6} {'blocks':>7} "
          f"{'end':>5} {'named':>6} {'resumed':>8} {'mismatches':>11} {'again: mean':>12} "
          f"{'most':>7} {'blocks':>7}  apart: mean, most")  # fmt: skip
    groups: dict[tuple[str, str], list[Event]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["recipe"]), []).append(line)
    everything: list[Event] = []
    for (model, recipe), group in [*sorted(groups.items()), (("all", ""), everything)]:
        if group is not everything:
            everything += group
        when = sum((Counter(one["when"]) for one in group), Counter[str]())
        again = [share for one in group for share in one["again"]]
        blocks = [share for one in group for share in one["blocks"]]
        print(
            f"{model:>6} {recipe:>18} {len(group):5} {sum(one['kills'] for one in group):6} "
            f"{when['start']:6} {when['blocks']:7} {when['end']:5} {when['named']:6} "
            f"{sum(one['resumed'] for one in group):8} "
            f"{sum(one['mismatches'] for one in group):11} "
            f"{sum(again) / max(1, len(again)):12.2%} {max(again, default=0):7.2%} "
            f"{max(blocks, default=0):7.2f}  {_apart(group)}"
        )
    return sum(one["mismatches"] + any(b > 1.001 for b in one["blocks"]) for one in lines)


def _apart(group: list[Event]) -> str:
    kinds = sorted({kind for one in group for kind in one.get("apart", {})})
    found = {kind: [one.get("apart", {}).get(kind, 0.0) for one in group] for kind in kinds}
    return ", ".join(
        f"{kind} {sum(shares) / len(shares):.0%} {max(shares):.0%}"
        for kind, shares in found.items()
    )
