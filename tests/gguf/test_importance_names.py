"""Whether an importance matrix is of the model at hand, as the names in it tell."""

from dataclasses import replace

from qtool.planning.gguf.plan_warnings import lacks
from support.gguf.gguf_plans import Measured, plan_of
from support.gguf.gguf_shapes import dense, experts

SMALL = dense("llama", 8, 256, 512, 8, 2)


def test_importance_of_another_model_is_told() -> None:
    """By its names: of the same widths nothing else tells it."""
    mixture = Measured.of(experts("qwen3moe", 8, 4, 8, 2))
    (told,) = [
        w for w in plan_of(SMALL, "q4_k_m", importance=mixture).warnings if "importance" in w
    ]
    assert told.startswith("importance imatrix.gguf seems to be of another model: 56 of its 91 ")
    assert ", and 21 of 56 matrices have none (blk.1.ffn_down.weight, " in told
    own = Measured.of(SMALL)
    lacking = {name: one for name, one in own.entries.items() if "attn_v" not in name}
    others = {
        "output.weight",
        "token_embd.weight",
        *(f"mm.{number}.weight" for number in range(99)),
    }
    more = dict.fromkeys(others, next(iter(lacking.values())))
    for found in (own, replace(own, entries=lacking | more), replace(mixture, file=None)):
        warned = plan_of(SMALL, "q4_k_m", importance=found).warnings
        assert not [one for one in warned if "another model" in one]


def test_importance_that_leaves_experts_out_is_of_this_model() -> None:
    """As llama-imatrix does where few tokens reached them; matrices beside them tell the model."""
    made = experts("qwen3moe", 8, 4, 8, 2)
    mixture = replace(made, tensors=tuple(t for t in made.tensors if "shexp" not in t.name))
    own = Measured.of(mixture)
    others = {name: one for name, one in own.entries.items() if "_exps" not in name}
    plan = plan_of(mixture, "q4_k_m", importance=replace(own, entries=others))
    lacking = [t.name for t in plan.tensors if lacks(t)]
    assert len(lacking) == 21 and all("_exps" in name for name in lacking)
    assert not [one for one in plan.warnings if "another model" in one]
    half = {name: one for name, one in others.items() if int(name.split(".")[1]) < 5}
    warned = plan_of(mixture, "q4_k_m", importance=replace(own, entries=half)).warnings
    (told,) = [one for one in warned if "another model" in one]
    assert ": 33 of 56 matrices have none (" in told
