# A bottleneck of 16 channels instead of 64, as many as the embeddings have.
from config.ablations.base import *  # noqa: F403

name = "bottleneck_16"
bottleneck = 16
