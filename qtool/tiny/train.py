"""Train `tiny`, the small language model that ships beside this file.

    python -m qtool.tiny.train --compile     train, write the model files, measure
    python -m qtool.tiny.train --report      only measure the files that are there

Corpus: text that every CPython carries: the sources of the standard library (without its test
suites, codec tables and bundled wheels), the documentation strings of the modules written in C,
and the language reference in `pydoc_data.topics`. A document is held out when the first byte of
the SHA-256 of its name is below HELD_OUT; all others train. Windows are drawn in an order that
depends on SEED and the step alone, so a run that --minutes does not cut short repeats itself
on one machine.

Needs torch, transformers, tokenizers and safetensors; nothing else of qtool.
"""

import argparse
import hashlib
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
SEED = 20
HELD_OUT = 16  # of 256 hash values: about 6 % of the documents
WINDOW = 512
BATCH = 4
VOCABULARY = 2048
STEPS = 4800
SPREAD_AT = 2 / 3  # of the run
PEAKS = (3e-3, 1e-3)  # learning rates of the two stages
SPREAD = 0.55  # standard deviation of the logarithm of the channels' factors
TOPIC_COPIES = 4  # the topics are 5 % of the text and the default calibration text: seen more often
SEPARATOR = "<|endoftext|>"
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "ensurepip", "pydoc_data"}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "use_cache": True,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Document:
    kind: str  # "source", "docs" or "topics"
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] < HELD_OUT


def documents() -> Iterator[Document]:
    """Every document of the corpus, in an order that the file system does not decide."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if SKIPPED.intersection(parts) or parts[-1].startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            yield Document("source", "/".join(parts), text)
    for name in sorted(n for n in sys.builtin_module_names if not n.startswith("_")):
        yield Document("docs", f"docs:{name}", documentation(name))
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        yield Document("topics", f"topics:{name}", text)


def documentation(module_name: str) -> str:
    """The documentation strings of a module, its functions, its classes and their methods."""
    module = import_module(module_name)
    found = [f"{module_name}\n{module.__doc__ or ''}"]
    for name, member in sorted(vars(module).items()):
        if not callable(member) or name.startswith("_"):
            continue
        found.append(f"{module_name}.{name}\n{member.__doc__ or ''}")
        if isinstance(member, type):
            for method, value in sorted(vars(member).items()):
                text = getattr(value, "__doc__", None)
                if isinstance(text, str) and not method.startswith("__"):
                    found.append(f"{module_name}.{name}.{method}\n{text}")
    return "\n\n".join(found) + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE with GPT-2's splitting rule, which every engine knows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """The texts as one stream of token ids, each text followed by the separator."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(0)
    return torch.tensor(ids, dtype=torch.long)


def batch(stream: torch.Tensor, step: int) -> torch.Tensor:
    """The windows of one step: a shuffled, shifted tiling of the stream for every epoch."""
    per_epoch = (len(stream) // WINDOW - 1) // BATCH
    epoch, index = divmod(step, per_epoch)
    shuffle = random.Random(SEED * 1000 + epoch)
    shift = shuffle.randrange(WINDOW)
    order = list(range(per_epoch * BATCH))
    shuffle.shuffle(order)
    starts = [shift + WINDOW * i for i in order[index * BATCH : (index + 1) * BATCH]]
    return torch.stack([stream[start : start + WINDOW] for start in starts])  # [BATCH, WINDOW]


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of tokens 1.. of each window, in nats; ids [n, WINDOW]."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """exp of the mean loss over the stream's whole windows, no overlap, first token unscored."""
    windows = stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)
    total = 0.0
    for start in range(0, len(windows), BATCH):
        part = windows[start : start + BATCH]
        total += next_token_loss(model, part).item() * len(part)
    return math.exp(total / len(windows))


def round_to_nearest(weight: torch.Tensor, bits: int, group: int = 128) -> torch.Tensor:
    """Quantize and dequantize, asymmetric, one scale and zero for each group of a row."""
    grouped = weight.float().reshape(-1, group)
    low = grouped.amin(1, keepdim=True).clamp(max=0)
    high = grouped.amax(1, keepdim=True).clamp(min=0)
    levels = 2**bits - 1
    scale = ((high - low) / levels).clamp(min=1e-10)
    zero = (-low / scale).round()
    codes = ((grouped / scale).round() + zero).clamp(0, levels)
    rounded: torch.Tensor = ((codes - zero) * scale).reshape(weight.shape)
    return rounded.to(weight.dtype)


def learning_rate(progress: float, step: int, stage: int) -> float:
    """Of one stage: 100 steps of warm-up, then a cosine down to 3 % of the peak.

    progress in [0, 1] is of the whole run; step counts from the stage's first.
    """
    done = (progress - SPREAD_AT) / (1 - SPREAD_AT) if stage else progress / SPREAD_AT
    decay = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return PEAKS[stage] * decay * min(1.0, (step + 1) / 100)


