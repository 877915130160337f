"""Ember's network in plain PyTorch, with Qwen3's structure and Hugging Face's parameter names."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


@dataclass
class Config:
    vocab_size: int = 1536
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def rotate(x, cos, sin):
    one, two = x.float().chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        self.head_dim = c.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(c.hidden_size, n * c.head_dim, bias=False) for n in self.heads)
        self.o_proj = nn.Linear(self.heads[0] * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            project(x).view(batch, length, heads, self.head_dim).transpose(1, 2)
            for project, heads in zip(projections, self.heads)
        )
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        groups = self.heads[0] // self.heads[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Ember(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        frequencies = c.rope_theta ** -(torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(c.max_position_embeddings).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                out = "o_proj" in name or "down_proj" in name  # the residual stream's writers start small
                nn.init.normal_(weight, std=0.02 / (2 * c.num_hidden_layers) ** 0.5 if out else 0.04)

    def forward(self, ids):
        """Token ids [batch, length] to logits [batch, length, vocab]."""
        x, length = self.embed_tokens(ids), ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def export(model, folder, ids):
    """Writes a Hugging Face Qwen3 folder in bf16; `ids` maps special tokens to ids."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **vars(model.config), "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None, "initializer_range": 0.04, "use_cache": True,
        "torch_dtype": "bfloat16", "bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|eos|>"],
    }  # fmt: skip
    generation = {
        "bos_token_id": ids["<|bos|>"], "eos_token_id": [ids["<|eos|>"], ids["<|end|>"]], "pad_token_id": ids["<|eos|>"],
        "do_sample": True, "temperature": 0.7, "top_p": 0.95,
    }  # fmt: skip
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
