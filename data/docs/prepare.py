"""
English prose that every user of this repository already has: the docstrings and comments of the installed packages, sentence by sentence.

Source files are read with `ast`; nothing is imported or downloaded. A small model can speak a small language: kept are sentences of words
alone, without commas, quotes or numbers, of fewer than LENGTH tokens, all of which are common. The tokens are whole words. What it makes,
all in this folder:

    train.bin, val.bin   one sentence a row: LENGTH tokens (uint16), ended and padded with </s>
    t5/                  a tokenizer and a small frozen T5 encoder, as `save_pretrained` writes them
    meta.json            sizes, the corpus fingerprint, the encoder's output statistics

Versions of Python and of the packages change the corpus, so figures are quoted with its fingerprint.

    python data/docs/prepare.py            # `python train.py` runs it by itself
    python data/docs/prepare.py --scorer   # a small GPT-2 of the same text, for eval.py
"""
import ast
import hashlib
import importlib.util
import os
import re
import shutil
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
from config.machine import progress, run_program  # noqa: E402
from data import EOS  # noqa: E402
from data.encoder import load_tokenizer  # noqa: E402
from data.files import Files, save_pretrained, side_of  # noqa: E402
from data.scratch import RECIPE, to_rows, train_encoder, train_scorer, word_tokenizer  # noqa: E402

PACKAGES = ["numpy", "torch", "transformers", "huggingface_hub", "tokenizers", "tqdm", "tiktoken",  # and what these bring along:
            "sympy", "networkx", "setuptools", "jinja2", "fsspec", "mpmath"]
LENGTH = 12            # tokens a row, </s> included; longer sentences are dropped, not cut
COMMON = 30            # a sentence is kept if all of its tokens occur so often
VAL_SHARE = 0.14       # for 500 rows to choose settings by and 500 to report
MIN_SENTENCES = 1000
SCORER_STEPS = 2600

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
# Prose is a capital letter, then words and light punctuation, then a full stop.
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'\"()/%-]*(?:\.[A-Za-z0-9 ,;:'\"()/%-]+)*[.!?]")
PLAIN = re.compile(r"[A-Z][A-Za-z]*(?: [A-Za-z]+)+\.")  # words alone
SECTION = re.compile(r"(Args?|Arguments|Parameters|Returns?|Yields?|Raises|Notes?|Examples?|Attributes|Shape|See Also)\b ?:")
MARKUP = [(re.compile(r":[a-z:]+:`~?([^`<]*)(<[^`]*>)?`"), r"\1"),   # :class:`~torch.Tensor` -> torch.Tensor
          (re.compile(r"\[`?~?([^\]`]*)`?\](\([^)]*\))?"), r"\1"),   # [`Trainer`](link)      -> Trainer
          (re.compile(r"`+|\*\*"), "")]


def source_files():
    """Every .py file of the standard library and of PACKAGES, in a fixed order."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # finds, does not import
        if spec is not None:
            roots.append(Path(spec.origin).parent)
    for root in roots:
        yield from (f for f in sorted(root.rglob("*.py")) if "site-packages" not in f.relative_to(root).parts)


def parsed(file):
    """The syntax tree of a source file; empty for those that the standard library ships broken on purpose, as test cases."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old files hold escapes that Python now warns about
            return ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def definitions(file):
    """The module of a source file, and all classes and functions in it. Expressions hold none, and most of the nodes: they are left out."""
    nodes = [parsed(file)]
    for node in nodes:  # which grows meanwhile
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case))]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def sentences(file):
    """The plain sentences of prose in one file, each as a line of text."""
    found = []
    for block in blocks(file):
        if text := prose(block):
            found += [sentence for sentence in SENTENCE_END.split(text) if PLAIN.fullmatch(sentence) and prose(sentence)]
    return found


