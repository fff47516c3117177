# Few steps: a student of ELF-B that takes 16 steps, for one epoch. The further rounds are (steps,
# teacher's steps in each) = (8, 8), (4, 16), (2, 32), (1, 64); see docs_pd.py for their commands.
base = "config/owt_b.py"
name = "owt_b_pd_16"
teacher = "embedded-language-flows/ELF-B-owt-torch"
init_from = "embedded-language-flows/ELF-B-owt-torch"
student_steps = 16
teacher_substeps = 4
steps = 19_000
warmup = 1_900
sample_steps = 16
sample_gamma = 2.0    # 1.5 for 8 steps and fewer
sample_w = 2.0        # 2.5
