# Embeddings: a random table, N(0, 1). First: python config/ablations/encoders.py
from config.ablations.base import *  # noqa: F403

name = "encoder_gaussian"
data = "data/ablations/gaussian"
encoder = "data/ablations/gaussian/t5"
