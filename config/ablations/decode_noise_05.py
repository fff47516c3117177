# The decoder learns under noise of scale 0.5 instead of 2.
from config.ablations.base import *  # noqa: F403

name = "decode_noise_05"
decode_noise = 0.5
