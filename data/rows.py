"""
The rows of a prepared folder, memory-mapped, and the order in which training visits them.

data/README.md describes the files.
"""
import functools
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from config import ROOT
from data.encoder import (EOS, check_same, encoder_fingerprint, load_encoder, load_tokenizer,
                          to_ids, to_text, tokenizer_fingerprint)
from runtime import max_over_processes, rank

@dataclass
class Rows:
    """Rows of L tokens: a stream of documents, or pairs, cut to fit and padded with </s>."""
    tokens: np.ndarray
    offsets: np.ndarray    # of pairs: 0, and where each condition and each target ends; or None
    L: int
    cond_length: int       # the most tokens of a condition
    vocab_size: int

    def __len__(self):
        return len(self.tokens) // self.L if self.offsets is None else len(self.offsets) // 2

    def batch(self, where):
        """Returns rows `where` as ids (B, L) int64, and the lengths (B,) of their conditions."""
        ids = np.full((len(where), self.L), EOS, np.int64)
        n_cond = np.zeros(len(where), np.int64)
        for row, i in enumerate(where):
            if self.offsets is None:
                ids[row] = self.tokens[i * self.L:(i + 1) * self.L]
            else:
                a, b, c = self.offsets[2 * i:2 * i + 3].astype(np.int64)
                cond = self.tokens[a:min(b, a + self.cond_length)]
                both = np.concatenate([cond, self.tokens[b:c]])[:self.L]
                ids[row, :len(both)], n_cond[row] = both, len(cond)
        if ids.max() >= self.vocab_size:
            sys.exit(f"token id {ids.max()}: the encoder has only {self.vocab_size}; prepare the "
                     "data again")
        return ids, n_cond

def read_meta(data):
    """Returns meta.json of the folder data as a dict; exits if the folder is not prepared."""
    if not (ROOT / data / "meta.json").is_file():
        sys.exit(f"data = {data}: not prepared yet (no meta.json); run its prepare.py first")
    return json.loads((ROOT / data / "meta.json").read_text())

def open_rows(data, side, length=0, cond_length=0):
    """
    Returns the Rows of one side ("train", "val", "test") of a prepared folder.

    length, cond_length  as in Config; exits if the data do not fit. 0: as they were prepared
    """
    meta, file = read_meta(data), ROOT / data / f"{side}.bin"
    if side not in meta["counts"]:
        sys.exit(f"{data}: has no {side} rows")
    length = length or meta["length"] or 1
    if meta["length"] not in (0, length):
        sys.exit(f"length = {length}: {data} holds rows of {meta['length']} tokens")
    if bool(cond_length) != meta["pairs"]:
        sys.exit(f"cond_length = {cond_length}: {data} holds {'' if meta['pairs'] else 'no '}pairs "
                 "of a condition and a target; it must be above 0 for pairs, else 0")
    offsets = np.memmap(file.with_suffix(".idx"), np.uint64, "r") if meta["pairs"] else None
    tokens, count = np.memmap(file, meta["dtype"], "r"), meta["counts"][side]["tokens"]
    rows = Rows(tokens, offsets, length, cond_length, meta["vocab_size"])
    if len(tokens) != count or len(rows) < 2:
        sys.exit(f"{file}: {len(tokens)} tokens, of {count} in meta.json and {length} in a row; "
                 "prepare the data again, with more text")
    return rows

def load_data(config, device):
    """
    Returns what config names: train and val rows, tokenizer, encoder, x_mean and x_std of x, and
    their identity, by which a run knows them again. Prepares the rows first if config says how.
    """
    if config.bench:
        return random_data(config, device)
    missing = not (ROOT / config.data / "meta.json").is_file()
    if rank() == 0 and missing and Path(config.prepare).parent == Path(config.data):
        print(f"{config.data} is not prepared yet: running {config.prepare}", flush=True)
        importlib.import_module(config.prepare.removesuffix(".py").replace("/", ".")).main([])
    max_over_processes(0)  # wait for that
    meta = read_meta(config.data)
    train, val = (open_rows(config.data, side, config.length, config.cond_length)
                  for side in ("train", "val"))
    tokenizer = load_tokenizer(config.encoder, meta["tokenizer"])
    encoder = load_encoder(config.encoder, device, meta.get("encoder_weights"))
    identity = {key: meta[key] for key in ("fingerprint", "tokenizer", "x_mean", "x_std")}
    identity["encoder_weights"] = encoder_fingerprint(encoder)
    x_mean, x_std = (torch.tensor(meta[key], device=device) for key in ("x_mean", "x_std"))
    return SimpleNamespace(train=train, val=val, tokenizer=tokenizer, encoder=encoder,
                           x_mean=x_mean, x_std=x_std, identity=identity, teacher=None)

