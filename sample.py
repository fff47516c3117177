"""
Generates text from a trained ELF: noise, Euler steps towards embeddings, one decoding pass.

    python sample.py --steps 32                         # the newest run under out/
    python sample.py --ckpt embedded-language-flows/ELF-B-owt-torch --steps 64 --gamma 1 --n 8
    python sample.py --ckpt out/docs_cond --cond "def load_image(path)"
"""
import runtime  # first: before torch
import functools
import json
import sys
import time
from pathlib import Path

import torch

from checkpoint import open_sampler
from data.encoder import embed_conditions, load_encoder, to_text
from data.rows import read_conditions
from model import velocity

def time_grid(steps, schedule="logit-normal", seed=0, t_mean=-1.5, t_std=0.8):
    """Returns steps + 1 times from 0 to 1: logit-normal draws, or its quantiles, or uniform."""
    if schedule == "uniform":
        return torch.linspace(0, 1, steps + 1)
    if schedule == "quantile":
        normal = torch.special.ndtri(torch.arange(1, steps) / steps)
    else:
        normal = torch.randn(steps - 1, generator=runtime.seeded(seed))
    inner = torch.sigmoid(t_mean + t_std * normal).sort().values
    return torch.cat([torch.zeros(1), inner, torch.ones(1)])

def flow(model, z, grid, noise, gamma, w, cond_mask, x_cond, cfg=1.0, gamma_power=0.0):
    """
    Walks from noise z (B, L, E) at time 0 to embeddings at time 1 (Alg. 5; steps as in Alg. 6).

    grid       times from 0 to 1
    noise      returns fresh noise (B, L, E), already scaled, at each call
    gamma      how much noise the SDE puts back: gamma (1 - t)^gamma_power; 0 is the ODE
    w          guidance scale
    cond_mask  (B, L, 1) bool, where the embeddings x_cond (B, L, E) of a condition are given
    cfg        guidance by the condition; 1 is none
    yields     after each step: the t that its Euler step began at, z, and the next x_sc
    """
    z = torch.where(cond_mask, x_cond, z)
    x_sc = torch.where(cond_mask, x_cond, 0.0)
    for t, t_next in zip(grid, grid[1:]):
        if gamma > 0 and t_next < 1:                        # SDE: first a step back, towards noise
            alpha = (1 - gamma * (1 - t) ** gamma_power * (t_next - t)).clamp(0, 1)
            z = torch.where(cond_mask, x_cond, alpha * z + (1 - alpha) * noise())
            t = alpha * t
        x_pred = predict_x(model, z, x_sc, t, w, cond_mask, cfg)
        z = torch.where(cond_mask, x_cond, z + (t_next - t) * velocity(x_pred, z, t))    # Euler
        x_sc = torch.where(cond_mask, x_cond, x_pred)
        yield t, z, x_sc

def predict_x(model, z, x_sc, t, w, cond_mask, cfg):
    """Returns x_pred (B, L, E) at time t, guided by the condition if cfg is not 1."""
    if cfg != 1:  # a second copy of each row, without its condition
        z, x_sc = (torch.cat([y, torch.where(cond_mask, 0.0, y)]) for y in (z, x_sc))
    t, w = (z.new_full((len(z),), float(scalar)) for scalar in (t, w))
    x_pred = model(z, x_sc, t, w)[0].float()
    if cfg != 1:
        x_with, x_without = x_pred.chunk(2)
        x_pred = x_without + cfg * (x_with - x_without)
    return x_pred

def decode(model, z, w):
    """Returns the logits (B, L, V) of embeddings z, at t = 1 and without self-conditioning."""
    w = z.new_full((len(z),), w)
    return model(z, torch.zeros_like(z), torch.ones_like(w), w, n_decode=len(z))[1].float()

def draw_noise(rngs, L, E, scale):
    """Returns noise (B, L, E) of this scale, each row from its own generator."""
    rows = [torch.randn(L, E, generator=rng, device=rng.device) for rng in rngs]
    return scale * torch.stack(rows)

