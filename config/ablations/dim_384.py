# Twice the network: 384 channels.
from config.ablations.base import *  # noqa: F403

name = "dim_384"
dim = 384
heads = 6
