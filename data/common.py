"""
What every prepare.py shares: from texts to the files that train.py reads (data/README.md says what they hold), the options of the
scripts, and, for data/docs, a tokenizer and a small T5 encoder made from scratch.
"""
import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from model import ROOT, autocast, load_encoder, load_tokenizer, local_or_repo, pick_device
from train import Muon

PAD, EOS, UNK, MASK = range(4)
SPECIAL = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]


def train_tokenizer(texts, vocab_size):
    """
    A T5-style unigram tokenizer learned from texts. The trainer adds numbers up in no fixed order, so its scores are rounded and its
    pieces sorted: the same texts give the same tokens.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=SPECIAL,
                                                                 unk_token="<unk>", show_progress=False))
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"][len(SPECIAL):]
    pieces = sorted(((piece, round(score, 6)) for piece, score in pieces), key=lambda entry: (-entry[1], entry[0]))
    tokenizer.model = models.Unigram([(piece, 0.0) for piece in SPECIAL] + pieces, unk_id=UNK)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
                                   additional_special_tokens=["<extra_id_0>"])


def to_rows(tokenizer, texts, length):
    """Texts of fewer than `length` tokens as rows (n, length) uint16, each ended and padded with </s>; longer ones are dropped."""
    ids = (t for t in tokenizer(texts, add_special_tokens=False)["input_ids"] if 0 < len(t) < length)
    return np.array([t + [EOS] * (length - len(t)) for t in ids], dtype=np.uint16).reshape(-1, length)


def train_encoder(rows, vocab_size, width, layers, heads, steps, batch_size=64, lr=3e-3, mask_share=0.3, seed=0):
    """
    A T5 encoder trained from scratch to predict masked tokens: a stand-in for the T5 objective, which would need a decoder.

    rows      (n, L) tokens; masks fall on text, never on the </s> that pads
    returns   T5EncoderModel; the loss of its last steps is on the bar
    """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    rows = torch.from_numpy(rows.astype(np.int64))
    encoder = T5EncoderModel(T5Config(vocab_size=vocab_size, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers,
                                      num_heads=heads, dropout_rate=0.0, pad_token_id=PAD, eos_token_id=EOS))
    head = torch.nn.Linear(width, vocab_size)
    matrices = [p for n, p in encoder.named_parameters() if n.startswith("encoder.block") and p.ndim == 2 and "bias" not in n]
    rest = [p for p in [*encoder.parameters(), *head.parameters()] if all(p is not m for m in matrices)]
    opts = [Muon(matrices, 3 * lr), torch.optim.Adam(rest, lr=lr, fused=True)]
    schedule = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1, (s + 1) / 200, (steps - s) / (0.3 * steps))) for o in opts]
    masks = max(1, int(mask_share * (rows != EOS).float().mean() * batch_size * rows.shape[1]))  # the same number every step
    order = torch.empty(0, dtype=torch.long)
    for step in (bar := tqdm(range(steps), desc="training the encoder", dynamic_ncols=True)):
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(len(rows), generator=rng)])
        ids, order = rows[order[:batch_size]], order[batch_size:]
        where = (torch.rand(ids.shape, generator=rng) * (ids != EOS)).flatten().topk(masks).indices
        masked = ids.flatten().index_fill(0, where, MASK).view_as(ids)
        with autocast(torch.device("cpu")):
            hidden = encoder(input_ids=masked).last_hidden_state.flatten(0, 1)
            loss = F.cross_entropy(head(hidden[where]).float(), ids.flatten()[where])
        loss.backward()
        for o, s in zip(opts, schedule):
            o.step()
            o.zero_grad()
            s.step()
        if step % 20 == 0 or step == steps - 1:
            bar.set_postfix_str(f"masked-token loss {loss.item():.3f}")
    return encoder.eval()


def even_batches(lengths, batch_size, rng):
    """
    All rows once, in batches of about batch_size: rows of like length together, which halves the work, and about as many tokens in
    each, so that a token weighs the same in a short row as in a long one.
    """
    batches = []
    for group in torch.randperm(len(lengths), generator=rng).split(16 * batch_size):
        group = group[lengths[group].argsort()]
        tokens, count = lengths[group].cumsum(0), -(-len(group) // batch_size)
        batches += group.split(((tokens - 1) * count // tokens[-1]).bincount().tolist())
    return [batches[i] for i in torch.randperm(len(batches), generator=rng)]


def train_scorer(rows, vocab_size, steps, width=256, layers=4, heads=4, batch_size=64, lr=1.5e-3, seed=0):
    """
    A small GPT-2 of the same tokens, for eval.py. It learns rows up to their first </s>; every other batch has one before the
    row too, so that it can both score a bare row and begin one by itself.
    """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    rows = torch.from_numpy(rows.astype(np.int64))
    L = rows.shape[1]
    rows = torch.cat([torch.full((len(rows), 1), EOS), rows], dim=1)[:, :L]  # </s> text </s> ...
    lengths = ((rows[:, 1:] != EOS).sum(1) + 2).clamp(max=L)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=L, n_embd=width, n_layer=layers, n_head=heads,
                                       bos_token_id=EOS, eos_token_id=EOS, attn_pdrop=0.0))
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 100, (steps - s) / (0.6 * steps)))
    batches = []
    for step in (bar := tqdm(range(steps), desc="training the scorer", dynamic_ncols=True)):
        batches = batches or even_batches(lengths, batch_size, rng)
        where = batches.pop()
        ids = rows[where, step % 2:lengths[where].max()]
        scored = torch.arange(1, ids.shape[1]) + step % 2 < lengths[where, None]
        with autocast(torch.device("cpu")):
            logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits[scored].float(), ids[:, 1:][scored])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            bar.set_postfix_str(f"loss {loss.item():.3f}")
    return model.eval()


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
# from texts to tokens, in several processes and in constant memory

def plain(tokenizer):
    """
    The tokenizer as JSON, without its special tokens: a "</s>" that stands in a text is then spelled like any other text. They are
    also pieces of the vocabulary, where a newline before them lets no text match: `encode` turns newlines into spaces.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    if state["model"]["type"] == "Unigram":
        state["model"]["vocab"] = [["\n" + piece if piece in special else piece, score] for piece, score in state["model"]["vocab"]]
    return json.dumps(state | dict(truncation=None, padding=None))


