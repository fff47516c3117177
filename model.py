"""
The ELF network: one transformer that denoises embeddings and, at the last step, reads tokens off them.

Notable choices:
- the input is a noisy embedding z and the previous guess x_sc, squeezed through a bottleneck of 128 channels
- time t, guidance scale w and the mode (denoise or decode) enter as 12 tokens before the text
- full bidirectional attention, no mask: padding is ordinary text made of </s>
- rotary positions on the text only, RMSNorm on q and k, SwiGLU
- two heads on one trunk: x_pred (B, L, E) when denoising, logits (B, L, V) when decoding

Symbols: B rows, L positions, E embedding channels, d width, V vocabulary. Sizes of the released models: Tab. 3.
"""
import argparse
import functools
import re
from dataclasses import dataclass
from pathlib import Path
import sys
import zipfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent  # relative paths of data, encoders and runs start here
PREFIX = 12  # control tokens before the text: 4 time, 4 guidance scale, 4 mode
EOS = 1      # T5's </s>: it ends a text and fills up its row


@dataclass
class ELFConfig:
    depth: int = 12
    dim: int = 768           # d
    heads: int = 12
    embed_dim: int = 512     # E, the width of the frozen encoder
    vocab_size: int = 32100  # V
    bottleneck: int = 128


PRESETS = {  # Tab. 3: 105 M, 343 M and 652 M parameters
    "B": ELFConfig(depth=12, dim=768, heads=12),
    "M": ELFConfig(depth=24, dim=1056, heads=16),
    "L": ELFConfig(depth=32, dim=1280, heads=16),
}


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

    def forward(self, s):
        f = 10000 ** (-torch.arange(128, device=s.device) / 128)
        angle = s[:, None] * f
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
        self.config = c = config
        self.recompute = False  # in the backward pass, each block's activations again: less memory, a third more work
        if c.dim % c.heads or c.dim // c.heads % 2:
            sys.exit(f"dim = {c.dim} with heads = {c.heads}: the head width dim / heads must be a whole, even number")
        self.in_proj = nn.Linear(2 * c.embed_dim, c.embed_dim)          # [z, x_sc] -> E
        self.bottleneck = nn.Sequential(nn.Linear(c.embed_dim, c.bottleneck, bias=False),
                                        nn.Linear(c.bottleneck, c.dim))
        self.time = Control(c.dim)
        self.scale = Control(c.dim)
        self.mode_tokens = nn.Parameter(0.02 * torch.randn(1, 4, c.dim))
        self.blocks = nn.ModuleList(Block(c.dim, c.heads) for _ in range(c.depth))
        self.denoise = nn.Sequential(RMSNorm(c.dim), nn.Linear(c.dim, c.embed_dim))
        self.unembed = nn.Sequential(nn.Linear(c.dim, c.embed_dim), nn.GELU(approximate="tanh"),
                                     nn.Linear(c.embed_dim, c.vocab_size))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for mlp in (self.time.mlp, self.scale.mlp):
            nn.init.normal_(mlp[0].weight, std=0.02)
            nn.init.normal_(mlp[2].weight, std=0.02)
        nn.init.zeros_(self.denoise[1].weight)  # the first prediction is x_pred = 0, the mean of the data

    def forward(self, z, x_sc, t, w, n_decode=0):
        """
        One pass for both branches of Alg. 1: the first n_decode rows decode, the others denoise.

        z         (B, L, E)  noisy embeddings, at unit scale where clean
        x_sc      (B, L, E)  self-condition: an earlier x_pred, or 0
        t         (B,)       time in [0, 1]; 1 on decode rows
        w         (B,)       guidance scale, trained on [0.5, 5]
        returns   x_pred (B - n_decode, L, E), logits (n_decode, L, V)
        """
        B, L, _ = z.shape
        decoding = (torch.arange(B, device=z.device) < n_decode)[:, None, None]
        text = self.bottleneck(self.in_proj(torch.cat([z, x_sc], dim=-1)))                           # (B, L, d)
        h = torch.cat([self.time(t), self.scale(w), self.mode_tokens * decoding, text], dim=1)      # (B, 12+L, d)
        cos, sin = rotary_table(L, self.config.dim // self.config.heads, z.device)
        for block in self.blocks:
            h = checkpoint(block, h, cos, sin, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else block(h, cos, sin)
        h = h[:, PREFIX:]
        return self.denoise(h[n_decode:]), self.unembed(h[:n_decode])


# ---------------------------------------------------------------------------------------------------------------------
# loading: a checkpoint of train.py, a file in the reference's format, or a Hugging Face repo id

VERSION = 1  # of the format of train.py's checkpoints

# What a file in the reference's format does not say (Tab. 4): for OpenWebText, and what differs where the name says another task.
REFERENCE_SETTINGS = dict(encoder="t5-small", length=1024, cond_length=0, noise_scale=2.0, x_mean=0.0, x_std=0.2)
PAIRS = dict(sample_steps=64, sample_gamma=0.0, sample_w=1.0, sample_cfg=2.0)
REFERENCE_TASKS = {"de-en": dict(length=128, cond_length=64) | PAIRS, "xsum": dict(length=1088, cond_length=1024) | PAIRS,
                   "PD-owt": dict(sample_steps=8, sample_w=2.5)}
REFERENCE_NAMES = [  # the reference's parameter names -> ours
    (r"^self_cond_proj\.", "in_proj."), (r"^text_proj\.proj1\.", "bottleneck.0."), (r"^text_proj\.proj2\.", "bottleneck.1."),
    (r"^t_embedder\.mlp_", "time.mlp."), (r"^t_emb_tokens$", "time.tokens"),
    (r"^self_cond_cfg_embedder\.mlp_", "scale.mlp."), (r"^self_cond_cfg_tokens$", "scale.tokens"),
    (r"^final_layer\.norm_final\.", "denoise.0."), (r"^final_layer\.linear\.", "denoise.1."),
    (r"^proj_kernel$", "unembed.0.weight"), (r"^proj_bias$", "unembed.0.bias"),
    (r"^unembed_kernel$", "unembed.2.weight"), (r"^unembed_bias$", "unembed.2.bias"),
]
# What such files hold besides tensors: settings and numbers, no code. Old and new numpy name the last two differently.
HARMLESS = [argparse.Namespace, np.dtype, np.ndarray, *{type(np.dtype(k)) for k in "?bhilBHILefd"},
            *[(f, f"numpy.{core}.multiarray.{f.__name__}") for core in ("core", "_core")
              for f in (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])]]


def checkpoints(folder):
    """The checkpoint files in a run's folder, or in one of released weights, the newest first."""
    files = [f for f in folder.glob("*") if re.fullmatch(r"ckpt(_\d+)?\.pt|checkpoint_.*", f.name) and f.is_file()]
    return sorted(files, key=lambda f: (f.suffix == ".pt", [int(n) for n in re.findall(r"\d+", f.name)]), reverse=True)


def find(source):
    """The checkpoint files that `source` may mean, the first that can be read: itself, those of that run folder or Hugging Face repo."""
    path = Path(source)
    path = path if path.exists() else ROOT / path  # as `python train.py` says it: out/docs
    if path.is_dir():
        return checkpoints(path) or sys.exit(f"{source}: holds no ckpt_<step>.pt, ckpt.pt or checkpoint_<step>; train one: python train.py")
    if path.exists():
        return [path]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or path.suffix == ".pt":
        sys.exit(f"{source}: no such file, run folder or Hugging Face repo id (like embedded-language-flows/ELF-B-owt-torch)")
    from huggingface_hub import snapshot_download
    try:
        return find(snapshot_download(str(source), allow_patterns=["checkpoint_*", "ckpt*.pt"]))
    except Exception as e:  # the hub's errors share no base class across its versions
        sys.exit(f"{source}: not a local path, and not fetched from the Hugging Face hub ({type(e).__name__}); "
                 "check the name and the network")


def read(file):
    """What torch.save wrote: data, never code, memory-mapped. Any exception if it is not whole; SystemExit if its format is newer."""
    with zipfile.ZipFile(file) as z:  # torch.load itself compares no checksums
        if sum(entry.file_size for entry in z.infolist()) > Path(file).stat().st_size:
            raise ValueError("it unpacks to more than its size")
        if bad := z.testzip():
            raise ValueError(f"wrong checksum of {bad}")
    with torch.serialization.safe_globals(HARMLESS):
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if "elf_config" in content and content.get("version", 0) > VERSION:
        sys.exit(f"{file}: of format {content['version']}, and this code knows up to {VERSION}; update the code")
    return content


def load(source, device="cpu"):
    """
    A trained network and the settings it was trained with; always the EMA weights where the file has them.

    source    a checkpoint of train.py or its run folder; a file in the reference's format (a dict with `ema_params1`
              or `params`, or a bare state dict), whose sizes are read off its shapes; or a Hugging Face repo id
    returns   (ELF in eval mode, dict of settings: encoder, length, noise_scale, x_mean, x_std, ...)
    raises    SystemExit with one line if there is no such file, or it holds anything but those names and shapes
    """
    files = find(source)
    for file in files:
        try:
            content = read(file)
            break
        except Exception as e:  # a damaged or foreign file fails in as many ways as there are formats
            why = f"{file}: not a readable checkpoint ({type(e).__name__}: {(str(e).splitlines() or [''])[0][:100]})"
        if file == files[-1]:
            sys.exit(why)
        print(f"{why}; trying the one before", file=sys.stderr)
    try:
        ours = "elf_config" in content
        state = content["ema"] if ours else content.get("ema_params1") or content.get("params") or content
        if sum(t.nbytes for t in state.values()) > file.stat().st_size:  # views of few numbers would take any memory once copied
            raise ValueError("its tensors are larger than the file")
        if ours:
            config, settings = ELFConfig(**content["elf_config"]), content["settings"]
        else:
            config, state = from_reference(state)
            task = [changes for name, changes in REFERENCE_TASKS.items() if name in str(source)]
            settings = functools.reduce(dict.__or__, task, REFERENCE_SETTINGS)
        if config.depth > len(state):
            raise ValueError(f"{config.depth} blocks of {len(state)} tensors")
        with torch.device("meta"):
            model = ELF(config)
        model.load_state_dict(state, assign=True)
        if missing := [k for k in ("encoder", "length", "noise_scale", "x_mean", "x_std") if k not in settings]:
            raise KeyError(*missing)
        if not (type(settings["encoder"]) is str and type(settings["length"]) is int and 0 < settings["length"] < 2**24):
            raise ValueError(f"encoder = {settings['encoder']!r:.50}, length = {settings['length']!r:.50}")
    except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        sys.exit(f"{file}: not an ELF checkpoint, or of another shape ({type(e).__name__}: {' '.join(str(e).split())[:300]})")
    return model.to(device).eval(), settings


def from_reference(params):
    """(ELFConfig, state dict under our names) from the reference's names; its two kernels are stored (in, out)."""
    params = {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in params.items()}
    state = {}
    for name, value in params.items():
        for pattern, ours in REFERENCE_NAMES:
            name = re.sub(pattern, ours, name)
        state[name] = value
    for name in ("unembed.0.weight", "unembed.2.weight"):
        state[name] = state[name].T.contiguous()
    bottleneck, embed_dim = state["bottleneck.0.weight"].shape
    dim = len(state["bottleneck.1.weight"])
    return ELFConfig(depth=1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks.")),
                     dim=dim, heads=dim // len(state["blocks.0.attn.q_norm.weight"]), embed_dim=embed_dim,
                     vocab_size=len(state["unembed.2.bias"]), bottleneck=bottleneck), state


# ---------------------------------------------------------------------------------------------------------------------
# the machine, and the frozen encoder

def pick_device(name="auto", index=0):
    """torch.device by name, or the best there is; `index` picks among several GPUs where the name does not."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if not re.fullmatch(r"(cpu|mps|cuda(:\d+)?)", name):
            raise ValueError("no such device")
        device = torch.device(f"cuda:{index}" if name == "cuda" else name)
        torch.empty(1, device=device)
    except Exception as e:
        sys.exit(f"device = {name}: not usable here ({str(e).splitlines()[0][:80]}); use cpu, cuda or mps")
    return device


def autocast(device, wanted=True):
    """bfloat16 matrix products where the device is good at them: recent GPUs, CPUs with AVX512-BF16 or AMX."""
    good = (device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            or device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()))
    return torch.autocast(device.type, torch.bfloat16, enabled=bool(wanted and good))


def local_or_repo(name):
    """A folder relative to this repository where there is one, else the name as it is, for the Hugging Face hub."""
    return str(ROOT / name) if (ROOT / name).is_dir() else str(name)


def from_pretrained(kind, name, what="encoder"):
    """kind.from_pretrained(name), or one line that says why not."""
    try:
        return kind.from_pretrained(local_or_repo(name))
    except Exception as e:
        sys.exit(f"{what} = {name}: neither a folder here nor fetched from the Hugging Face hub ({type(e).__name__}); "
                 "check the name and the network")


def load_tokenizer(name):
    from transformers import AutoTokenizer
    return from_pretrained(AutoTokenizer, name)


def load_encoder(name, device="cpu"):
    from transformers import T5EncoderModel
    return from_pretrained(T5EncoderModel, name).to(device).eval().requires_grad_(False)


def condition_mask(n_cond, L):
    """(B, L, 1) bool: which positions of rows of L hold the condition, the first n_cond (B,) of each."""
    return (torch.arange(L, device=n_cond.device) < n_cond[:, None])[..., None]


@torch.no_grad()
def embed(encoder, ids, x_mean, x_std, cond=None, drop=None):
    """
    Clean embeddings x (B, L, E), float32, of tokens ids (B, L), at mean 0 and unit scale.

    cond  (B, L, 1) bool  a condition sees only itself, whatever follows it; the target sees both
    drop  (B,) bool       rows whose condition is hidden: the target does not see it, and its own x is 0
    """
    if cond is None:
        return (encoder(input_ids=ids).last_hidden_state.float() - x_mean) / x_std
    if drop is None:
        drop = torch.zeros_like(cond[:, 0, 0])
    query, key, drop = cond, cond.mT, drop[:, None, None]
    seen = torch.where(key, query | ~drop, ~query)  # (B, L, L)
    # The encoder's own forward takes no such mask in every version of transformers; its blocks do, as a position bias.
    stack, L = encoder.encoder, ids.shape[1]
    bias = stack.block[0].layer[0].SelfAttention.compute_bias(L, L).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    h = stack.embed_tokens(ids)
    for block in stack.block:
        h = block(h, position_bias=bias)
        h = h if torch.is_tensor(h) else h[0]
    x = (stack.final_layer_norm(h).float() - x_mean) / x_std
    return x.masked_fill(cond & drop, 0.0)
