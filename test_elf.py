"""The tests. Golden numbers were computed once with the reference implementation, in float32."""
import runtime  # first: before torch
import ast
import contextlib
import gzip
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network, nor waits for one

import filelock
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import allclose, equal
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import data.docs.prepare as docs_prepare
import data.docs_cond.prepare as pairs_prepare
import data.prepare
import data.rows
import data.scratch
import data.text.prepare as text_prepare
import eval as evaluate
import train
from checkpoint import load
from config import Config, configure
from data.encoder import (EOS, condition_mask, embed, embed_conditions, load_encoder,
                          load_tokenizer, to_ids, to_text)
from lab import infill
from model import ELF, Architecture, Block, as_x, rotary_table, rotate, velocity
from runtime import seeded
from sample import decode, draw_noise, flow, sample, time_grid
from sample import main as sample_main

ROOT = Path(__file__).resolve().parent
parametrize, session = pytest.mark.parametrize, pytest.fixture(scope="session")
CPU = torch.device("cpu")
E, L, V = 16, 8, 24
TINY = dict(depth=2, dim=32, heads=2, embed_dim=E, vocab_size=V, bottleneck=8)

def wave(shape, a, b):
    return torch.from_numpy(1.5 * np.sin(a * np.arange(np.prod(shape)) + b)).float().view(shape)

X, EPS, S = (wave((2, L, E), a, b) for a, b in ((0.7, 0), (1.3, 0.5), (0.31, 1)))
NONE = torch.zeros(2, L, 1, dtype=torch.bool)  # no condition
T, W = torch.tensor([0.3, 0.8]), torch.tensor([1.5, 3.0])
IDS = (7 * torch.arange(2 * L) % 24).view(2, L)
P = torch.sigmoid(0.8 * wave((2, L, 1), 0.9, 0.2) + 0.8)
Z = T[:, None, None] * X + (1 - T[:, None, None]) * 2 * EPS

@pytest.fixture(autouse=True)
def signals_as_at_first():  # a run changes them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

def printed(program, *argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        program([str(word) for word in argv])
    return out.getvalue().splitlines()

# ---- golden values ----

REFERENCE = """self_cond_proj.weight:16,32 self_cond_proj.bias:16 text_proj.proj1.weight:8,16
    text_proj.proj2.weight:32,8 text_proj.proj2.bias:32 t_emb_tokens:1,4,32 mode_tokens:1,4,32
    self_cond_cfg_tokens:1,4,32 final_layer.norm_final.weight:32 final_layer.linear.weight:16,32
    final_layer.linear.bias:16 proj_kernel:32,16 proj_bias:16 unembed_bias:24
    unembed_kernel:16,24"""
for embedder in ("t_embedder", "self_cond_cfg_embedder"):
    REFERENCE += (" .mlp_0.weight:32,256 .mlp_0.bias:32 .mlp_2.weight:32,32 .mlp_2.bias:32"
                  .replace(" ", f" {embedder}"))
for block in ("blocks.0.", "blocks.1."):
    REFERENCE += (" norm1.weight:32 norm2.weight:32 attn.q_norm.weight:16 attn.k_norm.weight:16"
                  " attn.qkv.weight:96,32 attn.qkv.bias:96 attn.proj.weight:32,32 attn.proj.bias:32"
                  " mlp.w12.weight:170,32 mlp.w12.bias:170 mlp.w3.weight:32,85 mlp.w3.bias:32"
                  .replace(" ", f" {block}"))

def golden_weights():
    weights, pairs = {}, sorted(pair.split(":") for pair in REFERENCE.split())
    for k, (name, sizes) in enumerate(pairs):
        shape = tuple(map(int, sizes.split(",")))
        y = np.sin(12.9898 * np.arange(np.prod(shape)) + 78.233 * k) * 43758.5453
        u = y - np.floor(y) - 0.5
        value = (1 + 0.4 * u if "norm" in name else 0.4 * u if len(shape) == 1 else
                 u if len(shape) == 3 else 3 * u / shape[1] ** 0.5)
        weights[name] = torch.from_numpy(value).float().view(shape)
    return weights

@session
def golden_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("reference") / "checkpoint_5"
    ema = {"_orig_mod." + name: value for name, value in golden_weights().items()}
    params = {name: value + 1 for name, value in ema.items()}
    torch.save(dict(params=params, ema_params1=ema, opt_state={}, step=5, epoch=0), file)
    return str(file)

@session
def golden(golden_file):
    model, settings = load(golden_file)
    assert (settings["encoder"], settings["x_std"]) == ("t5-small", 0.2)
    return model

def close(values, golden):
    return all(allclose(value, torch.tensor(want), rtol=2e-5, atol=5e-6)
               for value, want in zip(values, golden, strict=True))

def corners(y, first_position):
    return y[0, first_position, :3], y[1, -1, -3:], y.abs().mean()

@torch.no_grad()
def test_network_golden(golden):
    x_pred, logits = golden(Z, S, T, W)
    assert logits.shape == (0, L, V) and close(corners(x_pred, 0), (
        [1.056997, 0.274448, 0.531551], [1.204682, 0.210441, -1.314764], 0.724737))
    x_pred, logits = golden(Z, torch.zeros_like(Z), torch.ones(2), W, n_decode=2)
    assert x_pred.shape == (0, L, E) and close(corners(logits, 0), (
        [-0.309268, 1.541424, -0.233249], [-0.285330, 0.430183, 0.192945], 0.574466))

def row_losses(model, n_dec, n_sc, x, ids, noise_scale=2.0, decode_noise=5.0, **more):
    kinds = slice(0, n_dec), slice(n_dec, n_dec + n_sc), slice(n_dec + n_sc, len(x))
    parts = train.losses(model, x, ids, NONE[:1].expand(len(x), L, 1), kinds,
                         noise_scale=noise_scale, decode_noise=decode_noise, **more)
    ce, mse_sc, mse_plain = (values.mean(1) for values, _ in parts)
    return torch.cat([mse_sc, mse_plain]), ce

def golden_losses(model, n_dec, n_sc, w=W):
    return row_losses(model, n_dec, n_sc, X, IDS, t=T, w=w, eps=EPS, p=P[:n_dec])

def test_losses_golden(golden):
    assert close([golden_losses(golden, 0, 2)[0]], [[3.839000, 47.918350]])
    assert close([golden_losses(golden, 0, 0)[0]], [[3.884666, 53.103138]])
    assert close([golden_losses(golden, 2, 0)[1]], [[3.889544, 3.689360]])

@parametrize("gamma, w, cfg, first, last, mean", [
    (0.0, 3.0, 1.0, [0.592020, -0.126542, 0.766406], [2.115302, -0.004808, -1.311954], 0.805458),
    (1.5, 3.0, 1.0, [0.133694, -0.652191, 0.235723], [2.268517, -0.376488, -1.652228], 0.790823),
    (0.0, 1.0, 2.0, [0.569505, 0.178250, 0.955029], [1.955222, -0.070467, -1.346897], 0.868474)])
@torch.no_grad()
def test_samplers_golden(golden, gamma, w, cfg, first, last, mean):
    draws = iter(range(1, 10))

    def noise():
        y = np.sin(1.7 * np.arange(2 * L * E) + 0.3 * next(draws))
        return 2 * torch.from_numpy(y).float().view(2, L, E)

    cond_mask = condition_mask(torch.tensor([3, 2]), L) if cfg != 1 else NONE
    grid = torch.tensor([0, 0.1, 0.25, 0.5, 1])
    *_, (_, z, _) = flow(golden, 2 * EPS, grid, noise, gamma, w, cond_mask, X, cfg)
    assert close(corners(z, -1), (first, last, mean))
    tokens = torch.full((2, L), 10)
    tokens[1, 2] = 11 if cfg != 1 else 10
    assert equal(decode(golden, z, w).argmax(-1), tokens)

# ---- the network ----

@parametrize("size, count", [
    ("b", 104_579_940), ("m", 342_540_036), ("l", 652_103_332)])
def test_parameter_counts_are_the_papers(size, count):
    c = configure([f"config/owt_{size}.py"])
    with torch.device("meta"):
        model = ELF(Architecture(c.depth, c.dim, c.heads, 512, 32100, c.bottleneck))
    assert sum(param.numel() for param in model.parameters()) == count

@torch.no_grad()
def test_both_attention_paths_agree(golden):
    attn, h = golden.blocks[0].attn, torch.randn(2, 513, 32, generator=seeded(1))
    tables = rotary_table(501, 16, "cpu")
    q, k, v = attn.qkv(h).view(2, 513, 3, 2, 16).permute(2, 0, 3, 1, 4)
    q, k = (rotate(norm(x), *tables) for norm, x in ((attn.q_norm, q), (attn.k_norm, k)))
    y = ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert allclose(attn(h, *tables), attn.proj(y), atol=1e-5)

@parametrize("predict", ["x", "v", "eps"])
def test_whatever_it_predicts_the_network_returns_x(predict):
    t, output = T[:, None, None], dict(x=X, v=X - 2 * EPS, eps=2 * EPS)[predict]
    assert allclose(as_x(output, Z, t, predict), X, atol=1e-5)
    first = as_x(torch.zeros_like(Z), Z, t, predict)  # a new network's output is 0
    assert allclose(ELF(Architecture(**TINY, predict=predict))(Z, S, T, W)[0], first)

def test_recomputing_changes_no_gradient(golden, monkeypatch):
    def gradients():
        mse, ce = golden_losses(golden, 1, 0)
        return torch.autograd.grad(mse.mean() + ce.mean(), golden.parameters())
    plain, forward, calls = gradients(), Block.forward, []
    monkeypatch.setattr(golden, "recompute", True)
    monkeypatch.setattr(Block, "forward", lambda *args: calls.append(1) or forward(*args))
    assert all(map(equal, plain, gradients())) and len(calls) == 3 * 2  # no-grad, grad, again

# ---- precision and compilation ----

def test_a_cpu_without_bfloat16_gets_float32(monkeypatch):
    def precisions(bf16):
        with runtime.autocast(CPU, bf16):
            product = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        muon, _ = train.make_optimizers(torch.nn.Linear(4, 4), Config(bf16=bf16))
        return {muon.dtype, product}
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for fast, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
        assert precisions(True) == {wanted} and precisions(False) == {torch.float32}

def test_gradients_in_bfloat16_are_those_in_float32(golden, monkeypatch):
    def gradients(dtype):
        monkeypatch.setattr(runtime, "precision", lambda *_: dtype)
        with runtime.autocast(CPU):
            loss = loss_of(golden, *batch(10), draws(10, 2))
        return torch.autograd.grad(loss, golden.parameters())
    for a, b in zip(gradients(torch.bfloat16), gradients(torch.float32)):
        assert (a - b).norm() < 0.1 * b.norm()

def test_compiled_is_plain_in_both_precisions():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ELF(Architecture(**TINY | dict(depth=1)))

    def outputs(bf16):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(Z, S, T, W, n_decode=2)[1].float()
    plain = [outputs(bf16) for bf16 in (False, True)]
    assert not equal(*plain)
    runtime.compile_blocks(model.blocks, CPU)
    if model.blocks[0]._compiled_call_impl is None:
        pytest.skip("torch.compile needs a C++ compiler")
    for bf16, tolerance in ((False, 1e-5), (True, 0.01)):
        assert (outputs(bf16) - plain[bf16]).norm() < tolerance * plain[bf16].norm()

def test_nothing_compiles_twice_and_gradients_are_plain(monkeypatch):
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = ELF(Architecture(**TINY))

    def step(seed):
        inputs = *batch(10, seed), draws(10, 2, seed)
        with torch.no_grad():
            loss_of(model, *inputs)
        return torch.autograd.grad(loss_of(model, *inputs), model.parameters())
    plain = step(0)
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 0.8)
    for block in model.blocks:
        block.compile(dynamic=False, backend="aot_eager_decomp_partition")
    for ours, theirs in zip(step(0), plain):
        assert allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    before = counters["stats"]["unique_graphs"]
    step(1), step(2)
    assert 0 < before <= 4 and counters["stats"]["unique_graphs"] == before

