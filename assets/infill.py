"""
How well gaps are filled: in each odd validation row one to three words are hidden, and a run fills them, knowing how many they are and not
knowing it. Printed are the share of gaps filled as they were, and the Gen. PPL of the texts, beside gaps filled by words from anywhere in the
corpus.

    python assets/infill.py --ckpt out/docs --preset paper    # options of eval.py; without --preset paper, with the run's own sampler
"""
import functools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
from config import sampling  # noqa: E402
import eval  # noqa: E402
from checkpoint import load, newest_run  # noqa: E402
from config.machine import pick_device, ready_to_sample, run_program  # noqa: E402
from data.encoder import load_encoder, load_tokenizer  # noqa: E402
from data.infill import GAP, infill  # noqa: E402
from sample import sample_as_trained  # noqa: E402

MOST = 3


def with_gap(text, rng):
    """The words before the gap, in it, and after it: somewhere before the last word one to MOST of them are hidden."""
    words = text.split()
    size = rng.randint(1, max(1, min(MOST, len(words) - 2)))
    first = rng.randrange(max(1, len(words) - size))
    return words[:first], words[first:first + size], words[first + size:]


def main(argv=None):
    args = sampling.eval_arguments(argv, __doc__)
    device = pick_device(args.device)
    model, settings = load(args.ckpt or newest_run(), device)
    how = sampling.sampler_settings(args, settings)
    tokenizer = load_tokenizer(settings["encoder"], settings.get("tokenizer"))
    encoder = load_encoder(settings["encoder"], device, settings.get("encoder_weights"))
    scorer = eval.load_scorer(eval.scorer_name(args.scorer, settings["data"]), device)
    train, val, _ = eval.open_rows(settings["data"], settings["length"], 0)
    rng = random.Random(0)
    _, texts = eval.validation_texts(val, tokenizer, args.n, 0)
    cut = [with_gap(text, rng) for text in texts if len(text.split()) > 2]
    texts = [" ".join(before + hidden + after) for before, hidden, after in cut]
    corpus = " ".join(tokenizer.batch_decode(train.batch(range(len(train)))[0], skip_special_tokens=True)).split()
    ready_to_sample(model, device, 2 * MOST * len(cut) * settings["length"] * how["steps"])
    run = functools.partial(infill, sample_as_trained, model, settings, tokenizer, encoder, seed=0, **how)
    filled = {
        "as they were": texts,
        "words of the corpus": [" ".join(before + rng.sample(corpus, len(hidden)) + after) for before, hidden, after in cut],
        "by the run, size known": run([" ".join(before + [GAP] * len(hidden) + after) for before, hidden, after in cut], gap=1),
        "by the run, size unknown": run([" ".join(before + [GAP] + after) for before, _, after in cut], gap=MOST)}
    print(f"{len(cut)} gaps, {how}")
    print("| gaps filled | as they were | Gen. PPL |\n|---|---|---|")
    for name, these in filled.items():
        same = sum(a == b for a, b in zip(these, texts)) / len(texts)
        ppl = eval.gen_ppl(scorer.model, [scorer.encode(text) for text in these], scorer.eos, scorer.window)
        print(f"| {name} | {100 * same:.1f} % | {ppl:.1f} |")


if __name__ == "__main__":
    run_program(main)
