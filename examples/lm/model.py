"""A small decoder-only transformer over bytes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a feed-forward layer, each after a layer norm. It has no biases, which do not help at this size."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_norm = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.feed_norm(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte; the output layer shares its weights with the embedding."""

    def __init__(self, dim: int, layers: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, dim)
        self.places = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        for embedding in (self.bytes, self.places):  # smaller than torch draws them, since one is the output layer too
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Give the mean cross-entropy, in nats per byte. inputs, targets: (windows, seq_len), int64."""
        x = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.bytes.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
