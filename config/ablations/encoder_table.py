# Embeddings: the encoder's token table alone, no context. First: python config/ablations/encoders.py
from config.ablations.base import *  # noqa: F403

name = "encoder_table"
data = "data/ablations/table"
encoder = "data/ablations/table/t5"
