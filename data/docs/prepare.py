"""
English prose that every user already has: docstrings and comments of the installed packages.

Source files are read with `ast`; nothing is imported or downloaded. A small model can learn a small
language: kept are sentences of words alone, without commas, quotes or numbers, that are shorter than
LENGTH tokens and whose tokens are all common. Tokens are whole words. The folder then holds

    train.bin, val.bin, meta.json   one sentence in a row of LENGTH tokens, padded with </s>
    t5/                             its tokenizer and a small frozen T5 encoder

Other versions of Python and of the packages give other sentences, and another fingerprint.

    python data/docs/prepare.py            # `python train.py` runs it by itself
    python data/docs/prepare.py --scorer   # a small GPT-2 of the same text, for eval.py
"""
import argparse
import ast
import importlib.util
import os
import re
import signal
import sys
import sysconfig
import textwrap
import warnings
from itertools import groupby
from multiprocessing import Pool
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
import runtime  # noqa: E402
from data.encoder import EOS, load_tokenizer, to_ids  # noqa: E402
from data.prepare import replacing, save_pretrained, side_of, write_folder  # noqa: E402
from data.rows import open_rows  # noqa: E402
from data.scratch import (RECIPE, UNK, train_encoder, train_scorer,  # noqa: E402
                          word_tokenizer)

PACKAGES = ["numpy", "torch", "transformers", "huggingface_hub", "tokenizers", "tqdm", "tiktoken",
            # and what these bring along:
            "sympy", "networkx", "setuptools", "jinja2", "fsspec", "mpmath"]
LENGTH = 12            # tokens in a row, </s> included; longer sentences are left out
COMMON = 30            # a sentence is kept if each of its tokens occurs so often
VAL_SHARE = 0.14       # for 500 rows to choose settings by and 500 to report
MIN_SENTENCES = 1000
SCORER_STEPS = 2600

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'\"()/%-]*(?:\.[A-Za-z0-9 ,;:'\"()/%-]+)*[.!?]")
PLAIN = re.compile(r"[A-Z][A-Za-z]*(?: [A-Za-z]+)+\.")  # words alone
WORD = re.compile(r"[\"'(]*[A-Za-z][a-z]*(?:[-'][a-z]+)?[.,;:!?\"')]*")
SECTION = re.compile(r"(Args?|Arguments|Parameters|Returns?|Yields?|Raises|Notes?|Examples?|"
                     r"Attributes|Shape|See Also)\b ?:")
MARKUP = [(re.compile(r":[a-z:]+:`~?([^`<]*)(<[^`]*>)?`"), r"\1"),   # :class:`~torch.Tensor`
          (re.compile(r"\[`?~?([^\]`]*)`?\](\([^)]*\))?"), r"\1"),   # [`Trainer`](link)
          (re.compile(r"`+|\*\*"), "")]


# ---------------------------------------------------------------------------------------------------
# prose in source files

def source_files():
    """Yields every .py file of the standard library and of PACKAGES, in a fixed order."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # finds it without importing it
        if spec is not None:
            roots.append(Path(spec.origin).parent)
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if "site-packages" not in file.relative_to(root).parts:
                yield file


def definitions(file):
    """Yields the module, classes and functions of a source file that have a docstring, as nodes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old files hold escapes that Python now warns about
            nodes = [ast.parse(file.read_bytes())]
    except (SyntaxError, ValueError):  # the standard library ships broken files as test cases
        return
    statements = (ast.stmt, ast.excepthandler, ast.match_case)  # only these hold definitions
    for node in nodes:  # which grows meanwhile
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, statements)]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def blocks(file):
    """Yields what may be prose: paragraphs of docstrings, equally indented lines, comments."""
    for node in definitions(file):
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            yield paragraph
            lines = paragraph.split("\n")
            for indent, group in groupby(lines, key=lambda line: len(line) - len(line.lstrip())):
                if indent:
                    yield textwrap.dedent("\n".join(group))
    lines = file.read_text(encoding="utf-8", errors="ignore").split("\n")
    for comment, group in groupby(lines, key=lambda line: line.lstrip().startswith("#")):
        if comment:
            yield "\n".join(line.lstrip(" \t#") for line in group)


def prose(block):
    """Returns a block as one line of prose, or None if it is code, a table, a list or a directive."""
    if any(line[:1].isspace() for line in block.split("\n")):
        return None
    text = " ".join(block.split())
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    words = text.split()
    plain = sum(WORD.fullmatch(word) is not None for word in words)
    if len(words) < 4 or plain < 0.8 * len(words) or SECTION.match(text) or not PROSE.fullmatch(text):
        return None
    return text


def sentences(file):
    """Returns the plain sentences of prose in a file."""
    return [sentence for block in blocks(file) if (text := prose(block))
            for sentence in SENTENCE_END.split(text) if PLAIN.fullmatch(sentence) and prose(sentence)]


def collect(read):
    """Returns what `read` finds in all source files, in their order, each thing once."""
    files = list(source_files())
    ignore_ctrl_c = dict(initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    with Pool(os.cpu_count(), **ignore_ctrl_c) as pool:
        found = pool.imap(read, files, chunksize=32)
        found = runtime.progress(found, total=len(files), desc="reading docstrings")
        return list(dict.fromkeys(thing for in_file in found for thing in in_file))


# ---------------------------------------------------------------------------------------------------
# the folder

def to_rows(tokenizer, texts):
    """Returns (n, LENGTH) token ids of the texts that are short enough and have no unknown token."""
    ids = [row for row in to_ids(tokenizer, texts) if 0 < len(row) < LENGTH and UNK not in row]
    return np.array([row + [EOS] * (LENGTH - len(row)) for row in ids]).reshape(-1, LENGTH)


def make_scorer():
    """Trains data/docs/scorer on train.bin, for eval.py where gpt2-large cannot be had."""
    rows = open_rows(HERE, "train").tokens.reshape(-1, LENGTH)
    tokenizer = load_tokenizer(HERE / "t5")
    save_pretrained(HERE / "scorer", tokenizer, train_scorer(rows, len(tokenizer), SCORER_STEPS))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorer", action="store_true", help="train the scorer instead")
    if parser.parse_args(argv).scorer:
        return make_scorer()
    with replacing(HERE) as folder:
        sides = dict(train=[], val=[])
        for text in collect(sentences):
            sides[side_of(text.lower(), VAL_SHARE)].append(text)
        tokenizer = word_tokenizer(sides["train"], COMMON)
        train, val = (to_rows(tokenizer, texts) for texts in sides.values())
        if len(train) < MIN_SENTENCES:
            sys.exit(f"{len(train)} sentences found: too few to learn from; install requirements.txt")
        np.random.default_rng(0).shuffle(train)
        encoder = train_encoder(train, len(tokenizer), noise_weight=0.3, **RECIPE)
        rows = [("train", [row]) for row in train] + [("val", [row]) for row in val]
        write_folder(folder, rows, tokenizer, "t5", encoder, length=LENGTH)


if __name__ == "__main__":
    main()
