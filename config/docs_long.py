# docs.py with more time, for a larger network: 4,000 steps took 36 minutes of one thread beside other runs.
from config.docs import *  # noqa: F403

name = "docs_long"
depth = 6
steps = 4000
