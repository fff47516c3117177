"""
What the prepare scripts share: writing a prepared folder, their options, the Hugging Face hub.

data/README.md describes the files. Everything is written into <folder>/new.tmp and moved when it is
whole, meta.json last: a folder that has one is complete.
"""
import hashlib
import itertools
import json
import os
import shutil
import sys
from array import array
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock
import numpy as np
import torch

import runtime
from config import ROOT
from data.encoder import (EOS, encoder_fingerprint, load_encoder, load_tokenizer, local_or_repo,
                          one_line, to_ids, tokenizer_fingerprint)

@contextmanager
def replacing(folder):
    """Yields an empty folder, whose files then replace those of folder if there is no error."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "new.tmp"
    try:
        with filelock.FileLock(folder / "prepare.lock", timeout=0):
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            try:
                yield new
                (folder / "meta.json").unlink(missing_ok=True)
                for path in sorted(new.iterdir(), key=lambda path: path.name == "meta.json"):
                    shutil.rmtree(folder / path.name, ignore_errors=True)  # an old t5/
                    os.replace(path, folder / path.name)
            finally:
                shutil.rmtree(new)
    except filelock.Timeout:
        sys.exit(f"{folder}: another process is preparing it; wait until it ends")

def write_folder(folder, rows, tokenizer, encoder_name, encoder=None, pairs=False, length=0):
    """
    Writes rows and meta.json, and under encoder_name "t5" the tokenizer and the encoder too.

    rows     yields (side, [ids]), or (side, [condition ids, target ids]) for pairs
    encoder  measures mean and deviation of x; None stands for t5-small, whose are the paper's
    length   tokens in a row, if they are fixed
    """
    dtype = np.dtype("uint16" if len(tokenizer) <= 65535 else "uint32")
    ends, files = {}, {}  # of each side: where its parts end, and the open file
    with ExitStack() as stack:
        for side, parts in rows:
            if side not in files:
                files[side] = stack.enter_context(open(folder / f"{side}.bin", "wb", 1 << 20))
                ends[side] = array("Q", [0])
            for ids in parts:
                files[side].write(np.asarray(ids, dtype).tobytes())
                ends[side].append(ends[side][-1] + len(ids))
    if missing := {"train", "val"} - ends.keys():
        sys.exit(f"too little text: no rows for {missing.pop()}; add text, or raise --val_share")
    counts = {side: dict(rows=(len(end) - 1) // (1 + pairs), tokens=end[-1])
              for side, end in ends.items()}
    for side in ends if pairs else ():
        np.array(ends[side], np.uint64).tofile(folder / f"{side}.idx")
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with open(file, "rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    meta = dict(dtype=str(dtype), pairs=pairs, length=length, encoder=encoder_name, counts=counts,
                vocab_size=len(tokenizer), tokenizer=tokenizer_fingerprint(tokenizer),
                fingerprint=digest.hexdigest()[:12], x_mean=0.0, x_std=0.2)
    if encoder is not None:
        meta |= statistics(encoder, np.memmap(folder / "train.bin", dtype, "r"), length or 128)
        meta["encoder_weights"] = encoder_fingerprint(encoder)
    if encoder_name == "t5":
        save_pretrained(folder / "t5", tokenizer, encoder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    print(f"{counts}, {len(tokenizer):,} tokens, fingerprint {meta['fingerprint']}", flush=True)

@torch.no_grad()
def statistics(encoder, tokens, length):
    """Returns mean and deviation of each channel of x, from at most 1,024 rows of tokens."""
    length = min(length, len(tokens))
    rows = tokens[:len(tokens) // length * length].reshape(-1, length)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), 1024)).astype(int)].astype(np.int64)
    x = [encoder(input_ids=ids.to(encoder.device)).last_hidden_state.flatten(0, 1).cpu()
         for ids in torch.from_numpy(rows).split(64)]
    std, mean = torch.std_mean(torch.cat(x), 0)
    return dict(x_mean=mean.tolist(), x_std=std.clamp(min=1e-6).tolist())

def save_pretrained(folder, tokenizer, model):
    from transformers.utils import logging
    logging.disable_progress_bar()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)

def side_of(text, val_share):
    """Returns "train" or "val", by the hash of the text alone."""
    place = int.from_bytes(hashlib.sha256(one_line(text).encode()).digest()[:4], "big")
    return "val" if place < val_share * 2**32 else "train"

def tokenise(items, tokenizer, end, encoder_name):
    """Yields (side, lists of token ids) for each (side, texts); `end` ends each list."""
    items, unknown, tokens = iter(items), 0, 0
    while batch := list(itertools.islice(items, 1000)):
        ids = iter(to_ids(tokenizer, [text for _, texts in batch for text in texts]))
        for side, texts in batch:
            parts = [next(ids) for _ in texts]
            unknown += sum(part.count(tokenizer.unk_token_id) for part in parts)
            tokens += sum(map(len, parts))
            if all(parts):  # else there is nothing to learn
                yield side, [part + end for part in parts]
    if unknown > 0.01 * tokens:
        print(f"{unknown / tokens:.0%} of the tokens are unknown to {encoder_name}")
    if unknown > 0.2 * tokens:
        sys.exit("these are too many; choose another --encoder (for data/text/prepare.py: scratch)")

def build(args, items, pairs=False, made=None, pretokenized=False):
    """
    Prepares the folder args.out with the tokens of args.encoder; memory does not grow with it.

    items  yields (side, [document]), or (side, [condition, target]) for pairs; pretokenized: lists
           of token ids stand for the texts
    made   (tokenizer, encoder) that were made for these texts
    """
    tokenizer, encoder = made or (load_tokenizer(args.encoder), None)
    if not made and Path(args.encoder).name != "t5-small":
        encoder = load_encoder(args.encoder, runtime.pick_device())
    if not pretokenized:
        items = tokenise(items, tokenizer, [] if pairs else [EOS], args.encoder)
    with replacing(args.out) as folder:
        items = runtime.progress(items, desc="tokenising", unit=" rows")
        write_folder(folder, items, tokenizer, "t5" if made else args.encoder, encoder, pairs)

def options(doc, folder, repo=None, val_share=None):
    """Returns the parser of the prepare script in `folder`, which may read a hub dataset `repo`."""
    parser = runtime.parser(doc)
    parser.add_argument("--encoder", default="t5-small", help="T5: repo id or folder (%(default)s)")
    parser.add_argument("--out", type=lambda name: ROOT / name, default=folder,
                        help="folder to write (the script's own)")
    if repo:
        parser.add_argument("--repo", default=repo, help="repo id or Parquet folder (%(default)s)")
        parser.add_argument("--limit", type=int, help="only the first so many rows of a split")
    if val_share:
        parser.add_argument("--val_share", type=float, default=val_share,
                            help="share of documents or pairs held out (%(default)s)")
    return parser

def hub_rows(repo, split, limit=None, **where):
    """Returns a split of a Hugging Face dataset, or of a folder of Parquet files; limit streams."""
    try:
        import datasets
    except ImportError:
        sys.exit("the datasets package is missing: pip install datasets")
    path = local_or_repo(repo)
    where = {} if Path(path).is_dir() else where
    try:
        rows = datasets.load_dataset(path, split=split, streaming=limit is not None, **where)
    except Exception as error:  # the hub's errors share no base class
        sys.exit(f"{repo}: no split {split} here or on the Hugging Face hub "
                 f"({' '.join(str(error).split())[:200]}); check the name and the network")
    return rows.take(limit) if limit else rows

def build_splits(args, texts_of, splits=("train", "val", "test"), pairs=True, **where):
    """Prepares these splits of args.repo; texts_of(row) returns its texts."""
    names = dict(train="train", val="validation", test="test")
    build(args, ((side, texts_of(row)) for side in splits
                 for row in hub_rows(args.repo, names[side], args.limit, **where)), pairs)
