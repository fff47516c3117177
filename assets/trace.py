"""Samples on their way: what x_pred decodes to after each step, and how sure the decode head is of it (Fig. 17)."""
import json
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

from data import EOS
from data.texts import write_whole

PAGE, MARK = Path(__file__).with_name("trace.html"), "/*TRACE*/null"
ROWS = 6  # samples on a page
FAINT, UNDERLINED, PLAIN, UP, CLEAR = "\x1b[2m", "\x1b[4m", "\x1b[0m", "\x1b[{}F", "\x1b[J"  # what a terminal takes


class Trace:
    """
    Called with t and x_pred (B, L, E) after each step, which `decode` turns into tokens and their probabilities; n_cond[i] tokens of row i are
    its condition. With a path it keeps the first ROWS rows for `write`; without one it shows the first: redrawn in place on a terminal, line by
    line in a file or pipe.
    """

    def __init__(self, decode, tokenizer, n_cond, path):
        self.decode, self.tokenizer, self.n_cond, self.path = decode, tokenizer, n_cond, path
        self.steps = []

    def __call__(self, t, x_pred):
        ids, sure = self.decode(x_pred[:ROWS if self.path else 1])
        self.steps.append(dict(t=float(t), rows=[self.tokens(*row) for row in zip(ids.tolist(), sure.tolist(), self.n_cond)]))
        if not self.path:
            self.show()

    def tokens(self, ids, sure, n_cond):
        """[text, probability] of each token of a row, up to the first </s> after its condition."""
        end = ids.index(EOS, n_cond) if EOS in ids[n_cond:] else len(ids)
        pieces = self.tokenizer.convert_ids_to_tokens(ids[:end])
        return [[piece.replace("\u2581", " "), round(p, 2)] for piece, p in zip(pieces, sure)]

    def show(self):
        """The newest step: faint what is not sure, underlined what the step changed."""
        before, now = ([dict(t=0, rows=[[]])] + self.steps)[-2:]
        [old], [new] = before["rows"], now["rows"]
        texts = ["".join(text for text, _ in row[self.n_cond[0]:]) for row in (old, new)]
        if not sys.stdout.isatty():
            return tqdm.write(f"t = {now['t']:.3f} {texts[1]}")
        if old:
            print(UP.format(1 + (9 + len(texts[0])) // shutil.get_terminal_size().columns) + CLEAR, end="")
        changed = [i >= len(old) or old[i][0] != text for i, (text, _) in enumerate(new)]
        marked = [FAINT * (p < 0.5) + UNDERLINED * is_new + text + PLAIN for (text, p), is_new in zip(new, changed)]
        print(f"t = {now['t']:.3f} " + "".join(marked[self.n_cond[0]:]), flush=True)
        time.sleep(0.1)  # for the eye

    def write(self, about):
        """The page: HTML that needs nothing else, with a slider over the steps."""
        trace = dict(about=about, given=self.n_cond[:ROWS], steps=self.steps)
        write_whole(self.path, PAGE.read_text(encoding="utf-8").replace(MARK, json.dumps(trace).replace("<", "\\u003c")))
