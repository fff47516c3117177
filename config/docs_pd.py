# Few steps: students of the default run, of 16, 8, 4, 2 and 1 steps, each from the one before; it needs out/docs. Not tuned yet.
from config.docs import *  # noqa: F403

name = "docs_pd"         # of the runs out/docs_pd_16, ..., out/docs_pd_1
teacher = "out/docs"
student_steps = 16       # half of it, and twice the teacher's steps, in each further round
teacher_substeps = 4
rounds = 5

steps = 300
lr = 0.002
warmup = 30

sample_gamma = 1.5       # the paper's for its students: the base's gamma is meant for 32 steps
sample_gamma_power = 0.0
sample_temperature = 1.0
sample_w = 2.5
