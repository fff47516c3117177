"""
Scores generated text: Gen. PPL and entropy as in Tab. 6 and 7, repetition, copying, words that do not exist, variety of words, and BLEU or ROUGE.

    python eval.py samples.jsonl                      # what sample.py --out wrote
    python eval.py --ckpt out/docs --seeds 3          # samples with three seeds and scores: mean ± standard error
    python eval.py --ckpt out/docs --real 464         # real validation rows, scored the same way
    python eval.py --ckpt out/docs --ar               # the scorer writes instead: an autoregressive yardstick

Prints a table and appends one line to results.jsonl.
"""
import json
import math
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Callable

from config import ROOT, sampling  # first: it sets how torch's threads wait

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import load, newest_run
from config.machine import autocast, pick_device, progress, ready_to_sample, run_program
from data.encoder import from_pretrained, load_encoder, load_tokenizer, to_ids, to_text
from data.rows import open_data
from data.texts import open_to_append, read_samples
from sample import sample_texts


@dataclass
class Scorer:
    name: str
    model: torch.nn.Module      # a causal language model
    encode: Callable            # text -> its token ids
    eos: int                    # its end-of-text token
    window: int                 # the most tokens it sees


def load_scorer(name, device):
    """The Scorer of this path or repo id."""
    from transformers import AutoModelForCausalLM
    model = from_pretrained(AutoModelForCausalLM, name, "scorer (offline: --scorer data/docs/scorer)").to(device).eval()
    if re.fullmatch(r"(openai-community/)?gpt2(-medium|-large|-xl)?", name) and not os.path.isdir(ROOT / name):
        import tiktoken
        try:
            bpe = tiktoken.get_encoding("gpt2")
        except Exception as e:
            sys.exit(f"scorer = {name}: its vocabulary could not be fetched by tiktoken ({type(e).__name__}); check the network")
        encode, eos = lambda text: bpe.encode(text, allowed_special="all"), bpe.eot_token
    else:
        tokenizer = load_tokenizer(name)
        encode, eos = lambda text: to_ids(tokenizer, [text])[0], tokenizer.eos_token_id
    return Scorer(name, model, encode, eos, min(1024, model.config.max_position_embeddings))


@torch.no_grad()
def gen_ppl(model, rows, eos, window, positions=8192, bf16=True):
    """
    exp(total NLL / total tokens) over all rows: the first token unscored, rows shorter than `window` ended by one scored eos,
    longer ones cut. rows: lists of ids. Nothing depends on the batches but rounding.
    """
    device, total, count = model.device, 0.0, 0
    rows = sorted((row[:window] if len(row) >= window else row + [eos] for row in rows if row), key=len)
    with progress(total=len(rows), desc="scoring", unit="row", leave=False) as bar:
        while rows:
            batch = [rows.pop()]
            while rows and (len(batch) + 1) * len(batch[0]) <= positions:
                batch.append(rows.pop())
            lengths = torch.tensor([len(row) for row in batch], device=device)
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True, padding_value=eos).to(device)
            counts = torch.arange(1, ids.shape[1], device=device) < lengths[:, None]
            with autocast(device, bf16):
                logits = model(input_ids=ids).logits[:, :-1]  # causal: padding on the right is unseen
            total += F.cross_entropy(logits[counts].float(), ids[:, 1:][counts], reduction="sum").double().item()
            count += int(counts.sum())
            bar.update(len(batch))
    return math.exp(min(total / count, 700)) if count else float("nan")


def entropy(row):
    """Of a sample's own unigram distribution, in nats."""
    p = np.array(list(Counter(row).values())) / len(row)
    return float(-(p * np.log(p)).sum())


def repetition(row, n=5, times=3):
    """(whether some n-gram occurs at least `times` times, share of positions that such n-grams cover)"""
    grams = [tuple(row[i:i + n]) for i in range(len(row) - n + 1)]
    often, covered = {g for g, c in Counter(grams).items() if c >= times}, np.zeros(len(row), bool)
    for i, gram in enumerate(grams):
        if gram in often:
            covered[i:i + n] = True
    return bool(often), float(covered.mean()) if row else 0.0


