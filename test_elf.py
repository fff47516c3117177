"""The tests. Golden numbers were computed once with the reference implementation, in float32."""
import argparse
import functools
import gzip
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import config  # noqa: F401  before torch: it says how its threads wait
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import data.files
import data.scratch
import data.texts
import eval as evaluate
import train
from assets.trace import Trace
from checkpoint import load
from config import Config, config_files, configure, sampling
from config.machine import StopSignal, compile_blocks, matrix_work, newton_schulz_work, seeded
from data.docs import prepare
from data.encoder import condition_mask, embed, embed_conditions, load_encoder, load_tokenizer, random_gaps, to_ids, to_text
from data.infill import fill, gap_rows, infill
from data.rows import open_data
from model import ELF, PREFIX, Block, ELFConfig, as_x, rotary_table, rotate, velocity
from sample import decode, flow, sample, time_grid
from sample import main as sample_main

ROOT = Path(__file__).resolve().parent
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which programs started in the background ignore, and so their children
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
TINY = dict(depth=2, dim=32, heads=2, embed_dim=16, vocab_size=24, bottleneck=8)
E, L, V = 16, 8, 24


def wave(shape, a, b):
    return torch.from_numpy(1.5 * np.sin(a * np.arange(np.prod(shape)) + b)).float().view(shape)


def close(value, golden):
    return torch.allclose(torch.as_tensor(value).float(), torch.tensor(golden), rtol=2e-5, atol=5e-6)


def corners(y, first_position=0):
    """The three numbers that the golden tables quote: row 0's first values, row 1's last, and the mean magnitude."""
    return y[0, first_position, :3], y[1, -1, -3:], y.abs().mean()


def reference_shapes(d=32, f=85, depth=2, hd=16, bottleneck=8):
    shapes = {"self_cond_proj.weight": (E, 2 * E), "self_cond_proj.bias": (E,), "text_proj.proj1.weight": (bottleneck, E),
              "text_proj.proj2.weight": (d, bottleneck), "text_proj.proj2.bias": (d,),
              "t_emb_tokens": (1, 4, d), "self_cond_cfg_tokens": (1, 4, d), "mode_tokens": (1, 4, d),
              "final_layer.norm_final.weight": (d,), "final_layer.linear.weight": (E, d), "final_layer.linear.bias": (E,),
              "proj_kernel": (d, E), "proj_bias": (E,), "unembed_kernel": (E, V), "unembed_bias": (V,)}
    for name in ("t_embedder", "self_cond_cfg_embedder"):
        shapes |= {f"{name}.mlp_0.weight": (d, 256), f"{name}.mlp_0.bias": (d,),
                   f"{name}.mlp_2.weight": (d, d), f"{name}.mlp_2.bias": (d,)}
    for i in range(depth):
        b = f"blocks.{i}."
        shapes |= {b + "norm1.weight": (d,), b + "norm2.weight": (d,), b + "attn.q_norm.weight": (hd,), b + "attn.k_norm.weight": (hd,),
                   b + "attn.qkv.weight": (3 * d, d), b + "attn.qkv.bias": (3 * d,), b + "attn.proj.weight": (d, d),
                   b + "attn.proj.bias": (d,), b + "mlp.w12.weight": (2 * f, d), b + "mlp.w12.bias": (2 * f,),
                   b + "mlp.w3.weight": (d, f), b + "mlp.w3.bias": (d,)}
    return shapes


def golden_weights():
    params = {}
    for k, (name, shape) in enumerate(sorted(reference_shapes().items())):
        y = np.sin(12.9898 * np.arange(np.prod(shape)) + 78.233 * k) * 43758.5453
        u = y - np.floor(y) - 0.5
        value = 1 + 0.4 * u if "norm" in name else 0.4 * u if len(shape) == 1 else u if len(shape) == 3 else 3 * u / shape[1] ** 0.5
        params[name] = torch.from_numpy(value).float().view(shape)
    return params


@pytest.fixture(scope="session")
def golden_file(tmp_path_factory):
    """The golden weights as a file in the reference's format."""
    file = tmp_path_factory.mktemp("reference") / "checkpoint_5"
    params = {"_orig_mod." + k: v for k, v in golden_weights().items()}
    torch.save({"params": {k: v + 1 for k, v in params.items()}, "ema_params1": params, "opt_state": {"args": argparse.Namespace(lr=np.float64(0.002)), "order": np.arange(3)},
                "step": np.int64(5), "epoch": 0}, file)
    return file


@pytest.fixture(scope="session")
def golden(golden_file):
    model, settings = load(golden_file)
    assert settings["encoder"] == "t5-small" and settings["length"] == 1024 and settings["noise_scale"] == 2.0
    return model


X, EPS, S = wave((2, L, E), 0.7, 0), wave((2, L, E), 1.3, 0.5), wave((2, L, E), 0.31, 1)
NONE = torch.zeros(2, L, 1, dtype=torch.bool)  # no condition
T, W = torch.tensor([0.3, 0.8]), torch.tensor([1.5, 3.0])
IDS = (7 * torch.arange(2 * L) % 24).view(2, L)
P = torch.sigmoid(0.8 * wave((2, L, 1), 0.9, 0.2) + 0.8)
Z = T[:, None, None] * X + (1 - T[:, None, None]) * 2 * EPS


# ---------------------------------------------------------------------------------------------------------------------
# golden values

@torch.no_grad()
def test_network_golden(golden):
    x_pred, logits = golden(Z, S, T, W)
    assert logits.shape == (0, L, V)
    for value, want in zip(corners(x_pred), ([1.056997, 0.274448, 0.531551], [1.204682, 0.210441, -1.314764], 0.724737)):
        assert close(value, want)
    x_pred, logits = golden(Z, torch.zeros_like(Z), torch.ones(2), W, n_decode=2)
    assert x_pred.shape == (0, L, E)
    for value, want in zip(corners(logits), ([-0.309268, 1.541424, -0.233249], [-0.285330, 0.430183, 0.192945], 0.574466)):
        assert close(value, want)


def row_losses(model, n_dec, n_sc, x, ids, cond_mask, noise_scale=2.0, decode_noise=5.0, teacher=None, **draws):
    """train.losses as a mean for each row: mse of the denoise rows, ce of the decode rows."""
    kinds = slice(0, n_dec), slice(n_dec, n_dec + n_sc), slice(n_dec + n_sc, len(x))
    parts = train.losses(model, x, ids, cond_mask, kinds, **draws, noise_scale=noise_scale, decode_noise=decode_noise, teacher=teacher)
    ce, mse_sc, mse_plain = ((values * counts).sum(1) / counts.sum(1) for values, counts in parts)
    return torch.cat([mse_sc, mse_plain]), ce


def golden_losses(model, n_dec, n_sc, w=W):
    return row_losses(model, n_dec, n_sc, X, IDS, NONE, t=T, w=w, eps=EPS, p=P[:n_dec])


def loss_of(model, x, ids, cfg, draws):
    """The training objective of a batch without conditions, its rows divided as cfg says."""
    kinds = train.split_rows(len(x), cfg)
    return train.objective(train.losses(model, x, ids, NONE[:1].expand(len(x), L, 1), kinds, **draws, noise_scale=2.0, decode_noise=5.0), cfg)


def test_losses_golden(golden):
    assert close(golden_losses(golden, 0, 2)[0], [3.839000, 47.918350])
    assert close(golden_losses(golden, 0, 0)[0], [3.884666, 53.103138])
    assert close(golden_losses(golden, 2, 0)[1], [3.889544, 3.689360])


@pytest.mark.parametrize("gamma, w, cfg, first, last, mean", [
    (0.0, 3.0, 1.0, [0.592020, -0.126542, 0.766406], [2.115302, -0.004808, -1.311954], 0.805458),
    (1.5, 3.0, 1.0, [0.133694, -0.652191, 0.235723], [2.268517, -0.376488, -1.652228], 0.790823),
    (0.0, 1.0, 2.0, [0.569505, 0.178250, 0.955029], [1.955222, -0.070467, -1.346897], 0.868474)])
@torch.no_grad()
def test_samplers_golden(golden, gamma, w, cfg, first, last, mean):
    draws = iter(range(1, 10))

    def noise():
        return 2 * torch.from_numpy(np.sin(1.7 * np.arange(2 * L * E) + 0.3 * next(draws))).float().view(2, L, E)

    cond = condition_mask(torch.tensor([3, 2]), L) if cfg != 1 else None
    *_, (_, z, _) = flow(golden, 2 * EPS, torch.tensor([0, 0.1, 0.25, 0.5, 1]), noise, gamma, w, cond, X, cfg)
    assert close(z[0, -1, :3], first) and close(z[1, -1, -3:], last) and close(z.abs().mean(), mean)
    tokens = torch.full((2, L), 10)
    tokens[1, 2] = 11 if cfg != 1 else 10
    assert torch.equal(decode(golden, z, w)[0], tokens)


# ---------------------------------------------------------------------------------------------------------------------
# the network

@pytest.mark.parametrize("size, count", [("b", 104_579_940), ("m", 342_540_036), ("l", 652_103_332)])
def test_parameter_counts(size, count):
    cfg = configure([f"config/owt_{size}.py"])
    with torch.device("meta"):
        assert sum(p.numel() for p in ELF(ELFConfig(cfg.depth, cfg.dim, cfg.heads, 512, 32100, cfg.bottleneck)).parameters()) == count


def test_rotary():
    cos, sin = rotary_table(20, 8, "cpu")
    q, k = torch.randn(8), torch.randn(8)
    at = lambda x, i: rotate(x.expand(PREFIX + 20, 8), cos, sin)[i]  # noqa: E731
    assert torch.equal(at(q, PREFIX - 1), q)                                # control tokens are not rotated
    assert torch.allclose(at(q, PREFIX + 3).norm(), q.norm())
    assert torch.allclose(at(q, PREFIX + 3) @ at(k, PREFIX + 7), at(q, PREFIX + 12) @ at(k, PREFIX + 16), atol=1e-5)  # relative
    assert not torch.allclose(at(q, PREFIX + 3) @ at(k, PREFIX + 7), at(q, PREFIX + 3) @ at(k, PREFIX + 8), atol=1e-3)


def test_both_attention_paths_agree(golden):
    z = torch.randn(2, 500, E, generator=seeded(0))                         # 512 positions: plain softmax
    more = torch.cat([z, z[:, :1]], dim=1)                                  # 513: the fused kernel
    q = torch.randn(1, 2, 513, 16, generator=seeded(1))
    with torch.no_grad():
        attn = golden.blocks[0].attn
        h = torch.randn(2, 513, 32, generator=seeded(1))
        tables = rotary_table(501, 16, "cpu")
        fused = attn(h, *tables)
        qkv = attn.qkv(h).view(2, 513, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = (rotate(n(x), *tables) for n, x in ((attn.q_norm, qkv[0]), (attn.k_norm, qkv[1])))
        plain = attn.proj(((q @ k.mT / 4).softmax(-1) @ qkv[2]).transpose(1, 2).reshape(2, 513, 32))
        assert torch.allclose(fused, plain, atol=1e-5)
        assert golden(more, more, T, W)[0].shape == more.shape


def test_initial_prediction_is_zero():
    assert ELF(ELFConfig(**TINY))(Z, S, T, W)[0].abs().max() == 0


def test_gradients_reach_every_parameter(golden):
    model = ELF(golden.config)
    model.load_state_dict(golden.state_dict())
    mse, ce = golden_losses(model, 1, 0)
    (mse.mean() + ce.mean()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


# ---------------------------------------------------------------------------------------------------------------------
# the losses

def test_velocity_identity():
    x_pred, c = X, (1 - T)[:, None, None]
    assert torch.allclose((x_pred - Z) / c, X - 2 * EPS, atol=1e-5)         # v = x - eps where the clamp does not act


def test_guidance_one_is_no_guidance(golden):
    def own_guess(n_sc, w):  # the self-conditioned loss with the target of plain rows
        c = (1 - T)[:, None, None].clamp(min=0.05)
        x_u = golden(Z, torch.zeros_like(Z), T, w)[0].detach()
        x_pred = golden(Z, x_u, T, w)[0]
        return (((x_pred - Z) / c - (X - Z) / c) ** 2).mean((1, 2))
    assert torch.allclose(golden_losses(golden, 0, 2, w=torch.ones(2))[0], own_guess(2, torch.ones(2)), rtol=1e-5)
    assert not torch.allclose(golden_losses(golden, 0, 2)[0], own_guess(2, W), rtol=1e-3)


def draws(B, n_dec, cfg, seed=0):
    return train.draw(B, L, E, n_dec, cfg, seeded(seed))


def test_split_equals_three_forwards(golden):
    """Against the reference's way, written out: three forwards, all on all rows, masks choosing what counts."""
    B, n_dec, n_sc = 10, 2, 4
    cfg = Config()
    x, ids = torch.randn(B, L, E, generator=seeded(1)), torch.randint(V, (B, L), generator=seeded(2))
    r = draws(B, n_dec, cfg, seed=3)
    mse, ce = row_losses(golden, n_dec, n_sc, x, ids, NONE[:1].expand(B, L, 1), **r)
    ours = torch.autograd.grad(loss_of(golden, x, ids, cfg, r), golden.parameters())

    is_dec = torch.arange(B) < n_dec
    is_sc = (torch.arange(B) >= n_dec) & (torch.arange(B) < n_dec + n_sc)
    t = r["t"].clone()
    t[is_dec] = 1
    p = torch.zeros(B, L, 1)
    p[:n_dec] = r["p"]
    t3 = t[:, None, None]
    z = torch.where(is_dec[:, None, None], p * x + (1 - p) * 5 * r["eps"], t3 * x + (1 - t3) * 2 * r["eps"])
    zero = torch.zeros_like(z)
    with torch.no_grad():
        x_u = golden(z, zero, t, r["w"])[0]                                       # first forward: unconditional
        cond = golden(z, x_u, t, r["w"])[0]                                       # second: conditional, for the target
    x_sc = torch.where(is_sc[:, None, None], x_u, zero)
    denoised = golden(z, x_sc, t, r["w"])[0]                                      # third, with gradient, in each mode
    logits = golden(z, x_sc, t, r["w"], n_decode=B)[1]
    c = (1 - t3).clamp(min=0.05)
    v, v_u, v_c = (x - z) / c, (x_u - z) / c, (cond - z) / c
    target = torch.where(is_sc[:, None, None], v + (1 - 1 / r["w"][:, None, None]) * (v_c - v_u), v)
    all_mse = (((denoised - z) / c - target) ** 2).mean((1, 2))
    all_ce = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)
    total = 0.2 * all_ce[is_dec].mean() + 0.4 * all_mse[is_sc].mean() + 0.4 * all_mse[~is_sc & ~is_dec].mean()
    theirs = torch.autograd.grad(total, golden.parameters())
    assert torch.allclose(mse, all_mse[~is_dec], rtol=1e-6, atol=1e-6) and torch.allclose(ce, all_ce[is_dec], rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * b.abs().max().item() + 1e-6)


def test_draws_follow_the_paper():
    r = draws(20_000, 4000, Config())
    logit = torch.logit(r["t"])
    assert abs(logit.mean() + 1.5) < 0.02 and abs(logit.std() - 0.8) < 0.02
    assert r["w"].min() >= 0.5 and r["w"].max() <= 5 and abs(torch.log(1 + r["w"]).mean() - np.log(9) / 2) < 0.01
    p = torch.logit(r["p"])
    assert abs(p.mean() - 0.8) < 0.02 and abs(p.std() - 0.8) < 0.02 and r["p"].shape == (4000, L, 1)
    assert abs(r["eps"].std() - 1) < 0.01


def test_kinds_do_not_change_the_objective():
    cfg = Config()
    for B in (5, 7, 13, 64):
        parts = [(torch.ones(B, L)[rows], torch.ones(B, L, dtype=torch.bool)[rows]) for rows in train.split_rows(B, cfg)]
        assert abs(train.objective(parts, cfg) - 1) < 1e-6
    with pytest.raises(SystemExit, match="too few"):
        train.split_rows(2, cfg)


def test_overfits_one_batch_and_decodes_it():
    torch.manual_seed(0)
    cfg = Config(lr=0.01)
    model = ELF(ELFConfig(**TINY | dict(dim=64, bottleneck=32)))
    table = torch.randn(V, E, generator=seeded(1))
    ids = torch.randint(V, (10, L), generator=seeded(2))
    x, opts = table[ids], train.optimizers(model, cfg)
    for step in range(400):
        mse, ce = row_losses(model, 5, 3, x, ids, NONE[:1].expand(10, L, 1), **draws(10, 5, cfg, step), decode_noise=0.2)
        (0.2 * ce.mean() + 0.4 * mse[:3].mean() + 0.4 * mse[3:].mean()).backward()
        for opt in opts:
            opt.param_groups[0]["lr"] = cfg.lr * (1 - step / 400)  # to rest at the end
            opt.step()
            opt.zero_grad()
        order = torch.randperm(10, generator=seeded(step))
        x, ids = x[order], ids[order]
    with torch.no_grad():
        logits = model(x, torch.zeros_like(x), torch.ones(10), torch.ones(10), n_decode=10)[1]
        assert F.cross_entropy(logits.transpose(1, 2), ids) < 0.1
        assert torch.equal(decode(model, x, 1.0)[0], ids)


# ---------------------------------------------------------------------------------------------------------------------
# sampling

def test_grid():
    grid = time_grid(32, seed=1)
    assert len(grid) == 33 and grid[0] == 0 and grid[-1] == 1 and (grid.diff() > 0).all()
    assert torch.equal(grid, time_grid(32, seed=1)) and not torch.equal(grid, time_grid(32, seed=2))
    assert torch.allclose(time_grid(4, "uniform"), torch.tensor([0, 0.25, 0.5, 0.75, 1]))
    assert torch.equal(time_grid(1), torch.tensor([0.0, 1.0])) and torch.equal(time_grid(1, "quantile"), torch.tensor([0.0, 1.0]))
    quantiles = time_grid(32, "quantile", seed=1, t_mean=-1.0, t_std=0.5)
    scores = (quantiles[1:-1].logit() + 1) / 0.5
    assert torch.equal(quantiles, time_grid(32, "quantile", seed=2, t_mean=-1.0, t_std=0.5)) and (quantiles.diff() > 0).all()
    assert quantiles[0] == 0 and quantiles[-1] == 1 and torch.allclose(scores, -scores.flip(0), atol=1e-4)
    assert torch.allclose(0.5 * (1 + torch.erf(scores / 2**0.5)), torch.arange(1, 32) / 32, atol=1e-5)


def test_samples_do_not_depend_on_chunks_and_repeat(golden):
    def run(**kw):
        return sample(golden, 7, L, steps=5, gamma=1.5, **kw)[0]
    assert torch.equal(run(), run()) and torch.equal(run(chunk=1), run(chunk=3)) and torch.equal(run(chunk=3), run())
    assert torch.equal(sample(golden, 3, L, steps=5)[0], run()[:3])


def test_noise_that_falls_over_time_and_temperature(golden):
    """At power 0 the paper's step bit for bit; else its alpha is 1 - gamma (1 - t)^power dt. A temperature is a factor on all noise."""
    model, grid, E = golden, torch.tensor([0.0, 0.2, 0.5, 1.0]), golden.config.embed_dim
    start, noise = torch.randn(2, 2, L, E, generator=seeded(0))
    with torch.no_grad():
        constant, falling = ([step[1] for step in flow(model, start, grid, lambda: noise, 1.5, 3.0, gamma_power=power)] for power in (0.0, 2.0))
        for step, power in ((constant, 0), (falling, 2)):
            z, x_sc = start, torch.zeros_like(start)
            for i in range(3):
                t, dt = grid[i], grid[i + 1] - grid[i]
                if i < 2:
                    alpha = 1 - (1.5 if power == 0 else 1.5 * (1 - t) ** power) * dt
                    z, t = alpha * z + (1 - alpha) * noise, alpha * t
                x_sc = model(z, x_sc, t.expand(2), torch.full((2,), 3.0))[0]
                z = z + (grid[i + 1] - t) * ((x_sc - z) / (1 - t).clamp(min=0.05))
                assert torch.equal(step[i], z) if power == 0 else torch.allclose(step[i], z, atol=1e-6)
    how = dict(steps=4, gamma=2.0, seed=1)
    assert torch.equal(sample(model, 3, L, temperature=0.5, noise_scale=2.0, **how)[0], sample(model, 3, L, noise_scale=1.0, **how)[0])
    assert not torch.equal(constant[-1], falling[-1])


def test_rows_have_their_own_noise():
    a, b = (torch.randn(3, generator=seeded(0, i)) for i in (0, 1))
    assert not torch.equal(a, b) and torch.equal(a, torch.randn(3, generator=seeded(0, 0)))


# ---------------------------------------------------------------------------------------------------------------------
# data and training, on a made-up package

def prose_module(n=400):
    """A Python file whose docstrings hold n paragraphs of prose, and things that are not prose."""
    verbs, nouns = ["Return", "Build", "Read", "Close", "Sort"], ["the file", "a list", "every row", "the model", "one token"]
    places = ["in the folder", "of the user", "for the test", "at the end", "from memory", "with care", "by hand", "on disk"]
    texts = [f"{v} {n1} and {n2} {p}." for v in verbs for n1 in nouns for n2 in nouns for p in places][:n]
    body = "\n\n".join(f'def f{i}():\n    """{text}\n\n    Args:\n        x: not prose\n\n    >>> f{i}(x_{i})\n    {i}\n    """'
                       for i, text in enumerate(texts))
    return f'"""A module that is made up for the tests of this project."""\n\n{body}\n', texts


@pytest.fixture(scope="session")
def docs(tmp_path_factory):
    """data/docs/prepare.py on that package: (its folder, the texts)."""
    folder = tmp_path_factory.mktemp("docs")
    source, texts = prose_module()
    (folder / "package.py").write_text(source)
    (folder / "broken.py").write_text("def (:")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HERE=folder, LENGTH=40, COMMON=1, VAL_SHARE=0.05, MIN_SENTENCES=10, source_files=lambda: sorted(folder.glob("*.py")),
                                RECIPE=dict(width=16, layers=1, heads=2, steps=30)).items():
            patch.setattr(prepare, name, value)
        prepare.main([])
    return folder, texts


