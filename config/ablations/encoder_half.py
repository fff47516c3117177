# Embeddings: an encoder trained for a quarter of its steps. First: python config/ablations/encoders.py
from config.ablations.base import *  # noqa: F403

name = "encoder_half"
data = "data/ablations/half"
encoder = "data/ablations/half/t5"
