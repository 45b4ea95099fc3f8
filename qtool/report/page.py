"""Facts as one page of HTML: no scripts, nothing fetched, the same bytes for the same facts."""

from qtool.report import figures, plots, tables
from qtool.report.artifact import section
from qtool.report.facts import ArtifactFacts, Component, Report
from qtool.report.layers import compared
from qtool.report.markup import Markup, element, join, named
from qtool.report.names import COMPONENTS
from qtool.report.quality import section as quality_section
from qtool.report.style import CSS
from qtool.verification.finding import Finding

_MOST_FINDINGS = 200
_RANK = {"error": 0, "warning": 1, "note": 2}


def page(report: Report) -> str:
    """The document."""
    labels = ", ".join(one.label for one in report.artifacts)
    body = [
        element("h1", "Quantization report"),
        element("p", _lead(report)),
        _contents(report),
        *_summary(report),
        *_findings(report),
        *quality_section(report),
        *_sizes(report),
        *_errors(report),
        *(
            section(one, number, len(report.artifacts))
            for number, one in enumerate(report.artifacts, 1)
        ),
        *_again(report),
        element(
            "footer",
            element("p", f"Made by qtool {report.qtool_version}.", class_="faint"),
        ),
    ]
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"Quantization report: {labels}"),
        element("style", Markup(CSS)),
    ]
    html = element("html", element("head", *head), element("body", join(body)), lang="en")
    return f"<!doctype html>\n{html}\n"


def _lead(report: Report) -> str:
    against = f", compared with {report.reference.path}" if report.reference else ""
    count = len(report.artifacts)
    return ("One artifact" if count == 1 else f"{count} artifacts") + f"{against}."


def _contents(report: Report) -> Markup:
    links = [("summary", "What it is"), ("findings", "Checks"), ("quality", "Quality")]
    links.append(("size", "Size"))
    links += [(f"artifact-{n}", one.label) for n, one in enumerate(report.artifacts, 1)]
    links.append(("again", "Commands"))
    return element("nav", *(element("a", words, href=f"#{id_}") for id_, words in links),
                   aria_label="Contents")  # fmt: skip


def _summary(report: Report) -> list[Markup]:
    several = len(report.artifacts) > 1
    divergence = {row.artifact: row for row in report.quality}
    rows = []
    for number, one in enumerate(report.artifacts, 1):
        measured = divergence.get(one.label)
        kinds = [row.scheme for row in one.storage if not row.scheme.startswith("dense")]
        rows.append(
            (
                named(number, one.label, several),
                one.format,
                ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
                or ("unquantized" if one.parameters else "not known"),
                _verdict(one),
                figures.bits(one.bits_per_weight) if one.parameters else "not known",
                figures.size(one.size_bytes),
                _ratio(one, report),
                figures.share(one.unquantized_share) if one.parameters else "not known",
                figures.optional(measured.kld if measured else None, 4),
            )
        )
    titles = (
        "artifact", "format", "stored as", "checks", "bits per weight", "size",
        "of the source" if report.reference else "of 16 bits a weight", "left dense",
        "KL divergence, nats",
    )  # fmt: skip
    return [element("h2", "What it is", id_="summary"), tables.cards(titles, rows, 4)]


def _ratio(one: ArtifactFacts, report: Report) -> str:
    whole = report.reference.size_bytes if report.reference else 2 * one.parameters
    return figures.share(one.size_bytes / whole) if whole and one.size_bytes else "not known"


def _verdict(one: ArtifactFacts) -> Markup:
    counts = [sum(f.severity == kind for f in one.findings) for kind in ("error", "warning")]
    said = []
    if counts[0]:
        said.append(element("b", figures.plural(counts[0], "error", "errors"), class_="bad"))
    if counts[1]:
        said.append(element("span", figures.plural(counts[1], "warning", "warnings")))
    return Markup(", ".join(said)) if said else element("b", "all passed", class_="good")


