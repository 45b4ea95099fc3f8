"""Sensitivities as `qtool fit` measures them, and by torch's autograd."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.fitting.gguf_losses import Weighed, weighed
from qtool.gguf.from_hf.source import hf_source
from qtool.gradients import measure as sensitivities
from qtool.gradients.sensitivity import Sensitivities, Sensitivity
from qtool.messages.progress import Progress
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.streaming.skeleton import Skeleton
from qtool.workspaces.workspace import workspace
from support.models import arch_models

TOKENS = np.random.default_rng(1).integers(3, arch_models.VOCABULARY, (3, 40), dtype=np.int64)


@pytest.fixture
def likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token instead of a drawn one, so that an oracle need not draw the same."""

    def draw(chances: torch.Tensor, count: int, *, generator: torch.Generator) -> torch.Tensor:
        assert count == 1 and isinstance(generator, torch.Generator)
        return chances.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", draw)


def measured(
    folder: Path, out: Path, threads: int = 2, tokens: NDArray[np.int64] = TOKENS
) -> Sensitivities:
    skeleton = Skeleton.open(Checkpoint.open(folder))
    with workspace(out, is_folder=False, nbytes=0, fresh=False) as space:
        found = sensitivities.measure(skeleton, tokens, 0, space, threads, Progress(quiet=True))
        space.artifact.write_bytes(b"")
    return found


def by_hand(folder: Path) -> tuple[dict[str, Sensitivity], dict[str, NDArray[np.float64]]]:
    """Of every nn.Linear, by its weight's name; and the columns of every embedding."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    again: set[str] = set()  # called more than once
    read: dict[str, torch.Tensor] = {}
    gave: dict[str, torch.Tensor] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def given(_: Any, inputs: Any, output: Any) -> None:
            again.update([name] if name in read else [])
            read[name] = inputs[0].detach().flatten(0, -2).double()

            def back(gradient: torch.Tensor) -> None:
                gave[name] = gradient.flatten(0, -2).double()

            if output.requires_grad:  # what only chooses has no gradient
                output.register_hook(back)

        module.register_forward_hook(given)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch(f"{name}.weight", module)
    model.requires_grad_(False)
    entered: dict[str, tuple[torch.Tensor, float]] = {}

    def enter(name: str) -> Any:
        def given(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            rows = module.weight[inputs[0]]  # which some models multiply by a number of their own
            output = output.detach().requires_grad_()
            larger = output.detach().square().sum() / rows.detach().square().sum()
            entered[name] = output, float(larger)
            return output.clone()

        return given

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(enter(f"{name}.weight"))
    told = model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.log_softmax(-1)
    told.max(-1).values.sum().backward()
    found = {
        name: Sensitivity(
            gave[name].square().sum(0).numpy() / TOKENS.size,
            read[name].square().mean(0).numpy(),
            len(read[name]),
        )
        for name in gave.keys() - again
    }
    tables = {}
    for name, (output, larger) in entered.items():
        assert output.grad is not None
        squares = output.grad.double().square().flatten(0, -2).sum(0).numpy()
        tables[name] = larger * squares / TOKENS.size
    return found, tables


def check_tables(found: Sensitivities, expected: dict[str, NDArray[np.float64]]) -> None:
    assert found.tables.keys() == expected.keys()
    for name, columns in expected.items():
        np.testing.assert_allclose(found.tables[name].columns, columns, rtol=2e-3, atol=1e-9)


def check_same(found: Sensitivity, expected: Sensitivity) -> None:
    assert found.count == expected.count
    for name in ("rows", "columns"):
        left, right = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(left, right, rtol=2e-3, atol=2e-5 * float(right.max()))


def ways_of(model: Path, tmp_path: Path, name: str) -> tuple[list[Weighed], Sensitivities]:
    """What errors in a tensor cost, by its GGUF name."""
    sensitivities = measured(model, tmp_path / "out")
    source = hf_source(Checkpoint.open(model))
    recipe = load("q8_0")
    assert isinstance(recipe, GgufRecipe)
    plan = make_gguf_plan(recipe, source)
    tensor = next(tensor for tensor in plan.tensors if tensor.name == name)
    tied = all(tensor.name != "output.weight" for tensor in source.tensors)
    return weighed(tensor, sensitivities, tied), sensitivities
