# The network predicts v instead of x.
from config.ablations.base import *  # noqa: F403

name = "predict_v"
predict = "v"