# ---- the losses ----

def batch(B, seed=1):
    return (torch.randn(B, L, E, generator=seeded(seed)),
            torch.randint(V, (B, L), generator=seeded(seed)))

def draws(B, n_dec, seed=3):
    return train.draw(B, L, E, n_dec, Config(), seeded(seed))

def loss_of(model, x, ids, drawn, cond_mask=NONE[:1]):
    kinds, mask = train.split_rows(len(x), Config()), cond_mask.expand(len(x), L, 1)
    parts = train.losses(model, x, ids, mask, kinds, **drawn, noise_scale=2.0, decode_noise=5.0)
    return train.objective(parts, Config())

@parametrize("lengths", [[0] * 10, [3, 0, 5, 2, 4, 0, 7, 1, 3, 2]])
def test_split_equals_three_forwards(golden, lengths):
    """Against the reference's way: three forwards, all on all rows, masks choosing what counts."""
    B, cond = 10, condition_mask(torch.tensor(lengths), L)
    (x, ids), r, rows = batch(B), draws(B, 2), torch.arange(B)
    ours = loss_of(golden, x, ids, r, cond)

    is_dec, is_sc, is_plain = rows < 2, (rows >= 2) & (rows < 6), rows >= 6
    t, w, p = r["t"].masked_fill(is_dec, 1), r["w"], F.pad(r["p"], (0, 0, 0, 0, 0, B - 2))
    t3, dec3 = t[:, None, None], is_dec[:, None, None]
    z = torch.where(cond, x, t3 * x + (1 - t3) * 2 * r["eps"])
    z = torch.where(dec3, p * x + (1 - p) * 5 * r["eps"], z)
    start = torch.where(cond & ~dec3, x, 0)
    with torch.no_grad():
        x_u = golden(z, start, t, w)[0]                             # first: unconditional
        x_c = golden(z, torch.where(cond, x, x_u), t, w)[0]         # second, for the target
    x_sc = torch.where(is_sc[:, None, None], torch.where(cond, x, x_u), start)
    x_pred = golden(z, x_sc, t, w)[0]                               # third, in each mode
    logits = golden(z, x_sc, t, w, n_decode=B)[1]
    c = (1 - t3).clamp(min=0.05)
    v, v_u, v_c = (x - z) / c, (x_u - z) / c, (x_c - z) / c
    guided = v + (1 - 1 / w[:, None, None]) * (v_c - v_u)
    ce = F.cross_entropy(logits.mT, ids, reduction="none")
    mse_sc, mse = (((x_pred - z) / c - target).square().mean(2) for target in (guided, v))
    theirs = sum(share * losses[kind][~cond[kind, :, 0]].mean() for share, losses, kind in (
        (0.2, ce, is_dec), (0.4, mse_sc, is_sc), (0.4, mse, is_plain)))
    assert allclose(ours, theirs, rtol=1e-5)
    for a, b in zip(*(torch.autograd.grad(loss, golden.parameters()) for loss in (ours, theirs))):
        assert allclose(a, b, rtol=1e-4, atol=1e-6 * b.abs().max().item() + 1e-6)

def test_the_velocity_stays_finite():
    assert allclose(velocity(X, Z, torch.tensor(0.99)), (X - Z) / 0.05)

def test_draws_follow_the_paper():
    r = draws(20_000, 4000)
    for drawn, mean in ((r["t"], -1.5), (r["p"], 0.8)):
        assert abs(drawn.logit().mean() - mean) < 0.02 and abs(drawn.logit().std() - 0.8) < 0.02
    assert r["p"].shape == (4000, L, 1) and abs(r["eps"].std() - 1) < 0.01
    assert 0.5 <= r["w"].min() and r["w"].max() <= 5
    assert abs((1 + r["w"]).log().mean() - math.log(9) / 2) < 0.01  # log-uniform from 1.5 to 6

def test_overfits_one_batch_and_decodes_it():
    torch.manual_seed(0)
    model, (_, ids) = ELF(Architecture(**TINY | dict(dim=64, bottleneck=32))), batch(10)
    x = torch.randn(V, E, generator=seeded(2))[ids]
    optimizers = train.make_optimizers(model, Config(lr=0.01))
    for step in range(200):
        order = torch.randperm(10, generator=seeded(step))
        mse, ce = row_losses(model, 5, 3, x[order], ids[order], decode_noise=0.2,
                             **draws(10, 5, step))
        (0.2 * ce.mean() + 0.8 * mse.mean()).backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 200)  # to rest at the end
            optimizer.step()
            optimizer.zero_grad()
    logits = decode(model, x, 1.0)
    assert F.cross_entropy(logits.mT, ids) < 0.1 and equal(logits.argmax(-1), ids)

# ---- sampling ----

def test_grid():
    grid = time_grid(32, seed=1)
    assert len(grid) == 33 and (grid.diff() > 0).all() and grid[[0, -1]].tolist() == [0, 1]
    assert equal(grid, time_grid(32, seed=1)) and not equal(grid, time_grid(32, seed=2))
    assert time_grid(4, "uniform").tolist() == [0, 0.25, 0.5, 0.75, 1]
    quantiles = time_grid(32, "quantile", t_mean=-1.0, t_std=0.5)[1:-1].logit()
    cdf = torch.distributions.Normal(-1.0, 0.5).cdf(quantiles)
    assert allclose(cdf, torch.arange(1, 32) / 32, atol=1e-5) and len(time_grid(1)) == 2

@session
def writer(golden):
    """The golden network with another token head, since its own writes one token."""
    model = ELF(golden.arch).eval().requires_grad_(False)
    model.load_state_dict(golden.state_dict())
    torch.nn.init.normal_(model.token_head[2].weight, generator=seeded(0))
    torch.nn.init.zeros_(model.token_head[2].bias)
    return model

def settings_for(**more):
    return vars(Config()) | dict(length=L, sample_steps=5, sample_gamma=1.5) | more

@torch.no_grad()
def test_rows_do_not_depend_on_neighbours_and_repeat_with_the_seed(writer):
    nine = sample(writer, settings_for(), 9)
    assert equal(nine, sample(writer, settings_for(), 9)) and len(nine.unique(dim=0)) > 4
    assert equal(nine[:3], sample(writer, settings_for(), 3))
    assert not equal(nine, sample(writer, settings_for(), 9, seed=1))
    long = sample(writer, settings_for(sample_steps=2, sample_gamma=0, length=512), 9)  # 8, and 1
    z = draw_noise([seeded(0, 8)], 512, E, 2.0)
    with runtime.autocast(CPU):
        *_, (_, z, _) = flow(writer, z, time_grid(2), None, 0, 3.0, torch.zeros_like(z).bool(), z)
        assert equal(decode(writer, z, 3.0).argmax(-1)[0], long[8])

@torch.no_grad()
def test_noise_that_falls_over_time(golden):
    grid, z, noise = torch.tensor([0.0, 0.2, 0.5, 1.0]), 2 * EPS, S
    steps = flow(golden, z, grid, lambda: noise, 1.5, 3.0, NONE, z, gamma_power=2.0)
    x_sc = torch.zeros_like(z)
    for i, (_, ours, _) in enumerate(steps):
        t, dt = grid[i], grid[i + 1] - grid[i]
        if i < 2:
            alpha = 1 - 1.5 * (1 - t) ** 2 * dt
            z, t = alpha * z + (1 - alpha) * noise, alpha * t
        x_sc = golden(z, x_sc, t.expand(2), torch.full((2,), 3.0))[0]
        z = z + (grid[i + 1] - t) * ((x_sc - z) / (1 - t).clamp(min=0.05))
        assert allclose(ours, z, atol=1e-5)

