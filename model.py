"""
The ELF network: one transformer that denoises embeddings and, at the last step, decodes them.

- z and an earlier prediction x_sc enter side by side, through a bottleneck
- time t, guidance scale w and the mode (denoise or decode) are 12 control tokens before the text
- full attention without a mask: padding is ordinary text, made of </s>
- rotary positions on the text only, RMSNorm on q and k, SwiGLU
- two heads: x_head predicts x when denoising, token_head the tokens when decoding

Shapes: B rows, L positions, E embedding channels, d width, V vocabulary.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

CONTROL = 12  # control tokens before the text: 4 for time, 4 for the guidance scale, 4 for the mode

@dataclass
class Architecture:
    depth: int
    dim: int            # d
    heads: int
    embed_dim: int      # E, the width of the frozen encoder
    vocab_size: int     # V
    bottleneck: int
    predict: str = "x"  # what x_head's output stands for: x, v or eps

def velocity(x, z, t):
    """
    Returns the velocity (B, L, E) of the straight path from z at time t to x at time 1 (Eq. 1).

    t in [0, 1] broadcasts to z. 1 - t is clamped at 0.05, so that v stays finite.
    """
    return (x - z) / (1 - t).clamp(min=0.05)

def as_x(output, z, t, predict):
    """Returns x_pred from x_head's output at z, t (B, 1, 1), which may stand for v or eps."""
    if predict == "v":
        return z + (1 - t) * output
    if predict == "eps":
        return (z - (1 - t) * output) / t.clamp(min=0.05)
    return output

class RMSNorm(nn.Module):
    """Scales the last axis to unit mean square, in float32."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

class ScalarTokens(nn.Module):
    """Embeds a scalar (B,) as four tokens (B, 4, d): learned ones plus an MLP of its sinusoids."""

    def __init__(self, dim):
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(1, 4, dim))
        self.mlp = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, scalar):
        f = 10000 ** (-torch.arange(128, device=scalar.device) / 128)
        angle = scalar[:, None] * f
        return self.tokens + self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1))[:, None]

def rotary_table(L, head_dim, device):
    """Returns cos and sin (12 + L, head_dim / 2). Control tokens get angle 0: no rotation."""
    position = torch.arange(-CONTROL, L, device=device).clamp(min=0)
    f = 10000 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = position[:, None] * f
    return angle.cos(), angle.sin()

def rotate(x, cos, sin):
    """Rotates each pair of channels (0, 1), (2, 3), ... of x by the angle of its position."""
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
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)
        if h.device.type == "cpu" and h.shape[1] <= 512:  # faster there than the fused kernel
            y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
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
    def __init__(self, arch):
        super().__init__()
        d, E = arch.dim, arch.embed_dim
        self.arch = arch
        self.recompute = False  # recompute activations in the backward pass: less memory, more work
        self.in_proj = nn.Linear(2 * E, E)
        self.bottleneck = nn.Sequential(nn.Linear(E, arch.bottleneck, bias=False),
                                        nn.Linear(arch.bottleneck, d))
        self.time = ScalarTokens(d)
        self.guidance = ScalarTokens(d)
        self.mode_tokens = nn.Parameter(0.02 * torch.randn(1, 4, d))
        self.blocks = nn.ModuleList(Block(d, arch.heads) for _ in range(arch.depth))
        self.x_head = nn.Sequential(RMSNorm(d), nn.Linear(d, E))
        self.token_head = nn.Sequential(nn.Linear(d, E), nn.GELU(approximate="tanh"),
                                        nn.Linear(E, arch.vocab_size))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in (*self.time.mlp[::2], *self.guidance.mlp[::2]):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.x_head[1].weight)  # its first output is 0, the mean of x

    def forward(self, z, x_sc, t, w, n_decode=0):
        """
        Runs both branches of Alg. 1 in one pass: the first n_decode rows decode, the rest denoise.

        z         (B, L, E)  noisy x; x itself has mean 0 and standard deviation 1
        x_sc      (B, L, E)  self-conditioning: an earlier x_pred, or 0
        t         (B,)       time in [0, 1]; 1 on decode rows
        w         (B,)       guidance scale, trained on [0.5, 5]
        returns   x_pred (B - n_decode, L, E), logits (n_decode, L, V)
        """
        B, L, _ = z.shape
        decoding = (torch.arange(B, device=z.device) < n_decode)[:, None, None]
        text = self.bottleneck(self.in_proj(torch.cat([z, x_sc], dim=-1)))         # (B, L, d)
        control = [self.time(t), self.guidance(w), self.mode_tokens * decoding]    # (B, 4, d) each
        h = torch.cat([*control, text], dim=1)                                     # (B, 12+L, d)
        cos, sin = rotary_table(L, self.arch.dim // self.arch.heads, z.device)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                h = torch.utils.checkpoint.checkpoint(block, h, cos, sin, use_reentrant=False)
            else:
                h = block(h, cos, sin)
        h = h[:, CONTROL:]
        z, t = z[n_decode:], t[n_decode:, None, None]
        x_pred = as_x(self.x_head(h[n_decode:]), z, t, self.arch.predict)
        return x_pred, self.token_head(h[:n_decode])
