"""
What every prepare.py shares: from texts to the files that train.py reads (README.md says what they hold), and the options of the scripts.
"""
import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from config import ROOT
from config.machine import pick_device
from data import EOS
from data.encoder import load_encoder, load_tokenizer, local_or_repo, one_line, to_ids


# ---------------------------------------------------------------------------------------------------------------------
# the files of a prepared folder

def shown(path):
    """A path as messages and meta.json name it: relative to this repository where it lies inside."""
    path = Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@torch.no_grad()
def statistics(encoder, rows):
    """Mean and standard deviation of each channel of the encoder's output on at most 4,096 of the rows (n, L), evenly spaced."""
    ids = torch.from_numpy(rows[np.linspace(0, len(rows) - 1, min(len(rows), 4096)).astype(int)].astype(np.int64))
    total = squares = 0
    for batch in ids.split(64):
        x = encoder(input_ids=batch.to(encoder.device)).last_hidden_state.double().cpu().flatten(0, 1)
        total, squares = total + x.sum(0), squares + x.square().sum(0)
    mean = total / ids.numel()
    std = ((squares - ids.numel() * mean.square()) / max(ids.numel() - 1, 1)).clamp(min=1e-12).sqrt()
    return dict(x_mean=mean.tolist(), x_std=std.tolist())


