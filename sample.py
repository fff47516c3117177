"""
Text from a trained ELF: noise, Euler steps towards the clean embeddings, one decode pass (Alg. 2, 5 and 6).

    python sample.py                                  # the newest run under out/
    python sample.py --steps 64 --gamma 1 --w 3 --n 8
    python sample.py --ckpt embedded-language-flows/ELF-B-owt-torch --steps 32
    python sample.py --ckpt out/docs_cond --cond "def load_image(path)"    # or a .txt, or a .jsonl
"""
import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from model import EOS, ROOT, autocast, condition_mask, embed, load, load_encoder, load_tokenizer, pick_device


def seeded(*numbers, device="cpu"):
    """A generator of its own for (seed, row), (seed, step, rank), ..."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def time_grid(steps, schedule="logit-normal", seed=0):
    """Times from 0 to 1, (steps + 1,): between them steps - 1 sorted draws of sigmoid(N(-1.5, 0.8^2)), or even spacing."""
    if schedule == "uniform":
        return torch.linspace(0, 1, steps + 1)
    inner = torch.sigmoid(0.8 * torch.randn(steps - 1, generator=seeded(seed)) - 1.5)
    return torch.cat([torch.zeros(1), inner.sort().values, torch.ones(1)])


def flow(model, z, grid, noise, gamma, w, cond=None, x_cond=None, cfg=1.0, on_step=lambda t, x_pred: None):
    """
    From noise to embeddings: z (B, L, E) at time 0 -> z at time 1 (Alg. 5, steps as in Alg. 6).

    grid      (N + 1,) times from 0 to 1
    noise     called once per SDE step, returns noise (B, L, E) at the scale the model was trained with
    gamma     how much noise is put back: 0 is the ODE
    w         guidance scale
    cond      (B, L, 1) bool: where a condition stands, whose embeddings x_cond (B, L, E) stay clean in z and x_sc; None without one
    cfg       guidance by the condition, at the price of a second row in the batch for each; 1 is none
    """
    def keep(y):
        return y if cond is None else torch.where(cond, x_cond, y)

    z, x_sc = keep(z), keep(torch.zeros_like(z))
    for i, (t, t_next) in enumerate(zip(grid.tolist(), grid.tolist()[1:])):
        if gamma > 0 and i < len(grid) - 2:                       # SDE: step back in time first; never in the last interval
            alpha = min(max(1 - gamma * (t_next - t), 0), 1)
            z = keep(alpha * z + (1 - alpha) * noise())
            t = alpha * t
        inputs = [z, x_sc]
        if guide := cond is not None and cfg != 1:                # the same rows again, without their condition
            inputs = [torch.cat([y, torch.where(cond, 0.0, y)]) for y in inputs]
        B = len(inputs[0])
        x_pred, _ = model(*inputs, z.new_full((B,), t), z.new_full((B,), w))
        if guide:
            x_c, x_u = x_pred.chunk(2)
            x_pred = x_u + cfg * (x_c - x_u)                      # as v = v_u + cfg (v_c - v_u), for z is the same in both
        z = keep(z + (t_next - t) * (x_pred - z) / max(1 - t, 0.05))    # Euler: v = (x_pred - z) / (1 - t)
        x_sc = keep(x_pred)
        on_step(t, x_pred)
    return z


def decode(model, z, w):
    """Embeddings (B, L, E) -> tokens (B, L): mode on, t = 1, x_sc = 0, argmax. In slices, for logits are (L, V) a row."""
    rows = max(1, 2**27 // (z.shape[1] * model.config.vocab_size))
    return torch.cat([model(s, torch.zeros_like(s), s.new_ones(len(s)), s.new_full((len(s),), w), n_decode=len(s))[1]
                      .argmax(-1) for s in z.split(rows)])


@torch.no_grad()
def sample(model, n, length, steps=32, gamma=1.5, w=3.0, cfg=1.0, seed=0, schedule="logit-normal", noise_scale=2.0,
           condition=lambda first, last: (None, None), chunk=None, progress=False, on_step=lambda t, x_pred: None):
    """
    n token rows (n, length) from model. Row i's noise depends on (seed, i) alone, so `chunk`, the rows computed
    at a time (memory grows with it), does not change what comes out.

    condition   (first, last) -> cond and x_cond of rows first to last, as `flow` takes them
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
                cond, x_cond = condition(first, first + len(rngs))
                z = flow(model, noise(), grid, noise, gamma, w, cond, x_cond, cfg, stepped)
                tokens.append(decode(model, z, w).cpu())
    return torch.cat(tokens)


