"""
Scores samples that `python sample.py --out` has written, beside as many real rows.

    python eval.py a.jsonl b.jsonl                     # mean ± standard error over the files
    python eval.py a.jsonl --scorer data/docs/scorer   # the paper's is gpt2-large

Gen. PPL and entropy are those of Tab. 6; distinct-n, repeated 5-grams, words that no training row
has and copied rows show what these two miss. BLEU and ROUGE (Tab. 1) need references.
"""
import runtime  # first: before torch
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
from data.encoder import from_pretrained, load_tokenizer, to_ids, to_text
from data.rows import odd_rows, open_rows, read_meta

def load_scorer(name, device):
    """Returns a causal language model, and a function from a text to its token ids."""
    from transformers import AutoModelForCausalLM
    model = from_pretrained(AutoModelForCausalLM, name, "scorer").to(device).eval()
    if re.fullmatch(r"gpt2(-medium|-large|-xl)?", name):
        import tiktoken
        return model, tiktoken.get_encoding("gpt2").encode_ordinary
    tokenizer = load_tokenizer(name)
    return model, lambda text: to_ids(tokenizer, [text])[0]

@torch.no_grad()
def gen_ppl(model, rows):
    """
    Returns exp(NLL / tokens) over all rows, lists of token ids; first tokens are not scored.

    Rows shorter than the model's window (at most 1,024) get a scored end-of-text token; longer ones
    are cut.
    """
    eos, total, count = model.config.eos_token_id, 0.0, 0
    window = min(1024, model.config.max_position_embeddings)
    rows = sorted((row[:window] if len(row) >= window else row + [eos] for row in rows), key=len)
    for first in runtime.progress(range(0, len(rows), 16), desc="scoring", leave=False):
        batch = [torch.tensor(row) for row in rows[first:first + 16]]  # of about one length
        lengths = torch.tensor([len(row) for row in batch], device=model.device)
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(model.device)
        scored = torch.arange(1, ids.shape[1], device=model.device) < lengths[:, None]
        logits = model(input_ids=ids).logits[:, :-1][scored].float()
        total += F.cross_entropy(logits, ids[:, 1:][scored], reduction="sum").item()
        count += len(logits)
    return math.exp(total / count)

def entropy(row):
    """Returns the entropy of a row's own distribution of tokens, in nats."""
    p = np.array(list(Counter(row).values())) / len(row)
    return float(-(p * np.log(p)).sum())

def ngrams(row, n):
    return list(zip(*(row[i:] for i in range(n))))

def repeats(row, n=5, times=3):
    """True if some n-gram occurs at least `times` times in a row."""
    return max(Counter(ngrams(row, n)).values(), default=0) >= times

def distinct(rows, n):
    """Returns the share of different n-grams among all n-grams of all rows."""
    found = [gram for row in rows for gram in ngrams(row, n)]
    return len(set(found)) / max(1, len(found))

