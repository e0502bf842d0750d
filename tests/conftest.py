"""Eight CPU devices for every test. JAX reads these when it is imported, so they are set before any test module is."""

import os

import hypothesis

os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

# How long an example may take is no test: a machine that does other things as well is slow. A change is judged by the
# same examples as the one before it; new ones are drawn with `--hypothesis-profile=new-examples`.
hypothesis.settings.register_profile("same-examples", deadline=None, derandomize=True)
hypothesis.settings.register_profile("new-examples", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same-examples")


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests of every combination, unless they are asked for: `-m exhaustive`, or by their own names."""
    if "exhaustive" in (config.option.markexpr or "") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


collect_ignore_glob = ["multiprocess/programs/*", "gpu/one_gpu.py"]  # run by ranks; a plugin: not imported
