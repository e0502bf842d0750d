"""Eight CPU devices for every test. JAX reads these when it is imported, so they are set before any test module is."""

import os

import hypothesis

os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

# How long an example may take is no test: a machine that does other things as well is slow.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

collect_ignore_glob = ["multiprocess/programs/*"]  # run by ranks, not imported
