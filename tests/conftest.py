"""What all tests share: Hypothesis profiles, and logical CPU devices to put towers on."""

import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
from hypothesis import HealthCheck, settings

from placement import tower_devices

# quick is for every day; thorough for long runs: HYPOTHESIS_PROFILE=thorough python -m pytest
settings.register_profile("quick", max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=1000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
THOROUGH = PROFILE == "thorough"  # beyond numbers of examples: all cases of a test, and not a part of them
settings.load_profile(PROFILE)

DEVICES = tower_devices(8)


@pytest.fixture(scope="session", autouse=True)
def main_job(request):
    """`python train.py --parallel`. It takes longest, so it begins before the first test and runs beside the others."""
    wanted = any(item.name == "test_the_main_job_learns_mnist" for item in request.session.items)
    if not wanted or request.config.getoption("benchmark_only"):
        yield None
        return
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = ["nice", sys.executable, "train.py", "--parallel"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=root, env=environment, **pipes) as process:
        yield process
        process.kill()
