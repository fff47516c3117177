"""Texts with gaps, "Return the ___ of the array.", as rows whose known tokens are a condition: one for each length that the gaps may have."""
import itertools
import re
import sys

import torch

from data import EOS
from data.encoder import embed_as_trained, one_line
from data.texts import is_text

GAP, STAND_IN = "___", "the"
GAPS = re.compile("___+")  # one may also be a longer line


def known_parts(tokenizer, text):
    """The token ids before, between and after the gaps of a text; SystemExit if it has none, or a word that the tokenizer does not know."""
    if not is_text(text):
        sys.exit(f"--infill {text!r:.80}: is not UTF-8")
    parts = GAPS.split(one_line(text))
    if len(parts) < 2:
        sys.exit(f"--infill {text!r:.80}: has no gap; write {GAP} where one shall be")
    whole = STAND_IN.join(parts)  # tokenized in one piece, for a tokenizer may join what stands side by side
    tokens = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ends = list(itertools.accumulate(len(part) + len(STAND_IN) for part in parts))  # of the stand-ins in the whole, the last beyond it
    known = [[] for _ in parts]
    for id, (start, end) in zip(tokens["input_ids"], tokens["offset_mapping"]):
        part = sum(start >= gap_end for gap_end in ends)
        if end <= ends[part] - len(STAND_IN):  # else it is of the stand-in after that part
            if id == tokenizer.unk_token_id:
                word = (whole[start:].split() or [""])[0]  # an unknown token may be the space before it
                sys.exit(f"--infill: {word!r} is not among the words that the run knows; use another")
            known[part].append(id)
    return known


def gap_rows(encoder, tokenizer, text, most, L, settings):
    """
    A text with gaps as n rows, one for each way to give every gap 1 to `most` tokens that a row of L has room for.

    returns   sizes, the tokens in each gap, a tuple for each row; known (n, L, 1) bool, all but the gaps, also the </s> after the text;
              embeddings (n, L, E) of the known tokens, which do not see the gaps
    """
    parts = known_parts(tokenizer, text)
    room = L - 1 - sum(map(len, parts))
    if max(1, min(most, room)) ** (len(parts) - 1) > 1000:
        sys.exit(f"--gap {most}: for {len(parts) - 1} gaps these are more than 1,000 ways to try; choose a smaller one, or fewer gaps")
    sizes = [s for s in itertools.product(range(1, min(most, room) + 1), repeat=len(parts) - 1) if sum(s) <= room]
    if not sizes:
        sys.exit(f"--infill {text!r:.80}: {L - 1 - room} tokens and {len(parts) - 1} gaps, and a row of this run has room for {L - 1}; shorten it")
    ids, known = torch.full((len(sizes), L), EOS), torch.ones(len(sizes), L, 1, dtype=torch.bool)
    for i, row in enumerate(sizes):
        end = 0
        for part, size in zip(parts, (*row, 0)):
            ids[i, end:end + len(part)] = torch.tensor(part, dtype=torch.long)
            end += len(part) + size
            known[i, end - size:end] = False
    known = known.to(encoder.device)
    return sizes, known, embed_as_trained(encoder, ids.to(encoder.device), known, settings)


def fill(tokenizer, text, tokens, sizes):
    """The text with the tokens in its gaps, sizes[i] of them in gap i, and all else to the letter."""
    fills = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in tokens.split(list(sizes))]
    parts = GAPS.split(text)
    return "".join(part + filling for part, filling in zip(parts, [*fills, ""]))


def infill(sampler, model, settings, tokenizer, encoder, texts, gap, length=None, **how):
    """
    The texts with their gaps filled, by 1 to `gap` tokens each: the known tokens are a condition, which may stand anywhere. All sizes of the
    gaps are sampled; kept are those of whose tokens the decode head is surest, if possible without </s>.

    sampler   `sample_as_trained` of sample.py
    how       what else that takes
    """
    length = length or settings["length"]
    candidates = [gap_rows(encoder, tokenizer, text, gap, length, settings) for text in texts]
    known, x = (torch.cat(parts) for parts in list(zip(*candidates))[1:])
    tokens, sure = sampler(model, settings, len(x), length, encode_conditions=lambda rows: (known[rows], x[rows]), **how)
    done, row = [], 0
    for text, (sizes, given, _) in zip(texts, candidates):
        if row + len(sizes) > len(tokens):  # Ctrl-C has cut them
            break
        gaps = ~given[..., 0].cpu()
        filled = [tokens[row + i][gaps[i]] for i in range(len(sizes))]
        best = max(range(len(sizes)), key=lambda i: (EOS not in filled[i], sure[row + i][gaps[i]].log().mean()))
        done.append(fill(tokenizer, text, filled[best], sizes[best]))
        row += len(sizes)
    return done
