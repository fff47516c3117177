# The network predicts the noise instead of x.
from config.ablations.base import *  # noqa: F403

name = "predict_eps"
predict = "eps"
