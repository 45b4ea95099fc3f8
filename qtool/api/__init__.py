"""qtool from Python: the functions that the commands call, with their arguments by name.

    import qtool

    made = qtool.quantize("tiny", "w4g128-awq", out="tiny-awq")
    model = qtool.open(made.artifact)
    weight = model.float32("model.layers.0.mlp.up_proj.weight")
    found = qtool.evaluate(made.artifact, text="text.txt", against="tiny")

A MODEL is what the commands take: a folder, a file, a hub id, an alias. Errors are QtoolErrors (see
qtool.errors), whose text says what to do. Nothing is printed unless `quiet=False`.
"""

from qtool.api.looking import compare, evaluate, generate, plan, verify
from qtool.api.making import convert, download, fit, quantize, sample
from qtool.artifacts.opened import Model, open

__all__ = [
    "Model", "compare", "convert", "download", "evaluate", "fit", "generate", "open", "plan",
    "quantize", "sample", "verify",
]  # fmt: skip
