"""Reads what the prepare.py scripts write (see README.md): rows by memory map, and the order in which training visits them."""
import functools
import json
import sys

import numpy as np

from config import ROOT
from config.machine import run_script
from data import EOS


class Rows:
    """
    One side of a data set (see data/README.md), memory-mapped: a stream of tokens cut into rows of L, or pairs of a condition
    and a target, where each row is both, cut to fit, and filled up with </s>.
    """

    def __init__(self, file, dtype, meta, L, cond_length=0):
        again = f"delete meta.json in {file.parent} and prepare the data again"
        self.L, self.cond_length, self.vocab_size, self.file = L, cond_length, meta["vocab_size"], file
        try:
            self.tokens = np.memmap(file, dtype, "r")
            self.offsets = np.memmap(file.with_suffix(".idx"), np.uint64, "r") if meta["pairs"] else None
        except (OSError, ValueError) as e:  # missing, empty, or not whole tokens
            sys.exit(f"{file}: missing, empty or cut short ({e}); {again}")
        count = meta["counts"][file.stem]
        whole = self.offsets is None or len(self.offsets) == 2 * count["rows"] + 1 and self.offsets[-1] == len(self.tokens)
        if len(self.tokens) != count["tokens"] or not whole:
            sys.exit(f"{file}: {len(self.tokens)} tokens, and not the {count['tokens']} in {count['rows']} rows that meta.json tells of; {again}")
        if len(self) == 0:
            sys.exit(f"{file}: {len(self.tokens)} tokens, less than one row of length = {L}; choose a smaller --length, more text or a larger "
                     "--val_share")

    def __len__(self):
        return len(self.tokens) // self.L if self.offsets is None else len(self.offsets) // 2

    def batch(self, where):
        """Rows `where` as ids (B, L) int64, of which the first n_cond (B,) are the condition."""
        ids, n_cond = np.full((len(where), self.L), EOS, np.int64), np.zeros(len(where), np.int64)
        for row, i in enumerate(where):
            if self.offsets is None:
                ids[row] = self.tokens[i * self.L:(i + 1) * self.L]
            else:
                a, b, c = self.offsets[2 * i:2 * i + 3].astype(np.int64)
                cond, target = self.tokens[a:min(b, a + self.cond_length)], self.tokens[b:c]
                n_cond[row] = len(cond)
                both = np.concatenate([cond, target[:self.L - len(cond)]])
                ids[row, :len(both)] = both
        if ids.max() >= self.vocab_size:
            sys.exit(f"{self.file}: token id {ids.max()} in it, but its encoder has {self.vocab_size} tokens; prepare the data again")
        return ids, n_cond


def open_data(data, length=0, cond_length=0, prepare=""):
    """
    (train, val, meta) of the folder data: two `Rows`, and the dict in its meta.json. Makes the folder first if prepare says how.
    length, cond_length: what the run's config says; SystemExit with one line where the data says otherwise.
    """
    folder = ROOT / data
    if not (folder / "meta.json").is_file():
        script = folder / "prepare.py"
        if not prepare or (ROOT / prepare).resolve() != script.resolve() or not script.is_file():
            sys.exit(f"data = {data}: no meta.json there; prepare that folder first, or name a prepared one")
        print(f"{data} is not prepared yet: running {prepare}", flush=True)
        if code := run_script([script]):
            sys.exit(code)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype, L = {"uint16": np.dtype("uint16"), "uint32": np.dtype("uint32")}[meta["dtype"]], int(meta["length"])
        x_mean, x_std = (np.array(meta[k], float) for k in ("x_mean", "x_std"))
        if not (np.isfinite(x_mean).all() and (x_std > 0).all() and x_mean.shape == x_std.shape and type(meta["fingerprint"]) is str
                and type(meta["encoder"]) is str and type(meta["pairs"]) is bool and 0 <= L < 2**24 and type(meta["vocab_size"]) is int
                and all(type(meta["counts"][side][k]) is int for side in ("train", "val") for k in ("rows", "tokens"))):
            raise ValueError("x_mean, x_std, length, encoder, vocab_size, pairs, counts or fingerprint is off")
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f"{folder}/meta.json: damaged ({type(e).__name__}: {e}); delete it and prepare the data again")
    if length and L and length != L:
        sys.exit(f"length = {length}: {data} holds rows of {L} tokens")
    if bool(cond_length) != meta["pairs"] and length or cond_length >= max(1, length):
        sys.exit(f"cond_length = {cond_length}: must be from 1 to length - 1 for data of pairs, and 0 for other data; {data} "
                 f"{'holds' if meta['pairs'] else 'does not hold'} pairs")
    return *(Rows(folder / f"{side}.bin", dtype, meta, length or L or 1, cond_length) for side in ("train", "val")), meta


@functools.lru_cache(maxsize=2)
def shuffled(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)


def batch_rows(n, step, batch_size, seed):
    """Which of n rows the global batch of `step` holds: epochs end to end, each in its own order, every row once in each."""
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    return np.array([shuffled(n, seed, int(epoch))[i] for epoch, i in zip(places // n, places % n)])


class RandomRows:
    """Rows of random tokens that lie nowhere, for --bench."""

    def __init__(self, vocab_size, L, cond_length):
        self.vocab_size, self.L, self.cond_length = vocab_size, L, cond_length

    def __len__(self):
        return 1_000_000

    def batch(self, where):
        return np.random.default_rng(where).integers(2, self.vocab_size, (len(where), self.L)), np.full(len(where), self.cond_length)
