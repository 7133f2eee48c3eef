"""The recovery's cloud and cluster on one machine, wired from the synthesised template."""
