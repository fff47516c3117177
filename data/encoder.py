"""The frozen T5 and its tokenizer: from texts to token ids, and from these to the clean embeddings x that ELF learns to denoise."""
import functools
import hashlib
import json
import os
import sys
from dataclasses import dataclass

import torch

from config import ROOT
from config.machine import barrier, print0, rank
from data import EOS
from data.rows import RandomRows, Rows, open_data


def local_or_repo(name):
    """A folder relative to this repository where there is one, else the name as it is, for the Hugging Face hub."""
    return str(ROOT / name) if os.path.isdir(ROOT / name) else str(name)


def from_pretrained(kind, name, what="encoder"):
    """kind.from_pretrained(name), or one line that says why not."""
    from transformers.utils import logging
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(local_or_repo(name))
    except Exception as e:  # their errors share no base class
        why = f"({type(e).__name__}: {' '.join(str(e).split())[:200]})"
        if os.path.isdir(ROOT / name):
            sys.exit(f"{what} = {name}: the folder is there, but cannot be read {why}; prepare it again, or copy it whole from where it was made")
        sys.exit(f"{what} = {name}: neither a folder here nor fetched from the Hugging Face hub {why}; check the name and the network, or "
                 "copy the folder from where it was made; data/text/prepare.py --encoder scratch needs neither")


def load_tokenizer(name, fingerprint=None):
    """The tokenizer; where a fingerprint is given, that one and no other."""
    from transformers import AutoTokenizer
    tokenizer = from_pretrained(AutoTokenizer, name)
    same_or_exit(name, "tokenizer", tokenizer_fingerprint(tokenizer), fingerprint)
    return tokenizer


def load_encoder(name, device="cpu", fingerprint=None):
    """The frozen encoder; where a fingerprint is given, that one and no other."""
    from transformers import AutoConfig, T5EncoderModel
    if (kind := from_pretrained(AutoConfig, name).model_type) not in ("t5", "mt5", "umt5"):
        sys.exit(f"encoder = {name}: is a {kind}, and not a T5")
    encoder = from_pretrained(T5EncoderModel, name)
    same_or_exit(name, "encoder", encoder_fingerprint(encoder) if fingerprint else None, fingerprint)
    return encoder.to(device).eval().requires_grad_(False)


def tokenizer_fingerprint(tokenizer):
    """12 hex digits of its vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:12]


def encoder_fingerprint(encoder):
    """12 hex digits of its weights."""
    digest = hashlib.sha256()
    for _, param in sorted(encoder.named_parameters()):
        digest.update(param.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def same_or_exit(name, what, found, wanted):
    if wanted is not None and found != wanted:
        sys.exit(f"encoder = {name}: its {what} is not the one that the run was trained with ({found}, and not {wanted}), so that it would read "
                 f"other tokens; copy the folder {name} from where the run was trained, or train again")


def one_line(text):
    """As T5 does itself: its vocabulary has no newline."""
    return " ".join(text.split())


def to_ids(tokenizer, texts):
    """Texts -> lists of token ids. All white space is one space; a "</s>" that stands in a text is spelled like any other text."""
    encodings = without_special_tokens(tokenizer).encode_batch_fast([one_line(text) for text in texts], add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def to_text(tokenizer, row, n_cond=0, most=None):
    """One row of token ids as text: what follows its condition, cut at the first </s>, of at most `most` tokens."""
    row = row.tolist()[n_cond:][:most]
    return tokenizer.decode(row[:row.index(EOS)] if EOS in row else row)


@functools.lru_cache(maxsize=2)
def without_special_tokens(tokenizer):
    """
    The tokenizers.Tokenizer inside, without its special tokens. They are also pieces of the vocabulary, where a newline before them lets
    no text match.
    """
    from tokenizers import Tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    if state["model"]["type"] == "Unigram":
        state["model"]["vocab"] = [["\n" + piece if piece in special else piece, score] for piece, score in state["model"]["vocab"]]
    return Tokenizer.from_str(json.dumps(state | dict(truncation=None, padding=None)))


def condition_mask(n_cond, L):
    """(B, L, 1) bool: which positions of rows of L hold the condition, the first n_cond (B,) of each."""
    return (torch.arange(L, device=n_cond.device) < n_cond[:, None])[..., None]


def random_gaps(B, L, share, rng):
    """(B, L, 1) bool, of which positions are a condition: in this share of the rows all but a random span, in the others none."""
    ends = torch.randint(L + 1, (B, 2), generator=rng, device=rng.device).sort(dim=1).values
    position = torch.arange(L, device=rng.device)
    given = (position < ends[:, :1]) | (position >= ends[:, 1:])
    return (given & (torch.rand(B, 1, generator=rng, device=rng.device) < share))[..., None]


@torch.no_grad()
def embed(encoder, ids, x_mean, x_std, cond_mask=None, drop=None):
    """
    Clean embeddings x (B, L, E), float32, of tokens ids (B, L), at mean 0 and unit scale.

    cond_mask  (B, L, 1) bool  a condition sees only itself, whatever follows it; the target sees both
    drop       (B,) bool       rows whose condition is hidden: the target does not see it, and its own x is 0
    """
    if cond_mask is None:
        return (encoder(input_ids=ids).last_hidden_state.float() - x_mean) / x_std
    drop = torch.zeros_like(cond_mask) if drop is None else drop[:, None, None]
    query_is_cond, key_is_cond = cond_mask, cond_mask.mT
    seen = torch.where(key_is_cond, query_is_cond | ~drop, ~query_is_cond)  # (B, L, L): the target may see a condition, never the reverse
    # The encoder's own forward takes no such mask in every version of transformers; its blocks do, as a position bias.
    stack, L = encoder.encoder, ids.shape[1]
    bias = stack.block[0].layer[0].SelfAttention.compute_bias(L, L).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    h = stack.embed_tokens(ids)
    for block in stack.block:
        h = block(h, position_bias=bias)
        h = h if torch.is_tensor(h) else h[0]
    x = (stack.final_layer_norm(h).float() - x_mean) / x_std
    return x.masked_fill(cond_mask & drop, 0.0)


def cut_conditions(tokenizer, records, most):
    """The token ids of each record's condition, at most so many; a longer one is cut, in the record too, and that is said."""
    conditions = to_ids(tokenizer, [record["cond"] for record in records])
    long = [i for i, ids in enumerate(conditions) if len(ids) > most]
    for i in long:
        records[i]["cond"] = tokenizer.decode(conditions[i][:most])
    if long:
        print(f"--cond: {len(long)} of {len(records)} conditions are longer than {most} tokens, and cut; the first of them, number {long[0]}, "
              f"to: {records[long[0]]['cond']}", file=sys.stderr)
    return [ids[:most] for ids in conditions]