@torch.no_grad()
def sample(model, settings, n, seed=0, condition=None, on_step=None, quiet=True):
    """
    Returns n rows of tokens (n, L) (Alg. 2). Row i depends on (seed, i), not on its neighbours.

    settings   as from `checkpoint.load`: length, noise_scale, t_mean, t_std and sample_*
    condition  function from a range of rows to cond_mask and x_cond, as `flow` takes them
    on_step    called with t and x_pred after each step of the first chunk of rows
    """
    L, steps, schedule, gamma, gamma_power, w, cfg = (settings[key] for key in (
        "length", "sample_steps", "sample_schedule", "sample_gamma", "sample_gamma_power",
        "sample_w", "sample_cfg"))
    grid = time_grid(steps, schedule, seed, settings["t_mean"], settings["t_std"])
    scale = settings["sample_temperature"] * settings["noise_scale"]
    device, tokens = model.mode_tokens.device, []
    chunk = max(8, 2 ** (11 if device.type == "cpu" else 15) // L)  # rows at a time
    bar = runtime.progress(total=n * steps, desc="sampling", disable=quiet)
    with bar, runtime.autocast(device, settings["bf16"]):
        for first in range(0, n, chunk):
            rows = range(first, min(n, first + chunk))
            rngs = [runtime.seeded(seed, i, device=device) for i in rows]
            noise = functools.partial(draw_noise, rngs, L, model.arch.embed_dim, scale)
            z = noise()
            given = condition(rows) if condition else (torch.zeros_like(z).bool(), z)
            for t, z, x_sc in flow(model, z, grid, noise, gamma, w, *given, cfg, gamma_power):
                bar.update(len(rows))
                if on_step and first == 0:
                    on_step(t, x_sc)
            tokens.append(decode(model, z, w).argmax(-1).cpu())
    return torch.cat(tokens)

# ---- the program ---------------------------------------------------------------------------------

def sample_texts(model, settings, tokenizer, conds, encoder=None, **options):
    """Returns a text for each of conds, lists of token ids: what follows it, up to </s>."""
    if any(conds):
        options["condition"] = functools.partial(embed_conditions, encoder, conds, settings)
    tokens = sample(model, settings, len(conds), **options)
    return [to_text(tokenizer, row, len(cond)) for row, cond in zip(tokens, conds)]

def main(argv=None):
    parser = runtime.parser(__doc__)
    parser.add_argument("--cond", help="condition: a text, a .txt or .jsonl file, or `val` or "
                                       "`test` of the run's own data")
    parser.add_argument("--out", type=Path, help="a new .jsonl file for the samples (the terminal)")
    args, model, settings, tokenizer = open_sampler(parser, argv)
    if args.out and (args.out.exists() or not args.out.parent.is_dir()):
        sys.exit(f"--out {args.out}: exists already, or its folder does not; name another file")
    conds, records = read_conditions(args.cond, args.n, settings, tokenizer)
    if not conds:
        sys.exit("nothing to sample: --n is 0, or --cond is empty")
    encoder = args.cond and load_encoder(settings["encoder"], model.mode_tokens.device,
                                         settings.get("encoder_weights"))
    start = time.time()
    texts = sample_texts(model, settings, tokenizer, conds, encoder, seed=args.seed, quiet=False)
    tokens_per_s = len(conds) * settings["length"] / (time.time() - start)
    print(f"{settings['checkpoint']}: {tokens_per_s:,.0f} tokens/s", file=sys.stderr)
    if args.out is None:
        return print("\n".join(texts))
    about = dict(seed=args.seed, tokens_per_s=tokens_per_s, settings=settings)
    lines = [json.dumps(dict(text=text) | record | about) for text, record in zip(texts, records)]
    args.out.write_text("\n".join(lines) + "\n")

if __name__ == "__main__":
    main()
