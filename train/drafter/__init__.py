"""Training of EAGLE drafters and draft heads on images that the target generates."""
