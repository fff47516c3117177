"""
Fills gaps in a text, with a run that was trained without conditions: the known tokens are given.

Each ___ is one token, ___3 is three.

    python -m lab.infill "Return the ___2 of the given array." --n 4 --gamma 2 --steps 16
"""
import runtime  # first: before torch
import re
import sys

import torch

from checkpoint import open_sampler
from data.encoder import EOS, embed, load_encoder, to_ids
from sample import sample

def row_of(text, tokenizer, L):
    """Returns the tokens (L,) of a text, padded with </s>, and which of them are in gaps (L,)."""
    pieces, ids, gaps = re.split(r"___(\d*)", text), [], []
    for part, size in zip(pieces[::2], [*pieces[1::2], "0"]):
        before = "the" if ids else ""  # a gap's stand-in: what touches it is no new word
        known = to_ids(tokenizer, [before + part])[0][sum(map(len, to_ids(tokenizer, [before]))):]
        if tokenizer.unk_token_id in known:
            sys.exit(f"{part!r}: has a word that the run does not know")
        ids += known + [EOS] * int(size or 1)
        gaps += [False] * len(known) + [True] * int(size or 1)
    if len(pieces) < 2 or len(ids) > L:
        sys.exit(f"{text!r}: must have a gap, written ___, and no more than {L} tokens")
    padding = L - len(ids)
    return torch.tensor(ids + [EOS] * padding), torch.tensor(gaps + [False] * padding)

def fill(model, settings, tokenizer, encoder, rows, seed=0):
    """Returns each of rows, (ids, gaps) of `row_of`, as text with its gaps filled."""
    ids, gaps = (torch.stack(part).to(encoder.device) for part in zip(*rows))
    known = ~gaps[..., None]                                                   # (B, L, 1)
    x_mean, x_std = (torch.tensor(settings[key], device=ids.device) for key in ("x_mean", "x_std"))
    x = embed(encoder, ids, x_mean, x_std, known)  # known tokens do not see the gaps
    tokens = sample(model, settings, len(rows), seed, lambda of: (known[of], x[of])).to(ids.device)
    filled = torch.where(gaps, tokens, ids).tolist()
    return [tokenizer.decode(row, skip_special_tokens=True) for row in filled]

def main(argv=None):
    parser = runtime.parser(__doc__)
    parser.add_argument("text", help="with gaps: ___ or ___3")
    args, model, settings, tokenizer = open_sampler(parser, argv)
    encoder = load_encoder(settings["encoder"], model.mode_tokens.device,
                           settings.get("encoder_weights"))
    rows = [row_of(args.text, tokenizer, settings["length"])] * args.n
    print("\n".join(fill(model, settings, tokenizer, encoder, rows, args.seed)))

if __name__ == "__main__":
    main()
