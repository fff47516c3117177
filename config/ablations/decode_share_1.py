# 10 % of the rows decode instead of 20 %; half of the others are self-conditioned, as ever.
from config.ablations.base import *  # noqa: F403

name = "decode_share_1"
decode_share = 0.1
self_cond_share = 0.45
