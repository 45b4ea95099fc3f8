"""Names and shapes of the matrices of twelve published models, from their config.json.

Only what the choice of types looks at: the length of a row, and whether there are experts. The
names are those of GGUF; layers and widths are the published ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qtool.gguf_mixtures.kinds import ModelFacts
from qtool.gguf_types import F32, BlockType

_MAMBA = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # hybrid_override_pattern


@dataclass(frozen=True)
class Shape:
    """A tensor without data."""

    name: str
    shape: tuple[int, ...]
    type: BlockType = F32


@dataclass(frozen=True)
class Model:
    """What config.json says."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    heads_kv: int  # 0 where a list by layer stands in the GGUF header
    attention_out: int  # row length of attn_output
    ffn: int = 0  # of the dense layers
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # the first ones of a model with experts
    linear_out: int = 0  # row length of ssm_out
    tied: bool = False

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(self.architecture, self.layers, self.heads, self.heads_kv, self.experts)

    def tensors(self) -> list[Shape]:
        """Every matrix that may be quantized."""
        found = [Shape("token_embd.weight", (1000, self.hidden))]
        found += [] if self.tied else [Shape("output.weight", (1000, self.hidden))]
        for layer in range(self.layers):
            found += [
                Shape(f"blk.{layer}.{name}.weight", (*leading, 64, width))
                for name, leading, width in self._layer(layer)
            ]
        return found

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Name, leading axes and row length of the matrices of a layer."""
        hidden = self.hidden
        if self.architecture == "nemotron_h_moe":
            kind = _MAMBA[layer]
            if kind == "M":
                yield from (("ssm_in", (), hidden), ("ssm_out", (), self.linear_out))
            elif kind == "*":
                yield from self._attention()
            else:
                yield from self._experts(("up",))
            return
        if self.architecture == "deepseek2":
            yield from (("attn_q_a", (), hidden), ("attn_q_b", (), 1536))
            yield from (("attn_kv_a_mqa", (), hidden), ("attn_output", (), self.attention_out))
            yield from (("attn_k_b", (128,), 128), ("attn_v_b", (128,), 512))
        elif self.linear_out and layer % 4 != 3:
            yield from (("attn_qkv", (), hidden), ("attn_gate", (), hidden))
            yield "ssm_out", (), self.linear_out
            parts = ("ba",) if self.architecture == "qwen3next" else ("alpha", "beta")
            yield from ((f"ssm_{part}", (), hidden) for part in parts)
        else:
            yield from self._attention()
            if self.architecture == "step35":
                yield "attn_gate", (), hidden
        if self.experts and layer >= self.dense_layers:
            yield from self._experts(("gate", "up"))
        else:
            yield from (
                ("ffn_gate", (), hidden),
                ("ffn_up", (), hidden),
                ("ffn_down", (), self.ffn),
            )

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        yield from ((f"attn_{part}", (), self.hidden) for part in "qkv")
        yield "attn_output", (), self.attention_out

    def _experts(self, inputs: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...], int]]:
        yield from ((f"ffn_{part}_exps", (self.experts,), self.hidden) for part in inputs)
        yield "ffn_down_exps", (self.experts,), self.expert_ffn
        if self.shared_ffn:
            yield from ((f"ffn_{part}_shexp", (), self.hidden) for part in inputs)
            yield "ffn_down_shexp", (), self.shared_ffn


# By the name of the snapshot's file.
MODELS = {
    "deepseek-v3.1": Model("deepseek2", 7168, 61, 128, 1, 16384, 18432, 256, 2048, 2048, 3),
    "gemma-3-4b-it": Model("gemma3", 2560, 34, 8, 4, 2048, 10240, tied=True),
    "glm-4.6v": Model("glm4moe", 4096, 46, 96, 8, 12288, 10944, 128, 1408, 1408, 1),
    "gpt-oss-120b": Model("gpt-oss", 2880, 36, 64, 8, 4096, 2880, 128, 2880),
    "meta-llama-3.1-70b-instruct": Model("llama", 8192, 80, 64, 8, 8192, 28672),
    "nvidia-nemotron-3-nano-30b-a3b": Model(
        "nemotron_h_moe", 2688, 52, 32, 0, 4096, 0, 128, 1856, 3712, linear_out=4096
    ),
    "qwen3-0.6b": Model("qwen3", 1024, 28, 16, 8, 2048, 3072),
    "qwen3-14b": Model("qwen3", 5120, 40, 40, 8, 5120, 17408),
    "qwen3-coder-next": Model(
        "qwen3next", 2048, 48, 16, 2, 4096, 5120, 512, 512, 512, linear_out=4096
    ),
    "qwen3.5-397b-a17b": Model(
        "qwen35moe", 4096, 60, 32, 2, 8192, 0, 512, 1024, 1024, linear_out=8192
    ),
    "qwen3.6-27b": Model("qwen35", 5120, 64, 24, 4, 6144, 17408, linear_out=6144),
    "step-3.5-flash": Model("step35", 4096, 45, 64, 8, 8192, 11264, 288, 1280, 1280, 3),
}