def blocks(file):
    """What may be prose in one file: paragraphs of docstrings, in other paragraphs runs of lines of equal indent, and comments."""
    for node in definitions(file):
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node, clean=True) or ""):
            yield paragraph
            for indent, lines in groupby(paragraph.split("\n"), key=lambda line: len(line) - len(line.lstrip())):
                if indent:
                    yield textwrap.dedent("\n".join(lines))
    source = Path(file).read_text(encoding="utf-8", errors="ignore").split("\n")
    for comment, lines in groupby(source, key=lambda line: line.lstrip().startswith("#")):
        if comment:
            yield "\n".join(line.lstrip(" \t#") for line in lines)


def prose(block):
    """A docstring block as one line of prose, or None if it is code, a table, a list or a directive."""
    lines = block.split("\n")
    if any(line[:1].isspace() for line in lines):  # an indented line: code, or an argument's description
        return None
    text = " ".join(" ".join(lines).split())
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    words = text.split()
    plain = sum(re.fullmatch(r"[\"'(]*[A-Za-z][a-z]*(?:[-'][a-z]+)?[.,;:!?\"')]*", w) is not None for w in words)
    if len(words) < 4 or plain < 0.8 * len(words) or SECTION.match(text) or not PROSE.fullmatch(text):
        return None
    return text


def leave_signals_to_the_parent():
    """In its workers: Ctrl-C ends the parent, which ends them by SIGTERM; at that they say nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def collect(read, files):
    """What `read` finds in all the files, in their order, each thing once."""
    with Pool(os.cpu_count(), leave_signals_to_the_parent) as pool:
        found = progress(pool.imap(read, files, chunksize=32), total=len(files), desc="reading docstrings")
        return list(dict.fromkeys(thing for in_file in found for thing in in_file))


def corpus(files):
    """All distinct sentences, (train, val, fingerprint); a sentence's side depends on its own text alone."""
    sides, digest = dict(train=[], val=[]), hashlib.sha256()
    for text in collect(sentences, files):
        key = text.lower().encode()
        digest.update(hashlib.sha256(key).digest())
        sides[side_of(key, VAL_SHARE)].append(text)
    return *sides.values(), digest.hexdigest()[:12]


def make_scorer():
    """data/docs/scorer: a small GPT-2 trained on train.bin alone, which eval.py uses where gpt2-large cannot be had."""
    if not (HERE / "meta.json").is_file():
        sys.exit("data/docs: no meta.json yet; first run: python data/docs/prepare.py")
    tokenizer, new = load_tokenizer(HERE / "t5"), HERE / "scorer.tmp"
    try:
        rows = np.fromfile(HERE / "train.bin", dtype=np.uint16).reshape(-1, LENGTH)
        new.mkdir(exist_ok=True)  # now, not after minutes of work
    except OSError as e:
        sys.exit(f"{e.filename}: {e.strerror}; run python data/docs/prepare.py in a folder that can be written")
    save_pretrained(new, tokenizer, train_scorer(rows, len(tokenizer), SCORER_STEPS))
    shutil.rmtree(HERE / "scorer", ignore_errors=True)
    os.replace(new, HERE / "scorer")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--scorer"]:
        return make_scorer()
    if argv:
        sys.exit(f"{' '.join(argv)}: prepare.py takes no argument but --scorer")
    with Files(HERE, np.uint16, once=True) as files:
        train_texts, val_texts, fingerprint = corpus(list(source_files()))
        tokenizer = word_tokenizer(train_texts, COMMON)
        train, val = (to_rows(tokenizer, texts, LENGTH) for texts in (train_texts, val_texts))
        if len(train) < MIN_SENTENCES:
            sys.exit(f"{len(train)} sentences found: too few to learn from; install the packages of requirements.txt")
        np.random.default_rng(0).shuffle(train)
        print(f"{len(train):,} training and {len(val):,} validation sentences of fewer than {LENGTH} tokens out of {len(tokenizer):,}, "
              f"{(train != EOS).sum():,} training tokens, fingerprint {fingerprint}", flush=True)
        encoder = train_encoder(train, len(tokenizer), noise_weight=0.3, **RECIPE)
        for side, rows in (("train", train), ("val", val)):
            for row in rows:
                files.add(side, [row])
        files.finish("t5", tokenizer, encoder, LENGTH, fingerprint)


if __name__ == "__main__":
    run_program(main)
