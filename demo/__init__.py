"""The main job, end to end on one machine: `python -m demo`, or `make demo`."""
