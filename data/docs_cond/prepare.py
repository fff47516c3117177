"""
Code -> docstring, the offline task with a condition: from the signature of a function or class, the first sentence of its docstring.

The same installed packages as data/docs, read with `ast`; a tokenizer and an encoder of their own, made by the same recipe from
both sides' text. A pair is held out for validation by the hash of the function's or class's name: no name is on both sides.

    python data/docs_cond/prepare.py   # `python train.py config/docs_cond.py` runs it by itself
"""
import ast
import hashlib
import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from config.machine import run_program  # noqa: E402
from data import EOS  # noqa: E402
from data.encoder import to_ids  # noqa: E402
from data.docs.prepare import PLAIN, collect, definitions, prose, source_files  # noqa: E402
from data.files import Files, side_of  # noqa: E402
from data.scratch import RECIPE, UNK, train_encoder, word_tokenizer  # noqa: E402

LENGTH, COND_LENGTH = 26, 12  # longer pairs are dropped, not cut
COMMON = 5                    # a pair is kept if all tokens of its sentence occur so often; in signatures others are <unk>
VAL_SHARE = 0.13
MIN_PAIRS = 1000
ENCODER = RECIPE | dict(batch_size=64)  # rows are twice as long as those of data/docs


def signature(node):
    """`def name(a, b, *args)` or `class Name(Base)`: names only, without types and defaults."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".removesuffix("()")
    a = node.args
    names = [x.arg for x in a.posonlyargs + a.args] + [f"*{x.arg}" for x in [a.vararg] if x]
    names += [x.arg for x in a.kwonlyargs] + [f"**{x.arg}" for x in [a.kwarg] if x]
    return f"def {node.name}({', '.join(names)})"


def pairs(file):
    """(name, signature, first sentence) of everything in one file that has a docstring beginning with a sentence of prose."""
    found = []
    for node in definitions(file):
        if not isinstance(node, ast.Module):
            text = " ".join(re.split(r"\n\s*\n", ast.get_docstring(node) or "")[0].split())
            sentence = re.match(r".+?[.!?](?=\s|$)", text)
            if sentence and (sentence := prose(sentence[0])) and PLAIN.fullmatch(sentence) and not re.search("[a-z][A-Z]", sentence):
                found.append((node.name, signature(node), sentence))  # without NumPy and its like, which the tokenizer would split
    return found


def main(argv=None):
    if argv := sys.argv[1:] if argv is None else argv:
        sys.exit(f"{' '.join(argv)}: prepare.py takes no argument")
    with Files(HERE, np.uint16, pairs=True, once=True) as files:
        found = collect(pairs, list(source_files()))
        if len(found) < MIN_PAIRS:
            sys.exit(f"{len(found)} pairs found: too few to learn from; install the packages of requirements.txt")
        digest = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
        sides = [side_of(name.encode(), VAL_SHARE) for name, _, _ in found]
        tokenizer = word_tokenizer([text for side, pair in zip(sides, found) if side == "train" for text in pair[1:]], COMMON, code=True)
        ids = [to_ids(tokenizer, [pair[part] for pair in found]) for part in (1, 2)]
        kept = [(side, cond, target) for side, cond, target in zip(sides, *ids)
                if 0 < len(cond) <= COND_LENGTH and 0 < len(target) < LENGTH - COND_LENGTH and UNK not in target]
        kept = [kept[i] for i in np.random.default_rng(0).permutation(len(kept))]
        rows = np.array([cond + target + [EOS] * (LENGTH - len(cond + target)) for side, cond, target in kept if side == "train"], np.uint16)
        print(f"{len(rows):,} training and {len(kept) - len(rows):,} validation pairs of tokens out of {len(tokenizer):,}, fingerprint {digest}",
              flush=True)
        encoder = train_encoder(rows, len(tokenizer), noise_weight=0.3, **ENCODER)
        for side, *parts in kept:
            files.add(side, [np.array(part, np.uint16) for part in parts])
        files.finish("t5", tokenizer, encoder, fingerprint=digest)


if __name__ == "__main__":
    run_program(main)
