# A quarter of the network: 128 channels.
from config.ablations.base import *  # noqa: F403

name = "dim_128"
dim = 128
