"""
Code to docstring, the offline task with a condition: from the signature of a function or class, the
first sentence of its docstring.

The source is that of data/docs; tokenizer and encoder are made by the same recipe. The hash of the
function's or class's name decides whether a pair is held out, so no name is on both sides.

    python data/docs_cond/prepare.py   # `python train.py config/docs_cond.py` runs it by itself
"""
import argparse
import ast
import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.docs.prepare import PLAIN, collect, definitions, prose  # noqa: E402
from data.encoder import EOS, to_ids  # noqa: E402
from data.prepare import replacing, side_of, write_folder  # noqa: E402
from data.scratch import RECIPE, UNK, train_encoder, word_tokenizer  # noqa: E402

LENGTH, COND_LENGTH = 26, 12  # longer pairs are left out
COMMON = 5                    # every token of a kept sentence occurs so often
VAL_SHARE = 0.13
ENCODER = RECIPE | dict(batch_size=64, noise_weight=0.3)


def signature(node):
    """Returns `def name(a, b, *args)` or `class Name(Base)`, without types and defaults."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".removesuffix("()")
    a = node.args
    names = [x.arg for x in a.posonlyargs + a.args] + [f"*{x.arg}" for x in [a.vararg] if x]
    names += [x.arg for x in a.kwonlyargs] + [f"**{x.arg}" for x in [a.kwarg] if x]
    return f"def {node.name}({', '.join(names)})"


def pairs(file):
    """Returns (name, signature, first sentence) for each docstring that begins with prose."""
    found = []
    for node in definitions(file):
        text = " ".join(re.split(r"\n\s*\n", ast.get_docstring(node) or "")[0].split())
        sentence = re.match(r".+?[.!?](?=\s|$)", text)
        sentence = prose(sentence[0]) if sentence else None
        names = sentence and re.search("[a-z][A-Z]", sentence)  # NumPy: the tokenizer would split it
        if sentence and PLAIN.fullmatch(sentence) and not names and not isinstance(node, ast.Module):
            found.append((node.name, signature(node), sentence))
    return found


def main(argv=None):
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    with replacing(HERE) as folder:
        found = collect(pairs)
        sides = [side_of(name, VAL_SHARE) for name, _, _ in found]
        texts = [text for side, pair in zip(sides, found) if side == "train" for text in pair[1:]]
        tokenizer = word_tokenizer(texts, COMMON, code=True)
        conds, targets = (to_ids(tokenizer, [pair[part] for pair in found]) for part in (1, 2))
        kept = [(side, cond, target) for side, cond, target in zip(sides, conds, targets)
                if 0 < len(cond) <= COND_LENGTH and 0 < len(target) < LENGTH - COND_LENGTH
                and UNK not in target]
        kept = [kept[i] for i in np.random.default_rng(0).permutation(len(kept))]
        rows = np.array([cond + target + [EOS] * (LENGTH - len(cond + target))
                         for side, cond, target in kept if side == "train"])
        encoder = train_encoder(rows, len(tokenizer), **ENCODER)
        rows = [(side, parts) for side, *parts in kept]
        write_folder(folder, rows, tokenizer, "t5", encoder, pairs=True)


if __name__ == "__main__":
    main()