def test_docs_pipeline(docs):
    folder, texts = docs
    meta = json.loads((folder / "meta.json").read_text())
    tokenizer, encoder = load_tokenizer(folder / "t5"), load_encoder(folder / "t5")
    rows = np.concatenate([np.fromfile(folder / f"{side}.bin", dtype=meta["dtype"]).reshape(-1, 40) for side in ("train", "val")])
    train_rows, val_rows = (meta["counts"][side]["rows"] for side in ("train", "val"))
    assert train_rows + val_rows == len(rows) and val_rows > 5 and (meta["length"], meta["pairs"]) == (40, False)
    back = {to_text(tokenizer, row) for row in rows}
    assert back == set(texts) | {"A module that is made up for the tests of this project."}     # every paragraph, and nothing else
    assert (rows[:, -1] == 1).all() and encoder.config.d_model == len(meta["x_std"]) == 16 and tokenizer.pad_token_id == 0
    x = encoder(input_ids=torch.from_numpy(rows[:100].astype(np.int64))).last_hidden_state
    assert torch.isfinite(x).all() and x.std() > 0.01


def test_prose_filter():
    prose = prepare.prose
    assert prose("Return the :class:`~torch.Tensor` of\nthe ``model``.") == "Return the torch.Tensor of the model."
    assert prose("Load [`Trainer`](https://x.y) from the **given** file.") == "Load Trainer from the given file."
    for block in (">>> f(x)", "Args:\n    x: a number.", "| a | b |", ".. note:: Read this first.", "- one item of a list.", "x = y + 1",
                  "lower case is not a sentence.", "No full stop at the end", "Short.", "Parameters: the list of them all."):
        assert prose(block) is None, block


def test_sentences_of_words_alone_from_every_definition(tmp_path):
    kinds = ["if a:", "else:", "try:", "except E:", "finally:", "for a in b:", "while a:", "with a:", "match a:\n    case 1:", "class A:",
             "async def f():"]
    source = '"""The module is read as well."""\n# The comment is also read.\n'
    for i, kind in enumerate(kinds):
        pad = " " * (8 if "case" in kind else 4)
        source += (f'{kind}\n{pad}def g(x=lambda: 0):\n{pad}    """Return the {"abcdefghijk"[i]} of it. It has 1 number. It is new, and has a comma. '
                   f'It is "quoted" here.\n\n{pad}    It is the second paragraph.\n{pad}    """\n')
        source += "" if kind in ("if a:", "try:", "except E:") else "\n"
    file = tmp_path / "m.py"
    file.write_text(source)
    assert set(prepare.sentences(file)) == {f"Return the {letter} of it." for letter in "abcdefghijk"} | {
        "The module is read as well.", "The comment is also read.", "It is the second paragraph."}


SMALL = ["--length=40", "--cooldown=0", "--dim=32", "--depth=2", "--heads=2", "--bottleneck=16", "--batch_size=10", "--warmup=5", "--val_interval=20",
         "--val_rows=20", "--sample_interval=20", "--save_interval=10", "--log_interval=5", "--compile=false", "--bf16=false", "--device=cpu"]


def small(folder, run, *more):
    return [str(ROOT / "config/docs.py"), f"--data={folder}", f"--encoder={folder}/t5", "--prepare=", f"--out={run.parent}", f"--name={run.name}", *SMALL, *more]


@pytest.fixture(scope="session")
def run(docs, tmp_path_factory):
    """A finished tiny run of train.py."""
    folder = tmp_path_factory.mktemp("out") / "run"
    train.main(small(docs[0], folder, "--steps=40"))
    return folder


ABLATIONS = sorted(file.stem for file in (ROOT / "config/ablations").glob("*.py") if file.stem not in ("run", "encoders"))


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_ablation_builds_and_takes_two_steps(name, docs, tmp_path):
    own, base = (configure([f"config/ablations/{of}.py"]) for of in (name, "base"))
    changed = {key for key, value in vars(own).items() if value != getattr(base, key)} - {"name"}
    assert own.name == name and (name == "base" or 1 <= len(changed) <= 2), changed
    mine = [f"--{key}={getattr(own, key)}" for key in changed if key not in ("data", "encoder", "dim", "heads", "bottleneck")]
    train.main(small(docs[0], tmp_path / name, "--steps=2", *mine))
    assert newest(tmp_path / name)["step"] == 2 and load(tmp_path / name)[0].config.predict == own.predict


def test_running_the_ablations(monkeypatch, capsys, tmp_path):
    """Those asked for are trained, scored and kept, and the table has all that were kept; mistakes are found before anything is trained."""
    run, trained, asked = importlib.import_module("config.ablations.run"), [], []
    monkeypatch.setattr(run, "OUT", tmp_path / "ablations")
    monkeypatch.setattr(run, "train", lambda name, options: (trained.append((name, options)), ("_".join([name, *options]), dict(val_mse=0.5)))[1])
    monkeypatch.setattr(run.eval, "main", lambda argv: dict(gen_ppl=40.0 if "out/docs" in argv else 60.0, distinct1=0.1))
    monkeypatch.setattr(run.eval, "ROOT", tmp_path)
    for name, says in dict(predict_w="no such ablation; there are: samplers, adamw", predict_v="data/docs/scorer: not there; make it").items():
        with pytest.raises(SystemExit, match=says):
            run.main([name])
    (tmp_path / "data/docs/scorer").mkdir(parents=True)
    monkeypatch.setattr(run, "find_checkpoints", lambda source: asked.append(source))
    run.main(["predict_v"])
    assert trained == [("predict_v", []), ("predict_v", ["--seed=1"]), ("predict_v", ["--seed=2"])]
    capsys.readouterr()
    with open(tmp_path / "ablations/results.jsonl", "a") as f:
        f.write('{"trial": "cut sh')
    run.main(["samplers"])
    table = capsys.readouterr().out.splitlines()
    assert asked == ["out/docs"] and len(trained) == 3 and len(table) == 2 + 3 + 23 and " | predict_v | 0.500 |  | 60.0 |  | 0.100 |  | " in table
    assert " | sampled with --w 5 --gamma 8 |  |  | 40.0 |  | 0.100 |  | " in table


def test_other_embeddings_for_the_ablations(docs, tmp_path, monkeypatch):
    """Tables of no layers, and a half-trained encoder, as data folders that train.py takes."""
    encoders = importlib.import_module("config.ablations.encoders")
    monkeypatch.setattr(encoders, "RECIPE", dict(width=16, layers=1, heads=2, steps=8, batch_size=8))
    encoders.main(docs[0], tmp_path)
    learned = load_encoder(docs[0] / "t5").shared.weight
    for name in ("table", "gaussian", "half"):
        folder = tmp_path / name
        assert (folder / "train.bin").read_bytes() == (docs[0] / "train.bin").read_bytes() and (folder / "val.bin").stat().st_size > 0
        encoder, ids = load_encoder(folder / "t5"), torch.arange(10)[None]
        alone, among = (encoder(input_ids=i).last_hidden_state[0, 0] for i in (ids[:, :1], ids))
        assert torch.allclose(alone, among, atol=1e-6) == (name != "half") and torch.equal(encoder.shared.weight, learned) == (name == "table")
        train.main(small(folder, tmp_path / "runs" / name, "--steps=2"))


@pytest.mark.parametrize("predict", ["x", "v", "eps"])
def test_whatever_it_predicts_the_network_returns_x(predict):
    """A network that is right about v or the noise is right about x: z = t x + (1 - t) e, v = x - e."""
    x, e, t = torch.randn(2, 5, 4, generator=seeded(0)), torch.randn(2, 5, 4, generator=seeded(1)), torch.tensor([0.3, 0.9])[:, None, None]
    z = t * x + (1 - t) * e
    assert torch.allclose(as_x(dict(x=x, v=x - e, eps=e)[predict], z, t, predict), x, atol=1e-5)


