"""How evenly the calibration reached the routed experts."""

from collections.abc import Mapping, Sequence

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import MIN_EXPERT_TOKENS
from qtool.messages.summary import ExpertReport
from qtool.recipe.recipe import Recipe
from qtool.streaming.stream import LoadedBlock


def expert_reports(
    block: LoadedBlock, sites: Sequence[Site], tokens: Mapping[str, int]
) -> list[ExpertReport]:
    """Tokens that each routed expert of a block saw. tokens: by site id."""
    first = next((site for site in sites if site.expert is not None), None)
    if first is None:
        return []
    counts = {
        site.expert: tokens[site.id]
        for site in sites
        if site.expert is not None and site.matrix.parameter == first.matrix.parameter
    }
    where = block.prefix + first.matrix.parameter.rsplit(".", 1)[0]
    return [ExpertReport(where, [count for _, count in sorted(counts.items())])]


def experts_note(experts: list[ExpertReport], recipe: Recipe) -> list[str]:
    """One sentence on how evenly the calibration reached the experts."""
    if not experts:
        return []
    tokens = sorted(count for report in experts for count in report.tokens)
    rare = sum(count < MIN_EXPERT_TOKENS for count in tokens)
    never = tokens.count(0) if recipe.measures_inputs else 0
    said = (
        f"tokens per expert: {tokens[0]} to {tokens[-1]}, median {tokens[len(tokens) // 2]}, over "
        f"{len(tokens)} experts"
    )
    if rare:
        said += f"; {rare} saw fewer than {MIN_EXPERT_TOKENS}{_of_rare(recipe)}"
    if never:
        said += (
            f"; {never} saw none, and have input scales for the largest that other experts of "
            "their blocks read"
        )
    if rare:
        said += ": more calibration samples would reach them"
    return [said]


def _of_rare(recipe: Recipe) -> str:
    """What becomes of experts that few tokens reached."""
    if recipe.rounding == "gptq":
        return " and are rounded to nearest"
    if recipe.shares_scales:
        return " and are left out of the search for scales"
    return ", by which the scales of their inputs are told" if recipe.measures_inputs else ""
