"""
Trains ELF: flow matching in the embedding space of a frozen encoder, and cross-entropy at t = 1 (Alg. 1, 3 and 4).

    python train.py                                             # config/docs.py: offline, minutes on a laptop
    python train.py config/docs.py --steps=500 --batch_size 32  # any setting of config/__init__.py, by --key=value or --key value
    torchrun --nproc_per_node=8 train.py config/owt_b.py        # the paper's ELF-B

A run lives in out/<name>: ckpt_<step>.pt (the newest few), best.pt (the best by validation) and log.jsonl. The same command goes on
where a run stopped, however that was, and ends with the same weights; --fresh moves the old run aside and starts anew.
"""
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from checkpoint import State, locked, record, resume
from config import ROOT, configure
from config.machine import Clock, StopSignal, autocast, barrier, compile_blocks, describe, max_over_processes, pick_device, print0, rank, world_size
from data.encoder import condition_mask, embed, load_data, to_text
from data.rows import batch_rows
from model import ELF, ELFConfig, velocity
from sample import sample_texts, seeded


# ---------------------------------------------------------------------------------------------------------------------
# the losses

def split_rows(B, config):
    """B rows as three slices, by position since rows are shuffled: decode, self-conditioned and plain denoise rows."""
    n_dec, n_sc = round(B * config.decode_share), round(B * config.self_cond_share)
    if min(n_dec, n_sc, B - n_dec - n_sc) < 1:
        sys.exit(f"{B} rows a micro-batch: too few for decode_share = {config.decode_share:g} and self_cond_share = {config.self_cond_share:g}; "
                 f"they would be {n_dec} decode, {n_sc} self-conditioned, {B - n_dec - n_sc} plain rows, and each kind needs one")
    return slice(0, n_dec), slice(n_dec, n_dec + n_sc), slice(n_dec + n_sc, B)


def draw(B, L, E, n_dec, config, rng):
    """Everything random in one step but `drop`: t (B,), w (B,), eps (B, L, E) at unit scale, p (n_dec, L, 1)."""
    to = dict(generator=rng, device=rng.device)
    w = (1 + config.w_min) * ((1 + config.w_max) / (1 + config.w_min)) ** torch.rand(B, **to) - 1    # log-uniform in 1 + w
    t = torch.sigmoid(config.t_mean + config.t_std * torch.randn(B, **to))
    eps = torch.randn(B, L, E, **to)
    p = torch.sigmoid(config.decode_mean + config.decode_std * torch.randn(n_dec, L, 1, **to))
    return dict(t=t, w=w, eps=eps, p=p)


def losses(model, x, ids, cond_mask, kinds, t, w, eps, p, noise_scale, decode_noise):
    """
    The losses of one batch, token by token: Alg. 1, of which Alg. 3 (denoise) and Alg. 4 (decode) are the two branches.

    x          (B, L, E)       clean embeddings; 0 where a condition is dropped
    ids        (B, L)          their tokens
    cond_mask  (B, L, 1) bool  the positions of a condition: denoising leaves them clean, and no loss counts there
    kinds      three slices of the batch, as in `split_rows`
    t, w, eps, p               as in `draw`
    returns    for decode, self-conditioned and plain rows, a loss (rows, L) and where it counts (rows, L) bool
    """
    decode, sc, plain = kinds
    denoise = slice(sc.start, plain.stop)
    t = torch.cat([torch.ones_like(t[decode]), t[denoise]])
    t3 = t[:, None, None]                                                                   # broadcasts to (B, L, E)
    z_decode = p * x[decode] + (1 - p) * decode_noise * eps[decode]                         # Alg. 4: each token its own p
    z_denoise = t3[denoise] * x[denoise] + (1 - t3[denoise]) * noise_scale * eps[denoise]   # Alg. 3: each row its own t
    z, x_sc = torch.cat([z_decode, z_denoise]), torch.zeros_like(x)
    for y in (z, x_sc):                                                                     # denoising keeps a condition clean
        y[denoise] = torch.where(cond_mask[denoise], x[denoise], y[denoise])

    with torch.no_grad():                                                                   # Alg. 3: a first guess, without x_sc
        x_u = getattr(model, "module", model)(z[sc], x_sc[sc], t[sc], w[sc])[0].float()
    x_sc[sc] = torch.where(cond_mask[sc], x[sc], x_u)

    x_pred, logits = model(z, x_sc, t, w, n_decode=decode.stop)                             # one forward for both branches
    x_pred_sc, x_pred_plain = x_pred.float().tensor_split([len(x_u)])

    ce = F.cross_entropy(logits.float().mT, ids[decode], reduction="none")                  # Eq. 2

    v_pred, v = (velocity(y, z[plain], t3[plain]) for y in (x_pred_plain, x[plain]))
    mse_plain = (v_pred - v).square().mean(2)                                               # Eq. 1

    v_pred, v, v_u = (velocity(y, z[sc], t3[sc]) for y in (x_pred_sc, x[sc], x_u))
    # Where v_pred = v + (1 - 1/w) (v_pred - v_u) comes to rest, v_pred = v_u + w (v - v_u): that is guidance of scale w, with a
    # condition that plain text has not got, the network's own first guess.
    guided = v + (1 - 1 / w[sc, None, None]) * (v_pred.detach() - v_u)                      # Eq. 3
    mse_sc = (v_pred - guided).square().mean(2)

    counts = ~cond_mask[..., 0]
    return (ce, counts[decode]), (mse_sc, counts[sc]), (mse_plain, counts[plain])


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def objective(parts, config):
    """
    0.2 CE + 0.4 MSE (self-conditioned) + 0.4 MSE (plain) of what `losses` returns, each a mean over all positions that count: fixed
    shares, so that rounding the numbers of rows does not change it.
    """
    shares = config.decode_share, config.self_cond_share, 1 - config.decode_share - config.self_cond_share
    return sum(share * masked_mean(*part) for share, part in zip(shares, parts))


