"""Hadamard matrices: H of n x n, entries 1 and -1, H H' = n I; and products with them.

    n = m * 2^k     H = H_m (x) S_k,    S_k = [[S, S], [S, -S]] of S_(k-1)     (Sylvester)

m is 1, or the smallest even multiple of n's odd part for which Paley's construction is known. With
q an odd prime or the square of one, and Q[a, b] the quadratic character of a - b in the field of q
elements (1 of squares, -1 of others, 0 of zero):

    q = 3 mod 4     m = q + 1          I + S,    S = [[0, 1'], [-1, Q]]
    q = 1 mod 4     m = 2 (q + 1)      C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]],
                                       C = [[0, 1'], [1, Q]]

Which gives 12, 20, 28, 36, 44, 52, 60 ... A product with S_k takes k additions a number and no
matrix; one with H_m takes m. Every sum is made number by number in a fixed order, so the result is
the same on every machine, for any number of threads, and however many columns are done at a time.

Source: R. E. A. C. Paley, On Orthogonal Matrices, 1933.
"""

from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

_LARGEST = 512  # of the matrices that are multiplied with as they are


@cache
def odd_factor(size: int) -> int | None:
    """The m of size = m * 2^k that matrices are known for; None where there is none."""
    if size < 1:
        return None
    odd = size
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return 1
    m = 4 * odd
    while m <= min(size, _LARGEST):
        if size % m == 0 and _paley_field(m) is not None:
            return m
        m *= 2
    return None


def multiply(columns: Reals, odd: int) -> Reals:
    """H' X / sqrt(n) of X [n, N]; `odd` is odd_factor(n). X is used up."""
    size, count = columns.shape
    blocks = columns.reshape(odd, size // odd, count)
    half = 1
    while half < size // odd:
        pairs = blocks.reshape(odd, -1, 2, half, count)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        total = first + second
        np.subtract(first, second, out=second)
        first[...] = total
        half *= 2
    if odd > 1:
        signs = paley(odd)
        found = np.empty_like(blocks)
        for row in range(odd):
            total = found[row]
            np.multiply(blocks[0], float(signs[0, row]), out=total)
            for column in range(1, odd):
                if signs[column, row] > 0:
                    total += blocks[column]
                else:
                    total -= blocks[column]
        blocks = found
    result: Reals = blocks.reshape(size, count)
    result *= 1 / np.sqrt(size)
    return result


@cache
def paley(size: int) -> NDArray[np.int8]:
    """A Hadamard matrix of Paley's; `size` is an odd_factor() larger than 1."""
    field = _paley_field(size)
    assert field is not None
    character = _characters(field)
    count = len(character)
    conference = np.zeros((count + 1, count + 1), np.int8)
    conference[0, 1:] = 1
    conference[1:, 1:] = character
    unit = np.eye(count + 1, dtype=np.int8)
    if count % 4 == 3:
        conference[1:, 0] = -1
        return unit + conference
    conference[1:, 0] = 1
    ones = np.array([[1, 1], [1, -1]], np.int8)
    other = np.array([[1, -1], [-1, -1]], np.int8)
    return np.asarray(np.kron(conference, ones) + np.kron(unit, other), np.int8)


def _paley_field(size: int) -> tuple[int, int] | None:
    """The prime and the exponent of the field that a matrix of this size is made of."""
    for elements, wanted in ((size - 1, 3), (size // 2 - 1, 1)):
        if elements % 4 == wanted and (size % 2 == 0):
            if _is_prime(elements):
                return elements, 1
            root = int(np.sqrt(elements) + 0.5)
            if root * root == elements and _is_prime(root) and root > 2:
                return root, 2
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % other for other in range(2, int(number**0.5) + 1))


def _characters(field: tuple[int, int]) -> NDArray[np.int8]:
    """Q[a, b]: the quadratic character of a - b, the elements in their natural order."""
    prime, exponent = field
    if exponent == 1:
        elements: list[tuple[int, ...]] = [(a,) for a in range(prime)]
        squares: set[tuple[int, ...]] = {(a * a % prime,) for a in range(1, prime)}
    else:  # a + b r, where r r is a number without a root
        residues = {a * a % prime for a in range(1, prime)}
        rr = next(a for a in range(2, prime) if a not in residues)
        elements = list(product(range(prime), repeat=2))
        squares = {
            ((a * a + b * b * rr) % prime, 2 * a * b % prime)
            for a, b in elements
            if (a, b) != (0, 0)
        }

    def character(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        less = tuple((a - b) % prime for a, b in zip(one, other, strict=True))
        return 0 if not any(less) else 1 if less in squares else -1

    return np.array([[character(a, b) for b in elements] for a in elements], np.int8)