def conditions(encoder, rows, settings, device):
    """
    Conditions, lists of token ids, of which settings["cond_length"] are kept, for samples of settings["length"] tokens.
    returns   their lengths n_cond, and the function that `sample` takes as its `condition`
    """
    rows = [list(row[:settings["cond_length"]]) for row in rows]
    n_cond = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [EOS] * (settings["length"] - len(row)) for row in rows])
    x_mean, x_std = (torch.tensor(settings[k], device=device) for k in ("x_mean", "x_std"))

    def condition(first, last):
        cond = condition_mask(n_cond[first:last].to(device), settings["length"])
        return cond, embed(encoder, ids[first:last].to(device), x_mean, x_std, cond)

    return n_cond.tolist(), condition


def to_text(tokenizer, row, n_cond=0, most=None):
    """One row of token ids as text: what follows its condition, cut at the first </s>, of at most `most` tokens."""
    row = row.tolist()[n_cond:][:most]
    return tokenizer.decode(row[:row.index(EOS)] if EOS in row else row)


def newest_run():
    runs = sorted({f.parent for f in (ROOT / "out").glob("*/ckpt*.pt")}, key=lambda folder: folder.stat().st_mtime)
    if not runs:
        sys.exit("no run under out/ yet: train one with `python train.py`, "
                 "or name released weights: --ckpt embedded-language-flows/ELF-B-owt-torch")
    return str(runs[-1])


