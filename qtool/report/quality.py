"""How good the artifacts are: the table of figures, size against divergence, a swept setting."""

from collections.abc import Sequence

from qtool.report import figures, plots, tables
from qtool.report.facts import Quality, Report
from qtool.report.markup import Markup, element, key, named


def section(report: Report) -> list[Markup]:
    """Table, plot of size against divergence, and a sweep where there is one."""
    parts = [element("h2", "Quality", id_="quality"), element("p", report.quality_from)]
    if not report.quality:
        return parts
    names = _numbers(report)
    several = len(names) > 1
    ordered = sorted(report.quality, key=lambda row: int(names[row.artifact]))
    parts.append(
        tables.cards(
            ("artifact", "size", "perplexity", "KL divergence, nats", "99th percentile",
             "same top token", "RMS change of probability", "accepted as a draft"),
            [_figures_of(row, names, several) for row in ordered],
        )
    )  # fmt: skip
    parts.append(element("p", _explained(report.quality), class_="faint"))
    groups: dict[tuple[str, str, int, int], list[Quality]] = {}
    for row in ordered:
        if row.kld is not None:
            groups.setdefault(row.measured, []).append(row)
    if len(groups) > 1:
        parts.append(
            element(
                "p",
                "The artifacts were not all measured in the same way; only rows of the same text, "
                "windows and protocol can be compared.",
            )
        )
    for rows in groups.values():
        if len(rows) > 1:
            keys = [
                element("span", key(int(names[row.artifact])), " ", row.artifact) for row in rows
            ]
            parts.append(
                element(
                    "figure",
                    plots.pareto([_point(row, names) for row in rows]),
                    element(
                        "figcaption",
                        "Size against mean KL divergence (logarithmic). ",
                        Markup(", ".join(keys)),
                        ". Joined, in blue: nothing here is both smaller and nearer to the source.",
                    ),
                    class_="chart",
                )
            )
    if report.sweep is not None:
        parts += _swept(report)
    return parts


def _point(row: Quality, names: dict[str, str]) -> plots.Point:
    assert row.kld is not None
    return plots.Point(names[row.artifact], row.artifact, row.size_bytes, row.kld, row.front)


def _numbers(report: Report) -> dict[str, str]:
    """The number of each artifact; those that only have figures come after the others."""
    labels = [one.label for one in report.artifacts]
    labels += [row.artifact for row in report.quality if row.artifact not in labels]
    return {label: str(place) for place, label in enumerate(dict.fromkeys(labels), 1)}


def _figures_of(row: Quality, names: dict[str, str], several: bool) -> tuple[str, ...]:
    def percentage(value: float | None) -> str:
        return "not measured" if value is None else figures.share(value)

    return (
        named(int(names[row.artifact]), row.artifact, several),
        figures.size(row.size_bytes),
        figures.with_spread(row.perplexity, row.perplexity_interval, 2),
        "not measured" if row.kld is None else figures.with_spread(row.kld, row.kld_interval, 4),
        figures.optional(row.kld_p99, 3),
        percentage(row.top1_agreement),
        figures.optional(row.rms_dp, 4),
        percentage(row.acceptance),
    )


def _explained(rows: Sequence[Quality]) -> str:
    ways = list(dict.fromkeys(figures.how(row) for row in rows))
    said = f"Measured on {'; on '.join(ways)}. Intervals are 95 %."
    sources = {f"{row.reference_perplexity:.2f}" for row in rows
               if row.reference_perplexity is not None}  # fmt: skip
    if sources:
        said += f" The source's own perplexity is {' or '.join(sorted(sources))}."
    return said + (
        " KL divergence says how far the artifact's next-token distribution is from the source's; "
        "0 is the same."
    )


def _swept(report: Report) -> list[Markup]:
    assert report.sweep is not None
    rows = [(f"{value:g}", label, f"{kld:z.5f}") for value, kld, label in report.sweep.points]
    return [
        element("h3", f"What {report.sweep.key} does"),
        element(
            "figure",
            plots.sweep(report.sweep),
            element(
                "figcaption",
                f"Mean KL divergence (logarithmic) of artifacts that differ in {report.sweep.key} "
                "alone; the lowest is named.",
            ),
            class_="chart",
        ),
        tables.details(
            "The numbers",
            tables.plain((report.sweep.key, "artifact", "KL divergence, nats"), rows, 2),
        ),
    ]
