"""Greedy decoding of a few tokens, with keys and values kept."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.cuda.device import Device
from qtool.errors import SourceError, UsageError
from qtool.generating.ready import check_positions, ends, ready, rows_of
from qtool.messages.progress import Progress
from qtool.quality.weights import open_weights, say_damaged_record
from qtool.streaming.skeleton import Skeleton
from qtool.texts.tokenizing import text_after, tokenize


@dataclass(frozen=True)
class Generated:
    """What came out, ready for --json."""

    artifact: str
    device: str
    prompt: str
    text: str  # what follows the prompt
    prompt_tokens: int
    tokens: tuple[int, ...]
    ended: bool  # by the model's own end of text
    seconds_prompt: float
    seconds: float  # of the tokens after the first
    matrices: int
    fused: int  # of them, those that single vectors are multiplied with as packed words
    not_kept: int  # on the CPU, those that were dequantized for each matmul, for lack of memory

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was one token only."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else None

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool generate`."""
        rate = {"tokens_per_second": self.tokens_per_second}
        return {**vars(self), "tokens": list(self.tokens), **rate}


def generate(
    path: Path, prompt: str, tokens: int, device: Device | None, progress: Progress
) -> Generated:
    """Up to `tokens` tokens that follow the prompt, each the likeliest one.

    SourceError where what the model says is not finite; UnsupportedError where transformers cannot
    run it with a cache.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: is not UTF-8; give text that is") from None
    with open_weights(path) as weights:
        say_damaged_record(path, weights, progress)
        ids = tokenize(prompt, weights.folder, special=True).tolist()
        if not ids:
            raise SourceError("--prompt: it has no tokens; give a word or more")
        skeleton = Skeleton.open(weights)
        rows = rows_of(skeleton)
        if rows is not None and max(ids) >= rows:
            raise SourceError(
                f"{path}: its tokenizer gives the id {max(ids)}, and the model has a vocabulary of "
                f"{rows}; put the model's own tokenizer beside the weights"
            )
        said = f"{len(ids)} tokens of prompt and --tokens {tokens} are"
        check_positions(skeleton, len(ids) + tokens, said, path)
        model = ready(skeleton, weights, device, progress)
        last = ends(skeleton, weights.folder)
        found: list[int] = []
        times = [time.monotonic()]
        cache: Any = None
        with progress.stage("generate"), torch.no_grad(), model.matmuls:
            for _ in progress.blocks(tokens, "token"):
                logits, cache = model.step(torch.tensor([found[-1:] or ids]), cache)
                if not bool(torch.isfinite(logits).all()):
                    raise SourceError(
                        f"{path}: what it says after token {len(ids) + len(found)} is not a finite "
                        "number; it is broken, or overflows in float16"
                    )
                found.append(int(logits[0].argmax()))
                times.append(time.monotonic())
                if found[-1] in last:
                    break
        return Generated(
            str(path),
            "cpu" if device is None else device.name,
            prompt,
            text_after(ids, found, weights.folder),
            len(ids),
            tuple(found),
            found[-1] in last,
            times[1] - times[0],
            times[-1] - times[1],
            sum(map(len, model.matrices.values())),
            sum(one.fused for parts in model.matrices.values() for one in parts),
            len(model.on_cpu.left_out),
        )
