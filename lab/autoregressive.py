"""
The yardstick: texts that the scorer writes, token by token, as a samples file like any other.

    python -m lab.autoregressive --n 464 --out ar.jsonl    # of out/docs; eval.py ar.jsonl scores it
"""
import runtime  # first: before torch
import json
from pathlib import Path

import torch

from checkpoint import open_sampler
from data.encoder import load_tokenizer, to_text
from eval import load_scorer

def main(argv=None):
    parser = runtime.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new .jsonl file")
    parser.add_argument("--scorer", default="data/docs/scorer", help="causal LM (%(default)s)")
    args, model, settings, _ = open_sampler(parser, argv)
    scorer, _ = load_scorer(args.scorer, model.mode_tokens.device)
    torch.manual_seed(args.seed)
    start = torch.full((args.n, 1), scorer.config.eos_token_id, device=scorer.device)
    rows = scorer.generate(start, do_sample=True, top_k=0, max_length=settings["length"],
                           attention_mask=torch.ones_like(start), pad_token_id=start[0, 0].item())
    tokenizer = load_tokenizer(args.scorer)
    lines = [json.dumps(dict(text=to_text(tokenizer, row, 1), settings=settings)) for row in rows]
    args.out.write_text("\n".join(lines) + "\n")

if __name__ == "__main__":
    main()
