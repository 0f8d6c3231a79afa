"""Models of a few layers with random weights: small enough to make and serve in seconds, no download.

``tiny_model.py FOLDER`` writes ``llama`` (one KV cache group), ``hybrid`` (two: full attention and a sliding
window) and ``adapters/a`` and ``adapters/b`` (LoRA for the first) below it, and ``larger``: a Llama without
weights, for ``load_format="dummy"``, of 25 million parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

VOCABULARY = 512
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = HIDDEN // HEADS
MLP = 256
LAYERS = 2
WINDOW = 64
"""Tokens that the hybrid model's sliding layers look back."""
STRENGTH = {
    "input_layernorm": 0.0,
    "post_attention_layernorm": 7.0,
    "pre_feedforward_layernorm": 0.0,
    "post_feedforward_layernorm": 7.0,
}
"""What the hybrid model's norms scale by, less one."""
RANK = 4
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
}


class Source:
    """Random matrices, always the same ones for one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, scale: float = 0.15) -> torch.Tensor:
        """The next matrix."""
        return torch.randn(*shape, generator=self._generator) * scale


def write(folder: Path) -> None:
    """Write every model."""
    llama(folder / "llama")
    tokenizer(folder / "llama")
    _configure(folder / "larger", LLAMA | LARGER)
    hybrid(folder / "hybrid")
    for seed, name in enumerate(("a", "b"), 100):
        adapter(folder / "adapters" / name, seed)


def llama(folder: Path) -> None:
    """A Llama."""
    source = Source(7)
    weights = {
        "model.embed_tokens.weight": source.matrix(VOCABULARY, HIDDEN, scale=0.6),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": source.matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {f"model.layers.{layer}.{norm}.weight": torch.ones(HIDDEN) for norm in norms}
        weights |= _projections(source, layer)
    _save(folder, weights, LLAMA)


def hybrid(folder: Path) -> None:
    """A Gemma 3: its layers look back at a window and at everything in turn."""
    source = Source(8)
    weights = {
        "model.embed_tokens.weight": source.matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.zeros(HIDDEN),  # Gemma adds one to the weights of its norms
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        # Strong layers: with tied embeddings a weak one would only repeat the last token.
        weights |= {f"{prefix}{norm}.weight": torch.full((HIDDEN,), STRENGTH[norm]) for norm in STRENGTH}
        weights |= {f"{prefix}self_attn.{n}_norm.weight": torch.zeros(HEAD_SIZE) for n in "qk"}
        weights |= _projections(source, layer)
    _save(
        folder,
        weights,
        COMMON
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": HEAD_SIZE,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    )


def adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of the Llama's value projections, strong enough to change what is generated."""
    source = Source(seed)
    weights = {}
    for layer in range(LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_"
        weights[f"{prefix}A.weight"] = source.matrix(RANK, HIDDEN)
        weights[f"{prefix}B.weight"] = source.matrix(KV_HEADS * HEAD_SIZE, RANK)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def tokenizer(folder: Path) -> None:
    """One word a token: ``w3`` to ``w511``; before them the special ones."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    names = [*special.values(), *(f"w{number}" for number in range(len(special), VOCABULARY))]
    words = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _projections(source: Source, layer: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}."
    return {
        f"{prefix}self_attn.q_proj.weight": source.matrix(HEADS * HEAD_SIZE, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": source.matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": source.matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": source.matrix(HIDDEN, HEADS * HEAD_SIZE),
        f"{prefix}mlp.gate_proj.weight": source.matrix(MLP, HIDDEN),
        f"{prefix}mlp.up_proj.weight": source.matrix(MLP, HIDDEN),
        f"{prefix}mlp.down_proj.weight": source.matrix(HIDDEN, MLP),
    }


def _save(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    _configure(folder, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _configure(folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
