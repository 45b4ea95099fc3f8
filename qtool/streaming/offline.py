"""Nothing of a model is fetched because its config names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_SETTING = RLock()  # what is changed meanwhile is of the process


@contextmanager
def without_the_hub() -> Iterator[None]:
    """Within, what would ask the hub raises OSError, whatever it is: some configs name another
    repository, for a tower (`backbone`)."""
    from huggingface_hub import constants

    with _SETTING:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
