"""A Llama of two layers with random weights: small enough to make and serve in seconds, no download."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 512
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = HIDDEN // HEADS
MLP = 256
LAYERS = 2


def write(folder: Path) -> None:
    """Write config and weights; always the same ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(), indent=2), encoding="utf-8")
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN) * 4,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
