"""Small models in gpt-oss's own MXFP4."""

from pathlib import Path

import pytest

from support.models import gpt_oss
from support.runs import quantizing

RTN, GPTQ = "mxfp4-gpt-oss", "mxfp4-gpt-oss-gptq"
LAYER = "model.layers.{}.mlp.experts"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss") / "plain"
    return gpt_oss.plain(folder)


@pytest.fixture(scope="module")
def written(plain: Path) -> Path:
    return quantizing.quantize(plain, RTN, plain.parent / "written").out