def batch_losses(model, data, rows, rng, config):
    """`losses` of rows as `Rows.batch` gives them: encode (the encoder is frozen), draw the noise, run the network."""
    ids, n_cond = (torch.from_numpy(array).to(rng.device) for array in rows)
    kinds, cond_mask = split_rows(len(ids), config), condition_mask(n_cond, config.length)
    with autocast(rng.device, config.bf16):
        if config.cond_length:
            drop = torch.rand(len(ids), generator=rng, device=rng.device) < config.cond_drop
            x = embed(data.encoder, ids, data.x_mean, data.x_std, cond_mask, drop)
        else:
            x = embed(data.encoder, ids, data.x_mean, data.x_std)
        return losses(model, x, ids, cond_mask, kinds, **draw(*x.shape, kinds[0].stop, config, rng),
                      noise_scale=config.noise_scale, decode_noise=config.decode_noise)


# ---------------------------------------------------------------------------------------------------------------------
# the optimisers

def orthogonal(G):
    """
    The matrices G (n, rows, columns), each with its singular values brought near 1: five Newton-Schulz steps in bfloat16.

    A step is X <- Q X with Q = a + b A + c A^2, A = X X^T, and Q X has the A of Q A Q. So three steps, then two, are first multiplied
    together as the small square matrices they are, and only their product P meets X: a quarter less work than step by step for the
    matrices of a block. All five at once would lose bfloat16's few digits.
    """
    X = G.bfloat16()
    X = X.mT if X.shape[1] > X.shape[2] else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for steps in (3, 2):
        A = X @ X.mT
        P = Q = newton_schulz(A)
        for _ in range(steps - 1):
            A = Q @ A @ Q
            Q = newton_schulz(A)
            P = Q @ P
        X = P @ X
    return X.mT if G.shape[1] > G.shape[2] else X


def newton_schulz(A, a=3.4445, b=-4.7750, c=2.0315):
    """The polynomial a + b A + c A^2 of the symmetric matrices A (n, m, m); the coefficients are the paper's."""
    Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
    Q.diagonal(dim1=1, dim2=2).add_(a)
    return Q


