"""A tokenizer, a small T5 encoder and a small scorer from scratch, where none can be downloaded."""
import sys
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config,
                          T5EncoderModel)

from data.encoder import EOS, one_line, to_ids
from runtime import autocast, progress

SPECIAL = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
PAD, UNK, MASK = 0, 2, 3  # and EOS, 1
RECIPE = dict(width=64, layers=4, heads=4, steps=1800, batch_size=128)
CODE = [(r"[_*]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " "), (r"(?<=\w)\(", " ( "),
        (r" +", " "), (r"^ | $", "")]
CPU = torch.device("cpu")

def train_tokenizer(texts, vocab_size=4096):
    """Returns a T5-style unigram tokenizer learned from texts."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False))
    return wrap(tokenizer)

def word_tokenizer(texts, least, code=False):
    """
    Returns a tokenizer of the words and punctuation marks that occur at least `least` times.

    code  also splits names: `load_image(path)` is read as `load image ( path)`
    """
    normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(pattern), space) for pattern, space in CODE if code])
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")])
    count = Counter(token for text in texts
                    for token, _ in pre.pre_tokenize_str(normalizer.normalize_str(text)))
    kept = [token for n, token in sorted((-n, token) for token, n in count.items()) if -n >= least]
    vocabulary = {token: i for i, token in enumerate(SPECIAL + kept)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre
    return wrap(tokenizer)

def wrap(tokenizer):
    """Returns a tokenizer of the tokenizers library as one of transformers."""
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
                                   unk_token="<unk>", clean_up_tokenization_spaces=False)

def word_vectors(rows, vocab_size, width):
    """
    Returns vectors (vocab_size, width) of deviation 1, in which tokens of like use are close.

    They are the leading singular vectors of the positive pointwise mutual information of tokens
    that stand side by side in rows (n, L), or with one token between them.
    """
    together = torch.zeros(vocab_size, vocab_size)
    for apart in (1, 2):
        pairs = rows[:, :-apart].flatten(), rows[:, apart:].flatten()
        together.index_put_(pairs, torch.full(pairs[0].shape, 1 / apart), accumulate=True)
    together += together.T.clone()
    by_chance = together.sum(0) * together.sum(1, keepdim=True) / together.sum()
    information = (together / by_chance.clamp(min=1e-9)).clamp(min=1).log()
    U, S, _ = torch.svd_lowrank(information, q=min(width, vocab_size))
    vectors = F.pad(U * S.sqrt(), (0, width - len(S)))
    return vectors / vectors.std().clamp(min=1e-6)

def train_encoder(rows, vocab_size, width, layers, heads, steps, batch_size=64, lr=0.01,
                  muon_lr=0.009, mask_share=0.3, noise_weight=0.0):
    """
    Trains a T5EncoderModel to predict masked tokens of rows (n, L).

    noise_weight  weight of a second loss: to predict tokens from x + noise of random strength.
                  Words of like use then lie further apart, and samples have more variety
    """
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    rows = torch.from_numpy(rows.astype(np.int64))
    encoder = T5EncoderModel(T5Config(
        vocab_size=vocab_size, d_model=width, d_kv=width // heads, d_ff=4 * width,
        num_layers=layers, num_heads=heads, dropout_rate=0.0, pad_token_id=PAD, eos_token_id=EOS))
    encoder.shared.weight.data = word_vectors(rows, vocab_size, width)
    head, noisy_head = (torch.nn.Linear(width, vocab_size) for _ in range(2))
    matrices = [param for name, param in encoder.encoder.block.named_parameters()
                if param.ndim == 2 and "bias" not in name]
    rest = [param for module in (encoder, head, noisy_head) for param in module.parameters()
            if all(param is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, muon_lr, weight_decay=0.0),
                  torch.optim.Adam(rest, lr, fused=True)]
    n_masked = max(1, int(mask_share * (rows != EOS).float().mean() * batch_size * rows.shape[1]))
    for step in (bar := progress(range(steps), desc="training the encoder")):
        ids = rows[torch.randint(len(rows), (batch_size,), generator=rng)]
        masked, seen = (draw_tokens(ids, n_masked, rng) for _ in range(2))
        with autocast(CPU):
            hidden = encoder(input_ids=ids.flatten().index_fill(0, masked, MASK).view_as(ids))[0]
            hidden = hidden.flatten(0, 1)                                        # (B L, width)
            loss = F.cross_entropy(head(hidden[masked]).float(), ids.flatten()[masked])
            x = (hidden - hidden.detach().mean(0)).float() / (hidden.detach().float().std(0) + 1e-6)
            strength = torch.rand(n_masked, 1, generator=rng)
            x = x[seen] + strength * torch.randn(n_masked, width, generator=rng)
            noisy = F.cross_entropy(noisy_head(x).float(), ids.flatten()[seen])
        (loss + noise_weight * noisy).backward()
        for optimizer, rate in zip(optimizers, (muon_lr, lr)):
            optimizer.param_groups[0]["lr"] = rate * schedule(step, steps, 200, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            bar.set_postfix_str(f"masked-token loss {loss.item():.3f}", refresh=False)
    return encoder.eval()

def draw_tokens(ids, count, rng):
    """Returns `count` random places of the flattened ids that hold text, not padding."""
    return (torch.rand(ids.shape, generator=rng) * (ids != EOS)).flatten().topk(count).indices

def schedule(step, steps, warmup, cooldown):
    """Returns the learning rate's factor, which rises over warmup steps and falls at the end."""
    return min(1, (step + 1) / warmup, (steps - step) / (cooldown * steps))

def make_t5(texts, length=32, most=20_000_000):
    """Returns a tokenizer and an encoder, trained on `most` characters of texts, an iterator."""
    taken = []
    while most > 0 and (text := next(texts, None)) is not None:
        taken.append(one_line(text))
        most -= len(text)
    tokenizer = train_tokenizer(taken)
    ids = np.array([id for row in to_ids(tokenizer, taken) for id in row + [EOS]])
    rows = ids[:len(ids) // length * length].reshape(-1, length)
    if len(rows) < 1000:
        sys.exit(f"{len(ids):,} tokens are too little text to learn an encoder from; add some")
    return tokenizer, train_encoder(rows, len(tokenizer), **RECIPE)

def train_scorer(rows, vocab_size, steps, width=256, layers=4, heads=4, batch_size=64, lr=1.5e-3):
    """
    Trains a small GPT-2 on rows (n, L) up to their first </s>, for eval.py.

    In every other batch a </s> precedes each row, so it can score a bare row and begin one itself.
    """
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    rows = F.pad(torch.from_numpy(rows.astype(np.int64)), (1, -1), value=EOS)      # </s> text </s>
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab_size, n_positions=rows.shape[1], n_embd=width, n_layer=layers,
        n_head=heads, bos_token_id=EOS, eos_token_id=EOS, attn_pdrop=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.1, fused=True)
    for step in (bar := progress(range(steps), desc="training the scorer")):
        ids = rows[torch.randint(len(rows), (batch_size,), generator=rng), step % 2:]
        scored = (ids[:, 1:] == EOS).cumsum(1) <= (ids[:, 1:] == EOS)
        with autocast(CPU):
            logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits[scored].float(), ids[:, 1:][scored])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr * schedule(step, steps, 100, 0.6)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return model.eval()
