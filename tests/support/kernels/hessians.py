"""Problems for the column sweep: Gram matrices, their factors, and what a result is off by."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def hessian(columns: int, seed: int, samples: int = 0) -> Floats:
    """A damped Gram matrix of correlated inputs, some columns much stronger than others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples or 3 * columns, columns))
    x = x @ (np.eye(columns) + 0.3 * rng.standard_normal((columns, columns)) / columns**0.5)
    x *= np.exp(rng.standard_normal(columns))
    gram = x.T @ x / len(x)
    return gram + 0.01 * np.diag(gram).mean() * np.eye(columns)


def factor(h: Floats) -> Floats:
    """Upper U with U'U equal to the inverse of h."""
    return np.ascontiguousarray(np.linalg.cholesky(np.linalg.inv(h)).T)


def trace_error(w: Floats, dequantized: NDArray[np.floating], h: Floats) -> float:
    """tr(E H E')"""
    e = w - dequantized
    return float(np.trace(e @ h @ e.T))