def records(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_training_learns_logs_and_saves(run):
    log = records(run)
    assert [r["step"] for r in log] == list(range(5, 45, 5)) and log[-1]["loss"] < log[0]["loss"]
    vals = [r for r in log if "val_ce" in r]
    assert [r["step"] for r in vals] == [20, 40] and vals[1]["val_ce"] < vals[0]["val_ce"] and len(vals[1]["samples"]) == 4
    model, settings = load(run)
    content = newest(run)
    assert settings["length"] == 40 and torch.equal(model.in_proj.weight, content["ema"]["in_proj.weight"])
    assert not torch.equal(content["ema"]["in_proj.weight"], content["model"]["in_proj.weight"])
    assert list(run.glob("*.tmp")) == []


def test_interrupted_run_ends_as_an_uninterrupted_one(run, docs, tmp_path):
    train.main(small(docs[0], tmp_path / "run", "--steps=20"))
    train.main(small(docs[0], tmp_path / "run", "--steps=40"))
    assert same(newest(run), newest(tmp_path / "run"))
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    with pytest.raises(SystemExit, match="other settings.*lr"):
        train.main(small(docs[0], run, "--steps=50", "--lr=0.1"))
    train.main(small(docs[0], run, "--steps=40"))
    assert before == {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}


def test_a_run_that_blows_up_keeps_its_checkpoint(docs, tmp_path):
    argv = small(docs[0], tmp_path / "run", "--warmup=0", "--save_interval=1", "--log_interval=100", "--lr=1e8", "--steps=20")
    with pytest.raises(SystemExit, match="not finite at step .*try a smaller --lr"):
        train.main(argv)
    content = newest(tmp_path / "run")
    assert content["step"] >= 1 and all(p.isfinite().all() for p in content["model"].values())


class NoWait(TorchDispatchMode):
    """Refuses what would make the program wait for a GPU: to read a number off a tensor, or a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select), func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("more", [(), ("--batch_size=20", "--accum=2", "--gap_share=0.5"), ("--optimizer=adamw",)])
def test_no_step_waits_for_the_device(more, docs, tmp_path, monkeypatch):
    step, steps = train.train_step, []

    def unwaiting(*args):
        with NoWait():
            steps.append(step(*args))
        return steps[-1]
    monkeypatch.setattr(train, "train_step", unwaiting)
    train.main(small(docs[0], tmp_path / "run", "--steps=3", *more))
    assert len(steps) == 3
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWait():
        bool(steps[0][1] > 0)


def test_ema_warms_up(docs, tmp_path, run):
    """After n steps of decay min(0.9999, (1 + n) / (10 + n)), the weights' average is theirs; recomputed from every step."""
    ema, decay = None, lambda n: min(0.9999, (1 + n) / (10 + n))
    for steps in (1, 2, 3):
        train.main(small(docs[0], tmp_path / "run", f"--steps={steps}"))
        content = newest(tmp_path / "run")
        if steps == 1:
            torch.manual_seed(0)
            ema = ELF(ELFConfig(**content["elf_config"])).state_dict()
        ema = {k: decay(steps - 1) * e + (1 - decay(steps - 1)) * content["model"][k] for k, e in ema.items()}
        for k, e in ema.items():
            assert torch.allclose(content["ema"][k], e, atol=1e-6), (steps, k)


def test_the_rate_warms_up_and_cools_down(docs, tmp_path, monkeypatch):
    rates = []
    step = train.Muon.step
    monkeypatch.setattr(train.Muon, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    for cooldown in (0.0, 0.5):
        train.main(small(docs[0], tmp_path / str(cooldown), "--steps=10", "--lr=0.01", "--warmup=4", f"--cooldown={cooldown}"))
    assert np.allclose(np.array(rates) / 0.01, [0.25, 0.5, 0.75] + 7 * [1] + [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_epochs_visit_every_row_once():
    seen = np.concatenate([train.batch_rows(10, step, 4, seed=3) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and list(seen[:10]) != list(seen[10:])
    assert np.array_equal(train.batch_rows(10, 3, 4, seed=3), train.batch_rows(10, 3, 4, seed=3))


def worker(rank, world, model_file, folder):
    """One of `world` processes: its share of every kind of row, gradients averaged by DDP."""
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    model, _ = load(model_file)
    net = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    cfg, rows = Config(), []
    for first, count in ((0, 4), (4, 8), (12, 8)):  # decode, self-conditioned, plain rows of the global batch of 20
        rows += range(first + rank * count // world, first + (rank + 1) * count // world)
    x, ids = torch.randn(20, L, E, generator=seeded(1))[rows], torch.randint(V, (20, L), generator=seeded(2))[rows]
    r = draws(20, 4, cfg, seed=3)
    r = {k: v[rows[:4 // world] if k == "p" else rows] for k, v in r.items()}
    loss = loss_of(net, x, ids, cfg, r)
    loss.backward()
    torch.save([loss.detach(), *(p.grad for p in model.parameters())], f"{folder}/{world}.{rank}")
    if world > 1:
        del net  # first, as train.py does
        torch.distributed.destroy_process_group()


def test_two_processes_equal_one(golden_file, tmp_path):
    torch.multiprocessing.spawn(worker, (1, golden_file, tmp_path), nprocs=1)
    torch.multiprocessing.spawn(worker, (2, golden_file, tmp_path), nprocs=2)
    one, a, b = (torch.load(tmp_path / f, weights_only=True) for f in ("1.0", "2.0", "2.1"))
    assert torch.allclose(one[0], (a[0] + b[0]) / 2, rtol=1e-5)
    for g1, ga, gb in zip(one[1:], a[1:], b[1:]):
        assert torch.equal(ga, gb) and torch.allclose(g1, ga, rtol=1e-5, atol=1e-5 * g1.abs().max().item())


def exact_muon(p, grads, lr, momentum=0.95):
    """Where Muon takes p after these gradients, written out in float64."""
    p, m = p.double(), torch.zeros_like(p).double()
    for g in grads:
        m = momentum * m + (1 - momentum) * g.double()
        X = momentum * m + (1 - momentum) * g.double()
        X = X / X.norm()
        for _ in range(5):
            A = X @ X.mT
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        p = p - lr * max(1, p.shape[0] / p.shape[1]) ** 0.5 * X
    return p


MATRICES = [(24, 8), (8, 8), (8, 24), (24, 8), (50, 4), (8, 24), (24, 8)]


def muon_run(steps=3):
    """Muon on MATRICES with set gradients: where they were, the gradients, where they are."""
    start = [torch.randn(s, generator=seeded(1, i)) for i, s in enumerate(MATRICES)]
    grads = [[torch.randn(s, generator=seeded(2, i, k)) for k in range(steps)] for i, s in enumerate(MATRICES)]
    params = [torch.nn.Parameter(p.clone()) for p in start]
    muon = train.Muon(params, lr=0.1)
    for k in range(steps):
        for p, g in zip(params, grads):
            p.grad = g[k].clone()
        muon.step()
    return start, grads, [p.detach() for p in params], muon


def test_muon_is_newton_schulz_and_torchs():
    start, grads, ours, muon = muon_run()
    params = [torch.nn.Parameter(p.clone()) for p in start]
    theirs = torch.optim.Muon(params, lr=0.1, momentum=0.95, weight_decay=0.0)
    for k in range(3):
        for p, g in zip(params, grads):
            p.grad = g[k].clone()
        theirs.step()
    for p, g, a, b in zip(start, grads, ours, params):
        moved = (exact_muon(p, g, 0.1) - p).norm()
        assert (a - exact_muon(p, g, 0.1)).norm() < 0.05 * moved  # bfloat16
        assert (a - b).norm() < 0.05 * moved
    theirs.load_state_dict(theirs.state_dict() | dict(state=muon.state_dict()["state"]))  # the same state, by the same names


def muon_worker(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    orthogonal, worked, shares = train.orthogonal, [], [None, None]
    train.orthogonal = lambda G: worked.append(len(G)) or orthogonal(G)
    _, _, params, _ = muon_run()
    torch.distributed.all_gather_object(shares, sum(worked))
    assert sum(shares) == 3 * len(MATRICES) and min(shares) >= 3 * 3  # each matrix once a step, and of seven both have at least three
    torch.save(params, f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def test_muon_shared_by_two_processes_equals_one(tmp_path):
    torch.multiprocessing.spawn(muon_worker, (tmp_path,), nprocs=2)
    start, _, one, _ = muon_run()
    a, b = (torch.load(tmp_path / f, weights_only=True) for f in "01")
    for p, pa, pb, before in zip(one, a, b, start):
        assert torch.equal(pa, pb) and (p - pa).norm() < 0.01 * (p - before).norm()


def test_torchrun(docs, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py"),
               *small(docs[0], tmp_path / "run", "--steps=4", "--batch_size=20", "--accum=2", "--val_interval=4")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "run")[-1]["step"] == 4 and load(tmp_path / "run")


# ---------------------------------------------------------------------------------------------------------------------
# surviving: kills, signals, damage

def newest(run):
    return torch.load(max(run.glob("ckpt_*.pt")), weights_only=True)


def same(a, b):
    """Whether two checkpoints agree to the bit: weights, EMA and both optimisers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in ("settings", "machine"))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


# Starts train.main(argv) again and again in a child that kills itself at a random one of its steps and file operations.
KILLED = """
import io, os, random, signal, sys
import torch, train
from transformers import AutoTokenizer, T5EncoderModel  # now, once, as what an optimiser imports
torch.optim.Adam([torch.zeros(1, requires_grad=True)])
rng, save, kills = random.Random(0), torch.save, 0

def child(left):
    def event(f):
        def counted(*args, **kw):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **kw)
        return counted
    def save_in_halves(content, f):
        whole = io.BytesIO()
        save(content, whole)
        data = whole.getvalue()
        f.write(data[:len(data) // 2])
        f.flush()
        event(f.write)(data[len(data) // 2:])
    torch.save, train.batch_rows = save_in_halves, event(train.batch_rows)
    for name in ("fsync", "replace", "link", "unlink"):
        setattr(os, name, event(getattr(os, name)))
    train.main(sys.argv[1:])

while True:
    if (pid := os.fork()) == 0:
        child(rng.randint(1, 26) if kills < 20 else -1)
        sys.stdout.flush()
        os._exit(0)
    if (status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == 0:
        break
    assert status == -signal.SIGKILL, status
    kills += 1
print("kills:", kills)
"""


def program(*command, **kw):
    return subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, **kw)


def test_killed_twenty_times(docs, tmp_path):
    often = ["--steps=80", "--save_interval=2", "--val_interval=5", "--val_rows=10", "--log_interval=1", "--sample_interval=80"]
    process = program("-c", KILLED, *small(docs[0], tmp_path / "killed", *often))
    train.main(small(docs[0], tmp_path / "whole", *often))
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "kills: 20" in out, out
    killed, whole = (tmp_path / name for name in ("killed", "whole"))
    assert same(newest(killed), newest(whole)) and same(*(torch.load(r / "best.pt", weights_only=True) for r in (killed, whole)))
    assert sorted(f.name for f in killed.iterdir()) == sorted(f.name for f in whole.iterdir()) == [
        "best.pt", "ckpt_00000078.pt", "ckpt_00000080.pt", "log.jsonl", "t5"]
    a, b = ([{k: v for k, v in r.items() if k != "tokens_per_s"} for r in records(r)] for r in (killed, whole))
    assert a == b and [r["step"] for r in a] == list(range(1, 81))


def at_step(monkeypatch, step, action):
    """Calls `action` when the step of this index begins."""
    rows = train.batch_rows
    monkeypatch.setattr(train, "batch_rows", lambda n, s, *more: (action() if s == step else None, rows(n, s, *more))[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(number, run, docs, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit, match="130"):
            train.main(small(docs[0], tmp_path / "run", "--steps=40"))
    assert "stopped after step 8, which is saved; the same command goes on" in capsys.readouterr().out
    assert newest(tmp_path / "run")["step"] == 8
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # nothing to finish yet
        at_step(patch, 8, lambda: os.kill(os.getpid(), number))
        train.main(small(docs[0], tmp_path / "run", "--steps=40"))
    train.main(small(docs[0], tmp_path / "run", "--steps=40"))
    assert same(newest(tmp_path / "run"), newest(run))


def test_second_interrupt_quits_at_once(docs, tmp_path):
    twice = ("import os, signal, sys, time, train\nrows = train.batch_rows\ndef interrupted(n, step, *more):\n    if step == 3:\n"
             "        [(os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)) for _ in range(2)]\n    return rows(n, step, *more)\n"
             "train.batch_rows = interrupted\ntrain.main(sys.argv[1:])")
    process = program("-c", twice, *small(docs[0], tmp_path / "run", "--steps=40"))
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT and not list((tmp_path / "run").glob("*.pt"))


def test_timed_saves(docs, tmp_path):
    train.main(small(docs[0], tmp_path / "run", "--steps=7", "--save_interval=100", "--save_minutes=1e-9", "--keep=3"))
    assert sorted(f.name for f in (tmp_path / "run").glob("ckpt*")) == [f"ckpt_0000000{n}.pt" for n in (5, 6, 7)]


def torchrun(docs, run, *more, script=ROOT / "train.py"):
    return program("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script,
                   *small(docs[0], run, "--batch_size=20", "--accum=2", "--val_interval=100000", "--sample_interval=100000", *more))


def test_two_processes_stop_together_and_go_on(docs, tmp_path, capsys):
    process = torchrun(docs, tmp_path / "run", "--steps=1000000")
    for _ in range(1000):
        if (tmp_path / "run" / "log.jsonl").exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    out, _ = process.communicate(timeout=100)
    step = newest(tmp_path / "run")["step"]
    assert time.monotonic() - start < 20 and f"stopped after step {step}, which is saved" in out
    assert "Traceback" not in out.split("stopped")[0]  # torchrun's own comes after it
    both = [torchrun(docs, tmp_path / name, f"--steps={step + 4}") for name in ("run", "whole")]
    outs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0] and f"from step {step} on" in outs[0], outs
    assert same(newest(tmp_path / "run"), newest(tmp_path / "whole"))
    train.main(small(docs[0], tmp_path / "run", f"--steps={step + 5}", "--batch_size=20", "--accum=4"))  # and on one process
    assert "'processes': 2" in (said := capsys.readouterr().out) and "other noise from here on" in said
    assert newest(tmp_path / "run")["step"] == step + 5


def test_one_processes_signal_stops_both(docs, tmp_path):
    (tmp_path / "one.py").write_text(
        f"import os, signal, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\nrows = train.batch_rows\n"
        "def signalled(n, step, *more):\n    if step == 5 and os.environ['RANK'] == '1':\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return rows(n, step, *more)\ntrain.batch_rows = signalled\ntrain.main()")
    process = torchrun(docs, tmp_path / "run", "--steps=1000000", script=tmp_path / "one.py")
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and "stopped after step 6, which is saved" in out and newest(tmp_path / "run")["step"] == 6, out


def test_not_finite_stops_all_processes(docs, tmp_path):
    process = torchrun(docs, tmp_path / "run", "--steps=1000000", "--lr=1e8", "--warmup=0")
    out, _ = process.communicate(timeout=100)
    assert process.returncode and "not finite at step" in out


def test_not_finite_names_the_step(docs, tmp_path, monkeypatch):
    losses, calls = train.losses, iter(range(1, 100))
    monkeypatch.setattr(train, "losses", lambda *a, **kw: [(y * factor, counts) for factor in [math.nan if next(calls) == 13 else 1]
                                                           for y, counts in losses(*a, **kw)])
    with pytest.raises(SystemExit, match="not finite at step 13; .*try a smaller --lr"):
        train.main(small(docs[0], tmp_path / "run", "--steps=40"))
    assert newest(tmp_path / "run")["step"] == 10


def flip(file, at):
    data = bytearray(file.read_bytes())
    for i in range(0, 400, 20):  # a single bit might lie in the padding between two tensors, where it does no harm
        data[int(at * (len(data) - 400)) + i] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [
    lambda f: f.write_bytes(f.read_bytes()[:-1000]), lambda f: f.write_bytes(f.read_bytes()[:1000]), lambda f: f.write_bytes(b""),
    lambda f: f.write_bytes(b"hello" * 1000), lambda f: torch.save(golden_weights(), f), lambda f: torch.save(dict(step=Malicious()), f),
    *(lambda f, at=at: flip(f, at) for at in (0.1, 0.3, 0.5, 0.7, 0.9))])
def test_damaged_checkpoints_fall_back(damage, run, docs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run" / "ckpt_00000040.pt")
    argv = small(docs[0], tmp_path / "run", "--steps=40")
    for file in (tmp_path / "run").glob("best.pt"):
        file.unlink()
    train.main(argv)
    said = capsys.readouterr().out
    assert "ckpt_00000040.pt: damaged" in said and "from step 30 on" in said and same(newest(tmp_path / "run"), newest(run))
    assert records(tmp_path / "run")[-1]["step"] == 40 and len(records(tmp_path / "run")) == 8
    (tmp_path / "run" / "best.pt").unlink()  # the same file as the newest
    for file in (tmp_path / "run").glob("*.pt"):
        damage(file)
    with pytest.raises(SystemExit, match="none of its 2 checkpoints can be read"):
        train.main(argv)
    assert not (tmp_path / "pwned").exists()


def test_sampling_falls_back_too(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    flip(tmp_path / "run" / "ckpt_00000040.pt", 0.5)
    wanted = torch.load(run / "ckpt_00000030.pt", weights_only=True)["ema"]["in_proj.weight"]
    assert torch.equal(load(tmp_path / "run")[0].in_proj.weight, wanted) and "trying the one before" in capsys.readouterr().err


@pytest.mark.parametrize("change, says", [
    (lambda c: c | dict(version=99), "of format 99, and this code knows up to"),
    (lambda c: c | dict(elf_config=c["elf_config"] | dict(depth=10**9)), "1000000000 blocks"),
    (lambda c: c | dict(elf_config=c["elf_config"] | dict(dim=10**12)), "not an ELF checkpoint"),
    (lambda c: c | dict(settings=c["settings"] | dict(length=10**15)), "length = 1000000000000000"),
    (lambda c: dict(params={"unembed_kernel": torch.zeros(1, 1).expand(10**6, 10**6)}), "larger than the file"),
    (lambda c: dict(params={"blocks.999999999.norm1.weight": torch.zeros(2)}), "not an ELF checkpoint")])
def test_crafted_sizes_take_no_memory(change, says, run, tmp_path):
    torch.save(change(newest(run)), tmp_path / "ckpt_00000050.pt")
    with pytest.raises(SystemExit, match=says):
        load(tmp_path)


def test_packed_checkpoint_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("archive/data.pkl", bytes(10**8))
    with pytest.raises(SystemExit, match="unpacks to more than its size"):
        load(tmp_path)


def test_full_disk(run, docs, tmp_path, monkeypatch, capsys):
    save, soft = checkpoint.save, resource.getrlimit(resource.RLIMIT_FSIZE)[0]

    def full(steps):
        def saving(state, *more):
            limit = 20_000 if state.step in steps else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            try:
                save(state, *more)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        monkeypatch.setattr(checkpoint, "save", saving)
        return small(docs[0], tmp_path / "run", "--steps=40")

    with pytest.raises(SystemExit, match="step 40: not saved .*; the same command goes on from step 10"):
        train.main(full([20, 30, 40]))
    assert "step 20: not saved" in capsys.readouterr().out and newest(tmp_path / "run")["step"] == 10
    train.main(full([20]))
    assert same(newest(tmp_path / "run"), newest(run)) and not list((tmp_path / "run").glob("*.tmp"))


def test_one_run_a_folder(run, docs):
    with checkpoint.locked(run), pytest.raises(SystemExit, match="another process trains there; wait"):
        train.main(small(docs[0], run, "--steps=50"))


def test_fresh_moves_the_old_run_aside(run, docs, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    for n in (1, 2):
        train.main(small(docs[0], tmp_path / "run", "--steps=2", "--lr=0.001", "--fresh"))
        assert f"is now {tmp_path / f'run.old-{n}'}" in capsys.readouterr().out
    assert same(newest(tmp_path / "run.old-1"), newest(run)) and records(tmp_path / "run.old-1") == records(run)
    assert newest(tmp_path / "run")["step"] == 2 and len(records(tmp_path / "run")) == 1


def test_fuzz(run, docs, scorer, tmp_path, monkeypatch, capsys):
    """Whatever the arguments are: an end, or SystemExit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "a.txt").write_text("\n\n".join(docs[1][:40]))
    (tmp_path / "a.jsonl").write_text('{"input": "a", "output": "b"}\n')
    (tmp_path / "c.py").write_text("steps = 3\n")
    rng = np.random.default_rng(0)
    words = ["", "0", "1", "2", "-1", "3", "7", "0.5", "1e9", "1e400", "nan", "inf", "-inf", "true", "false", "None", "x", "é", "\0", "..",
             "/", "a.txt", "a.jsonl", "c.py", str(run), str(docs[0]), f"{docs[0]}/t5", "9" * 30, "9" * 5000, "[1]", "--", "=", "a b", "cpu",
             "uniform", "1_0", "0x10", "-0", " 1"]
    cheap = ["--device=cpu", "--compile=false", "--steps=2"]
    names = dict(
        train=[name for name in vars(Config()) if name != "out"],
        sample="steps gamma gamma_power temperature w cfg schedule n seed length cond out force trace device".split(),
        eval="steps gamma gamma_power temperature w cfg schedule n seeds real ar scorer results device".split(), text="val_share val_share val_share encoder".split())
    start, ended = time.monotonic(), dict.fromkeys(names, 0)
    for attempt in range(500):
        if time.monotonic() - start > 40:
            break
        script = list(names)[attempt % 4]
        options = []
        for name in rng.choice(names[script], rng.integers(1, 4)):
            word = str(rng.choice(words if rng.random() < 0.4 else ["1", "2", "0.5", "3", "true", "0"]))
            options += [[f"--{name}={word}"], [f"--{name}", word], [f"--{name}"], [word]][rng.choice(4, p=[0.6, 0.2, 0.1, 0.1])]
        try:
            if script == "train":
                train.main(small(docs[0], tmp_path / f"run{attempt}", *cheap, *options))
            elif script == "sample":
                sample_main(["--ckpt", str(run), "--n=1", "--steps=2", *options])
            elif script == "eval":
                evaluate.main(["--ckpt", str(run), "--n=2", "--steps=2", "--results=r.jsonl", *options])
            else:
                importlib.import_module("data.text.prepare").main(["a.txt", f"--encoder={docs[0]}/t5", "--workers=1", "--val_share=0.4",
                                                                   f"--out={tmp_path}/data{attempt}", *options])
            ended[script] += 1
        except SystemExit:
            pass
        except BaseException as e:
            raise AssertionError(f"{script} {options}") from e
    capsys.readouterr()
    assert min(ended.values()) >= 2, (attempt, ended)


# ---------------------------------------------------------------------------------------------------------------------
# sample.py as a program

def test_sample_program(run, tmp_path, capsys):
    out = tmp_path / "samples.jsonl"
    sample_main(["--ckpt", str(run), "--n", "3", "--steps", "4", "--seed", "7", "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 3 and lines[0]["seed"] == 7 and lines[0]["steps"] == 4 and lines[0]["ckpt"] == str(run)
    capsys.readouterr()
    sample_main(["--ckpt", str(run), "--n", "3", "--steps", "4", "--seed", "7", "--trace"])
    shown = capsys.readouterr()
    assert shown.out.splitlines()[4:] == [line["text"] for line in lines]                   # seeds repeat, --out or not
    assert [line[:4] for line in shown.out.splitlines()[:4]] == ["t = "] * 4
    for path, says in ((out, "--force"), (tmp_path / "no" / "x.jsonl", "cannot be written")):
        with pytest.raises(SystemExit, match=says):
            sample_main(["--ckpt", str(run), "--out", str(path)])


def test_a_trace_as_a_page(run, tmp_path, capsys):
    """It is one well-formed file that needs no other, holds every step of the first samples, and ends with the texts that are printed."""
    page = tmp_path / "page.html"
    sample_main(["--ckpt", str(run), "--n", "8", "--steps", "5", "--trace", str(page)])
    printed = capsys.readouterr().out.splitlines()
    html = page.read_text(encoding="utf-8")
    trace = json.loads(re.search(r"const trace = (.*);\n", html)[1])
    assert [len(step["rows"]) for step in trace["steps"]] == [6] * 5 and "steps 5" in trace["about"] and trace["given"] == [0] * 6
    assert ["".join(token for token, _ in row).strip() for row in trace["steps"][-1]["rows"]] == [text.strip() for text in printed[:6]]
    assert all(0 <= sure <= 1 for step in trace["steps"] for row in step["rows"] for _, sure in row)
    assert all(0 <= step["t"] < 1 for step in trace["steps"])

    class Tags(HTMLParser):
        opened = []

        def handle_starttag(self, tag, attributes):
            assert not {name for name, _ in attributes} & {"src", "href"}
            self.opened += [tag] * (tag not in ("meta", "input", "p"))

        def handle_endtag(self, tag):
            assert self.opened.pop() == tag
    Tags().feed(html)
    assert Tags.opened == [] and "http" not in html
    with pytest.raises(SystemExit, match="--trace .*exists already"):
        sample_main(["--ckpt", str(run), "--trace", str(page)])


def test_a_trace_escapes_what_a_page_would_obey_and_marks_what_changed(tmp_path, capsys, monkeypatch):
    class Tokenizer:
        def convert_ids_to_tokens(self, ids):
            return [["</s>", "\u2581</script>", "\u2581a"][i - 1] for i in ids]

    class Network:
        config = ELFConfig(vocab_size=4)

        def __init__(self, ids):
            self.logits = torch.full((1, 3, 4), -9.0).scatter(2, torch.tensor(ids)[None, :, None], 9.0)

        def __call__(self, *_, n_decode):
            return None, self.logits

    def decoder(ids):  # sure of them
        return functools.partial(decode, Network(ids), w=3.0)
    trace = Trace(decoder([3, 2, 1]), Tokenizer(), [0], str(tmp_path / "page.html"))
    trace(torch.tensor(0.0), torch.zeros(1, 3, 2))
    assert trace.steps == [dict(t=0.0, rows=[[[" a", 1.0], [" </script>", 1.0]]])]
    trace.write("a </script> here")
    assert (tmp_path / "page.html").read_text().count("</script>") == 1

    trace = Trace(decoder([3, 3, 1]), Tokenizer(), [1], None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    trace(torch.tensor(0.0), torch.zeros(1, 3, 2))
    trace.decode = decoder([3, 2, 3])
    trace(torch.tensor(0.5), torch.zeros(1, 3, 2))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "t = 0.000 \x1b[4m a\x1b[0m"                                            # the condition, one token, is not shown
    assert second == "\x1b[1F\x1b[Jt = 0.500 \x1b[4m </script>\x1b[0m\x1b[4m a\x1b[0m"


def test_few_steps_compares_every_sampler_at_every_number_of_steps(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    few_steps = importlib.import_module("assets.few_steps")
    asked = []

    def main(argv):
        args = sampling.eval_arguments(argv, "")
        asked.append((args.ckpt, args.steps, args.gamma, args.preset, args.ar))
        assert args.n == 8 and args.seeds == 3
        return dict(tokens_per_s=1000 / (args.steps or 1), gen_ppl=30.0, real_gen_ppl=20.0, entropy=2.0)
    monkeypatch.setattr(few_steps.eval, "main", main)
    monkeypatch.setattr(few_steps, "HERE", tmp_path)
    few_steps.main(["--n", "8"])
    assert asked[:7] == [("out/docs", steps, 0.0, "paper", False) for steps in (64, 32, 16, 8, 4, 2, 1)]
    assert [gamma for _, _, gamma, _, _ in asked[21:28]] == [72.0, 36.0, 18.0, 9.0, 4.5, 2.25, 1.125]
    assert asked[28:] == [(f"out/docs_pd_{steps}", steps, None, None, False) for steps in (16, 8, 4, 2, 1)] + [("out/docs", None, None, None, True)]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert table[2] == ["ODE", "64", "16", "30.0", "2.000", "", "", ""] and table[-1][:4] == ["real rows", "", "", "20.0"] and len(table) == 2 + 35
    assert "<svg" in (tmp_path / "few_steps.svg").read_text()


def test_pictures_of_losses_and_variety(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pictures = importlib.import_module("assets.pictures")
    trial = dict(schedule="quantile", distinct1=0.1, real_distinct1=0.2, gen_ppl=60.0, real_gen_ppl=40.0)
    sampled = [(16, 0.0, 3.0), (16, 2.0, 3.0), (16, 8.0, 3.0), (16, 2.0, 5.0), (4, 0.0, 3.0), (4, 2.0, 3.0)]
    rows = [trial | dict(trial="base", steps=16, gamma=77.0, w=3.0)]
    rows += [trial | dict(trial=f"sampled with {how}", steps=how[0], gamma=how[1], w=how[2]) for how in sampled]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(pictures, "HERE", tmp_path)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "RESULTS", tmp_path / "none.jsonl")
    shutil.copytree(run, tmp_path / "out/docs")
    with pytest.raises(SystemExit, match="none.jsonl: has no samplers yet, so variety.svg is not drawn; first: python config/ablations/run.py"):
        pictures.main([])
    assert not (tmp_path / "variety.svg").exists()
    monkeypatch.setattr(pictures, "RESULTS", tmp_path / "results.jsonl")
    pictures.main([])
    losses, variety = ((tmp_path / name).read_text() for name in ("losses.svg", "variety.svg"))
    assert all(word in losses for word in ("docs, validation", "MSE of the velocity", "CE of the tokens"))
    assert all(word in variety for word in ("w = 3, 16 steps", "w = 5, 16 steps", "ODE, w = 3", "SDE, w = 3", "real rows")) and ">77<" not in variety
    early, empty = tmp_path / "a/run", tmp_path / "b/run"  # one that has not been validated, with a line cut short, and one without a loss
    for folder, log in ((early, '{"step": 5, "mse": 1.0, "ce": 2.0}\n{"step": 10, "mse"'), (empty, '{"step": 5}\n')):
        folder.mkdir(parents=True)
        (folder / "log.jsonl").write_text(log)
    pictures.main([str(early), str(tmp_path / "out/docs")])
    assert f"{early}, training" in (early / "losses.svg").read_text() and (tmp_path / "losses.svg").read_text() == losses
    for folder, says in ((empty, "log.jsonl: has no losses yet"), (tmp_path / "nowhere", "log.jsonl: cannot be read .No such file")):
        with pytest.raises(SystemExit, match=says):
            pictures.main([str(folder)])


def test_how_well_gaps_are_filled(run, docs, scorer, capsys):
    module = importlib.import_module("assets.infill")
    module.main(["--ckpt", str(run), "--scorer", str(docs[0] / "scorer"), "--n", "6", "--steps", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "%" in line]
    assert len(rows) == 4 and rows[0][0] == "| as they were" and rows[0][1] == "100.0 %" and all(float(row[2].rstrip(" |")) > 1 for row in rows)
    before, hidden, after = module.with_gap("Return the first row of it.", random.Random(1))
    assert before + hidden + after == "Return the first row of it.".split() and 1 <= len(hidden) <= 3 and after


def test_the_papers_settings_are_a_flag_away():
    run = dict(sample_steps=16, sample_gamma=30.0, sample_temperature=1.7, sample_w=2.0, cond_length=0)

    def used(*argv, **more):
        how = sampling.sampler_settings(sampling.sample_arguments(list(argv), ""), run | more)
        return [how[key] for key in ("steps", "gamma", "temperature", "w", "cfg")]
    assert used() == [16, 30.0, 1.7, 2.0, 1.0] and used("--w", "3", "--steps=8") == [8, 30.0, 1.7, 3.0, 1.0]
    assert used("--preset", "paper") == [32, 1.5, 1.0, 3.0, 1.0] and used("--preset=paper", "--steps=64", "--w=2") == [64, 1.0, 1.0, 2.0, 1.0]
    assert used("--preset", "paper", "--steps=8")[1] == 2.0 and used("--preset", "paper", "--gamma", "0")[1] == 0.0
    assert used("--preset", "paper", cond_length=64) == [64, 0.0, 1.0, 1.0, 2.0]


# ---------------------------------------------------------------------------------------------------------------------
# mistakes: one line each, naming the thing, the value and the way out

@pytest.mark.parametrize("argv, says", [
    (["--stepz=3"], "stepz: no such setting; did you mean steps"),
    (["--steps=many"], "--steps=many: must be int"),
    (["--steps=2.5"], "--steps=2.5: must be int"),
    (["--compile=perhaps"], "--compile=perhaps: must be bool"),
    (["--steps"], "--steps: has no value"),
    (["--steps=0"], "steps = 0: must be greater than 0"),
    (["--lr=nan"], "lr = nan: must be greater than 0"),
    (["steps"], "steps: no such config file"),
    (["--steps=5", "stray"], "stray: expected --key=value"),
    (["no/such.py"], "no/such.py: no such config file; there are: config/de_en.py, config/docs.py"),
    (["--batch_size=7", "--accum=2"], "batch_size = 7: not a multiple"),
    (["--batch_size=2"], "too few for decode_share = 0.2"),
    (["--device=abacus"], "device = abacus: not usable here"),
    (["--data=nowhere", "--prepare="], "data = nowhere: no meta.json there; prepare that folder first"),
    (["--data=nowhere"], "data = nowhere: no meta.json there"),
    (["--decode_share=0.9"], "decode_share"),
    (["--cooldown=2"], "cooldown = 2: must be a share of the steps"),
    (["--sample_schedule=cosine"], "sample_schedule = 'cosine': must be one of logit-normal, quantile, uniform"),
    (["--gap_share=2"], "gap_share = 2: must be a share of the rows"),
    (["--gap_share=0.5", "--cond_length=4"], "gap_share = 0.5: must be a share of the rows, up to 1, and is for data without conditions"),
    (["--predict=z"], "predict = 'z': must be one of x, v, eps"),
    (["--optimizer=sgd"], "optimizer = 'sgd': must be one of muon, adamw"),
    (["--name=../escaped"], "name = '../escaped': must be a plain folder name"),
    (["--t_mean=nan"], "t_mean = nan: must be greater than -100"),
    (["--seed=-1"], "seed = -1: must be at least 0"),
    (["--device=meta"], "device = meta: not usable here"),
    (["--teacher=out/docs"], "teacher = 'out/docs', student_steps = 0, teacher_substeps = 0: a distillation needs all three"),
    (["--student_steps=4"], "a distillation needs all three"),
    (["--teacher=out/docs", "--student_steps=4", "--teacher_substeps=2", "--rounds=4"], "student_steps = 4: cannot be halved 3 times, for rounds = 4"),
])
def test_config_errors(argv, says):
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    assert says in str(stop.value) and "\n" not in str(stop.value)


@pytest.mark.parametrize("text, says", [
    ("steps = '5'", "steps = '5': must be int, not str"), ("steps = True", "steps = True: must be int, not bool"),
    ("learning_rate = 1", "learning_rate: no such setting"), ("steps = = 5", "SyntaxError"), ("steps = 1 / 0", "ZeroDivisionError")])
def test_config_file_errors(text, says, tmp_path):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(SystemExit, match=says):
        configure([str(tmp_path / "c.py")])


def test_config_overrides(tmp_path):
    (tmp_path / "c.py").write_text("steps = 5\nlr = 1\n")
    cfg = configure([str(tmp_path / "c.py"), "--steps", "1_000", "--batch-size=64", "--compile=False"])
    assert (cfg.steps, cfg.lr, cfg.batch_size, cfg.compile) == (1000, 1.0, 64, False)
    assert {f.stem for f in config_files()} >= {"docs", "docs_cond", "owt_b", "owt_m", "owt_l", "de_en", "xsum"}
    for file in config_files():
        configure([str(file)])


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))


@pytest.mark.parametrize("damage, says", [
    (lambda d: (d / "meta.json").write_text("{"), "meta.json: damaged"),
    (lambda d: (d / "meta.json").write_text("{}"), "meta.json: damaged"),
    (lambda d: (d / "train.bin").write_bytes(b"123"), "train.bin: missing, empty or cut short"),
    (lambda d: (d / "val.bin").unlink(), "val.bin: missing, empty or cut short"),
    (lambda d: (d / "train.bin").write_bytes((d / "train.bin").read_bytes()[:-80]), "train.bin: 14960 tokens, and not the 15000"),
    (lambda d: np.full(15000, 999, np.uint16).tofile(d / "train.bin"), "token id 999 in it"),
    (lambda d: edit_meta(d, x_mean=None), "meta.json: damaged"), (lambda d: edit_meta(d, x_std=[0.0] * 16), "meta.json: damaged"),
    (lambda d: edit_meta(d, dtype="int16"), "meta.json: damaged"), (lambda d: edit_meta(d, x_mean=[0.0] * 3, x_std=[1.0] * 3), "3 channels")])
def test_damaged_data(damage, says, docs, tmp_path):
    shutil.copytree(docs[0], tmp_path / "data")
    damage(tmp_path / "data")
    with pytest.raises(SystemExit, match=says):
        train.main(small(tmp_path / "data", tmp_path / "run", "--steps=2"))


class Malicious:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def broken_files(folder):
    weights = golden_weights()
    cases = {"empty": b"", "text": b"hello", "number": 5, "list": [weights],
             "missing": {k: v for k, v in weights.items() if k != "blocks.1.attn.qkv.bias"},
             "unexpected": weights | {"extra.weight": torch.ones(2)},
             "shape": weights | {"blocks.1.attn.qkv.bias": torch.ones(7)}, "malicious": weights | {"step": Malicious()}}
    for name, content in cases.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            torch.save(content, folder / name)
    return cases


def test_bad_checkpoints_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in broken_files(tmp_path):
        with pytest.raises(SystemExit) as stop:
            load(tmp_path / name)
        assert str(tmp_path / name) in str(stop.value) and "\n" not in str(stop.value)
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(SystemExit, match="no such file"):
        load(tmp_path / "nothing.pt")
    with pytest.raises(SystemExit, match="holds no ckpt_<step>.pt, ckpt.pt"):
        (tmp_path / "folder").mkdir()
        load(tmp_path / "folder")


def test_bare_state_dict_loads(tmp_path, golden):
    torch.save(golden_weights(), tmp_path / "ckpt.pt")
    model, _ = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), golden.state_dict().values()))


def test_hub_repo(tmp_path, monkeypatch, golden):
    """A repo id goes to huggingface_hub, which answers with a folder; offline, one line."""
    import huggingface_hub
    (tmp_path / "checkpoint_95000").write_bytes(b"older")
    torch.save({"params": golden_weights(), "step": 100_000}, tmp_path / "checkpoint_100000")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    assert torch.equal(load("embedded-language-flows/ELF-B-owt-torch")[0].in_proj.weight, golden.in_proj.weight)

    def offline(repo, allow_patterns):
        raise OSError("no network")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SystemExit, match="embedded-language-flows/ELF-B-owt-torch: .*check the name and the network"):
        load("embedded-language-flows/ELF-B-owt-torch")


def test_a_run_uploaded_as_it_is_loads_by_its_repo_id(run, docs, tmp_path, monkeypatch, capsys):
    """The hub is a folder here; of what lies beside a run, its data, nothing is there, and another encoder stands in its place."""
    import huggingface_hub
    from fnmatch import fnmatch
    name = load(run)[1]["encoder"]
    assert name == str(run / "t5")

    def download(repo, allow_patterns):
        for file in run.rglob("*"):
            if file.is_file() and any(fnmatch(file.relative_to(run), pattern) for pattern in allow_patterns):
                (tmp_path / repo / file.relative_to(run)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, tmp_path / repo / file.relative_to(run))
        return str(tmp_path / repo)
    sample_main(["--ckpt", str(run), "--steps", "2", "--n", "2"])
    here = capsys.readouterr().out
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("data.encoder.ROOT", tmp_path / "elsewhere")
    sample_main(["--ckpt", "me/elf-docs", "--steps", "2", "--n", "2"])
    assert capsys.readouterr().out == here and here.count("\n") == 2


@pytest.mark.parametrize("argv, says", [(["--steps", "0"], "--steps 0"), (["--w", "-1"], "--w -1"), (["--gamma", "x"], "gamma"),
                                        (["--schedule", "cosine"], "cosine"), (["--ckpt", "nowhere.pt"], "nowhere.pt: no such file")])
def test_sample_errors(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        sample_main(argv)
    assert says in str(stop.value) + capsys.readouterr().err


def test_no_run_yet(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="no run under out/ yet: train one"):
        sample_main([])


# ---------------------------------------------------------------------------------------------------------------------
# the README

@pytest.mark.parametrize("page, up, least", [("README.md", "", 15), ("assets/lesson.md", "../", 19)])
def test_pages_point_at_the_right_lines(page, up, least):
    """Beside each link file.py#Lnn stands code of that line."""
    text = (ROOT / page).read_text()
    rows = re.findall(rf"\[([\w/]+\.py):(\d+)\]\({up}\1#L\2\) `([^`]+)`", text)
    assert len(rows) == text.count("#L") >= least
    for file, line, code in rows:
        assert code in (ROOT / file).read_text().splitlines()[int(line) - 1], (file, line, code)


LESSON_PATCHES = re.findall(r"```diff\n(.*?)```", (ROOT / "assets/lesson.md").read_text(), re.DOTALL)


def imported(path):
    spec = importlib.util.spec_from_file_location("patched", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("patch", LESSON_PATCHES, ids=range(2, 2 + len(LESSON_PATCHES)))
def test_the_lessons_solutions_apply_and_run(patch, golden, tmp_path):
    for file in ("sample.py", "train.py"):
        shutil.copyfile(ROOT / file, tmp_path / file)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    patched, trainer = (imported(tmp_path / file) for file in ("sample.py", "train.py"))
    guesses = []
    hook = golden.register_forward_pre_hook(lambda _, args: guesses.append(args[1].clone()))
    ids, sure = patched.sample(golden, 2, L, steps=4, gamma=2.0)
    assert len(LESSON_PATCHES) == 4 and len(patch.splitlines()) <= 20 and ids.shape == (2, L)
    assert len(guesses) == (9 if patch == LESSON_PATCHES[0] else 5) and not torch.equal(sure, sample(golden, 2, L, steps=4, gamma=2.0)[1])
    x, rows = torch.randn(3, L, E, generator=seeded(0)), (slice(0, 1), slice(1, 2), slice(2, 3))
    trainer.losses(golden, x, torch.zeros(3, L, dtype=torch.long), torch.zeros(3, L, 1, dtype=torch.bool), rows,
                   **train.draw(3, L, E, 1, Config(), seeded(1)), noise_scale=2.0, decode_noise=5.0)
    hook.remove()
    shown = [bool((guess != 0).any()) for guess in guesses]  # whether the network saw a guess: in sampling's second pass, in training's last
    assert shown[1] == shown[-1] == (patch != LESSON_PATCHES[3])


# ---------------------------------------------------------------------------------------------------------------------
# eval.py

@pytest.fixture(scope="session")
def scorer(docs):
    """A tiny random GPT-2 with the tokenizer of the made-up corpus, as data/docs/prepare.py --scorer would leave it."""
    model = data.scratch.train_scorer(np.fromfile(docs[0] / "train.bin", dtype=np.uint16).reshape(-1, 40), 80, steps=3, width=16, layers=1,
                                     heads=2)
    model.save_pretrained(docs[0] / "scorer")
    load_tokenizer(docs[0] / "t5").save_pretrained(docs[0] / "scorer")
    return model


def test_gen_ppl_is_the_loop_written_by_hand(scorer):
    rows = [[5, 6, 7], [9], [], [4] * 40, list(range(4, 54)), [8, 9, 10, 11, 12]]
    total, count = 0.0, 0
    for row in rows:
        if row:
            row = row[:40] if len(row) >= 40 else row + [1]
            logp = scorer(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
            for i in range(1, len(row)):
                total, count = total - logp[i - 1, row[i]].item(), count + 1
    for positions in (1, 80, 8192):  # batches of one, of some, of all
        assert abs(evaluate.gen_ppl(scorer, rows, 1, 40, positions, bf16=False) / math.exp(total / count) - 1) < 1e-5


def test_uniform_scorer_has_the_vocabulary_as_perplexity(scorer):
    class Uniform:
        device = torch.device("cpu")
        def __call__(self, input_ids):  # noqa: E301
            return argparse.Namespace(logits=torch.zeros(*input_ids.shape, 77))
    assert abs(evaluate.gen_ppl(Uniform(), [[3, 4], [5]], 1, 40) - 77) < 1e-3


def test_figures_of_known_rows():
    assert evaluate.entropy([7, 7, 7]) == 0 and abs(evaluate.entropy([1, 2, 3, 4]) - math.log(4)) < 1e-9
    assert abs(evaluate.entropy([1, 1, 1, 2]) - (0.75 * math.log(4 / 3) + 0.25 * math.log(4))) < 1e-9
    assert evaluate.repetition([1, 2, 3, 4, 5] * 3) == (True, 1.0) and evaluate.repetition([1, 2, 3, 4, 5, 9] * 2) == (False, 0.0)
    assert evaluate.repetition([1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5, 7]) == (True, 15 / 18)
    assert evaluate.distinct([[1, 2, 1], [2, 1]], 1) == 2 / 5 and evaluate.distinct([[1, 2, 1], [2, 1]], 2) == 2 / 3


def test_figures_of_known_words():
    texts = ["The cat's 2nd cat_s, r\u00e9sum\u00e9.", "the dog", ""]
    assert evaluate.words(texts[0]) == ["the", "cat's", "nd", "cat", "s", "r\u00e9sum\u00e9"]
    figures = evaluate.word_figures(texts, known={"the", "dog"})
    assert figures == dict(words=8 / 3, distinct1=7 / 8, distinct2=6 / 6, invented=1 / 3)


def test_what_is_taken_up_of_a_condition():
    conditions, texts = ["def load image ( path)", "class Row"], ["Loads the images.", "A column."]
    assert evaluate.taken_up(conditions, texts) == (2 / 4 + 0 / 2) / 2 and evaluate.taken_up([""], ["A row."]) == 0


def test_settings_are_chosen_by_even_rows_and_figures_are_of_odd_ones(docs):
    _, val, _ = open_data(str(docs[0]))
    tokenizer = load_tokenizer(docs[0] / "t5")
    odd = [to_text(tokenizer, ids) for ids in val.batch(range(1, len(val), 2))[0]]
    assert sorted(evaluate.validation_texts(val, tokenizer, len(val), 3)[1]) == sorted(odd)


def test_words_as_tokens_and_the_words_of_names():
    texts = ["def load_image(path, *args)", "class HTMLImageFile(Base)", "Load an image (or two)."]
    plain, code = (data.scratch.word_tokenizer(texts, 1, code=code) for code in (False, True))
    assert [to_text(plain, torch.tensor(plain(text).input_ids)) for text in texts] == texts
    assert [to_text(code, torch.tensor(code(text).input_ids)) for text in texts] == [
        "def load image ( path, args)", "class HTML Image File ( Base)", "Load an image (or two)."]
    rare = data.scratch.word_tokenizer([*texts, "Load an image."], 2)
    assert rare("Load an image (or two).").input_ids.count(data.scratch.UNK) > 0 and data.scratch.UNK not in rare("Load an image.").input_ids


def test_words_of_like_use_begin_near_each_other():
    rows = np.array([[10, middle, 11, 1] for middle in (20, 21)] * 50 + [[12, 22, 13, 1]] * 50)
    vectors = data.scratch.word_vectors(torch.from_numpy(rows), 30, 8)

    def cosine(a, b):
        return F.cosine_similarity(vectors[a], vectors[b], dim=0)
    assert vectors.shape == (30, 8) and abs(vectors.std() - 1) < 1e-5 and cosine(20, 21) > 0.99 and cosine(20, 22) < 0.5
    assert data.scratch.word_vectors(torch.from_numpy(rows), 30, 64).shape == (30, 64)  # fewer tokens than channels: zeros
    assert data.scratch.word_vectors(torch.zeros(5, 4, dtype=torch.long), 3, 2).isfinite().all()


def test_known_words_are_those_of_the_training_rows(docs):
    train, val, _ = open_data(str(docs[0]))
    tokenizer = load_tokenizer(docs[0] / "t5")
    texts = [to_text(tokenizer, ids) for ids in train.batch(range(len(train)))[0]]
    assert evaluate.known_words(train, tokenizer) == {word for text in texts for word in evaluate.words(text)}


def test_copying_is_seen():
    train_ids = np.random.default_rng(0).integers(4, 4000, 1000).astype(np.uint16)
    long, short = train_ids[100:140].tolist(), train_ids[500:505].tolist()
    rows = [long, short, long[:20] + [1] + long[21:], short[::-1], [], train_ids[298:331].tolist()]
    assert evaluate.copied(rows, train_ids) == evaluate.copied(rows, train_ids, block=7) == 3 / 6


def test_bleu_and_rouge_are_the_libraries(monkeypatch):
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    rouge = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is not installed")
    texts, references = ["The cats sat on a mat.", "Hello"], ["the cat sat on the mat.", "hello there"]
    figures = evaluate.bleu_rouge(texts, references)
    assert figures["BLEU"] == sacrebleu.corpus_bleu(texts, [references], lowercase=True, use_effective_order=True).score
    one = rouge.RougeScorer(["rouge2"], use_stemmer=True)
    assert abs(figures["rouge2"] - 50 * sum(one.score(r, t)["rouge2"].fmeasure for r, t in zip(references, texts))) < 1e-9
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(SystemExit, match="pip install sacrebleu rouge-score"):
        evaluate.bleu_rouge(texts, references)


def test_eval_program(scorer, run, docs, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    common = ["--ckpt", str(run), "--n", "6", "--results", str(results)]
    evaluate.main([*common, "--real", "10"])
    evaluate.main([*common, "--ar", "--seeds", "2"])
    out = tmp_path / "s.jsonl"
    texts = docs[1][:3] + [""]
    out.write_text("".join(json.dumps(dict(text=text, ckpt=str(run), data=str(docs[0]), encoder=f"{docs[0]}/t5")) + "\n" for text in texts))
    evaluate.main([str(out), "--results", str(results)])
    real, ar, file = [json.loads(line) for line in results.read_text().splitlines()]
    assert real["real"] == 10 and real["samples"] == 10 and math.isfinite(real["gen_ppl"]) and "real_gen_ppl" not in real
    out = capsys.readouterr().out
    assert ar["seeds"] == 2 and "gen_ppl" not in ar and ar["tokens_per_s"] > 0 and "±" in out
    assert "6 real validation rows" in out and "4 real validation rows" in out and math.isfinite(ar["real_gen_ppl"])
    [real_column] = re.findall(r"gen_ppl +- +(\S+)", out)
    assert math.isclose(float(real_column), ar["real_gen_ppl"], rel_tol=1e-3)
    assert 0 <= file["invented"] <= 1 and 0 < file["distinct1"] <= 1 and file["real_invented"] <= 1
    assert file["empty"] == 1 and file["samples"] == 4 and math.isfinite(file["gen_ppl"]) and file["copied"] >= 0.5


@pytest.mark.parametrize("content, says", [('{"text": "a"}\nnope\n', "line 2: not JSON"), ('{"txt": "a"}\n', 'line 1: must have "text"'),
                                           ("", "is empty"), (None, "cannot be read")])
def test_eval_errors(content, says, tmp_path):
    if content is not None:
        (tmp_path / "s.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=says):
        evaluate.main([str(tmp_path / "s.jsonl")])


# ---------------------------------------------------------------------------------------------------------------------
# data/: the paper's datasets and your own text

ODD = ["</s>", "<pad>", "<unk>", "a</s>b", "été", "日本語", "\u200b", "🙂", "the file", "of the model.", "\t", "every row",
       "<extra_id_0>", "\n"]


def odd_texts(n, seed=0):
    rng = np.random.default_rng(seed)
    return [f"{i}. " + " ".join(rng.choice(ODD, rng.integers(1, 12))) for i in range(n)]


def script(name):
    return importlib.import_module(f"data.{name}.prepare")


def prepared(folder):
    """(meta, {side: list of documents without their </s>, or of (condition, target)}) of a prepared folder."""
    meta, sides = json.loads((folder / "meta.json").read_text()), {}
    for side, count in meta["counts"].items():
        ids = np.fromfile(folder / f"{side}.bin", dtype=meta["dtype"])
        ends = np.fromfile(folder / f"{side}.idx", dtype=np.uint64) if meta["pairs"] else np.append(0, np.flatnonzero(ids == 1) + 1)
        assert ends[0] == 0 and ends[-1] == len(ids) == count["tokens"] and (np.diff(ends) > 0).all()
        parts = [ids[a:b].tolist() for a, b in zip(ends[:-1].astype(int), ends[1:].astype(int))]
        sides[side] = list(zip(parts[::2], parts[1::2])) if meta["pairs"] else [p[:-1] for p in parts]
        assert len(sides[side]) == count["rows"]
    assert list(folder.glob("*.tmp")) == []
    return meta, sides


@pytest.fixture
def spell(docs):
    """A text's tokens, by the tokenizer itself wherever the text spells no special token."""
    tokenizer = load_tokenizer(docs[0] / "t5")
    return lambda text: tokenizer(" ".join(text.split()), add_special_tokens=False)["input_ids"]


def prepare_text(docs, out, *argv):
    script("text").main([*map(str, argv), "--encoder", f"{docs[0]}/t5", "--out", str(out), "--workers", "1", "--allow_unknown"])
    return prepared(out)


def write_jsonl(file, records):
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_packing_loses_and_invents_nothing(tmp_path):
    """With a tokenizer that knows every character: decoding the files gives the texts back, "</s>" and "<pad>" in them included."""
    texts = odd_texts(600)
    tokenizer = data.scratch.train_tokenizer([" ".join(t.split()) for t in texts], 150)
    tokenizer.save_pretrained(tmp_path / "t5-small")
    file = write_jsonl(tmp_path / "a.jsonl", [dict(text=t) for t in texts])
    for workers in ("1", "2"):
        script("text").main([str(file), "--encoder", f"{tmp_path}/t5-small", "--out", f"{tmp_path}/{workers}", "--val_share", "0.2",
                             "--workers", workers])
    meta, sides = prepared(tmp_path / "1")
    assert meta == prepared(tmp_path / "2")[0] and (meta["x_mean"], meta["x_std"], meta["dtype"], meta["length"]) == (0.0, 0.2, "uint16", 0)
    assert 60 < len(sides["val"]) < 180 and not {0, 1, 2, 3} & {i for rows in sides.values() for ids in rows for i in ids}
    back = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for rows in sides.values() for ids in rows]
    assert sorted(back) == sorted(" ".join(t.split()) for t in texts)


def test_text_formats_agree(docs, tmp_path):
    texts = [t.replace("\n", " ").replace("\t", " ") for t in odd_texts(80)]
    txt, packed = tmp_path / "a.txt", tmp_path / "b.jsonl.gz"
    txt.write_bytes(b"\xef\xbb\xbf\r\n" + "\r\n \r\n\r\n".join(t.replace(" ", "\r\n", 1) for t in texts).encode())
    packed.write_bytes(gzip.compress(write_jsonl(tmp_path / "b.jsonl", [dict(text=t) for t in texts]).read_bytes()))
    metas = [prepare_text(docs, tmp_path / f"out{i}", file, "--val_share", "0.3")[0]
             for i, file in enumerate((txt, tmp_path / "b.jsonl", packed))]
    assert metas[0] == metas[1] == metas[2]
    halves = [write_jsonl(tmp_path / f"{i}.jsonl", [dict(text=t) for t in texts[i * 40:i * 40 + 40]]) for i in (0, 1)]
    assert prepare_text(docs, tmp_path / "out3", *halves, "--val_share", "0.3")[0] == metas[0]


def test_text_pairs(docs, spell, tmp_path, capsys):
    pairs = [(f"{i} the file", f"of the model {i}.") for i in range(60)]
    file = write_jsonl(tmp_path / "a.jsonl", [dict(input=a, output=b) for a, b in [*pairs, ("", "x"), ("x", " \n ")]])
    meta, sides = prepare_text(docs, tmp_path / "out", file, "--val_share", "0.2")
    assert meta["pairs"] is True and len(sides["val"]) > 2 and "2 rows dropped" in capsys.readouterr().out
    assert sorted(sides["train"] + sides["val"]) == sorted((spell(a), spell(b)) for a, b in pairs)


def test_long_text_is_cut_and_streamed(docs, spell, tmp_path, monkeypatch):
    monkeypatch.setattr(data.texts, "LONGEST", 100)
    (tmp_path / "a.txt").write_text("the file of été\n" * 500)
    found = list(data.texts.documents(tmp_path / "a.txt"))
    assert "".join(found) == "the file of été\n" * 500 and max(map(len, found)) < 220
    (tmp_path / "b.txt").write_text("é" * 5000)                                              # one endless line
    assert "".join(data.texts.documents(tmp_path / "b.txt")) == "é" * 5000

    taken = 0

    def endless():
        nonlocal taken
        for taken in itertools.count(1):
            yield None, ("the file",)
    rows = data.files.tokenise(endless(), load_tokenizer(docs[0] / "t5"), "uint16", [1], 0.0)
    assert [next(rows)[1][0].tolist() for _ in range(3)] == [spell("the file") + [1]] * 3 and taken <= 8000


def test_workers_do_not_change_the_data(docs, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [dict(text=t) for t in odd_texts(3000)])
    prepare_text(docs, tmp_path / "one", file)
    script("text").main([str(file), "--encoder", f"{docs[0]}/t5", "--out", str(tmp_path / "two"), "--workers", "2", "--allow_unknown"])
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("name, content, says", [
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl: line 2: not JSON"),
    ("a.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', r'a.jsonl: line 3: must have "text", or "input" and "output"'),
    ("a.jsonl", b'{"input": "a"}\n', r'line 1: must have "text"'), ("a.jsonl", b'["text"]\n', r'line 1: must have "text"'),
    ("a.jsonl", b'{"text": 5}\n', r'line 1: "text" is not text'), ("a.jsonl", b'{"text": "\\ud800"}\n', r'line 1: "text" is not text'),
    ("a.jsonl", b'{"text": "a"}\n{"input": "a", "output": "b"}\n', r"a.jsonl: pairs here, documents before"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl: line 2: not UTF-8"),
    ("a.txt", b"a\nb\nc\xe9\n", r"a.txt: line 3: not UTF-8"),
    ("a.txt", b"a\xc3", r"a.txt: line 1: not UTF-8"), ("a.txt", b"", r"a.txt: empty"), ("a.txt", b" \n\n \n", r"a.txt: no text in it"),
    ("a.txt", None, r"a.txt: no such file"), ("a.csv", b"a,b", r"a.csv: must end in .txt or .jsonl"),
    ("a.txt.gz", gzip.compress(b"the file\n" * 5000)[:-20], r"a.txt.gz: line \d+: damaged or cut-off gzip"),
    ("a.txt.gz", b"the file", r"a.txt.gz: line 1: damaged or cut-off gzip"), ("a.txt.gz", gzip.compress(b""), r"a.txt.gz: no text in it"),
    ("a.txt", b"one document only", r"no rows for val \(rows: 1 train\): too little text; .*--val_share"),
    ("a.jsonl", b'{"text": " "}\n', r"no rows for train \(rows: none\)")])
def test_text_errors(name, content, says, docs, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=says) as stop:
        prepare_text(docs, tmp_path / "out", tmp_path / name, "--val_share", "1e-9")
    assert "\n" not in str(stop.value) and list(tmp_path.glob("out/*")) == []


@pytest.mark.parametrize("argv, says", [(["--val_share", "1"], "must lie between 0 and 1"), (["--workers", "0"], "at least 1"),
                                        (["--encoder", "{tmp_path}"], "the folder is there, but cannot be read"),
                                        (["--encoder", "no/such"], "neither a folder here")])
def test_text_option_errors(argv, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "a.txt").write_text("the file")
    with pytest.raises(SystemExit) as stop:
        script("text").main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *(a.format(tmp_path=tmp_path) for a in argv)])
    assert says in str(stop.value) + capsys.readouterr().err


def test_an_interrupted_preparation_changes_nothing(docs, tmp_path, monkeypatch, capsys):
    first, second = (write_jsonl(tmp_path / f"{i}.jsonl", [dict(text=t) for t in odd_texts(3000, i)]) for i in (0, 1))
    add, stop = data.files.Files.add, [True]

    def interrupted(self, side, parts):
        if stop[0] and sum(c["rows"] for c in self.counts.values()) == 1500:
            assert (self.new / "train.bin").is_file()
            raise KeyboardInterrupt
        add(self, side, parts)
    monkeypatch.setattr(data.files.Files, "add", interrupted)
    with pytest.raises(SystemExit, match="interrupted: .*the same command starts anew"):
        prepare_text(docs, tmp_path / "out", first)
    assert list((tmp_path / "out").iterdir()) == []
    stop[0] = False
    one, _ = prepare_text(docs, tmp_path / "out", first)
    assert "replaced" not in capsys.readouterr().out
    stop[0] = True
    with pytest.raises(SystemExit, match="interrupted"):
        prepare_text(docs, tmp_path / "out", second)
    assert prepared(tmp_path / "out")[0] == one                                              # what was there is still whole
    stop[0] = False
    pairs = write_jsonl(tmp_path / "p.jsonl", [dict(input=t, output=t) for t in odd_texts(500)])
    assert prepare_text(docs, tmp_path / "out", pairs)[0]["pairs"] and "replaced what was there" in capsys.readouterr().out
    prepare_text(docs, tmp_path / "out", first)
    assert prepared(tmp_path / "out")[0] == one and not list((tmp_path / "out").glob("*.idx"))


def parquet(folder, **splits):
    """A folder of Parquet files, named and written as the Hugging Face hub has them."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    folder.mkdir()
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def prepare_hub(name, docs, out, *argv):
    script(name).main([*argv, "--encoder", f"{docs[0]}/t5", "--out", str(out), "--workers", "1", "--allow_unknown"])
    return prepared(out)


def test_openwebtext(docs, spell, tmp_path):
    texts = [f"the file {i}\n\nof été" for i in range(120)]
    repo = parquet(tmp_path / "repo", train=[dict(text=t) for t in [*texts, "", None]])
    meta, sides = prepare_hub("openwebtext", docs, tmp_path / "out", "--repo", repo, "--val_share", "0.2")
    assert sorted(sides["train"] + sides["val"]) == sorted(map(spell, texts)) and set(sides) == {"train", "val"} and not meta["pairs"]
    meta, sides = prepare_hub("openwebtext", docs, tmp_path / "trial", "--repo", repo, "--limit", "100")
    assert sorted(sides["train"] + sides["val"]) == sorted(map(spell, texts[:100]))


def test_tinystories(docs, spell, tmp_path):
    stories = {side: [f"{side} {i}: the file" for i in range(n)] for side, n in (("train", 30), ("validation", 5))}
    repo = parquet(tmp_path / "repo", **{side: [dict(text=text) for text in texts] for side, texts in stories.items()})
    meta, sides = prepare_hub("tinystories", docs, tmp_path / "out", "--repo", repo)
    assert sides == dict(train=list(map(spell, stories["train"])), val=list(map(spell, stories["validation"]))) and not meta["pairs"]


def test_pretokenized(docs, tmp_path):
    rows = np.random.default_rng(0).integers(0, 20, (90, 12)).tolist()
    repo = parquet(tmp_path / "repo", train=[dict(input_ids=r, attention_mask=[1] * 12) for r in rows])
    out = tmp_path / "out"
    script("openwebtext").main(["--pretokenized", repo, "--encoder", f"{docs[0]}/t5", "--out", str(out), "--val_share", "0.2"])
    found = np.concatenate([np.fromfile(out / f"{side}.bin", dtype=np.uint16).reshape(-1, 12) for side in ("train", "val")])
    assert sorted(found.tolist()) == sorted(rows)
    bad = parquet(tmp_path / "bad", train=[dict(input_ids=[1, 2]), dict(input_ids=[3, 32099])])
    with pytest.raises(SystemExit, match="row 1: token id 32099 in it"):
        script("openwebtext").main(["--pretokenized", bad, "--encoder", f"{docs[0]}/t5", "--out", str(out)])
    assert (out / "meta.json").is_file()


@pytest.mark.parametrize("name, row", [
    ("wmt14_de_en", lambda a, b: dict(translation=dict(de=a, en=b))), ("xsum", lambda a, b: dict(document=a, summary=b, id="7"))])
def test_paired_datasets(name, row, docs, spell, tmp_path):
    pairs = {side: [(f"{side} {i}: the file", f"of {i}.") for i in range(n)] for side, n in (("train", 30), ("validation", 5), ("test", 4))}
    repo = parquet(tmp_path / "repo", **{side: [row(a, b) for a, b in rows] for side, rows in pairs.items()})
    meta, sides = prepare_hub(name, docs, tmp_path / "out", "--repo", repo)
    assert meta["pairs"] is True and list(meta["counts"]) == ["train", "val", "test"]
    for ours, theirs in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert sides[ours] == [(spell(a), spell(b)) for a, b in pairs[theirs]]                # in their order
    assert [len(r) for r in prepare_hub(name, docs, tmp_path / "trial", "--repo", repo, "--limit", "3")[1].values()] == [3, 3, 3]


@pytest.mark.parametrize("name, row, repo, where", [
    ("openwebtext", dict(text="the file"), "Skylion007/openwebtext", dict(revision="refs/convert/parquet")),
    ("wmt14_de_en", dict(translation=dict(de="the file", en="a list")), "wmt/wmt14", dict(name="de-en")),
    ("xsum", dict(document="the file", summary="a list"), "EdinburghNLP/xsum", dict(revision="refs/convert/parquet")),
    ("tinystories", dict(text="the file"), "roneneldan/TinyStories", {})])
def test_the_hub_is_asked_for_parquet(name, row, repo, where, docs, tmp_path, monkeypatch):
    """A whole dataset is downloaded, not streamed, from the revision that holds Parquet; the hub is a folder here."""
    folder = parquet(tmp_path / "repo", train=[row] * 4, validation=[row])
    import datasets
    load, asked = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: asked.append((a, kw)) or load(folder, cache_dir=str(tmp_path / "cache")))
    monkeypatch.setattr(data.files, "side_of", lambda text, share, sides=iter(["train", "val"] * 2): next(sides))
    _, sides = prepare_hub(name, docs, tmp_path / "out")
    assert asked == [((repo,), dict(streaming=False) | where)] and list(map(len, sides.values())) in ([2, 2], [4, 1])


def test_dataset_errors(docs, tmp_path, monkeypatch):
    no_column = parquet(tmp_path / "a", train=[dict(body="x")])
    no_split = parquet(tmp_path / "b", train=[dict(document="x", summary="y")])
    numbers = parquet(tmp_path / "c", train=[dict(text=5)])
    (tmp_path / "d").mkdir()
    for name, repo, says in (("openwebtext", no_column, "has no column text; it has body"),
                             ("openwebtext", numbers, "column text holds int, not str"),
                             ("xsum", no_split, "has no split validation; it has train"),
                             ("xsum", str(tmp_path / "d"), "neither a folder of Parquet")):
        with pytest.raises(SystemExit, match=says) as stop:
            prepare_hub(name, docs, tmp_path / "out", "--repo", repo)
        assert "\n" not in str(stop.value) and list(tmp_path.glob("out/*")) == []
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match="pip install datasets"):
        prepare_hub("xsum", docs, tmp_path / "out")


class Vocabulary:
    def __len__(self):
        return 80000

    def get_vocab(self):
        return {}


def test_known_encoder_has_the_papers_statistics(tmp_path, docs):
    with data.files.Files(tmp_path / "out", "uint32") as files:
        for i in range(3):
            files.add("val" if i else "train", [np.array([70000 + i, 1], np.uint32)])
        files.finish("t5-small", Vocabulary())
    meta, sides = prepared(tmp_path / "out")
    assert (meta["x_mean"], meta["x_std"], meta["dtype"]) == (0.0, 0.2, "uint32")
    assert sides == {"train": [[70000]], "val": [[70001], [70002]]}
    digest = hashlib.sha256((tmp_path / "out/train.bin").read_bytes() + (tmp_path / "out/val.bin").read_bytes()).hexdigest()
    assert meta["fingerprint"] == digest[:12]


# ---------------------------------------------------------------------------------------------------------------------
# conditions

N_COND = torch.tensor([3, 0, 5, 2])
COND = condition_mask(N_COND, L)


def test_who_sees_whom_in_the_encoder(docs):
    """A condition sees only itself; a target sees both, unless the condition is dropped: then it is encoded as if it were alone."""
    encoder = load_encoder(docs[0] / "t5")
    with torch.no_grad():
        for parameter in encoder.parameters():  # louder than training left it: what is seen must show
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(parameter.numel())))
    ids = torch.randint(4, encoder.config.vocab_size, (4, L), generator=seeded(0))
    other_target = torch.where(COND[..., 0], ids, torch.randint(4, encoder.config.vocab_size, (4, L), generator=seeded(1)))
    other_cond = torch.where(COND[..., 0], torch.randint(4, encoder.config.vocab_size, (4, L), generator=seeded(2)), ids)
    drop = torch.tensor([False, False, True, False])

    def x(ids, **kw):
        return embed(encoder, ids, 0.5, 2.0, COND, **kw)
    changed = (x(ids) - x(other_target)).abs().amax(2) > 1e-6
    assert not changed[COND[..., 0]].any() and changed[~COND[..., 0]].any()
    changed = (x(ids, drop=drop) - x(other_cond, drop=drop)).abs().amax(2) > 1e-6
    assert changed[0, 3:].all() and changed[3, 2:].all() and not changed[1].any() and not changed[2].any()
    assert (x(ids, drop=drop)[2, :5] == 0).all() and not (x(ids)[2, :5] == 0).any()
    assert torch.allclose(x(ids)[1], embed(encoder, ids, 0.5, 2.0)[1], atol=1e-5)      # a condition of length 0 is no condition
    assert torch.allclose(embed(encoder, ids, 0.5, 2.0), (encoder(input_ids=ids).last_hidden_state - 0.5) / 2)
    alone = embed(encoder, ids[:1, :3], 0.5, 2.0)                                        # row 0's condition by itself
    assert torch.allclose(x(ids)[0, :3], alone[0], atol=1e-5)


def test_losses_of_rows_with_conditions(golden):
    """Written out for one row of each kind: decode corrupts the condition too, denoising keeps it clean, no loss counts it."""
    B, cfg = 4, Config()
    x, ids = torch.randn(B, L, E, generator=seeded(1)), torch.randint(V, (B, L), generator=seeded(2))
    r = draws(B, 1, cfg, seed=3)
    mse, ce = row_losses(golden, 1, 2, x, ids, COND, **r, decode_noise=1.0)
    w, eps, one, zero = r["w"], r["eps"], torch.ones(1), torch.zeros(1, L, E)
    with torch.no_grad():
        z = r["p"] * x[:1] + (1 - r["p"]) * eps[:1]
        logits = golden(z, zero, one, w[:1], n_decode=1)[1]
        assert torch.allclose(ce[0], F.cross_entropy(logits[0, 3:], ids[0, 3:]), rtol=1e-5)
        for i in (1, 2, 3):
            n, t, row = int(N_COND[i]), r["t"][i], slice(i, i + 1)
            z = t * x[row] + (1 - t) * 2 * eps[row]
            z[:, :n] = x[row, :n]
            x_sc = zero.clone()
            x_sc[:, :n] = x[row, :n]
            target = c = max(1 - t, 0.05)
            target = (x[row] - z) / c
            if i < 3:
                x_u = golden(z, x_sc, t[None], w[row])[0]
                x_sc = torch.cat([x[row, :n], x_u[:, n:]], dim=1)
            x_pred = golden(z, x_sc, t[None], w[row])[0]
            if i < 3:
                target = target + (1 - 1 / w[i]) * (x_pred - x_u) / c
            assert torch.allclose(mse[i - 1], (((x_pred - z) / c - target)[0, n:] ** 2).mean(), rtol=1e-4), i
    values, counts = torch.tensor([1.0, 2, 4, 8])[:, None].expand(4, L), ~COND[..., 0]
    want = 0.2 * 1 + 0.4 * (2 * 8 + 4 * 3) / (8 + 3) + 0.4 * 8                          # means over positions, not over rows
    assert abs(train.objective([(values[rows], counts[rows]) for rows in (slice(0, 1), slice(1, 3), slice(3, 4))], cfg) - want) < 1e-6


@torch.no_grad()
def test_rows_with_conditions_of_many_lengths_are_as_alone(golden, docs):
    encoder = load_encoder(docs[0] / "t5")
    rows = [[5, 6, 7], [], [8, 9, 10, 11, 12], [4]]
    cond, x_cond = embed_conditions(encoder, rows, L, dict(x_mean=0.0, x_std=1.0), slice(0, 4))
    assert cond.sum((1, 2)).tolist() == [3, 0, 5, 1]

    def run(i):
        rng = [seeded(7, j) for j in range(4)]
        noise = lambda: torch.stack([torch.randn(L, E, generator=g) for g in rng])[i]  # noqa: E731
        *_, (_, z, _) = flow(golden, 2 * noise(), time_grid(6), noise, 1.0, 1.5, cond[i], x_cond[i], cfg=2.0)
        return z, decode(golden, z, 1.5)[0]
    z, tokens = run(slice(0, 4))
    assert torch.equal(z[cond[..., 0]], x_cond[cond[..., 0]])                            # clean to the end
    for i in range(4):
        alone = run(slice(i, i + 1))
        assert torch.allclose(alone[0][0], z[i], atol=1e-4) and torch.equal(alone[1][0], tokens[i])
    unguided, guided = (list(flow(golden, Z, time_grid(3), None, 0.0, 1.0, cond[:2], x_cond[:2], cfg=cfg))[-1][1] for cfg in (1.0, 3.0))
    assert not torch.allclose(unguided, guided)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_an_epoch_without_overlap(world):
    """As main does it: the global batch of a step, cut by rank; 20 rows in batches of 6 run over the epoch's end after 20 places."""
    seen = {rank: [] for rank in range(world)}
    for step in range(10):
        rows = train.batch_rows(20, step, 6, seed=1)
        for rank in range(world):
            seen[rank] += list(rows[rank * 6 // world:(rank + 1) * 6 // world])
    assert len({len(r) for r in seen.values()}) == 1
    assert sorted(r for rows in seen.values() for r in rows) == sorted(list(range(20)) * 3)


@pytest.fixture(scope="session")
def pairs_run(tmp_path_factory):
    """data/docs_cond/prepare.py on a made-up package, and a finished tiny run on it."""
    import data.docs_cond.prepare as prepare_cond
    folder = tmp_path_factory.mktemp("pairs") / "data"
    folder.mkdir()
    verbs, nouns = ["load", "close", "build", "sort", "read", "write"], [f"{a}_{b}" for a in ("old", "new", "big", "good") for b in ("row", "file", "list", "word")]
    body = "".join(f'def {v}_{n}(path, *more, flag=1, **rest):\n    """{v.title()} the {n.replace("_", " ")}. Then more.\n\n    Not this."""\n\n'
                   for v in verbs for n in nouns)
    (folder / "package.py").write_text(body + 'class Row(list):\n    """Sort the old row."""\n\nclass Odd:\n    """no sentence"""\n')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HERE=folder, LENGTH=80, COND_LENGTH=50, COMMON=1, MIN_PAIRS=10, VAL_SHARE=0.2,
                                source_files=lambda: sorted(folder.glob("*.py")), ENCODER=dict(width=16, layers=1, heads=2, steps=30)).items():
            patch.setattr(prepare_cond, name, value)
        prepare_cond.main([])
    run = folder.parent / "run"
    train.main(small(folder, run, "--length=80", "--cond_length=50", "--steps=200", "--sample_steps=4", "--sample_cfg=2.0", "--cond_drop=0.3"))
    return folder, run


def test_pairs_of_signatures_and_sentences(pairs_run):
    folder, run = pairs_run
    meta, tokenizer = json.loads((folder / "meta.json").read_text()), load_tokenizer(folder / "t5")
    sides = open_data(folder, 80, 50, str(folder / "t5"))[:2]
    assert sum(map(len, sides)) >= 96 and meta["counts"]["val"]["rows"] == len(sides[1]) > 5
    texts = {}
    for rows in sides:
        for ids, n in zip(*rows.batch(range(len(rows)))):
            texts[to_text(tokenizer, ids[:n])] = to_text(tokenizer, ids, n)
    assert texts["def load old row ( path, more, flag, rest)"] == "Load the old row."
    import data.docs_cond.prepare as prepare_cond
    assert prepare_cond.pairs(folder / "package.py")[-1] == ("Row", "class Row(list)", "Sort the old row.")
    sample = records(run)[-1]["samples"][0]
    cond, target = sample.split(" -> ")[0], sample.rsplit(" | ", 1)[1]
    assert texts[cond] == target
    log = [r["val_ce"] for r in records(run) if "val_ce" in r]
    assert log[-1] < log[0]


@pytest.mark.parametrize("text", ["Return the ___ and a list at the end.", "_____ every row  and the ___ by ___.", "Build the file ___", "___"])
def test_infilling_keeps_what_is_known_to_the_letter(text, run, capsys):
    outs = []
    for _ in range(2):
        sample_main(["--ckpt", str(run), "--infill", text, "--gap", "2", "--n", "3", "--steps", "3", "--seed", "5"])
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and len(outs[0].splitlines()) == 3
    for line in outs[0].splitlines():
        assert re.fullmatch(".*".join(map(re.escape, re.split("___+", text))), line), line


def test_gaps_of_every_size_that_has_room(run):
    """Two gaps of 1 to 3 tokens in rows of 8: known tokens stand around them, the embeddings of which do not see the gaps."""
    settings = load(run)[1]
    tokenizer, encoder = load_tokenizer(settings["encoder"]), load_encoder(settings["encoder"])
    sizes, known, x = gap_rows(encoder, tokenizer, "Return ___ and ___.", 3, 8, settings)
    ids = to_ids(tokenizer, ["Return the and the."])[0]
    assert len(ids) == 5 and sizes == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)] and known.shape == (6, 8, 1) and x.shape == (6, 8, 16)
    for (a, b), row in zip(sizes, known[..., 0].tolist()):
        assert row == [True] + [False] * a + [True] + [False] * b + [True] * (6 - a - b)
    x_mean, x_std = (torch.tensor(settings[key]) for key in ("x_mean", "x_std"))
    for other in (4, 7):
        row = torch.tensor([[ids[0], other, other, ids[2], other, ids[4], 1, 1]])
        assert torch.allclose(embed(encoder, row, x_mean, x_std, known[3:4])[known[3:4, :, 0]], x[3][known[3, :, 0]], atol=1e-5)
    assert fill(tokenizer, "Return  ___ and ___.", torch.tensor(to_ids(tokenizer, ["the file a list"])[0]), (2, 2)) == "Return  the file and a list."


def test_a_gap_is_not_filled_with_the_end_of_the_text(run):
    """Of the sizes tried, the decode head is surest of one that </s> fills; then that is taken only where every other holds one as well."""
    settings = load(run)[1]
    tokenizer, encoder = load_tokenizer(settings["encoder"]), load_encoder(settings["encoder"])
    word = to_ids(tokenizer, ["file"])[0][0]
    for second, filled in ((word, "Return file file."), (1, "Return .")):
        tokens = torch.full((2, 8), 1)
        tokens[1, 1:3] = torch.tensor([word, second])
        sure = torch.tensor([[0.9] * 8, [0.5] * 8])
        assert infill(lambda *_, **how: (tokens, sure), None, settings, tokenizer, encoder, ["Return ___."], 2, 8) == [filled]


def test_an_interrupt_before_the_first_text_writes_nothing(run, monkeypatch, tmp_path):
    monkeypatch.setattr("sample.infill", lambda *_, **how: [])  # its chunks hold no text whole
    with pytest.raises(KeyboardInterrupt):
        sample_main(["--ckpt", str(run), "--infill", "Return the ___.", "--out", str(tmp_path / "out.jsonl")])
    assert not (tmp_path / "out.jsonl").exists()


def test_training_with_gaps(docs, tmp_path):
    """In a share of the rows all but one span, of any length, is a condition: it runs, and learns."""
    known = random_gaps(4000, 12, 0.5, seeded(0))[..., 0]
    gaps = [len(re.findall("0+", "".join(map(str, row.int().tolist())))) for row in known]
    assert max(gaps) == 1 and abs(known.any(1).float().mean() - 0.5) < 0.03
    assert abs((~known).sum(1)[known.any(1)].float().mean() - 4.3) < 0.3                          # of two numbers from 0 to 12
    train.main(small(docs[0], tmp_path / "run", "--steps=40", "--gap_share=0.5"))
    log = records(tmp_path / "run")
    assert log[-1]["loss"] < log[0]["loss"]


@pytest.mark.parametrize("argv, says", [
    (["--infill", "No gap."], "--infill 'No gap.': has no gap; write ___ where one shall be"),
    (["--infill", "Return the flibbertigibbet ___."], "--infill: 'flibbertigibbet' is not among the words that the run knows"),
    (["--infill", "the " * 50 + "___"], "tokens and 1 gaps, and a row of this run has room for 39; shorten it"),
    (["--infill", "___ " * 8], "--gap 3: for 8 gaps these are more than 1,000 ways to try"),
    (["--infill", "a ___", "--cond", "b"], "--infill: has neither --cond nor --trace"),
    (["--infill", "Return \udce4 ___"], "is not UTF-8"),
    (["--infill", "Return the (___) file"], "'(the)' is not among the words that the run knows"),
    (["--out", "a.html", "--trace", "a.html"], "--out a.html: is the file of --trace too; name another"),
    (["--gap", "2"], "--gap 2: is for --infill, which fills gaps; leave it out"),
    (["--infill", "a ___", "--gap", "0"], "--gap 0: must be between 1 and 64")])
def test_infill_errors(argv, says, run, capsys):
    with pytest.raises(SystemExit) as stop:
        sample_main(["--ckpt", str(run), *argv])
    assert says in f"{stop.value} {capsys.readouterr().err}"


def test_sampling_from_conditions(pairs_run, tmp_path, capsys):
    folder, run = pairs_run
    (tmp_path / "c.txt").write_text("def load_file(path)\nclass Row\n")
    (tmp_path / "c.jsonl").write_text('{"input": "class Row", "output": "A row."}\n{"input": "class File", "output": "A file."}\n')
    common = ["--ckpt", str(run), "--seed", "3"]
    sample_main([*common, "--cond", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "o.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(r["cond"], r["reference"], r["steps"], r["cfg"]) for r in lines] == [("class Row", "A row.", 4, 2.0), ("class File", "A file.", 4, 2.0)]
    capsys.readouterr()
    sample_main([*common, "--cond", "class Row", "--n", "1"])
    assert capsys.readouterr().out == lines[0]["text"] + "\n"                             # alone = in a batch
    sample_main([*common, "--cond", str(tmp_path / "c.txt"), "--steps", "2", "--cfg", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    for argv, says in ((common, "--cond: .* writes from a condition"), ([*common, "--cond", str(tmp_path / "no.txt")], "cannot be read"),
                       ([*common, "--cond", str(tmp_path / "c.jsonl"), "--length", "50"], "--length 50: leaves no room")):
        with pytest.raises(SystemExit, match=says):
            sample_main(argv)


def test_conditions_are_refused_without_pairs(run, docs, pairs_run):
    with pytest.raises(SystemExit, match="does not write from a condition"):
        sample_main(["--ckpt", str(run), "--cond", "class Row"])
    with pytest.raises(SystemExit, match="cond_length = 5: .* does not hold pairs"):
        train.main(small(docs[0], run, "--cond_length=5"))
    with pytest.raises(SystemExit, match="cond_length = 0: .* holds pairs"):
        train.main(small(pairs_run[0], run))
    with pytest.raises(SystemExit, match="was prepared for"):
        train.main([*small(docs[0], run), f"--encoder={pairs_run[0]}/t5"])


def test_eval_of_pairs(pairs_run, scorer, docs, tmp_path):
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    folder, run = pairs_run
    argv = ["--ckpt", str(run), "--scorer", str(docs[0] / "scorer"), "--results", str(tmp_path / "r.jsonl"), "--n", "4", "--steps", "2"]
    evaluate.main(argv)
    evaluate.main([*argv[:-4], "--real", "5"])
    ours, real = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert 0 <= ours["BLEU"] <= 100 and ours["samples"] == 4 and real["samples"] == 5 and math.isfinite(real["gen_ppl"])


def test_starting_from_weights(run, docs, tmp_path):
    """init_from: the weights of another run, none of its steps; a network of another size is refused."""
    start = ["--warmup=1000", "--lr=1e-9", "--steps=1", f"--init_from={run}"]
    train.main(small(docs[0], tmp_path / "run", *start))
    a, b = load(run)[0].state_dict(), load(tmp_path / "run")[0].state_dict()
    assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a) and records(tmp_path / "run")[-1]["step"] == 1
    with pytest.raises(SystemExit, match="init_from = .*: another kind of network .*dim 32, here 64"):
        train.main(small(docs[0], tmp_path / "other", *start, "--dim=64"))
    assert not (tmp_path / "other").exists()  # a start that was refused leaves nothing


def test_released_conditional_weights_know_their_task(tmp_path, monkeypatch):
    import huggingface_hub
    torch.save({"params": golden_weights()}, tmp_path / "checkpoint_1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    want = {"ELF-B-de-en-torch": (128, 64, 64), "ELF-B-xsum-torch": (1088, 1024, 64), "ELF-B-owt-torch": (1024, 0, None)}
    for name, (length, cond_length, steps) in want.items():
        settings = load(f"embedded-language-flows/{name}")[1]
        assert (settings["length"], settings["cond_length"], settings.get("sample_steps")) == (length, cond_length, steps)


# ---------------------------------------------------------------------------------------------------------------------
# progressive distillation

def test_times_of_teacher_and_student():
    cfg = Config(student_steps=4, teacher_substeps=3)
    r = draws(20_000, 4000, cfg)
    assert r["times"].shape == (20_000, 4) and (r["times"].diff() >= 0).all()
    assert torch.equal(r["times"][:, 0], r["t"]) and torch.allclose(r["times"][:, -1], r["t"] + 1 / 4)
    logit = torch.logit(r["t"] / 0.75)
    assert abs(logit.mean() + 1.5) < 0.02 and abs(logit.std() - 0.8) < 0.02
    inner = torch.logit(((r["times"][:, 1:-1] - r["t"][:, None]) * 4).clamp(1e-4, 1 - 1e-4))
    assert abs(inner.mean() + 1.5) < 0.02 and abs(inner.std() - 0.8) < 0.03
    r = draws(8, 2, Config(student_steps=1, teacher_substeps=2))
    assert (r["t"] == 0).all() and (r["times"][:, -1] == 1).all()


@torch.no_grad()
def test_one_step_to_the_distilled_target_ends_where_the_teachers_steps_end(golden):
    """Where they end is known from the sampler, which takes them one row at a time."""
    times = torch.tensor([[0.1, 0.15, 0.3], [0.7, 0.8, 0.9]])
    for cond_mask in (NONE, torch.arange(L)[None, :, None].expand(2, L, 1) < torch.tensor([0, 3])[:, None, None]):
        z, nothing = torch.where(cond_mask, X, Z), torch.where(cond_mask, X, 0.0)
        target = train.distilled_target(golden, z, nothing, times, torch.full((2,), 3.0), cond_mask)
        landed = z + (times[:, -1] - times[:, 0])[:, None, None] * velocity(target, z, times[:, 0, None, None])
        for i in range(2):
            row = slice(i, i + 1)
            *_, (_, end, _) = flow(golden, z[row], times[i], None, 0.0, 3.0, cond_mask[row], X[row])
            assert torch.allclose(landed[row], end, atol=1e-5)
    for span in (0.2, 1e-3):  # a single step is the student's own: the target is the teacher's x_pred, and a student like it has no loss
        one = torch.tensor([[0.1, 0.1 + span], [0.7, 0.7 + span]])
        target = train.distilled_target(golden, Z, X, one, W, NONE)
        assert torch.allclose(target, golden(Z, X, one[:, 0], W)[0], atol=1e-3)
    r = draws(10, 2, Config(student_steps=4, teacher_substeps=1))
    mse, _ = row_losses(golden, 2, 4, torch.randn(10, L, E), torch.randint(V, (10, L)), NONE[:1].expand(10, L, 1), **r, teacher=golden)
    assert (mse < 1e-9).all()


def test_the_distilled_target_of_a_linear_teacher():
    """x_pred = a z gives dz/dt = (a - 1) z / (1 - t), so that z goes as (1 - t)^(1 - a): one step to the target ends there."""
    a, times = -0.5, torch.linspace(0.2, 0.6, 4001).expand(2, -1)
    target = train.distilled_target(lambda z, *_: (a * z, None), Z, X, times, W, NONE)
    end = Z + 0.4 * velocity(target, Z, torch.tensor(0.2))
    assert torch.allclose(end, Z * (0.4 / 0.8) ** (1 - a), atol=1e-3)


def test_losses_of_a_student(golden):
    """Mean square distance to the target, from the x_sc that both see: the teacher's guess on some rows, nothing on others."""
    torch.manual_seed(0)
    student = ELF(golden.config)
    cfg = Config(student_steps=4, teacher_substeps=3)
    x, ids, r = torch.randn(10, L, E), torch.randint(V, (10, L)), draws(10, 2, cfg)
    none = NONE[:1].expand(10, L, 1)
    mse, ce = row_losses(student, 2, 4, x, ids, none, **r, teacher=golden)
    t3, w = r["t"][:, None, None], r["w"]
    z, x_sc = t3 * x + (1 - t3) * 2 * r["eps"], torch.zeros_like(x)
    with torch.no_grad():
        x_sc[2:6] = golden(z[2:6], x_sc[2:6], r["t"][2:6], w[2:6])[0]
    target = train.distilled_target(golden, z, x_sc, r["times"], w, none)
    assert torch.allclose(mse, (student(z, x_sc, r["t"], w)[0] - target).square().mean((1, 2))[2:], rtol=1e-4)
    assert torch.equal(ce, row_losses(student, 2, 4, x, ids, none, **{k: v for k, v in r.items() if k != "times"})[1])
    mse.sum().backward()
    assert student.in_proj.weight.grad is not None and golden.in_proj.weight.grad is None


def test_rounds_of_distillation(run, docs, tmp_path, monkeypatch, capsys):
    """Each round is a run of its own, of half the steps, from the last one's weights; stopped anywhere, the same command ends with the same."""
    argv = [f"--teacher={run}", "--student_steps=4", "--teacher_substeps=2", "--rounds=2", "--steps=10", "--save_interval=2", "--noise_scale=0.5"]
    train.main(small(docs[0], tmp_path / "whole", *argv))
    content = {n: newest(tmp_path / f"whole_{n}") for n in (4, 2)}
    kept = {n: [content[n]["settings"][k] for k in ("student_steps", "teacher_substeps", "sample_steps")] for n in content}
    assert kept == {4: [4, 2, 4], 2: [2, 4, 2]} and load(tmp_path / "whole_2")[1]["teacher"] == str(run)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        real, calls = train.train_step, []
        patch.setattr(train, "train_step", lambda *a: calls.append(1) or (real(*a) if len(calls) < 15 else signal.raise_signal(signal.SIGINT)))
        patch.setattr(StopSignal, "handle", signal.default_int_handler)
        train.main(small(docs[0], tmp_path / "cut", *argv))
    assert newest(tmp_path / "cut_4")["step"] == 10 and newest(tmp_path / "cut_2")["step"] == 4
    capsys.readouterr()
    train.main(small(docs[0], tmp_path / "cut", *argv))
    assert "cut_4: finished at step 10" in capsys.readouterr().out
    for n in content:
        for part in ("model", "ema"):
            assert same(content[n][part], newest(tmp_path / f"cut_{n}")[part])
    with pytest.raises(SystemExit, match="teacher = .*: trained with other embeddings or rows .noise_scale 0.5, here 0.7"):
        train.main(small(docs[0], tmp_path / "other", *argv, "--noise_scale=0.7"))


# ---------------------------------------------------------------------------------------------------------------------
# speed

def test_bench_needs_nothing_and_leaves_nothing(tmp_path, capsys):
    argv = small("data/none", tmp_path / "run", "--bench=4", "--recompute")
    argv = [a for a in argv if not a.startswith("--encoder")] + ["--encoder=t5-small", "--length=8"]
    train.main(argv)
    out = capsys.readouterr().out
    assert "random encoder of the shape of t5-small" in out
    found = re.search(r"median step ([\d,]+) ms, ([\d,]+) tokens/s; matrix products ([\d,]+) GFLOP, (\d+)% of the ([\d,]+) GFLOP/s", out)
    step, rate, work, share, peak = (int(n.replace(",", "")) for n in found.groups())
    assert abs(rate * step / 1000 / 80 - 1) < 0.2 and abs(100 * 1000 * work / step / peak - share) < 0.2 * share + 1.5
    shares = [int(n) for n in re.findall(r"(?:data|encoder|no-grad|gradient|optimiser) (\d+)%", out)]
    assert len(shares) == 5 and 95 <= sum(shares) <= 105 and not (tmp_path / "run").exists()


def test_matrix_work_is_what_torch_counts(golden):
    """Of the gradient pass and the no-grad pass, against torch's own counter; the encoder and Newton-Schulz apart."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import T5Config, T5EncoderModel
    encoder = T5EncoderModel(T5Config(d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=2, vocab_size=24))
    x, ids = torch.randn(10, L, E), torch.randint(V, (10, L))
    with FlopCounterMode(display=False) as counter:
        loss_of(golden, x, ids, Config(), draws(10, 2, Config())).backward()
        encoder(input_ids=ids)
    assert abs(matrix_work(golden, encoder, 10, L, 2, 4) / counter.get_total_flops() - 1) < 0.1
    r = draws(10, 2, Config(student_steps=2, teacher_substeps=6))
    with FlopCounterMode(display=False) as counter:
        row_losses(golden, 2, 4, x, ids, NONE[:1].expand(10, L, 1), **r, teacher=golden)[0].sum().backward()
        encoder(input_ids=ids)
    assert abs(matrix_work(golden, encoder, 10, L, 2, 4, 6) / counter.get_total_flops() - 1) < 0.1
    golden.zero_grad()


def test_newton_schulz_work_is_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode
    for shape in MATRICES:
        with FlopCounterMode(display=False) as counter:
            train.orthogonal(torch.randn(1, *shape))
        assert counter.get_total_flops() == newton_schulz_work(torch.empty(shape))


def test_recomputing_changes_no_gradient(golden):
    def gradients(recompute):
        golden.recompute = recompute
        mse, ce = golden_losses(golden, 1, 0)
        return torch.autograd.grad(mse.mean() + ce.mean(), golden.parameters())
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(gradients(False), gradients(True)))
    golden.recompute = False


def test_nothing_compiles_twice():
    """After a first step, one without a gradient and one with, later steps and validation find their graphs ready."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    model, cfg = ELF(ELFConfig(**TINY)), Config()
    for block in model.blocks:
        block.compile(dynamic=False, backend="eager")

    def step(seed):
        x, ids = torch.randn(10, L, E, generator=seeded(seed)), torch.randint(V, (10, L), generator=seeded(seed))
        loss_of(model, x, ids, cfg, draws(10, 2, cfg, seed)).backward()
        with torch.no_grad():
            loss_of(model, x, ids, cfg, draws(10, 2, cfg, seed))
    step(0)
    before = counters["stats"]["unique_graphs"]
    step(1), step(2)
    assert 0 < before <= 4 and counters["stats"]["unique_graphs"] == before
    torch._dynamo.reset()


@pytest.mark.parametrize("bf16, tolerance", [(False, 1e-5), (True, 1e-3)])
def test_compiled_is_plain(bf16, tolerance):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, cfg = ELF(ELFConfig(**TINY | dict(depth=1))), Config()
    x, ids = torch.randn(10, L, E, generator=seeded(1)), torch.randint(V, (10, L), generator=seeded(2))

    @torch.no_grad()
    def losses():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            mse, ce = row_losses(model, 2, 0, x, ids, NONE[:1].expand(10, L, 1), **draws(10, 2, cfg, 3))
        return mse.mean() + ce.mean()
    plain = losses()
    if not compile_blocks(model.blocks, torch.device("cpu")):
        pytest.skip("torch.compile needs a C++ compiler")
    compiled = losses()
    assert abs(compiled / plain - 1) < tolerance
    torch._dynamo.reset()


def test_compiled_backward_keeps_less_and_is_plain():
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, rows, (cos, sin) = Block(64, 2), torch.randn(4, 64, 64), rotary_table(52, 32, "cpu")

    def grads():
        """The block's gradients, and the bytes that its forward kept for them."""
        kept, h = {}, rows.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.update({y.untyped_storage().data_ptr(): y.untyped_storage().nbytes()}) or y,
                                                      lambda y: y):
            with torch.autocast("cpu", torch.bfloat16):
                y = block(h, cos, sin)
        weights = {param.untyped_storage().data_ptr() for param in block.parameters()}
        return torch.autograd.grad(y.square().sum(), [h, *block.parameters()]), sum(kept[at] for at in kept.keys() - weights)
    plain, kept = grads()
    if not compile_blocks([block], torch.device("cpu")):
        pytest.skip("torch.compile needs a C++ compiler")
    compiled, kept_compiled = grads()
    for a, b in zip(plain, compiled):
        assert (a - b).norm() < 0.02 * a.norm()
    assert kept_compiled < 0.5 * kept, (kept_compiled, kept)
    torch._dynamo.reset()


def test_a_frozen_encoder_can_be_compiled(docs):
    torch._dynamo.reset()
    encoder, ids = load_encoder(docs[0] / "t5", torch.device("cpu")), torch.randint(4, 20, (3, 8), generator=seeded(1))
    cond = condition_mask(torch.tensor([2, 3, 4]), 8)
    plain = embed(encoder, ids, 0, 1), embed(encoder, ids, 0, 1, cond)
    if not compile_blocks(encoder.encoder.block, torch.device("cpu")):
        pytest.skip("torch.compile needs a C++ compiler")
    for a, b in zip(plain, (embed(encoder, ids, 0, 1), embed(encoder, ids, 0, 1, cond))):
        assert torch.allclose(a, b, atol=1e-4)
    torch._dynamo.reset()


def test_own_text_from_file_to_samples(docs, tmp_path, capsys):
    """The README's three lines: any text, prepared, trained on, and sampled from."""
    from data.text import prepare as prepare_text
    (tmp_path / "mine.txt").write_text("\n\n".join(docs[1]))
    prepare_text.main([str(tmp_path / "mine.txt"), "--encoder", str(docs[0] / "t5"), "--out", str(tmp_path / "data"), "--val_share", "0.1", "--workers", "1"])
    argv = [a for a in small(tmp_path / "data", tmp_path / "run", "--steps=3", "--length=24") if not a.startswith("--encoder")]
    train.main([*argv, f"--encoder={docs[0]}/t5"])
    capsys.readouterr()
    sample_main(["--ckpt", str(tmp_path / "run"), "--n", "2", "--steps", "2"])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_scorer_batches_weigh_tokens_evenly():
    lengths = torch.randint(2, 33, (1024,), generator=seeded(0))  # one group of 16
    batches = data.scratch.even_batches(lengths, 64, seeded(1))
    assert sorted(torch.cat(batches).tolist()) == list(range(1024)) and len(batches) == 16
    tokens = torch.tensor([lengths[b].sum() for b in batches])
    assert tokens.max() - tokens.min() <= 2 * 32 and max(len(b) for b in batches) > 3 * min(len(b) for b in batches)


def test_tokenizer_training_repeats():
    texts = prose_module(200)[1]
    a, b = (data.scratch.train_tokenizer(texts, 80).backend_tokenizer.to_str() for _ in range(2))
    assert a == b


# ---------------------------------------------------------------------------------------------------------------------
# what users ran into

def output(*command, **env):
    """(exit status, what it printed) of a program of this repository."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, encoding="utf-8", errors="replace", cwd=ROOT,
                          env=os.environ | env)
    return done.returncode, done.stdout + done.stderr


def edited(run, folder, **changes):
    """A copy of a run whose newest checkpoint says something else, and without the encoder that it brings along."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "t5")
    file = max(folder.glob("ckpt_*.pt"))
    torch.save(torch.load(file, weights_only=True) | changes, file)
    return folder


def test_another_rounding_is_said(run, docs, tmp_path, capsys):
    machine = newest(run)["machine"]
    assert machine["threads"] == torch.get_num_threads()
    edited(run, tmp_path / "run", machine=machine | dict(threads=99))
    train.main(small(docs[0], tmp_path / "run", "--steps=41"))
    assert "'threads': 99" in (said := capsys.readouterr().out) and "other rounding from here on" in said
    edited(run, tmp_path / "same")
    train.main(small(docs[0], tmp_path / "same", "--steps=41"))
    assert "from here on" not in capsys.readouterr().out


def test_checkpoints_of_the_first_format_load(run, docs, tmp_path):
    content = newest(run)
    old = {part: {re.sub("^guidance", "scale", name): tensor for name, tensor in content[part].items()} for part in ("model", "ema")}
    edited(run, tmp_path / "run", version=1, **old)
    assert torch.equal(load(tmp_path / "run")[0].guidance.tokens, load(run)[0].guidance.tokens)
    train.main(small(docs[0], tmp_path / "run", "--steps=41"))
    assert newest(tmp_path / "run")["step"] == 41


def test_a_cpu_without_bf16_gets_float32():
    code = ("import torch, train; from config import Config; from config.machine import autocast, precision; cpu = torch.device('cpu'); "
            "w = torch.nn.Linear(4, 4); opt, _ = train.optimizers(w, Config()); print(precision(cpu), opt.dtype, autocast(cpu)._enabled)")
    assert output("-c", code, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2") == (0, "torch.float32 torch.float32 False\n")
    params = [torch.nn.Parameter(torch.ones(3, 3))]
    assert train.optimizers(torch.nn.Linear(4, 4), Config(bf16=False))[0].dtype == torch.float32 and train.Muon(params, 1.0).dtype == torch.bfloat16


def test_float32_newton_schulz_is_exact():
    start, grads, _, _ = muon_run()
    for p, g in zip(start, grads):
        param = torch.nn.Parameter(p.clone())
        muon = train.Muon([param], lr=0.1, dtype=torch.float32)
        for grad in g:
            param.grad = grad.clone()
            muon.step()
        assert (param - exact_muon(p, g, 0.1)).norm() < 1e-4 * (exact_muon(p, g, 0.1) - p).norm()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_no_console_ends_a_program(encoding):
    code = "from config.machine import run_program; run_program(lambda: print('\u65e5\u00e9 \u0394'))"
    status, printed = output("-c", code, PYTHONIOENCODING=encoding)
    assert status == 0 and "\\u65e5" in printed, printed
    assert output("eval.py", "--help", PYTHONIOENCODING=encoding)[0] == 0


def test_tokens_of_another_encoder_are_refused(run, docs, pairs_run, tmp_path):
    settings = newest(run)["settings"]
    edited(run, tmp_path / "run", settings=settings | dict(encoder=f"{pairs_run[0]}/t5"))
    for program in (sample_main, evaluate.main):
        with pytest.raises(SystemExit, match="its tokenizer is not the one that the run was trained with .*copy the folder"):
            program(["--ckpt", str(tmp_path / "run"), "--n", "1"])
    shutil.copytree(pairs_run[1], tmp_path / "pairs")
    shutil.copytree(f"{pairs_run[0]}/t5", tmp_path / "t5")
    encoder = load_encoder(tmp_path / "t5")
    with torch.no_grad():
        next(encoder.parameters()).add_(1)
    encoder.save_pretrained(tmp_path / "t5")
    edited(pairs_run[1], tmp_path / "other", settings=newest(pairs_run[1])["settings"] | dict(encoder=f"{tmp_path}/t5"))
    with pytest.raises(SystemExit, match="its encoder is not the one"):
        sample_main(["--ckpt", str(tmp_path / "other"), "--cond", "class Row"])
    with pytest.raises(SystemExit, match="no/t5/t5: neither a folder here .*copy the folder from where it was made"):
        load_tokenizer("no/t5/t5")


def test_tokenizer_folders_name_what_transformers_4_knows(docs):
    settings = json.loads((docs[0] / "t5" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["additional_special_tokens"] == ["<extra_id_0>"]
    tokenizer = load_tokenizer(docs[0] / "t5")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.decode(to_ids(tokenizer, [docs[1][0]])[0]) == docs[1][0]


def test_going_on_with_another_rate(run, docs, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    with pytest.raises(SystemExit, match="lr 0.008 -> 0.001.; go on from step 40 with --change"):
        train.main(small(docs[0], tmp_path / "run", "--steps=50", "--lr=0.001"))
    for steps in (43, 50):  # killed before the first save: the change is said again, and stands in the log once
        train.main(small(docs[0], tmp_path / "run", "--steps=50", "--lr=0.001", "--change"))
        assert "from step 40 on: lr 0.008 -> 0.001" in capsys.readouterr().out
        if steps == 43:
            for file in [*(tmp_path / "run").glob("ckpt_00000050.pt"), *(tmp_path / "run").glob("best.pt")]:
                file.unlink()
    changed = [r for r in records(tmp_path / "run") if "changed" in r]
    assert changed == [dict(step=40, changed=["lr 0.008 -> 0.001"])] and newest(tmp_path / "run")["settings"]["lr"] == 0.001
    with pytest.raises(SystemExit, match="other settings .dim 32 -> 64.; give"):
        train.main(small(docs[0], tmp_path / "run", "--steps=60", "--lr=0.001", "--dim=64", "--change"))


def test_two_preparations_at_once(docs, tmp_path, capsys):
    """The second waits for the first, and then finds its work done."""
    import threading
    seen = []

    def second():
        try:
            with data.files.Files(tmp_path / "out", "uint16", once=True):
                seen.append("made it again")
        except SystemExit as stop:
            seen.append(stop.code)
    with data.files.Files(tmp_path / "out", "uint16") as files:
        (thread := threading.Thread(target=second)).start()
        for _ in range(200):
            if "waiting until it ends" in (said := capsys.readouterr().out):
                break
            time.sleep(0.02)
        assert "another process prepares it; waiting until it ends" in said and not seen
        for side in ("train", "val"):
            files.add(side, [np.array([5, 1], np.uint16)])
        files.finish("t5-small", load_tokenizer(docs[0] / "t5"))
    thread.join(20)
    assert seen == [None] and "the other process has prepared it" in capsys.readouterr().out
    assert sorted(f.name for f in tmp_path.rglob("*")) == ["meta.json", "out", "train.bin", "val.bin"]


def test_the_same_text_is_the_same_tokens(docs, pairs_run, tmp_path):
    odd, plain = "the\u00a0 file\n of\tthe </s> <pad>model.", "the file of the </s> <pad>model."
    tokenizer = load_tokenizer(docs[0] / "t5")
    assert to_ids(tokenizer, [odd]) == to_ids(tokenizer, [plain]) and not {0, 1} & set(to_ids(tokenizer, [odd])[0])
    file = write_jsonl(tmp_path / "a.jsonl", [dict(text=odd)] * 30)
    sides = prepare_text(docs, tmp_path / "out", write_jsonl(tmp_path / "b.jsonl", [dict(text=f"{i} {odd}") for i in range(60)]), file, "--val_share", "0.2")[1]
    assert to_ids(tokenizer, [plain])[0] in sides["train"] + sides["val"]
    texts = []
    for i, text in enumerate(("class\tRow\n", "class Row")):
        sample_main(["--ckpt", str(pairs_run[1]), "--cond", text, "--n", "1", "--steps", "2", "--out", str(tmp_path / f"{i}.jsonl")])
        texts.append(json.loads((tmp_path / f"{i}.jsonl").read_text())["text"])
    assert texts[0] == texts[1]


def test_text_files_in_the_wild(pairs_run, docs, tmp_path, capsys):
    conditions = lambda name: [record["cond"] for record in data.texts.read_conditions(str(tmp_path / name), None)]  # noqa: E731
    want = ["class Row\u2028\x0c", "class File"]
    raw = "class Row\u2028\x0c\nclass File\n".encode()
    for name, content in {"a.txt": raw, "b.TXT": b"\xef\xbb\xbf" + raw, "c.txt": raw.replace(b"\n", b"\r\n"), "d.txt": raw.replace(b"\n", b"\r"),
                          "e.txt.gz": gzip.compress(raw), "f.jsonl": b'\xef\xbb\xbf\n' + json.dumps(dict(input=want[0])).encode() + b'\r\n\n{"input": "class File"}\n'}.items():
        (tmp_path / name).write_bytes(content)
        assert conditions(name) == want, name
    (tmp_path / "s.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b", "reference": null}\n')
    assert [r["text"] for r in data.texts.read_samples(tmp_path / "s.jsonl")] == ["a", "b"]
    (tmp_path / "lines.txt").write_text("".join(f"the file {i}\n" for i in range(50)))      # a document a line
    assert list(data.texts.documents(tmp_path / "lines.txt")) == [f"the file {i}\n" for i in range(50)]
    (tmp_path / "blank.txt").write_text("one\ntwo\n\n")                                    # a blank line at the end parts nothing
    assert list(data.texts.documents(tmp_path / "blank.txt")) == ["one\n", "two\n"]
    (tmp_path / "paragraphs.txt").write_text("the\nfile\n\na\nlist\n")
    assert list(data.texts.documents(tmp_path / "paragraphs.txt")) == ["the\nfile\n", "a\nlist\n"]
    meta, sides = prepare_text(docs, tmp_path / "out", tmp_path / "lines.txt", "--val_share", "0.2")
    assert sum(map(len, sides.values())) == 50


def test_unknown_text_is_said_and_refused(docs, tmp_path, capsys):
    argv = ["--encoder", f"{docs[0]}/t5", "--out", str(tmp_path / "out"), "--val_share", "0.2"]
    text = script("text")
    chinese = write_jsonl(tmp_path / "zh.jsonl", [dict(text="\u4f60 \u597d") for _ in range(30)] + [dict(text="the file")] * 20)
    with pytest.raises(SystemExit, match="% of the tokens are <unk>: .*--encoder scratch.*--allow_unknown"):
        text.main([str(chinese), *argv])
    some = write_jsonl(tmp_path / "some.jsonl", [dict(text=f"{t} \u4f60" if i % 2 else t) for i, t in enumerate(docs[1][:80])])
    text.main([str(some), *argv])
    assert "% of the tokens are <unk>" in capsys.readouterr().out and (tmp_path / "out" / "meta.json").is_file()


def test_a_tokenizer_and_encoder_from_ones_own_text(docs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data.scratch, "RECIPE", dict(width=16, layers=1, heads=2, steps=5))
    monkeypatch.setattr(data.scratch, "VOCAB_SIZE", 120)
    small_letters = [f"{i} \u4f60\u597d {t}" for i, t in enumerate(docs[1] * 3)]
    file = write_jsonl(tmp_path / "mine.jsonl", [dict(text=t) for t in small_letters])
    script("text").main([str(file), "--encoder", "scratch", "--out", str(tmp_path / "data"), "--val_share", "0.1"])
    assert prepared(tmp_path / "data")[0]["encoder"] == "t5" and "<unk>" not in capsys.readouterr().out
    argv = [a for a in small(tmp_path / "data", tmp_path / "run", "--steps=3", "--length=24") if "scorer" not in a]
    train.main(argv)
    sample_main(["--ckpt", str(tmp_path / "run"), "--n", "1", "--steps", "2"])
    few = write_jsonl(tmp_path / "few.jsonl", [dict(text="too little")] * 5)
    with pytest.raises(SystemExit, match="too little text to learn a language from"):
        script("text").main([str(few), "--encoder", "scratch", "--out", str(tmp_path / "other")])


def test_a_package_named_data_and_data_on_another_disk(tmp_path):
    (tmp_path / "site" / "data").mkdir(parents=True)
    (tmp_path / "site" / "data" / "__init__.py").write_text("raise RuntimeError('the wrong data')")
    for program in ("train.py", "sample.py", "data/xsum/prepare.py"):
        assert output(program, "--help", PYTHONPATH=str(tmp_path / "site"))[0] == 0
    here = tmp_path / "here"
    shutil.copytree(ROOT, here, ignore=shutil.ignore_patterns(".git", "out", "*.bin", "t5", "scorer"))
    shutil.move(here / "data", tmp_path / "disk")
    (here / "data").symlink_to(tmp_path / "disk")
    for program in ("train.py", "data/text/prepare.py"):
        status, printed = output(here / program, "--help")
        assert status == 0, printed


def test_the_same_data_under_another_spelling(run, docs, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(docs[0], tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    spellings = [f"{docs[0]}/", f"{docs[0]}/../{docs[0].name}", os.path.relpath(docs[0], ROOT), str(tmp_path / "copy")]
    for i, spelling in enumerate(spellings, start=41):
        argv = small(docs[0], tmp_path / "run", f"--steps={i}", f"--data={spelling}", f"--encoder={spelling}/t5")
        train.main(argv)
    assert newest(tmp_path / "run")["step"] == 44
    out = os.path.relpath(tmp_path / "made", ROOT)                                         # seen from the repository, as --data is
    script("text").main([str(write_jsonl(tmp_path / "a.jsonl", [dict(text=t) for t in docs[1]])), "--encoder", f"{docs[0]}/t5", "--out", out])
    assert (tmp_path / "made" / "meta.json").is_file() and open_data(out, 8)[2]["encoder"] == f"{docs[0]}/t5"


def test_references_may_be_empty_or_missing(run, scorer, docs, tmp_path):
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    for references in (["", "the file."], [None, "the file."], ["the file.", None]):
        file = write_jsonl(tmp_path / "s.jsonl", [dict(text="the file.", reference=r) for r in references])
        evaluate.main([str(file), "--scorer", str(docs[0] / "scorer"), "--results", str(tmp_path / "r.jsonl")])
    results = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r["references"] for r in results] == [2, 1, 1] and results[1]["rouge1"] == results[2]["rouge1"] == 100 > results[0]["rouge1"]


def test_samples_with_references_can_be_scored(pairs_run, scorer, docs, tmp_path):
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    file = write_jsonl(tmp_path / "c.jsonl", [dict(input="class Row", output="Sort the old row."), dict(input="class File")])
    sample_main(["--ckpt", str(pairs_run[1]), "--cond", str(file), "--steps", "2", "--out", str(tmp_path / "s.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line | dict(text="Sort it.")) + "\n" for line in lines))
    evaluate.main([str(tmp_path / "s.jsonl"), "--scorer", str(docs[0] / "scorer"), "--results", str(tmp_path / "r.jsonl")])
    assert json.loads((tmp_path / "r.jsonl").read_text())["references"] == 1


def test_nothing_is_open_or_mapped_at_a_rename(docs, tmp_path, monkeypatch):
    """As Windows wants it. A renamed file or folder, and one that is replaced, are neither mapped nor open in this process."""
    renamed = []

    def watched(rename):
        def renaming(source, target):
            used = Path("/proc/self/maps").read_text() + "\n".join(os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
            for path in (os.path.abspath(source), os.path.abspath(target)):
                assert not re.search(re.escape(path) + r"(/|\n|$)", used), path
            renamed.append(Path(target).name)
            rename(source, target)
        return renaming
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    file = write_jsonl(tmp_path / "a.jsonl", [dict(text=t) for t in docs[1]])
    for _ in range(2):
        script("text").main([str(file), "--encoder", f"{docs[0]}/t5", "--out", str(tmp_path / "data")])
    argv = [a for a in small(tmp_path / "data", tmp_path / "run", "--length=24") if not a.startswith("--encoder")] + [f"--encoder={docs[0]}/t5"]
    for more in (["--steps=10"], ["--steps=20"], ["--steps=10", "--fresh"]):
        train.main([*argv, *more])
    assert {"train.bin", "meta.json", "ckpt_00000010.pt", "best.pt", "run.old-1"} <= set(renamed)


def test_an_interruption_leaves_docs_as_they_were(docs, tmp_path, monkeypatch):
    shutil.copytree(docs[0], tmp_path / "docs")
    (tmp_path / "docs" / "package.py").write_text(prose_module(300)[0])
    before = {f: f.read_bytes() for f in (tmp_path / "docs").rglob("*") if f.is_file()}
    for name, value in dict(HERE=tmp_path / "docs", LENGTH=40, COMMON=1, MIN_SENTENCES=10, RECIPE=dict(width=16, layers=1, heads=2, steps=2),
                            source_files=lambda: [tmp_path / "docs" / "package.py"]).items():
        monkeypatch.setattr(prepare, name, value)
    for name in ("word_tokenizer", "train_encoder", "to_rows"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="interrupted: .* is as it was"):
            patch.setattr(prepare, name, lambda *a, **kw: (_ for _ in ()).throw(KeyboardInterrupt))
            prepare.main([])
        assert before == {f: f.read_bytes() for f in (tmp_path / "docs").rglob("*") if f.is_file()}
    prepare.main([])
    assert before.keys() == {f for f in (tmp_path / "docs").rglob("*") if f.is_file()}
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(prepare, "HERE", tmp_path / "file" / "docs")
    monkeypatch.setattr(prepare, "corpus", lambda files: pytest.fail("worked before it knew that it can write"))
    with pytest.raises(SystemExit, match="cannot be written .*choose another --out"):
        prepare.main([])


def test_a_condition_that_is_too_long_is_said_to_be_cut(pairs_run, tmp_path, capsys):
    long = "def load_old_row(path, more, flag, rest) " * 5
    sample_main(["--ckpt", str(pairs_run[1]), "--cond", long, "--n", "2", "--steps", "2", "--out", str(tmp_path / "o.jsonl")])
    assert "2 of 2 conditions are longer than 50 tokens, and cut" in capsys.readouterr().err
    cond = json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])["cond"]
    assert "def load old row ( path, more, flag, rest) def load".startswith(cond[:50]) and len(cond) < len(long)


def test_an_interruption_is_one_line_and_loses_nothing(run, tmp_path, monkeypatch, capsys):
    import sample as module
    calls, drawn = iter(range(100)), module.draw_noise
    interrupted = lambda *a: drawn(*a) if next(calls) < 6 else (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr(module, "draw_noise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample(load(run)[0], 9, 40, steps=3, chunk=3)                                     # 3 draws a chunk
    calls = iter(range(100))
    assert sample(load(run)[0], 9, 40, steps=3, chunk=3, keep_part=True)[0].shape == (6, 40)
    code = "from config.machine import run_program\ndef f():\n    raise KeyboardInterrupt\nrun_program(f, 'interrupted here')"
    assert output("-c", code) == (130, "\ninterrupted here\n")
    many = "import os; os.environ['COLUMNS'] = '80'\nfrom config.machine import run_program\nrun_program(lambda: [print('x' * 99) for _ in range(9999)])"
    done = subprocess.run(f"{sys.executable} -c \"{many}\" | head -1", shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("x" * 99 + "\n", "")


def test_bars_in_a_file_are_few_lines(capsys):
    for i in (bar := data.scratch.progress(range(5000), desc="working")):
        bar.set_postfix_str(f"loss {i}", refresh=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "\r" not in "".join(lines) and "5000/5000" in lines[-1]


def test_a_local_scorer_is_itself_whatever_its_name(scorer, docs, tmp_path):
    shutil.copytree(docs[0] / "scorer", tmp_path / "gpt2-large")
    found = evaluate.load_scorer(str(tmp_path / "gpt2-large"), torch.device("cpu"))
    assert found.eos == 1 and found.encode("the file") == to_ids(load_tokenizer(docs[0] / "t5"), ["the file"])[0]


def test_bench_ends_at_the_first_signal(tmp_path, monkeypatch):
    argv = [a for a in small("data/none", tmp_path / "run", "--bench=100000") if not a.startswith("--encoder")] + ["--encoder=t5-small", "--length=8"]
    with pytest.raises(KeyboardInterrupt):
        at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train.main(argv)


@pytest.mark.parametrize("program", ["train", "sample", "eval", "data.docs.prepare"])
def test_threads_sleep_while_they_wait(program):
    """libgomp itself tells, when it is loaded, what it has read: torch's has the last word."""
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"} | dict(OMP_DISPLAY_ENV="VERBOSE")
    said = subprocess.run([sys.executable, "-c", f"import {program}"], capture_output=True, text=True, cwd=ROOT, env=env).stderr
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("torch has another OpenMP library here")
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", said)[-1] == "0"


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_fresh_moves_nothing_before_all_is_in_order(run, docs, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for wrong in ("--heads=5", "--init_from=no/such/run"):
        with pytest.raises(SystemExit):
            train.main(small(docs[0], tmp_path / "run", "--steps=2", "--fresh", wrong))
        assert same(newest(tmp_path / "run"), newest(run))
    train.main(small(docs[0], tmp_path / "run", "--steps=1", "--fresh", f"--init_from={tmp_path}/run", "--lr=1e-9"))
    assert torch.allclose(newest(tmp_path / "run")["model"]["time.tokens"], newest(run)["ema"]["time.tokens"], atol=1e-6)


def test_samples_of_a_stream_stand_beside_real_rows_of_their_length(docs, scorer, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [dict(text=t) for t in docs[1]])
    prepare_text(docs, tmp_path / "data", file, "--val_share", "0.3")
    argv = [a for a in small(tmp_path / "data", tmp_path / "run", "--steps=3", "--length=24") if not a.startswith("--encoder")]
    train.main([*argv, f"--encoder={docs[0]}/t5"])
    sample_main(["--ckpt", str(tmp_path / "run"), "--n", "6", "--steps", "2", "--length", "20", "--out", str(tmp_path / "s.jsonl")])
    lines = [json.loads(line) | dict(text="the file") for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    for i, change in enumerate((dict(), dict(run_length=None))):
        write_jsonl(tmp_path / f"{i}.jsonl", [line | change for line in lines])
        evaluate.main([str(tmp_path / f"{i}.jsonl"), "--scorer", str(docs[0] / "scorer"), "--results", str(tmp_path / "r.jsonl")])
    told, untold = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert told["real_entropy"] > 1 and "real_entropy" not in untold


def test_a_full_disk_is_said():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", "from config.machine import run_program; run_program(lambda: print('x' * 9999))"],
                              stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1 and "the output cannot be written (No space left on device)" in done.stderr
    closed = subprocess.run(f"{sys.executable} -c \"from config.machine import run_program; run_program(lambda: print(1))\" >&-", shell=True, cwd=ROOT)
    assert closed.returncode == 0
