# The default run with more time, for a larger network.
base = "config/docs.py"
name = "docs_long"
depth = 6
steps = 4000
