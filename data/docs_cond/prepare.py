"""
Code to docstring, offline: the condition is a signature, the target its docstring's first sentence.

Made like data/docs. The hash of a name decides whether it is held out, so none is on both sides.
"""
import ast
import re
import sys
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from data.docs.prepare import source_files
from data.encoder import EOS, to_ids
from data.prepare import replacing, side_of, write_folder
from data.scratch import RECIPE, UNK, train_encoder, word_tokenizer
from runtime import parser, progress

LENGTH, COND_LENGTH = 26, 12  # longer pairs are left out
COMMON = 5                    # how often each token of a kept sentence occurs
VAL_SHARE = 0.13
PLAIN = re.compile(r"[A-Z][a-z]*(?: [A-Za-z][a-z]*){2,}\.(?= |$)")

def signature(node):
    """Returns `def name(a, b, *args)` or `class Name(Base)`, without types and defaults."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".removesuffix("()")
    a = node.args
    names = [x.arg for x in a.posonlyargs + a.args] + [f"*{x.arg}" for x in [a.vararg] if x]
    names += [x.arg for x in a.kwonlyargs] + [f"**{x.arg}" for x in [a.kwarg] if x]
    return f"def {node.name}({', '.join(names)})"

def pairs(file):
    """Yields (name, signature, first sentence) of each docstring that begins with plain words."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # the standard library ships broken files as test cases
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("`", "")
            if sentence := PLAIN.match(" ".join(first.split())):
                yield node.name, signature(node), sentence[0]

def main(argv=None):
    parser(__doc__).parse_args(argv)
    warnings.simplefilter("ignore", SyntaxWarning)  # old files hold escapes that Python warns about
    with replacing(HERE) as folder:
        files = progress(list(source_files()), desc="reading docstrings")
        found = list(dict.fromkeys(pair for file in files for pair in pairs(file)))
        sides = [side_of(name, VAL_SHARE) for name, _, _ in found]
        texts = [text for side, pair in zip(sides, found) if side == "train" for text in pair[1:]]
        tokenizer = word_tokenizer(texts, COMMON, code=True)
        conds, targets = (to_ids(tokenizer, [pair[part] for pair in found]) for part in (1, 2))
        kept = [(side, [cond, target]) for side, cond, target in zip(sides, conds, targets)
                if 0 < len(cond) <= COND_LENGTH and len(target) < LENGTH - COND_LENGTH
                and UNK not in target]
        kept = [kept[i] for i in np.random.default_rng(0).permutation(len(kept))]
        rows = np.array([cond + target + [EOS] * (LENGTH - len(cond + target))
                         for side, (cond, target) in kept if side == "train"])
        recipe = RECIPE | dict(batch_size=64, noise_weight=0.3)
        encoder = train_encoder(rows, len(tokenizer), **recipe)
        write_folder(folder, kept, tokenizer, "t5", encoder, pairs=True)

if __name__ == "__main__":
    main()
