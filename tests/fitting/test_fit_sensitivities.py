"""What errors in matrices cost: against transformers' own forward pass and torch's autograd."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.gradients import measure as sensitivities
from qtool.hub import tiny_folder
from qtool.recipe.file import Calibration
from qtool.texts.calibration import calibration_tokens
from support.fitting.sensitivities_by_hand import (
    TOKENS,
    by_hand,
    check_same,
    check_tables,
    likeliest,
    measured,
    ways_of,
)
from support.gguf import gguf_from_hf, gguf_models
from support.models import arch_models
from support.models.small_models import models
from support.runs import quantizing

__all__ = ["likeliest", "models"]


NAMES = ("llama", "qwen3", "gemma3", "gpt_neox", "phi3", "mixtral")


def folder_of(models: Path, name: str) -> Path:
    folder = models / name
    if not folder.exists():
        quantizing.add_tokenizer(arch_models.build(name, folder, dtype="float32"))
    return folder


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize("name", NAMES)
def test_sensitivities_are_those_of_autograd(name: str, models: Path, tmp_path: Path) -> None:
    folder = folder_of(models, name)
    found = measured(folder, tmp_path / "out")
    expected, tables = by_hand(folder)
    head = expected.pop("lm_head.weight")
    assert found.head is not None
    check_same(found.head, head)
    checked = 0
    for weight, sensitivity in expected.items():
        if weight in found.matrices:
            check_same(found.matrices[weight][-1], sensitivity)
            checked += 1
    assert checked == len([one for one in expected if ".experts." not in one])
    check_tables(found, tables)


@pytest.mark.usefixtures("likeliest")
def test_an_expert_has_its_own_tokens(models: Path, tmp_path: Path) -> None:
    """The tokens of all experts are those of the text, as often as each is routed."""
    found = measured(folder_of(models, "mixtral"), tmp_path / "out")
    experts = {name: one for name, one in found.matrices.items() if ".experts." in name}
    assert experts
    counts: dict[str, int] = {}
    for name, one in experts.items():
        kind = name.split(".experts.")[0] + name.split(".")[-2]
        counts[kind] = counts.get(kind, 0) + one[-1].count
        assert (one[-1].rows > 0).any() == (one[-1].count > 0), name
    assert set(counts.values()) == {2 * TOKENS.size}


def test_a_drawn_token_is_drawn_from_the_predictions(tmp_path: Path) -> None:
    """Rows of the head are p (1 - p) on the mean, as the curvature of the divergence has them."""
    settings = Calibration(source=None, samples=4, length=128, seed=0)
    tokens = calibration_tokens(settings, tiny_folder()).tokens
    found = measured(tiny_folder(), tmp_path / "out", tokens=tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32).eval()
    with torch.no_grad():
        p = model(input_ids=torch.from_numpy(tokens)).logits.softmax(-1).flatten(0, 1)
    expected = (p * (1 - p)).mean(0).numpy()
    assert found.head is not None
    assert found.head.rows.sum() == pytest.approx(expected.sum(), rel=0.1)
    assert np.corrcoef(found.head.rows, expected)[0, 1] > 0.8


def test_how_far_apart_unrelated_predictions_are(tmp_path: Path) -> None:
    """Of transformers' own: each place's against those half a text away."""
    settings = Calibration(source=None, samples=4, length=128, seed=0)
    tokens = calibration_tokens(settings, tiny_folder()).tokens
    found = measured(tiny_folder(), tmp_path / "out", tokens=tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32).eval()
    with torch.no_grad():
        told = model(input_ids=torch.from_numpy(tokens)).logits.log_softmax(-1)
    others = torch.cat([told[:, 64:], told[:, :64]], dim=1)
    expected = torch.nn.functional.kl_div(others, told, log_target=True, reduction="none")
    assert found.unrelated == pytest.approx(float(expected.sum(-1).mean()), rel=1e-4)
    short = measured(tiny_folder(), tmp_path / "short", tokens=tokens[:, :1])
    assert short.unrelated is None


def test_threads_change_no_bit(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the head, where tokens are drawn, neither; with a micro-batch for each sample."""
    monkeypatch.setattr(sensitivities, "TOGETHER", TOKENS.shape[1])
    monkeypatch.setattr("qtool.gradients.head.LOGITS", 7 * arch_models.VOCABULARY)
    folder = folder_of(models, "llama")
    one, three = (measured(folder, tmp_path / f"out{n}", threads=n) for n in (1, 3))
    assert one.head is not None and three.head is not None
    assert one.matrices.keys() == three.matrices.keys()
    pairs = [
        (sensitivity[-1], three.matrices[name][-1]) for name, sensitivity in one.matrices.items()
    ]
    for left, right in [*pairs, (one.head, three.head)]:
        assert left.rows.tobytes() == right.rows.tobytes()
        assert left.columns.tobytes() == right.columns.tobytes()
    assert one.unrelated == three.unrelated and one.unrelated is not None
    name = "model.embed_tokens.weight"
    assert one.tables[name].columns.tobytes() == three.tables[name].columns.tobytes()


@pytest.fixture
def without_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_from_hf.no_vocabulary(monkeypatch)


@pytest.mark.usefixtures("without_vocabulary")
def test_rows_of_merged_experts_are_those_of_each(tmp_path: Path) -> None:
    model = gguf_models.build("qwen3-moe", tmp_path / "model")
    (one,), sensitivities = ways_of(model, tmp_path, "blk.0.ffn_up_exps.weight")
    each = [
        sensitivities.matrices[f"model.layers.0.mlp.experts.{number}.up_proj.weight"][-1]
        for number in range(len(one.columns))
    ]
    assert len({sensitivity.rows.tobytes() for sensitivity in each}) == len(each) > 1
    assert np.array_equal(one.rows, np.concatenate([sensitivity.rows for sensitivity in each]))
    assert np.array_equal(one.columns, np.stack([sensitivity.columns for sensitivity in each]))


@pytest.mark.usefixtures("without_vocabulary")
def test_rows_of_values_by_head_are_theirs(tmp_path: Path) -> None:
    """kv_b_proj has keys and values of each head, of which attn_v_b has the latter."""
    model = gguf_models.build("deepseek-v3", tmp_path / "model")
    config = Checkpoint.open(model).config
    heads, keys, values = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    (one,), sensitivities = ways_of(model, tmp_path, "blk.0.attn_v_b.weight")
    both = sensitivities.matrices["model.layers.0.self_attn.kv_b_proj.weight"][-1].rows
    expected = both.reshape(heads, keys + values)[:, keys:]
    assert np.array_equal(one.rows, expected.ravel())


def test_an_embedding_that_is_the_head_costs_twice(tmp_path: Path) -> None:
    ways, sensitivities = ways_of(tiny_folder(), tmp_path, "token_embd.weight")
    first, second = ways
    assert np.array_equal(
        first.columns[0], sensitivities.tables["model.embed_tokens.weight"].columns
    )
    assert sensitivities.head is not None and np.array_equal(second.rows, sensitivities.head.rows)


@pytest.mark.usefixtures("likeliest")
def test_what_no_gradient_passes_is_not_free(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    found = measured(folder_of(models, "llama"), tmp_path / "out")
    assert not any("gate_proj" in name for name in found.matrices)
    assert any("up_proj" in name for name in found.matrices)
