"""The readers that `fuzz_readers` tries: honest inputs, lies about them, and what is read of each.

A reader has `seeds()`, `lie(data, choose)`, `attempt(data)`, and `beside`: the bytes of the files
that are read with the input. What is accepted has to keep its promises.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_readers import Config, Header, Index
from remote_reader import Remote
from run_readers import Journal, Stats
from text_readers import Card, Recipe, Tokenizer

READERS: dict[str, Callable[[Path], Any]] = {
    reader.name: reader
    for reader in (Header, Index, Config, Recipe, Tokenizer, Card, Stats, Journal, Remote)
}
