# Few steps: students of the default run, of 16, 8, 4, 2 and 1 steps, each from the one before; it needs out/docs.
from config.docs import *  # noqa: F403

name = "docs_pd"         # of the runs out/docs_pd_16, ..., out/docs_pd_1
teacher = "out/docs"
student_steps = 16       # half of it, and twice the teacher's steps, in each further round
teacher_substeps = 2     # the paper has 4, of a teacher that takes 64 steps; here it takes 32
rounds = 5

steps = 200
lr = 0.002
warmup = 20

sample_gamma = 0.0       # few steps are too long for noise in between; less of it at the start serves likely text
sample_gamma_power = 0.0
sample_temperature = 0.58
sample_w = 2.5