class Files:
    """
    The token files while they grow: <side>.bin.tmp and, for pairs, <side>.idx.tmp. Only `finish` gives them their names; until then
    what the folder held before stays as it is, and without it (an error, an interruption) they are removed.
    """

    def __init__(self, folder, dtype, pairs=False):
        self.folder, self.dtype, self.pairs, self.open, self.counts = Path(folder), np.dtype(dtype), pairs, {}, {}
        self.folder.mkdir(parents=True, exist_ok=True)

    def file(self, name):
        if name not in self.open:
            self.open[name] = open(self.folder / f"{name}.tmp", "wb", buffering=1 << 20)
        return self.open[name]

    def add(self, side, parts):
        """One more row of `side`: [ids] of a document, or [ids of the condition, ids of the target]."""
        count = self.counts.setdefault(side, dict(rows=0, tokens=0))
        if self.pairs and not count["rows"]:
            self.file(f"{side}.idx").write(np.uint64(0).tobytes())
        for ids in parts:
            self.file(f"{side}.bin").write(ids.tobytes())
            count["tokens"] += len(ids)
            if self.pairs:
                self.file(f"{side}.idx").write(np.uint64(count["tokens"]).tobytes())
        count["rows"] += 1

    def finish(self, name, vocab_size, encoder=None, length=0, fingerprint=None):
        """
        All files under their own names, meta.json last.

        name          the encoder's, as meta.json shall have it
        encoder       T5EncoderModel to take the statistics with, on rows of 128 tokens where length does not fix them; None: the paper's
        fingerprint   where it is not that of the files
        """
        for file in self.open.values():
            file.close()
        order = [side for side in ("train", "val", "test") if side in self.counts]
        if order[:2] != ["train", "val"]:
            rows = ", ".join(f"{count['rows']:,} {side}" for side, count in self.counts.items()) or "none"
            sys.exit(f"{shown(self.folder)}: no rows for {'train' if order[:1] != ['train'] else 'val'} (rows: {rows}): too little text; "
                     "add some, or raise --val_share or --limit where the script has them")
        figures = dict(x_mean=0.0, x_std=0.2)  # t5-small's, in the paper
        if encoder is not None:
            ids = np.memmap(self.folder / "train.bin.tmp", dtype=self.dtype, mode="r")
            L = min(length or 128, len(ids))
            figures = statistics(encoder, ids[:len(ids) // L * L].reshape(-1, L))
        digest = hashlib.sha256()
        for file in [self.open[f"{side}.{kind}"].name for side in order for kind in (("bin", "idx") if self.pairs else ("bin",))]:
            with open(file, "rb") as f:
                while block := f.read(1 << 20):
                    digest.update(block)
        meta = dict(dtype=str(self.dtype), pairs=self.pairs, length=length, encoder=name, vocab_size=vocab_size,
                    counts={side: self.counts[side] for side in order}, fingerprint=fingerprint or digest.hexdigest()[:12]) | figures
        replaced = (self.folder / "meta.json").is_file()
        for file in ["meta.json", *(f"{side}.{kind}" for side in ("train", "val", "test") for kind in ("bin", "idx"))]:
            (self.folder / file).unlink(missing_ok=True)  # meta.json first: from here on the folder is not complete
        for file in self.open:
            os.replace(self.folder / f"{file}.tmp", self.folder / file)
        temporary = self.folder / "meta.json.tmp"
        temporary.write_text(json.dumps(meta, indent=1))
        os.replace(temporary, self.folder / "meta.json")
        print(f"{shown(self.folder)}: " + ", ".join(f"{c['rows']:,} {side} {'pairs' if self.pairs else 'rows'} ({c['tokens']:,} tokens, "
              f"{c['tokens'] * self.dtype.itemsize:,} bytes)" for side, c in meta["counts"].items())
              + f", fingerprint {meta['fingerprint']}" + "; replaced what was there" * replaced, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.open.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)


def write_dataset(folder, train, val, tokenizer, encoder, fingerprint):
    """What data/docs makes: rows (n, length) uint16, and their tokenizer and encoder in t5/."""
    tokenizer.save_pretrained(Path(folder) / "t5")
    encoder.save_pretrained(Path(folder) / "t5")
    with Files(folder, train.dtype) as files:
        for side, rows in (("train", train), ("val", val)):
            for row in rows:
                files.add(side, [row])
        files.finish("t5", len(tokenizer), encoder, train.shape[1], fingerprint)


# ---------------------------------------------------------------------------------------------------------------------
# from texts to tokens, in constant memory

def side_of(data, val_share):
    """train or val, by the hash of these bytes alone."""
    return "val" if int.from_bytes(hashlib.sha256(data).digest()[:4], "big") < val_share * 2**32 else "train"


def batches(items, characters=1 << 20):
    """Lists of consecutive items, of about that many characters each; no more than 4,000 items."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += sum(map(len, item[1]))
        if size >= characters or len(batch) == 4000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenise(items, tokenizer, dtype, end, val_share):
    """(side or None, texts) one by one -> (side, id arrays or, where one of the texts is empty, None), each array with `end` at its end."""
    for batch in batches(items):
        ids = iter(to_ids(tokenizer, [text for _, texts in batch for text in texts]))
        for side, texts in batch:
            parts = [np.array(next(ids) + end, dtype) for _ in texts]
            yield side or side_of(one_line(texts[0]).encode(), val_share), parts if all(len(part) > len(end) for part in parts) else None


def as_they_are(items, vocab_size, dtype, val_share):
    """The same where token ids stand for the text: checked, and not ended."""
    for number, (_, [ids]) in enumerate(items):
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            sys.exit(f"row {number}: token id {ids.min() if ids.min() < 0 else ids.max()} in it, but the encoder's vocabulary has "
                     f"{vocab_size}; name the --encoder that made them")
        ids = ids.astype(dtype)
        yield side_of(ids.tobytes(), val_share), [ids] if len(ids) else None


def build(args, items, pairs=False, val_share=0.0, total=None, pretokenized=False):
    """
    The prepared folder args.out, from args.encoder's tokens, by args.workers threads.

    items     yields (side, (text,)), or (side, (condition, target)) for pairs; the side is "train", "val" or "test", or None: then the
              hash of the (first) text sends val_share of them to val. With pretokenized, token ids stand for the text
    total     how many they are, for the bar, where that is known
    raises    SystemExit with one line if anything is amiss; the folder is then as it was
    """
    tokenizer = load_tokenizer(args.encoder)
    if not tokenizer.is_fast or tokenizer.eos_token_id != EOS:
        sys.exit(f"--encoder {args.encoder}: needs a fast tokenizer whose </s> is token {EOS}, as every T5 has")
    encoder = None if Path(args.encoder).name == "t5-small" else load_encoder(args.encoder, pick_device())  # early: it may not be there
    dtype = np.dtype("uint16" if len(tokenizer) <= 65535 else "uint32")
    if pretokenized:
        rows = as_they_are(items, len(tokenizer), dtype, val_share)
    else:
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # of the tokenizers library, before its first call
        rows = tokenise(items, tokenizer, dtype, [] if pairs else [EOS], val_share)
    dropped = 0
    try:
        with Files(args.out, dtype, pairs) as files:
            for side, parts in tqdm(rows, total=total, desc="tokenising", unit=" rows", dynamic_ncols=True):
                if parts is None:
                    dropped += 1
                else:
                    files.add(side, parts)
            if dropped:
                print(f"{dropped:,} rows dropped: {'condition or target' if pairs else 'they'} had no token")
            files.finish(args.encoder, len(tokenizer), encoder)
    except KeyboardInterrupt:
        sys.exit(f"interrupted: {shown(args.out)} is as it was; the same command starts anew")
    except OSError as e:
        sys.exit(f"{shown(e.filename or args.out)}: {e.strerror or e}; {shown(args.out)} was not prepared")


# ---------------------------------------------------------------------------------------------------------------------
# the options of the scripts, and the Hugging Face datasets

def whole(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def share(text):
    try:
        if 0 < float(text) < 1:
            return float(text)
    except ValueError:
        pass  # said below
    raise argparse.ArgumentTypeError(f"{text}: must lie between 0 and 1")


def options(doc, folder, repo=None):
    """The parser of a prepare.py that lies in `folder`; with `repo`, of one that reads that Hugging Face dataset."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="t5-small", help="T5 whose tokens to write: repo id or folder like data/docs/t5 (%(default)s)")
    parser.add_argument("--workers", type=whole, default=os.cpu_count(), help="threads (%(default)s)")
    parser.add_argument("--out", type=Path, default=folder, help="folder to write instead of the script's own")
    if repo:
        parser.add_argument("--repo", default=repo, help="another repo id, or a folder of Parquet files, with its columns (%(default)s)")
        parser.add_argument("--limit", type=whole, metavar="N", help="the first N rows of each split: a trial, best in an --out of its own")
    return parser


def hub(repo, sides, limit=None, **where):
    """
    A Hugging Face dataset, or a folder of Parquet files.

    sides     {name of a split there: "train", "val" or "test"}; only a test split may be missing
    where     name and revision on the hub
    returns   [(side, rows), ...], and how many rows in all or None. A whole dataset is downloaded first and kept, as `datasets`
              does; a folder, or a few rows, are streamed
    """
    try:
        import datasets
    except ImportError:
        sys.exit("the datasets package is missing: pip install datasets")
    path = local_or_repo(repo)
    local = Path(path).is_dir()
    try:
        found = datasets.load_dataset(path, streaming=local or limit is not None, **{} if local else where)
    except Exception as e:  # its errors share no base class
        sys.exit(f"{repo}: neither a folder of Parquet files nor fetched from the Hugging Face hub ({type(e).__name__}: "
                 f"{' '.join(str(e).split())[:200]}); check the name and the network")
    if missing := [split for split, side in sides.items() if split not in found and side != "test"]:
        sys.exit(f"{repo}: has no split {missing[0]}; it has {', '.join(found)}")
    rows = [(side, found[split].take(limit) if limit else found[split]) for split, side in sides.items() if split in found]
    return rows, None if local or limit else sum(len(r) for _, r in rows)


def columns(repo, rows, *names, kind=str):
    """The values of these columns, row by row, as tuples; "a.b" is column b inside column a. A missing value is an empty one."""
    try:
        for row in rows:
            values = []
            for name in names:
                value = row
                for key in name.split("."):
                    if key not in value:
                        sys.exit(f"{repo}: has no column {name}; it has {', '.join(row)}")
                    value = value[key]
                if not isinstance(value, (kind, type(None))):
                    sys.exit(f"{repo}: column {name} holds {type(value).__name__}, not {kind.__name__}")
                values.append(kind() if value is None else value)
            yield tuple(values)
    except Exception as e:  # a network or a file that fails on the way, in as many ways as there are sources
        sys.exit(f"{repo}: reading it failed ({type(e).__name__}: {' '.join(str(e).split())[:200]}); run the same command again")
