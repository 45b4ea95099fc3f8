"""Statistics of a file beside a model: measured of it, and a few tokens to run its blocks on."""

import json
from typing import Any

from qtool.calibrating.stats_file import StatsFile
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, SourceError
from qtool.formats import safetensors_file as st
from qtool.recipe.file import PRECISIONS
from qtool.recipe.recipe import Calibration as Settings
from qtool.texts.calibration import Calibration, calibration_tokens
from qtool.texts.source import TOPICS

_PROBE_TOKENS = 64


def check_same_model(saved: StatsFile, checkpoint: Checkpoint) -> dict[str, Any]:
    """The calibration record of a statistics file; SourceError where it is of another model."""
    if saved.metadata.get("model_digest") != checkpoint.digest():
        raise SourceError(
            f"{saved.path}: the statistics are of another model than {checkpoint.path}; run "
            "`qtool calibrate MODEL -o STATS` on this one"
        )
    where = f"{saved.path}: calibration"
    record = st.parse_json(saved.metadata.get("calibration", "").encode(), where)
    for key, kind in (("source", str), ("samples", int), ("length", int), ("seed", int)):
        if not isinstance(record.get(key), kind):
            raise FormatError(
                f"{where}: {key} is {json.dumps(record.get(key))[:50]}; write the file again with "
                "`qtool calibrate`"
            )
    if (found := record.get("precision", "float32")) not in PRECISIONS:
        raise FormatError(
            f"{where}: precision is {json.dumps(found)[:50]}; write the file again with "
            "`qtool calibrate`"
        )
    return record


def probe(checkpoint: Checkpoint) -> Calibration:
    """A few tokens that every machine has, to run a block on."""
    settings = Settings(source=TOPICS, samples=1, length=_PROBE_TOKENS, seed=0)
    return calibration_tokens(settings, checkpoint.folder)
