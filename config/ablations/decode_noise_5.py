# The decoder learns under noise of scale 5 instead of 2.
from config.ablations.base import *  # noqa: F403

name = "decode_noise_5"
decode_noise = 5.0