def _findings(report: Report) -> list[Markup]:
    several = len(report.artifacts) > 1
    parts = [element("h2", "Checks", id_="findings")]
    ran: dict[tuple[str, ...], list[str]] = {}
    for number, one in enumerate(report.artifacts, 1):
        ran.setdefault(one.checks, []).append(str(number))
        errors = sum(finding.severity == "error" for finding in one.findings)
        count = figures.plural(len(one.checks), "check", "checks")
        said = element("b", "no errors", class_="good")
        if errors:
            said = element("b", figures.plural(errors, "error", "errors"), class_="bad")
        parts.append(element("p", named(number, one.label, several), f": {count} ran, ", said, "."))
        ordered = sorted(one.findings, key=lambda finding: _RANK[finding.severity])
        if ordered:
            listed = (_finding(finding) for finding in ordered[:_MOST_FINDINGS])
            parts.append(element("ul", *listed, class_="findings"))
        if len(ordered) > _MOST_FINDINGS:
            parts.append(element("p", f"And {len(ordered) - _MOST_FINDINGS:,} more."))
    for checks, numbers in ran.items():
        title = f"The checks of {', '.join(numbers)}" if several else "The checks"
        parts.append(tables.details(title, element("p", f"{', '.join(checks)}.")))
    return parts


def _finding(finding: Finding) -> Markup:
    return element(
        "li",
        element("b", finding.severity.capitalize()),
        f" ({finding.check}): {finding.message}",
        class_=finding.severity,
    )


def _sizes(report: Report) -> list[Markup]:
    reference = report.reference
    whole = max(
        [sum(part.nbytes for part in one.components) for one in report.artifacts]
        + ([sum(part.nbytes for part in reference.components)] if reference else [])
    )
    if not whole:
        return []
    bars = []
    if reference is not None:
        bars.append(plots.components("source", reference.components, whole, reference.size_bytes))
    bars += [
        plots.components(one.label, one.components, whole, one.size_bytes)
        for one in report.artifacts
        if one.components
    ]
    legend = plots.legend(report.artifacts, reference.components if reference else ())
    return [
        element("h2", "Size by component", id_="size"),
        element(
            "figure",
            legend,
            *bars,
            element("figcaption", "Bytes of the tensors, all bars to one scale."),
        ),
        tables.details("The numbers", _component_table(report)),
    ]


def _component_table(report: Report) -> Markup:
    rows: list[tuple[str, tuple[Component, ...]]] = []
    if report.reference is not None:
        rows.append(("source", report.reference.components))
    rows += [(one.label, one.components) for one in report.artifacts]
    there = {part.name for _, parts in rows for part in parts}
    names = [name for name in COMPONENTS if name in there]
    cells = []
    for label, parts in rows:
        by_name = {part.name: part for part in parts}
        cells.append([label, *(_component(by_name.get(name)) for name in names)])
    return tables.cards(("tensors of", *names), cells)


def _component(part: Component | None) -> str:
    if part is None:
        return "none"
    rate = f"{8 * part.nbytes / part.parameters:.2f} bits" if part.parameters else ""
    return element("span", figures.size(part.nbytes), " ", element("small", rate))


def _errors(report: Report) -> list[Markup]:
    found = compared(report.artifacts)
    if not found:
        return []
    said = "Median relative error of each kind; each artifact's part says of what."
    return [element("h2", "Error by kind of layer"), element("p", said), *found]


def _again(report: Report) -> list[Markup]:
    parts = [element("h2", "Commands", id_="again")]
    made = [command for one in report.artifacts for command in one.commands]
    if made:
        parts += [
            element("p", "To make the artifacts again, MODEL and FILE being what none records:"),
            element("pre", Markup("\n".join(element("span", line) for line in made))),
        ]
    return [
        *parts,
        element("p", "To make this page again:"),
        element("pre", Markup("\n".join(element("span", line) for line in report.commands))),
    ]
