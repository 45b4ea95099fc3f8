"""A mixture of experts that says something, made of a dense Llama: there is no small one to load.

    python tests/oracle/split_experts.py MODEL TEXT OUT

The neurons of every MLP are split into EXPERTS groups of those that fire together on TEXT; a router
is fitted to how much each group gives, and the groups' last matrices are moved so that the CHOSEN
ones give about what the whole MLP did. OUT is a Mixtral in bfloat16 of the same size. Of
smollm2-768 it takes some minutes; perplexity goes from 35 to 97 (20 windows of another text), and
each expert sees three of four tokens.
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

EXPERTS, CHOSEN = 8, 6
LENGTH, TOGETHER = 512, 4
SEEN, FITTED = 16, 24  # samples: for groups and routers, for the last matrices
FROM = 200_000  # characters of the text that are left to calibrate on
ROUNDS = 8  # of k-means
SAME_WEIGHT = 1e-3  # spread of the router's logits: those chosen count alike


def groups_of(fires: torch.Tensor) -> torch.Tensor:
    """The group of each neuron, of the same size; fires [neurons, tokens], of norm 1 each."""
    neurons, own = len(fires), torch.empty(len(fires), dtype=torch.long)
    centres = fires[torch.randperm(neurons)[:EXPERTS]].clone()
    for _ in range(ROUNDS):
        near = fires @ centres.T
        room = [neurons // EXPERTS] * EXPERTS
        for neuron in near.max(1).values.argsort(descending=True).tolist():
            ways = near[neuron].argsort(descending=True).tolist()
            own[neuron] = group = next(way for way in ways if room[way])
            room[group] -= 1
        centres = torch.stack([fires[own == group].mean(0) for group in range(EXPERTS)])
        centres /= centres.norm(dim=1, keepdim=True)
    return own


def hidden(mlp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)


def split(mlp: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each neuron, and the router [experts, hidden], for inputs x [tokens, hidden]."""
    down = mlp.down_proj.weight
    given = hidden(mlp, x)
    fires = given.abs() * down.norm(dim=0)
    own = groups_of((fires / fires.norm(dim=0)).T)
    parts = [given[:, own == group] @ down[:, own == group].T for group in range(EXPERTS)]
    size = torch.stack([part.norm(dim=1) for part in parts], 1)
    size /= size.mean(0)
    rows = x.double()
    square = rows.T @ rows
    square += 1e-2 * square.trace() * torch.eye(len(square), dtype=torch.float64)
    router = torch.linalg.solve(square, rows.T @ size.double()).float()
    return own, router.T * SAME_WEIGHT / (x @ router).std()


def fitted(down: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """down [hidden, neurons], moved so that what neurons give comes near to what is wanted."""
    square = (given.T @ given).double()
    square += 0.3 * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    lost = given.T @ (wanted - given @ down.T)
    return down + torch.linalg.solve(square, lost.double()).float().T


@torch.no_grad()
def main(model: Path, text: Path, out: Path) -> None:
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer, config = AutoTokenizer.from_pretrained(model), dense.config
    words = text.read_text(encoding="utf-8")[FROM:]
    ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids[: FITTED * LENGTH]).view(FITTED, LENGTH)
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "bos_token_id",
            "eos_token_id", "tie_word_embeddings")  # fmt: skip
    sparse = MixtralForCausalLM(
        MixtralConfig(
            **{name: getattr(config, name) for name in kept},
            intermediate_size=config.intermediate_size // EXPERTS,
            num_local_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            rope_theta=config.rope_parameters["rope_theta"],
        )
    ).float()
    sparse.load_state_dict(dense.state_dict(), strict=False)
    read: list[list[torch.Tensor]] = [[] for _ in dense.model.layers]
    for layer, seen in zip(dense.model.layers, read, strict=True):
        layer.mlp.register_forward_pre_hook(
            lambda _, given, seen=seen: seen.append(given[0].flatten(0, 1))
        )
    for some in tokens[:SEEN].split(TOGETHER):
        dense(some)
    before = list(dense.model.embed_tokens(tokens).split(TOGETHER))
    after = list(before)
    turns = dense.model.rotary_emb(before[0], torch.arange(LENGTH)[None])
    for layer, new, seen in zip(dense.model.layers, sparse.model.layers, read, strict=True):
        own, router = split(layer.mlp, torch.cat(seen[: SEEN // TOGETHER]))
        before = [layer(one, position_embeddings=turns) for one in before]
        after = [
            one + new.self_attn(new.input_layernorm(one), turns, attention_mask=None)[0]
            for one in after
        ]
        states = torch.cat(after).flatten(0, 1)
        x = new.post_attention_layernorm(states)
        chosen = (x @ router.T).topk(CHOSEN, 1).indices
        routed = torch.zeros(len(x), EXPERTS).scatter_(1, chosen, 1.0)
        given = hidden(layer.mlp, x) * routed[:, own]
        wanted = torch.cat(before).flatten(0, 1) - states
        down = fitted(layer.mlp.down_proj.weight, given, wanted)
        for expert in range(EXPERTS):
            its = own == expert
            parts = [layer.mlp.gate_proj.weight[its], layer.mlp.up_proj.weight[its]]
            new.mlp.experts.gate_up_proj[expert] = torch.cat(parts)
            new.mlp.experts.down_proj[expert] = down[:, its] * CHOSEN
        new.mlp.gate.weight.copy_(router)
        after = list((states + given @ down.T).view(FITTED, LENGTH, -1).split(TOGETHER))
    sparse.to(torch.bfloat16).save_pretrained(out)
    for file in model.glob("*token*"):
        shutil.copy(file, out / file.name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
