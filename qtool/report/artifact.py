"""One artifact's part of a page: how it is stored, its errors, codes, scales, origin, loading."""

from collections import defaultdict
from collections.abc import Sequence

from qtool.report import figures, plots, tables
from qtool.report.facts import ArtifactFacts, Codes
from qtool.report.layers import section as layers_section
from qtool.report.markup import Markup, dotted, element, join, named
from qtool.report.sample import binned


def section(one: ArtifactFacts, number: int, count: int) -> Markup:
    """Everything that concerns this artifact alone."""
    title = named(number, one.label, count > 1)
    parts = [element("h2", title, id_=f"artifact-{number}")]
    if one.storage:
        parts += [_storage(one), layers_section(one), *_codes(one), *_scales(one)]
    parts += [*_loading(one), *_provenance(one)]
    return element("section", join(parts), aria_labelledby=f"artifact-{number}")


def _storage(one: ArtifactFacts) -> Markup:
    rows = [
        (
            row.scheme,
            f"{row.tensors:,}",
            f"{row.parameters:,}" if row.parameters else "not known",
            figures.size(row.nbytes),
            f"{8 * row.nbytes / row.parameters:.3f}" if row.parameters else "-",
        )
        for row in one.storage
    ]
    return tables.cards(("stored as", "tensors", "weights", "bytes", "bits per weight"), rows)


def _codes(one: ArtifactFacts) -> list[Markup]:
    if not one.codes and not one.not_sampled:
        return []
    parts = [element("h3", "Codes")]
    if one.codes:
        parts.append(
            element(
                "p",
                "How often each code occurs, in a sample of the matrices of each kind. A bar "
                "that stands out at an end means that weights are clipped there, or that whole "
                "groups are zero; codes that never occur are bits that buy nothing.",
            )
        )
        parts.append(
            element("div", *(plots.histogram(codes) for codes in one.codes), class_="many")
        )
        groups: dict[tuple[str, ...], list[Codes]] = defaultdict(list)
        for codes in one.codes:
            groups[tuple(name for name, _ in binned(codes))].append(codes)
        for names, members in groups.items():
            words = "codes" if len(names) == len(members[0].counts) else "groups of codes"
            shares = [
                _shares(names, members[first : first + tables.COLUMNS])
                for first in range(0, len(members), tables.COLUMNS)
            ]
            title = f"Shares of {len(names)} {words}, in percent"
            parts.append(tables.details(title, *shares, long=True))
    parts += [element("p", said, class_="faint") for said in one.not_sampled]
    return parts


def _shares(names: Sequence[str], members: Sequence[Codes]) -> Markup:
    columns = [[n for _, n in binned(codes)] for codes in members]
    totals = [codes.total or 1 for codes in members]
    rows = [
        (name, *(f"{100 * column[place] / total:.1f}"
                 for column, total in zip(columns, totals, strict=True)))
        for place, name in enumerate(names)
    ]  # fmt: skip
    titles = [element("span", dotted(codes.kind), class_="any") for codes in members]
    return tables.plain(("code", *titles), rows)


def _scales(one: ArtifactFacts) -> list[Markup]:
    if not one.scales:
        return []
    rows = [
        (
            row.kind,
            row.scheme,
            f"{row.count:,}",
            figures.small(row.low),
            figures.small(row.median),
            figures.small(row.high),
            f"{row.broken:,}",
        )
        for row in one.scales
    ]
    return [
        element("h3", "Scales"),
        element(
            "figure",
            plots.scale_ranges(one.scales),
            element(
                "figcaption",
                "Lowest, median (dot) and highest scale of the same sample, as magnitudes, those "
                "that are zero or not finite left out; of K-quants the scale of a super-block.",
            ),
        ),
        tables.details(
            "The numbers",
            tables.cards(
                ("kind", "stored as", "scales", "lowest", "median", "highest", "unusable"),
                rows,
                2,
            ),
        ),
    ]  # fmt: skip


def _loading(one: ArtifactFacts) -> list[Markup]:
    if not one.loading:
        return []
    parts = [element("h3", "Loading")]
    for way in one.loading:
        if way.reasons:
            refused = element("b", f"{way.engine} refuses it.", class_="bad")
            parts.append(element("p", refused, " " + " ".join(way.reasons)))
        else:
            parts.append(element("p", f"With {way.engine}:"))
            parts.append(element("pre", way.command))
        parts += [element("p", said, class_="faint") for said in way.remarks]
    return parts


def _provenance(one: ArtifactFacts) -> list[Markup]:
    parts = [element("h3", "Provenance"), element("p", one.origin)]
    if one.provenance:
        shown = [row for row in one.provenance if not row[0].startswith("recipe.")]
        recipe = [row for row in one.provenance if row[0].startswith("recipe.")]
        if shown:
            parts.append(tables.pairs(shown))
        if recipe:
            parts.append(tables.details("The whole recipe", tables.pairs(recipe), long=True))
    return parts
