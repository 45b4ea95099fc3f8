"""Columns of inputs with outliers: those that LLM.int8() keeps in float16 when the model runs.

A column is one as soon as one number in it reaches the threshold, as bitsandbytes has it; nothing
of this is stored in the tensors, since the columns are found anew for each input.

Source: Dettmers et al., LLM.int8(), 2022, section 3.2.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from qtool.calibrating.sites import Site
from qtool.calibrating.stats import SiteStats
from qtool.messages.summary import OutlierReport


def found(
    sites: Sequence[Site], stats: Mapping[str, SiteStats], threshold: float
) -> list[OutlierReport]:
    """The inputs that have such columns. stats: by site id, with max_abs where a site was seen."""
    reports = []
    for site in sites:
        largest = stats[site.id].max_abs
        if largest is None or not threshold or not (largest >= threshold).any():
            continue
        columns = [int(column) for column in np.flatnonzero(largest >= threshold)]
        reports.append(OutlierReport(site.readers[0].name, columns, float(largest.max())))
    return reports


def note(reports: Sequence[OutlierReport], threshold: float) -> str:
    """One sentence on how many columns of how many inputs."""
    if not reports:
        return f"no input reaches {threshold:g} on the calibration text: no column is an outlier"
    most = max(reports, key=lambda report: len(report.columns))
    total = sum(len(report.columns) for report in reports)
    return (
        f"{total} columns of {len(reports)} inputs reach {threshold:g} on the calibration text and "
        f"stay in float16 when the model runs; the most: {len(most.columns)}, read by {most.name}"
    )
