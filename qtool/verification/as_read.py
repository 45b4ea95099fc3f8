"""Settings as transformers reads them: with defaults of the class, and what follows from others.

Two config.json may say the same in other words: one leaves to the class what the other says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def as_read(folder: Path) -> Mapping[str, Any]:
    """The decoder's settings by the names of its class; empty where transformers cannot tell."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from qtool.streaming.meta_model import REFUSALS

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        found: Mapping[str, Any] = config.get_text_config(decoder=True).to_dict()
    except (*REFUSALS, OSError):  # what a class has against its numbers is not asked here
        return {}
    finally:
        logging.set_verbosity(verbosity)
    return found
