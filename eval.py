"""
Scores generated text: Gen. PPL and entropy as in Tab. 6 and 7, repetition, diversity, copying, and BLEU or ROUGE.

    python eval.py samples.jsonl                      # what sample.py --out wrote
    python eval.py --ckpt out/docs --seeds 3          # samples with three seeds and scores: mean ± standard error
    python eval.py --ckpt out/docs --real 1000        # real validation rows, scored the same way
    python eval.py --ckpt out/docs --ar               # the scorer writes instead: an autoregressive yardstick

Prints a table and appends one line to results.jsonl.
"""
import argparse
import json
import math
import sys
import time
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from model import ROOT, autocast, from_pretrained, load, load_encoder, load_tokenizer, pick_device
from sample import conditions, newest_run, read_jsonl, sample, sampling_arguments, sampling_settings, to_text
from train import open_data


def load_scorer(name, device):
    """(causal LM, function text -> token ids, id of its end-of-text token, window in tokens) for a path or repo id."""
    from transformers import AutoModelForCausalLM
    model = from_pretrained(AutoModelForCausalLM, name, "scorer (offline: --scorer data/docs/scorer)").to(device).eval()
    if name.startswith("gpt2"):
        import tiktoken
        try:
            bpe = tiktoken.get_encoding("gpt2")
        except Exception as e:
            sys.exit(f"scorer = {name}: its vocabulary could not be fetched by tiktoken ({type(e).__name__}); check the network")
        encode, eos = lambda text: bpe.encode(text, allowed_special="all"), bpe.eot_token
    else:
        tokenizer = load_tokenizer(name)
        encode, eos = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id
    return model, encode, eos, min(1024, model.config.max_position_embeddings)


@torch.no_grad()
def gen_ppl(model, rows, eos, window, positions=8192, bf16=True):
    """
    exp(total NLL / total tokens) over all rows: the first token unscored, rows shorter than `window` ended by one scored eos,
    longer ones cut. rows: lists of ids. Nothing depends on the batches but rounding.
    """
    device, total, count = model.device, 0.0, 0
    rows = sorted((row[:window] if len(row) >= window else row + [eos] for row in rows if row), key=len)
    with tqdm(total=len(rows), desc="scoring", unit="row", leave=False) as bar:
        while rows:
            batch = [rows.pop()]
            while rows and (len(batch) + 1) * len(batch[0]) <= positions:
                batch.append(rows.pop())
            lengths = torch.tensor([len(row) for row in batch], device=device)
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True, padding_value=eos).to(device)
            scored = torch.arange(1, ids.shape[1], device=device) < lengths[:, None]
            with autocast(device, bf16):
                logits = model(input_ids=ids).logits[:, :-1]  # causal: padding on the right is unseen
            total += F.cross_entropy(logits[scored].float(), ids[:, 1:][scored], reduction="sum").double().item()
            count += int(scored.sum())
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


def copied(rows, train, run=33, block=2**22):
    """Share of rows that hold a run of more than 32 tokens of `train` (flat ids, memory-mapped), or are one when shorter."""
    multiplier = np.uint64(0x9E3779B97F4A7C15)

    def hashes(ids, n):  # of every window of n tokens
        h = np.zeros(max(0, len(ids) - n + 1), np.uint64)
        for i in range(n):
            h = h * multiplier + ids[i:i + len(h)].astype(np.uint64) + np.uint64(1)
        return h

    found, by_length = np.zeros(len(rows), bool), {}
    for i, row in enumerate(rows):
        if row:
            by_length.setdefault(min(run, len(row)), []).append(i)
    for n, members in by_length.items():
        wanted = [hashes(np.array(rows[i]), n) for i in members]
        everything, seen = np.unique(np.concatenate(wanted)), []
        for first in range(0, len(train), block):
            h = hashes(np.asarray(train[first:first + block + n - 1]), n)
            seen.append(everything[np.isin(everything, h)])
        seen = np.concatenate(seen)
        for i, w in zip(members, wanted):
            found[i] = np.isin(w, seen).any()
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
    return {"BLEU": sacrebleu.corpus_bleu(texts, [references], lowercase=True, use_effective_order=True).score,
            **{name: 100 * float(np.mean([s[name].fmeasure for s in each])) for name in ("rouge1", "rouge2", "rougeL")}}


def report(rows, scorer, eos, window):
    """The figures of one set of samples as a dict. rows: the scorer's token ids, one list a sample; without a scorer, no gen_ppl."""
    kept = [row for row in rows if row]
    if not kept:
        sys.exit("all samples are empty: nothing to score")
    repeats = [repetition(row) for row in kept]
    return (dict(gen_ppl=gen_ppl(scorer, kept, eos, window)) if scorer else {}) | dict(
        entropy=float(np.mean([entropy(row[:window]) for row in kept])), tokens=float(np.mean([len(row) for row in kept])),
        repeated=float(np.mean([r[0] for r in repeats])), repeat_cover=float(np.mean([r[1] for r in repeats])),
        distinct1=distinct(kept, 1), distinct2=distinct(kept, 2), samples=len(rows), empty=len(rows) - len(kept),
        truncated=sum(len(row) > window for row in kept))


