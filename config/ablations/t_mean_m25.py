# Times nearer to noise: their median is 0.08 instead of 0.18, in training and sampling.
from config.ablations.base import *  # noqa: F403

name = "t_mean_m25"
t_mean = -2.5