def words(text):
    """Returns the words of a text: runs of letters, in small letters."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text.lower())

def copied(rows, train, n=33):
    """Returns the share of rows that hold n tokens in a row of train (flat), or are there whole."""
    seen = {length: set() for length in {min(n, len(row)) for row in rows}}
    for length in seen:
        of_length = [row for row in rows if min(n, len(row)) == length]
        wanted = {gram for row in of_length for gram in ngrams(row, length)}
        for start in range(0, len(train), 2**16):  # a block at a time, to save memory
            block = train[start:start + 2**16 + length - 1].tolist()
            seen[length] |= wanted.intersection(ngrams(block, length))
    return float(np.mean([not seen[length].isdisjoint(ngrams(row, length)) for row in rows
                          for length in [min(n, len(row))]]))

def bleu_rouge(texts, references):
    """Returns corpus BLEU (lowercase, effective order) and ROUGE-1/2/L F1 (stemmer), times 100."""
    try:
        import sacrebleu
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install sacrebleu rouge-score")
    names = ["rouge1", "rouge2", "rougeL"]
    scores = list(map(RougeScorer(names, use_stemmer=True).score, references, texts))
    bleu = sacrebleu.corpus_bleu(texts, [references], lowercase=True, use_effective_order=True)
    return dict(bleu=bleu.score) | {
        name: 100 * float(np.mean([each[name].fmeasure for each in scores])) for name in names}

def figures(texts, model, encode, tokenizer=None, train=None):
    """Returns all figures of texts as a dict; `unknown` and `copied` only with training tokens."""
    rows = [row for row in map(encode, texts) if row]
    if not rows:
        sys.exit("all samples are empty: nothing to score")
    spoken = [words(text) for text in texts]
    result = dict(gen_ppl=gen_ppl(model, rows),
                  entropy=np.mean([entropy(row[:1024]) for row in rows]),
                  distinct1=distinct(spoken, 1), distinct2=distinct(spoken, 2),
                  words=np.mean([len(row) for row in spoken]),
                  repeated=np.mean([repeats(row) for row in rows]), empty=len(texts) - len(rows))
    if train is not None:
        known = set(words(tokenizer.decode(train, skip_special_tokens=True)))
        result["unknown"] = np.mean([not known.issuperset(row) for row in spoken])
        result["copied"] = copied([row for row in to_ids(tokenizer, texts) if row], train)
    return result

def read_samples(file):
    """Returns the records of a samples file; exits if it is none."""
    try:
        records = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]
        if records and all(isinstance(record["text"], str) for record in records):
            return records
        raise ValueError("no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f'{file}: not a .jsonl file of {{"text": ...}} ({error!r:.100})')

def main(argv=None):
    """Prints a table of figures; returns those of the files and of real rows, as lists of dicts."""
    parser = runtime.parser(__doc__)
    parser.add_argument("files", nargs="+", help=".jsonl files of `sample.py --out`")
    parser.add_argument("--scorer", help="causal LM: folder or repo id (the data's, or gpt2-large)")
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu (the best there is)")
    args = parser.parse_args(argv)
    samples = [read_samples(file) for file in args.files]
    settings = samples[0][0].get("settings", dict(data="none"))
    data, known, real = settings["data"], (), []
    own = ROOT / data / "scorer"  # as made by data/docs/prepare.py --scorer
    scorer = args.scorer or (f"{data}/scorer" if own.is_dir() else "gpt2-large")
    model, encode = load_scorer(scorer, runtime.pick_device(args.device))
    if (ROOT / data / "meta.json").is_file():  # the run's data are here, to compare with
        meta = read_meta(data)
        tokenizer = load_tokenizer(settings["encoder"], meta["tokenizer"])
        length = meta["length"] or settings["length"]
        train, val = (open_rows(data, side, length, settings["cond_length"])
                      for side in ("train", "val"))
        known = tokenizer, train.tokens[:10_000_000]  # enough to judge by
        texts = [to_text(tokenizer, *row) for row in zip(*odd_rows(val, len(samples[0])))]
        real.append(figures(texts, model, encode, *known))
    sampled = [figures([record["text"] for record in records], model, encode, *known)
               for records in samples]
    for records, result in zip(samples, sampled):
        paired = [record for record in records if record.get("reference")]
        if paired:
            result |= bleu_rouge(*([each[key] for each in paired] for key in ("text", "reference")))
    beside = f", and {len(texts)} real rows" if real else ""
    print(f"scored by {scorer}: {len(samples)} x {len(samples[0])} samples{beside}")
    for key in sampled[0]:
        print(f"{key:10} {cell(sampled, key):>20} {cell(real, key):>12}")
    return sampled, real

def cell(results, key):
    """Returns the mean and its standard error as text."""
    values = [result[key] for result in results if key in result]
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{error}" if values else ""

if __name__ == "__main__":
    main()
