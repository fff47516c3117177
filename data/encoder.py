"""The tokenizer and the frozen T5 encoder: texts become token ids, and these the embeddings x."""
import hashlib
import json
import re
import sys

import torch

from config import ROOT

EOS = 1  # T5's </s>: it ends a text and pads its row

def local_or_repo(name):
    return str(ROOT / name) if (ROOT / name).is_dir() else str(name)

def from_pretrained(kind, name, what="encoder"):
    """Returns kind.from_pretrained(name); exits with one line if that fails."""
    from transformers.utils import logging
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(local_or_repo(name))
    except Exception as error:  # transformers and the hub raise errors without a common base
        sys.exit(f"{what} = {name}: no complete folder here, and not fetched from the Hugging Face "
                 f"hub ({' '.join(str(error).split())[:200]}); check the name and the network")

def load_tokenizer(name, fingerprint=None):
    """Returns the tokenizer; exits if it is not the one with this fingerprint."""
    from transformers import AutoTokenizer
    tokenizer = from_pretrained(AutoTokenizer, name)
    check_same(name, "tokenizer", tokenizer_fingerprint(tokenizer), fingerprint)
    return tokenizer

def load_encoder(name, device="cpu", fingerprint=None):
    """Returns the frozen T5 encoder; exits if it is not the one with this fingerprint."""
    from transformers import T5EncoderModel
    encoder = from_pretrained(T5EncoderModel, name)
    check_same(name, "encoder", fingerprint and encoder_fingerprint(encoder), fingerprint)
    return encoder.to(device).eval().requires_grad_(False)

def check_same(name, what, found, wanted):
    if wanted is not None and found != wanted:
        sys.exit(f"encoder = {name}: its {what} ({found}) is not the one that the data or the run "
                 f"have ({wanted}); use that one, or prepare the data and train again")

def tokenizer_fingerprint(tokenizer):
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:12]

def encoder_fingerprint(encoder):
    digest = hashlib.sha256()
    for _, param in sorted(encoder.named_parameters()):
        digest.update(param.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]

def one_line(text):
    """Returns the text with all white space as single spaces, since T5 knows no newline."""
    return " ".join(text.split())

def to_ids(tokenizer, texts):
    """Returns each text's token ids. A "</s>" in a text becomes "< /s>", and ends nothing."""
    special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)))
    texts = [special.sub(lambda token: "< " + token[0][1:], one_line(text)) for text in texts]
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

def to_text(tokenizer, row, n_cond=0):
    """Returns a row of token ids as text: what follows its condition, up to the first </s>."""
    row = row.tolist()[n_cond:]
    return tokenizer.decode(row[:row.index(EOS)] if EOS in row else row)

@torch.no_grad()
def embed(encoder, ids, x_mean, x_std, cond_mask=None, drop=None):
    """
    Returns the clean embeddings x (B, L, E) of token ids (B, L): float32, mean 0, deviation 1.

    cond_mask  (B, L, 1) bool: a condition sees only itself; the target sees both
    drop       (B,) bool: rows whose condition is hidden from the target, and 0 in x
    """
    if cond_mask is None:
        return (encoder(input_ids=ids).last_hidden_state.float() - x_mean) / x_std
    drop = torch.zeros_like(cond_mask) if drop is None else drop[:, None, None]
    query_is_cond, key_is_cond = cond_mask, cond_mask.mT
    seen = torch.where(key_is_cond, query_is_cond | ~drop, ~query_is_cond)        # (B, L, L)
    # T5's own forward does not take such a mask in every version. Its blocks do, as position bias.
    stack, L = encoder.encoder, ids.shape[1]
    bias = stack.block[0].layer[0].SelfAttention.compute_bias(L, L)               # (1, heads, L, L)
    bias = bias.masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    h = stack.embed_tokens(ids)
    for block in stack.block:
        h = block(h, position_bias=bias)
        h = h if torch.is_tensor(h) else h[0]
    x = (stack.final_layer_norm(h).float() - x_mean) / x_std
    return x.masked_fill(cond_mask & drop, 0.0)

def condition_mask(n_cond, L):
    """Returns (B, L, 1) bool: True on the first n_cond (B,) positions of each row."""
    return (torch.arange(L, device=n_cond.device) < n_cond[:, None])[..., None]

def embed_conditions(encoder, conds, settings, rows):
    """Returns cond_mask (B, L, 1) and x_cond (B, L, E) of these of conds, lists of token ids."""
    L, device = settings["length"], encoder.device
    ids = torch.tensor([conds[i] + [EOS] * (L - len(conds[i])) for i in rows], device=device)
    cond_mask = condition_mask(torch.tensor([len(conds[i]) for i in rows], device=device), L)
    x_mean, x_std = (torch.tensor(settings[key], device=device) for key in ("x_mean", "x_std"))
    return cond_mask, embed(encoder, ids, x_mean, x_std, cond_mask)
