"""The errors of an artifact's layers: heat map, table by kind, the worst, all of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from qtool.report import figures, svg, tables
from qtool.report.facts import ArtifactFacts
from qtool.report.markup import Markup, dotted, element, join, key
from qtool.report.names import decoder_prefix, kind_order, place
from qtool.verification.finding import LayerError

WORST = 10
_MOST_ROWS = 400  # of a table of every layer
_LEAST_SPREAD = 1.5  # a scale of colours covers at least this ratio, or noise looks like a finding


@dataclass(frozen=True)
class Grid:
    """Layers by kind, in the order of a block, and by block."""

    kinds: dict[str, dict[int | None, list[LayerError]]]
    blocks: int  # columns


def grid(layers: Sequence[LayerError]) -> Grid:
    """Every layer in its place."""
    prefix = decoder_prefix((layer.name, 1) for layer in layers)
    found: dict[str, dict[int | None, list[LayerError]]] = defaultdict(lambda: defaultdict(list))
    last = -1
    for layer in layers:
        where = place(layer.name, prefix)
        found[where.kind][where.block].append(layer)
        last = max(last, -1 if where.block is None else where.block)
    ordered = sorted(found, key=kind_order)
    return Grid({kind: dict(found[kind]) for kind in ordered}, last + 1)


def scale_of(layers: Sequence[LayerError]) -> tuple[float, float]:
    """The lowest and highest error that colours tell apart."""
    errors = [layer.relative_error for layer in layers]
    low, high = min(errors), max(errors)
    if high < _LEAST_SPREAD * low:
        middle, half = (low + high) / 2, (_LEAST_SPREAD - 1) / (_LEAST_SPREAD + 1)
        return middle * (1 - half), middle * (1 + half)
    return low, high


def section(artifact: ArtifactFacts) -> Markup:
    """Everything about the errors of one artifact."""
    parts = [element("h3", "Error of each layer"), element("p", artifact.layers_from)]
    if not artifact.layers:
        return join(parts)
    found = grid(artifact.layers)
    if found.blocks:
        parts.append(_heat_map(found, artifact))
    parts.append(by_kind(found))
    worst = sorted(artifact.layers, key=lambda layer: (-layer.relative_error, layer.name))
    parts.append(
        tables.details(
            f"The {min(WORST, len(worst))} layers with the largest error",
            _rows(worst[:WORST]),
            opened=True,
        )
    )
    if WORST < len(worst) <= _MOST_ROWS:
        parts.append(tables.details(f"All {len(worst)} layers", _rows(artifact.layers), long=True))
    elif len(worst) > _MOST_ROWS:
        said = f"All {len(worst):,} layers are in what --json prints; they are too many for a page."
        parts.append(element("p", said, class_="faint"))
    return join(parts)


def _heat_map(found: Grid, artifact: ArtifactFacts) -> Markup:
    low, high = scale_of(artifact.layers)
    columns = min(found.blocks, 1000)
    parts: list[Markup] = []
    for kind, row in found.kinds.items():
        if set(row) == {None}:
            continue
        cells = [_cell(kind, block, row.get(block, []), low, high) for block in range(columns)]
        errors = [layer.relative_error for members in row.values() for layer in members]
        said = (
            f"{kind}: {len(errors)} matrices, relative error {figures.error(min(errors))} to "
            f"{figures.error(max(errors))}"
        )
        parts += [element("span", dotted(kind)), svg.strip(cells, said)]
    parts += [element("span", "block"), svg.numbers_below(columns)]
    key = element(
        "div",
        element("span", figures.error(low)),
        svg.ramp(),
        element("span", figures.error(high)),
        class_="ramp",
    )
    caption = (
        "Relative error: rows are kinds of layer, columns are blocks. The darkest is the largest "
        "(the brightest, where the page is dark); the scale is this artifact's own. Experts of a "
        "block are averaged."
    )
    return element(
        "figure",
        element("div", *parts, class_="rows"),
        key,
        element("figcaption", caption),
    )


def _cell(
    kind: str, block: int, layers: Sequence[LayerError], low: float, high: float
) -> tuple[int | None, str]:
    if not layers:
        return None, f"{kind} of block {block}: not quantized, or not there"
    errors = [layer.relative_error for layer in layers]
    mean = sum(errors) / len(errors)
    more = "" if len(errors) == 1 else f", mean of {len(errors)}, largest {max(errors):.4g}"
    said = f"{kind} of block {block}: {figures.error(mean)}{more} ({layers[0].scheme})"
    return svg.level(mean, low, high), said


def by_kind(found: Grid) -> Markup:
    """Count, median and largest error of each kind."""
    every = [one for row in found.kinds.values() for members in row.values() for one in members]
    known = any(one.expected is not None for one in every)
    rows = []
    for kind, row in found.kinds.items():
        layers = [layer for members in row.values() for layer in members]
        errors = [layer.relative_error for layer in layers]
        expected = [layer.expected for layer in layers if layer.expected is not None]
        schemes = ", ".join(sorted({layer.scheme for layer in layers}))
        cells = [
            element("span", dotted(kind), " ", element("small", schemes)),
            str(len(layers)),
            figures.error(median(errors)),
            figures.error(max(errors)),
        ]
        if known:
            cells.append(figures.error(median(expected)) if expected else "-")
        rows.append(cells)
    titles = ["kind", "count", "median", "largest"]
    return tables.plain(titles + ["expected"] * known, rows)


def _rows(layers: Sequence[LayerError]) -> Markup:
    rows = [
        (dotted(layer.name), layer.scheme, figures.error(layer.relative_error)) for layer in layers
    ]
    return tables.plain(("layer", "stored as", "error"), rows, 2)


def compared(artifacts: Sequence[ArtifactFacts]) -> list[Markup]:
    """Median error of each kind, a column for each artifact; nothing where one alone has any."""
    grids = [
        (number, one.label, grid(one.layers))
        for number, one in enumerate(artifacts, 1)
        if one.layers
    ]
    if len(grids) < 2:
        return []
    some = [grids[at : at + tables.COLUMNS] for at in range(0, len(grids), tables.COLUMNS)]
    return [_compared(part) for part in some]


def _compared(grids: Sequence[tuple[int, str, Grid]]) -> Markup:
    kinds = sorted({kind for _, _, found in grids for kind in found.kinds}, key=kind_order)
    rows = []
    for kind in kinds:
        cells: list[str] = [dotted(kind)]
        for _, _, found in grids:
            errors = [
                layer.relative_error
                for members in found.kinds.get(kind, {}).values()
                for layer in members
            ]
            cells.append(figures.error(median(errors)) if errors else "dense")
        rows.append(cells)
    titles = [
        element("span", key(number), element("span", f" {label}", class_="wide"))
        for number, label, _ in grids
    ]
    return tables.plain(("kind of layer", *titles), rows)
