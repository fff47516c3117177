"""
What every prepare.py shares: from texts to the files that train.py reads (README.md says what they hold), and the options of the scripts.
"""
import argparse
import hashlib
import json
import os
import shutil
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from config import ROOT
from config.machine import hold, pick_device, progress
from data import EOS
from data.encoder import encoder_fingerprint, load_encoder, load_tokenizer, local_or_repo, one_line, to_ids, tokenizer_fingerprint


# ---------------------------------------------------------------------------------------------------------------------
# the files of a prepared folder

def shown(path):
    """A path as messages and meta.json name it: relative to this repository where it lies inside."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@torch.no_grad()
def statistics(encoder, rows):
    """Mean and standard deviation of each channel of the encoder's output on rows (n, L) of ids."""
    ids = torch.from_numpy(rows)
    total = squares = 0
    for batch in ids.split(64):
        x = encoder(input_ids=batch.to(encoder.device)).last_hidden_state.double().cpu().flatten(0, 1)
        total, squares = total + x.sum(0), squares + x.square().sum(0)
    mean = total / ids.numel()
    std = ((squares - ids.numel() * mean.square()) / max(ids.numel() - 1, 1)).clamp(min=1e-12).sqrt()
    return dict(x_mean=mean.tolist(), x_std=std.tolist())


