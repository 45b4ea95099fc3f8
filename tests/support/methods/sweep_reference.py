"""GPTQ's sweep by an oracle in float64."""

import numpy as np
from numpy.typing import NDArray

from qtool.methods import gptq
from qtool.scheme import Scheme
from support.methods import integer_grids
from support.methods.integer_grids import Grid

Real = NDArray[np.float64]


def problem(seed: int, rows: int = 64, columns: int = 64) -> tuple[NDArray[np.float32], Real]:
    """A weight and the Gram matrix of a correlated input with unequal channels."""
    random = np.random.default_rng(seed)
    mix = random.normal(size=(columns, columns)) / np.sqrt(columns) + np.eye(columns)
    inputs = random.normal(size=(4 * columns, columns)) @ mix * random.lognormal(0, 1, columns)
    weight = random.normal(size=(rows, columns)).astype(np.float32)
    return weight, inputs.T @ inputs


def sweep_reference(
    weight: Real,
    gram: Real,
    scheme: Scheme,
    options: gptq.Options,
    static: Grid | None,
) -> tuple[NDArray[np.uint8], Real]:
    """GPTQ by its definition: round a column, solve for the rest, drop it. Codes and values."""
    rows, columns = weight.shape
    mean = np.diagonal(gram).mean()
    order = np.arange(columns)
    if options.act_order:
        order = np.argsort(-np.diagonal(gram), kind="stable")
    width = scheme.group_size if scheme.group_size > 0 else columns
    weight = weight[:, order].astype(np.float64)
    hessian = gram[np.ix_(order, order)] / mean + options.damp_percent * np.eye(columns)
    codes = np.empty((rows, columns), np.uint8)
    values = np.empty((rows, columns))
    fitted = None
    for step in range(columns):
        if static is None and step % width == 0:
            ahead = np.ascontiguousarray(weight[:, step : step + width], np.float32)
            fitted = integer_grids.fit(ahead, scheme)
            scale, zero = fitted.scale[:, 0], fitted.zero[:, 0]
        if static is not None:
            group = order[step] // width
            scale, zero = static.scale[:, group], static.zero[:, group]
        exact, offset = scale.astype(np.float64), zero.astype(np.float64)
        code = np.clip(np.rint(weight[:, step] / exact) + offset, 0, 2**scheme.bits - 1)
        value = (code - offset) * exact
        inverse = np.linalg.inv(hessian[step:, step:])
        weight[:, step:] -= np.outer((weight[:, step] - value) / inverse[0, 0], inverse[0])
        codes[:, order[step]] = code
        values[:, order[step]] = value
    return codes, values


def static_grid(weight: NDArray[np.float32], scheme: Scheme, options: gptq.Options) -> Grid | None:
    """The grids that do not depend on the sweep, where they are asked for."""
    if options.static_groups or scheme.group_size == -1:
        return integer_grids.fit(weight, scheme)
    return None


def output_error(weight: NDArray[np.floating], value: NDArray[np.floating], gram: Real) -> float:
    """tr((W - Q) H (W - Q)')"""
    difference = weight.astype(np.float64) - value
    return float(np.sum(difference @ gram * difference))
