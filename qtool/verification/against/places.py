"""Where in a matrix a scale counts, in words."""

import numpy as np

from qtool.scheme import GroupQuant


def weights_of(quant: GroupQuant, rows: tuple[int, int], group: int | None) -> str:
    """`row 5, columns 128 to 255`."""
    first, last = rows
    said = f"row {first}" if last - first == 1 else f"rows {first} to {last - 1}"
    if group is None:
        return said
    columns = np.flatnonzero(quant.group_index() == group)
    if not columns.size or columns[-1] - columns[0] + 1 != columns.size:
        return f"{said}, group {group} of its g_idx"
    return f"{said}, columns {columns[0]} to {columns[-1]}"
