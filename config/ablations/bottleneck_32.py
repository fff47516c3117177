# A bottleneck of 32 channels instead of 64, as many as the embeddings have.
from config.ablations.base import *  # noqa: F403

name = "bottleneck_32"
bottleneck = 32
