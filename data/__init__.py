"""The way from text to x: tokens (files.py, scratch.py and the prepare.py scripts), rows of them (rows.py), embeddings (encoder.py)."""
EOS = 1  # T5's </s>: it ends a text and fills up its row