def test_a_temperature_is_a_factor_on_all_noise(writer):
    a, b, other = (sample(writer, settings_for(sample_temperature=factor, noise_scale=scale), 3)
                   for factor, scale in ((0.5, 2.0), (1.0, 1.0), (1.0, 2.0)))
    assert equal(a, b) and not equal(a, other)

# ---- data and training, on a made-up package ----

TEXTS = [f"{verb} {one} and {other} {place}." for verb in ("Return", "Build", "Read", "Close")
         for one in ("the file", "a list", "every row") for other in ("the model", "a name", "it")
         for place in ("in the folder", "of the user", "at the end", "by hand", "on disk", "once")]
RECIPE = dict(width=16, layers=1, heads=2, steps=30, batch_size=32)
SMALL = """--length=40 --dim=32 --depth=2 --heads=2 --bottleneck=16 --batch_size=10 --warmup=5
    --cooldown=0 --val_interval=20 --val_rows=20 --sample_interval=20 --sample_steps=4
    --save_interval=10 --log_interval=5 --compile=false --bf16=false --device=cpu""".split()

def patch_all(patch, module, **values):
    for name, value in values.items():
        patch.setattr(module, name, value)

@session
def docs(tmp_path_factory):
    """The folder that data/docs/prepare.py makes of a made-up package."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "package.py").write_text("\n\n".join(
        f'def f{i}():\n    """{text} It has 1 number.\n\n    >>> f{i}(x_{i})\n    """\n'
        for i, text in enumerate(TEXTS)))
    with pytest.MonkeyPatch.context() as patch:
        patch_all(patch, docs_prepare, HERE=folder, LENGTH=40, COMMON=1, VAL_SHARE=0.1,
                  RECIPE=RECIPE, source_files=lambda: sorted(folder.glob("*.py")))
        docs_prepare.main([])
        docs_prepare.make_scorer(steps=3)
    return folder

def test_sentences_of_docstrings_and_comments(tmp_path):
    (tmp_path / "m.py").write_text('''"""The module is read as well."""
# The comment is
# also read.
def f():
    """Return the :class:`list` of it. It has 1 number. It is new, and has a comma.

    It is the second paragraph.
        It is an indented one.
    """
''')
    assert set(docs_prepare.sentences(tmp_path / "m.py")) == {
        "The module is read as well.", "The comment is also read.", "Return the list of it.",
        "It is the second paragraph.", "It is an indented one."}

def test_docs_are_rows_of_sentences(docs):
    meta, tokenizer = json.loads((docs / "meta.json").read_text()), load_tokenizer(docs / "t5")
    sides = [data.rows.open_rows(docs, side, 40) for side in ("train", "val")]
    ids, val_ids = (torch.from_numpy(side.batch(range(len(side)))[0]) for side in sides)
    assert {to_text(tokenizer, row) for row in [*ids, *val_ids]} == {*TEXTS} and len(val_ids) > 10
    encoder = load_encoder(docs / "t5", fingerprint=meta["encoder_weights"])
    x = embed(encoder, ids, *(torch.tensor(meta[key]) for key in ("x_mean", "x_std")))
    assert x.mean((0, 1)).abs().max() < 1e-4 and (x.std((0, 1)) - 1).abs().max() < 1e-3

def small(folder, run, *more):
    return ["config/docs.py", f"--data={folder}", f"--encoder={folder}/t5", "--prepare=",
            f"--out={run.parent}", f"--name={run.name}", *SMALL, *more]

def trained(*args):
    return printed(train.main, *small(*args))

def newest(run):
    return torch.load(max(run.glob("ckpt_*.pt")), weights_only=True)

def records(run):
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return list({record["step"]: record for record in lines}.values())

def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "settings")
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return equal(a, b) if torch.is_tensor(a) else a == b

@pytest.fixture
def new(tmp_path):
    return tmp_path / "run"

@session
def run(docs, tmp_path_factory):
    trained(docs, folder := tmp_path_factory.mktemp("out") / "run", "--steps=40")
    return folder

def test_the_two_commands_of_the_readme(run):
    log, (model, settings) = records(run), load(str(run))
    assert [r["step"] for r in log] == [*range(5, 45, 5)] and log[-1]["loss"] < log[0]["loss"]
    first, last = (r for r in log if "val_ce" in r)
    assert (first["step"], last["step"]) == (20, 40) and last["val_ce"] < first["val_ce"]
    assert len(last["samples"]) == 4 and list(last["samples"][0]) == ["text"]
    assert sorted(os.listdir(run)) == ["ckpt_00000030.pt", "ckpt_00000040.pt", "log.jsonl", "t5"]
    assert equal(model.in_proj.weight, newest(run)["ema"]["in_proj.weight"])
    assert settings["encoder"] == str(run / "t5")
    assert len(printed(sample_main, "--ckpt", run, "--steps", 3)) == 4

def test_an_interrupted_run_ends_as_an_uninterrupted_one(run, docs, new):
    trained(docs, new, "--steps=15")
    out = "".join(trained(docs, new, "--steps=40", "--log_interval=4"))
    assert re.search("at step 15.* steps 15 -> 40, log_interval 5 -> 4", out)
    assert same(newest(run), newest(new))
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    trained(docs, run, "--steps=40")
    assert before == {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}

class NoWait(TorchDispatchMode):
    """Refuses to read a number or a shape off a tensor, for which a program waits for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        waits = aten._local_scalar_dense, aten.nonzero, aten.masked_select
        assert func.overloadpacket not in waits, func
        return func(*args, **kwargs or {})

@parametrize("kind", ["accumulating", "student", "conditional"])
def test_no_step_waits_for_the_device(kind, docs, run, pairs_run, new, monkeypatch):
    more = dict(accumulating=["--batch_size=20", "--accum=2"],
                student=[f"--teacher={run}", "--student_steps=4", "--teacher_substeps=2"],
                conditional=["--length=32", "--cond_length=16"])[kind]
    step, results = train.train_step, []

    def unwaiting(*args):
        with NoWait():
            results.append(step(*args))
        return results[-1]
    monkeypatch.setattr(train, "train_step", unwaiting)
    trained(pairs_run[0] if kind == "conditional" else docs, new, "--steps=2", *more)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWait():
        bool(results[1][1] > 0)

def test_the_average_of_the_weights_warms_up(docs, new):
    """After n steps its decay is min(0.9999, (1 + n) / (10 + n))."""
    torch.manual_seed(0)
    arch = TINY | dict(vocab_size=len(load_tokenizer(docs / "t5")), bottleneck=16)
    average = ELF(Architecture(**arch)).state_dict()
    for n in range(3):
        trained(docs, new, f"--steps={n + 1}")
        content, decay = newest(new), (1 + n) / (10 + n)
        for name, value in average.items():
            average[name] = decay * value + (1 - decay) * content["model"][name]
            assert allclose(content["ema"][name], average[name], atol=1e-6), (n, name)

@parametrize("cooldown, rates", [
    (0, [0.25, 0.5, 0.75] + 7 * [1]), (0.5, [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])])
def test_the_rate_warms_up_and_cools_down(cooldown, rates, docs, new, monkeypatch):
    seen = []
    monkeypatch.setattr(train.Muon, "step", lambda self: seen.append(self.param_groups[0]["lr"]))
    trained(docs, new, "--steps=10", "--lr=0.01", "--warmup=4", f"--cooldown={cooldown}")
    assert np.allclose(seen, 0.01 * np.array(rates))