@torch.no_grad()
def spread_channels(model: LlamaForCausalLM) -> None:
    """Give every linear's input channels unequal sizes, without changing what the model computes.

    A model this small and this briefly trained has no outlier channels, and rounding it to 3 bits
    cost 2 % of perplexity. Large models have them: a norm's gain (or the rows of up_proj) is large
    in a few channels, and the weights that read those are small beside their group's neighbours.
    The same is made here with log-normal factors; the second stage trains on from there.
    """
    generator = torch.Generator().manual_seed(SEED)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            factors = torch.exp(SPREAD * torch.randn(len(norm.weight), generator=generator))
            norm.weight.mul_(factors)
            for reader in readers:
                reader.weight.div_(factors)
        factors = torch.exp(SPREAD * torch.randn(mlp.down_proj.in_features, generator=generator))
        mlp.up_proj.weight.mul_(factors[:, None])
        mlp.down_proj.weight.div_(factors)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.01, fused=True
    )


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """The weights as bfloat16; the tied head is not stored a second time."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if name != "lm_head.weight"
    }
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")


def save_settings(tokenizer: Tokenizer, out: Path) -> None:
    """Everything that is not weights."""
    tokenizer.save(str(out / "tokenizer.json"))
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "unk_token": None,
        "pad_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": WINDOW,
    }
    for name, content in [
        ("config.json", CONFIG),
        ("generation_config.json", generation),
        ("tokenizer_config.json", settings),
    ]:
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, counters: dict[str, float]
) -> None:
    """What `--resume` needs: float32 weights, both moments of AdamW, the counters."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{name}/weight"] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}/{key}"] = optimizer.state[parameter][key]
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"counters": json.dumps(counters)})
    partial.replace(path)


def load_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW
) -> dict[str, float]:
    """Undo save_state; returns the counters."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as opened:
        counters: dict[str, float] = json.loads(opened.metadata()["counters"])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"{name}/weight"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(counters["step"] - counters["stage_start"])),
            "exp_avg": tensors[f"{name}/exp_avg"],
            "exp_avg_sq": tensors[f"{name}/exp_avg_sq"],
        }
    return counters


def train(args: argparse.Namespace, stream: torch.Tensor, probe: torch.Tensor) -> None:
    """Both stages: STEPS steps, or all of it squeezed into --minutes where those come first."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "dtype": "float32"}))
    model.train()
    optimizer = new_optimizer(model)
    counters: dict[str, float] = {"step": 0, "stage": 0, "stage_start": 0, "seconds": 0.0}
    if args.resume:
        counters = load_state(args.state, model, optimizer)
    step, stage, stage_start = (int(counters[k]) for k in ("step", "stage", "stage_start"))
    loss_of: Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor] = (
        torch.compile(next_token_loss) if args.compile else next_token_loss
    )
    begin = time.monotonic() - counters["seconds"]
    losses: list[float] = []

    def save() -> None:
        save_model(model, args.out)
        counters.update(step=step, stage=stage, stage_start=stage_start)
        counters.update(seconds=time.monotonic() - begin)
        save_state(args.state, model, optimizer, counters)

    while True:
        progress = max(step / STEPS, (time.monotonic() - begin) / (60 * args.minutes))
        if progress >= 1:
            break
        if stage == 0 and progress >= SPREAD_AT:
            spread_channels(model)
            optimizer = new_optimizer(model)
            stage, stage_start = 1, step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step - stage_start, stage)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not args.float32):
            loss = loss_of(model, batch(stream, step))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            seconds = time.monotonic() - begin
            print(f"step {step}, {seconds:.0f} s, loss {sum(losses) / len(losses):.3f}", flush=True)
            losses.clear()
        if step % 400 == 0:
            save()
            model.train(False)
            print(f"held-out perplexity {perplexity(model, probe):.3f}", flush=True)
            model.train()
    save()
    cpu = time.process_time()
    print(f"{step} steps, {step * WINDOW * BATCH} tokens; this process used {cpu:.0f} CPU seconds")


def report(out: Path, held_out: dict[str, torch.Tensor]) -> None:
    """Print the perplexity of the files in out: as they are, and rounded to 4 and to 3 bits."""
    for bits in (16, 4, 3):
        model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
        model.train(False)
        if bits < 16:
            for layer in model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.data = round_to_nearest(layer.weight.data, bits)
        for kind, stream in held_out.items():
            value = perplexity(model, stream)
            print(f"{bits:2} bits, {kind}: {value:.4f} ({len(stream) // WINDOW} windows)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model that ships with qtool.")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--state", type=Path, default=Path("tiny-training-state.safetensors"))
    parser.add_argument("--minutes", type=float, default=40.0, help="at most")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile: needs a compiler")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report", action="store_true", help="measure only")
    args = parser.parse_args()

    corpus = list(documents())
    kept = [d for d in corpus if not d.held_out]
    if args.report or args.resume:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer([d.text for d in kept])
        save_settings(tokenizer, args.out)
    held_out = {
        kind: encode(tokenizer, [d.text for d in corpus if d.held_out and d.kind in kinds])
        for kind, kinds in {"all": ("source", "docs", "topics"), "topics": ("topics",)}.items()
    }
    if not args.report:
        texts = [d.text for d in kept for _ in range(TOPIC_COPIES if d.kind == "topics" else 1)]
        stream = encode(tokenizer, texts)
        print(f"{len(corpus)} documents, {len(kept)} train, {sum(map(len, texts))} characters,")
        print(f"{len(stream)} tokens; held out {len(held_out['all'])} tokens", flush=True)
        train(args, stream, held_out["all"][: 16 * WINDOW])
    report(args.out, held_out)


if __name__ == "__main__":
    main()
