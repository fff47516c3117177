"""
Text from a trained ELF: noise, Euler steps towards the clean embeddings, one decode pass (Alg. 2, 5 and 6).

    python sample.py                                  # the newest run under out/
    python sample.py --steps 64 --gamma 1 --w 3 --n 8
    python sample.py --ckpt embedded-language-flows/ELF-B-owt-torch --steps 32
"""
import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from model import ROOT, autocast, load, load_tokenizer, pick_device


def seeded(*numbers, device="cpu"):
    """A generator of its own for (seed, row), (seed, step, rank), ..."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def time_grid(steps, schedule="logit-normal", seed=0):
    """Times from 0 to 1, (steps + 1,): between them steps - 1 sorted draws of sigmoid(N(-1.5, 0.8^2)), or even spacing."""
    if schedule == "uniform":
        return torch.linspace(0, 1, steps + 1)
    inner = torch.sigmoid(0.8 * torch.randn(steps - 1, generator=seeded(seed)) - 1.5)
    return torch.cat([torch.zeros(1), inner.sort().values, torch.ones(1)])


def flow(model, z, grid, noise, gamma, w, on_step=lambda t, x_pred: None):
    """
    From noise to embeddings: z (B, L, E) at time 0 -> z at time 1 (Alg. 5, steps as in Alg. 6).

    grid      (N + 1,) times from 0 to 1
    noise     called once per SDE step, returns noise (B, L, E) at the scale the model was trained with
    gamma     how much noise is put back: 0 is the ODE
    w         guidance scale
    """
    B, x_sc = len(z), torch.zeros_like(z)
    for i, (t, t_next) in enumerate(zip(grid.tolist(), grid.tolist()[1:])):
        if gamma > 0 and i < len(grid) - 2:                       # SDE: step back in time first; never in the last interval
            alpha = min(max(1 - gamma * (t_next - t), 0), 1)
            z = alpha * z + (1 - alpha) * noise()
            t = alpha * t
        x_pred, _ = model(z, x_sc, z.new_full((B,), t), z.new_full((B,), w))
        z = z + (t_next - t) * (x_pred - z) / max(1 - t, 0.05)    # Euler: v = (x_pred - z) / (1 - t)
        x_sc = x_pred
        on_step(t, x_pred)
    return z


def decode(model, z, w):
    """Embeddings (B, L, E) -> tokens (B, L): mode on, t = 1, x_sc = 0, argmax. In slices, for logits are (L, V) a row."""
    rows = max(1, 2**27 // (z.shape[1] * model.config.vocab_size))
    return torch.cat([model(s, torch.zeros_like(s), s.new_ones(len(s)), s.new_full((len(s),), w), n_decode=len(s))[1]
                      .argmax(-1) for s in z.split(rows)])


@torch.no_grad()
def sample(model, n, length, steps=32, gamma=1.5, w=3.0, seed=0, schedule="logit-normal", noise_scale=2.0,
           chunk=None, progress=False, on_step=lambda t, x_pred: None):
    """
    n token rows (n, length) from model. Row i's noise depends on (seed, i) alone, so `chunk`, the rows computed
    at a time (memory grows with it), does not change what comes out.
    """
    device, E = next(model.parameters()).device, model.config.embed_dim
    grid, tokens = time_grid(steps, schedule, seed), []
    chunk = chunk or max(1, 2**15 // length)
    with tqdm(total=n * steps, unit="step", desc="sampling", disable=not progress) as bar:
        for first in range(0, n, chunk):
            rngs = [seeded(seed, i, device=device) for i in range(first, min(n, first + chunk))]

            def noise():
                return noise_scale * torch.stack([torch.randn(length, E, generator=g, device=device) for g in rngs])

            def stepped(t, x_pred):
                bar.update(len(rngs))
                if first == 0:
                    on_step(t, x_pred)

            with autocast(device):
                z = flow(model, noise(), grid, noise, gamma, w, stepped)
                tokens.append(decode(model, z, w).cpu())
    return torch.cat(tokens)


def to_text(tokenizer, row):
    """One row of token ids as text, cut at the first </s>."""
    row = row.tolist()
    return tokenizer.decode(row[:row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row)


def newest_run():
    runs = sorted((ROOT / "out").glob("*/ckpt.pt"), key=lambda f: f.stat().st_mtime)
    if not runs:
        sys.exit("no run under out/ yet: train one with `python train.py`, "
                 "or name released weights: --ckpt embedded-language-flows/ELF-B-owt-torch")
    return str(runs[-1].parent)


def check_ranges(parser, args):
    """Ends the program with one line if a number that sample.py and eval.py share is out of range."""
    for name, low, high in (("steps", 1, 10_000), ("n", 1, 10**7), ("gamma", 0, 1000), ("w", 0.01, 100), ("seed", 0, 2**32),
                            ("length", 1, 2**20), ("seeds", 1, 1000), ("real", 1, 10**7)):
        value = getattr(args, name, None)
        if value is not None and not low <= value <= high:
            parser.error(f"--{name} {value}: must be between {low} and {high}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", help="run folder, checkpoint file or Hugging Face repo id (default: the newest run under out/)")
    parser.add_argument("--steps", type=int, default=32, help="Euler steps (default 32)")
    parser.add_argument("--gamma", type=float, default=1.5, help="noise put back at each step; 0 is the ODE (default 1.5)")
    parser.add_argument("--w", type=float, default=3.0, help="guidance scale, trained on 0.5 to 5 (default 3)")
    parser.add_argument("--n", type=int, default=4, help="samples (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", choices=["logit-normal", "uniform"], default="logit-normal")
    parser.add_argument("--length", type=int, help="tokens a sample (default: as trained)")
    parser.add_argument("--out", help="write the samples to this .jsonl file instead of the terminal")
    parser.add_argument("--trace", action="store_true", help="print what x_pred of the first sample decodes to at every step (Fig. 17)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    check_ranges(parser, args)
    if args.out is not None:
        if Path(args.out).exists():
            sys.exit(f"--out {args.out}: exists already, and is not overwritten; name another file")
        try:
            out = open(args.out + ".tmp", "w", encoding="utf-8")
        except OSError as e:
            sys.exit(f"--out {args.out}: cannot be written ({e.strerror}); name another file")

    ckpt, device = args.ckpt or newest_run(), pick_device(args.device)
    model, settings = load(ckpt, device)
    tokenizer = load_tokenizer(settings["encoder"])
    length = args.length or settings["length"]
    if length > settings["length"]:
        print(f"--length {length}: longer than the {settings['length']} tokens it was trained on; expect worse text", file=sys.stderr)
    used = dict(steps=args.steps, gamma=args.gamma, w=args.w, seed=args.seed, schedule=args.schedule)
    print(f"{ckpt}: {args.n} samples of {length} tokens, {used}", file=sys.stderr)

    def trace(t, x_pred):
        if args.trace:
            tqdm.write(f"t = {t:.3f}  {to_text(tokenizer, decode(model, x_pred[:1].float(), args.w)[0])}")

    start = time.time()
    tokens = sample(model, args.n, length, **used, noise_scale=settings["noise_scale"], progress=True, on_step=trace)
    seconds = time.time() - start
    print(f"{args.n * length / seconds:,.0f} tokens/s", file=sys.stderr)
    texts = [to_text(tokenizer, row) for row in tokens]
    if args.out is not None:
        about = dict(ckpt=ckpt, data=settings.get("data"), encoder=settings["encoder"], length=length, **used)
        with out:
            out.writelines(json.dumps(dict(text=text, index=i, **about), ensure_ascii=False) + "\n" for i, text in enumerate(texts))
        Path(out.name).rename(args.out)
    else:
        print("\n".join(texts))


if __name__ == "__main__":
    main()