def random_data(config, device):
    """Returns the same, random and of the right shape, for --bench."""
    from transformers import T5Config, T5EncoderModel
    local = (ROOT / config.encoder / "config.json").is_file()
    shape = T5Config.from_pretrained(ROOT / config.encoder) if local else T5Config(vocab_size=32100)
    encoder, V, L = T5EncoderModel(shape).to(device).eval(), shape.vocab_size, config.length
    offsets = np.append(0, L * np.arange(1000)[:, None] + [config.cond_length, L])
    tokens = np.random.default_rng(0).integers(2, V, 1000 * L)
    rows = Rows(tokens, offsets if config.cond_length else None, L, config.cond_length, V)
    return SimpleNamespace(train=rows, val=rows, tokenizer=range(V), x_mean=0.0, x_std=0.2,
                           encoder=encoder.requires_grad_(False), identity={}, teacher=None)

@functools.lru_cache(maxsize=2)
def shuffled(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)

def batch_rows(n, step, batch_size, seed):
    """Returns which of n rows step takes. Every epoch visits each row once, in its own order."""
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    return np.array([shuffled(n, seed, int(epoch))[i]
                     for epoch, i in zip(places // n, places % n)])

def odd_rows(rows, n):
    """Returns `batch` of n random odd rows, to report on; the even ones are to choose by."""
    return rows.batch(2 * np.random.default_rng(0).permutation(len(rows) // 2)[:n] + 1)

def read_conditions(source, n, settings, tokenizer):
    """
    Returns n conditions, as lists of token ids, and a record of each one's text and reference.

    source  a text; a .jsonl file of {"input": ..., "output": ...}; a .txt file of one a line; "val"
            or "test", for the run's own data; None, for a run without conditions
    """
    length, most, records = settings["length"], settings["cond_length"], [dict(cond=source)] * n
    if (source is not None) != (most > 0):
        sys.exit("--cond: this run writes from a condition; give one" if most else
                 "--cond: this run was trained without conditions; leave it out")
    if source is None:
        return [[]] * n, [{}] * n
    if length <= most:
        sys.exit(f"--length {length}: leaves no room after a condition of {most} tokens")
    if source in ("val", "test"):
        rows = open_rows(settings["data"], source, length, most)
        check_same(settings["data"], "tokenizer", tokenizer_fingerprint(tokenizer),
                   read_meta(settings["data"])["tokenizer"])
        ids, n_cond = odd_rows(rows, n)
        records = [dict(cond=tokenizer.decode(row[:k]), reference=to_text(tokenizer, row, k))
                   for row, k in zip(ids, n_cond)]
        return [row[:k].tolist() for row, k in zip(ids, n_cond)], records
    if source.endswith((".txt", ".jsonl")):
        try:
            lines = Path(source).read_text("utf-8-sig").splitlines()[:n]
            records = [dict(cond=line) for line in lines]
            if source.endswith(".jsonl"):
                records = [dict(cond=record["input"], reference=record.get("output"))
                           for record in map(json.loads, lines)]
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"--cond {source}: cannot be read ({type(error).__name__}: {error})")
    conds = to_ids(tokenizer, [record["cond"] for record in records])
    if cut := sum(len(cond) > most for cond in conds):
        print(f"--cond: {cut} conditions are longer than {most} tokens, and cut", file=sys.stderr)
    return [cond[:most] for cond in conds], records