def embed_conditions(encoder, conditions, length, settings, rows):
    """cond_mask (B, L, 1) and x_cond (B, L, E) of these rows' conditions, lists of token ids."""
    conditions, device = conditions[rows], encoder.device
    ids = torch.tensor([condition + [EOS] * (length - len(condition)) for condition in conditions], device=device)
    cond_mask = condition_mask(torch.tensor([len(condition) for condition in conditions], device=device), length)
    return cond_mask, embed_as_trained(encoder, ids, cond_mask, settings)


def embed_as_trained(encoder, ids, cond_mask, settings):
    """`embed` at the scale of a run's settings."""
    x_mean, x_std = (torch.tensor(settings[key], device=encoder.device) for key in ("x_mean", "x_std"))
    return embed(encoder, ids, x_mean, x_std, cond_mask)


@dataclass
class Data:
    """A run's rows, what turns them into x, and what else stays as it is while it trains."""
    train: Rows
    val: Rows
    tokenizer: object
    encoder: torch.nn.Module    # frozen
    x_mean: torch.Tensor        # of its output: a number, or one per channel
    x_std: torch.Tensor
    meta: dict                  # as in meta.json
    teacher: torch.nn.Module = None  # of a student: the network whose steps it learns to take at once, frozen


def load_data(config, device):
    """The Data that config names, prepared first where they are not there yet. For --bench random ones, which need neither data nor network."""
    if config.bench:
        from transformers import T5Config, T5EncoderModel
        print0(f"bench: random tokens, and a random encoder of the shape of {config.encoder}")
        local = (ROOT / config.encoder / "config.json").is_file()
        shape = T5Config.from_pretrained(ROOT / config.encoder) if local else T5Config(vocab_size=32100)  # t5-small's
        train = val = RandomRows(shape.vocab_size, config.length, config.cond_length)
        tokenizer, encoder = range(shape.vocab_size), T5EncoderModel(shape).to(device).eval().requires_grad_(False)
        meta = dict(x_mean=0.0, x_std=0.2, fingerprint="random")
    else:
        if rank() == 0:
            open_data(config.data, config.length, config.cond_length, config.prepare)
        barrier()
        train, val, meta = open_data(config.data, config.length, config.cond_length)
        tokenizer, encoder = load_tokenizer(config.encoder), load_encoder(config.encoder, device)
        found = dict(vocab_size=len(tokenizer), tokenizer=tokenizer_fingerprint(tokenizer), encoder_weights=encoder_fingerprint(encoder))
        if any(meta.get(key, value) != value for key, value in found.items()):
            sys.exit(f"encoder = {config.encoder}: {config.data} was prepared for {meta['encoder']} as it was then, which is another; prepare it "
                     f"again with this one, or give that one by --encoder")
        meta |= found
    x_mean, x_std = (torch.tensor(meta[key], device=device) for key in ("x_mean", "x_std"))
    if x_mean.numel() not in (1, encoder.config.d_model):
        sys.exit(f"{config.data}/meta.json: x_mean has {x_mean.numel()} channels, encoder {config.encoder} has {encoder.config.d_model}; "
                 "prepare it again")
    return Data(train, val, tokenizer, encoder, x_mean, x_std, meta)
