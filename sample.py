"""
Text from a trained ELF: noise, Euler steps towards the clean embeddings, one decode pass (Alg. 2, 5 and 6).

    python sample.py                                  # the newest run under out/
    python sample.py --steps 64 --gamma 1 --w 3 --n 8
    python sample.py --ckpt embedded-language-flows/ELF-B-owt-torch --steps 32
    python sample.py --ckpt out/docs_cond --cond "def load_image(path)"    # or a .txt, or a .jsonl
    python sample.py --infill "Return the ___ of the given array."
    python sample.py --trace page.html                # how noise becomes text; without a file, on the terminal
"""
import functools
import os
import sys
import time

from config import sampling  # first: it sets how torch's threads wait

import torch

from assets.trace import Trace
from checkpoint import load, newest_run
from config.machine import autocast, pick_device, progress, ready_to_sample, run_program, seeded
from data.encoder import cut_conditions, embed_conditions, load_encoder, load_tokenizer, to_text
from data.infill import infill
from data.texts import read_conditions, refuse_to_overwrite, write_jsonl
from model import velocity


def time_grid(steps, schedule="logit-normal", seed=0, t_mean=-1.5, t_std=0.8):
    """Times from 0 to 1, (steps + 1,). logit-normal: sorted draws of sigmoid(N(t_mean, t_std^2)); quantile: its quantiles; uniform: even."""
    if schedule == "uniform":
        return torch.linspace(0, 1, steps + 1)
    normal = torch.randn(steps - 1, generator=seeded(seed)) if schedule == "logit-normal" else torch.special.ndtri(torch.arange(1, steps) / steps)
    return torch.cat([torch.zeros(1), torch.sigmoid(t_mean + t_std * normal).sort().values, torch.ones(1)])


def draw_noise(rngs, L, E, noise_scale):
    """(B, L, E), each row from its own generator."""
    return noise_scale * torch.stack([torch.randn(L, E, generator=rng, device=rng.device) for rng in rngs])


def flow(model, z, grid, noise, gamma, w, cond_mask=None, x_cond=None, cfg=1.0, gamma_power=0.0):
    """
    From noise to embeddings: z (B, L, E) at time 0 -> z at time 1 (Alg. 5, steps as in Alg. 6).

    grid        (N + 1,) times from 0 to 1
    noise       called once per SDE step, returns noise (B, L, E) at the scale the model was trained with, times the temperature
    gamma       how much noise is put back: 0 is the ODE; a gamma_power lets it fall over time, as gamma (1 - t)^gamma_power
    w           guidance scale
    cond_mask   (B, L, 1) bool: where a condition stands, whose embeddings x_cond (B, L, E) stay clean in z and x_sc; None without one
    cfg         guidance by the condition, at the price of a second row in the batch for each; 1 is none
    yields      for each step: the t it starts from, z after it (the last at time 1), and its x_pred as the next x_sc
    """
    z, x_sc = with_condition(z, cond_mask, x_cond), with_condition(torch.zeros_like(z), cond_mask, x_cond)
    for t, t_next in zip(grid, grid[1:]):
        if gamma > 0 and t_next < 1:                                    # SDE: step back in time first; never in the last interval
            alpha = (1 - gamma * (1 - t) ** gamma_power * (t_next - t)).clamp(0, 1)
            z = with_condition(alpha * z + (1 - alpha) * noise(), cond_mask, x_cond)
            t = alpha * t
        x_pred = predict_x(model, z, x_sc, t, w, cond_mask, cfg)
        z = with_condition(z + (t_next - t) * velocity(x_pred, z, t), cond_mask, x_cond)    # Euler
        x_sc = with_condition(x_pred, cond_mask, x_cond)
        yield t, z, x_sc


