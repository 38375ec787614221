"""Experts: a layer has several MLPs, of which a router chooses some for each position."""