def read_jsonl(file, key, optional=()):
    """The objects of a .jsonl file, each with text under `key`, and under each of `optional` on all lines or on none."""
    found = []
    try:
        with open(file, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                try:
                    item = json.loads(line)
                except (ValueError, RecursionError):
                    sys.exit(f'{file}, line {number}: not JSON; each line is an object with "{key}"')
                if not isinstance(item, dict) or not isinstance(item.get(key), str):
                    sys.exit(f'{file}, line {number}: has no "{key}"; each line is an object with one')
                for k in optional:
                    if not isinstance(item.get(k), (str, type(None))) or found and (k in item) != (k in found[0]):
                        sys.exit(f"{file}, line {number}: {k} = {item.get(k)!r:.60}; must be text, on every line or on none")
                found.append(item)
    except (OSError, ValueError) as e:  # no such file, or not UTF-8
        sys.exit(f"{file}: cannot be read ({e})")
    return found or sys.exit(f"{file}: is empty")


def read_conditions(source, n):
    """[(condition, reference or None)]: the text itself, n times; or the lines of a .txt or .jsonl file, the first n of them."""
    if not source.endswith((".txt", ".jsonl")):
        return [(source, None)] * (n or 4)
    if source.endswith(".jsonl"):
        return [(item["input"], item.get("output")) for item in read_jsonl(source, "input", ["output"])][:n]
    try:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as e:
        sys.exit(f"--cond {source}: cannot be read ({e})")
    return [(line, None) for line in lines][:n] or sys.exit(f"--cond {source}: is empty")


RANGES = dict(steps=(1, 10_000), n=(1, 10**7), gamma=(0, 1000), w=(0.01, 100), cfg=(0, 100), seed=(0, 2**32), length=(1, 2**20),
              seeds=(1, 1000), real=(1, 10**7))


def sampling_arguments(parser):
    """The settings of a sampler, for sample.py and eval.py; those not given are the checkpoint's own."""
    parser.add_argument("--steps", type=int, help="Euler steps (default: the run's, else 32)")
    parser.add_argument("--gamma", type=float, help="noise put back at each step; 0 is the ODE (default: the run's, else 1.5)")
    parser.add_argument("--w", type=float, help="guidance scale, trained on 0.5 to 5 (default: the run's, else 3)")
    parser.add_argument("--cfg", type=float, help="guidance by the condition; 1 is none (default: the run's, else 1)")
    parser.add_argument("--schedule", choices=["logit-normal", "uniform"], default="logit-normal", help="of the times")


def sampling_settings(parser, args, settings):
    """Those settings as arguments of `sample`; ends the program with one line if a number is out of range."""
    for name, value in vars(args).items():
        if value == []:  # argparse takes --n=-- so
            parser.error(f"--{name}: has no value")
    for name, (low, high) in RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not low <= value <= high:
            parser.error(f"--{name} {value}: must be between {low} and {high}")
    fallback = dict(steps=32, gamma=1.5, w=3.0, cfg=1.0)
    return {k: v if (v := getattr(args, k)) is not None else settings.get(f"sample_{k}", d) for k, d in fallback.items()} | dict(
        schedule=args.schedule)


def open_new(option, path, force):
    """A temporary file to write, renamed to path by its writer in the end; path itself is not overwritten without --force."""
    if Path(path).exists() and not force:
        sys.exit(f"{option} {path}: exists already; name another file, or overwrite it with --force")
    try:
        return open(path + ".tmp", "w", encoding="utf-8")
    except OSError as e:
        sys.exit(f"{option} {path}: cannot be written ({e.strerror}); name another file")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", help="run folder, checkpoint file or Hugging Face repo id (default: the newest run under out/)")
    sampling_arguments(parser)
    parser.add_argument("--n", type=int, help="samples (default 4, or one for each line of --cond FILE)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, help="tokens a sample (default: as trained)")
    parser.add_argument("--cond", help="condition: a text, a .txt file of one a line, or a .jsonl file of `input` (and `output`)")
    parser.add_argument("--out", help="write the samples to this .jsonl file instead of the terminal")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    parser.add_argument("--trace", action="store_true", help="print what x_pred of the first sample decodes to at every step (Fig. 17)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    sampling_settings(parser, args, {})
    out = open_new("--out", args.out, args.force) if args.out is not None else None

    ckpt, device = args.ckpt or newest_run(), pick_device(args.device)
    model, settings = load(ckpt, device)
    tokenizer = load_tokenizer(settings["encoder"])
    length, most = args.length or settings["length"], None
    if length > settings["length"]:
        print(f"--length {length}: longer than the {settings['length']} tokens it was trained on; expect worse text", file=sys.stderr)
    used = sampling_settings(parser, args, settings) | dict(seed=args.seed)
    pairs, n_cond, more = [("", None)] * (args.n or 4), [0] * (args.n or 4), {}
    if bool(settings.get("cond_length")) != (args.cond is not None):
        sys.exit(f"--cond: {ckpt} " + ("does not write from a condition; leave it out" if args.cond is not None else
                                       "writes from a condition; give a text, a .txt or a .jsonl file"))
    if args.cond is not None:
        most = length - settings["cond_length"]
        if most < 1:
            sys.exit(f"--length {length}: leaves no room after a condition of up to {settings['cond_length']} tokens")
        pairs = read_conditions(args.cond, args.n)
        rows = tokenizer([text for text, _ in pairs], add_special_tokens=False)["input_ids"]
        n_cond, more["condition"] = conditions(load_encoder(settings["encoder"], device), rows, settings | dict(length=length), device)
    print(f"{ckpt}: {len(pairs)} samples of {length} tokens, {used}", file=sys.stderr)

    def trace(t, x_pred):
        if args.trace:
            tqdm.write(f"t = {t:.3f}  {to_text(tokenizer, decode(model, x_pred[:1].float(), used['w'])[0], n_cond[0], most)}")

    start = time.time()
    tokens = sample(model, len(pairs), length, **used, noise_scale=settings["noise_scale"], progress=True, on_step=trace, **more)
    seconds = time.time() - start
    print(f"{len(pairs) * length / seconds:,.0f} tokens/s, {1000 * seconds / used['steps']:.1f} ms a step", file=sys.stderr)
    texts = [to_text(tokenizer, row, n, most) for row, n in zip(tokens, n_cond)]
    if out is None:
        return print("\n".join(texts))
    about = dict(ckpt=ckpt, data=settings.get("data"), encoder=settings["encoder"], length=length, **used)
    with out:
        for i, (text, (cond, reference)) in enumerate(zip(texts, pairs)):
            given = dict(cond=cond) if args.cond is not None else {}
            given |= dict(reference=reference) if reference is not None else {}
            out.write(json.dumps(dict(text=text, index=i, **given, **about), ensure_ascii=False) + "\n")
    Path(out.name).replace(args.out)


if __name__ == "__main__":
    main()
