"""A tokenizer, a small T5 encoder and a small scorer made from scratch, where the released ones cannot be had."""
import json
import sys
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from config.machine import autocast, precision, progress
from data import EOS
from data.encoder import one_line, to_ids
from train import Muon

PAD, UNK, MASK = 0, 2, 3  # and EOS, 1
RECIPE = dict(width=64, layers=4, heads=4, steps=1800, batch_size=128)  # of an encoder that learns in minutes on 2 cores
VOCAB_SIZE = 4096
SPECIAL = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
CODE = [(r"[_*]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " "), (r"(?<=\w)\(", " ( "), (r" +", " "), (r"^ | $", "")]


def train_tokenizer(texts, vocab_size):
    """
    A T5-style unigram tokenizer learned from texts. The trainer adds numbers up in no fixed order, so its scores are rounded and its
    pieces sorted: the same texts give the same tokens.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=SPECIAL,
                                                                 unk_token="<unk>", show_progress=False))
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"][len(SPECIAL):]
    pieces = sorted(((piece, round(score, 6)) for piece, score in pieces), key=lambda entry: (-entry[1], entry[0]))
    tokenizer.model = models.Unigram([(piece, 0.0) for piece in SPECIAL] + pieces, unk_id=UNK)
    return wrapped(tokenizer)


def word_tokenizer(texts, least, code=False):
    """
    Whole words, with the space before them, and single punctuation marks: those that occur at least so often; all others are <unk>.
    code: names are words too, `def load_image(path)` as `def load image ( path)` and `class ImageFile` as `class Image File`.
    """
    normalizer = normalizers.Sequence([normalizers.Replace(Regex(pattern), space) for pattern, space in CODE] if code else [])
    pre = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")])
    count = Counter(token for text in texts for token, _ in pre.pre_tokenize_str(normalizer.normalize_str(text)))
    kept = sorted((token for token, n in count.items() if n >= least), key=lambda token: (-count[token], token))
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(SPECIAL + kept)}, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre, decoders.Metaspace()
    return wrapped(tokenizer)


def wrapped(tokenizer):
    """As transformers has tokenizers."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
                                   additional_special_tokens=["<extra_id_0>"])


def to_rows(tokenizer, texts, length):
    """
    Texts of fewer than `length` tokens, all of them known, as rows (n, length) uint16, each ended and padded with </s>; other texts are
    dropped.
    """
    ids = (t for t in to_ids(tokenizer, texts) if 0 < len(t) < length and UNK not in t)
    return np.array([t + [EOS] * (length - len(t)) for t in ids], dtype=np.uint16).reshape(-1, length)


def word_vectors(rows, vocab_size, width):
    """
    (vocab_size, width), of deviation 1: tokens of like use lie near each other. They are the leading singular vectors of how much more often
    than by chance two tokens stand side by side, or with one between them (the logarithm of that, where it is positive).
    """
    together = torch.zeros(vocab_size, vocab_size)
    for apart in (1, 2):
        pairs = rows[:, :-apart].flatten(), rows[:, apart:].flatten()
        together.index_put_(pairs, torch.full(pairs[0].shape, 1 / apart), accumulate=True)
    together += together.T.clone()
    by_chance = together.sum(0) * together.sum(1, keepdim=True) / together.sum()
    U, S, _ = torch.svd_lowrank((together / by_chance.clamp(min=1e-9)).clamp(min=1).log(), q=min(width, vocab_size))
    vectors = F.pad(U * S.sqrt(), (0, width - len(S)))
    return vectors / vectors.std().clamp(min=1e-6)


def train_encoder(rows, vocab_size, width, layers, heads, steps, batch_size=64, lr=0.01, muon_lr=0.009, mask_share=0.3, noise_weight=0.0, seed=0):
    """
    A T5 encoder trained from scratch to predict masked tokens: a stand-in for the T5 objective, which would need a decoder.

    rows      (n, L) tokens; masks fall on text, never on the </s> that pads
    noise_weight   of a second loss, which is no part of T5's objective: to be readable under noise. From the encoder's output, scaled as
              ELF will see it, plus noise of a random strength of up to 1, another head names tokens that the encoder saw. Words of like
              use then lie apart, and samples have more variety
    returns   T5EncoderModel; the loss of its last steps is on the bar
    """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    rows = torch.from_numpy(rows.astype(np.int64))
    encoder = T5EncoderModel(T5Config(vocab_size=vocab_size, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers,
                                      num_heads=heads, dropout_rate=0.0, pad_token_id=PAD, eos_token_id=EOS))
    encoder.shared.weight.data = word_vectors(rows, vocab_size, width)  # a masked loss of 3.71 instead of 4.00 after 600 steps
    head, noisy_head = torch.nn.Linear(width, vocab_size), torch.nn.Linear(width, vocab_size)
    matrices = [p for n, p in encoder.named_parameters() if n.startswith("encoder.block") and p.ndim == 2 and "bias" not in n]
    rest = [p for module in (encoder, head, noisy_head) for p in module.parameters() if all(p is not m for m in matrices)]
    opts = [Muon(matrices, muon_lr, dtype=precision(torch.device("cpu"))), torch.optim.Adam(rest, lr=lr, fused=True)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 200, (steps - s) / (0.3 * steps))) for opt in opts]
    masks = max(1, int(mask_share * (rows != EOS).float().mean() * batch_size * rows.shape[1]))  # the same number every step
    order = torch.empty(0, dtype=torch.long)
    for step in (bar := progress(range(steps), desc="training the encoder")):
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(len(rows), generator=rng)])
        ids, order = rows[order[:batch_size]], order[batch_size:]
        where = draw_tokens(ids, masks, rng)
        masked = ids.flatten().index_fill(0, where, MASK).view_as(ids)
        with autocast(torch.device("cpu")):
            hidden = encoder(input_ids=masked).last_hidden_state.flatten(0, 1)
            loss = total = F.cross_entropy(head(hidden[where]).float(), ids.flatten()[where])
            if noise_weight:
                seen = draw_tokens(ids, masks, rng)
                x = (hidden - hidden.detach().mean(0)).float() / (hidden.detach().float().std(0) + 1e-6)
                x = x[seen] + torch.rand(masks, 1, generator=rng) * torch.randn(masks, width, generator=rng)
                total = loss + noise_weight * F.cross_entropy(noisy_head(x).float(), ids.flatten()[seen])
        total.backward()
        for opt, schedule in zip(opts, schedules):
            opt.step()
            opt.zero_grad()
            schedule.step()
        if step % 20 == 0 or step == steps - 1:
            bar.set_postfix_str(f"masked-token loss {loss.item():.3f}", refresh=False)
    return encoder.eval()