class Files:
    """
    A prepared folder in the making. Everything is written into <folder>/new.tmp, and moved by `finish`; until then what the folder held
    before stays as it is, and without it (an error, an interruption) new.tmp is removed. One process at a time makes a folder; with
    `once`, what another has made meanwhile is not made again.
    """

    def __init__(self, folder, dtype, pairs=False, once=False):
        self.folder, self.dtype, self.pairs, self.once, self.open, self.counts = Path(folder), np.dtype(dtype), pairs, once, {}, {}
        self.new = self.folder / "new.tmp"

    def __enter__(self):
        self.stack, before = ExitStack(), self.meta()
        try:  # now, not after minutes of work
            self.folder.mkdir(parents=True, exist_ok=True)
            self.stack.enter_context(hold(self.folder / ".lock", self.wait))
            shutil.rmtree(self.new, ignore_errors=True)
            self.new.mkdir()
        except OSError as e:
            sys.exit(f"{shown(self.folder)}: cannot be written ({e.strerror}); choose another --out")
        if self.once and self.meta() != before:
            self.__exit__()
            print(f"{shown(self.folder)}: the other process has prepared it", flush=True)
            sys.exit()
        return self

    def wait(self):
        print(f"{shown(self.folder)}: another process prepares it; waiting until it ends", flush=True)

    def meta(self):
        return (self.folder / "meta.json").read_bytes() if (self.folder / "meta.json").is_file() else None

    def file(self, name):
        if name not in self.open:
            self.open[name] = open(self.new / name, "wb", buffering=1 << 20)
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

    def sample_rows(self, length):
        """At most 4,096 training rows of this length, evenly spaced, in memory: nothing stays mapped when files are renamed."""
        ids = np.memmap(self.new / "train.bin", dtype=self.dtype, mode="r")
        L = min(length, len(ids))
        rows = ids[:len(ids) // L * L].reshape(-1, L)
        return rows[np.linspace(0, len(rows) - 1, min(len(rows), 4096)).astype(int)].astype(np.int64)

    def finish(self, name, tokenizer, encoder=None, length=0, fingerprint=None):
        """
        All files under their own names, meta.json last.

        name          the encoder's, as meta.json shall have it; "t5": the tokenizer and encoder are new, and saved there, in the folder
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
        figures = statistics(encoder, self.sample_rows(length or 128)) if encoder else dict(x_mean=0.0, x_std=0.2)  # t5-small's, in the paper
        digest = hashlib.sha256()
        for side in order:
            for kind in ("bin", "idx") if self.pairs else ("bin",):
                with open(self.new / f"{side}.{kind}", "rb") as f:
                    while block := f.read(1 << 20):
                        digest.update(block)
        meta = dict(dtype=str(self.dtype), pairs=self.pairs, length=length, encoder=name, vocab_size=len(tokenizer),
                    tokenizer=tokenizer_fingerprint(tokenizer), counts={side: self.counts[side] for side in order},
                    fingerprint=fingerprint or digest.hexdigest()[:12]) | figures
        if encoder:
            meta["encoder_weights"] = encoder_fingerprint(encoder)
        if name == "t5":
            save_pretrained(self.new / "t5", tokenizer, encoder)
        (self.new / "meta.json").write_text(json.dumps(meta, indent=1))
        replaced = self.meta() is not None
        for file in ["meta.json", *(f"{side}.{kind}" for side in ("train", "val", "test") for kind in ("bin", "idx"))]:
            (self.folder / file).unlink(missing_ok=True)  # meta.json first: from here on the folder is not complete
        if name == "t5":
            shutil.rmtree(self.folder / "t5", ignore_errors=True)
        for path in sorted(self.new.iterdir(), key=lambda path: path.name == "meta.json"):
            os.replace(path, self.folder / path.name)
        print(f"{shown(self.folder)}: " + ", ".join(f"{c['rows']:,} {side} {'pairs' if self.pairs else 'rows'} ({c['tokens']:,} tokens, "
              f"{c['tokens'] * self.dtype.itemsize:,} bytes)" for side, c in meta["counts"].items())
              + f", fingerprint {meta['fingerprint']}" + "; replaced what was there" * replaced, flush=True)

    def __exit__(self, kind=None, error=None, trace=None):
        for file in self.open.values():
            with suppress(OSError):  # a full disk, once more
                file.close()
        shutil.rmtree(self.new, ignore_errors=True)
        self.stack.close()
        if isinstance(error, KeyboardInterrupt):
            sys.exit(f"interrupted: {shown(self.folder)} is as it was; the same command starts anew")
        if isinstance(error, OSError):
            sys.exit(f"{shown(error.filename or self.folder)}: {error.strerror or error}; {shown(self.folder)} was not prepared")


def save_pretrained(folder, tokenizer, model):
    """Both into this folder, in the Hugging Face format, as transformers 4 reads it and 5 too."""
    logging.disable_progress_bar()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    file = Path(folder) / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in settings.items() if key in ("eos_token", "pad_token", "unk_token", "model_max_length")}
    file.write_text(json.dumps(kept | dict(
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False, additional_special_tokens=["<extra_id_0>"]), indent=1))


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


def build(args, items, pairs=False, val_share=0.0, total=None, pretokenized=False, made=None):
    """
    The prepared folder args.out, from args.encoder's tokens, by args.workers threads.

    items     yields (side, (text,)), or (side, (condition, target)) for pairs; the side is "train", "val" or "test", or None: then the
              hash of the (first) text sends val_share of them to val. With pretokenized, token ids stand for the text
    total     how many they are, for the bar, where that is known
    made      a tokenizer and an encoder in place of args.encoder's, to be kept in the folder
    raises    SystemExit with one line if anything is amiss; the folder is then as it was
    """
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # of the tokenizers library, before its first call
    tokenizer, encoder = made or (load_tokenizer(args.encoder), None)
    if not tokenizer.is_fast or tokenizer.eos_token_id != EOS:
        sys.exit(f"--encoder {args.encoder}: needs a fast tokenizer whose </s> is token {EOS}, as every T5 has")
    if not made and Path(args.encoder).name != "t5-small":  # whose statistics the paper has
        encoder = load_encoder(args.encoder, pick_device())
    dtype = np.dtype("uint16" if len(tokenizer) <= 65535 else "uint32")
    if pretokenized:
        rows = as_they_are(items, len(tokenizer), dtype, val_share)
    else:
        rows = tokenise(items, tokenizer, dtype, [] if pairs else [EOS], val_share)
    dropped = unknown = 0
    with Files(args.out, dtype, pairs) as files:
        for side, parts in progress(rows, total=total, desc="tokenising", unit=" rows"):
            if parts is None:
                dropped += 1
            else:
                files.add(side, parts)
                unknown += sum(np.count_nonzero(part == tokenizer.unk_token_id) for part in parts)
        if dropped:
            print(f"{dropped:,} rows dropped: {'condition or target' if pairs else 'they'} had no token")
        share = unknown / max(1, sum(count["tokens"] for count in files.counts.values()))
        if share > 0.01:
            say = f"{share:.0%} of the tokens are <unk>: {args.encoder} does not know this text"
            if share > 0.2 and not args.allow_unknown:
                sys.exit(f"{say}; choose another --encoder, or --encoder scratch where the script has it, or go on with --allow_unknown")
            print(say)
        files.finish("t5" if made else args.encoder, tokenizer, encoder)


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
    parser.add_argument("--out", type=lambda name: ROOT / name, default=folder, help="folder to write, from the repository's on (the script's own)")
    parser.add_argument("--allow_unknown", action="store_true", help="go on though over 20 %% of the tokens are unknown to the encoder")
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