def predict_x(model, z, x_sc, t, w, cond_mask, cfg):
    """x_pred (B, L, E) at time t. Where cfg is not 1, each row runs with and without its condition, and cfg leads from the second past the first."""
    use_cfg = cond_mask is not None and cfg != 1
    if use_cfg:
        z, x_sc = (torch.cat([y, torch.where(cond_mask, 0.0, y)]) for y in (z, x_sc))
    x_pred = model(z, x_sc, z.new_full((len(z),), float(t)), z.new_full((len(z),), w))[0].float()
    if use_cfg:
        x_with, x_without = x_pred.chunk(2)
        x_pred = x_without + cfg * (x_with - x_without)                 # as on v: where x_pred counts, z is the same in both
    return x_pred


def with_condition(y, cond_mask, x_cond):
    return y if cond_mask is None else torch.where(cond_mask, x_cond, y)


def decode(model, z, w):
    """
    Embeddings (B, L, E) -> the likeliest tokens (B, L) and their probabilities: mode on, t = 1, x_sc = 0. In slices, since logits
    take L x V numbers a row.
    """
    tokens, sure = [], []
    for part in z.split(max(1, 2**27 // (z.shape[1] * model.config.vocab_size))):
        logits = model(part, torch.zeros_like(part), part.new_ones(len(part)), part.new_full((len(part),), w), n_decode=len(part))[1].float()
        best, ids = logits.max(-1)
        tokens.append(ids)
        sure.append((best - logits.logsumexp(-1)).exp())
    return torch.cat(tokens), torch.cat(sure)


@torch.no_grad()
def sample(model, n, length, steps=32, gamma=1.5, gamma_power=0.0, temperature=1.0, w=3.0, cfg=1.0, seed=0, schedule="logit-normal",
           noise_scale=2.0, t_mean=-1.5, t_std=0.8, encode_conditions=None, chunk=None, quiet=True, on_step=None, keep_part=False):
    """
    n token rows (n, length) from model (Alg. 2), and the tokens' probabilities. Row i's noise depends on (seed, i) alone, so `chunk`, the rows
    computed at a time (memory grows with it), does not change what comes out.

    temperature         times noise_scale, which is the training's, gives the noise to start from and to put back: above 1, more varied text
    encode_conditions   slice of the n rows -> their cond_mask and x_cond, as `flow` takes them
    on_step             called with t and x_pred after each step of the first chunk
    keep_part           Ctrl-C after the first chunk gives the rows that are done
    """
    device = next(model.parameters()).device
    grid = time_grid(steps, schedule, seed, t_mean, t_std)
    chunk = chunk or max(8, 2 ** (11 if device.type == "cpu" else 15) // length)  # as many as a CPU's cache holds: a fifth faster
    decoded = []
    with progress(total=n * steps, unit="step", desc="sampling", disable=quiet) as bar, autocast(device):
        for first in range(0, n, chunk):
            rows = range(first, min(n, first + chunk))
            rngs = [seeded(seed, i, device=device) for i in rows]
            noise = functools.partial(draw_noise, rngs, length, model.config.embed_dim, temperature * noise_scale)  # z at time 0, then of each step
            condition = encode_conditions(slice(first, rows.stop)) if encode_conditions else (None, None)
            try:
                for t, z, x_sc in flow(model, noise(), grid, noise, gamma, w, *condition, cfg, gamma_power):
                    bar.update(len(rows))
                    if on_step and first == 0:
                        on_step(t, x_sc)
                decoded.append([part.cpu() for part in decode(model, z, w)])
            except KeyboardInterrupt:
                if not (keep_part and decoded):
                    raise
                break
    return tuple(map(torch.cat, zip(*decoded)))


def sample_as_trained(model, settings, n, length, **how):
    """`sample` with the noise and the times that the run of these settings was trained with."""
    return sample(model, n, length, **{name: settings[name] for name in ("noise_scale", "t_mean", "t_std")}, **how)


def sample_texts(model, settings, tokenizer, n=4, length=None, conditions=None, encoder=None, **how):
    """
    n samples of a run with these settings as texts, or one for each condition (a list of token ids, of which cond_length are kept): what
    follows it, up to the first </s>. how: what else `sample` takes.
    """
    length, n_cond, most = length or settings["length"], [0] * n, None
    if conditions is not None:
        conditions = [list(condition[:settings["cond_length"]]) for condition in conditions]
        n_cond, most = [len(condition) for condition in conditions], length - settings["cond_length"]
        how["encode_conditions"] = functools.partial(embed_conditions, encoder, conditions, length, settings)
    tokens, _ = sample_as_trained(model, settings, len(n_cond), length, **how)
    return [to_text(tokenizer, row, first, most) for row, first in zip(tokens, n_cond)]


# ---------------------------------------------------------------------------------------------------------------------
# the program

def read_given(args, ckpt, settings, length, tokenizer, device):
    """A record for each text to write, and what `sample_texts` or `infill` is to write from; SystemExit if the run does not write so."""
    n = args.n or 4
    if bool(settings.get("cond_length")) != (args.cond is not None):
        sys.exit(f"--cond: {ckpt} " + ("does not write from a condition; leave it out" if args.cond is not None else
                                       "writes from a condition; give a text, a .txt or a .jsonl file"))
    if args.cond is None and args.infill is None:
        return [{}] * n, dict(n=n)
    given = dict(encoder=load_encoder(settings["encoder"], device, settings.get("encoder_weights")))
    if args.infill is not None:
        gap = args.gap or 3
        return [dict(infill=args.infill, gap=gap)] * n, given | dict(texts=[args.infill] * n, gap=gap)
    if length <= settings["cond_length"]:
        sys.exit(f"--length {length}: leaves no room after a condition of up to {settings['cond_length']} tokens")
    records = read_conditions(args.cond, args.n)
    return records, given | dict(conditions=cut_conditions(tokenizer, records, settings["cond_length"]))


def main(argv=None):
    args = sampling.sample_arguments(argv, __doc__)
    for option in ("out", "trace"):
        if path := getattr(args, option):
            refuse_to_overwrite(f"--{option}", path, args.force)
    ckpt, device = args.ckpt or newest_run(), pick_device(args.device)
    model, settings = load(ckpt, device)
    tokenizer = load_tokenizer(settings["encoder"], settings.get("tokenizer"))
    length = args.length or settings["length"]
    if length > settings["length"]:
        print(f"--length {length}: longer than the {settings['length']} tokens it was trained on; expect worse text", file=sys.stderr)
    used = sampling.sampler_settings(args, settings) | dict(seed=args.seed)
    records, given = read_given(args, ckpt, settings, length, tokenizer, device)
    ready_to_sample(model, device, len(records) * length * used["steps"])
    print(f"{ckpt}: {len(records)} samples of {length} tokens, {used}", file=sys.stderr)
    n_cond = list(map(len, given.get("conditions", [[]] * len(records))))
    trace = Trace(functools.partial(decode, model, w=used["w"]), tokenizer, n_cond, args.trace) if args.trace is not None else None
    quiet = args.trace == "" and sys.stdout.isatty()  # the trace has the terminal to itself
    write = sample_texts if args.infill is None else functools.partial(infill, sample_as_trained)
    start = time.time()
    texts = write(model, settings, tokenizer, length=length, **given, **used, quiet=quiet, on_step=trace, keep_part=True)
    seconds = time.time() - start
    if not texts:  # Ctrl-C before the first was whole
        raise KeyboardInterrupt
    print(f"{len(texts) * length / seconds:,.0f} tokens/s, {1000 * seconds / used['steps']:.1f} ms a step", file=sys.stderr)
    if len(texts) < len(records):
        print(f"interrupted: these are the first {len(texts)} samples of {len(records)}", file=sys.stderr)
    if args.out is None:
        print("\n".join(texts))
    else:
        about = dict(ckpt=ckpt, data=settings.get("data"), encoder=settings["encoder"], tokenizer=settings.get("tokenizer"), length=length,
                     run_length=settings["length"], cond_length=settings.get("cond_length", 0), **used)
        write_jsonl(args.out, [dict(text=text, index=i, **record, **about) for i, (text, record) in enumerate(zip(texts, records))])
    if args.trace:
        trace.write(f"{os.path.basename(ckpt)}: " + ", ".join(f"{name} {value}" for name, value in used.items()))


if __name__ == "__main__":
    run_program(main)