def write_autoregressively(model, n, length, eos, seed, chunk=256):
    """n rows that the scorer itself writes at temperature 1, from its end-of-text token, up to `length` tokens."""
    torch.manual_seed(seed)
    rows = []
    while len(rows) < n:
        start = torch.full((min(chunk, n - len(rows)), 1), eos, device=model.device)
        ids = model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, max_new_tokens=length,
                             eos_token_id=eos, pad_token_id=eos)[:, 1:].tolist()
        rows += [row[:row.index(eos)] if eos in row else row for row in ids]
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="?", help=".jsonl file of sample.py --out")
    parser.add_argument("--ckpt", help="instead: sample from this run, file or repo id (default: the newest run under out/)")
    sampling_arguments(parser)
    parser.add_argument("--n", type=int, default=1000, help="samples a seed (default 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ...: the table gives mean ± standard error")
    parser.add_argument("--real", type=int, metavar="N", help="score N real validation rows of the run's data instead")
    parser.add_argument("--ar", action="store_true", help="the scorer writes the samples; it does not score itself")
    parser.add_argument("--scorer", help="causal LM: path or repo id (default: data/docs/scorer for runs on data/docs, else gpt2-large)")
    parser.add_argument("--results", default="results.jsonl", help="one line is appended to this file")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    sampling_settings(parser, args, {})
    if bool(args.samples) + bool(args.real) + args.ar > 1 or args.samples and (args.ckpt or args.seeds > 1):
        parser.error("one thing at a time: a samples file, --ckpt with or without --real N, or --ar")
    try:
        results_file = open(args.results, "a")
    except OSError as e:
        sys.exit(f"--results {args.results}: cannot be written ({e.strerror}); name another file")
    device = pick_device(args.device)

    items = read_jsonl(args.samples, "text", ["reference", "data", "encoder", "ckpt"]) if args.samples else None
    source = args.samples or args.ckpt or newest_run()
    model, settings = (None, items[0]) if items else load(source, device)
    how = sampling_settings(parser, args, settings)
    data, L, cond_length = settings.get("data"), settings["length"] if model else 0, settings.get("cond_length", 0) if model else 0
    tokenizer = load_tokenizer(settings["encoder"]) if settings.get("encoder") else None
    default = "data/docs/scorer" if (data or "").startswith("data/docs") else "gpt2-large"
    name = args.scorer or (f"{data}/scorer" if data and (ROOT / data / "scorer").is_dir() else default)
    if name == "data/docs/scorer" and not (ROOT / name).is_dir():
        sys.exit(f"{name}: not there; make it (5 minutes) with: python data/docs/prepare.py --scorer")
    scorer, encode, eos, window = load_scorer(name, device)
    train = real = None
    if data and tokenizer and (ROOT / data / "meta.json").is_file():
        train, real, _ = open_data(data, L, cond_length)
    if (args.real or cond_length) and (real is None or (args.real or 0) > len(real)):
        sys.exit(f"--real {args.real}: {data or source} has {len(real or [])} validation rows here")

    encoder = load_encoder(settings["encoder"], device) if cond_length else None

    def real_rows(n, seed=0):
        """n validation rows: their conditions, as lists of ids, and the texts that follow them."""
        rows = list(zip(*real.batch(np.random.default_rng(seed).permutation(len(real))[:n])))
        return [row[:n_cond] for row, n_cond in rows], [to_text(tokenizer, row, n_cond) for row, n_cond in rows]

    def sampled(seed):
        """Texts, with figures of their making: the time, and BLEU and ROUGE where rows have conditions."""
        more, references, n_cond = {}, None, [0] * args.n
        if cond_length:
            conds, references = real_rows(args.n, seed)
            n_cond, more["condition"] = conditions(encoder, conds, settings, device)
        start = time.time()
        tokens = sample(model, len(n_cond), L, **how, seed=seed, noise_scale=settings["noise_scale"], progress=True, **more)
        seconds, texts = time.time() - start, [to_text(tokenizer, row, n, L - cond_length) for row, n in zip(tokens, n_cond)]
        written = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))  # as --ar counts: no padding
        return texts, dict(tokens_per_s=written / seconds) | (bleu_rouge(texts, references) if references else {})

    def scored(texts, rows=None):
        figures = report(rows or [encode(text) for text in texts], None if rows else scorer, eos, window)
        return figures | (dict(copied=copied(tokenizer(texts, add_special_tokens=False)["input_ids"], train.tokens)) if train is not None else {})

    results = []
    for seed in range(args.seeds):
        figures, rows = {}, None
        if args.ar:
            start = time.time()
            rows = write_autoregressively(scorer, args.n, window - 1, eos, seed)
            figures["tokens_per_s"] = sum(map(len, rows)) / (time.time() - start)
            texts = load_tokenizer(name).batch_decode(rows)
        elif items:
            texts = [item["text"] for item in items]
            figures = bleu_rouge(texts, [item["reference"] for item in items]) if items[0].get("reference") else {}
        elif args.real:
            _, texts = real_rows(args.real, seed)
        else:
            texts, figures = sampled(seed)
        results.append(scored(texts, rows) | figures)

    what = dict(source=source, scorer=name)
    what |= dict(ar=True) if args.ar else dict(real=args.real) if args.real else {} if items else how | dict(n=args.n)
    print("  ".join(f"{k}={v}" for k, v in what.items()))
    # beside them, real rows: what "as good as the data" would be, and how good the scorer is
    beside = scored(real_rows(results[0]["samples"])[1]) if real is not None and not args.real else {}
    if beside:
        print(f"{'':31}{beside['samples']} real validation rows")
    summary = {f"real_{key}": beside[key] for key in ("gen_ppl", "entropy") if beside}
    for key in beside | results[0]:
        shown = "-"
        if key in results[0]:
            values = np.array([r[key] for r in results], float)
            summary[key] = float(values.mean())
            shown = f"{values.mean():.4g}" + (f" ± {values.std(ddof=1) / len(values) ** 0.5:.3g}" if len(values) > 1 else "")
        print(f"  {key:13} {shown:14} " + (f"{beside[key]:.4g}" if key in beside else ""))
    with results_file:
        results_file.write(json.dumps(what | summary | dict(seeds=len(results))) + "\n")


if __name__ == "__main__":
    main()
