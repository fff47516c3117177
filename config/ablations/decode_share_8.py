# 80 % of the rows decode instead of 20 %.
from config.ablations.base import *  # noqa: F403

name = "decode_share_8"
decode_share = 0.8
self_cond_share = 0.1
