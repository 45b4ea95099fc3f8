"""Tables of a page: wide ones become a card a row on a telephone."""

from collections.abc import Sequence

from qtool.report.markup import Markup, element

COLUMNS = 5  # of numbers, in a table that has to fit a telephone as it is


def _head(titles: Sequence[str], texts: int) -> Markup:
    """The row of titles."""
    return element(
        "tr",
        *(
            element("th", title, scope="col", class_=None if place < texts else "n")
            for place, title in enumerate(titles)
        ),
    )


def cards(titles: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> Markup:
    """The first column heads its row, `texts` columns are text, the others numbers."""
    head = _head(titles, texts)
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(
                element("td", element("span", cell), data_label=titles[place],
                        class_=None if place < texts else "n")
                for place, cell in enumerate(row[1:], 1)
            ),
        )
        for row in rows
    ]  # fmt: skip
    return element("table", element("thead", head), element("tbody", *body), class_="cards")


def plain(titles: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> Markup:
    """A narrow table, which stays one."""
    head = _head(titles, texts)
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(
                element("td", cell, class_=None if place < texts else "n")
                for place, cell in enumerate(row[1:], 1)
            ),
        )
        for row in rows
    ]
    return element("table", element("thead", head), element("tbody", *body))


def pairs(rows: Sequence[tuple[str, str]]) -> Markup:
    """Labels and values."""
    body = [
        element("tr", element("th", label, scope="row"), element("td", value))
        for label, value in rows
    ]
    return element("table", element("tbody", *body), class_="pairs")


def details(summary: str, *content: Markup, opened: bool = False, long: bool = False) -> Markup:
    """What can be unfolded; on paper it is, unless it is long, and then it is left out."""
    return element(
        "details",
        element("summary", summary),
        *content,
        open="open" if opened else None,
        class_="long" if long else None,
    )
