"""
The ELF network: one transformer that denoises embeddings and, at the last step, reads tokens off them.

Notable choices:
- the input, a noisy embedding z beside the previous guess x_sc, passes a bottleneck: 128 of E = 512 channels (64 of 64 in the default run)
- time t, guidance scale w and the mode (denoise or decode) enter as 12 tokens before the text
- full bidirectional attention, no mask: padding is ordinary text made of </s>
- rotary positions on the text only, RMSNorm on q and k, SwiGLU
- two heads on one trunk: x_pred (B, L, E) when denoising, logits (B, L, V) when decoding

Symbols: B rows, L positions, E embedding channels, d width, V vocabulary. Sizes of the released models: Tab. 3 and config/owt_*.py.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

PREFIX = 12  # control tokens before the text: 4 time, 4 guidance scale, 4 mode


@dataclass
class ELFConfig:
    depth: int = 12
    dim: int = 768           # d
    heads: int = 12
    embed_dim: int = 512     # E, the width of the frozen encoder
    vocab_size: int = 32100  # V
    bottleneck: int = 128
    predict: str = "x"       # what the network's output stands for: x, v or eps


def velocity(x, z, t):
    """
    The velocity of the straight path that is at z now, at time t, and at x when t = 1 (Eq. 1). With the network's x_pred it is v_pred.

    x, z      (B, L, E)
    t         of a shape that broadcasts to it, in [0, 1]; 1 - t counts as at least 0.05, so that v stays finite
    """
    return (x - z) / (1 - t).clamp(min=0.05)


def as_x(y, z, t, predict):
    """x_pred (B, L, E) from the network's output y at z, t (B, 1, 1): from x itself, as in ELF, or from v or the scaled noise s eps."""
    if predict == "v":
        return z + (1 - t) * y
    if predict == "eps":
        return (z - (1 - t) * y) / t.clamp(min=0.05)
    return y


class RMSNorm(nn.Module):
    """Scales the last axis to unit mean square, in float32 whatever comes in."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Control(nn.Module):
    """A scalar as four tokens: learned ones, plus an MLP of its sinusoid. (B,) -> (B, 4, d)"""

    def __init__(self, dim):
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(1, 4, dim))
        self.mlp = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, scalar):
        f = 10000 ** (-torch.arange(128, device=scalar.device) / 128)
        angle = scalar[:, None] * f
        return self.tokens + self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1))[:, None]


def rotary_table(L, head_dim, device):
    """cos and sin (PREFIX + L, head_dim / 2): angle 0, no rotation, on the control tokens; base 10000 on the text."""
    position = torch.arange(-PREFIX, L, device=device).clamp(min=0)
    f = 10000 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = position[:, None] * f
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turns each interleaved pair (0,1), (2,3), ... of x (..., positions, head_dim) by its position's angle."""
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = RMSNorm(dim // heads)
        self.k_norm = RMSNorm(dim // heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, h, cos, sin):
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, 12+L, head_dim)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        if h.device.type == "cpu" and h.shape[1] <= 512:  # short rows on a CPU: the fused kernel's backward is slower than this
            y = (q.to(v.dtype) @ k.to(v.dtype).mT / q.shape[-1] ** 0.5).softmax(-1).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.proj(y.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, dim):
        super().__init__()
        hidden = int(4 * dim * 2 / 3)
        self.w12 = nn.Linear(dim, 2 * hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, h):
        a, b = self.w12(h).chunk(2, dim=-1)
        return self.w3(F.silu(a) * b)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = RMSNorm(dim)
        self.mlp = SwiGLU(dim)

    def forward(self, h, cos, sin):
        h = h + self.attn(self.norm1(h), cos, sin)
        return h + self.mlp(self.norm2(h))


class ELF(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, E = config.dim, config.embed_dim
        if d % config.heads or d // config.heads % 2:
            sys.exit(f"dim = {d} with heads = {config.heads}: the head width dim / heads must be a whole, even number")
        self.config = config
        self.recompute = False  # recompute each block's activations in the backward pass: less memory, a third more work
        self.in_proj = nn.Linear(2 * E, E)                                                           # [z, x_sc] -> E
        self.bottleneck = nn.Sequential(nn.Linear(E, config.bottleneck, bias=False), nn.Linear(config.bottleneck, d))
        self.time = Control(d)
        self.guidance = Control(d)
        self.mode_tokens = nn.Parameter(0.02 * torch.randn(1, 4, d))
        self.blocks = nn.ModuleList(Block(d, config.heads) for _ in range(config.depth))
        self.denoise = nn.Sequential(RMSNorm(d), nn.Linear(d, E))
        self.unembed = nn.Sequential(nn.Linear(d, E), nn.GELU(approximate="tanh"), nn.Linear(E, config.vocab_size))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for mlp in (self.time.mlp, self.guidance.mlp):
            nn.init.normal_(mlp[0].weight, std=0.02)
            nn.init.normal_(mlp[2].weight, std=0.02)
        nn.init.zeros_(self.denoise[1].weight)  # the first prediction is x_pred = 0, the mean of the data

    def forward(self, z, x_sc, t, w, n_decode=0):
        """
        One pass for both branches of Alg. 1: the first n_decode rows decode, the others denoise.

        z         (B, L, E)  noisy embeddings: z_t or, on decode rows, z~; clean ones have mean 0, deviation 1
        x_sc      (B, L, E)  self-condition: an earlier x_pred, or 0
        t         (B,)       time in [0, 1]; 1 on decode rows
        w         (B,)       guidance scale, trained on [0.5, 5]
        returns   x_pred (B - n_decode, L, E), logits (n_decode, L, V)
        """
        B, L, _ = z.shape
        decoding = (torch.arange(B, device=z.device) < n_decode)[:, None, None]
        text = self.bottleneck(self.in_proj(torch.cat([z, x_sc], dim=-1)))                           # (B, L, d)
        h = torch.cat([self.time(t), self.guidance(w), self.mode_tokens * decoding, text], dim=1)    # (B, 12+L, d)
        cos, sin = rotary_table(L, self.config.dim // self.config.heads, z.device)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                h = torch.utils.checkpoint.checkpoint(block, h, cos, sin, use_reentrant=False)
            else:
                h = block(h, cos, sin)
        h = h[:, PREFIX:]
        x_pred = as_x(self.denoise(h[n_decode:]), z[n_decode:], t[n_decode:, None, None], self.config.predict)
        return x_pred, self.unembed(h[:n_decode])