class Muon(torch.optim.Optimizer):
    """
    Nesterov momentum, made orthogonal; matrices of one shape are worked on together, the largest first. Of several processes each works
    on its share of the matrices, and all receive all updates. A matrix that is taller than wide moves sqrt(rows / columns) further.
    """

    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        params = self.param_groups[0]["params"]
        largest_first = sorted(range(len(params)), key=lambda i: (params[i].numel(), params[i].shape), reverse=True)
        self.share = largest_first[rank()::world_size()]  # the numbers of this process' matrices

    @torch.no_grad()
    def step(self):
        [group] = self.param_groups
        params, grads = group["params"], [param.grad for param in group["params"]]
        momenta = [self.state[param].setdefault("momentum_buffer", torch.zeros_like(param)) for param in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov, in the gradients' own memory
        updates = torch.zeros(sum(param.numel() for param in params), dtype=torch.bfloat16, device=params[0].device)
        views = [flat.view_as(param) for flat, param in zip(updates.split([param.numel() for param in params]), params)]
        for _, same in groupby(self.share, key=lambda i: params[i].shape):
            same = list(same)
            torch._foreach_copy_([views[i] for i in same], list(orthogonal(torch.stack([grads[i] for i in same]))))
        if world_size() > 1:
            dist.all_reduce(updates)  # every matrix is 0 in all processes but one
        for param, update in zip(params, views):
            param.add_(update, alpha=-group["lr"] * max(1, param.shape[0] / param.shape[1]) ** 0.5)


def optimizers(model, config):
    """Muon on every 2-D weight, the unembedding included; Adam on biases, norms and control tokens."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    return [Muon(matrices, config.lr), torch.optim.Adam(rest, lr=config.lr, fused=True)]


# ---------------------------------------------------------------------------------------------------------------------
# the loop

def train_step(net, state, data, config, clock):
    """
    One optimiser step: the mean gradient of all micro-batches, clipped; Muon and Adam; the moving average of the weights.
    returns   loss, mse and ce of this process' last micro-batch, and the norm of the gradient
    """
    clock.start(state.step)
    B, params = config.micro_batch(world_size()), list(state.model.parameters())
    order = batch_rows(len(data.train), state.step, config.batch_size, config.seed)
    for micro in range(config.accum):
        first, rng = (rank() * config.accum + micro) * B, seeded(config.seed, state.step, rank(), micro, device=params[0].device)
        with net.no_sync() if world_size() > 1 and micro < config.accum - 1 else nullcontext():
            parts = batch_losses(net, data, data.train.batch(order[first:first + B]), rng, config)
            loss = objective(parts, config)
            (loss / config.accum).backward()
        clock.lap("gradient")
    norm = torch.nn.utils.clip_grad_norm_(params, config.clip)
    state.step += 1
    for opt in state.optimizers:
        for group in opt.param_groups:
            group["lr"] = config.lr * min(1, state.step / max(1, config.warmup))
        opt.step()
        opt.zero_grad()
    torch._foreach_lerp_(state.ema, [param.detach() for param in params], 1 - min(config.ema, state.step / (state.step + 9)))
    clock.stop("optimiser")
    (ce, _), (mse_sc, _), (mse_plain, _) = parts
    return dict(loss=loss.detach(), mse=torch.cat([mse_sc, mse_plain]).mean().detach(), ce=ce.mean().detach()), norm


def train(state, data, config, stop):
    """The steps that are left. Returns None, or the line that says why the run failed."""
    net = DistributedDataParallel(state.model) if world_size() > 1 else state.model
    clock, stop.finish_step = Clock(state.model, data.encoder, config, state.step), world_size() > 1
    bad = torch.zeros((), dtype=torch.int64, device=data.encoder.device)  # the first step whose gradient is not finite, in all processes
    saved_step, saved_at = state.step, time.monotonic()
    with tqdm(total=config.steps, initial=state.step, disable=rank() > 0, dynamic_ncols=True) as bar:
        while state.step < config.steps:
            figures, norm = train_step(net, state, data, config, clock)
            bad = torch.where((bad == 0) & ~norm.isfinite(), state.step, bad)
            bar.update()
            if config.bench:
                continue
            stop.finish_step = True
            asked = max_over_processes(2 if stop.seen else time.monotonic() - saved_at > 60 * config.save_minutes)  # 2: to stop, 1: to save
            saving = asked > 0 or config.is_due("save", state.step)
            if (saving or config.is_due("log", state.step)) and bad:
                return (f"loss or gradient is not finite at step {int(bad)}; it was not saved, the checkpoints before it are kept: "
                        "try a smaller --lr or a longer --warmup")
            if rank() == 0:
                try:
                    if record(state, observe(state, data, config, figures, clock, bar), saving, config.keep):
                        saved_step = state.step
                except (OSError, RuntimeError) as e:
                    unsaved = f"step {state.step}: not saved ({' '.join(str(e).split())[:100]}); what was saved before is kept: free some disk space"
                    bar.write(f"{unsaved}; the next save tries again")
            if saving:
                saved_at = time.monotonic()
            if asked == 2:
                break
    clock.report()
    if rank() == 0 and saved_step < state.step and not config.bench:
        return f"{unsaved}; the same command goes on from step {saved_step}"
    if state.step < config.steps:
        print0(f"stopped after step {state.step}, which is saved; the same command goes on from there")


def main(argv=None):
    """Trains as the settings in argv say, under torchrun as one of several processes; SystemExit with one line if it cannot go on."""
    config = configure(sys.argv[1:] if argv is None else argv, __doc__)
    config = replace(config, steps=config.bench or config.steps)
    device = pick_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    first, folder = rank() == 0, ROOT / config.out / config.name
    with StopSignal() as stop:
        split_rows(config.micro_batch(world_size()), config)  # too few rows are found out now, not after minutes of preparation
        data = load_data(config, device)
        with locked(folder, config.fresh) if first and not config.bench else nullcontext():
            barrier()
            failed = train(begin(config, data, folder), data, config, stop)
    if dist.is_initialized():  # train has let go of DDP, which holds it: the other way round, gloo's thread and this one may wait for each other
        dist.destroy_process_group()
    if failed:
        sys.exit(failed if first else 1)


def begin(config, data, folder):
    """The State to start from: new weights, those of init_from, or the run's newest checkpoint."""
    device = data.encoder.device
    torch.manual_seed(config.seed)
    model = ELF(ELFConfig(config.depth, config.dim, config.heads, data.encoder.config.d_model, len(data.tokenizer), config.bottleneck)).to(device)
    settings = asdict(config) | {key: data.meta[key] for key in ("x_mean", "x_std", "fingerprint")}
    state = State(folder, settings, describe(config, device), model,
                  [param.detach().clone() for param in model.parameters()], optimizers(model, config))
    if not config.bench:
        resume(state, config)
    model.recompute = config.recompute
    if config.compile and (config.steps >= 500 or config.bench):  # half a minute, which shorter runs do not earn back
        compile_blocks(model, device)  # a resumed run as its first part, to end as one
    size, on = sum(param.numel() for param in model.parameters()), f", from step {state.step} on" * (state.step > 0)
    print0(f"{size:,} parameters, {len(data.train):,} training rows of {config.length} ({data.meta['fingerprint']}), {config.steps} steps of "
           f"{config.batch_size} rows, {device.type}{on}")
    return state


# ---------------------------------------------------------------------------------------------------------------------
# what the loop asks now and then

def observe(state, data, config, figures, clock, bar):
    """What is due after this step, for the log: its losses and the speed, the losses on validation rows, samples; {} where nothing is."""
    entry = {}
    if config.is_due("log", state.step):
        entry = {name: value.item() for name, value in figures.items()}
        entry["tokens_per_s"] = rate = clock.rate(state.step) * config.batch_size * config.length
        bar.set_postfix_str(f"loss {entry['loss']:.3f} mse {entry['mse']:.3f} ce {entry['ce']:.3f} {rate:,.0f} tok/s")
    if config.is_due("val", state.step):
        with state.averaged() as model:
            entry |= validate(model, data, config)
        bar.write(f"step {state.step}: val mse {entry['val_mse']:.4f}, val ce {entry['val_ce']:.4f}")
    if config.is_due("sample", state.step):
        with state.averaged() as model:
            entry["samples"] = show_samples(model, data, state.settings)
        bar.write("\n".join(f"  | {text}" for text in entry["samples"]))
    return entry


@torch.no_grad()
def validate(model, data, config):
    """MSE of the plain rows and CE, on the same validation rows with the same noise every time."""
    B, total = config.micro_batch(world_size()), np.zeros(2)
    count = -(-min(config.val_rows, len(data.val)) // B)
    for i in range(count):
        rows = data.val.batch(np.arange(i * B, (i + 1) * B) % len(data.val))
        ce, _, mse_plain = batch_losses(model, data, rows, seeded(1234, i, device=data.encoder.device), config)
        total += [masked_mean(*mse_plain).item(), masked_mean(*ce).item()]
    return dict(zip(("val_mse", "val_ce"), (total / count).round(5).tolist()))


def show_samples(model, data, settings):
    """A few samples; of pairs: those of the first validation rows, as `condition -> sample | target`."""
    how = {name: settings[f"sample_{name}"] for name in ("steps", "gamma", "w", "cfg")} | dict(seed=settings["seed"])
    if not settings["cond_length"]:
        return sample_texts(model, settings, data.tokenizer, settings["sample_rows"], **how)
    rows = [(row[:n], row[n:]) for row, n in zip(*data.val.batch(range(min(settings["sample_rows"], len(data.val)))))]
    texts = sample_texts(model, settings, data.tokenizer, conditions=[condition for condition, _ in rows], encoder=data.encoder, **how)
    return [f"{to_text(data.tokenizer, condition)} -> {text} | {to_text(data.tokenizer, target)}" for (condition, target), text in zip(rows, texts)]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped before a step was done; the same command starts again", flush=True)
        os._exit(0)  # whatever it was at: threads of torch.compile, a download, ...