def side_of(data, val_share):
    """train or val, by the hash of these bytes alone."""
    return "val" if int.from_bytes(hashlib.sha256(data).digest()[:4], "big") < val_share * 2**32 else "train"


def start_worker(state, dtype, end, val_share, own_process=True):
    global settings
    if own_process:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; where the parent dies, so do they
        threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    settings = Tokenizer.from_str(state), dtype, end, val_share


def encode(batch):
    """[(side or None, texts), ...] -> [(side, id arrays or, where one of the texts is empty, None), ...]"""
    tokenizer, dtype, end, val_share = settings
    texts = [" ".join(text.split()) for _, row in batch for text in row]  # as T5 does itself: its vocabulary has no newline
    encoded, first, done = tokenizer.encode_batch_fast(texts, add_special_tokens=False), 0, []
    for side, row in batch:
        parts = [np.array(e.ids + end, dtype=dtype) for e in encoded[first:first + len(row)] if e.ids]
        done.append((side or side_of(texts[first].encode(), val_share), parts if len(parts) == len(row) else None))
        first += len(row)
    return done


def batches(items, characters=1 << 18):
    """Lists of consecutive items, of about that many characters each; no more than 1,000 items."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += sum(map(len, item[1]))
        if size >= characters or len(batch) == 1000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenise(items, workers, *state):
    """`encode` over items, in their order. At most 3 batches a worker are under way, so memory does not grow with the corpus."""
    if workers == 1:
        start_worker(*state, own_process=False)
        for batch in batches(items):
            yield from encode(batch)
        return
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=state) as pool:
        pending = collections.deque([pool.submit(encode, [])])  # the workers start before the reader does
        try:
            for batch in batches(items):
                pending.append(pool.submit(encode, batch))
                while len(pending) > 3 * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            sys.exit("a worker process was killed, perhaps for want of memory; try fewer --workers")


def as_they_are(items, vocab_size, dtype, val_share):
    """`encode` where the rows are lists of token ids already: checked, and not ended."""
    for number, (_, [ids]) in enumerate(items):
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            sys.exit(f"row {number}: token id {ids.min() if ids.min() < 0 else ids.max()} in it, but the encoder's vocabulary has "
                     f"{vocab_size}; name the --encoder that made them")
        ids = ids.astype(dtype)
        yield side_of(ids.tobytes(), val_share), [ids] if len(ids) else None


def build(args, items, pairs=False, val_share=0.0, total=None, pretokenized=False):
    """
    The prepared folder args.out, from args.encoder's tokens, by args.workers processes.

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
        rows = tokenise(items, args.workers, plain(tokenizer), dtype, [] if pairs else [EOS], val_share)
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
    parser.add_argument("--workers", type=whole, default=os.cpu_count(), help="processes (%(default)s)")
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
