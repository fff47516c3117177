# docs.py with more time, for a larger network: about three quarters of an hour on 2 CPU cores.
from config.docs import *  # noqa: F403

name = "docs_long"
dim = 256
heads = 4
steps = 5000
