# 40 % of the rows decode instead of 20 %.
from config.ablations.base import *  # noqa: F403

name = "decode_share_4"
decode_share = 0.4
self_cond_share = 0.3
