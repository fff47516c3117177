"""
Samples on their way: what x_pred decodes to after each step, and how sure of it the network is
(Fig. 17). The first sample is shown on the terminal; --page writes HTML with a slider for six.

    python -m lab.trace --seed 3
    python -m lab.trace --page page.html
"""
import runtime  # first: before torch
import json
from pathlib import Path

from checkpoint import open_sampler
from config import ROOT
from data.encoder import EOS, to_text
from sample import decode, sample

class Trace:
    """Called after each step: keeps of each row the tokens up to </s> with their probabilities."""

    def __init__(self, model, tokenizer, w):
        self.model, self.tokenizer, self.w, self.steps = model, tokenizer, w, []

    def __call__(self, t, x_pred):
        best, ids = decode(self.model, x_pred, self.w).softmax(-1).max(-1)
        print(f"t = {t:.3f}  {to_text(self.tokenizer, ids[0])}")
        rows = [[[self.tokenizer.decode([token]), round(p, 2)] for token, p in zip(row, sure)]
                for row, sure in zip((row[:(row + [EOS]).index(EOS)] for row in ids.tolist()),
                                     best.tolist())]
        self.steps.append(dict(t=float(t), rows=rows))

def main(argv=None):
    parser = runtime.parser(__doc__)
    parser.add_argument("--page", type=Path, help="a new .html file")
    args, model, settings, tokenizer = open_sampler(parser, argv)
    trace = Trace(model, tokenizer, settings["sample_w"])
    sample(model, settings, 6, args.seed, on_step=trace)
    if args.page:
        about = f"{settings['checkpoint']}, {settings['sample_steps']} steps, seed {args.seed}"
        found = json.dumps(dict(about=about, steps=trace.steps)).replace("<", "\\u003c")
        args.page.write_text((ROOT / "lab/trace.html").read_text().replace("/*TRACE*/null", found))

if __name__ == "__main__":
    main()