def distinct(rows, n):
    """Distinct n-grams as a share of all n-grams, over all samples together."""
    grams = [tuple(row[i:i + n]) for row in rows for i in range(len(row) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def words(text):
    """Its words as a reader takes them, whatever the tokens are: runs of letters, in small letters."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text.lower())


def known_words(train, tokenizer, most=10_000_000):
    """The words of the training rows, as many of them as hold that many tokens."""
    ids, _ = train.batch(range(min(len(train), most // train.L)))
    return {word for text in tokenizer.batch_decode(ids, skip_special_tokens=True) for word in words(text)}


def word_figures(texts, known=None):
    """Words a sample, distinct words and word pairs as a share of all, and the share of samples that hold a word which is not known."""
    rows = [words(text) for text in texts]
    figures = dict(words=float(np.mean([len(row) for row in rows])), distinct1=distinct(rows, 1), distinct2=distinct(rows, 2))
    return figures | (dict(invented=float(np.mean([not known.issuperset(row) for row in rows]))) if known else {})


def window_hashes(ids, n):
    """A hash (uint64) of every window of n tokens."""
    hashes = np.zeros(max(0, len(ids) - n + 1), np.uint64)
    for i in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[i:i + len(hashes)].astype(np.uint64) + np.uint64(1)
    return hashes


def copied(rows, train, run=33, block=2**22):
    """Share of rows that hold a run of more than 32 tokens of `train` (flat ids, memory-mapped), or are one when shorter."""
    found, by_length = np.zeros(len(rows), bool), {}
    for i, row in enumerate(rows):
        if row:
            by_length.setdefault(min(run, len(row)), []).append(i)
    for n, members in by_length.items():
        wanted = [window_hashes(np.array(rows[i]), n) for i in members]
        everything, seen = np.unique(np.concatenate(wanted)), []
        for first in range(0, len(train), block):
            hashes = window_hashes(np.asarray(train[first:first + block + n - 1]), n)
            seen.append(everything[np.isin(everything, hashes)])
        seen = np.concatenate(seen)
        for i, hashes in zip(members, wanted):
            found[i] = np.isin(hashes, seen).any()
    return float(found.mean())


def bleu_rouge(texts, references):
    """Corpus BLEU (sacrebleu, lowercase, effective order) and ROUGE-1/2/L F1 (stemmer, mean x 100)."""
    try:
        import sacrebleu
        from rouge_score import rouge_scorer
    except ImportError as e:
        sys.exit(f"{e.name} is not installed, and references need it: pip install sacrebleu rouge-score")
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    each = [scorer.score(reference, text) for text, reference in zip(texts, references)]
    return {"BLEU": sacrebleu.corpus_bleu(list(texts), [list(references)], lowercase=True, use_effective_order=True).score,
            **{name: 100 * float(np.mean([s[name].fmeasure for s in each])) for name in ("rouge1", "rouge2", "rougeL")}}


def report(rows, scorer, perplexity=True):
    """The figures of one set of samples as a dict. rows: the scorer's token ids, one list a sample."""
    kept = [row for row in rows if row]
    if not kept:
        sys.exit("all samples are empty: nothing to score")
    repeats = [repetition(row) for row in kept]
    return (dict(gen_ppl=gen_ppl(scorer.model, kept, scorer.eos, scorer.window)) if perplexity else {}) | dict(
        entropy=float(np.mean([entropy(row[:scorer.window]) for row in kept])), tokens=float(np.mean([len(row) for row in kept])),
        repeated=float(np.mean([r[0] for r in repeats])), repeat_cover=float(np.mean([r[1] for r in repeats])),
        samples=len(rows), empty=len(rows) - len(kept),
        truncated=sum(len(row) > scorer.window for row in kept))


def score(texts, scorer, tokenizer, train, known, rows=None):
    """All figures of texts (without a perplexity, where the scorer wrote them, as rows); some only where the training rows are here."""
    figures = report(rows or [scorer.encode(text) for text in texts], scorer, perplexity=rows is None) | word_figures(texts, known)
    if train is not None:
        figures["copied"] = copied(to_ids(tokenizer, texts), train.tokens)
    return figures


def write_autoregressively(scorer, n, seed, chunk=256):
    """n rows that the scorer itself writes at temperature 1, from its end-of-text token, up to its window."""
    torch.manual_seed(seed)
    rows = []
    while len(rows) < n:
        start = torch.full((min(chunk, n - len(rows)), 1), scorer.eos, device=scorer.model.device)
        ids = scorer.model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, max_new_tokens=scorer.window - 1,
                                    eos_token_id=scorer.eos, pad_token_id=scorer.eos)[:, 1:].tolist()
        rows += [row[:row.index(scorer.eos)] if scorer.eos in row else row for row in ids]
    return rows


def validation_texts(val, tokenizer, n, seed):
    """n odd validation rows, for the even ones chose the settings: their conditions, as lists of ids, and the texts that follow them."""
    rows = list(zip(*val.batch(2 * np.random.default_rng(seed).permutation(len(val) // 2)[:n] + 1)))
    return [row[:n_cond] for row, n_cond in rows], [to_text(tokenizer, row, n_cond) for row, n_cond in rows]


def taken_up(conditions, texts):
    """Mean share of the words of a condition that its text takes up; words that begin with the same four letters are one (load, loads)."""
    pairs = [[{word[:4] for word in words(text)} for text in pair] for pair in zip(conditions, texts)]
    return float(np.mean([len(given & taken) / max(1, len(given)) for given, taken in pairs]))


def sampled_texts(model, settings, tokenizer, val, n, seed, how):
    """n samples of a run, and their speed; with conditions, which are those of validation rows, also how well they fit these."""
    given, references = {}, None
    if settings.get("cond_length"):
        conditions, references = validation_texts(val, tokenizer, n, seed)
        given = dict(conditions=conditions, encoder=load_encoder(settings["encoder"], model.mode_tokens.device, settings.get("encoder_weights")))
    start = time.time()
    texts = sample_texts(model, settings, tokenizer, n, **given, **how, seed=seed, quiet=False)
    seconds = time.time() - start
    written = sum(map(len, to_ids(tokenizer, texts)))  # as --ar counts: no padding
    figures = dict(tokens_per_s=written / seconds)
    if references:
        figures |= bleu_rouge(texts, references) | dict(taken_up=taken_up(tokenizer.batch_decode(given["conditions"]), texts))
    return texts, figures


def scored_texts(args, model, settings, tokenizer, scorer, items, val, how, seed):
    """The texts to score, their token ids where the scorer wrote them, and figures that come with them."""
    if args.ar:
        start = time.time()
        rows = write_autoregressively(scorer, args.n, seed)
        return load_tokenizer(scorer.name).batch_decode(rows), rows, dict(tokens_per_s=sum(map(len, rows)) / (time.time() - start))
    if items:
        paired = [(item["text"], item["reference"]) for item in items if item.get("reference") is not None]
        return [item["text"] for item in items], None, bleu_rouge(*zip(*paired)) | dict(references=len(paired)) if paired else {}
    if args.real:
        return validation_texts(val, tokenizer, args.real, seed)[1], None, {}
    texts, figures = sampled_texts(model, settings, tokenizer, val, args.n, seed, how)
    return texts, None, figures


def real_figures(n, settings, tokenizer, scorer, train, val, known):
    """The column beside the table, of n real validation rows: what "as good as the data" would be, and how good the scorer is."""
    conditions, texts = validation_texts(val, tokenizer, n, 0)
    figures = score(texts, scorer, tokenizer, train, known)
    if settings.get("cond_length"):  # and the texts of other rows, to tell what chance takes up
        conditions = tokenizer.batch_decode(conditions)
        figures |= dict(taken_up=taken_up(conditions, texts), taken_by_chance=taken_up(conditions, texts[1:] + texts[:1]))
    return figures


def print_table(results, beside):
    """Means over the seeds with their standard errors, and the column beside them. Returns the means."""
    if beside:
        print(f"{'':31}{beside['samples']} real validation rows")
    means = {}
    for key in beside | results[0]:
        shown = "-"
        if key in results[0]:
            values = np.array([result[key] for result in results], float)
            means[key] = float(values.mean())
            shown = f"{values.mean():.4g}" + (f" ± {values.std(ddof=1) / len(values) ** 0.5:.3g}" if len(values) > 1 else "")
        print(f"  {key:13} {shown:14} " + (f"{beside[key]:.4g}" if key in beside else ""))
    return means


def open_rows(data, length, cond_length):
    """train, val and meta of a run's data; val is None for a samples file that does not say in numbers how the run cut its rows."""
    told = type(length) is int and type(cond_length) is int
    train, val, meta = open_data(data, length, cond_length) if told else open_data(data)
    return train, val if told or meta["length"] else None, meta


def scorer_name(given, data):
    """The scorer for a run on the folder `data` (None: not known): the one given, else the data's own, that of data/docs, or the paper's."""
    own = f"{data}/scorer"
    default = "data/docs/scorer" if (data or "").startswith("data/docs") else "gpt2-large"
    name = given or (own if data and (ROOT / own).is_dir() else default)
    if name == "data/docs/scorer" and not (ROOT / name).is_dir():
        sys.exit(f"{name}: not there; make it (5 minutes) with: python data/docs/prepare.py --scorer")
    return name


def main(argv=None):
    """Scores as the options in argv say, and returns what it appends to the results; SystemExit with one line if it cannot."""
    args = sampling.eval_arguments(argv, __doc__)
    try:
        results_file = open_to_append(args.results)
    except OSError as e:
        sys.exit(f"--results {args.results}: cannot be written ({e.strerror}); name another file")
    device = pick_device(args.device)
    items = read_samples(args.samples) if args.samples else None
    source = args.samples or args.ckpt or newest_run()
    model, settings = (None, items[0]) if items else load(source, device)
    how, data = sampling.sampler_settings(args, settings), settings.get("data")
    tokenizer = load_tokenizer(settings["encoder"], settings.get("tokenizer")) if settings.get("encoder") else None
    scorer = load_scorer(scorer_name(args.scorer, data), device)
    train = val = None
    if data and tokenizer and (ROOT / data / "meta.json").is_file():
        train, val, meta = open_rows(data, settings["length"] if model else settings.get("run_length"), settings.get("cond_length", 0))
        if meta["fingerprint"] != settings.get("fingerprint", meta["fingerprint"]):
            print(f"{data}: not the data that the run was trained on ({meta['fingerprint']}, and not {settings['fingerprint']}): what is said of "
                  "copying and of real rows is about these", file=sys.stderr)
    if (args.real or model and settings.get("cond_length")) and (val is None or (args.real or 1) > len(val) // 2):
        asked = f"--real {args.real} validation rows" if args.real else f"{source}: writes from the conditions of validation rows"
        sys.exit(f"{asked}: {data or source} has {len(val or []) // 2} odd ones here (the even ones chose the settings)")

    known = known_words(train, tokenizer) if train is not None else None
    if model and not (args.ar or args.real):
        ready_to_sample(model, device, args.n * args.seeds * settings["length"] * how["steps"])
    results = []
    for seed in range(args.seeds):
        texts, rows, figures = scored_texts(args, model, settings, tokenizer, scorer, items, val, how, seed)
        results.append(score(texts, scorer, tokenizer, train, known, rows) | figures)
    beside = {}
    if val is not None and not args.real:
        beside = real_figures(results[0]["samples"], settings, tokenizer, scorer, train, val, known)

    what = dict(source=source, scorer=scorer.name)
    what |= dict(ar=True) if args.ar else dict(real=args.real) if args.real else {} if items else how | dict(n=args.n)
    print("  ".join(f"{k}={v}" for k, v in what.items()))
    means = print_table(results, beside)
    summary = {f"real_{key}": beside[key] for key in ("gen_ppl", "entropy", "distinct1", "invented", "taken_up") if key in beside} | means
    record = what | summary | dict(seeds=len(results))
    try:
        with results_file:
            results_file.write(json.dumps(record) + "\n")
    except OSError as e:
        sys.exit(f"--results {args.results}: not written ({e.strerror}); the table above is all there is")
    return record


if __name__ == "__main__":
    run_program(main)
