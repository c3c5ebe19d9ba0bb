"""What all tests share: Hypothesis profiles, and logical CPU devices to put towers on."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from hypothesis import HealthCheck, settings

from placement import tower_devices

# quick is for every day; thorough for long runs: HYPOTHESIS_PROFILE=thorough python -m pytest
settings.register_profile("quick", max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

DEVICES = tower_devices(8)