def test_epochs_visit_every_row_once():
    seen = np.concatenate([data.rows.batch_rows(10, step, 4, seed=3) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert list(seen[:10]) != list(seen[10:])

def test_validation_is_of_even_rows(docs, run, new):
    config, seen = configure(small(docs, new, "--val_rows=99")), []
    rows = data.rows.load_data(config, CPU)
    rows.val.batch = lambda where, batch=rows.val.batch: seen.extend(where) or batch(where)
    train.validate(load(str(run))[0], rows, config)
    assert {*seen} == {*range(0, len(rows.val), 2)}

def test_accumulation_equals_none(docs, run, new, monkeypatch):
    order, drawn = np.random.default_rng(0).permutation(100), train.draw(
        20, 40, E, 4, Config(), seeded(0))
    # each holds half of the rows of each kind
    halves = [[0, 1, *range(4, 8), *range(12, 16)], [2, 3, *range(8, 12), *range(16, 20)]]

    def step(parts):
        config = configure(small(docs, new, "--lr=1", "--warmup=0", "--batch_size=20", "--clip=1e9",
                                 f"--accum={len(parts)}", f"--init_from={run}"))
        rows, left = data.rows.load_data(config, CPU), iter(parts)

        def draw(*_):  # p is of decode rows alone, which are the first four
            part = next(left)
            return {name: y[[i for i in part if i < len(y)]] for name, y in drawn.items()}
        patch_all(monkeypatch, train, batch_rows=lambda *_: order[sum(parts, [])], draw=draw)
        state = checkpoint.new_state(config, rows, CPU, lambda model, _: [
            torch.optim.SGD(model.parameters())])
        before = [param.detach().clone() for param in state.model.parameters()]
        train.train_step(state.model, state, rows, config)
        return [a - b for a, b in zip(before, state.model.parameters())]
    for one, two in zip(step([list(range(20))]), step(halves)):
        assert one.abs().max() > 0 and allclose(one, two, rtol=1e-3, atol=1e-5)

# ---- Muon, and more than one process ----

MATRICES = [(24, 8), (8, 8), (8, 24), (24, 8), (50, 4), (8, 24), (24, 8)]
START = [torch.randn(shape, generator=seeded(1, i)) for i, shape in enumerate(MATRICES)]
GRADS = [torch.randn(3, *shape, generator=seeded(2, i)) for i, shape in enumerate(MATRICES)]

def steps_of(make_optimizer):
    params = [torch.nn.Parameter(start.clone()) for start in START]
    optimizer = make_optimizer(params)
    for k in range(3):
        for param, grad in zip(params, GRADS):
            param.grad = grad[k].clone()
        optimizer.step()
    return [param.detach() for param in params]

def exact_muon(param, grads, lr, momentum=0.95):
    param, m = param.double(), torch.zeros_like(param).double()
    for g in grads.double():
        m = momentum * m + (1 - momentum) * g
        X = momentum * m + (1 - momentum) * g
        X = X / X.norm()
        for _ in range(5):
            A = X @ X.mT
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        param = param - lr * max(1, param.shape[0] / param.shape[1]) ** 0.5 * X
    return param

@parametrize("optimizer, tolerance", [
    (lambda params: train.Muon(params, 0.1, dtype=torch.float32), 1e-4),
    (lambda params: train.Muon(params, 0.1), 0.05),  # bfloat16
    (lambda params: torch.optim.Muon(params, 0.1, momentum=0.95, weight_decay=0.0), 0.05)])
def test_muon_is_newton_schulz_and_torchs(optimizer, tolerance):
    for start, grads, ours in zip(START, GRADS, steps_of(optimizer)):
        exact = exact_muon(start, grads, 0.1)
        assert (ours - exact).norm() < tolerance * (exact - start).norm()

def gradients(model_file, rank=0, world=1):
    model, _ = load(model_file)
    net = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    rows = [row for first, count in ((0, 4), (4, 8), (12, 8))
            for row in range(first + rank * count // world, first + (rank + 1) * count // world)]
    (x, ids), drawn = batch(20), draws(20, 4)
    mine = {key: y[rows[:4 // world]] if key == "p" else y[rows] for key, y in drawn.items()}
    loss = loss_of(net, x[rows], ids[rows], mine)
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]

def worker(rank, model_file, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                                         world_size=2)
    orthogonal, worked = train.orthogonal, []
    train.orthogonal = lambda G: worked.append(len(G)) or orthogonal(G)
    moved = steps_of(lambda params: train.Muon(params, lr=0.1))
    torch.save((moved, gradients(model_file, rank, 2), sum(worked)), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()

def test_two_processes_equal_one(golden_file, tmp_path):
    torch.multiprocessing.spawn(worker, (golden_file, tmp_path), nprocs=2)
    (moved, grads, n), (moved_b, grads_b, n_b) = (torch.load(tmp_path / f) for f in "01")
    loss, *one = gradients(golden_file)
    assert allclose(loss, (grads[0] + grads_b[0]) / 2, rtol=1e-5)
    for g, a, b in zip(one, grads[1:], grads_b[1:]):
        assert equal(a, b) and allclose(g, a, rtol=1e-5, atol=1e-5 * g.abs().max())
    for start, p, a, b in zip(START, steps_of(lambda ps: train.Muon(ps, lr=0.1)), moved, moved_b):
        assert equal(a, b) and (p - a).norm() < 0.01 * (p - start).norm()
    assert n + n_b == 3 * len(MATRICES) and min(n, n_b) >= 9  # each once, and fairly shared

STOPPED = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import train
rows = train.batch_rows
def stopped(n, step, *more):
    if step == 5 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    return rows(n, step, *more)
train.batch_rows = stopped
train.main()
"""

def started(*command):
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"))

def test_torchrun_stops_together_and_goes_on(docs, tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)

    def torchrun(script, name, steps):
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *script]
        return started(*run, *small(docs, tmp_path / name, f"--steps={steps}", "--batch_size=20",
                                    "--accum=2", "--val_interval=9", "--sample_interval=9"))
    process = torchrun([tmp_path / "stopped.py", ROOT], "run", 999)
    out, _ = process.communicate(timeout=100)
    assert "stopped after step 6, which is saved" in out, out
    both = [torchrun(["train.py"], name, 9) for name in ("run", "whole")]
    outs = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    assert "resumes at step 6" in outs[0] and "resumes" not in outs[1]
    assert same(newest(tmp_path / "run"), newest(tmp_path / "whole"))

# ---- surviving: kills, signals, damage ----

# Trains again and again in a child, which kills itself at a random step or file operation.
KILLED = """
import os, random, signal, sys
import train, torch
from transformers import AutoTokenizer, T5EncoderModel  # once
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
        save(content, f)
        f.seek(1000)
        f.truncate()
        event(f.flush)()
        f.seek(0)
        save(content, f)
    torch.save, train.batch_rows = save_in_halves, event(train.batch_rows)
    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, event(getattr(os, name)))
    train.main(sys.argv[1:])

while True:
    left = rng.randint(1, 22) if kills < 10 else -1
    if (pid := os.fork()) == 0:
        child(left)
        os._exit(0)
    if (status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == 0:
        break
    assert status == -signal.SIGKILL, status
    kills += 1
print("kills:", kills)
"""

def test_killed_ten_times(docs, tmp_path):
    often = ["--steps=40", "--save_interval=2", "--val_interval=5", "--val_rows=10",
             "--log_interval=1", "--sample_interval=40"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    both = (started("-c", KILLED, *small(docs, killed, *often)),
            started("train.py", *small(docs, whole, *often)))
    out, _ = [process.communicate(timeout=100)[0] for process in both]
    assert both[0].returncode == 0 and "kills: 10" in out, out
    assert same(newest(killed), newest(whole))
    assert {*os.listdir(killed)} == {*os.listdir(whole)} and len([*whole.iterdir()]) == 4
    a, b = ([r | dict(tokens_per_s=0) for r in records(run)] for run in (killed, whole))
    assert a == b and [r["step"] for r in a] == list(range(1, 41))

@parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_ends_with_130(number, run, docs, new, monkeypatch, capsys):
    def interrupted(n, step, *more):
        if step == 7:
            signal.raise_signal(number)
            assert signal.getsignal(number) == signal.SIG_DFL  # a second one ends it at once
        return data.rows.batch_rows(n, step, *more)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train, "batch_rows", interrupted)
        train.main(small(docs, new, "--steps=40"))
    assert stop.value.code == 130 and newest(new)["step"] == 8
    assert "stopped after step 8, which is saved; the same command" in capsys.readouterr().out
    trained(docs, new, "--steps=40")
    assert same(newest(new), newest(run))

def test_timed_saves_and_the_newest_are_kept(docs, new):
    trained(docs, new, "--steps=7", "--save_interval=100", "--save_minutes=0", "--keep=3")
    assert sorted(f.name for f in new.glob("ckpt*")) == [f"ckpt_0000000{n}.pt" for n in (5, 6, 7)]

def test_a_gradient_that_is_not_finite_ends_a_run(docs, new, monkeypatch, refuses):
    losses, calls = train.losses, iter(range(1, 100))
    monkeypatch.setattr(train, "losses", lambda *a, **kw: [
        (y * factor, counted) for factor in [math.nan if next(calls) == 13 else 1]
        for y, counted in losses(*a, **kw)])
    refuses("gradient is not finite; .*try a smaller --lr", trained, docs, new, "--steps=40")
    assert newest(new)["step"] == 10

def test_fresh_moves_the_old_run_aside(run, docs, new):
    shutil.copytree(run, new)
    with pytest.raises(SystemExit):  # nothing is moved before all is in order
        trained(docs, new, "--fresh", "--init_from=no/such")
    for n in (1, 2):
        out = trained(docs, new, "--steps=2", "--dim=16", "--fresh")
        assert f"is now {new}.old-{n}" in "".join(out)
    assert same(newest(new.with_name("run.old-1")), newest(run))
    assert newest(new)["step"] == 2 and len(records(new)) == 1

class Malicious:
    def __reduce__(self):
        return os.system, ("touch pwned",)

@parametrize("damage", [
    lambda f: os.truncate(f, os.path.getsize(f) - 1000), lambda f: os.truncate(f, 0),
    lambda f: f.write_bytes(b"hello" * 1000), lambda f: torch.save([1], f),
    lambda f: torch.save(dict(step=Malicious()), f)],
    ids=["cut", "empty", "text", "list", "malicious"])
def test_damaged_checkpoints_fall_back(damage, run, docs, new, capsys, monkeypatch, refuses):
    monkeypatch.chdir(new.parent)
    shutil.copytree(run, new)
    damage(new / "ckpt_00000040.pt")
    before = torch.load(run / "ckpt_00000030.pt", weights_only=True)["ema"]["in_proj.weight"]
    assert equal(load(str(new))[0].in_proj.weight, before)
    assert "at step 30" in "".join(trained(docs, new, "--steps=40"))
    assert capsys.readouterr().err.count("ckpt_00000040.pt: not a readable checkpoint") == 2
    assert same(newest(new), newest(run))
    for file in new.glob("*.pt"):
        damage(file)
    refuses("run: no checkpoint can be read", trained, docs, new, "--steps=40")
    refuses("run: no checkpoint can be read", sample_main, ["--ckpt", new])
    assert not (new.parent / "pwned").exists()

def test_bench_needs_nothing_and_leaves_nothing(new):
    more = "--bench=2", "--recompute", "--cond_length=3", "--encoder=t5-small", "--length=8"
    out = "".join(trained("data/none", new, *more)).replace(",", "")
    step, rate, share = map(int, re.search(
        r"median step (\d+) ms (\d+) tokens/s peak .* GB (\d+)% of the matrix rate", out).groups())
    assert abs(rate * step / 1000 / 80 - 1) < 0.2 and 0 < share < 200 and not new.exists()

# ---- conditions ----

COND = condition_mask(torch.tensor([3, 0, 5, 2]), L)

def test_who_sees_whom_in_the_encoder(docs):
    encoder = load_encoder(docs / "t5")
    with torch.no_grad():
        for param in encoder.parameters():  # louder, so that what is seen shows
            param.add_(0.1 * torch.randn(param.shape, generator=seeded(param.numel())))
    ids, targets, conds = torch.randint(4, 30, (3, 4, L), generator=seeded(0))
    drop, is_cond = torch.tensor([False, False, True, False]), COND[..., 0]

    def x(ids, drop=None):
        return embed(encoder, ids, 0.5, 2.0, COND, drop)
    changed = (x(ids) - x(ids.where(is_cond, targets))).abs().amax(2) > 1e-6
    assert not changed[is_cond].any() and changed[~is_cond].any()
    changed = (x(ids, drop) - x(conds.where(is_cond, ids), drop)).abs().amax(2) > 1e-6
    assert changed[0, 3:].all() and changed[3, 2:].all() and not changed[1:3].any()
    assert (x(ids, drop)[2, :5] == 0).all() and not (x(ids)[2, :5] == 0).any()
    alone = (encoder(input_ids=ids[:1, :3]).last_hidden_state[0] - 0.5) / 2
    assert allclose(x(ids)[0, :3], alone, atol=1e-5)
    assert allclose(x(ids)[1], embed(encoder, ids, 0.5, 2.0)[1], atol=1e-5)  # of length 0: none

@torch.no_grad()
def test_rows_with_conditions_are_as_alone(golden, docs):
    conds, encoder = [[5, 6, 7], [], [8, 9, 10, 11, 12], [4]], load_encoder(docs / "t5")
    settings = dict(length=L, x_mean=0.0, x_std=1.0)
    cond, x_cond = embed_conditions(encoder, conds, settings, range(4))
    assert cond.sum((1, 2)).tolist() == [3, 0, 5, 1]

    def run(rows, cfg):
        rngs = [seeded(7, j) for j in range(4)][rows]
        steps = flow(golden, draw_noise(rngs, L, E, 2), time_grid(6), lambda: draw_noise(
            rngs, L, E, 2), 1.0, 1.5, cond[rows], x_cond[rows], cfg)
        return list(steps)[-1][1]
    together = run(slice(0, 4), 2.0)
    assert equal(together[cond[..., 0]], x_cond[cond[..., 0]])  # clean to the end
    for i in range(4):
        assert allclose(run(slice(i, i + 1), 2.0)[0], together[i], atol=1e-4)
    differs = (run(slice(0, 4), 1.0) - together).abs().amax((1, 2)) > 1e-4
    assert differs.tolist() == [True, False, True, True]  # guidance, but for the row without

@session
def pairs_run(tmp_path_factory):
    """The folder that data/docs_cond/prepare.py makes, and a run on it."""
    folder = tmp_path_factory.mktemp("pairs") / "data"
    folder.mkdir()
    names = [f"{verb}_{size}_{noun}" for verb in ("load", "close", "build", "sort", "read", "write")
             for size in ("old", "new", "big") for noun in ("row", "file", "list", "word", "page")]
    body = ['def {}(path, *more, flag=1, **rest):\n    """{}. Then more.\n\n    Not this."""\n'
            .format(name, name.capitalize().replace("_", " ")) for name in names]
    body += ['class Row(list):\n    """Sort the old row."""\n\nclass Odd:\n    """no sentence"""']
    (folder / "package.py").write_text("\n".join(body))
    with pytest.MonkeyPatch.context() as patch:
        patch_all(patch, pairs_prepare, HERE=folder, LENGTH=32, COND_LENGTH=16, COMMON=1,
                  VAL_SHARE=0.2, RECIPE=RECIPE, source_files=lambda: [folder / "package.py"])
        pairs_prepare.main([])
    run = folder.parent / "run"
    trained(folder, run, "--length=32", "--cond_length=16", "--steps=60", "--sample_cfg=2")
    return folder, run

def test_pairs_of_signatures_and_sentences(pairs_run):
    (folder, run), texts = pairs_run, {}
    tokenizer = load_tokenizer(folder / "t5")
    for side in ("train", "val"):
        rows = data.rows.open_rows(folder, side, 32, 16)
        for ids, n in zip(*rows.batch(range(len(rows)))):
            texts[to_text(tokenizer, ids[:n])] = to_text(tokenizer, ids, n)
    assert len(texts) == 91 and texts["class Row ( list)"] == "Sort the old row."
    assert texts["def load old row ( path, more, flag, rest)"] == "Load old row."
    [row], [n] = rows.batch([0])
    [cut], [few] = data.rows.open_rows(folder, "val", 10, 4).batch([0])
    assert few == 4 and cut.tolist() == [*row[:4], *row[n:n + 6]]
    shown = records(run)[-1]["samples"][0]
    assert texts[shown["cond"]] == shown["reference"] and isinstance(shown["text"], str)

@parametrize("hidden", [0, 0.99999])
@torch.no_grad()
def test_a_hidden_condition_changes_no_loss(hidden, pairs_run):
    folder, run = pairs_run
    argv = "--length=32", "--cond_length=16", f"--cond_drop={hidden}"
    config = configure(small(folder, run, *argv))
    rows, (model, _) = data.rows.load_data(config, CPU), load(str(run))
    ids, n_cond = rows.train.batch(range(10))
    other = np.where(np.arange(32) < n_cond[:, None], 5, ids)
    a, b = (train.batch_losses(model, rows, (x, n_cond), seeded(0), config) for x in (ids, other))
    assert equal(train.objective(a, config), train.objective(b, config)) == bool(hidden)

def test_sampling_from_conditions(pairs_run, tmp_path, capsys):
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfclass Row\r\nclass  Big\tFile\r\n")
    records = [dict(input="class Row", output="A row."), dict(input="class Big File")]

    def write(cond, *more):
        out = tmp_path / f"{len(os.listdir(tmp_path))}.jsonl"
        printed(sample_main, "--ckpt", pairs_run[1], "--cond", cond, "--out", out, *more)
        return [json.loads(line) for line in out.read_text().splitlines()]
    first, second = write(jsonl(tmp_path / "c.jsonl", records))
    assert (first["cond"], first["reference"], first["seed"]) == ("class Row", "A row.", 0)
    assert second["reference"] is None and first["settings"]["sample_cfg"] == 2
    assert [r["text"] for r in write(tmp_path / "c.txt")] == [first["text"], second["text"]]
    assert write("class\u00a0Row", "--n", 3)[0]["text"] == first["text"]
    held_out, _ = write("val", "--n", 2, "--cfg", 1, "--steps", 2)
    assert held_out["reference"] and held_out["settings"]["sample_steps"] == 2
    write("def load old row " * 9)
    assert "4 conditions are longer than 16 tokens, and cut" in capsys.readouterr().err

@parametrize("text, known", [
    ("Return the ___ and a list at the end.", "Return the(.*) and a list at the end[.]"),
    ("___ every row and ___2.", "(.*)every row and(.*)[.]")])
def test_infilling_keeps_what_is_known(text, known, run):
    lines, again = (printed(infill.main, text, "--ckpt", run, "--n", 3) for _ in range(2))
    assert lines == again and all(re.fullmatch(known, line) for line in lines), lines

def test_gaps_have_their_size(docs):
    ids, gaps = infill.row_of("Return ___2 and ___.", load_tokenizer(docs / "t5"), 6)
    assert gaps.tolist() == (ids == EOS).tolist() == [False, True, True, False, True, False]

# ---- progressive distillation ----

def test_times_of_teacher_and_student():
    config, t = Config(student_steps=4, teacher_substeps=3), draws(20_000, 1)["t"]
    times = train.student_times(t, config, seeded(0))
    assert times.shape == (20_000, 4) and (times.diff() >= 0).all()
    assert allclose(times[:, 0], 0.75 * t) and allclose(times[:, -1], 0.75 * t + 0.25)
    inner = ((times[:, 1:-1] - times[:, :1]) * 4).clamp(1e-4, 1 - 1e-4).logit()
    assert abs(inner.mean() + 1.5) < 0.02 and abs(inner.std() - 0.8) < 0.03

@torch.no_grad()
def test_the_distilled_target_is_where_the_teacher_ends(golden):
    times, w = torch.tensor([[0.1, 0.15, 0.3], [0.7, 0.8, 0.9]]), torch.full((2,), 3.0)
    for cond_mask in (NONE, condition_mask(torch.tensor([0, 3]), L)):
        z, x_sc = torch.where(cond_mask, X, Z), torch.where(cond_mask, X, 0.0)
        target = train.distilled_target(golden, z, x_sc, times, w, cond_mask)
        step = (times[:, -1] - times[:, 0])[:, None, None]
        landed = z + step * velocity(target, z, times[:, 0, None, None])
        for i, row in enumerate((slice(0, 1), slice(1, 2))):
            *_, (_, end, _) = flow(golden, z[row], times[i], None, 0, 3.0, cond_mask[row], X[row])
            assert allclose(landed[row], end, atol=1e-5)

def test_the_distilled_target_of_a_linear_teacher():
    """x_pred = a z gives dz/dt = (a - 1) z / (1 - t), so that z goes as (1 - t)^(1 - a)."""
    a, times = -0.5, torch.linspace(0.2, 0.6, 4001).expand(2, -1)
    target = train.distilled_target(lambda z, *_: (a * z, None), Z, X, times, W, NONE)
    end = Z + 0.4 * velocity(target, Z, torch.tensor(0.2))
    assert allclose(end, Z * (0.4 / 0.8) ** (1 - a), atol=1e-3)

def test_losses_of_a_student(golden):
    torch.manual_seed(0)
    student, (x, ids), r = ELF(golden.arch), batch(10), draws(10, 2)
    times = train.student_times(r["t"], Config(student_steps=4, teacher_substeps=3), seeded(0))
    r["t"], w = times[:, 0], r["w"]
    mse, ce = row_losses(student, 2, 4, x, ids, **r, teacher=golden, times=times)
    t3 = r["t"][:, None, None]
    z, x_sc = t3 * x + (1 - t3) * 2 * r["eps"], torch.zeros_like(x)
    with torch.no_grad():
        x_sc[2:6] = golden(z[2:6], x_sc[2:6], r["t"][2:6], w[2:6])[0]
    target = train.distilled_target(golden, z, x_sc, times, w, NONE[:1])
    want = (student(z, x_sc, r["t"], w)[0] - target).square().mean((1, 2))[2:]
    assert allclose(mse, want, rtol=1e-4)
    assert equal(ce, row_losses(student, 2, 4, x, ids, **r)[1])

def test_a_student_trains_and_resumes(run, docs, tmp_path, refuses):
    argv = [f"--teacher={run}", f"--init_from={run}", "--student_steps=4", "--teacher_substeps=2"]
    for name, steps in (("whole", 6), ("cut", 3), ("cut", 6)):
        trained(docs, tmp_path / name, *argv, f"--steps={steps}")
    assert same(newest(tmp_path / "whole"), newest(tmp_path / "cut"))
    assert records(tmp_path / "cut")[-1]["mse"] < 0.1 < records(run)[-1]["mse"]
    other = tmp_path / "other", *argv, "--noise_scale=0.7"
    refuses("teacher = .*noise_scale 0.5 -> 0.7", trained, docs, *other)

# ---- other formats of weights ----

def test_bare_and_released_weights_load(tmp_path, golden, monkeypatch):
    torch.save(golden_weights(), tmp_path / "ckpt.pt")
    model, _ = load(str(tmp_path))
    assert all(map(equal, model.state_dict().values(), golden.state_dict().values()))
    (tmp_path / "ckpt.pt").rename(tmp_path / "checkpoint_100000")
    (tmp_path / "checkpoint_95000").write_bytes(b"older")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: str(tmp_path))
    for name, *known in (("owt", 1024, 0, 32, 1), ("PD-owt", 1024, 0, 8, 1),  # their tasks
                         ("de-en", 128, 64, 64, 2), ("xsum", 1088, 1024, 64, 2)):
        model, settings = load(f"embedded-language-flows/ELF-B-{name}-torch")
        assert equal(model.in_proj.weight, golden.in_proj.weight)
        keys = "length", "cond_length", "sample_steps", "sample_cfg"
        assert [settings[key] for key in keys] == known

def test_uploaded_runs_and_the_previous_format_load(run, tmp_path, monkeypatch):
    texts, content, old = printed(sample_main, "--ckpt", run), newest(run), tmp_path / "old"
    shutil.copytree(run / "t5", old / "t5")
    weights = {name.replace("x_head.", "denoise.").replace("token_head.", "unembed."): value
               for name, value in content["ema"].items()}
    content["settings"] |= dict(gap_share=0.0, rounds=1)
    torch.save(content | dict(version=2, elf_config={}, best={}, ema=weights), old / "ckpt_7.pt")
    monkeypatch.setattr("data.encoder.ROOT", tmp_path)
    assert printed(sample_main, "--ckpt", old) == texts
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, allow_patterns: str(
        {"t5/*", "ckpt*"} <= {*allow_patterns} and shutil.copytree(run, tmp_path / "cache")))
    assert printed(sample_main, "--ckpt", "me/elf-docs") == texts

# ---- eval.py ----

def test_gen_ppl_is_the_loop_written_by_hand(docs):
    scorer, encode = evaluate.load_scorer(str(docs / "scorer"), CPU)
    window, total, count = scorer.config.max_position_embeddings, 0.0, 0
    rows = [[5, 6, 7], [9], [4] * window, [*range(4, 24), *[5] * window], [8, 9, 10, 11, 12]]
    for row in rows:
        row = row[:window] if len(row) >= window else row + [EOS]
        with torch.no_grad():
            logp = scorer(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        total -= sum(logp[i - 1, row[i]].item() for i in range(1, len(row)))
        count += len(row) - 1
    for rows in (rows, 9 * rows):
        assert math.isclose(evaluate.gen_ppl(scorer, rows), math.exp(total / count), rel_tol=1e-5)
    assert encode("the file") == to_ids(load_tokenizer(docs / "t5"), ["the file"])[0]

NUMBERS = np.arange(70_000) % 30_000

@parametrize("figure, of, wanted", [
    (evaluate.entropy, [[1, 1, 1, 2]], 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
    (evaluate.repeats, [[1, 2, 3, 4, 5] * 3], True), (evaluate.repeats, [[1] * 7], True),
    (evaluate.repeats, [[1, 2, 3, 4, 5, 9] * 2], False), (evaluate.repeats, [[1] * 6], False),
    (evaluate.distinct, [[[1, 2, 1], [2, 1]], 1], 2 / 5),
    (evaluate.distinct, [[[1, 2, 1], [2, 1]], 2], 2 / 3),
    (evaluate.words, ["The cat's 2nd r_é."], ["the", "cat's", "nd", "r", "é"]),
    (evaluate.copied, [[[*range(5_520, 5_560)], [3, 4, 5]], NUMBERS], 1),  # over a block's edge
    (evaluate.copied, [[[*range(32), 7], [*range(33), 7], [5, 5], [4, 3]], NUMBERS], 1 / 4)])
def test_figures_of_known_rows(figure, of, wanted):
    assert figure(*of) == wanted or math.isclose(figure(*of), wanted)

def test_figures_of_known_texts(docs):
    tokenizer, rows = load_tokenizer(docs / "t5"), data.rows.open_rows(docs, "train", 40)
    own = to_text(tokenizer, rows.batch([3])[0][0])
    texts, n = [own, "Return the flibbertigibbet.", "", own + " Return"], len(own.split())
    scorer = evaluate.load_scorer(str(docs / "scorer"), CPU)
    found = evaluate.figures(texts, *scorer, tokenizer, rows.tokens)
    different = {*own.lower()[:-1].split(), "return", "the", "flibbertigibbet"}
    wanted = dict(empty=1, unknown=1 / 4, copied=1 / 3, repeated=0, words=(2 * n + 4) / 4,
                  distinct1=len(different) / (2 * n + 4))
    assert {key: found[key] for key in wanted} == wanted

def test_bleu_and_rouge_are_the_libraries():
    sacrebleu = pytest.importorskip("sacrebleu")
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    texts, references = ["The cats sat on a mat.", "Hi"], ["the cat sat on the mat.", "hi you"]
    found = evaluate.bleu_rouge(texts, references)
    bleu = sacrebleu.corpus_bleu(texts, [references], lowercase=True, use_effective_order=True)
    assert found.pop("bleu") == bleu.score > 0
    score = rouge.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score
    first, second = map(score, references, texts)
    for name in first:
        assert math.isclose(found[name], 50 * (first[name].fmeasure + second[name].fmeasure))

def test_eval_scores_files_beside_real_rows(run, docs, tmp_path, capsys):
    files = [tmp_path / f"{seed}.jsonl" for seed in (0, 1)]
    for seed, file in enumerate(files):
        printed(sample_main, "--ckpt", run, "--n", 6, "--seed", seed, "--out", file)
    sampled, [real] = evaluate.main([*map(str, files), "--device=cpu"])
    mean, error = (f([each["entropy"] for each in sampled]) for f in (np.mean, np.std))
    assert re.search(rf"entropy +{mean:.4g} ± {error:.2g} ", capsys.readouterr().out)
    rows, tokenizer = data.rows.open_rows(docs, "val", 40), load_tokenizer(docs / "t5")
    odd = rows.batch(range(1, len(rows), 2))[0].tolist()  # settings are chosen by the even ones
    ids, _ = data.rows.odd_rows(rows, 6)
    assert all(row in odd for row in ids.tolist())
    spoken = [evaluate.words(to_text(tokenizer, row)) for row in ids]
    assert real["words"] == np.mean(list(map(len, spoken)))

# ---- data: the paper's sets and your own text ----

def jsonl(file, records):
    records = [dict(text=each) if isinstance(each, str) else each for each in records]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)

def prepared(folder):
    meta, sides = json.loads((folder / "meta.json").read_text()), {}
    for side, count in meta["counts"].items():
        ids = np.fromfile(folder / f"{side}.bin", meta["dtype"])
        ends = np.flatnonzero(ids == EOS) + 1
        if meta["pairs"]:
            ends = np.fromfile(folder / f"{side}.idx", np.uint64).astype(int)[1:]
        *parts, rest = (part.tolist() for part in np.split(ids, ends))
        sides[side] = [part[:-1] for part in parts]
        if meta["pairs"]:
            sides[side] = list(zip(parts[::2], parts[1::2]))
        assert rest == [] and count == dict(rows=len(sides[side]), tokens=len(ids))
    return meta, sides

@pytest.fixture
def spell(docs):
    tokenizer = load_tokenizer(docs / "t5")
    return lambda text: tokenizer(" ".join(text.split()), add_special_tokens=False)["input_ids"]

def prepare_text(docs, out, *files):
    text_prepare.main([*map(str, files), f"--encoder={docs}/t5", f"--out={out}", "--val_share=0.3"])
    return prepared(out)

def test_no_end_token_in_a_text_ends_it(tmp_path):
    rng, odd = np.random.default_rng(0), "</s> <pad> a</s>b été 日本語 🙂 the file \t row \n".split(" ")
    texts = [f"{i}. " + " ".join(rng.choice(odd, rng.integers(1, 12))) for i in range(300)]
    lines = [re.sub("<(/s|pad)>", r"< \1>", " ".join(text.split())) for text in texts]
    tokenizer, out = data.scratch.train_tokenizer(lines, 150), tmp_path / "out"
    tokenizer.save_pretrained(tmp_path / "t5-small")
    text_prepare.main([jsonl(tmp_path / "a.jsonl", texts), f"--encoder={tmp_path}/t5-small",
                       f"--out={out}", "--val_share=0.2"])
    meta, sides = prepared(out)
    assert [meta[k] for k in ("x_mean", "x_std", "dtype", "length")] == [0.0, 0.2, "uint16", 0]
    rows = sides["train"] + sides["val"]
    assert 30 < len(sides["val"]) < 90 and not {0, 1, 2, 3} & {i for row in rows for i in row}
    assert sorted(map(tokenizer.decode, rows)) == sorted(lines)

def test_text_formats_agree(docs, spell, tmp_path):
    documents = [text.replace(" ", "\r\n", 1) for text in TEXTS[:80]]
    txt, packed = tmp_path / "a.txt", tmp_path / "b.jsonl.gz"
    txt.write_bytes(b"\xef\xbb\xbf\r\n" + "\r\n \r\n\r\n".join(documents).encode())
    plain = jsonl(tmp_path / "b.jsonl", documents[:40])
    packed.write_bytes(gzip.compress(Path(jsonl(tmp_path / "c", documents[40:])).read_bytes()))
    meta, sides = prepare_text(docs, tmp_path / "out", txt)
    assert prepare_text(docs, tmp_path / "other", plain, packed) == (meta, sides)
    assert sorted(sides["train"] + sides["val"]) == sorted(map(spell, TEXTS[:80]))
    pairs = [(text, f"it {text}") for text in TEXTS[:60]]
    lines = [dict(input=a, output=b) for a, b in [*pairs, ("", "it"), ("it", " \n ")]]
    meta, sides = prepare_text(docs, tmp_path / "pairs", jsonl(tmp_path / "p.jsonl", lines))
    assert meta["pairs"] is True and len(sides["val"]) > 5
    assert sorted(sides["train"] + sides["val"]) == sorted((spell(a), spell(b)) for a, b in pairs)

def test_unknown_text_is_said_and_refused(docs, tmp_path, capsys, refuses):
    texts = [f"{text} 你" if i % 2 else text for i, text in enumerate(TEXTS[:80])]
    prepare_text(docs, tmp_path / "out", jsonl(tmp_path / "a.jsonl", texts))
    assert "% of the tokens are unknown to" in capsys.readouterr().out
    file = jsonl(tmp_path / "b.jsonl", texts + 100 * ["你 好"])
    refuses("too many; choose another --encoder", prepare_text, docs, tmp_path / "other", file)

def test_an_interrupted_preparation_leaves_all_as_it_was(docs, tmp_path, monkeypatch):
    folder, file = tmp_path / "docs", jsonl(tmp_path / "a.jsonl", TEXTS)
    shutil.copytree(docs, folder, ignore=shutil.ignore_patterns("*.lock"))
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    def interrupted(*_):
        yield "train", [[5, 6, 1]]
        assert (folder / "new.tmp/train.bin").exists()
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data.prepare, "tokenise", interrupted)
        prepare_text(docs, folder, file)
    (folder / "prepare.lock").unlink(missing_ok=True)
    assert before == {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    assert prepare_text(docs, folder, file)[0]["length"] == 0

def test_a_folder_in_use_is_refused(docs, run, tmp_path, refuses):
    with data.prepare.replacing(tmp_path / "out"):
        refuses("another process is preparing it; wait", prepare_text, docs, tmp_path / "out",
                jsonl(tmp_path / "a.jsonl", TEXTS))
    with filelock.FileLock(f"{run}.lock"):
        refuses("another process trains there", trained, docs, run, "--steps=50")

def test_own_text_with_an_encoder_of_its_own(tmp_path, new, monkeypatch, refuses):
    monkeypatch.setattr(data.scratch, "RECIPE", RECIPE | dict(steps=5))
    file, argv = tmp_path / "a.txt", ("--encoder=scratch", f"--out={tmp_path}", "--val_share=0.1")
    file.write_text("\n\n".join(f"{i} 你好 {text}" for i, text in enumerate(TEXTS * 20)))
    assert "unknown" not in "".join(printed(text_prepare.main, file, *argv))
    trained(tmp_path, new, "--steps=3", "--length=24")
    assert len(printed(sample_main, "--ckpt", new, "--n", 2, "--length", 20)) == 2
    file.write_text("too little")
    refuses("too little text to learn an encoder", text_prepare.main, [file, *argv])

def parquet(folder, monkeypatch, **splits):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder.parent / "cache")
    folder.mkdir()
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return f"--repo={folder}"

PARQUET = dict(revision="refs/convert/parquet")

@parametrize("name, row, splits, repo, where", [
    ("openwebtext", lambda a, b: dict(text=a), 1, "Skylion007/openwebtext", PARQUET),
    ("tinystories", lambda a, b: dict(text=a), 2, "roneneldan/TinyStories", {}),
    ("wmt14_de_en", lambda a, b: dict(translation=dict(de=a, en=b)), 3, "wmt/wmt14",
     dict(name="de-en")),
    ("xsum", lambda a, b: dict(document=a, summary=b), 3, "EdinburghNLP/xsum", PARQUET)])
def test_the_papers_data(
        name, row, splits, repo, where, docs, spell, tmp_path, monkeypatch, refuses):
    main, asked = importlib.import_module(f"data.{name}.prepare").main, []
    texts = {split: [(f"{text}\n\nthe file", "the list") for text in TEXTS[10 * i:10 * i + 10]]
             for i, split in enumerate(["train", "validation", "test"][:splits])}
    argv = [f"--encoder={docs}/t5", *(["--val_share=0.3"] if splits == 1 else [])]
    local = [f"--out={tmp_path}", parquet(tmp_path / "repo", monkeypatch, **{
        split: [row(a, b) for a, b in rows] for split, rows in texts.items()})]
    main(argv + local)
    meta, sides = prepared(tmp_path)
    found = sorted(sum(sides.values(), []))  # a hash decides on the side
    wanted = [(spell(a), spell(b)) if splits == 3 else spell(a) for a, b in sum(texts.values(), [])]
    assert found == sorted(wanted) and meta["pairs"] == (splits == 3)
    assert splits == 1 or list(map(len, sides.values())) == [10] * splits
    main([*argv, *local, "--limit=7"])
    assert sum(map(len, prepared(tmp_path)[1].values())) == 7 * splits

    def load_dataset(*args, **options):
        asked.append((*args, options))
        raise ConnectionError("no network")
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    refuses(f"{repo}: no split train here .*no network.*check the name and the network", main, argv)
    assert asked == [(repo, dict(split="train", streaming=False) | where)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses("pip install datasets", main, argv)

def test_pretokenized_documents(docs, tmp_path, monkeypatch):
    rows = [dict(input_ids=[4 + i % 20, 5 + i // 20, 6, EOS]) for i in range(90)]
    importlib.import_module("data.openwebtext.prepare").main([
        parquet(tmp_path / "repo", monkeypatch, train=rows), f"--encoder={docs}/t5",
        "--pretokenized", f"--out={tmp_path}", "--val_share=0.2"])
    found = sum(prepared(tmp_path)[1].values(), [])
    assert sorted(found) == sorted(row["input_ids"][:-1] for row in rows)

# ---- users' mistakes: one clear message each ----

@pytest.fixture
def refuses(capsys):
    def check(says, program, *args):
        with pytest.raises(SystemExit) as stop:
            program(*([str(a) for a in arg] if isinstance(arg, list) else arg for arg in args))
        code, printed = stop.value.code, capsys.readouterr().err
        line = code if isinstance(code, str) else printed.splitlines()[-1]
        assert code and re.search(says, line) and "\n" not in line and len(line) < 600, line
    return check

FILES = {  # of samples, texts and conditions
    "a.txt": b"caf\xe9", "c.txt": b"the file",
    "a.jsonl": b'{"text": "a"}\nnope\n', "c.jsonl": b"",
    "f.jsonl": b'{"text": ""}\n',
    "e.jsonl": b'{"text": "a"}\n{"input": "a", "output": "b"}\n',
    "a.py": b"steps = 'x'", "b.py": b"rate = 1"}

@session
def broken(docs, run, pairs_run, tmp_path_factory):
    folder, weights = tmp_path_factory.mktemp("broken"), golden_weights()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    torch.save(5, folder / "number")
    torch.save(weights | {"blocks.1.attn.qkv.bias": torch.ones(7)}, folder / "shape")
    for name, source in dict(cut=docs, ids=docs, words=docs, weights=pairs_run[0]).items():
        shutil.copytree(source, folder / name)
    os.truncate(folder / "cut/train.bin", 800)
    np.memmap(folder / "ids/train.bin", np.uint16)[:] = 999
    load_tokenizer(pairs_run[0] / "t5").save_pretrained(folder / "words/t5")
    encoder = load_encoder(pairs_run[0] / "t5")
    encoder.shared.weight.data.add_(1)
    encoder.save_pretrained(folder / "weights/t5")
    for name, source in dict(words=run, weights=pairs_run[1]).items():
        content = newest(source)
        content["settings"]["encoder"] = str(folder / name / "t5")
        torch.save(content, folder / f"{name}.pt")
    return folder

def train_small(argv):
    trained(Path(argv[0]), Path(argv[1]), *argv[2:])

PROGRAMS = dict(train=train.main, small=train_small, sample=sample_main, eval=evaluate.main,
                text=text_prepare.main, infill=infill.main)

MISTAKES = """
train --stepz=3 => stepz: no such setting; did you mean steps
train --steps=many => 'many': must be int
train --compile=perhaps => must be bool
train --lr=nan => lr: nan: must be
train --predict=z => predict: invalid choice: 'z'.*eps
train no/such.py => no such config file; there are .*config/docs.py
train a.py => steps: 'x': must be int
train b.py => rate: no such setting
train --name=../escaped => must be a plain folder name
train --heads=5 => dim = 256: must be a multiple
train --teacher=a => a distillation needs all three
train --decode_share=0.9 => decode_share .* must be below 1
train --batch_size=7 --accum=2 => batch_size = 7: not divisible
train --batch_size=2 => 2 rows in a micro-batch: too few
train --device=abacus => abacus: not usable here
train --data=nowhere --prepare= => nowhere: not prepared yet
small {here}/cut {new} => train.bin: 400 tokens.*prepare the data again
small {here}/ids {new} => token id 999.* the encoder has only .*; prepare
small {here}/words {new} => its tokenizer .* is not the one
small {here}/weights {new} --length=32 --cond_length=16 => its encoder .* is not the one
small {docs} {run} --dim=64 => dim 32 -> 64.; choose .*--name, .*--fresh
small {docs} {run} --optimizer=adamw => optimizer 'muon' -> 'adamw'
small {pairs_data} {run} --length=32 --cond_length=16 => length .*tokenizer .*fingerprint
small {docs} {run} --cond_length=5 => cond_length = 5: .* holds no pairs
small {pairs_data} {run} => cond_length = 0: .* holds pairs
small {docs} {new} --init_from={run} --dim=64 => init_from = .*dim=32.* this run .*dim=64
sample --ckpt {run} --cond Row => trained without conditions; leave it
sample --ckpt {pairs} => writes from a condition; give one
sample --ckpt {pairs} --cond no.txt => cannot be read .FileNotFound
sample --ckpt {pairs} --cond a.txt => cannot be read .UnicodeDecode
sample --ckpt {pairs} --cond Row --length 16 => --length 16: leaves no room
sample --ckpt {run} --out a.txt => a.txt: exists already
sample --ckpt {run} --out no/a.txt => a.txt: .* its folder does not
sample --ckpt {run} --n 0 => nothing to sample: --n is 0
sample --ckpt {run} --steps 0 => steps: 0: must be at least 1
sample --ckpt nowhere.pt => 'nowhere.pt': no checkpoint
sample --ckpt= => '': no checkpoint
sample --ckpt me/no-such => me/no-such: .*check the name and the network
sample --ckpt number => no checkpoint can be read
sample --ckpt shape => not an ELF checkpoint.*qkv.bias
sample --ckpt words.pt => its tokenizer .* is not the one
sample --ckpt weights.pt --cond Row => its encoder .* is not the one
infill ___50 --ckpt {run} => no more than 40 tokens
infill flibbertigibbet___ --ckpt {run} => a word that the run does not know
eval a.jsonl => JSONDecodeError
eval c.jsonl => no text
eval f.jsonl --scorer {docs}/scorer => all samples are empty
text a.jsonl => a.jsonl, line 2: not UTF-8 text
text e.jsonl => pairs do not mix
text a.txt => a.txt.*not UTF-8 text
text c.txt --encoder={docs}/t5 => too little text: no rows for val; .*--val_share
text c.txt --encoder=no/such => encoder = no/such: .*check the name"""

@parametrize("mistake", MISTAKES.strip().splitlines())
def test_mistakes(mistake, docs, run, pairs_run, broken, new, refuses, monkeypatch):
    monkeypatch.chdir(broken)
    command, says = mistake.split(" => ")
    program, *argv = command.format(docs=docs, run=run, pairs_data=pairs_run[0], new=new,
                                    pairs=pairs_run[1], here=broken).split()
    more = [f"--out={new}", "--val_share=1e-9"] if program == "text" else []
    refuses(says, PROGRAMS[program], argv + more)
    assert newest(run)["step"] == 40 and not list(new.glob("*.bin"))

def test_no_run_yet_and_a_missing_package(monkeypatch, tmp_path, refuses):
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)
    refuses("no run under out/ yet: train one", sample_main, [])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    refuses("pip install sacrebleu rouge-score", evaluate.bleu_rouge, ("a",), ("a",))

def test_settings_of_a_base_a_file_and_options(tmp_path):
    (tmp_path / "base.py").write_text("steps = 5\nlr = 1\nname = 'a.b'\n")
    (tmp_path / "c.py").write_text(f"base = '{tmp_path}/base.py'\nlr = 2\nbf16 = False\n")
    config = configure([f"{tmp_path}/c.py", "--steps", "1_000", "--fresh"])
    assert config == Config(steps=1000, lr=2.0, name="a.b", bf16=False, fresh=True)
    assert configure([]) == configure(["config/docs.py"]) != Config()

# ---- how it is built, and what the pages say ----

ROOMS = ["model", "runtime", "config", "data.encoder", "data.rows", "data.prepare", "data.scratch",
         "data.docs", "data", "checkpoint", "sample", "train", "eval", "lab"]
CODE = {f.relative_to(ROOT).as_posix(): f for folder in ("", "config/", "data/", "data/*/", "lab/")
        for f in ROOT.glob(f"{folder}*.py")}

def floor(module):
    return next((i for i, room in enumerate(ROOMS) if f"{module}.".startswith(f"{room}.")), None)

@parametrize("file", sorted({*CODE} - {"test_elf.py"}))
def test_a_file_imports_only_from_the_floors_below(file):
    name, modules = file.removesuffix(".py").replace("/", "."), []
    for node in ast.walk(ast.parse(CODE[file].read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module)
    for module in modules:
        if floor(module) is not None:
            assert floor(module) < floor(name) or name.startswith("lab."), module
        elif name == "model":
            assert module.split(".")[0] in {"torch", *sys.stdlib_module_names}, module

@parametrize("file", [f for f in CODE if re.match("config/[a-z]", f)])
def test_a_config_file_is_assignments_alone(file):
    for line in ast.parse(CODE[file].read_text()).body:
        assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        ast.literal_eval(line.value)
    assert configure([file]).name.startswith(Path(file).stem)

def test_no_line_is_wider_than_100_columns():
    assert [f"{name}:{i}" for name, file in CODE.items()
            for i, line in enumerate(file.read_text().splitlines(), 1) if len(line) > 100] == []

@parametrize("page, up", [("README.md", ""), ("lab/lesson.md", "../")])
def test_pages_point_at_the_right_lines(page, up, least=8):
    text = (ROOT / page).read_text()
    links = re.findall(rf"\[([\w/]+\.py):(\d+)\]\({up}\1#L\2\) `([^`]+)`", text)
    assert len(links) == text.count("#L") >= least
    for file, line, code in links:
        assert code in ["", *(ROOT / file).read_text().splitlines()][int(line)], (file, line, code)

PATCHES = re.findall(r"```diff\n(.*?)```", (ROOT / "lab/lesson.md").read_text(), re.DOTALL)

@parametrize("patch", PATCHES)
def test_the_lessons_patches_apply_and_run(patch, writer, tmp_path):
    def patched(file):
        spec = importlib.util.spec_from_file_location("patched", tmp_path / file)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        return module
    for file in ("sample.py", "train.py"):
        shutil.copyfile(ROOT / file, tmp_path / file)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert patched("sample.py").sample(writer, settings_for(), 2).shape == (2, L)
    kinds = slice(0, 1), slice(1, 2), slice(2, 3)
    parts = patched("train.py").losses(writer, *batch(3), NONE[:1].expand(3, L, 1), kinds,
                                       **draws(3, 1), noise_scale=2.0, decode_noise=5.0)
    assert train.objective(parts, Config()).isfinite()

def test_the_lesson_has_patches():
    assert len(PATCHES) >= 2

# ---- lab ----

def test_the_trace_ends_with_the_samples(run, tmp_path):
    from lab import trace
    page, argv = tmp_path / "page.html", ["--ckpt", run, "--seed", 2]
    shown = printed(trace.main, *argv, "--page", page)
    texts = printed(sample_main, *argv, "--n", 6)
    steps = json.loads(re.search(r"const trace = (.*);\n", page.read_text())[1])["steps"]
    assert len(shown) == len(steps) == 4 and shown[-1].split("  ", 1)[1] == texts[0]
    ends = ["".join(token for token, _ in row) for row in steps[-1]["rows"]]
    assert [re.sub(r"\W", "", end) for end in ends] == [re.sub(r"\W", "", text) for text in texts]

def test_samples_and_the_yardstick_are_measured(run, pairs_run, docs, tmp_path, monkeypatch):
    from lab import ablations, autoregressive
    out, scorer = tmp_path / "ar.jsonl", f"--scorer={docs}/scorer"
    autoregressive.main(["--ckpt", str(run), "--n=3", f"--out={out}", scorer])
    [written], [real] = evaluate.main([str(out), scorer])
    monkeypatch.setattr(evaluate, "main", lambda argv, main=evaluate.main: main([*argv, scorer]))
    found, _ = ablations.measure(f"--ckpt={run} --steps=2", n=3, seeds=2)
    assert found.keys() - {"tokens_per_s"} == real.keys() == written.keys()
    pytest.importorskip("sacrebleu")
    found, _ = ablations.measure(f"--ckpt={pairs_run[1]} --cond=val", n=3, seeds=2)
    assert 0 <= found["bleu"] <= 100

def test_few_steps_and_pictures_are_drawn(monkeypatch, tmp_path, run):
    pytest.importorskip("matplotlib")
    from lab import few_steps, pictures
    figures = dict(tokens_per_s=9.0, gen_ppl=30.0, entropy=2.0, distinct1=0.1)
    monkeypatch.setattr(train, "main", configure)
    monkeypatch.setattr(few_steps, "measure", lambda how: (figures, figures))
    monkeypatch.setattr(pictures, "__file__", str(tmp_path / "pictures.py"))
    few_steps.main()
    pictures.draw_losses([run])
    assert sorted(os.listdir(tmp_path)) == ["few_steps.svg", "losses.svg"]
