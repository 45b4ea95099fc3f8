"""Embeddings of which only the rows are read that are looked up."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.streaming.reading import EmbeddingRows
from support.gallery import raw
from support.models.header_files import write


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Those too that torch gives once a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("every_warning")
@pytest.mark.filterwarnings("error")
def test_ids_may_be_a_part_of_a_table(tmp_path: Path) -> None:
    """As BERT's classes cut positions and token types; nobody is warned of that."""
    model = write(tmp_path / "m", {"a.weight": (8, 2)})
    values = np.arange(16, dtype=np.float16).reshape(8, 2)
    with raw.edited(model) as tensors:
        tensors["a.weight"] = tensors["a.weight"].changed(values)
    table = torch.empty(8, 2, device="meta")
    ids = torch.arange(8).reshape(2, 4)[:, :3]
    assert not ids.is_contiguous()
    with EmbeddingRows(Checkpoint.open(model), {id(table): ("a.weight",)}, np.arange(2)):
        found = functional.embedding(ids, table)
    np.testing.assert_array_equal(found.numpy(), values[ids.numpy()])
