"""One torch thread for what must not depend on the number of threads.

Sums inside LAPACK's factorizations and BLAS's products are split differently over different
numbers of threads, which changes their last bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_thread() -> Iterator[None]:
    """Run the body on one thread of torch; the caller's setting comes back after."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
