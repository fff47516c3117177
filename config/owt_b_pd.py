# Few steps: students of ELF-B on OpenWebText, of 16, 8, 4, 2 and 1 steps, each from the one before, an epoch each.
from config.owt_b import *  # noqa: F403

name = "owt_b_pd"        # of the runs out/owt_b_pd_16, ..., out/owt_b_pd_1
teacher = "embedded-language-flows/ELF-B-owt-torch"
student_steps = 16       # half of it, and twice the teacher's steps, in each further round
teacher_substeps = 4
rounds = 5

steps = 19_000
warmup = 1_900
sample_w = 2.5
