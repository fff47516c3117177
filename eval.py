"""
Scores samples that `python sample.py --out` has written, beside as many real rows.

    python eval.py a.jsonl b.jsonl                     # mean ± standard error over the files
    python eval.py a.jsonl --scorer data/docs/scorer   # gpt2-large is the paper's

Gen. PPL and entropy are those of Tab. 6 and 7; distinct-n, repetition, copying and words that do not
exist show what these two miss. Samples with a reference also get BLEU and ROUGE (Tab. 1).
"""
import runtime  # first: before torch
import argparse
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from config import ROOT
from data.encoder import EOS, from_pretrained, load_tokenizer, to_ids, to_text
from data.rows import odd_rows, open_rows


# ---------------------------------------------------------------------------------------------------
# the scorer

def load_scorer(name, device):
    """Returns a causal language model, and a function that turns a text into its token ids."""
    from transformers import AutoModelForCausalLM
    model = from_pretrained(AutoModelForCausalLM, name, "scorer").to(device).eval()
    if re.fullmatch(r"(openai-community/)?gpt2(-medium|-large|-xl)?", name):
        import tiktoken
        return model, tiktoken.get_encoding("gpt2").encode_ordinary
    tokenizer = load_tokenizer(name)
    return model, lambda text: to_ids(tokenizer, [text])[0]


@torch.no_grad()
def gen_ppl(model, rows, positions=8192):
    """
    Returns exp(total NLL / total tokens) of rows, lists of token ids.

    The first token of a row is not scored. Rows shorter than the model's window (at most 1,024) are
    ended by one scored end-of-text token, longer ones are cut. positions bounds a batch's tokens.
    """
    eos, total, count = model.config.eos_token_id, 0.0, 0
    window = min(1024, model.config.max_position_embeddings)
    rows = sorted((row[:window] if len(row) >= window else row + [eos] for row in rows), key=len)
    bar = runtime.progress(total=len(rows), desc="scoring", leave=False)
    while rows:
        batch = [rows.pop()]  # the longest; others of about its length
        while rows and (len(batch) + 1) * len(batch[0]) <= positions:
            batch.append(rows.pop())
        lengths = torch.tensor([len(row) for row in batch], device=model.device)
        padded = [torch.tensor(row) for row in batch]
        ids = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True).to(model.device)
        scored = torch.arange(1, ids.shape[1], device=model.device) < lengths[:, None]
        logits = model(input_ids=ids).logits[:, :-1][scored].float()  # causal: padding is not seen
        total += F.cross_entropy(logits, ids[:, 1:][scored], reduction="sum").item()
        count += len(logits)
        bar.update(len(batch))
    return math.exp(total / count)


# ---------------------------------------------------------------------------------------------------
# the figures

def entropy(row):
    """Returns the entropy of a row's own distribution of tokens, in nats."""
    p = np.array(list(Counter(row).values())) / len(row)
    return float(-(p * np.log(p)).sum())


def ngrams(row, n):
    return [tuple(row[i:i + n]) for i in range(len(row) - n + 1)]


def repeats(row, n=5, times=3):
    """True if some n-gram occurs at least `times` times in a row."""
    return max(Counter(ngrams(row, n)).values(), default=0) >= times


def distinct(rows, n):
    """Returns the share of different n-grams among all n-grams of all rows."""
    found = [gram for row in rows for gram in ngrams(row, n)]
    return len(set(found)) / max(1, len(found))


