"""What `qtool generate` has to write: the likeliest tokens of whole forward passes."""

from pathlib import Path

import numpy as np

from qtool.generating.generate import Generated
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import forward
from qtool.quality.weights import open_weights
from qtool.streaming.skeleton import Skeleton
from qtool.texts.tokenizing import tokenize

QUIET = Progress(quiet=True)


def check(path: Path, found: Generated, slack: float) -> None:
    """Each token has the largest logit of `eval`'s forward pass, or one that is `slack` less."""
    with open_weights(path) as weights:
        given = tokenize(found.prompt, weights.folder, special=True)
        ids = np.concatenate([given, np.array(found.tokens)])[None]
        run = forward(
            Skeleton.open(weights), activations(weights, "plain"), ids, 1, QUIET, keep=False
        )
        with run.logits() as head:
            logits = head(run.hidden)[0]
    for number, token in enumerate(found.tokens):
        row = logits[len(given) - 1 + number]
        assert float(row.max() - row[token]) <= slack, (number, token)
