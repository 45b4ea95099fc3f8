"""qtool from Python: the functions that the commands call, with their arguments by name.

    import qtool

    made = qtool.quantize("tiny", "w4g128-awq", out="tiny-awq")
    model = qtool.open(made.artifact)
    weight = model.float32("model.layers.0.mlp.up_proj.weight")
    found = qtool.evaluate(made.artifact, text="text.txt", against="tiny")

A MODEL is what the commands take: a folder, a file, a hub id, an alias. Errors are QtoolErrors (see
qtool.errors), whose text says what to do, in the words of these functions (qtool/api/words.py).
Nothing is printed unless `quiet=False`.
"""

from qtool.api import looking, making, opened
from qtool.api.opened import Model
from qtool.api.words import for_python

compare = for_python(looking.compare)
convert = for_python(making.convert)
download = for_python(making.download)
evaluate = for_python(looking.evaluate)
fit = for_python(making.fit)
generate = for_python(looking.generate)
open = for_python(opened.open)
plan = for_python(looking.plan)
quantize = for_python(making.quantize)
sample = for_python(making.sample)
verify = for_python(looking.verify)

__all__ = [
    "Model", "compare", "convert", "download", "evaluate", "fit", "generate", "open", "plan",
    "quantize", "sample", "verify",
]  # fmt: skip
