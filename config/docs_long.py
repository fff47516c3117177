# docs.py with more time, for a larger network: 5,000 steps took 47 minutes of one thread beside other runs.
from config.docs import *  # noqa: F403

name = "docs_long"
depth = 6
steps = 5000