def words(text):
    """Returns the words of a text as runs of letters, in small letters."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text.lower())


def copied(rows, train, n=33):
    """Returns the share of rows that hold n tokens in a row of train (flat), or are there whole."""
    found = np.zeros(len(rows), bool)
    for length in {min(n, len(row)) for row in rows}:
        of_length = [i for i, row in enumerate(rows) if min(n, len(row)) == length]
        wanted, seen = {gram for i in of_length for gram in ngrams(rows[i], length)}, set()
        for start in range(0, len(train), 2**16):  # a block at a time, to save memory
            block = train[start:start + 2**16 + length - 1].tolist()
            seen |= wanted.intersection(zip(*(block[i:] for i in range(length))))
        for i in of_length:
            found[i] = not seen.isdisjoint(ngrams(rows[i], length))
    return float(found.mean())


def bleu_rouge(texts, references):
    """Returns corpus BLEU (lowercase, effective order) and ROUGE-1/2/L F1 (stemmer), times 100."""
    try:
        import sacrebleu
        from rouge_score import rouge_scorer
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install sacrebleu rouge-score")
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references)]
    bleu = sacrebleu.corpus_bleu(texts, [references], lowercase=True, use_effective_order=True)
    return dict(bleu=bleu.score) | {
        name: 100 * float(np.mean([score[name].fmeasure for score in scores])) for name in names}


def figures(texts, model, encode, tokenizer=None, train=None):
    """Returns all figures of texts as a dict; copying and unknown words only with training rows."""
    rows = [row for row in map(encode, texts) if row]
    if not rows:
        sys.exit("all samples are empty: nothing to score")
    spoken = [words(text) for text in texts]
    result = dict(gen_ppl=gen_ppl(model, rows), entropy=np.mean([entropy(row[:1024]) for row in rows]),
                  distinct1=distinct(spoken, 1), distinct2=distinct(spoken, 2),
                  words=np.mean([len(row) for row in spoken]),
                  repeated=np.mean([repeats(row) for row in rows]), empty=len(texts) - len(rows))
    if train is not None:
        train = train[:10_000_000]  # enough to judge by
        known = set(words(tokenizer.decode(train, skip_special_tokens=True)))
        result["unknown"] = np.mean([not known.issuperset(row) for row in spoken])
        result["copied"] = copied([row for row in to_ids(tokenizer, texts) if row], train)
    return result


# ---------------------------------------------------------------------------------------------------
# the program

def read_samples(file):
    """Returns the records of a samples file; exits if it is none."""
    try:
        records = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]
        if not records or not all(isinstance(record["text"], str) for record in records):
            raise ValueError("no texts")
        return records
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f'{file}: not a .jsonl file with {{"text": ...}} in each line '
                 f"({type(error).__name__}: {error})")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help=".jsonl files of `sample.py --out`, such as of seeds")
    parser.add_argument("--scorer", help="causal LM: folder or repo id (the data's own, or gpt2-large)")
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu (the best there is)")
    args = parser.parse_args(argv)
    device = runtime.pick_device(args.device)
    samples = [read_samples(file) for file in args.files]
    settings = samples[0][0].get("settings", {})
    data = settings.get("data", "")
    own = "data/docs/scorer" if data.startswith("data/docs") else f"{data}/scorer"
    name = args.scorer or (own if (ROOT / own).is_dir() else "gpt2-large")
    model, encode = load_scorer(name, device)
    tokenizer, train, columns = None, None, {}
    if (ROOT / data / "meta.json").is_file():  # the run's data are here: as many real rows beside
        tokenizer = load_tokenizer(settings["encoder"], settings.get("tokenizer"))
        sizes = settings["length"], settings["cond_length"]
        train = open_rows(data, "train", *sizes).tokens
        real = odd_rows(open_rows(data, "val", *sizes), len(samples[0]))
        texts = [to_text(tokenizer, row, n_cond) for row, n_cond in zip(*real)]
        columns["real rows"] = [figures(texts, model, encode, tokenizer, train)]
    columns = {f"{len(samples)} x {len(samples[0])} samples": [
        figures([record["text"] for record in records], model, encode, tokenizer, train)
        for records in samples]} | columns
    for records, result in zip(samples, next(iter(columns.values()))):
        paired = [(each["text"], each["reference"]) for each in records if each.get("reference")]
        if paired:
            result |= bleu_rouge(*map(list, zip(*paired)))
    print(f"scored by {name}\n{'':10} " + "".join(f"{title:>22}" for title in columns))
    for key in next(iter(columns.values()))[0]:
        cells = []
        for results in columns.values():
            values = np.array([result.get(key, np.nan) for result in results])
            error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.4g}{error}")
        print(f"{key:10} " + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