def draw_tokens(ids, count, rng):
    """Places (count,) of tokens of text in the flattened ids."""
    return (torch.rand(ids.shape, generator=rng) * (ids != EOS)).flatten().topk(count).indices


def make_t5(texts, length=32):
    """A tokenizer and an encoder for these texts and their like, trained on them end to end in rows of `length` tokens."""
    tokenizer = train_tokenizer([one_line(text) for text in texts], VOCAB_SIZE)
    ids = np.array([i for row in to_ids(tokenizer, texts) for i in row + [EOS]])
    rows = ids[:len(ids) // length * length].reshape(-1, length)
    if len(rows) < 1000:
        sys.exit(f"--encoder scratch: {len(ids):,} tokens are too little text to learn a language from; add some")
    return tokenizer, train_encoder(rows, len(tokenizer), **RECIPE)


def even_batches(lengths, batch_size, rng):
    """
    All rows once, in batches of about batch_size: rows of like length together, which halves the work, and about as many tokens in
    each, so that a token weighs the same in a short row as in a long one.
    """
    batches = []
    for group in torch.randperm(len(lengths), generator=rng).split(16 * batch_size):
        group = group[lengths[group].argsort()]
        tokens, count = lengths[group].cumsum(0), -(-len(group) // batch_size)
        batches += group.split(((tokens - 1) * count // tokens[-1]).bincount().tolist())
    return [batches[i] for i in torch.randperm(len(batches), generator=rng)]


def train_scorer(rows, vocab_size, steps, width=256, layers=4, heads=4, batch_size=64, lr=1.5e-3, seed=0):
    """
    A small GPT-2 of the same tokens, for eval.py. It learns rows up to their first </s>; every other batch has one before the
    row too, so that it can both score a bare row and begin one by itself.
    """
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    rows = torch.from_numpy(rows.astype(np.int64))
    L = rows.shape[1]
    rows = torch.cat([torch.full((len(rows), 1), EOS), rows], dim=1)[:, :L]  # </s> text </s> ...
    lengths = ((rows[:, 1:] != EOS).sum(1) + 2).clamp(max=L)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=L, n_embd=width, n_layer=layers, n_head=heads,
                                       bos_token_id=EOS, eos_token_id=EOS, attn_pdrop=0.0))
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 100, (steps - s) / (0.6 * steps)))
    batches = []
    for step in (bar := progress(range(steps), desc="training the scorer")):
        batches = batches or even_batches(lengths, batch_size, rng)
        where = batches.pop()
        ids = rows[where, step % 2:lengths[where].max()]
        scored = torch.arange(1, ids.shape[1]) + step % 2 < lengths[where, None]
        with autocast(torch.device("cpu")):
            logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits[scored].float(), ids[:, 1:][scored])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return model.eval()
