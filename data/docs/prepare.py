"""
English prose that every user already has: docstrings and comments of the installed packages.

A small model can learn a small language: kept are sentences of words alone, of fewer than LENGTH
tokens, all of them common. Tokens are whole words. Tokenizer and encoder are made here too, in t5/,
and with --scorer a small GPT-2 for eval.py, in scorer/.
"""
import importlib.util
import inspect
import re
import sys
import sysconfig
from itertools import groupby
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.encoder import EOS, load_tokenizer, to_ids
from data.prepare import replacing, save_pretrained, side_of, write_folder
from data.rows import open_rows
from data.scratch import RECIPE, UNK, train_encoder, train_scorer, word_tokenizer
from runtime import parser, progress

PACKAGES = ["numpy", "torch", "transformers", "huggingface_hub", "tokenizers", "tqdm", "tiktoken",
            # and what these bring along:
            "sympy", "networkx", "setuptools", "jinja2", "fsspec", "mpmath"]
LENGTH = 12        # tokens in a row, </s> included
COMMON = 40        # how often each token of a kept sentence occurs
VAL_SHARE = 0.14   # some 500 rows to choose settings by, and 500 to report
PROSE = re.compile(r'"""(.*?)"""|' r"'''(.*?)'''|" r"((?:^[ \t]*#[^\n]*\n)+)", re.S | re.M)
MARKUP = re.compile(r":[a-z:]+:(?=`)|[`*]+")
SENTENCE = re.compile(r"(?:^|(?<=[.!?:] ))[A-Z][A-Za-z]*(?: [A-Za-z]+){2,}\.(?= [A-Z]|$)")

def source_files():
    """Yields every .py file of the standard library and of PACKAGES, in a fixed order."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    specs = map(importlib.util.find_spec, PACKAGES)  # finds them without importing
    roots += [Path(spec.origin).parent for spec in specs if spec]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if "site-packages" not in file.relative_to(root).parts:
                yield file

def sentences(file):
    """Yields the plain sentences in the triple-quoted strings and comments of a file."""
    for quoted, other, comment in PROSE.findall(file.read_text("utf-8", "ignore")):
        text = quoted or other or re.sub(r"(?m)^[ \t]*#+ ?", "", comment)
        for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(MARKUP.sub("", text))):
            lines = paragraph.split("\n")
            runs = groupby(lines, lambda line: len(line) - len(line.lstrip()))  # equally indented
            for run in [lines, *(list(run) for _, run in runs)]:
                yield from SENTENCE.findall(" ".join(" ".join(run).split()))

def to_rows(tokenizer, texts):
    """Returns (n, LENGTH) token ids of the texts that are short and have no unknown token."""
    ids = [row for row in to_ids(tokenizer, texts) if 0 < len(row) < LENGTH and UNK not in row]
    return np.array([row + [EOS] * (LENGTH - len(row)) for row in ids]).reshape(-1, LENGTH)

def make_scorer(steps=2600):
    """Trains data/docs/scorer on train.bin, for eval.py where gpt2-large cannot be had."""
    rows = open_rows(HERE, "train").tokens.reshape(-1, LENGTH)
    tokenizer = load_tokenizer(HERE / "t5")
    save_pretrained(HERE / "scorer", tokenizer, train_scorer(rows, len(tokenizer), steps))

def main(argv=None):
    options = parser(__doc__)
    options.add_argument("--scorer", action="store_true", help="train the scorer instead")
    if options.parse_args(argv).scorer:
        return make_scorer()
    with replacing(HERE) as folder:
        sides = dict(train=[], val=[])
        files = progress(list(source_files()), desc="reading docstrings")
        for text in dict.fromkeys(text for file in files for text in sentences(file)):
            sides[side_of(text.lower(), VAL_SHARE)].append(text)
        tokenizer = word_tokenizer(sides["train"], COMMON)
        train, val = (to_rows(tokenizer, texts) for texts in sides.values())
        np.random.default_rng(0).shuffle(train)
        encoder = train_encoder(train, len(tokenizer), noise_weight=0.3, **RECIPE)
        rows = [("train", [row]) for row in train] + [("val", [row]) for row in val]
        write_folder(folder, rows, tokenizer, "t5", encoder, length=LENGTH)

if __name__ == "__main__":
    main()
